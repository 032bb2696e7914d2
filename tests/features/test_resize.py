"""Pools that grow and shrink, with an autoscaler and without, and workers that end in a given time."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler

from celery_capacity.worker.agent import WorkerAgent

QUICK = ("--without-mingle", "--without-gossip")
#: Seconds after which Celery's autoscaler lets processes go; 30 by default.
KEEPALIVE = {"AUTOSCALE_KEEPALIVE": "1"}
SHORT = {"capacity_lease_seconds": 1.5, "capacity_lapse_seconds": 3, "capacity_sweep_seconds": 0.5}


def scaled(most: int, least: int, pool: str = "prefork") -> dict[str, Any]:
    return {"args": ("--autoscale", f"{most},{least}", *QUICK), "env": KEEPALIVE, "pool": pool}


def stats(fleet: Fleet, worker: str) -> dict[str, Any]:
    answer = fleet.control.inspect([worker], timeout=10, limit=1).stats()
    return dict(answer[worker])


def processes(fleet: Fleet, worker: str = "w1@north") -> int:
    return int(stats(fleet, worker)["autoscaler"]["current"])


def offers(fleet: Fleet, capacity: int | None, worker: str = "w1@north", limit: float = 10.0) -> None:
    fleet.wait(lambda: getattr(fleet.view(worker), "capacity", 0) == capacity, limit, f"a capacity of {capacity}")


class TestAutoscale:
    @pytest.mark.parametrize("pool", ["prefork", pytest.param("gevent", marks=pytest.mark.soak)])
    def test_it_grows_to_its_maximum_and_shrinks_again(self, fleets: Fleets, pool: str, key: str) -> None:
        """J1, J8: the maximum is offered throughout; no task is killed when processes go."""
        with fleets.own("redis", {"w1@north": scaled(4, 1, pool)}, {"task_acks_late": True}) as fleet:
            seen: set[int | None] = set()
            with Sampler(fleet.registry) as sampler:
                for turn in range(2):
                    gate = fleet.fill(4)
                    seen |= {view.capacity for view in fleet.views()}
                    # One goes on while the others go.
                    long = fleet.fill(0)
                    fleet.journal.open_gate(gate)
                    fleet.tasks["hold"].delay(gate=long, key=f"{long}-0")
                    fleet.started(long, 1)
                    fleet.wait(lambda: processes(fleet) <= 2, 30, "the pool to shrink")
                    seen |= {view.capacity for view in fleet.views()}
                    fleet.journal.open_gate(long)
                    runs = [*fleet.ended(gate, 4), *fleet.ended(long, 1)]
                    assert [run.outcome for run in runs] == ["returned"] * 5, turn
            assert seen == {4}
            assert sampler.most_held == {"w1@north": 4}
            assert set(fleet.journal.executions().values()) == {1}
            fleet.settle()

    def test_its_maximum_is_lowered_while_all_are_busy(self, fleets: Fleets, key: str) -> None:
        """J9b: nothing is killed, and nothing is added until there is room."""
        with fleets.own("rabbitmq", {"w1@north": scaled(6, 3)}, SHORT) as fleet, Sampler(fleet.registry):
            gates = [fleet.fill(3) for _ in range(2)]
            told = fleet.control.autoscale(4, 3, destination=["w1@north"], reply=True, timeout=10, limit=1)
            assert told == [{"w1@north": {"ok": "autoscale now max=4 min=3"}}]
            offers(fleet, 4, limit=3)
            assert fleet.held() == {"w1@north": 6}
            for number in range(3):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            fleet.journal.open_gate(gates[0])
            assert [run.outcome for run in fleet.ended(gates[0], 3)] == ["returned"] * 3
            # Three run: there is room for one more at a time.
            assert len(fleet.ended(key, 3)) == 3
            assert fleet.max_parallel(key) == 1
            fleet.journal.open_gate(gates[1])
            assert [run.outcome for run in fleet.ended(gates[1], 3)] == ["returned"] * 3
            fleet.assert_takes(4)

            told = fleet.control.pool_grow(1, destination=["w1@north"], reply=True, timeout=10, limit=1)
            assert "not supported with autoscale" in told[0]["w1@north"]["error"]
            fleet.control.autoscale(5, 3, destination=["w1@north"], reply=True, timeout=10, limit=1)
            offers(fleet, 5, limit=3)
            fleet.assert_takes(5)
            fleet.settle()


class TestPoolResize:
    @pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq-quorum", marks=pytest.mark.soak)])
    def test_grown_shrunk_and_shrunk_to_nothing(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        """J2, J3: what is offered is what there is; at 0 the others take it all."""
        conf = {**SHORT, "worker_prefetch_multiplier": 2}
        workers = {"w1@north": {}, "w2@south": {}}
        with fleets.own(broker_kind, workers, conf) as fleet, Sampler(fleet.registry):
            control: dict[str, Any] = {"destination": ["w1@north"], "reply": True, "timeout": 10, "limit": 1}
            fleet.control.pool_grow(2, **control)
            offers(fleet, 4)
            fleet.assert_takes(6)
            fleet.wait(lambda: not fleet.held(), 10, "all processes to be idle")
            for left in (3, 2, 1, 0):
                fleet.wait(lambda n=left + 1: len(stats(fleet, "w1@north")["pool"]["processes"]) == n, 15, "it to go")
                fleet.control.pool_shrink(1, **control)
                offers(fleet, left)
            for number in range(20):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            assert {run.worker for run in fleet.ended(key, 20)} == {"w2@south"}
            assert fleet.depth(fleet.own_queue("w1@north")) == 0
            fleet.control.pool_grow(1, **control)
            offers(fleet, 1)
            fleet.assert_takes(3)
            fleet.settle()

    def test_threads(self, fleets: Fleets, key: str) -> None:
        """Celery's thread pool cannot be resized: it says so, and offers what it has."""
        with fleets.own("redis", {"w1@north": {"pool": "threads"}}, SHORT) as fleet, Sampler(fleet.registry):
            fleet.control.pool_grow(2, reply=True, timeout=10, limit=1)
            fleet.assert_takes(fleet.views()[0].capacity or 0)
            fleet.settle()


