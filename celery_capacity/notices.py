"""What is said once, and not at every dispatch."""

from __future__ import annotations

import logging
import time

__all__ = ("Notices",)

logger = logging.getLogger(__name__)

#: What is said once in a while: at most once in this many seconds.
PAUSE_SECONDS = 60.0
#: Names that are remembered; they may be made up by the caller, so there is an end to it.
_NAMES = 10_000


class Notices:
    """Tells about queues that nobody serves, and nodes that are not there.  For one process, or one of its threads."""

    def __init__(self) -> None:
        #: When it may be said again, on the monotonic clock.
        self._again_at: dict[tuple[str, ...], float] = {}
        self._nowhere: set[tuple[str, str]] = set()

    def unserved(self, queue: str) -> None:
        """No worker serves the queue.  Said once in a while."""
        if self._may("unserved", queue):
            logger.info(
                "no capacity worker serves queue %r; publishing as plain Celery does",
                queue,
                extra={"action": "unserved", "queue": queue},
            )

    def parked_by_task(self, task: str, parent: str) -> None:
        """``parent``, which runs and holds a slot, has sent ``task``, for which there is none.  Said once in a while."""
        if self._may("parked_by_task", task, parent):
            logger.warning(
                "task %s is parked while every slot is taken, one of them by task %s, which sent it; "
                "if that one waits for the result, it waits for a slot to come free elsewhere",
                task,
                parent,
                extra={"action": "parked_by_task", "task": task, "parent": parent},
            )

    def nowhere(self, queue: str, node: str, task: str | None, lot: str) -> None:
        """A task waits for a node that has no worker for it.  Said once, until :meth:`somewhere`."""
        if (queue, node) in self._nowhere:
            return
        if len(self._nowhere) >= _NAMES:
            self._nowhere.clear()
        self._nowhere.add((queue, node))
        logger.warning(
            "no worker of node %r takes %s from queue %r: what is pinned to it waits in %s until there is one",
            node,
            task or "tasks",
            queue,
            lot,
            extra={"action": "nowhere", "queue": queue, "node": node, "task": task, "lot": lot},
        )

    def somewhere(self, queue: str, node: str) -> None:
        """There is a worker of that node: if it goes away again, that is worth a word."""
        self._nowhere.discard((queue, node))

    def _may(self, *what: str) -> bool:
        now = time.monotonic()
        if now < self._again_at.get(what, now):
            return False
        if len(self._again_at) >= _NAMES:
            self._again_at.clear()
        self._again_at[what] = now + PAUSE_SECONDS
        return True
