"""How fast the Redis store is, beside a script that does nothing.  Prints a table::

    python tests/benchmarks/bench_redis_store.py [--url redis://127.0.0.1:6379/15] [--rounds 40] [--workers 10 10000]

What is compared is measured in turns, a few hundred calls each, so that a slow moment of the machine meets all of them; a
figure is the median of the rounds.  Everything is in namespaces of their own, and deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import redis

from celery_capacity.models import Advert, Demand
from celery_capacity.registry import Reservation
from celery_capacity.registry._redis_client import Script
from celery_capacity.registry.redis import RedisRegistry

DEMAND = Demand("q", "t", ttl_seconds=600.0)
TASKS = frozenset({"t", *(f"task-{index}" for index in range(50))})
NO_OP = "return {1, 'w00000', '1796128115000', 'n0', 1796128115000000}"


def fleet(url: str, namespace: str, workers: int, capacity: int) -> RedisRegistry:
    """A registry with so many workers, which registered in no order."""
    registry = RedisRegistry(url, namespace)
    names = [f"w{index:05}" for index in range(workers)]
    random.Random(1).shuffle(names)
    for index, name in enumerate(names):
        registry.register(
            Advert(name, f"n{index % 100}", ("q",), TASKS, capacity, lease_seconds=1e6, lapse_seconds=1e6)
        )
    return registry


class NoOp(Script):
    """Does nothing, and answers with as much as a reservation does."""

    def __init__(self) -> None:
        super().__init__("forget")
        self.name, self.text = "no-op", NO_OP


def per_call(calls: int, before: Callable[[], object], after: Callable[[object], object] | None = None) -> float:
    """Microseconds that ``before`` takes; what ``after`` does with each result is not counted."""
    results = []
    started = time.perf_counter()
    for _ in range(calls):
        results.append(before())
    taken = time.perf_counter() - started
    if after is not None:
        for result in results:
            after(result)
    return taken / calls * 1e6


def give_back(answer: object) -> None:
    assert isinstance(answer, Reservation), answer
    answer.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=os.environ.get("CAPACITY_TEST_REDIS", "redis://127.0.0.1:6379/15"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 10_000])
    options = parser.parse_args()
    suffix = uuid.uuid4().hex[:8]
    driver = redis.Redis.from_url(options.url)
    sha = driver.script_load(NO_OP)
    arguments = ("q", ":t", "", "600000000", "0123456789abcdef01", "")
    info = driver.info("server")
    print(f"Python {sys.version.split()[0]}, redis-py {redis.__version__}, Redis {info['redis_version']}, ", end="")
    print(f"{os.cpu_count()} cores; us per call, median of {options.rounds} rounds of {options.calls}\n")

    def reserve_and_cancel(registry: RedisRegistry) -> None:
        give_back(registry.select_and_reserve(DEMAND))

    try:
        # Plenty of slots each, so that what is reserved in one round never fills a worker.
        fleets = {count: fleet(options.url, f"bench-{count}-{suffix}", count, 1000) for count in options.workers}
        ones = {count: fleet(options.url, f"one-{count}-{suffix}", count, 1) for count in options.workers}
        client = next(iter(fleets.values()))._client
        no_op = NoOp()
        no_op.sha = sha
        cases: dict[str, Callable[[], float]] = {
            "no-op, driver's client": lambda: per_call(
                options.calls, lambda: driver.evalsha(sha, 1, "{capacity:bench}", *arguments)
            ),
            "no-op, this client": lambda: per_call(options.calls, lambda: client.run(no_op, *arguments)),
        }
        for count, registry in fleets.items():
            cases[f"reserve, {count:,} workers"] = lambda registry=registry: per_call(  # type: ignore[misc]
                options.calls, lambda: registry.select_and_reserve(DEMAND), give_back
            )
            cases[f"reserve+cancel, {count:,}"] = lambda registry=registry: per_call(  # type: ignore[misc]
                options.calls, lambda: reserve_and_cancel(registry)
            )
        for count, registry in ones.items():
            cases[f"reserve+cancel, {count:,} of 1"] = lambda registry=registry: per_call(  # type: ignore[misc]
                options.calls, lambda: reserve_and_cancel(registry)
            )
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, measure in cases.items():
                taken[name].append(measure())
        medians = {name: statistics.median(values) for name, values in taken.items()}
        theirs, ours = list(medians.values())[:2]
        print(f"{'':<32}{'median':>8}{'best':>8}{'x client':>10}{'x this':>8}")
        for name, median in medians.items():
            print(f"{name:<32}{median:>8.1f}{min(taken[name]):>8.1f}{median / theirs:>10.2f}{median / ours:>8.2f}")
    finally:
        for key in driver.scan_iter(match=f"*-{suffix}*", count=1000):
            driver.delete(key)


if __name__ == "__main__":
    main()
