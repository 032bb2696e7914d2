"""Who may be chosen, in SQL and in Python.

:func:`condition` and :func:`why_not` are the one derivation of a worker's eligibility.  A choice finds its candidate through
the index of open seats, which the triggers of the schema keep, and asks :func:`condition` again before it claims: what
depends on time alone (late, lapsed) is in no index.
"""

from __future__ import annotations

from typing import Any

from ..models import Demand, Reason
from ._sqlite_file import Transaction
from ._sqlite_rows import WORKER_COLUMNS, WorkerRow, catch_up

__all__ = ("choose", "condition", "is_draining", "is_served", "why_nobody", "why_not")

# Is anything due that a choice must not overlook, has the queue room, and who was the last one chosen: one look for all.
_LOOK = """
    SELECT EXISTS (SELECT 1 FROM slot WHERE ns = :ns AND deadline IS NOT NULL AND deadline <= :now)
               OR EXISTS (SELECT 1 FROM worker WHERE ns = :ns AND drain_until IS NOT NULL AND drain_until <= :now),
           NOT EXISTS (SELECT 1 FROM queue WHERE ns = :ns AND name = :queue AND held >= maximum),
           (SELECT name FROM cursor WHERE ns = :ns AND queue = :queue AND task = :task_key AND node = :node_key)
"""

# The classes that serve the queue and know the task: as many as there are builds.
_CLASSES = """
    SELECT p.class FROM pool p
     WHERE p.ns = :ns AND p.queue = :queue
       AND (:task IS NULL OR EXISTS (SELECT 1 FROM class_task t WHERE t.class = p.class AND t.task = :task))
"""

# Of each class the first open seat after the cursor, in name order; of these the first.  Each is one step down the
# index, whatever the size of the fleet.
_NEXT = """
    SELECT {columns} FROM worker w
     WHERE w.ns = :ns AND w.name = (
        SELECT min((
            SELECT s.name FROM seat s
             WHERE s.open = 1 AND s.ns = :ns AND s.queue = :queue {on_node} AND s.class = c.class AND s.name > :after
             ORDER BY s.name LIMIT 1))
          FROM ({classes}) c)
"""
_NEXT_ANYWHERE = _NEXT.format(columns=WORKER_COLUMNS, on_node="", classes=_CLASSES)
_NEXT_ON_NODE = _NEXT.format(columns=WORKER_COLUMNS, on_node="AND s.node = :node", classes=_CLASSES)

_MARK_LATE = "UPDATE worker SET late = 1 WHERE id = :id"
_MOVE_CURSOR = """
    INSERT INTO cursor (ns, queue, task, node, name) VALUES (:ns, :queue, :task_key, :node_key, :name)
        ON CONFLICT (ns, queue, task, node) DO UPDATE SET name = excluded.name
"""

_KNOWS_TASK = "SELECT 1 FROM class_task WHERE class = :class AND task = :task"
_NO_ROOM = "SELECT 1 FROM queue WHERE ns = :ns AND name = :queue AND held >= maximum"

_SHARE_TAKEN = "SELECT 1 FROM seat WHERE worker = :id AND queue = :queue AND held >= maximum"

_SERVED = """
    SELECT 1 FROM seat s JOIN worker w ON w.id = s.worker
     WHERE s.ns = :ns AND s.queue = :queue AND :now - w.beat < w.lapse_seconds LIMIT 1
"""
# The CROSS keeps the order of the joins: first the classes, of which there are few.
_MATCHING = """
    SELECT {columns} FROM ({classes}) c
     CROSS JOIN seat s ON s.ns = :ns AND s.queue = :queue AND s.class = c.class {on_node}
     CROSS JOIN worker w ON w.id = s.worker
"""
_MATCHING_ANYWHERE = _MATCHING.format(columns=WORKER_COLUMNS, on_node="", classes=_CLASSES)
_MATCHING_ON_NODE = _MATCHING.format(columns=WORKER_COLUMNS, on_node="AND s.node = :node", classes=_CLASSES)
_ANY_CLASS = f"SELECT 1 FROM ({_CLASSES}) LIMIT 1"

