"""Revoked and terminated: wherever the task is, it does not run (on), and its slot is free at once.

By id: also :class:`TestRevoked` of the acceptance tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.result import AsyncResult
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import unique

CAPACITY = 2
ONE = {"w1@test": {"concurrency": CAPACITY}}
QUICK = ("--without-mingle", "--without-gossip")


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, ONE) as fleet:
        yield fleet
        fleet.assert_takes(CAPACITY)


def states_of(fleet: Fleet, results: list[AsyncResult]) -> set[str]:
    fleet.wait(lambda: all(result.ready() for result in results), 20, "all results")
    return {str(result.state) for result in results}


class TestByStampedHeader:
    """The stamp is all that is known; the ids are not."""

    @pytest.fixture
    def stamp(self) -> dict[str, str]:
        return {"customer": unique("customer")}

    def test_before_it_is_received(self, fleet: Fleet, key: str, stamp: dict[str, str]) -> None:
        fleet.control.revoke_by_stamped_headers(stamp, reply=True)
        other = fleet.tasks["record"].si(key=f"{key}-other")
        other.stamp(customer="somebody else")
        stamped = fleet.tasks["record"].si(key=key)
        stamped.stamp(**stamp)

        results = [stamped.apply_async() for _ in range(3)]

        assert other.apply_async().get(timeout=20) == f"{key}-other"
        assert states_of(fleet, results) == {"REVOKED"}
        assert fleet.runs(f"{key}-other") == fleet.runs(key)

    def test_parked(self, fleet: Fleet, key: str, stamp: dict[str, str]) -> None:
        gate = fleet.fill(CAPACITY)
        stamped = fleet.tasks["record"].si(key=key)
        stamped.stamp(**stamp)
        results = [stamped.apply_async() for _ in range(3)]
        fleet.control.revoke_by_stamped_headers(stamp, reply=True)

        fleet.journal.open_gate(gate)

        assert states_of(fleet, results) == {"REVOKED"}
        assert fleet.runs(key) == []

    def test_waiting_for_its_time(self, fleet: Fleet, key: str, stamp: dict[str, str]) -> None:
        stamped = fleet.tasks["record"].si(key=key)
        stamped.stamp(**stamp)
        results = [stamped.apply_async(countdown=5) for _ in range(3)]
        fleet.wait(lambda: not fleet.depth(fleet.queue), 4, "the worker to have taken them")
        fleet.control.revoke_by_stamped_headers(stamp, reply=True)

        assert states_of(fleet, results) == {"REVOKED"}
        assert fleet.runs(key) == []

    def test_running(self, fleet: Fleet, key: str, stamp: dict[str, str]) -> None:
        stamped = fleet.tasks["hold"].si(gate=key, key=key)
        stamped.stamp(**stamp)
        results = [stamped.apply_async() for _ in range(CAPACITY)]
        fleet.started(key, CAPACITY)

        fleet.control.revoke_by_stamped_headers(stamp, terminate=True, signal="KILL", reply=True)

        assert states_of(fleet, results) == {"REVOKED"}
        fleet.wait(lambda: not fleet.held(), 10, "the slots to be free")
        fleet.journal.note_dead()


def test_many_that_are_terminated_at_once(fleets: Fleets, key: str) -> None:
    """D5, D25: with processes that live for one task, too."""
    args = ("--max-tasks-per-child", "1", *QUICK)
    with fleets.use("redis", {"w1@test": {"concurrency": 4, "args": args}}) as fleet:
        results = [fleet.tasks["hold"].delay(gate=key, key=f"{key}-{number}") for number in range(10)]
        fleet.started(key, 4)

        fleet.control.revoke([result.id for result in results], terminate=True, signal="KILL")

        assert states_of(fleet, results) == {"REVOKED"}
        fleet.wait(lambda: not fleet.held(), 10, "the slots to be free")
        fleet.journal.note_dead()
        assert len(fleet.runs(key)) == 4
        for number in range(10):
            fleet.tasks["record"].delay(key=f"after-{key}-{number}")
        fleet.ended(f"after-{key}", 10)


@pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_handed_over_before_there_is_a_process_for_it(fleets: Fleets, broker_kind: str, key: str) -> None:
    """A pool that has yet to grow: Celery keeps the task, and only looks when it grows whether it is revoked."""
    worker = {"args": ("--autoscale", "2,1", *QUICK), "app": "support.custom_app"}
    # No sweep before the end of the test.
    conf = {"worker_autoscaler": "support.custom_app:PatientAutoscaler", "capacity_sweep_seconds": 30}
    with fleets.own(broker_kind, {"w1@test": worker}, conf) as fleet, Sampler(fleet.registry):
        fleet.tasks["hold"].delay(gate=key, key=f"{key}-runs")
        fleet.started(f"{key}-runs", 1)
        revoked = fleet.tasks["record"].delay(key=f"{key}-revoked")
        fleet.workers["w1@test"].wait_log(rf"{revoked.id}\] received", 10)
        fleet.control.revoke(revoked.id, reply=True)
        assert fleet.held() == {"w1@test": 2}

        fleet.control.autoscale(max=2, min=2, reply=True)

        fleet.wait(lambda: fleet.held() == {"w1@test": 1}, 10, "one slot, of the task that runs")
        assert states_of(fleet, [revoked]) == {"REVOKED"}
        assert fleet.runs(f"{key}-revoked") == []
        fleet.journal.open_gate(key)
        fleet.settle()


@pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_revokes_that_are_kept_over_a_restart(fleets: Fleets, broker_kind: str, key: str, tmp_path: Path) -> None:
    args = ("--statedb", str(tmp_path / "state"), *QUICK)
    with fleets.own(broker_kind, {"w1@test": {"args": args}}) as fleet:
        parked, later = unique("parked"), unique("later")
        fleet.control.revoke([parked, later], reply=True)
        worker = fleet.workers["w1@test"]
        worker.terminate(30)
        # Nobody is there: it waits in its queue, as with plain Celery.
        results = [fleet.tasks["record"].apply_async(kwargs={"key": key}, task_id=parked)]

        worker.close()
        worker.start().wait_ready()

        results.append(fleet.tasks["record"].apply_async(kwargs={"key": key}, task_id=later))
        assert states_of(fleet, results) == {"REVOKED"}
        assert fleet.tasks["record"].delay(key=f"after-{key}").get(timeout=20)
        assert fleet.runs(key) == []
        fleet.settle()


@pytest.mark.parametrize("acks", ["hold", "hold_late"])
def test_a_greenlet_that_is_terminated(fleets: Fleets, key: str, acks: str) -> None:
    with fleets.use("redis", {"w1@test": {"pool": "gevent", "concurrency": 2}}) as fleet:
        results = [fleet.tasks[acks].delay(gate=key, key=f"{key}-{number}") for number in range(4)]
        fleet.started(key, 2)

        fleet.control.revoke([result.id for result in results], terminate=True, reply=True)

        assert states_of(fleet, results) == {"REVOKED"}
        fleet.wait(lambda: not fleet.held(), 10, "the slots to be free")
        assert len(fleet.runs(key)) == 2
        fleet.assert_takes(2)


def test_threads_run_on_and_what_waits_is_revoked(fleets: Fleets, key: str) -> None:
    """As in Celery, a thread cannot be terminated."""
    with fleets.use("redis", {"w1@test": {"pool": "threads", "concurrency": 2}}) as fleet:
        results = [fleet.tasks["hold"].delay(gate=key, key=f"{key}-{number}") for number in range(4)]
        started = {run.id for run in fleet.started(key, 2)}

        fleet.control.revoke([result.id for result in results], reply=True)
        fleet.journal.open_gate(key)

        assert states_of(fleet, [result for result in results if result.id not in started]) == {"REVOKED"}
        fleet.ended(key, 2)
        assert len(fleet.runs(key)) == 2
