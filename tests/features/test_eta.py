"""Tasks with an eta or a countdown, those that wait for their rate, and those that expire.

The numbers of the cases are those of the collection of public reports that the project keeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.workers import worker_environment

from celery_capacity.naming import later_lot

ONE = {"w1@north": {}}
TWO_OF_ONE = {"w1@north": {"concurrency": 1}, "w2@south": {"concurrency": 1}}
BROKERS = ["redis", "rabbitmq", pytest.param("rabbitmq-quorum", marks=pytest.mark.soak)]
#: One of the two for each test; the other one takes its time.
REDIS_FIRST = ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)]
RABBITMQ_FIRST = ["rabbitmq", pytest.param("redis", marks=pytest.mark.soak)]
LIMITED = {"capacity_eta_limit": 3, "capacity_poll_seconds": 0.2}
#: Seconds; on an idle machine it is a few hundredths.
SOON = 3.0
HOUR = 3600


@pytest.fixture(params=BROKERS)
def pair(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, TWO_OF_ONE) as fleet:
        yield fleet


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


class TestWhenItIsDue:
    def test_it_runs_where_there_is_room(self, pair: Fleet, key: str) -> None:
        """Whoever holds it until then."""
        gate = pair.fill(1, node="north")
        for number in range(6):
            pair.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, countdown=1)
        assert {run.worker for run in pair.ended(key, 6)} == {"w2@south"}
        pair.journal.open_gate(gate)

    def test_it_waits_for_room_on_a_full_fleet_and_then_runs(self, pair: Fleet, key: str) -> None:
        for number in range(4):
            pair.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, countdown=1)
        gate = pair.fill(2)
        due = time.monotonic() + 1.2
        pair.wait(lambda: time.monotonic() > due, 5, "them to be due")
        assert pair.runs(key) == []
        opened = time.monotonic()
        pair.journal.open_gate(gate)
        runs = pair.ended(key, 4)
        assert max(run.start for run in runs) - opened < SOON
        assert {pair.journal.executions_by_key()[run.key] for run in runs} == {1}

    def test_never_before(self, pair: Fleet, key: str) -> None:
        sent = time.monotonic()
        pair.tasks["record"].apply_async(kwargs={"key": f"{key}-later"}, countdown=2)
        assert pair.tasks["record"].delay(key=f"{key}-now").get(timeout=10)
        later = pair.ended(f"{key}-later", 1)[0]
        now = pair.ended(f"{key}-now", 1)[0]
        assert 1.9 <= later.start - sent < 2 + SOON
        assert now.start - sent < 1.9

    def test_a_pin_is_kept(self, pair: Fleet, key: str) -> None:
        for number in range(4):
            pair.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, countdown=1, node="south")
        assert {run.worker for run in pair.ended(key, 4)} == {"w2@south"}

    def test_in_the_time_zone_of_the_app(self, pair: Fleet, key: str) -> None:
        app = pair.build_app(conf={"timezone": "Asia/Tokyo"})
        sent = time.monotonic()
        tokyo = ZoneInfo("Asia/Tokyo")
        app.tasks["record"].apply_async(kwargs={"key": f"{key}-aware"}, eta=in_seconds(1.5).astimezone(tokyo))
        app.tasks["record"].apply_async(kwargs={"key": f"{key}-countdown"}, countdown=1.5)
        app.tasks["record"].apply_async(kwargs={"key": f"{key}-past"}, eta=in_seconds(-60).astimezone(tokyo))
        starts = {run.key.rpartition("-")[2]: run.start - sent for run in pair.ended(key, 3)}
        assert starts["past"] < 1.4
        assert all(1.4 <= starts[name] < 1.5 + SOON for name in ("aware", "countdown"))
        app.close()


class TestNativeDelayedDelivery:
    def test_a_retry_of_what_came_by_it_is_routed_afresh(self, fleets: Fleets, key: str) -> None:
        """N3: the broker keeps it; its slot is claimed when it comes."""
        # Celery wants a topic exchange for it.
        with fleets.own("rabbitmq-quorum", TWO_OF_ONE, {"task_default_exchange_type": "topic"}) as fleet:
            result = fleet.tasks["retry_n"].apply_async((3,), {"key": key}, countdown=1)
            assert fleet.depth(fleet.queue) == 0
            assert fleet.held() == {}
            assert result.get(timeout=30) == 3
            runs = fleet.ended(key, 4)
            assert {run.queue for run in runs} == {fleet.queue}
            assert fleet.complaints() == []


class TestTheLimit:
    """``capacity_eta_limit``: what is beyond it waits in a lot of its own, and stands in nobody's way."""

    @pytest.mark.parametrize("broker_kind", RABBITMQ_FIRST)
    def test_immediate_tasks_pass(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, ONE, LIMITED) as fleet, Sampler(fleet.registry):
            later = later_lot(fleet.namespace, fleet.queue)
            for number in range(8):
                fleet.tasks["record"].apply_async(kwargs={"key": f"later-{number}"}, countdown=HOUR)
            fleet.wait(lambda: not fleet.depth(fleet.queue), 10, "the queue to be looked through")
            fleet.wait(lambda: fleet.depth(later) in (4, 5), 10, "five to wait in their lot")

            gate = fleet.fill(2)
            for number in range(4):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            plain = fleet.build_app(plugin=False)
            plain.tasks["record"].delay(key=f"{key}-plain")
            fleet.journal.open_gate(gate)
            assert len(fleet.ended(key, 5, 10)) == 5
            plain.close()

            # A warm stop loses none of them.
            fleet.workers["w1@north"].terminate(60)
            assert sum(fleet.left().values()) == 8
            assert fleet.complaints() == []

    @pytest.mark.parametrize("broker_kind", REDIS_FIRST)
    def test_all_of_them_run_once_and_not_before_their_time(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, ONE, LIMITED) as fleet, Sampler(fleet.registry):
            sent = time.monotonic()
            # The first ones are far away: what is due earlier must not wait for them.
            for number in range(3):
                fleet.tasks["record"].apply_async(kwargs={"key": f"far-{number}"}, countdown=HOUR)
            for number in range(12):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, countdown=3)
            runs = fleet.ended(key, 12, 20)
            assert {fleet.journal.executions_by_key()[run.key] for run in runs} == {1}
            starts = [run.start - sent for run in runs]
            assert min(starts) >= 2.9
            assert max(starts) < 3 + SOON
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert fleet.complaints() == []

    def test_those_that_wait_for_their_rate_count_too(self, fleets: Fleets, key: str) -> None:
        """B10, with more of them than a worker may hold."""
        with fleets.own("redis", ONE, LIMITED) as fleet, Sampler(fleet.registry):
            for number in range(10):
                fleet.tasks["rated"].delay(key=f"rated-{key}-{number}")
            fleet.ended(f"rated-{key}", 1)
            gate = fleet.fill(2)
            fleet.tasks["record"].delay(key=key)
            fleet.journal.open_gate(gate)
            assert len(fleet.ended(key, 1, 10)) == 1
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert len(fleet.runs(f"rated-{key}")) == 1
            assert fleet.complaints() == []


