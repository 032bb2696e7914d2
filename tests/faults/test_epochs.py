"""Workers whose word is old, names that are used again, and leases that must or must not end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import RedisServer

from celery_capacity.models import WorkerState

ONE: dict[str, dict[str, Any]] = {"w1@north": {}}
TWO: dict[str, dict[str, Any]] = {**ONE, "w2@south": {}}
SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 3,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
}


def counters(fleet: Fleet) -> dict[str, int]:
    return dict(fleet.registry.overview().counters)


def held_for(fleet: Fleet) -> int:
    """Slots held for the fleet's queue."""
    return sum(queue.held for queue in fleet.registry.overview().queues if queue.name == fleet.queue)


def test_a_zombie_says_what_it_likes(fleets: Fleets, key: str) -> None:
    """With a limit of one: for the new epoch, no more than one is ever held."""
    with fleets.own("redis", TWO, SHORT) as fleet, Sampler(fleet.registry):
        fleet.registry.set_limit(fleet.queue, 1)
        gate = fleet.fill(1, node="north")
        zombie = fleet.workers["w1@north"]
        # Only its main process: its task goes on.
        zombie.stop(children=False)
        second = fleet.fill(1, node="south")
        assert fleet.held() == {"w2@south": 1}
        fleet.wait(lambda: counters(fleet).get("workers_lapsed") == 1, 20, "the lapse")
        # Three times the lapse in all; the task of the old epoch ends in it.
        time.sleep(3 * 3 - 3)
        fleet.journal.open_gate(gate)
        fleet.ended(gate, 1)
        for number in range(3):
            fleet.tasks["record"].delay(key=f"{key}-{number}")

        zombie.cont(children=False)

        zombie.wait_log("registering again", 30)
        fleet.wait(lambda: len([v for v in fleet.views() if v.capacity]) == 2, 30, "it to be back by itself")
        assert fleet.held() == {"w2@south": 1}
        assert fleet.runs(key) == [], "its old slot was not given back once more"
        fleet.journal.open_gate(second)
        fleet.ended(key, 3)
        assert fleet.max_parallel(key) == 1
        fleet.registry.set_limit(fleet.queue, None)
        fleet.wait(lambda: not fleet.held(), 20, "all slots to be free")
        fleet.assert_takes(4)


def test_killed_and_three_started_at_once_with_a_limit_of_one(fleets: Fleets, key: str) -> None:
    """E2, E4, D7, H10."""
    with fleets.own("redis", ONE, SHORT) as fleet, Sampler(fleet.registry):
        fleet.registry.set_limit(fleet.queue, 1)
        first = fleet.fill(1)
        for number in range(6):
            fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.2)
        worker = fleet.workers["w1@north"]
        worker.kill()
        worker.close()
        worker.start()
        fleet.start("w2@south")
        fleet.start("w3@east")
        assert len(fleet.ended(key, 6, 60)) == 6
        assert fleet.max_parallel(key) == 1
        assert [run.outcome for run in fleet.runs(first)] == ["gone"]
        fleet.wait(lambda: not fleet.held(), 20, "all slots to be free")
        fleet.wait_ready()
        assert sorted(view.name for view in fleet.views()) == ["w1@north", "w2@south", "w3@east"]
        gate = fleet.fill(1)
        other = fleet.runs(gate)[0].worker
        name = next(name for name in fleet.workers if name != other)
        fleet.workers[name].restart(warm=False)
        # What is shown is what runs.
        assert held_for(fleet) == len(fleet.journal.running()) == 1
        fleet.journal.open_gate(gate)
        fleet.settle()


