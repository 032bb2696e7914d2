"""What a world of ``memory://`` is made of: records without behaviour of their own."""

from __future__ import annotations

import math

from ..models import Advert, Reason
from ._sorted_names import SortedNames

__all__ = (
    "DRAINING",
    "FULL",
    "LAPSED",
    "LATE",
    "LIMITED",
    "READY",
    "REASONS",
    "UNKNOWN",
    "Gone",
    "Group",
    "Held",
    "Mark",
    "Queue",
    "Share",
    "Worker",
)

#: What time, drains and counts say of a worker: plain integers, since an Enum's hash is slow.  A worker that is in
#: several of them has the last one.  It is LIMITED only for a queue, never as a whole.
READY, LIMITED, FULL, UNKNOWN, DRAINING, LATE, LAPSED = range(7)
REASONS = (
    None,
    Reason.WORKER_LIMIT,
    Reason.FULL,
    Reason.UNKNOWN_CAPACITY,
    Reason.DRAINING,
    Reason.LATE,
    Reason.LAPSED,
)


class Group:
    """The members of one queue, one node (or all) and one capability class."""

    __slots__ = ("counts", "names", "tasks")

    def __init__(self, tasks: frozenset[str]) -> None:
        self.tasks = tasks
        self.names = SortedNames()
        self.counts = [0] * len(REASONS)


class Queue:
    """One queue: its limits, what is held for it, its groups by node (``None`` = all) and its cursors."""

    __slots__ = ("cursors", "declared", "groups", "held", "limit", "name", "ordered")

    def __init__(self, name: str) -> None:
        self.name = name
        #: The limit that holds: the one that was set (``ordered``), else the one that a worker declared.
        self.limit: int | None = None
        self.ordered: int | None = None
        self.declared: int | None = None
        self.held = 0
        self.groups: dict[str | None, dict[frozenset[str], Group]] = {}
        self.cursors: dict[tuple[str | None, str | None], str] = {}

    def declare(self, limit: int | None) -> None:
        self.declared = limit
        self.limit = limit if self.ordered is None else self.ordered

    def order(self, limit: int | None) -> None:
        self.ordered = limit
        self.declare(self.declared)

    @property
    def has_room(self) -> bool:
        return self.limit is None or self.held < self.limit

    @property
    def served(self) -> bool:
        """Whether any worker that has not lapsed serves this queue."""
        return any(sum(g.counts) > g.counts[LAPSED] for g in self.groups.get(None, {}).values())

    def matching(self, task: str | None, node: str | None) -> list[Group]:
        return [g for g in self.groups.get(node, {}).values() if task is None or task in g.tasks]


class Worker:
    """One registered worker."""

    __slots__ = (
        "advert",
        "alarm_at",
        "beat",
        "capacity",
        "committed",
        "drain",
        "drain_until",
        "epoch",
        "groups",
        "inherited_until",
        "name",
        "node",
        "shares",
        "slots",
        "status",
    )

    def __init__(self, advert: Advert, epoch: int, now: float) -> None:
        self.advert = advert
        self.name = advert.worker
        self.node = advert.node
        self.epoch = epoch
        self.capacity = advert.capacity
        self.beat = now
        self.drain: str | None = None
        self.drain_until = math.inf
        self.status = UNKNOWN
        self.slots: dict[str, Held] = {}
        self.committed = 0
        #: Until then a reservation of an older registration of the name may be on its way to it.
        self.inherited_until = 0.0
        self.alarm_at = math.inf
        #: Of the queues without a limit on this worker.
        self.groups: tuple[Group, ...] = ()
        #: The others.
        self.shares = {queue: Share(limit) for queue, limit in advert.worker_queues.items()}


class Share:
    """What one worker holds for a queue that has a limit on this worker; its status there, and its groups."""

    __slots__ = ("groups", "held", "limit", "status")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.status = UNKNOWN
        self.groups: tuple[Group, ...] = ()


class Held:
    """One slot that is held.  ``deadline`` is infinite once it is committed or given back."""

    __slots__ = ("committed_at", "deadline", "queue", "token", "worker")

    def __init__(
        self, token: str, worker: Worker | None, queue: Queue | None, deadline: float, committed_at: float | None
    ) -> None:
        self.token = token
        self.worker: Worker = worker  # type: ignore[assignment]  # None only in the heap's sentinel
        self.queue: Queue = queue  # type: ignore[assignment]
        self.deadline = deadline
        self.committed_at = committed_at


class Mark:
    """Somebody has parked a task in a lot."""

    __slots__ = ("found_empty", "parked_until", "queue", "version")

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.version = 0
        self.parked_until = 0.0
        #: Somebody has looked since, though a message may still be on its way.
        self.found_empty = False


class Gone:
    """A worker that is gone and waits to be cleaned up after."""

    __slots__ = ("cleaner", "cleaner_until", "settled_at", "worker")

    def __init__(self, worker: Worker, settled_at: float) -> None:
        self.worker = worker
        self.settled_at = settled_at
        self.cleaner: str | None = None
        self.cleaner_until = 0.0
