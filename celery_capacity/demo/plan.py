"""What is sent: waves of short and long tasks, some pinned to a node.  And what a perfect queue makes of them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("LONG_SECONDS", "NODES", "SHORT_SECONDS", "SLOTS", "WORKERS", "Job", "perfect_queue", "waves")

NODES = ("north", "south")
WORKERS = ("w1@north", "w2@north", "w3@south", "w4@south")
#: Of each worker.
SLOTS = 2
LONG_SECONDS = 2.0
SHORT_SECONDS = 0.05
#: Fewer than the fleet has slots: a perfect queue always has one for the short tasks.
_LONG = 6
_SHORT = 32
#: Every n-th task is pinned, to the nodes in turn.  All of the long ones: each node has slots for its share and one more,
#: so that the perfect queue, which knows no pins, is within reach.
_PINNED = {"long": 1, "short": 4}


@dataclass(frozen=True)
class Job:
    """One task that is to be sent."""

    wave: int
    kind: str
    seconds: float
    node: str | None


def waves(count: int, seed: int = 4) -> list[list[Job]]:
    """The waves, each in an order of its own; the same ones for the same ``count`` and ``seed``."""
    chance = random.Random(seed)
    planned = []
    for wave in range(count):
        jobs = [
            Job(wave, kind, seconds, NODES[n // _PINNED[kind] % 2] if n % _PINNED[kind] == 0 else None)
            for kind, number, seconds in (("long", _LONG, LONG_SECONDS), ("short", _SHORT, SHORT_SECONDS))
            for n in range(number)
        ]
        chance.shuffle(jobs)
        planned.append(jobs)
    return planned


def perfect_queue(durations: Sequence[float], slots: int) -> tuple[list[float], float]:
    """One queue, first come first served, whose slots never idle while a task waits, and that costs nothing itself.

    All tasks are there at the beginning.

    :param durations: in seconds, in the order in which the tasks were sent.
    :returns: how long each task waits, and when the last one has ended; in seconds.
    """
    free_at = [0.0] * slots
    waits, end = [], 0.0
    for seconds in durations:
        start = heapq.heappop(free_at)
        waits.append(start)
        end = max(end, start + seconds)
        heapq.heappush(free_at, start + seconds)
    return waits, end
