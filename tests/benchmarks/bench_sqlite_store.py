"""How fast the SQLite store is.  Prints a table::

    python tests/benchmarks/bench_sqlite_store.py [--seconds 5] [--directory DIR]

The file is made in a directory of its own under DIR (default: where temporary files go); that should be a disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from celery_capacity.models import Advert, Demand
from celery_capacity.registry import Registry, Reservation, open_registry

DEMAND = Demand("q", "t", ttl_seconds=600.0)
TASKS = frozenset({"t", *(f"task-{index}" for index in range(50))})


def fleet(url: str, workers: int, capacity: int) -> Registry:
    """A registry with so many workers, which registered in no order."""
    registry = open_registry(url)
    names = [f"w{index:05}" for index in range(workers)]
    random.Random(1).shuffle(names)
    for index, name in enumerate(names):
        registry.register(
            Advert(name, f"n{index % 100}", ("q",), TASKS, capacity, lease_seconds=1e6, lapse_seconds=1e6)
        )
    return registry


def pairs_per_second(registry: Registry, pairs: int) -> float:
    """Reserve and cancel so many times."""
    started = time.perf_counter()
    for _ in range(pairs):
        answer = registry.select_and_reserve(DEMAND)
        if isinstance(answer, Reservation):
            answer.release()
    return pairs / (time.perf_counter() - started)


def operations(registry: Registry, seconds: float) -> list[float]:
    """Reserve and cancel without a rest; how long each operation took."""
    taken = []
    end = time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        answer = registry.select_and_reserve(DEMAND)
        between = time.perf_counter()
        taken.append(between - before)
        if isinstance(answer, Reservation):
            answer.release()
            taken.append(time.perf_counter() - between)
    return taken


def _process(url: str, seconds: float, start: Barrier, results: Queue[list[float]]) -> None:
    with open_registry(url) as registry:
        registry.overview()
        start.wait()
        results.put(operations(registry, seconds))


def in_processes(url: str, count: int, seconds: float) -> list[list[float]]:
    start = multiprocessing.Barrier(count)
    results: Queue[list[float]] = multiprocessing.Queue()
    processes = [multiprocessing.Process(target=_process, args=(url, seconds, start, results)) for _ in range(count)]
    for process in processes:
        process.start()
    taken = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return taken


def in_threads(registry: Registry, count: int, seconds: float) -> list[list[float]]:
    taken: list[list[float]] = []
    threads = [threading.Thread(target=lambda: taken.append(operations(registry, seconds))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def crowd_row(title: str, taken: list[list[float]], seconds: float) -> str:
    every = sorted(value for each in taken for value in each)
    shares = [len(each) for each in taken]
    at = {quantile: every[int(len(every) * quantile)] * 1e3 for quantile in (0.5, 0.99, 0.999)}
    return (
        f"{title:<24}{len(every) / seconds:>10,.0f}{at[0.5]:>9.2f}{at[0.99]:>9.2f}{at[0.999]:>9.2f}"
        f"{every[-1] * 1e3:>9.2f}{min(shares) / max(shares):>10.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each crowd runs")
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores\n")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:

        def url(name: str) -> str:
            return f"sqlite:///{directory}/{name}.db"

        print(f"{'one process':<24}{'pairs/s':>10}{'us/pair':>10}{'of 10':>8}")
        for capacity in (1, 8):
            registries = {workers: fleet(url(f"{workers}-{capacity}"), workers, capacity) for workers in (10, 10_000)}
            best = dict.fromkeys(registries, 0.0)
            for _ in range(7):  # in turns, so that a slow moment of the machine meets both
                for workers, registry in registries.items():
                    best[workers] = max(best[workers], pairs_per_second(registry, 3000))
            for workers, rate in best.items():
                title = f"{workers:,} workers of {capacity}"
                print(f"{title:<24}{rate:>10,.0f}{1e6 / rate:>10.1f}{best[10] / rate:>8.2f}")
            for registry in registries.values():
                registry.close()

        print(f"\n{'10 workers of 8':<24}{'ops/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'p99.9':>9}{'max':>9}{'min/max':>10}")
        with fleet(url("crowd"), 10, 8) as registry:
            for count in (1, 2, 8, 20):
                taken = in_processes(url("crowd"), count, options.seconds)
                print(crowd_row(f"{count} processes", taken, options.seconds))
            for count in (2, 8):
                taken = in_threads(registry, count, options.seconds)
                print(crowd_row(f"{count} threads", taken, options.seconds))


if __name__ == "__main__":
    main()
