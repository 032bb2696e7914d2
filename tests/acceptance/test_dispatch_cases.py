"""Where a dispatch goes: turns, pins, refusals, and what is to be left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.common import Broadcast
from support.fleet import Fleet, Fleets
from support.servers import unique
from support.tasks_app import BROADCAST_ENV
from support.workers import worker_environment

from celery_capacity import CapacityExhausted
from celery_capacity.errors import ConfigurationError
from celery_capacity.models import Reason

THREE = {"w1@north": {}, "w2@south": {}, "w3@west": {}}
TOTAL = 6


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, THREE) as fleet:
        yield fleet


class TestRotation:
    def test_idle_workers_take_turns(self, fleet: Fleet, key: str) -> None:
        for number in range(9):
            fleet.tasks["record"].delay(key=f"{key}-{number}").get(timeout=20)
            fleet.wait(lambda: not fleet.held(), 10, "the slot to be given back")

        turns = [run.worker for run in fleet.ended(key, 9)]

        assert Counter(turns) == {"w1@north": 3, "w2@south": 3, "w3@west": 3}
        assert turns[:3] == turns[3:6] == turns[6:]

    def test_what_has_not_started_counts(self, fleet: Fleet, key: str) -> None:
        for number in range(TOTAL):
            fleet.tasks["hold"].delay(gate=key, key=f"{key}-{number}")

        assert fleet.held() == {"w1@north": 2, "w2@south": 2, "w3@west": 2}
        fleet.started(key, TOTAL)
        fleet.journal.open_gate(key)
        assert Counter(run.worker for run in fleet.ended(key, TOTAL)) == dict.fromkeys(THREE, 2)

    def test_a_full_worker_is_skipped_and_the_others_keep_their_turns(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(2, node="south")
        for number in range(6):
            fleet.tasks["record"].delay(key=f"{key}-{number}").get(timeout=20)
            fleet.wait(lambda: fleet.held() == {"w2@south": 2}, 10, "the slot to be given back")
        fleet.journal.open_gate(gate)

        turns = [run.worker for run in fleet.ended(key, 6)]
        assert Counter(turns) == {"w1@north": 3, "w3@west": 3}
        assert turns[0::2] == turns[0:1] * 3


class TestPins:
    def test_by_an_option_of_the_call(self, fleet: Fleet, key: str) -> None:
        for number in range(6):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": 0.1}, node="west")
        assert {run.worker for run in fleet.ended(key, 6)} == {"w3@west"}

    def test_by_a_signature(self, fleet: Fleet, key: str) -> None:
        signature = fleet.tasks["record"].si(key=key).set(node="north")
        for _ in range(3):
            signature.delay().get(timeout=20)
        assert {run.worker for run in fleet.ended(key, 3)} == {"w1@north"}

    def test_by_an_attribute_of_the_task(self, fleet: Fleet, key: str) -> None:
        for number in range(4):
            fleet.tasks["southern"].delay(key=f"{key}-{number}")
        assert {run.worker for run in fleet.ended(key, 4)} == {"w2@south"}

    def test_the_call_wins_over_the_attribute(self, fleet: Fleet, key: str) -> None:
        fleet.tasks["southern"].apply_async(kwargs={"key": key}, node="west")
        assert [run.worker for run in fleet.ended(key, 1)] == ["w3@west"]

    def test_by_task_routes(self, fleet: Fleet, key: str) -> None:
        app = fleet.build_app(conf={"task_routes": {"record": {"node": "south"}}})
        for number in range(4):
            app.tasks["record"].delay(key=f"{key}-{number}")
        assert {run.worker for run in fleet.ended(key, 4)} == {"w2@south"}
        app.close()

    @pytest.mark.parametrize("countdown", [0, 0.3])
    def test_a_retry_stays_on_its_node(self, fleet: Fleet, key: str, countdown: float) -> None:
        for number in range(3):
            fleet.tasks["retry_n"].apply_async((2,), {"countdown": countdown, "key": f"{key}-{number}"}, node="west")
        runs = fleet.ended(key, 9)
        assert {run.worker for run in runs} == {"w3@west"}
        assert sorted(run.retries for run in runs) == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    @pytest.mark.parametrize("countdown", [0.05, 1])
    def test_with_a_countdown(self, fleet: Fleet, key: str, countdown: float) -> None:
        # It is fetched by whoever looks first, and that may be before or after it is due.
        for number in range(12):
            node = ("north", "south", "west")[number % 3]
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, node=node, countdown=countdown)
        nodes = {int(run.key.rpartition("-")[2]) % 3: run.worker for run in fleet.ended(key, 12)}
        assert nodes == {0: "w1@north", 1: "w2@south", 2: "w3@west"}
        assert len({(int(run.key.rpartition("-")[2]) % 3, run.worker) for run in fleet.runs(key)}) == 3

    def test_more_than_the_node_can_take_wait_for_it(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(2, node="south")
        for number in range(5):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, node="south")
        fleet.tasks["record"].delay(key=f"free-{key}").get(timeout=20)
        assert fleet.depth(fleet.lot("south")) == 5
        assert fleet.runs(key) == []

        fleet.journal.open_gate(gate)

        assert {run.worker for run in fleet.ended(key, 5)} == {"w2@south"}

    def test_of_what_was_sent_before_there_was_a_worker(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", {}) as fleet:
            for number in range(3):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, node="south")
            fleet.start("w1@north")
            fleet.wait(lambda: fleet.depth(fleet.lot("south")) == 3, 30, "the tasks to be in the lot of their node")
            fleet.start("w2@south")
            assert {run.worker for run in fleet.ended(key, 3, 60)} == {"w2@south"}
            fleet.settle()

    def test_a_node_without_a_worker_keeps_its_tasks_until_there_is_one(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", {"w1@north": {}}) as fleet:
            for number in range(3):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, node="east")
            fleet.tasks["record"].delay(key=f"free-{key}").get(timeout=20)
            assert fleet.depth(fleet.lot("east")) == 3

            fleet.start("w2@east")

            assert {run.worker for run in fleet.ended(key, 3, 60)} == {"w2@east"}
            fleet.settle()

    @pytest.mark.parametrize("options", [{"node": 5}, {"node": ""}, {"when_full": "explode"}])
    def test_nonsense_is_refused(self, fleet: Fleet, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            fleet.tasks["record"].apply_async(**options)


class TestRefusal:
    def test_nothing_is_published_and_the_census_says_why(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(TOTAL)

        with pytest.raises(CapacityExhausted) as caught:
            fleet.tasks["record"].apply_async(kwargs={"key": key}, when_full="refuse")

        census = caught.value.census
        assert {view.name: (view.reason, view.held, view.capacity) for view in census.workers} == dict.fromkeys(
            THREE, (Reason.FULL, 2, 2)
        )
        assert caught.value.retry_after > 0
        assert fleet.depth(fleet.queue) == 0
        fleet.journal.open_gate(gate)
        fleet.ended(gate, TOTAL)
        fleet.settle()
        assert fleet.runs(key) == []

    def test_of_a_pinned_task(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(2, node="south")

        with pytest.raises(CapacityExhausted) as caught:
            fleet.tasks["record"].apply_async(kwargs={"key": key}, node="south", when_full="refuse")
        reasons = {view.name: view.reason for view in caught.value.census.workers}
        assert reasons == {"w1@north": Reason.OTHER_NODE, "w2@south": Reason.FULL, "w3@west": Reason.OTHER_NODE}
        assert fleet.depth(fleet.lot("south")) == 0
        assert fleet.tasks["record"].apply_async(kwargs={"key": key}, when_full="refuse").get(timeout=20) == key

        fleet.journal.open_gate(gate)

    def test_by_the_setting_of_the_queue(self, fleet: Fleet, key: str) -> None:
        app = fleet.build_app(conf={"capacity_when_full": {fleet.queue: "refuse"}})
        gate = fleet.fill(TOTAL)
        with pytest.raises(CapacityExhausted):
            app.tasks["record"].delay(key=key)
        # The call's own word wins.
        app.tasks["record"].apply_async(kwargs={"key": key}, when_full="park")
        fleet.journal.open_gate(gate)
        assert len(fleet.ended(key, 1)) == 1
        app.close()

    def test_a_fan_as_wide_as_the_fleet_is_never_refused(self, fleet: Fleet, key: str) -> None:
        for turn in range(10):
            for number in range(TOTAL):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{turn}-{number}"}, when_full="refuse")
            fleet.ended(f"{key}-{turn}-", TOTAL)
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be given back")

    def test_no_worker_of_the_queue(self, fleet: Fleet) -> None:
        with pytest.raises(CapacityExhausted, match="no worker for queue"):
            fleet.tasks["record"].apply_async(queue=unique("unserved"), when_full="refuse")


def test_without_any_worker_it_is_plain_celery(fleets: Fleets, key: str) -> None:
    with fleets.own("redis", {}) as fleet:
        fleet.tasks["record"].apply_async(kwargs={"key": key})
        fleet.tasks["record"].apply_async(kwargs={"key": key}, when_full="refuse")
        assert fleet.depth(fleet.queue) == 2


class TestSending:
    def test_by_name(self, fleet: Fleet, key: str) -> None:
        fleet.app.send_task("record", kwargs={"key": key})
        fleet.app.send_task("record", kwargs={"key": key}, queue=fleet.queue, node="west")
        assert len(fleet.ended(key, 2)) == 2
        assert "w3@west" in {run.worker for run in fleet.runs(key)}

    def test_by_name_is_refused_as_well(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(TOTAL)
        with pytest.raises(CapacityExhausted):
            fleet.app.send_task("record", kwargs={"key": key}, when_full="refuse")
        fleet.journal.open_gate(gate)

    def test_by_a_task_with_an_apply_async_of_its_own(self, fleet: Fleet, key: str) -> None:
        task = fleet.tasks["overriding"]
        assert task.apply_async(kwargs={"key": key}, node="south").get(timeout=20) == "acme"
        assert [run.worker for run in fleet.ended(key, 1)] == ["w2@south"]

    def test_eagerly(self, fleet: Fleet, key: str) -> None:
        app = fleet.build_app(conf={"task_always_eager": True, "capacity_when_full": "refuse"})
        gate = fleet.fill(TOTAL)
        # Inline, at a full fleet, without a word to the registry.
        assert app.tasks["add"].delay(1, 2).get() == 3
        assert sum(fleet.held().values()) == TOTAL
        with pytest.warns(UserWarning, match="always_eager"), pytest.raises(CapacityExhausted):
            app.send_task("record", kwargs={"key": key})
        fleet.journal.open_gate(gate)
        app.close()

    def test_by_beat(self, fleets: Fleets, key: str, tmp_path: Path) -> None:
        schedule = {"often": {"task": "record", "schedule": 1.0, "kwargs": {"key": key}, "options": {"node": "south"}}}
        with fleets.use("redis", THREE) as fleet:
            env = worker_environment(
                broker=fleet.broker, conf={**fleet.conf, "beat_schedule": schedule}, plugin=True, journal=fleet.journal
            )
            argv = [sys.executable, "-m", "celery", "-A", "support.tasks_app", "beat", "-s", str(tmp_path / "beat")]
            with (tmp_path / "beat.log").open("wb") as log:
                beat = subprocess.Popen(argv, env={**os.environ, **env}, stdout=log, stderr=log)
            try:
                runs = fleet.ended(key, 2)
            finally:
                beat.terminate()
                beat.wait(20)
            assert {run.worker for run in runs} == {"w2@south"}


class TestLeftAlone:
    def test_an_explicit_queue_wins_over_a_router(self, fleet: Fleet, key: str) -> None:
        other = unique("other")
        app = fleet.build_app(conf={"task_routes": [lambda name, *a, **kw: {"queue": fleet.queue}]})
        app.tasks["record"].apply_async(kwargs={"key": key}, queue=other)
        assert fleet.depth(other) == 1
        assert fleet.held() == {}
        with app.connection_for_write() as connection:
            connection.default_channel.queue_delete(other)
        app.close()

    def test_an_exchange_and_a_routing_key_win_over_a_router(self, fleet: Fleet, key: str) -> None:
        name = unique("elsewhere")
        queue = Queue(name, Exchange(name), routing_key="a")
        app = fleet.build_app(conf={"task_routes": [lambda name, *a, **kw: {"queue": fleet.queue}]})
        with app.connection_for_write() as connection:
            queue(connection.default_channel).declare()
            app.tasks["record"].apply_async(kwargs={"key": key}, exchange=name, routing_key="a")
            assert fleet.depth(name) == 1
            assert fleet.held() == {}
            queue(connection.default_channel).delete()
        app.close()

    def test_a_queue_that_is_not_managed(self, fleets: Fleets, key: str) -> None:
        plain = unique("plain")
        queues = {"w1@test": {"queues": ["managed", plain]}}
        conf = {"task_default_queue": "managed", "capacity_queues": ["*", "!plain*"]}
        with fleets.own("redis", queues, conf) as fleet:
            for number in range(6):
                fleet.tasks["hold"].apply_async(kwargs={"gate": key, "key": f"{key}-{number}"}, queue=plain)
            fleet.started(key, 2)
            # Celery brings these in as it always did; but they, too, take slots.
            assert fleet.held() == {"w1@test": 2}
            with pytest.raises(CapacityExhausted):
                fleet.tasks["record"].apply_async(queue="managed", when_full="refuse")
            fleet.journal.open_gate(key)
            assert len(fleet.ended(key, 6)) == 6
            assert fleet.max_parallel(key) == 2
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert fleet.complaints() == []

    # Not on Redis: there, Kombu 5.7 puts what a fresh producer broadcasts into a list, without the plugin, too.
    @pytest.mark.parametrize("broker_kind", ["rabbitmq"])
    def test_a_broadcast_reaches_every_worker(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        name = unique("broadcast")
        workers = {"w1@north": {}, "w2@south": {}}
        with fleets.own(broker_kind, {}) as fleet:
            for worker in workers:
                fleet.start(worker, env={BROADCAST_ENV: name}, queues=[fleet.queue, name])
            fleet.wait_ready()
            fleet.app.amqp.queues.add(Broadcast(name, routing_key=name))
            fleet.tasks["record"].apply_async(kwargs={"key": key}, queue=name)
            runs = fleet.ended(key, 2)
            assert sorted(run.worker for run in runs) == sorted(workers)
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert fleet.complaints() == []


class TestDeclarations:
    """N5, N17: whoever declares a queue first, the other side does it with the same arguments."""

    @pytest.mark.parametrize("broker_kind", ["rabbitmq", "rabbitmq-quorum"])
    def test_the_producer_first(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, {}) as fleet:
            fleet.tasks["record"].apply_async(kwargs={"key": key})
            fleet.tasks["record"].apply_async(kwargs={"key": key}, countdown=1)
            fleet.start("w1@test")
            fleet.wait_ready()
            fleet.tasks["record"].apply_async(kwargs={"key": key})
            fleet.tasks["record"].apply_async(kwargs={"key": key}, countdown=1)
            assert len(fleet.ended(key, 4)) == 4
            fleet.settle()
            assert "PRECONDITION" not in fleet.workers["w1@test"].logs()

    def test_a_queue_with_arguments_that_a_router_chose(self, fleets: Fleets, key: str) -> None:
        with fleets.own("rabbitmq", {}) as fleet:
            queue = Queue(unique("routed"), queue_arguments={"x-max-priority": 7})
            app = fleet.build_app(conf={"task_routes": [lambda name, *a, **kw: {"queue": queue}]})
            app.tasks["record"].apply_async(kwargs={"key": key})
            assert fleet.depth(queue.name) == 1
            with app.connection_for_write() as connection:
                # RabbitMQ would refuse other arguments.
                queue(connection.default_channel).declare()
            app.close()


@pytest.mark.parametrize("broker_kind", ["rabbitmq-quorum", "redis"])
def test_a_countdown_with_a_routed_queue_holds_no_slot_until_it_is_due(
    fleets: Fleets, broker_kind: str, key: str
) -> None:
    with fleets.use(broker_kind, {"w1@test": {}}) as fleet:
        app = fleet.build_app(conf={"task_routes": {"hold": {"queue": fleet.queue}}})
        for number in range(3):
            app.tasks["hold"].apply_async(kwargs={"gate": key, "key": f"{key}-{number}"}, countdown=2)
        # Both slots are there for others until then.
        fleet.assert_takes(2)
        fleet.started(key, 2)
        assert fleet.held() == {"w1@test": 2}
        fleet.journal.open_gate(key)
        assert len(fleet.ended(key, 3)) == 3
        assert fleet.max_parallel(key) == 2
        app.close()