class TestShutdown:
    @pytest.mark.parametrize("broker_kind", ["rabbitmq", pytest.param("redis", marks=pytest.mark.soak)])
    def test_soft(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        """J6: what ends in time is done, the rest is given back once, and no slot is left."""
        conf = {**SHORT, "worker_soft_shutdown_timeout": 3.0, "worker_enable_soft_shutdown_on_idle": True}
        with fleets.own(broker_kind, {"w1@north": {}}, conf) as fleet, Sampler(fleet.registry):
            fleet.tasks["record_late"].delay(key=f"short-{key}", seconds=1.5)
            fleet.tasks["hold_late"].delay(gate=key, key=f"long-{key}")
            fleet.tasks["record"].delay(key=f"waits-{key}")
            fleet.started("", 2)
            worker = fleet.workers["w1@north"]

            worker.quit()
            worker.wait(30)
            fleet.journal.note_dead()

            assert [run.outcome for run in fleet.runs(f"short-{key}")] == ["returned"]
            assert len(fleet.runs(f"long-{key}")) == 1
            assert fleet.complaints() == []
            assert fleet.runs(f"waits-{key}") == []
            fleet.wait(lambda: fleet.depth(fleet.queue) == 2, 10, "the rest to be back")
            assert fleet.held() == {}
            fleet.journal.open_gate(key)
            fleet.start("w2@south")
            assert len(fleet.ended(f"waits-{key}", 1, 40)) == 1
            cut_off, again = fleet.ended(f"long-{key}", 2)
            assert (cut_off.outcome != "returned", again.outcome) == (True, "returned")
            fleet.settle()


def test_processes_that_are_killed_at_random(fleets: Fleets, key: str) -> None:
    """J12: with late acknowledgement each task is done, and no slot is lost."""
    conf = {**SHORT, "task_acks_late": True, "task_reject_on_worker_lost": True, "capacity_max_deliveries": 0}
    with fleets.own("redis", {"w1@north": {"concurrency": 3}}, conf) as fleet, Sampler(fleet.registry):
        for number in range(80):
            fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.1)
        for turn in range(6):
            fleet.ended(key, 8 * (turn + 1))
            running = fleet.wait(lambda: fleet.journal.running(), 20, "a run")
            os.kill(running[0].pid, signal.SIGKILL)
            fleet.journal.note_gone([running[0].pid], at=time.monotonic())

        def done() -> set[str]:
            return {run.key for run in fleet.runs(key) if run.outcome == "returned"}

        fleet.wait(lambda: len(done()) == 80, 60, "all of them to be done")
        fleet.journal.note_dead()
        fleet.assert_takes(3)
        fleet.settle()


def test_a_pool_that_is_shrunk_below_nothing_has_no_slots() -> None:
    """Celery counts processes that are about to go a second time."""
    controller = SimpleNamespace(pool=SimpleNamespace(num_processes=-4))
    assert WorkerAgent.size(SimpleNamespace(controller=controller)) == 0  # type: ignore[arg-type]