@pytest.mark.soak
def test_many_that_are_held_cost_no_throughput(fleets: Fleets, key: str) -> None:
    """B5."""
    count = 100

    def rate(fleet: Fleet, turn: str) -> float:
        began = time.monotonic()
        for number in range(count):
            fleet.tasks["record"].delay(key=f"{key}-{turn}-{number}")
        runs = fleet.ended(f"{key}-{turn}-", count, 60)
        return count / (max(run.start for run in runs) - began)

    with fleets.own("redis", {"w1@north": {}}) as fleet:
        rate(fleet, "warm")
        baseline = rate(fleet, "plain")
        for number in range(100):
            fleet.tasks["record"].apply_async(kwargs={"key": f"later-{number}"}, countdown=HOUR)
        fleet.wait(lambda: not fleet.depth(fleet.queue), 20, "all of them to be held")
        # What else this machine does can only make it slower.
        rates = [rate(fleet, "held-0")]
        while rates[-1] < 0.9 * baseline and len(rates) < 5:
            rates.append(rate(fleet, f"held-{len(rates)}"))
        assert max(rates) >= 0.9 * baseline


class TestALimitIsNoRate:
    """B11, B12: a limit of a queue is how many run at once, over all workers, from the first task on."""

    def test_over_two_workers(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", {"w1@north": {"concurrency": 4}, "w2@south": {"concurrency": 4}}) as fleet:
            fleet.registry.set_limit(fleet.queue, 1)
            for number in range(10):
                fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.2)
            runs = fleet.ended(key, 10)
            assert fleet.max_parallel(key) == 1
            took = max(run.end for run in runs) - min(run.start for run in runs)
            assert 2.0 <= took < 2.0 + 2 * SOON
            fleet.settle()