#: Of several true reasons the one that helps most.
_MOST_USEFUL = (Reason.FULL, Reason.WORKER_LIMIT, Reason.DRAINING, Reason.UNKNOWN_CAPACITY, Reason.LATE, Reason.LAPSED)


def condition(worker: WorkerRow, now: float) -> Reason | None:
    """What keeps this worker from taking anything now; ``None`` = nothing."""
    age = now - worker.beat
    if age >= worker.lapse_seconds:
        return Reason.LAPSED
    if age >= worker.lease_seconds:
        return Reason.LATE
    if is_draining(worker, now):
        return Reason.DRAINING
    if worker.capacity is None:
        return Reason.UNKNOWN_CAPACITY
    if worker.held >= worker.capacity:
        return Reason.FULL
    return None


def is_draining(worker: WorkerRow, now: float) -> bool:
    """Whether somebody drained it, and that has not ended by itself."""
    return worker.drain is not None and (worker.drain_until is None or now < worker.drain_until)


def why_not(
    tx: Transaction, worker: WorkerRow, queue: str, task: str | None = None, node: str | None = None
) -> Reason | None:
    """Why this worker could not be chosen for this now; ``None`` = it could."""
    if queue not in worker.queues:
        return Reason.OTHER_QUEUE
    if task is not None and not tx.one(_KNOWS_TASK, {"class": worker.task_class, "task": task}):
        return Reason.UNKNOWN_TASK
    if node is not None and node != worker.node:
        return Reason.OTHER_NODE
    reason = condition(worker, tx.now)
    if reason is not None:
        return reason
    if tx.one(_SHARE_TAKEN, {"id": worker.id, "queue": queue}):
        return Reason.WORKER_LIMIT
    return Reason.LIMIT if tx.one(_NO_ROOM, {"ns": tx.ns, "queue": queue}) else None


def choose(tx: Transaction, demand: Demand) -> WorkerRow | None:
    """The first ready worker, in name order, after the last one chosen, else the first of all; moves the cursor."""
    asked = _asked(tx, demand)
    due, has_room, cursor = tx.one(_LOOK, asked)
    if due:
        catch_up(tx)
        _, has_room, cursor = tx.one(_LOOK, asked)
    if not has_room:
        return None
    following = _NEXT_ANYWHERE if demand.node is None else _NEXT_ON_NODE
    asked["after"] = cursor or ""
    while True:
        row = tx.one(following, asked)
        if row is None:
            if not asked["after"]:
                return None
            asked["after"] = ""
            continue
        worker = WorkerRow(*row)
        if condition(worker, tx.now) is None:
            break
        # Its heartbeat will put it back.
        tx.execute(_MARK_LATE, {"id": worker.id})
    if worker.name != cursor:
        tx.execute(_MOVE_CURSOR, {**asked, "name": worker.name})
    return worker


def is_served(tx: Transaction, queue: str) -> bool:
    """Whether any worker that has not lapsed serves the queue."""
    return tx.one(_SERVED, {"ns": tx.ns, "queue": queue, "now": tx.now}) is not None


def why_nobody(tx: Transaction, demand: Demand) -> Reason:
    """The most useful single reason why :func:`choose` found nobody, for a queue that is served."""
    asked = _asked(tx, demand)
    if tx.one(_NO_ROOM, asked):
        return Reason.LIMIT
    reasons = set()
    for row in tx.execute(_MATCHING_ANYWHERE if demand.node is None else _MATCHING_ON_NODE, asked):
        worker = WorkerRow(*row)
        reason = condition(worker, tx.now)
        if reason is _MOST_USEFUL[0]:
            return reason  # usually at the first one: the fleet is full
        # Nothing else keeps a worker from being chosen.
        reasons.add(reason or Reason.WORKER_LIMIT)
    for reason in _MOST_USEFUL:
        if reason in reasons:
            return reason
    return Reason.OTHER_NODE if tx.one(_ANY_CLASS, asked) else Reason.UNKNOWN_TASK


def _asked(tx: Transaction, demand: Demand) -> dict[str, Any]:
    return {
        "ns": tx.ns,
        "now": tx.now,
        "queue": demand.queue,
        "task": demand.task,
        "node": demand.node,
        "task_key": demand.task or "",
        "node_key": demand.node or "",
    }
