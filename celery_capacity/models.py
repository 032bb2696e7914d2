"""Frozen value types that pass between producers, workers and the registry.

Nothing here does I/O and nothing here knows Celery.  Times are seconds as ``float``; every instant is on
the *store's* clock (design, invariant 11) and is comparable only with other instants of the same store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from .errors import InvalidAdvertError, InvalidCounterError, InvalidDemandError
from .outcomes import CommitOutcome, Reason, ReleaseOutcome, Standing, StoreCounter, WorkerState

__all__ = (
    "Advert",
    "Census",
    "Claim",
    "CommitOutcome",
    "CounterTotal",
    "Demand",
    "LapsedWorker",
    "Lot",
    "LotView",
    "Overview",
    "Pulse",
    "QueueView",
    "Reason",
    "Refusal",
    "ReleaseOutcome",
    "Released",
    "Share",
    "Slot",
    "Standing",
    "StoreCounter",
    "WorkerState",
    "WorkerView",
    "check_capacity",
    "check_counts",
    "check_limit",
)


@dataclass(frozen=True)
class Advert:
    """What a worker says of itself when it registers.

    ``capacity`` is the number of slots; ``None`` = not known yet (never chosen), ``0`` = paused.
    ``queues`` are the managed queues that it serves, ``tasks`` the names registered in it.  A worker is
    *late* ``lease_seconds`` after its last heartbeat and *lapsed* after ``lapse_seconds``; both travel with
    the advert, so that processes with other settings judge the worker by its own.

    ``worker_queues``: at most so many of its slots are held for that queue at once.  ``queue_limits``: at most so many
    are held for it over the fleet, unless :meth:`Registry.set_limit` says otherwise; the latest registration that serves
    a queue says what its limit is, or (without an entry here) that it has none.
    """

    worker: str
    node: str
    queues: tuple[str, ...]
    tasks: frozenset[str]
    capacity: int | None = None
    lease_seconds: float = 15.0
    lapse_seconds: float = 60.0
    host: str = ""
    pid: int = 0
    worker_queues: Mapping[str, int] = field(default_factory=dict)
    queue_limits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("worker", "node"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidAdvertError(name, value, "a non-empty string")
        if not isinstance(self.queues, tuple) or not all(isinstance(q, str) and q for q in self.queues):
            raise InvalidAdvertError("queues", self.queues, "a tuple of non-empty queue names")
        if not isinstance(self.tasks, frozenset) or not all(isinstance(t, str) and t for t in self.tasks):
            raise InvalidAdvertError("tasks", self.tasks, "a frozenset of non-empty task names")
        check_capacity(self.capacity)
        if not self.lease_seconds > 0:
            raise InvalidAdvertError("lease_seconds", self.lease_seconds, "a number of seconds above 0")
        if not self.lapse_seconds >= self.lease_seconds:
            raise InvalidAdvertError(
                "lapse_seconds", self.lapse_seconds, f"at least lease_seconds ({self.lease_seconds})"
            )
        for name in ("worker_queues", "queue_limits"):
            limits = getattr(self, name)
            if not isinstance(limits, Mapping) or not all(
                queue in self.queues and _is_count(limit) for queue, limit in limits.items()
            ):
                raise InvalidAdvertError(name, limits, "a mapping of some of its queues to integers from 0 up")


def check_capacity(capacity: int | None) -> None:
    """Raise :exc:`InvalidAdvertError` unless ``capacity`` is ``None`` or an integer from 0 up."""
    if capacity is None:
        return
    if not _is_count(capacity):
        raise InvalidAdvertError("capacity", capacity, "an integer from 0 up, or None for not known yet")


def check_limit(limit: int | None) -> None:
    """Raise :exc:`InvalidDemandError` unless ``limit`` is ``None`` or an integer from 0 up."""
    if limit is not None and not _is_count(limit):
        raise InvalidDemandError("limit", limit, "an integer from 0 up, or None for the default")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


#: So that a total stays far below what 64 bits hold.
_MOST_AT_ONCE = 2**53
_LONGEST_COUNTER = 64


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise :exc:`InvalidCounterError` unless every name and every value is one that can be counted."""
    for name, count in counts.items():
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_COUNTER:
            raise InvalidCounterError("counter", name, f"a name of 1 to {_LONGEST_COUNTER} characters")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= _MOST_AT_ONCE:
            raise InvalidCounterError(name, count, "an integer from 1 up")


@dataclass(frozen=True)
class Demand:
    """What one dispatch asks for.

    ``node`` pins it: only a worker that advertises exactly that node matches.  ``prefer_node``: a worker of that node if
    one could be chosen now, else any; without a meaning where ``node`` is given.  ``park_lot`` names the lot
    whose "somebody is waiting" mark a refusal sets in the same atomic step; ``None`` = the caller will not
    park, so a refusal writes nothing.  ``ttl_seconds`` is how long the reservation may stay uncommitted.
    """

    queue: str
    task: str | None = None
    node: str | None = None
    task_id: str | None = None
    ttl_seconds: float = 30.0
    park_lot: str | None = None
    prefer_node: str | None = None

    def __post_init__(self) -> None:
        if not self.queue:
            raise InvalidDemandError("queue", self.queue, "a non-empty queue name")
        if not self.ttl_seconds > 0:
            raise InvalidDemandError("ttl_seconds", self.ttl_seconds, "a number of seconds above 0")


@dataclass(frozen=True)
class Slot:
    """One unit of a worker's capacity, held by one dispatch, as the registry recorded it.

    ``deadline`` is the instant at which an uncommitted reservation ends; it means nothing once committed.
    ``mark`` is the version of the lot's mark that a claim for a parked task answers (0 = the lot had none).
    """

    token: str
    worker: str
    epoch: int
    queue: str
    node: str = ""
    task: str | None = None
    task_id: str | None = None
    deadline: float = 0.0
    committed: bool = False
    lot: str | None = None
    mark: int = 0


