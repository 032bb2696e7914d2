"""What a worker had received and not acknowledged when it died: it runs elsewhere within seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import RedisServer
from support.workers import WorkerProcess

from celery_capacity.naming import unacked_name

ONE = {"w1@north": {}}
TWO = {"w1@north": {}, "w2@south": {}}
SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 3,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
}
#: Lapse, sweep, and what a machine that is out of breath takes.
HEALED = 3 + 0.5 + 6
#: Nobody but the worker itself gives back what it held.
NO_LAPSE = {"capacity_lease_seconds": 60, "capacity_lapse_seconds": 120, "capacity_sweep_seconds": 0.5}
BROKERS = ["redis", pytest.param("rabbitmq"), pytest.param("rabbitmq-quorum", marks=pytest.mark.soak)]


@contextmanager
def client_of(fleet: Fleet) -> Iterator[Any]:
    with fleet.app.connection_for_write() as connection:
        yield connection.default_channel.client


def noted(fleet: Fleet, worker: str = "w1@north") -> int:
    """How many delivery tags are in the worker's set."""
    with client_of(fleet) as client:
        return int(client.zcard(unacked_name(fleet.namespace, worker)))


def fill_late(fleet: Fleet, number: int, parked: bool, key: str) -> str:
    """Late-acknowledged tasks that run in w1, pushed to it or fetched by it; returns their gate."""
    if not parked:
        return fleet.fill(number, name="hold_late")
    before = fleet.fill(2)
    for index in range(number):
        fleet.tasks["hold_late"].delay(gate=key, key=f"{key}-{index}")
    fleet.journal.open_gate(before)
    fleet.started(key, number)
    return key


class TestRunningWithLateAcknowledgement:
    @pytest.mark.parametrize("broker_kind", BROKERS)
    @pytest.mark.parametrize("parked", [False, True], ids=["pushed", "parked"])
    def test_runs_again_elsewhere(self, fleets: Fleets, broker_kind: str, parked: bool, key: str) -> None:
        with fleets.own(broker_kind, ONE, SHORT) as fleet, Sampler(fleet.registry):
            gate = fill_late(fleet, 2, parked, key)
            if broker_kind == "redis":
                assert noted(fleet) >= 2 if parked else not noted(fleet)
            fleet.start("w2@south")
            fleet.wait_ready()

            killed_at = time.monotonic()
            fleet.workers["w1@north"].kill()

            runs = fleet.started(gate, 4, 40)
            assert [run.worker for run in runs[2:]] == ["w2@south"] * 2
            assert {run.key for run in runs[2:]} == {run.key for run in runs[:2]}
            assert max(run.start for run in runs) - killed_at < HEALED
            if broker_kind == "redis":
                assert "that worker w1@north had received" in fleet.workers["w2@south"].logs()
            fleet.journal.open_gate(gate)
            fleet.ended(gate, 4)
            fleet.settle()
            fleet.wait(lambda: fleet.view("w1@north") is None, 20, "the dead worker to be forgotten")
            assert set(fleet.journal.executions().values()) <= {1, 2}

    def test_with_a_prefix_of_all_keys(self, fleets: Fleets, key: str) -> None:
        conf = {**SHORT, "broker_transport_options": {"global_keyprefix": "mine:"}}
        with fleets.own("redis", ONE, conf) as fleet, Sampler(fleet.registry):
            pushed = fleet.fill(1, name="hold_late")
            blocker = fleet.fill(1)
            fleet.tasks["hold_late"].delay(gate=key, key=key)
            fleet.journal.open_gate(blocker)
            fleet.started(key, 1)
            fleet.start("w2@south")
            fleet.wait_ready()
            fleet.workers["w1@north"].kill()
            for gate in (pushed, key):
                assert [run.worker for run in fleet.started(gate, 2, 40)] == ["w1@north", "w2@south"]
                fleet.journal.open_gate(gate)
            fleet.settle()
            with client_of(fleet) as client:
                # As it is, without the prefix that the client adds to most of what it is asked.
                assert [name for name in client.keys("*capacity-unacked*") if not name.startswith(b"mine:")] == []


