"""Workers, slots, marks as rows: what changes them, without asking whether it may."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from typing import NamedTuple

from ..models import Advert, Demand, Slot, StoreCounter
from ._sqlite_file import Transaction

__all__ = (
    "WORKER_COLUMNS",
    "SlotRow",
    "WorkerRow",
    "bury",
    "catch_up",
    "clear_mark",
    "count",
    "enroll",
    "find_slot",
    "find_worker",
    "free",
    "next_epoch",
    "park",
    "prune_cursors",
    "put_back",
    "settled_at",
    "take",
    "take_out_gone",
    "withdraw",
)


class WorkerRow(NamedTuple):
    """One row of ``worker``, in the order of :data:`WORKER_COLUMNS`."""

    id: int
    name: str
    epoch: int
    node: str
    task_class: int
    capacity: int | None
    held: int
    drain: str | None
    drain_until: float | None
    beat: float
    lease_seconds: float
    lapse_seconds: float
    host: str
    pid: int
    queues_json: str

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(json.loads(self.queues_json))


class SlotRow(NamedTuple):
    """One slot that is held, and the epoch of the worker that holds it."""

    token: str
    worker: int
    epoch: int
    committed_at: float | None


WORKER_COLUMNS = (
    "w.id, w.name, w.epoch, w.node, w.class, w.capacity, w.held, w.drain, w.drain_until, w.beat, "
    "w.lease_seconds, w.lapse_seconds, w.host, w.pid, w.queues"
)

# -- workers ---------------------------------------------------------------------------------------------

_WORKER = f"SELECT {WORKER_COLUMNS} FROM worker w WHERE w.ns = :ns AND w.name = :name"
_LAST_EPOCH = "SELECT epoch FROM namespace WHERE id = :ns"
_SET_EPOCH = "UPDATE namespace SET epoch = :epoch WHERE id = :ns"
_ADD_CLASS = "INSERT OR IGNORE INTO class (digest) VALUES (:digest)"
_CLASS = "SELECT id FROM class WHERE digest = :digest"
_ADD_CLASS_TASK = "INSERT INTO class_task (class, task) VALUES (?, ?)"
_ADD_WORKER = """
    INSERT INTO worker (ns, name, epoch, node, class, capacity, beat, inherited_until, lease_seconds, lapse_seconds,
                        host, pid, queues)
    VALUES (:ns, :name, :epoch, :node, :class, :capacity, :now, :inherited_until, :lease_seconds, :lapse_seconds,
            :host, :pid, :queues)
"""
_ADD_SEAT = """
    INSERT INTO seat (worker, queue, ns, class, node, name, open, maximum)
    SELECT id, :queue, ns, class, node, name, open AND :maximum IS NOT 0, :maximum FROM worker WHERE id = :id
"""
_DECLARE = """
    INSERT INTO queue (ns, name, declared) VALUES (:ns, :queue, :limit)
        ON CONFLICT (ns, name) DO UPDATE SET declared = excluded.declared
"""
_DECLARE_NONE = "UPDATE queue SET declared = NULL WHERE ns = :ns AND name = :queue AND declared IS NOT NULL"
_FREE_ALL = "DELETE FROM slot WHERE worker = :id"
_DROP_SEATS = "DELETE FROM seat WHERE worker = :id"
_DROP_WORKER = "DELETE FROM worker WHERE id = :id"
_DROP_CLASS_TASKS = """
    DELETE FROM class_task WHERE class = :class AND NOT EXISTS (SELECT 1 FROM worker WHERE class = :class)
