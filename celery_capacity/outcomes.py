"""What the registry can answer, in words: why not, and what became of it."""

from __future__ import annotations

from enum import Enum

__all__ = (
    "CommitOutcome",
    "Reason",
    "ReleaseOutcome",
    "Standing",
    "StoreCounter",
    "WorkerState",
)


class Reason(str, Enum):
    """Why a worker could not be chosen, or a dispatch was refused."""

    FULL = "full"
    DRAINING = "draining"
    UNKNOWN_CAPACITY = "unknown capacity"
    OTHER_NODE = "other node"
    OTHER_QUEUE = "other queue"
    UNKNOWN_TASK = "task not registered there"
    LATE = "late"
    LAPSED = "lapsed"
    #: The limit of the queue over the fleet is reached.
    LIMIT = "limit"
    #: The limit of the queue on this one worker is reached.
    WORKER_LIMIT = "limit of the queue on this worker"
    REPLACED = "replaced by a newer registration"
    NOT_WAITING = "nothing is waiting"
    NO_WORKER = "no worker"


class WorkerState(str, Enum):
    """The one word that a status shows for a worker."""

    READY = "ready"
    LATE = "late"
    DRAINING = "draining"
    UNKNOWN = "unknown"
    LAPSED = "lapsed"


class Standing(str, Enum):
    """What the registry thinks of the epoch that just spoke."""

    CURRENT = "current"
    #: A newer registration of the same name is there.  The speaker must stop taking work.
    REPLACED = "replaced"
    #: The registry does not know the worker (lapsed, or the store was lost).  The speaker must register again.
    GONE = "gone"


class CommitOutcome(str, Enum):
    """What :meth:`Registry.commit` did."""

    COMMITTED = "committed"
    #: Committed before by the same epoch; nothing changed.
    ALREADY = "already committed"
    #: Unknown token: released, or its deadline passed.
    GONE = "gone"
    #: The speaker's epoch is not the current one; nothing changed.
    STALE = "stale epoch"


class ReleaseOutcome(str, Enum):
    """What :meth:`Registry.release` or :meth:`Registry.cancel` did."""

    RELEASED = "released"
    #: Unknown token: released before, or its deadline passed; nothing changed.
    ALREADY = "already released"
    #: The speaker's epoch is not the one that holds the token; nothing changed.
    STALE = "stale epoch"
    #: Only from ``cancel``: the worker has committed the slot, so it is not the producer's any more.
    COMMITTED = "committed by the worker"


class StoreCounter(str, Enum):
    """What a store counts by itself, in the step in which it happens, since nobody else sees it."""

    #: Reservations that nobody had taken over by their deadline.
    RESERVATIONS_EXPIRED = "reservations_expired"
    #: Workers that :meth:`Registry.expire` found to have lapsed.
    WORKERS_LAPSED = "workers_lapsed"
    #: Slots that these held.
    SLOTS_FREED_BY_LAPSE = "slots_freed_by_lapse"
    #: Commits, releases, heartbeats and deregistrations of an epoch that is not the current one.
    STALE_REFUSED = "stale_refused"
