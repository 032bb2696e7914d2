"""What census and overview show.  Counted from the slots themselves, and without those whose deadline has passed."""

from __future__ import annotations

import json
from typing import Any

from ..models import Census, CounterTotal, LotView, Overview, QueueView, Reason, Share, WorkerState, WorkerView
from ._sqlite_choice import condition, is_draining
from ._sqlite_file import Transaction
from ._sqlite_rows import WORKER_COLUMNS, WorkerRow

__all__ = ("census", "overview")

_WORKERS = f"SELECT {WORKER_COLUMNS} FROM worker w WHERE w.ns = :ns ORDER BY w.name"
_GONE = "SELECT name, node, epoch, capacity, queues, beat, host, pid FROM gone WHERE ns = :ns"
_CLASSES_WITH_TASK = "SELECT class FROM class_task WHERE task = :task"
_HELD = """
    SELECT {by}, count(committed_at), count(*) FROM slot
     WHERE ns = :ns AND (deadline IS NULL OR deadline > :now) GROUP BY {by}
"""
_HELD_BY_WORKER = _HELD.format(by="worker")
_HELD_BY_QUEUE = _HELD.format(by="queue")
_LIMITS = "SELECT name, maximum FROM queue WHERE ns = :ns AND maximum IS NOT NULL"
_SERVED_QUEUES = "SELECT DISTINCT queue FROM pool WHERE ns = :ns"
_SHARES = "SELECT worker, queue, maximum FROM seat WHERE ns = :ns AND maximum IS NOT NULL ORDER BY worker, queue"
_HELD_BY_SHARE = _HELD.format(by="worker, queue")
_COUNTERS = "SELECT name, total FROM counter WHERE ns = :ns ORDER BY name"
_WAITING_QUEUES = "SELECT DISTINCT queue FROM mark WHERE ns = :ns AND empty = 0"
_LOTS = "SELECT lot, queue, version FROM mark WHERE ns = :ns AND empty = 0 ORDER BY lot"

_STATES = {
    Reason.LAPSED: WorkerState.LAPSED,
    Reason.LATE: WorkerState.LATE,
    Reason.DRAINING: WorkerState.DRAINING,
    Reason.UNKNOWN_CAPACITY: WorkerState.UNKNOWN,
}


def census(tx: Transaction, queue: str, task: str | None, node: str | None) -> Census:
    """For every registered worker: could it be chosen for this now, and if not, why."""
    shown = {q.name: q for q in _queues(tx)}.get(queue, QueueView(queue, None, 0, False))
    has_room = shown.limit is None or shown.held < shown.limit
    knowing = None if task is None else {row[0] for row in tx.execute(_CLASSES_WITH_TASK, {"task": task})}

    def reason(worker: WorkerRow) -> Reason | None:
        """As :func:`~._sqlite_choice.why_not`, without a question to the file for each worker."""
        if queue not in worker.queues:
            return Reason.OTHER_QUEUE
        if knowing is not None and worker.task_class not in knowing:
            return Reason.UNKNOWN_TASK
        if node is not None and node != worker.node:
            return Reason.OTHER_NODE
        if unfit := condition(worker, tx.now):
            return unfit
        if any(share.queue == queue and share.held >= share.limit for share in shares.get(worker.id, ())):
            return Reason.WORKER_LIMIT
        return None if has_room else Reason.LIMIT

    shares = _shares(tx)
    views = tuple(
        _view(tx, worker, committed, reason(worker), shares.get(worker.id, ())) for worker, committed in _workers(tx)
    )
    return Census(queue, task, node, views, shown.limit, shown.held, shown.waiting)


def overview(tx: Transaction, namespace: str) -> Overview:
    """All workers, gone ones too, all queues, and all counters."""
    shares = _shares(tx)
    views = [
        _view(tx, worker, committed, condition(worker, tx.now), shares.get(worker.id, ()))
        for worker, committed in _workers(tx)
    ]
    views += [_gone_view(tx, *row) for row in tx.execute(_GONE, {"ns": tx.ns})]
    views.sort(key=lambda shown: shown.name)
    counters = tuple(CounterTotal(*row) for row in tx.execute(_COUNTERS, {"ns": tx.ns}))
    lots = tuple(LotView(*row) for row in tx.execute(_LOTS, {"ns": tx.ns}))
    return Overview(namespace, tuple(views), tuple(_queues(tx)), counters, lots)


def _workers(tx: Transaction) -> list[tuple[WorkerRow, int]]:
    """All registered workers, with what they hold at this instant, and how much of it is committed."""
    counts = {row[0]: row[1:] for row in tx.execute(_HELD_BY_WORKER, {"ns": tx.ns, "now": tx.now})}
    found = []
    for row in tx.execute(_WORKERS, {"ns": tx.ns}):
        worker = WorkerRow(*row)
        committed, held = counts.get(worker.id, (0, 0))
        found.append((worker._replace(held=held), committed))
    return found


def _shares(tx: Transaction) -> dict[int, tuple[Share, ...]]:
    """By the row of the worker."""
    limits = tx.execute(_SHARES, {"ns": tx.ns}).fetchall()
    if not limits:
        return {}
    held = tx.execute(_HELD_BY_SHARE, {"ns": tx.ns, "now": tx.now})
    counts = {(worker, queue): count for worker, queue, _, count in held}
    found: dict[int, tuple[Share, ...]] = {}
    for worker, queue, limit in limits:
        found[worker] = (*found.get(worker, ()), Share(queue, counts.get((worker, queue), 0), limit))
    return found


def _queues(tx: Transaction) -> list[QueueView]:
    parameters: dict[str, Any] = {"ns": tx.ns, "now": tx.now}
    held = {name: count for name, _, count in tx.execute(_HELD_BY_QUEUE, parameters)}
    limits = dict(tx.execute(_LIMITS, parameters).fetchall())
    waiting = {name for (name,) in tx.execute(_WAITING_QUEUES, parameters)}
    served = {name for (name,) in tx.execute(_SERVED_QUEUES, parameters)}
    names = sorted(held.keys() | limits.keys() | waiting | served)
    return [QueueView(name, limits.get(name), held.get(name, 0), name in waiting) for name in names]


def _view(
    tx: Transaction, worker: WorkerRow, committed: int, reason: Reason | None, shares: tuple[Share, ...]
) -> WorkerView:
    state = condition(worker, tx.now)
    return WorkerView(
        name=worker.name,
        node=worker.node,
        epoch=worker.epoch,
        state=WorkerState.READY if state is None else _STATES.get(state, WorkerState.READY),
        capacity=worker.capacity,
        reserved=worker.held - committed,
        committed=committed,
        queues=worker.queues,
        reason=reason,
        detail=(worker.drain or "") if is_draining(worker, tx.now) else "",
        lease_age=tx.now - worker.beat,
        host=worker.host,
        pid=worker.pid,
        shares=shares,
    )


def _gone_view(
    tx: Transaction,
    name: str,
    node: str,
    epoch: int,
    capacity: int | None,
    queues: str,
    beat: float,
    host: str,
    pid: int,
) -> WorkerView:
    return WorkerView(
        name=name,
        node=node,
        epoch=epoch,
        state=WorkerState.LAPSED,
        capacity=capacity,
        reserved=0,
        committed=0,
        queues=tuple(json.loads(queues)),
        reason=Reason.LAPSED,
        detail="gone, waits for clean-up",
        lease_age=tx.now - beat,
        host=host,
        pid=pid,
    )