"""
_DROP_CLASS = "DELETE FROM class WHERE id = :class AND NOT EXISTS (SELECT 1 FROM worker WHERE class = :class)"
# A pool that no registered worker is in any more has no turns.
_PRUNE_CURSORS = """
    DELETE FROM cursor
     WHERE ns = :ns AND queue = :queue AND NOT EXISTS (
        SELECT 1 FROM seat s
         WHERE s.ns = :ns AND s.queue = :queue AND (cursor.node = '' OR s.node = cursor.node)
           AND s.class IN (
              SELECT p.class FROM pool p
               WHERE p.ns = :ns AND p.queue = :queue AND (cursor.task = '' OR EXISTS (
                  SELECT 1 FROM class_task t WHERE t.class = p.class AND t.task = cursor.task))))
"""
# A committed slot has no deadline.
_SETTLED_AT = """
    SELECT max(inherited_until, coalesce((SELECT max(deadline) FROM slot WHERE worker = :id), 0))
      FROM worker WHERE id = :id
"""
_ADD_GONE = """
    INSERT OR REPLACE INTO gone (ns, name, epoch, settled_at, node, capacity, beat, host, pid, queues)
    SELECT ns, name, epoch, :settled_at, node, capacity, beat, host, pid, queues FROM worker WHERE id = :id
"""
_GONE_SETTLED_AT = "SELECT settled_at FROM gone WHERE ns = :ns AND name = :name"
_DROP_GONE = "DELETE FROM gone WHERE ns = :ns AND name = :name"


def find_worker(tx: Transaction, name: str) -> WorkerRow | None:
    """The registered worker of that name."""
    row = tx.one(_WORKER, {"ns": tx.ns, "name": name})
    return WorkerRow(*row) if row else None


def next_epoch(tx: Transaction, wall_clock_seconds: float) -> int:
    """Higher than every epoch that this namespace gave out, even if the file was lost in between."""
    (last,) = tx.one(_LAST_EPOCH, {"ns": tx.ns})
    epoch = max(int(last) + 1, int(wall_clock_seconds * 1000))
    tx.execute(_SET_EPOCH, {"ns": tx.ns, "epoch": epoch})
    return epoch


def take_out_gone(tx: Transaction, name: str) -> float:
    """Take the entry of a gone worker out; until when a reservation may be on its way to it."""
    row = tx.one(_GONE_SETTLED_AT, {"ns": tx.ns, "name": name})
    if row is None:
        return 0.0
    tx.execute(_DROP_GONE, {"ns": tx.ns, "name": name})
    return float(row[0])


def settled_at(tx: Transaction, worker: WorkerRow) -> float:
    """Until when a reservation may be on its way to it.  To be asked before its slots are freed."""
    (at,) = tx.one(_SETTLED_AT, {"id": worker.id})
    return float(at)


def enroll(tx: Transaction, advert: Advert, epoch: int, inherited_until: float) -> int:
    """Put a worker where choices find it; returns its row id."""
    worker = tx.execute(
        _ADD_WORKER,
        {
            "ns": tx.ns,
            "name": advert.worker,
            "epoch": epoch,
            "node": advert.node,
            "class": _task_class(tx, advert.tasks),
            "capacity": advert.capacity,
            "now": tx.now,
            "inherited_until": inherited_until,
            "lease_seconds": advert.lease_seconds,
            "lapse_seconds": advert.lapse_seconds,
            "host": advert.host,
            "pid": advert.pid,
            "queues": json.dumps(advert.queues),
        },
    ).lastrowid
    assert worker is not None
    for queue in dict.fromkeys(advert.queues):
        tx.execute(_ADD_SEAT, {"id": worker, "queue": queue, "maximum": advert.worker_queues.get(queue)})
        limit = advert.queue_limits.get(queue)
        tx.execute(_DECLARE_NONE if limit is None else _DECLARE, {"ns": tx.ns, "queue": queue, "limit": limit})
    return worker


def _task_class(tx: Transaction, tasks: frozenset[str]) -> int:
    names = sorted(tasks)
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    added = tx.execute(_ADD_CLASS, {"digest": digest}).rowcount
    (task_class,) = tx.one(_CLASS, {"digest": digest})
    if added:
        for name in names:
            tx.execute(_ADD_CLASS_TASK, (task_class, name))
    return int(task_class)


def withdraw(tx: Transaction, worker: WorkerRow) -> None:
    """Take a worker out, with all its slots.  The cursors are still to be pruned."""
    parameters = {"id": worker.id, "class": worker.task_class}
    for statement in (_FREE_ALL, _DROP_SEATS, _DROP_WORKER, _DROP_CLASS_TASKS, _DROP_CLASS):
        tx.execute(statement, parameters)


def prune_cursors(tx: Transaction, queues: Iterable[str]) -> None:
    """Forget the turns of pools that have no workers left."""
    for queue in dict.fromkeys(queues):
        tx.execute(_PRUNE_CURSORS, {"ns": tx.ns, "queue": queue})


def bury(tx: Transaction, worker: WorkerRow) -> None:
    """The worker is gone: free its slots and leave an entry for the sweepers."""
    tx.execute(_ADD_GONE, {"id": worker.id, "settled_at": settled_at(tx, worker)})
    withdraw(tx, worker)
    prune_cursors(tx, worker.queues)


# -- slots -----------------------------------------------------------------------------------------------

_SLOT = """
    SELECT s.token, s.worker, w.epoch, s.committed_at FROM slot s JOIN worker w ON w.id = s.worker
     WHERE s.ns = :ns AND s.token = :token AND (s.deadline IS NULL OR s.deadline > :now)
