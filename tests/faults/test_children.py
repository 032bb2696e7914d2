"""Processes of a pool that die, or are replaced: their slots are free in the moment the pool knows."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from support.fleet import Fleets
from support.sampling import Sampler

from celery_capacity.naming import dead_letter_queue

ONE: dict[str, dict[str, Any]] = {"w1@north": {}}
QUICK = ("--without-mingle", "--without-gossip")
#: No sweep is to help: what is given back is given back at the end of its task.
NO_SWEEP = {"capacity_lease_seconds": 20, "capacity_lapse_seconds": 120, "capacity_sweep_seconds": 60}


@pytest.mark.parametrize(
    ("args", "tasks"),
    [
        pytest.param(("--max-tasks-per-child", "3"), 40, id="max_tasks_per_child"),
        # In KiB; no process is ever below it.
        pytest.param(("--max-memory-per-child", "1000"), 20, id="max_memory_per_child"),
    ],
)
def test_processes_that_are_replaced(fleets: Fleets, key: str, args: tuple[str, ...], tasks: int) -> None:
    """D25."""
    with fleets.own("redis", {"w1@north": {"args": (*QUICK, *args)}}, NO_SWEEP) as fleet, Sampler(fleet.registry):
        for number in range(tasks):
            fleet.tasks["record_late" if number % 2 else "record"].delay(key=f"{key}-{number}")
        runs = fleet.ended(key, tasks, 80)
        assert len({run.pid for run in runs}) >= tasks / 3
        fleet.settle()
        assert set(fleet.journal.executions().values()) == {1}
        fleet.assert_takes(2)
        fleet.settle()


class TestKilled:
    def test_ten_are_terminated_in_a_second(self, fleets: Fleets, key: str) -> None:
        """D1, D2, D5: some run, some wait in the queue, some are not due."""
        with fleets.own("redis", {"w1@north": {"concurrency": 4}}, NO_SWEEP) as fleet, Sampler(fleet.registry):
            running = [fleet.tasks["record"].delay(key=f"run-{key}-{n}", seconds=60) for n in range(4)]
            fleet.started(f"run-{key}", 4)
            waiting = [fleet.tasks["record"].delay(key=f"wait-{key}-{n}") for n in range(6)]
            later = [
                fleet.tasks["record"].apply_async(kwargs={"key": f"later-{key}-{n}"}, countdown=3) for n in range(2)
            ]
            for result in [*waiting, *later, *running]:
                fleet.control.revoke(result.id, terminate=True, signal="SIGKILL")
            for number in range(10):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            assert len(fleet.ended(key, 10, 40)) == 10
            fleet.journal.note_dead()
            fleet.settle(20)
            assert [run.key for run in fleet.runs("") if run.key.startswith(("wait-", "later-"))] == []
            assert {run.outcome for run in fleet.runs(f"run-{key}")} == {"gone"}
            fleet.assert_takes(4)
            fleet.settle()

    def test_by_the_hard_time_limit(self, fleets: Fleets, key: str) -> None:
        """D6."""
        with fleets.own("redis", ONE, NO_SWEEP) as fleet, Sampler(fleet.registry):
            for number in range(6):
                fleet.tasks["hard"].delay(key=f"{key}-{number}")
            fleet.started(key, 6, 60)
            fleet.wait(lambda: not fleet.held(), 20, "the last one to be killed")
            fleet.journal.note_dead()
            fleet.settle()
            assert fleet.max_parallel(key) == 2
            # Some find the time to say that they were told to exit.
            assert {run.outcome for run in fleet.runs(key)} <= {"gone", "SystemExit"}
            fleet.assert_takes(2)
            fleet.settle()

    def test_as_if_out_of_memory(self, fleets: Fleets, key: str) -> None:
        """J12: with late acknowledgement and reject_on_worker_lost, none is lost."""
        conf = {**NO_SWEEP, "task_reject_on_worker_lost": True, "capacity_max_deliveries": 0}
        with fleets.own("redis", ONE, conf) as fleet, Sampler(fleet.registry):
            for number in range(30):
                fleet.tasks["record_late"].delay(key=f"{key}-{number}", seconds=0.1)
            killed = 0
            while killed < 6:
                run = fleet.wait(lambda: next(iter(fleet.journal.running()), None), 30, "a task to run")
                os.kill(run.pid, signal.SIGKILL)
                fleet.wait(lambda pid=run.pid: not os.path.exists(f"/proc/{pid}"), 20, "the process to be reaped")
                fleet.journal.note_dead()
                killed += 1

            def returned() -> set[str]:
                return {run.key for run in fleet.runs(key) if run.outcome == "returned"}

            fleet.wait(lambda: len(returned()) == 30, 60, "every task to have run to its end")
            fleet.settle()
            assert fleet.depth(dead_letter_queue(fleet.namespace, fleet.queue)) == 0
            fleet.assert_takes(2)
            fleet.settle()
