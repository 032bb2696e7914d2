"""No worker hoards: what it cannot run now stays in the broker, where an idle one can take it.

The numbers of the cases are those of the collection of public reports that the project keeps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import unique

TWO_OF_ONE = {"w1@north": {"concurrency": 1}, "w2@south": {"concurrency": 1}}
MATRIX = ["redis", "rabbitmq-quorum", pytest.param("rabbitmq", marks=pytest.mark.soak)]
#: Seconds; on an idle machine it is a few hundredths.
SOON = 3.0


@pytest.fixture(params=MATRIX)
def pair(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    # Celery's own prefetch would take in many more.
    with fleets.use(request.param, TWO_OF_ONE, {"worker_prefetch_multiplier": 8}) as fleet:
        yield fleet


class TestABusyWorkerHoldsNothingBack:
    def test_short_tasks_go_to_the_idle_worker(self, pair: Fleet, key: str) -> None:
        """A1."""
        gate = pair.fill(1, node="north")
        sent = time.monotonic()
        for number in range(3):
            pair.tasks["record"].delay(key=f"{key}-{number}", seconds=0.1)

        runs = pair.ended(key, 3, 10)

        assert {run.worker for run in runs} == {"w2@south"}
        assert max(run.start for run in runs) - sent < SOON
        inspect = pair.control.inspect(destination=["w1@north"], timeout=2)
        assert [task["kwargs"]["gate"] for task in inspect.active()["w1@north"]] == [gate]
        assert inspect.reserved() == {"w1@north": []}
        pair.journal.open_gate(gate)

    def test_a_task_is_running_or_in_the_broker(self, pair: Fleet, key: str) -> None:
        """A17."""
        gate = pair.fill(2)
        for number in range(4):
            pair.tasks["record"].delay(key=f"{key}-{number}")

        inspect = pair.control.inspect(timeout=2)
        assert inspect.reserved() == {"w1@north": [], "w2@south": []}
        assert {name: len(tasks) for name, tasks in inspect.active().items()} == {"w1@north": 1, "w2@south": 1}
        assert pair.depth(pair.queue) == 4
        pair.journal.open_gate(gate)
        assert len(pair.ended(key, 4)) == 4

    def test_another_worker_takes_what_waits(self, fleets: Fleets, key: str) -> None:
        """A14: also of a broker that would give everything to the first who asks."""
        with fleets.own("redis", {"w1@north": {"concurrency": 1}}) as fleet:
            gate = fleet.fill(1)
            for number in range(20):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            assert fleet.depth(fleet.queue) == 20

            fleet.start("w2@south", concurrency=1)

            assert {run.worker for run in fleet.ended(key, 20)} == {"w2@south"}
            fleet.journal.open_gate(gate)
            fleet.settle()


def test_as_many_tasks_as_processes_run_at_once(fleets: Fleets, key: str) -> None:
    """A16: four workers of one, four tasks."""
    workers = {f"w{number}@test": {"concurrency": 1} for number in range(1, 5)}
    with fleets.use("rabbitmq", workers, {"worker_prefetch_multiplier": 4}) as fleet:
        for turn in range(3):
            gate = f"{key}-{turn}"
            for number in range(4):
                fleet.tasks["hold"].delay(gate=gate, key=f"{gate}-{number}")
            assert Counter(run.worker for run in fleet.started(gate, 4)) == dict.fromkeys(workers, 1)
            fleet.journal.open_gate(gate)
            fleet.ended(gate, 4)
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be given back")


@pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_the_pool_is_full_as_long_as_there_is_enough(fleets: Fleets, broker_kind: str, key: str) -> None:
    """A6: running = capacity in every sample, until there are fewer tasks than that."""
    capacity = 8
    worker = {"w1@test": {"pool": "threads", "concurrency": capacity}}
    with fleets.use(broker_kind, worker) as fleet:
        for number in range(6 * capacity):
            fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.5)
        runs = sorted(fleet.ended(key, 6 * capacity, 60), key=lambda run: run.start)
        assert fleet.max_parallel(key) == capacity
        # A slot is never long without a task: each run but the first ones starts as another ends.
        ends = sorted(run.end for run in runs)
        gaps = [run.start - ends[index] for index, run in enumerate(runs[capacity:])]
        assert sorted(gaps)[len(gaps) // 2] < 0.25
        assert max(gaps) < SOON


def test_an_endless_task_jams_nothing(fleets: Fleets, key: str) -> None:
    """A7: neither does a task wait behind it in the pipe of its process."""
    with fleets.use("redis", {"w1@test": {"concurrency": 4}}) as fleet:
        gate = fleet.fill(1)
        for number in range(200):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        assert len(fleet.ended(key, 200, 30)) == 200
        fleet.wait(lambda: fleet.held() == {"w1@test": 1}, 10, "only the endless one to hold a slot")
        fleet.journal.open_gate(gate)


@pytest.mark.parametrize("broker_kind", ["redis", "filesystem"])
def test_tasks_with_a_countdown_do_not_pile_up(fleets: Fleets, broker_kind: str, key: str, tmp_path: Path) -> None:
    """A9: due and not finished are never more than the capacity."""
    conf, servers = {}, {}
    if broker_kind == "filesystem":
        (tmp_path / "control").mkdir()
        folders = dict.fromkeys(("data_folder_in", "data_folder_out"), str(tmp_path))
        conf = {"broker_transport_options": {**folders, "control_folder": str(tmp_path / "control")}}
        servers = {"broker": "filesystem://"}
    with fleets.own(broker_kind, {"w1@test": {"concurrency": 2}}, conf, **servers) as fleet, Sampler(fleet.registry):
        eta = datetime.now(timezone.utc) + timedelta(seconds=2)
        # A transport without an event loop has Celery's own timer bring them, a second later at worst.
        # So there they are few, and long enough to be together.
        count, seconds = (60, 0.02) if broker_kind == "redis" else (12, 0.3)
        for number in range(count):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": seconds}, eta=eta)

        assert len(fleet.ended(key, count, 60)) == count
        assert set(fleet.journal.executions().values()) == {1}
        assert fleet.max_parallel() == 2
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be given back")
        fleet.assert_takes(2)
        assert fleet.complaints() == []


@pytest.mark.parametrize("broker_kind", MATRIX)
def test_what_a_restarted_worker_had_not_begun_is_taken_by_another(fleets: Fleets, broker_kind: str, key: str) -> None:
    """A13: only what runs is out of the others' sight."""
    workers = {"w1@north": {"concurrency": 2}, "w2@south": {"concurrency": 1}}
    with fleets.own(broker_kind, workers) as fleet, Sampler(fleet.registry):
        gate = fleet.fill(2, node="north")
        busy = fleet.fill(1, node="south")
        for number in range(8):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        assert fleet.depth(fleet.queue) == 8

        fleet.workers["w1@north"].terminate()
        fleet.journal.open_gate(busy)

        assert {run.worker for run in fleet.ended(key, 8, 20)} == {"w2@south"}
        assert len(fleet.runs(gate)) == 2
        fleet.journal.open_gate(gate)
        fleet.workers["w1@north"].wait(30)
        assert [run.outcome for run in fleet.ended(gate, 2)] == ["returned"] * 2
        fleet.settle()


