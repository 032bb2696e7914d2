"""How fast the SQLite store is.  Prints a table::

    python tests/benchmarks/bench_sqlite_store.py [--seconds 4] [--rounds 3] [--directory DIR]

The file is made in a directory of its own under DIR (default: where temporary files go); that should be a disk.  One
process: pairs of reserve and cancel, median and best of seven, and the least processor time that a pair took.  Crowds: of so many
rounds the one with the median p99.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sqlite3
import statistics
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
PAIRS = 3000
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


def p99(taken: list[list[float]]) -> float:
    every = sorted(value for each in taken for value in each)
    return every[int(len(every) * 0.99)]


def crowd_row(title: str, rounds: list[list[list[float]]], seconds: float) -> str:
    taken = sorted(rounds, key=p99)[len(rounds) // 2]
    every = sorted(value for each in taken for value in each)
    shares = [len(each) for each in taken]
    at = {quantile: every[int(len(every) * quantile)] * 1e3 for quantile in (0.5, 0.99, 0.999)}
    return (
        f"{title:<24}{len(every) / seconds:>10,.0f}{at[0.5]:>9.2f}{at[0.99]:>9.2f}{at[0.999]:>9.2f}"
        f"{every[-1] * 1e3:>9.2f}{min(shares) / max(shares):>10.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each crowd runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each crowd runs")
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores\n")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:

        def url(name: str) -> str:
            return f"sqlite:///{directory}/{name}.db"

        print(f"{'one process':<24}{'pairs/s':>10}{'best':>10}{'cpu us':>10}{'of 10':>8}")
        for capacity in (1, 8):
            registries = {workers: fleet(url(f"{workers}-{capacity}"), workers, capacity) for workers in (10, 10_000)}
            rates: dict[int, list[float]] = {workers: [] for workers in registries}
            least = dict.fromkeys(registries, float("inf"))
            for _ in range(7):  # in turns, so that a slow moment of the machine meets both
                for workers, registry in registries.items():
                    before = time.process_time()
                    rates[workers].append(pairs_per_second(registry, PAIRS))
                    least[workers] = min(least[workers], (time.process_time() - before) / PAIRS * 1e6)
            ten = statistics.median(rates[10])
            for workers, each in rates.items():
                title, median = f"{workers:,} workers of {capacity}", statistics.median(each)
                print(f"{title:<24}{median:>10,.0f}{max(each):>10,.0f}{least[workers]:>10.0f}{ten / median:>8.2f}")
            for registry in registries.values():
                registry.close()

        print(f"\n{'10 workers of 8':<24}{'ops/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'p99.9':>9}{'max':>9}{'min/max':>10}")
        with fleet(url("crowd"), 10, 8) as registry:
            for count in (1, 2, 8, 20):
                runs = [in_processes(url("crowd"), count, options.seconds) for _ in range(options.rounds)]
                print(crowd_row(f"{count} processes", runs, options.seconds), flush=True)
            for count in (2, 8):
                runs = [in_threads(registry, count, options.seconds) for _ in range(options.rounds)]
                print(crowd_row(f"{count} threads", runs, options.seconds), flush=True)


if __name__ == "__main__":
    main()