def test_a_task_that_takes_longer_than_the_lapse(fleets: Fleets, key: str) -> None:
    """E11, E12: also one that keeps the main loop, and the interpreter, to itself."""
    workers = {"w1@north": {"pool": "solo", "concurrency": 1}, "w2@south": {}}
    with fleets.own("redis", workers, SHORT) as fleet, Sampler(fleet.registry):
        fleet.registry.set_limit(fleet.queue, 2)
        fleet.tasks["spin"].apply_async(kwargs={"seconds": 8.0, "key": f"{key}-spin"}, node="north")
        gate = fleet.fill(1, node="south")
        for number in range(3):
            fleet.tasks["record"].delay(key=f"{key}-waits-{number}")
        (run,) = fleet.ended(f"{key}-spin", 1, 60)
        assert run.end - run.start > 2 * 3
        fleet.journal.open_gate(gate)
        fleet.ended(f"{key}-waits", 3)
        assert fleet.max_parallel() == 2
        fleet.settle()
        assert "workers_lapsed" not in counters(fleet)
        assert "slots_freed_by_lapse" not in counters(fleet)
        assert set(fleet.journal.executions().values()) == {1}


def test_slots_that_come_and_go_between_two_beats(fleets: Fleets, key: str) -> None:
    """E13: no heartbeat takes one that was just given back for missing, nor one that was just taken for a leak."""
    conf = {**SHORT, "capacity_lease_seconds": 1.0, "capacity_heartbeat_seconds": 0.05}
    with fleets.own("redis", ONE, conf) as fleet, Sampler(fleet.registry):
        for number in range(300):
            fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.01)
        assert {run.outcome for run in fleet.ended(key, 300, 90)} == {"returned"}
        fleet.settle()
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
        assert set(counters(fleet)) & {"healed", "restored", "swept", "stale_refused", "lapsed"} == set()
        assert set(fleet.journal.executions().values()) == {1}


def test_the_registry_is_away_for_longer_than_the_lapse(fleets: Fleets, tmp_path: Path, key: str) -> None:
    """E14, D12: the task ends well, and its slot is there again and given back."""
    conf = {**SHORT, "capacity_registry_timeout_seconds": 0.5, "capacity_registry_retry_seconds": 0.5}
    with (
        RedisServer(tmp_path / "registry", persistence=True) as server,
        fleets.own("redis", ONE, conf, registry=server.url) as fleet,
    ):
        gate = fleet.fill(1)
        server.stop()
        time.sleep(2 * 3)
        server.start()
        # Its heartbeat renews the lease, or a sweep comes first and it registers again: its slot is there either way.
        fleet.wait(lambda: [v.state for v in fleet.views()] == [WorkerState.READY], 30, "the worker to be back")
        fleet.wait(lambda: fleet.held() == {"w1@north": 1}, 20, "its slot to be there again")
        fleet.journal.open_gate(gate)
        assert [run.outcome for run in fleet.ended(gate, 1)] == ["returned"]
        fleet.wait(lambda: not fleet.held(), 20, "it to be given back")
        fleet.assert_takes(2)
        fleet.settle()


@pytest.mark.soak
@pytest.mark.parametrize("broker_kind", ["redis", "rabbitmq"])
def test_killed_twenty_times_in_a_row(fleets: Fleets, broker_kind: str, key: str) -> None:
    """D16: under load, at once under its name; nothing drifts, and no late-acknowledged task is lost."""
    conf = {**SHORT, "capacity_max_deliveries": 0}
    with fleets.own(broker_kind, TWO, conf) as fleet, Sampler(fleet.registry):
        worker, sent = fleet.workers["w1@north"], 0
        for _ in range(20):
            for _ in range(10):
                fleet.tasks["record_late"].delay(key=f"{key}-{sent}", seconds=0.2)
                sent += 1
            fleet.wait(lambda: fleet.journal.running(worker="w1@north"), 60, "w1 to run something")
            worker.restart(warm=False)
        keys = {f"{key}-{number}" for number in range(sent)}
        fleet.wait(
            lambda: {run.key for run in fleet.runs(key) if run.outcome == "returned"} == keys, 90, "every task's end"
        )
        fleet.settle(20)
        assert fleet.held() == {}
        fleet.assert_takes(4)
        fleet.settle()
