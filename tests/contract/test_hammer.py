"""Many processes at once: no count is ever wrong, and nothing is held at the end.

CAPACITY_HAMMER_ROUNDS is how many slots each thread reserves, commits and releases.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hammer import hammer_in_threads

from celery_capacity.models import Advert, Standing
from celery_capacity.registry import Registry
from celery_capacity.testing import wait_until

PROCESSES = 8
THREADS = 4
#: By store, so that each takes a few seconds; the environment's figure counts for all.
ROUNDS = {"memory": 2000, "sqlite": 40, "redis": 150}
#: Fewer slots than threads, so that there are refusals; different ones, so that workers turn full at different times.
CAPACITIES = {"w1": 1, "w2": 5, "w3": 10}


@contextmanager
def watched(registry: Registry) -> Iterator[list[int]]:
    """Look at the counts all along; what was held at each look."""
    looks: list[int] = []
    wrong: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            overview = registry.overview()
            for worker in overview.workers:
                if not 0 <= worker.held <= CAPACITIES[worker.name] or worker.reserved < 0 or worker.committed < 0:
                    wrong.append(f"{worker}")
            by_queue = sum(queue.held for queue in overview.queues)
            looks.append(sum(worker.held for worker in overview.workers))
            if looks[-1] != by_queue:
                wrong.append(f"{looks[-1]} held on workers, {by_queue} for queues")
            # Every look counts, but looking must not become the load.
            stop.wait(0.002)

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        try:
            yield looks
        finally:
            stop.set()
    watcher.result()
    assert not wrong, wrong[:10]
    assert len(looks) > 10
    assert max(looks) > 1, "the watcher saw nothing of it"


def test_no_count_is_ever_wrong(store, record_property):
    if store.clock is not None:
        pytest.skip("time plays no part here")
    rounds = int(os.environ.get("CAPACITY_HAMMER_ROUNDS", ROUNDS.get(store.name, 100)))
    registry, sampler = store.open("hammer"), store.open("hammer")
    for name, capacity in CAPACITIES.items():
        registry.register(
            Advert(name, "node", ("q",), frozenset({"t"}), capacity, lease_seconds=7200, lapse_seconds=7200)
        )
    started = time.perf_counter()
    with watched(sampler) as looks:
        if store.name == "memory":
            refusals = hammer_in_threads(registry, PROCESSES * THREADS, rounds)
        else:
            refusals = _in_processes(store, rounds)
    seconds = time.perf_counter() - started
    record_property("rounds_per_second", round(PROCESSES * THREADS * rounds / seconds))
    record_property("refusals", refusals)
    record_property("looks", len(looks))
    overview = registry.overview()
    assert [(w.name, w.reserved, w.committed) for w in overview.workers] == [(name, 0, 0) for name in CAPACITIES]
    assert [q.held for q in overview.queues] == [0]


def _start(store: Any, name: str, rounds: int, **options: Any) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("hammer.py")
    path = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(script), store.url, store.namespace(name), str(THREADS), str(rounds)],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        **options,
    )


def _in_processes(store: Any, rounds: int) -> int:
    with ExitStack() as stack:
        processes = [
            _start(store, "hammer", rounds, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(PROCESSES)
        ]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        refusals = 0
        for process in processes:
            out, err = process.communicate(timeout=3600)
            assert process.returncode == 0, err
            refusals += int(out)
    return refusals


def test_a_killed_process_leaves_nothing_for_ever(store):
    """What a killed worker held is free again after its lapse and one sweep, with no manual step."""
    if store.clock is not None or store.name == "memory":
        pytest.skip("one process")
    registry = store.open("killed")
    advert = Advert("w1", "node", ("q",), frozenset({"t"}), 10, lease_seconds=3, lapse_seconds=3)
    epochs = [registry.register(advert)]
    process = _start(store, "killed", 10**6)

    def held() -> int:
        # A machine that is out of breath lets this very process lapse, before anything is held.
        if registry.heartbeat("w1", epochs[-1]).standing is not Standing.CURRENT:
            epochs.append(registry.register(advert))
        return sum(worker.held for worker in registry.overview().workers)

    try:
        wait_until(held)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: registry.expire("cleaner"))
    assert [w.held for w in registry.overview().workers] == [0]
    assert all(q.held == 0 for q in registry.overview().queues)