class TestExpiry:
    @pytest.mark.parametrize("broker_kind", REDIS_FIRST)
    def test_in_the_own_queue_of_a_worker_that_hangs(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        """N14."""
        with fleets.own(broker_kind, ONE) as fleet, Sampler(fleet.registry):
            fleet.workers["w1@north"].stop()
            sent = time.monotonic()
            for number in range(2):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, expires=1)
            assert fleet.held() == {"w1@north": 2}
            fleet.wait(lambda: time.monotonic() > sent + 1.3, 5, "them to expire")
            fleet.workers["w1@north"].cont()
            assert fleet.tasks["record"].delay(key=f"fresh-{key}").get(timeout=20)
            fleet.wait(lambda: not fleet.held(), 60, "their slots to be free")
            assert fleet.runs(key) == []
            assert fleet.complaints() == []

    def test_before_it_is_due(self, pair: Fleet, key: str) -> None:
        result = pair.tasks["record"].apply_async(kwargs={"key": key}, countdown=2, expires=1)
        late = pair.tasks["record"].apply_async(kwargs={"key": f"late-{key}"}, countdown=2.5)
        assert late.get(timeout=20)
        assert pair.runs(key) == []
        assert result.state in ("REVOKED", "PENDING")

    def test_while_it_is_parked(self, pair: Fleet, key: str) -> None:
        gate = pair.fill(2)
        sent = time.monotonic()
        for number in range(3):
            pair.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, expires=1)
            pair.tasks["record"].apply_async(kwargs={"key": f"{key}-pinned-{number}"}, expires=1, node="south")
        pair.wait(lambda: time.monotonic() > sent + 1.3, 5, "them to expire")
        pair.journal.open_gate(gate)
        assert pair.tasks["record"].delay(key=f"fresh-{key}").get(timeout=20)
        pair.wait(lambda: not pair.left(), 10, "all of them to be gone")
        assert pair.runs(key) == []

    @pytest.mark.parametrize("broker_kind", REDIS_FIRST)
    def test_many_while_there_is_no_worker(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        """N15."""
        with fleets.own(broker_kind, {}) as fleet:
            for number in range(150):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, expires=1)
            sent = time.monotonic()
            fleet.wait(lambda: time.monotonic() > sent + 1.2, 5, "them to expire")
            fleet.start("w1@north")
            fleet.wait_ready()
            with Sampler(fleet.registry):
                sent = time.monotonic()
                fleet.tasks["record"].delay(key=f"fresh-{key}")
                assert fleet.ended(f"fresh-{key}", 1)[0].start - sent < SOON
                assert fleet.runs(key) == []
                fleet.settle()


class TestBeat:
    def test_a_run_that_is_refused_is_left_out_and_beat_goes_on(self, fleets: Fleets, key: str, tmp_path: Path) -> None:
        entry = {"task": "record", "schedule": 0.5, "kwargs": {"key": key}, "options": {"when_full": "refuse"}}
        with fleets.use("redis", TWO_OF_ONE) as fleet:
            gate = fleet.fill(2)
            env = worker_environment(
                broker=fleet.broker,
                conf={**fleet.conf, "beat_schedule": {"often": entry}, "beat_max_loop_interval": 1},
                plugin=True,
                journal=fleet.journal,
            )
            argv = [sys.executable, "-m", "celery", "-A", "support.tasks_app", "beat", "-s", str(tmp_path / "beat")]
            log = tmp_path / "beat.log"
            with log.open("wb") as file:
                beat = subprocess.Popen(argv, env={**os.environ, **env}, stdout=file, stderr=file)
            try:
                fleet.wait(lambda: log.read_text().count("refused (full)") >= 2, 30, "beat to be refused")
                assert fleet.depth(fleet.queue) == 0
                fleet.journal.open_gate(gate)
                fleet.ended(key, 2)
            finally:
                beat.terminate()
                beat.wait(20)
