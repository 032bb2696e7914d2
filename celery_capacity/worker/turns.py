"""In which order a worker looks into its lots."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from ..naming import later_lot, node_lot, unknown_lot

__all__ = ("Turns",)


class Turns:
    """Whose turn it is, of the queues that a worker serves.  Used by the worker's main loop."""

    def __init__(self, namespace: str, node: str) -> None:
        self._namespace = namespace
        self._node = node
        #: The queue that had its turn last.
        self.served: str | None = None
        #: Until when a lot is not looked at.
        self._left_alone: dict[str, float] = {}
        #: The names of each queue's lots: asked for at every slot that comes free.
        self._lots: dict[str, tuple[str, ...]] = {}

    def leave_alone(self, lot: str, seconds: float) -> None:
        """Do not look at it for so long."""
        self._left_alone[lot] = time.monotonic() + seconds

    def names(self, managed: Iterable[str], *, later: bool) -> Iterator[tuple[str, str]]:
        """Lot and queue, beginning with the queue after the one that was served last.

        Of each queue the pinned tasks come first, since they can run nowhere else; those that are not due come last,
        and only with ``later``.
        """
        queues = list(managed)
        turn = queues.index(self.served) + 1 if self.served in queues else 0
        now = time.monotonic()
        for queue in queues[turn:] + queues[:turn]:
            for name in self._lots_of(queue)[: None if later else -1]:
                if now >= self._left_alone.get(name, 0.0):
                    yield name, queue

    def _lots_of(self, queue: str) -> tuple[str, ...]:
        lots = self._lots.get(queue)
        if lots is None:
            pinned = node_lot(self._namespace, queue, self._node)
            lots = pinned, queue, unknown_lot(self._namespace, queue), later_lot(self._namespace, queue)
            self._lots[queue] = lots
        return lots
