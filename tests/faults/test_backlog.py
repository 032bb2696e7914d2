"""Many parked tasks and two workers: what they hold does not grow with what waits, and nor does what a task costs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.fleet import Fleets
from support.sampling import Sampler
from support.servers import RedisServer

TWO = {"w1@north": {}, "w2@south": {}}
_MIB = 1024 * 1024


@pytest.mark.parametrize("tasks", [1500, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_a_backlog(fleets: Fleets, tmp_path: Path, tasks: int, key: str) -> None:
    with RedisServer(tmp_path / "broker") as server, fleets.own("redis", {}, broker=server.url) as fleet:
        record = fleet.tasks["record"]
        for number in range(tasks):
            record.apply_async(kwargs={"key": f"{key}-{number}"}, ignore_result=True)
        assert fleet.depth(fleet.queue) == tasks
        for name in TWO:
            fleet.start(name)
        with server.client() as client, Sampler(fleet.registry) as sampler:

            def commands() -> int:
                return int(client.info("stats")["total_commands_processed"])

            def memory() -> int:
                return sum(psutil.Process(worker.pid).memory_info().rss for worker in fleet.workers.values())

            def halfway(part: float) -> tuple[int, int, int]:
                fleet.wait(lambda: fleet.depth(fleet.queue) <= tasks * (1 - part), tasks / 20, f"{part:.0%} to be done")
                return fleet.depth(fleet.queue), commands(), memory()

            marks = [halfway(part) for part in (0.2, 0.6, 1.0)]
            fleet.wait(lambda: not fleet.held() and not fleet.left(), 30, "a quiet fleet")
            runs = [run for run in fleet.journal.runs() if run.key.startswith(key)]
            assert len(runs) == len({run.key for run in runs}) == tasks
            assert max(sampler.most_held.values()) <= 2
            # First in, first out: no further out of order than the slots there are, and what a busy machine adds.
            places = [int(run.key.rpartition("-")[2]) for run in sorted(runs, key=lambda run: run.start)]
            assert max(abs(place - number) for place, number in enumerate(places)) < 200
            assert sum(abs(place - number) for place, number in enumerate(places)) / tasks < 10
            (left, first, before), (middle, second, _), (_, third, after) = marks
            assert after - before < 10 * _MIB
            early, late = (second - first) / (left - middle), (third - second) / max(1, middle)
            # Looking is done by time, not by task, so on a busy machine a task costs more of it.
            assert late < 2 * early + 5
            assert early < 60