"""
_KNOWN = "SELECT 1 FROM slot WHERE ns = :ns AND token = :token"
_ADD_SLOT = """
    INSERT INTO slot (ns, token, worker, queue, deadline, committed_at)
    VALUES (:ns, :token, :worker, :queue, :deadline, :committed_at)
"""
# No capacity: nothing is too much.
_TOO_MANY = """
    SELECT token, deadline FROM slot WHERE worker = :id AND deadline IS NOT NULL
     ORDER BY deadline DESC, token DESC
     LIMIT (SELECT coalesce(max(0, min(:restored, held - capacity)), 0) FROM worker WHERE id = :id)
"""
_INHERIT = "UPDATE worker SET inherited_until = max(inherited_until, :deadline) WHERE id = :id"
_FREE = "DELETE FROM slot WHERE ns = :ns AND token = :token"
_DUE = """
    SELECT s.token, w.name FROM slot s JOIN worker w ON w.id = s.worker
     WHERE s.ns = :ns AND s.deadline IS NOT NULL AND s.deadline <= :now
"""
_FREE_DUE = "DELETE FROM slot WHERE ns = :ns AND deadline IS NOT NULL AND deadline <= :now"
_END_DRAINS = """
    UPDATE worker SET drain = NULL, drain_until = NULL
     WHERE ns = :ns AND drain_until IS NOT NULL AND drain_until <= :now
