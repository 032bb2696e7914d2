"""From the replies of the scripts to what census and overview show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ..models import Census, CounterTotal, LotView, Overview, QueueView, Reason, Share, WorkerState, WorkerView

__all__ = ("census", "overview")

#: What stands before the queue in a mark.
_MARK = re.compile(rb"(\d+) \d+ ")
_STATES = {
    b"LAPSED": WorkerState.LAPSED,
    b"LATE": WorkerState.LATE,
    b"DRAINING": WorkerState.DRAINING,
    b"UNKNOWN_CAPACITY": WorkerState.UNKNOWN,
}


def census(reply: list[Any], queue: str, task: str | None, node: str | None) -> Census:
    """Of the reply of ``census.lua``."""
    now, shown, workers = reply
    state = _queue(shown)
    views = _in_name_order(_worker(fields, now) for fields in workers)
    return Census(queue, task, node, views, state.limit, state.held, state.waiting)


def overview(reply: list[Any], namespace: str) -> Overview:
    """Of the reply of ``overview.lua``."""
    now, queues, workers, gone, counters, marks = reply
    views = [_worker(fields, now) for fields in workers]
    views += [_gone(fields, now) for fields in gone]
    shown = sorted((_queue(fields) for fields in queues), key=lambda queue: queue.name)
    totals = [CounterTotal(name.decode(), int(n)) for name, n in _pairs(counters)]
    lots = sorted(
        (
            LotView(lot.decode(), mark[parts.end() :].decode(), int(parts[1]))
            for lot, mark in _pairs(marks)
            if (parts := _MARK.match(mark))  # not of one that was found empty
        ),
        key=lambda lot: lot.name,
    )
    return Overview(namespace, _in_name_order(views), tuple(shown), tuple(sorted(totals)), tuple(lots))


def _pairs(reply: list[Any]) -> Iterable[tuple[bytes, bytes]]:
    return zip(reply[::2], reply[1::2], strict=True)


def _in_name_order(views: Iterable[WorkerView]) -> tuple[WorkerView, ...]:
    return tuple(sorted(views, key=lambda view: view.name))


def _queue(fields: list[Any]) -> QueueView:
    name, limit, held, waiting = fields
    return QueueView(name.decode(), int(limit) if limit else None, held, bool(waiting))


def _worker(fields: list[Any], now: int) -> WorkerView:
    epoch, node, capacity, held, late_at, _, drain, _, _, _, committed, queues, lease, host, pid, *shown = fields
    name, condition, reason, *shares = shown
    return WorkerView(
        name=name.decode(),
        node=node.decode(),
        epoch=int(epoch),
        state=_STATES.get(condition, WorkerState.READY),
        capacity=int(capacity) if capacity else None,
        reserved=int(held) - int(committed),
        committed=int(committed),
        queues=tuple(json.loads(queues)),
        reason=Reason[reason.decode()] if reason else None,
        detail=drain.decode(),
        lease_age=(now - int(late_at) + int(lease)) / 1e6,
        host=host.decode(),
        pid=int(pid),
        shares=tuple(
            Share(queue.decode(), held, limit)
            for queue, held, limit in sorted(zip(shares[::3], shares[1::3], shares[2::3], strict=True))
        ),
    )


def _gone(fields: list[Any], now: int) -> WorkerView:
    name, node, epoch, capacity, queues, beat, host, pid = fields
    return WorkerView(
        name=name.decode(),
        node=node.decode(),
        epoch=int(epoch),
        state=WorkerState.LAPSED,
        capacity=int(capacity) if capacity else None,
        reserved=0,
        committed=0,
        queues=tuple(json.loads(queues)),
        reason=Reason.LAPSED,
        detail="gone, waits for clean-up",
        lease_age=(now - beat) / 1e6,
        host=host.decode(),
        pid=int(pid),
    )