@dataclass(frozen=True)
class Lot:
    """A durable place where tasks of ``queue`` wait; the default lot of a queue has the queue's name.

    ``seen`` is the version of a mark with which the caller has found the lot empty: a mark of that version does
    not count as set for this caller, who looks again by itself.  So a mark that has to stay, since a message may
    still be on its way, does not cost every release a fetch.  ``seen=Lot.SURE``: the caller knows that something is in
    it; it counts as marked, whatever its mark.
    """

    #: For ``seen``: no need to ask for a mark.
    SURE: ClassVar[int] = -1

    name: str
    queue: str
    seen: int = 0


@dataclass(frozen=True)
class Claim:
    """Asks that a freed slot be turned, in the same atomic step, into a claim for a parked task.

    ``lots`` are looked at in the order given; the first whose mark is set and whose queue's limit has room
    is claimed.  Without ``marked_only``, if there is none, the first whose queue's limit has room is claimed
    though nobody said that a task waits there: for tasks of producers that set no marks.
    """

    worker: str
    epoch: int
    lots: tuple[Lot, ...]
    marked_only: bool = True


@dataclass(frozen=True)
class Released:
    """Result of a release: what happened to the token, and the claim that the slot was turned into.

    ``waiting`` is only meaningful when a lot was reported empty: its mark is still set, since somebody has
    parked since or the last parked message may still be on its way.
    """

    outcome: ReleaseOutcome
    claim: Slot | None = None
    waiting: bool = False


class Share(NamedTuple):
    """What one worker holds for one queue that has a limit on this worker, and that limit."""

    queue: str
    held: int
    limit: int


@dataclass(frozen=True)
class WorkerView:
    """One worker as the registry sees it.  ``reason`` is ``None`` when the worker could be chosen now."""

    name: str
    node: str
    epoch: int
    state: WorkerState
    capacity: int | None
    reserved: int
    committed: int
    queues: tuple[str, ...]
    reason: Reason | None = None
    detail: str = ""
    #: Seconds since the last heartbeat.
    lease_age: float = 0.0
    host: str = ""
    pid: int = 0
    #: Of the queues that have a limit on this worker, in name order.
    shares: tuple[Share, ...] = ()

    @property
    def held(self) -> int:
        """Slots in use: reserved and committed."""
        return self.reserved + self.committed

    @property
    def free(self) -> int:
        """Slots that could be claimed; never negative, 0 while the capacity is not known."""
        return max(0, (self.capacity or 0) - self.held)


@dataclass(frozen=True)
class QueueView:
    """One queue: its limit over the fleet (``None`` = none), slots held for it, and whether a task waits.

    ``waiting``: somebody has parked a task in one of its lots, and nobody has found that lot empty since.
    """

    name: str
    limit: int | None
    held: int
    waiting: bool


@dataclass(frozen=True)
class LotView:
    """A lot where a task of ``queue`` waits, as far as anybody has said so: its mark, and the mark's version."""

    name: str
    queue: str
    mark: int


@dataclass(frozen=True)
class Census:
    """Who could take a task of this queue now, and for each worker that could not, why."""

    queue: str
    task: str | None
    node: str | None
    workers: tuple[WorkerView, ...]
    limit: int | None = None
    held: int = 0
    waiting: bool = False

    @property
    def eligible(self) -> tuple[WorkerView, ...]:
        """The workers that could be chosen now."""
        return tuple(w for w in self.workers if w.reason is None)

    @property
    def free(self) -> int:
        """Free slots of the eligible workers."""
        return sum(w.free for w in self.eligible)


@dataclass(frozen=True)
class Refusal:
    """No slot was claimed.  ``served`` tells whether any live worker of the namespace serves the queue at
    all (eligible or not): without one, a producer behaves like plain Celery."""

    reason: Reason
    served: bool = True
    detail: str = ""


@dataclass(frozen=True)
class Pulse:
    """The registry's answer to a heartbeat.

    ``healed`` are tokens that the registry still counted and the worker no longer held: now released.
    ``missing`` are tokens that the worker said it holds and the registry does not know: the worker checks
    that it still holds them and calls :meth:`Registry.restore`.  ``store_time`` goes into the next
    heartbeat as ``since``.  ``draining`` is the reason of a drain, or ``None``.
    """

    standing: Standing
    healed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    store_time: float = 0.0
    draining: str | None = None
    #: Host and pid of the registration that stands, when it is not the speaker's.
    by: str = ""


@dataclass(frozen=True)
class LapsedWorker:
    """A worker that is gone and whose own queue still has to be looked after.

    ``settled``: no reservation for it can be in flight any more, so that an empty own queue can be deleted
    and the entry forgotten.  In flight may be what was reserved and not committed when it went, or when it
    registered anew, until its deadline.  What was committed has arrived; what was cancelled was never sent.
    """

    name: str
    epoch: int
    settled: bool


class CounterTotal(NamedTuple):
    """How often something has happened in the namespace since the registry's state began; never 0."""

    name: str
    total: int


@dataclass(frozen=True)
class Overview:
    """Everything that a status shows.  ``dict(overview.counters)`` has the totals by name."""

    namespace: str
    workers: tuple[WorkerView, ...] = field(default=())
    queues: tuple[QueueView, ...] = field(default=())
    #: In name order.
    counters: tuple[CounterTotal, ...] = field(default=())
    #: Where tasks wait, in name order; the lot of a queue itself has the queue's name.
    lots: tuple[LotView, ...] = field(default=())