"""


def find_slot(tx: Transaction, token: str) -> SlotRow | None:
    """The slot of that token, if it is still held."""
    row = tx.one(_SLOT, {"ns": tx.ns, "token": token, "now": tx.now})
    return SlotRow(*row) if row else None


def take(
    tx: Transaction,
    worker: WorkerRow,
    queue: str,
    demand: Demand | None = None,
    *,
    commit: bool = True,
    lot: str | None = None,
    mark: int = 0,
) -> Slot:
    """Take one slot of a worker that was just found ready."""
    token = next(tx.tokens)
    deadline = tx.now if demand is None else tx.now + demand.ttl_seconds
    tx.execute(
        _ADD_SLOT,
        {
            "ns": tx.ns,
            "token": token,
            "worker": worker.id,
            "queue": queue,
            "deadline": None if commit else deadline,
            "committed_at": tx.now if commit else None,
        },
    )
    task, task_id = (None, None) if demand is None else (demand.task, demand.task_id)
    return Slot(token, worker.name, worker.epoch, queue, worker.node, task, task_id, deadline, commit, lot, mark)


def put_back(tx: Transaction, worker: int, slot: Slot) -> bool:
    """Record a slot that the worker really holds, even past its capacity.  False if the token is known."""
    if tx.one(_KNOWN, {"ns": tx.ns, "token": slot.token}):
        return False
    values = {"token": slot.token, "worker": worker, "queue": slot.queue, "deadline": None, "committed_at": tx.now}
    tx.execute(_ADD_SLOT, {"ns": tx.ns, **values})
    return True


def make_room(tx: Transaction, worker: int, restored: int) -> None:
    """Where what was put back has no room, push out as many reservations, the latest first."""
    for token, deadline in tx.execute(_TOO_MANY, {"id": worker, "restored": restored}).fetchall():
        # Its message may still be on its way.
        tx.execute(_INHERIT, {"id": worker, "deadline": deadline})
        free(tx, token)


def free(tx: Transaction, token: str) -> None:
    """The slot is free again, for whoever comes next."""
    tx.execute(_FREE, {"ns": tx.ns, "token": token})


def catch_up(tx: Transaction) -> None:
    """Let everything happen that is due by now: reservations end at their deadline, drains at theirs."""
    now = {"ns": tx.ns, "now": tx.now}
    due = tx.execute(_DUE, now).fetchall()
    for token, worker in due:
        tx.report(
            logging.WARNING,
            "reservation %s on worker %s was not taken over before its deadline; the slot is free again",
            token,
            worker,
            action="reservation_expired",
            token=token,
            worker=worker,
        )
    if due:
        count(tx, StoreCounter.RESERVATIONS_EXPIRED.value, len(due))
    tx.execute(_FREE_DUE, now)
    tx.execute(_END_DRAINS, now)


# -- counters --------------------------------------------------------------------------------------------

_COUNT = """
    INSERT INTO counter (ns, name, total) VALUES (:ns, :name, :n)
        ON CONFLICT (ns, name) DO UPDATE SET total = total + excluded.total
"""


def count(tx: Transaction, name: str, n: int = 1) -> None:
    """Add to a total of the namespace."""
    tx.execute(_COUNT, {"ns": tx.ns, "name": name, "n": n})


# -- marks -----------------------------------------------------------------------------------------------

_RAISE_MARK = "UPDATE namespace SET mark = mark + 1 WHERE id = :ns"
# Versions are never used twice, so that the answer to an older mark cannot clear a newer one.
_SET_MARK = """
    INSERT INTO mark (ns, lot, queue, version, parked_until)
    VALUES (:ns, :lot, :queue, (SELECT mark FROM namespace WHERE id = :ns), :until)
        ON CONFLICT (ns, lot) DO UPDATE
            SET version = excluded.version, parked_until = max(parked_until, excluded.parked_until), empty = 0
"""
_CLEAR_MARK = "DELETE FROM mark WHERE ns = :ns AND lot = :lot AND version = :version AND parked_until <= :now"
_FOUND_EMPTY = "UPDATE mark SET empty = 1 WHERE ns = :ns AND lot = :lot AND version = :version AND empty = 0"


def park(tx: Transaction, lot: str, demand: Demand) -> None:
    """Somebody is about to park a task in this lot; it has arrived there after ``demand.ttl_seconds``."""
    tx.execute(_RAISE_MARK, {"ns": tx.ns})
    tx.execute(_SET_MARK, {"ns": tx.ns, "lot": lot, "queue": demand.queue, "until": tx.now + demand.ttl_seconds})


def clear_mark(tx: Transaction, lot: str, version: int) -> None:
    """The lot was found empty by a claim that saw this version: clear the mark unless it may not be true any more."""
    asked = {"ns": tx.ns, "lot": lot, "version": version, "now": tx.now}
    tx.execute(_CLEAR_MARK, asked)
    tx.execute(_FOUND_EMPTY, asked)
