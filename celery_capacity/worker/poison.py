"""A task that kills whoever runs it must not go round for ever.

Only tasks that are acknowledged late can, and only deliveries that say that they are not the first are looked at, when
they are about to begin.  The registry counts them by task id, and forgets the count when the task ends, however it ends;
so what is counted is how often it was begun and never heard of again.

What was running beside such a task has died with it each time, and comes back at the same moment.  So that it does not
share its end, a task that begins for the last time is left alone with those that were never delivered before: others
that were wait until it has ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any

from celery import signals
from celery.exceptions import WorkerLostError
from celery.worker import state

from ..errors import RegistryError
from ..naming import dead_letter_queue
from .ledger import Entry, Phase

if TYPE_CHECKING:
    from .agent import WorkerAgent
    from .mover import Mover

__all__ = ("PoisonCheck", "Verdict")

logger = logging.getLogger(__name__)

#: How long a task id is remembered after its last beginning.
_REMEMBER_SECONDS = 86_400.0
#: Not an end: the process that ran the task is gone, and the message may come back.
_LOST = (WorkerLostError, SystemExit, KeyboardInterrupt)


class Verdict(Enum):
    """What becomes of a task that is about to begin."""

    BEGIN = "begin"
    #: It keeps its slot; see :meth:`PoisonCheck.next`.
    WAIT = "wait"
    SET_ASIDE = "set aside"


class PoisonCheck:
    """Used by the worker's main loop; told of the ends from any thread."""

    def __init__(self, agent: WorkerAgent, mover: Mover) -> None:
        self.agent = agent
        self.mover = mover
        #: The one that has begun here for the last time.
        self._last: Entry | None = None
        self._waiting: deque[tuple[Entry, Any]] = deque()

    def judge(self, entry: Entry, request: Any) -> Verdict:
        """Count one more beginning.  If there have been too many, the message is set aside.

        :raises OSError: or another of the broker's errors: nothing is lost, the message is not acknowledged.
        """
        limit = self.agent.settings.max_deliveries
        if not limit or not entry.redelivered or not request.task.acks_late:
            return Verdict.BEGIN
        if self._is_busy:
            # Not counted: it has not begun.
            entry.phase = Phase.WAITING
            self._waiting.append((entry, request))
            logger.info(
                "task %s[%s] waits for the end of one that may be poison",
                request.name,
                request.id,
                extra={"action": "suspect_waits", "task_id": request.id, "worker": self.agent.name},
            )
            return Verdict.WAIT
        begun = self._strike(request.id, _REMEMBER_SECONDS)
        entry.struck = bool(begun)
        # The first delivery was not counted: so many have come to nothing before this one.
        if begun >= limit:
            self._set_aside(entry, request, begun)
            return Verdict.SET_ASIDE
        if begun == limit - 1:
            self._last = entry
        return Verdict.BEGIN

    @property
    def _is_busy(self) -> bool:
        return self._last is not None and self.agent.ledger.find(self._last.message) is self._last

    @property
    def has_next(self) -> bool:
        """Can one that waits begin now?"""
        return bool(self._waiting) and not self._is_busy

    def next(self) -> tuple[Entry, Any]:
        """The one that has waited the longest; it is to be judged again."""
        return self._waiting.popleft()

    def forget_waiting(self) -> None:
        """The connection is gone, and they will be delivered anew."""
        self._waiting.clear()

    def ended(self, entry: Entry, request: Any, exc: BaseException | None = None) -> None:
        """The task has come to an end here, or its process has (``exc``)."""
        if entry.struck and not isinstance(exc, _LOST):
            entry.struck = False
            self._strike(request.id, 0.0)

    def _strike(self, task_id: str, ttl_seconds: float) -> int:
        try:
            return self.agent.call(self.agent.registry.strike, task_id, ttl_seconds)
        except RegistryError:
            return 0  # it is counted the next time

    def _set_aside(self, entry: Entry, request: Any, begun: int) -> None:
        agent = self.agent
        info = entry.message.delivery_info or {}
        queue = entry.queue or info.get("routing_key") or agent.own_queue.name
        why = f"delivered {begun} times, and its worker or its process died each time"
        story = {
            "task": request.name,
            "task_id": request.id,
            "queue": queue,
            "deliveries": begun + 1,
            "worker": agent.name,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "reason": why,
        }
        where = dead_letter_queue(agent.settings.namespace, queue)
        self.mover.set_aside(entry.message, where, queue, story)
        request.acknowledge()
        state.task_ready(request)
        agent.count("dead_letter")
        logger.error(
            "task %s[%s] was %s; it is in %s now",
            request.name,
            request.id,
            why,
            where,
            extra={"action": "dead_letter", "worker": agent.name, "to": where, **_without(story, "worker")},
        )
        self._strike(request.id, 0.0)
        entry.struck = False
        self._fail(request, WorkerLostError(f"Task {request.name}[{request.id}] was {why}."))

    def _fail(self, request: Any, exc: WorkerLostError) -> None:
        """So that nobody waits for its result for ever."""
        try:
            request.task.backend.mark_as_failure(
                request.id, exc, request=request._context, store_result=request.store_errors
            )
            request.send_event("task-failed", exception=repr(exc), traceback="")
            signals.task_failure.send(
                sender=request.task,
                task_id=request.id,
                exception=exc,
                args=request.args,
                kwargs=request.kwargs,
                traceback=None,
                einfo=None,
            )
        except Exception as error:  # noqa: BLE001 - the result backend may be away; the message is safe
            self.agent.count("record_failed")
            logger.warning(
                "could not record the failure of task %s[%s]: %r",
                request.name,
                request.id,
                error,
                extra={"action": "record_failed", "task_id": request.id},
            )


def _without(story: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in story.items() if key != name}