class TestTurnsOfQueues:
    """I1, I2: a worker with several queues."""

    def test_a_long_queue_does_not_starve_a_short_one(self, fleets: Fleets, key: str) -> None:
        queues = [unique(name) for name in ("empty", "long", "short")]
        with fleets.own("redis", {"w1@test": {"concurrency": 1, "queues": queues}}) as fleet:
            gate = fleet.fill(1, queue=queues[0])
            for number in range(40):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-long-{number}"}, queue=queues[1])
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-short"}, queue=queues[2])
            fleet.journal.open_gate(gate)
            order = [run.key for run in fleet.ended(key, 41)]
            assert order.index(f"{key}-short") <= 2

    def test_two_queues_are_served_alike(self, fleets: Fleets, key: str) -> None:
        queues = [unique(name) for name in ("a", "b")]
        with fleets.own("redis", {"w1@test": {"concurrency": 1, "queues": queues}}) as fleet:
            gate = fleet.fill(1, queue=queues[0])
            for number in range(30):
                for queue in queues:
                    fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{queue[0]}-{number}"}, queue=queue)
            fleet.journal.open_gate(gate)
            first = [run.key.split("-")[2] for run in fleet.ended(key, 60)][:30]
            assert abs(first.count("a") - first.count("b")) <= 2

    def test_a_pinned_task_does_not_wait_for_all_that_is_not_pinned(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", {"w1@north": {"concurrency": 1}}) as fleet:
            gate = fleet.fill(1)
            for number in range(100):
                fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.02)
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-pinned"}, node="north")
            fleet.journal.open_gate(gate)
            order = [run.key for run in fleet.ended(key, 101)]
            assert order.index(f"{key}-pinned") <= 30

    def test_one_queue_is_served_in_its_order(self, fleets: Fleets, key: str) -> None:
        with fleets.use("redis", {"w1@test": {"concurrency": 1}}) as fleet:
            gate = fleet.fill(1)
            for number in range(20):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            fleet.journal.open_gate(gate)
            assert [run.key for run in fleet.ended(key, 20)] == [f"{key}-{number}" for number in range(20)]


class TestPriorities:
    """I5, I6."""

    def test_an_urgent_task_is_next(self, fleets: Fleets, key: str) -> None:
        conf = {"broker_transport_options": {"queue_order_strategy": "priority"}}
        with fleets.own("redis", {"w1@test": {"concurrency": 1}}, conf) as fleet:
            gate = fleet.fill(1)
            # On Redis the lowest number comes first.
            for number in range(5):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-low-{number}"}, priority=9)
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-high"}, priority=0)
            fleet.journal.open_gate(gate)
            assert next(run.key for run in fleet.ended(key, 6)) == f"{key}-high"