class TestCleanerThatDiesToo:
    @pytest.mark.parametrize("broker_kind", BROKERS)
    def test_another_one_goes_on(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, {**TWO, "w3@east": {}}, SHORT) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(6, name="hold_late")
            fleet.workers["w1@north"].kill()
            others = [fleet.workers["w2@south"], fleet.workers["w3@east"]]

            def cleaner() -> WorkerProcess | None:
                return next((one for one in others if "worker w1@north (epoch" in one.logs()), None)

            fleet.wait(cleaner, 20, "one to clean up")
            cleaner().kill()
            killed_at = time.monotonic()
            fleet.journal.open_gate(gate)

            def returned() -> list[Any]:
                return [run for run in fleet.runs(gate) if run.outcome == "returned"]

            fleet.wait(lambda: len({run.key for run in returned()}) == 6, 40, "all to have run to their end")
            assert max(run.start for run in returned()) - killed_at < HEALED
            fleet.settle(20)
            fleet.wait(lambda: len(fleet.views()) == 1, 20, "the dead workers to be forgotten")
            assert max(fleet.journal.executions().values()) <= 3


class TestReceivedAndNotBegun:
    def test_pushed_and_handed_to_a_pool_that_does_not_answer(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", TWO, SHORT) as fleet, Sampler(fleet.registry):
            dead = fleet.workers["w1@north"]
            for pid in dead.children():
                os.kill(pid, signal.SIGSTOP)
            for number in range(4):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            assert {run.worker for run in fleet.ended(key, 2)} == {"w2@south"}
            fleet.wait(lambda: fleet.left() == {"unacked": 2}, 10, "the others to have been received")
            killed_at = time.monotonic()
            dead.kill()
            runs = fleet.ended(key, 4, 40)
            assert {run.worker for run in runs} == {"w2@south"}
            assert max(run.start for run in runs) - killed_at < HEALED
            assert set(fleet.journal.executions().values()) == {1}
            fleet.settle()

    def test_fetched_and_not_due(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", ONE, SHORT) as fleet, Sampler(fleet.registry):
            for number in range(5):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, countdown=12)
            sent_at = time.monotonic()
            fleet.wait(lambda: fleet.left() == {"unacked": 5}, 10, "all to have been received")
            fleet.start("w2@south")
            fleet.wait_ready()
            fleet.workers["w1@north"].kill()
            runs = fleet.ended(key, 5, 40)
            assert {run.worker for run in runs} == {"w2@south"}
            assert min(run.start for run in runs) - sent_at > 11.5
            assert max(run.start for run in runs) - sent_at < 12 + HEALED
            assert set(fleet.journal.executions().values()) == {1}
            fleet.settle()

    def test_sent_to_one_that_is_as_good_as_dead(self, fleets: Fleets, tmp_path: Path, key: str) -> None:
        """Its connection still waits for messages: what the broker answers reaches nobody."""
        with (
            RedisServer(tmp_path) as server,
            fleets.own("redis", ONE, SHORT, broker=server.url) as fleet,
            Sampler(fleet.registry),
            server.client() as client,
        ):
            fleet.wait(lambda: client.info("clients")["blocked_clients"] == 1, 20, "it to wait for messages")
            fleet.workers["w1@north"].stop()
            for name in ("record", "record_late"):
                fleet.tasks[name].delay(key=f"{key}-{name}")
            assert fleet.held() == {"w1@north": 2}
            fleet.wait(lambda: client.info("clients")["blocked_clients"] == 0, 20, "the broker to have answered")
            fleet.workers["w1@north"].kill()

            fleet.start("w2@south")

            assert {run.worker for run in fleet.ended(key, 2, 40)} == {"w2@south"}
            fleet.settle()
            assert fleet.journal.executions_by_key() == {f"{key}-record": 1, f"{key}-record_late": 1}


class TestRestartUnderTheSameName:
    @pytest.mark.parametrize("parked", [False, True], ids=["pushed", "parked"])
    def test_it_does_not_wait_for_a_sweep(self, fleets: Fleets, parked: bool, key: str) -> None:
        with fleets.own("redis", ONE, NO_LAPSE) as fleet:
            gate = fill_late(fleet, 2, parked, key)
            worker = fleet.workers["w1@north"]
            worker.kill()
            worker.restart(warm=False)
            ready_at = time.monotonic()
            runs = fleet.started(gate, 4, 30)
            assert max(run.start for run in runs) - ready_at < 5
            assert "that worker w1@north had received" in worker.logs()
            fleet.journal.open_gate(gate)
            fleet.ended(gate, 4)
            fleet.settle()
            assert {run.key: n for run in runs if (n := fleet.journal.executions_by_key()[run.key]) != 2} == {}
            fleet.assert_takes(2)

    @pytest.mark.parametrize("broker_kind", BROKERS)
    def test_five_times_under_load(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        # Some are killed each time; they are not to be taken for the cause.
        conf = {**SHORT, "capacity_max_deliveries": 20}
        with fleets.own(broker_kind, TWO, conf) as fleet, Sampler(fleet.registry):
            worker: WorkerProcess = fleet.workers["w1@north"]
            sent = 0
            for _ in range(5):
                for _ in range(16):
                    fleet.tasks["record_late"].delay(key=f"{key}-{sent}", seconds=0.2)
                    sent += 1
                fleet.wait(lambda: fleet.journal.running(worker="w1@north"), 30, "w1 to run something")
                worker.restart(warm=False)
            keys = {f"{key}-{number}" for number in range(sent)}

            def done() -> set[str]:
                return {run.key for run in fleet.runs(key) if run.outcome == "returned"}

            fleet.wait(lambda: keys <= done(), 60, "every task to have run to its end")
            fleet.settle()
            fleet.assert_takes(4)
            # What ran when it was killed, or had just ended, and no more, has run twice.
            killed = [run for run in fleet.runs(key) if run.outcome == "gone"]
            twice = sum(fleet.journal.executions_by_key()[name] - 1 for name in keys)
            assert twice <= len(killed) + 10


class TestTags:
    def test_those_that_are_acknowledged_are_removed(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", ONE, SHORT) as fleet, Sampler(fleet.registry):
            # One that stays, among those that come and go.
            gate = fleet.fill(1, name="hold_late")
            # All of them wait in the lot before the first is fetched.
            blocker = fleet.fill(1)
            for number in range(300):
                name = "record_late" if number % 2 else "record"
                fleet.tasks[name].delay(key=f"{key}-{number}")
            fleet.journal.open_gate(blocker)
            most = 0
            while len(fleet.runs(key)) < 300:
                most = max(most, noted(fleet))
                time.sleep(0.02)
            assert 0 < most <= 10
            fleet.journal.open_gate(gate)
            fleet.settle()
            assert noted(fleet) <= 5

    def test_many_that_are_not_acknowledged_stay(self, fleets: Fleets, key: str) -> None:
        """Also those that were fetched long ago."""
        with fleets.own("redis", ONE, SHORT) as fleet, Sampler(fleet.registry):
            for number in range(150):
                fleet.tasks["record"].apply_async(kwargs={"key": f"later-{key}-{number}"}, countdown=600)
            fleet.wait(lambda: fleet.left() == {"unacked": 150}, 20, "all to have been received")
            gate = fleet.fill(2)
            for number in range(200):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            fleet.journal.open_gate(gate)
            fleet.ended(key, 200, 60)
            assert 150 <= noted(fleet) <= 230
            fleet.start("w2@south")
            fleet.wait_ready()
            fleet.workers["w1@north"].kill()
            fleet.wait(lambda: noted(fleet, "w2@south") >= 150, 30, "w2 to have received them")
            assert fleet.left() == {"unacked": 150}
            assert noted(fleet) == 0


class TestOneThatComesBack:
    def test_after_three_times_the_lapse(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", ONE, SHORT) as fleet, Sampler(fleet.registry):
            # Received and not due.  They are fetched only by a worker that has a free slot.
            for number in range(8):
                fleet.tasks["record"].apply_async(kwargs={"key": f"later-{key}-{number}"}, countdown=18)
            fleet.wait(lambda: fleet.left() == {"unacked": 8}, 10, "all to have been received")
            fleet.start("w2@south")
            fleet.wait_ready()
            gate = fleet.fill(4, name="hold_late")
            zombie = fleet.workers["w1@north"]
            zombie.stop()
            fleet.wait(lambda: "that worker w1@north had received" in fleet.workers["w2@south"].logs(), 15, "a sweep")
            time.sleep(9 - 3)
            fleet.journal.open_gate(gate)
            fleet.ended(gate, 4, 30)
            zombie.cont()
            zombie.wait_log("registering again", 30)
            fleet.wait(lambda: len([v for v in fleet.views() if v.capacity]) == 2, 20, "it to be back")
            fleet.ended(f"later-{key}", 8, 40)
            fleet.settle()
            assert zombie.logs().count("is dropped here: while w1@north was away") == 8
            executions = fleet.journal.executions_by_key()
            assert {executions[f"later-{key}-{number}"] for number in range(8)} == {1}
            assert {executions[f"{gate}-{number}"] for number in range(4)} <= {1, 2}
            fleet.assert_takes(4)
            fleet.settle()
