"""What census and overview show of a world.  Nothing here takes its lock."""

from __future__ import annotations

from dataclasses import replace

from ..models import Census, CounterTotal, LotView, Overview, QueueView, Reason, Share, WorkerState, WorkerView
from ._memory_records import DRAINING, FULL, LAPSED, LATE, READY, REASONS, UNKNOWN, Worker
from ._memory_world import World

__all__ = ("census", "overview")

_STATES = {
    READY: WorkerState.READY,
    FULL: WorkerState.READY,
    UNKNOWN: WorkerState.UNKNOWN,
    DRAINING: WorkerState.DRAINING,
    LATE: WorkerState.LATE,
    LAPSED: WorkerState.LAPSED,
}


def census(world: World, now: float, queue: str, task: str | None, node: str | None) -> Census:
    """For every registered worker: could it be chosen for this now, and if not, why."""
    state = world.queues.get(queue)
    views = tuple(
        _view(worker, now, world.why_not(worker, queue, task, node)) for _, worker in sorted(world.workers.items())
    )
    limit, held = (state.limit, state.held) if state is not None else (None, 0)
    return Census(queue, task, node, views, limit, held, queue in world.marks.waiting())


def overview(world: World, now: float, namespace: str) -> Overview:
    """All workers, gone ones too, all queues, and all counters."""
    views = [_view(worker, now, REASONS[worker.status]) for worker in world.workers.values()]
    for gone in world.gone.values():
        view = _view(gone.worker, now, Reason.LAPSED)
        views.append(replace(view, state=WorkerState.LAPSED, detail="gone, waits for clean-up"))
    waiting = world.marks.waiting()
    queues = []
    for name in sorted(world.queues.keys() | waiting):
        state = world.queues.get(name)
        limit, held = (state.limit, state.held) if state is not None else (None, 0)
        queues.append(QueueView(name, limit, held, name in waiting))
    counters = tuple(CounterTotal(*counter) for counter in sorted(world.counters.items()))
    lots = tuple(
        LotView(lot, mark.queue, mark.version) for lot, mark in sorted(world.marks.items()) if not mark.found_empty
    )
    return Overview(namespace, tuple(sorted(views, key=lambda view: view.name)), tuple(queues), counters, lots)


def _view(worker: Worker, now: float, reason: Reason | None) -> WorkerView:
    advert = worker.advert
    return WorkerView(
        name=worker.name,
        node=advert.node,
        epoch=worker.epoch,
        state=_STATES[worker.status],
        capacity=worker.capacity,
        reserved=len(worker.slots) - worker.committed,
        committed=worker.committed,
        queues=advert.queues,
        reason=reason,
        detail=worker.drain or "",
        lease_age=now - worker.beat,
        host=advert.host,
        pid=advert.pid,
        shares=tuple(Share(name, share.held, share.limit) for name, share in sorted(worker.shares.items())),
    )
