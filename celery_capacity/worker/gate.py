"""Between Celery and the pool: no task passes without a slot, and every end gives the slot back.

Release is here, in the parent process, since a child that is lost or killed says nothing.  The methods that hand a
job to the pool, and that the pool calls at its end, are looked up on the request (Celery builds a subclass of its
request for speed, in which a mixin would not be called), so they are wrapped there.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.worker import state

from ..models import Refusal, Slot
from .ledger import Entry, Phase
from .mover import Mail
from .poison import PoisonCheck, Verdict
from .unacked import still_ours

if TYPE_CHECKING:
    from .acceptance import Acceptance
    from .agent import WorkerAgent
    from .mover import Mover

__all__ = ("Gatekeeper",)

logger = logging.getLogger(__name__)

#: A request whose time comes within this is as good as due.
_DUE_SECONDS = 0.05
_HOOKS = ("execute_using_pool", "on_success", "on_failure", "on_timeout")


class Gatekeeper:
    """Hands requests to the pool, one slot each.

    :param forward: Celery's own ``on_task_request``.
    :param give_back: takes a slot that has come free, from any thread.
    """

    def __init__(
        self,
        agent: WorkerAgent,
        forward: Callable[[Any], Any],
        give_back: Callable[[Slot], None],
        mover: Mover,
    ) -> None:
        self.agent = agent
        self.give_back = give_back
        self.mover = mover
        self.acceptance: Acceptance | None = None
        self.poison = PoisonCheck(agent, mover)
        self._forward = forward
        #: Due, but without a slot, and from a queue that is not managed: they wait here, as they would in Celery.
        self._waiting: deque[tuple[Entry, Any]] = deque()

    # -- Celery's side ---------------------------------------------------------------------------------

    def pass_on(self, message: Any) -> None:
        """Celery's handler of task messages."""
        handler = self.agent.consumer.task_consumer.handler
        if handler is not None:
            handler(message)

    def on_received(self, request: Any) -> None:
        """Celery has made a request of a message and not refused it."""
        entry = self.agent.ledger.find(request.message)
        if entry is None:
            return
        entry.request = request
        if entry.slot is not None and self.is_due(request):
            # It has its slot; Celery's timer would only bring it back a moment later (up to a second without an
            # event loop).  The task still sees the eta in its request.
            request._eta = None

    def on_request(self, request: Any) -> None:
        """Stands for Celery's ``on_task_request``: the task is due."""
        entry = self.agent.ledger.find(request.message)
        if entry is None:
            mail = Mail.read(request.message)
            entry = self.agent.ledger.add(Entry(request.message, mail.queue, mail.node, redelivered=mail.redelivered))
        entry.request = request
        if entry.slot is None and not self._admit(entry, request):
            return
        self._hand_over(entry, request)

    def _admit(self, entry: Entry, request: Any) -> bool:
        """A slot for a task that was held back, or that comes from a queue that is not managed."""
        if request.revoked():
            # Celery has announced it; the pool would only do it again.
            self.finish(entry)
            return False
        if self.agent.may_have_lapsed_since(entry.since) and not self._is_ours(entry, request):
            return False
        if entry.node not in (None, self.agent.node) and entry.queue in self.agent.managed:
            self._send_away(entry, request)
            return False
        answer = self.agent.claim(entry.queue, entry.message.headers.get("task"), request.id)
        if not isinstance(answer, Refusal):
            self.agent.ledger.attach(entry, answer)
            return True
        if entry.queue in self.agent.managed:
            self._send_away(entry, request)
        else:
            entry.phase = Phase.WAITING
            self._waiting.append((entry, request))
        return False

    def _is_ours(self, entry: Entry, request: Any) -> bool:
        """This worker was away for so long that what it held back may have been given to another one."""
        consumer = self.agent.consumer
        try:
            if still_ours(entry.message, self.agent.settings.namespace, self.agent.name):
                return True
        except (*consumer.connection_errors, *consumer.channel_errors):
            return True  # rather twice than never
        self._drop(entry, request)
        self.agent.count("dropped_duplicate")
        logger.warning(
            "task %s[%s] is dropped here: while %s was away it was given back",
            request.name,
            request.id,
            self.agent.name,
            extra={"action": "dropped_duplicate", "task_id": request.id, "worker": self.agent.name},
        )
        return False

    def _drop(self, entry: Entry, request: Any) -> None:
        state.reserved_requests.discard(request)
        state.requests.pop(request.id, None)
        self.finish(entry)

    def _send_away(self, entry: Entry, request: Any) -> None:
        """Due, and no slot here: let somebody else have it."""
        self._drop(entry, request)
        if self.acceptance is not None:
            self.acceptance.hand_away(entry.message, _mail_of(entry, request))

    @property
    def has_waiting(self) -> bool:
        """Does a due task wait for a slot here, or for the end of another one?"""
        return bool(self._waiting) or self.poison.has_next

    def serve_waiting(self) -> bool:
        """Give free slots to those that wait for one.  True if somebody still waits for one."""
        while self.poison.has_next:
            self._hand_over(*self.poison.next())
        while self._waiting:
            entry, request = self._waiting[0]
            if request.revoked():
                self._waiting.popleft()
                self.finish(entry)
                continue
            answer = self.agent.claim(entry.queue, entry.message.headers.get("task"), request.id)
            if isinstance(answer, Refusal):
                return True
            self._waiting.popleft()
            self.agent.ledger.attach(entry, answer)
            self._hand_over(entry, request)
        return False

    # -- the pool's side -------------------------------------------------------------------------------

    def _hand_over(self, entry: Entry, request: Any) -> None:
        try:
            verdict = self.poison.judge(entry, request)
        except BaseException:
            self.finish(entry)
            raise
        if verdict is not Verdict.BEGIN:
            if verdict is Verdict.SET_ASIDE:
                self.finish(entry)
            return
        was_held_back = entry.phase in (Phase.DELAYED, Phase.WAITING)
        entry.phase = Phase.HANDED
        self._arm(entry, request)
        # A solo pool runs it in this very call, and may take its time.
        self.agent.turned_at = math.inf
        try:
            self._forward(request)
        except BaseException:
            self.finish(entry)
            raise
        finally:
            self.agent.turned()
        if request not in state.reserved_requests:
            # Refused at the last moment (revoked), or run to its end in this very call (solo).
            self.finish(entry)
        elif was_held_back:
            self._let_pool_grow(request)

    def _let_pool_grow(self, request: Any) -> None:
        """Celery's autoscaler looks when a message is received, and every 30 s; a full worker receives none."""
        autoscaler = getattr(self.agent.controller, "autoscaler", None)
        if autoscaler is not None:
            autoscaler.maybe_scale(request)

    def _arm(self, entry: Entry, request: Any) -> None:
        execute, on_success, on_failure, on_timeout = (getattr(request, name) for name in _HOOKS)

        def execute_using_pool(*args: Any, **kwargs: Any) -> Any:
            # Maybe long after it was handed over: Celery keeps what the pool has no process for (it has shrunk, or
            # has not grown yet), and looks only now whether it was revoked meanwhile.
            try:
                return execute(*args, **kwargs)
            except BaseException:
                self._ended(entry, request)
                raise

        def ended_well(*args: Any, **kwargs: Any) -> Any:
            try:
                return on_success(*args, **kwargs)
            finally:
                self._ended(entry, request)

        def ended_badly(exc_info: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return on_failure(exc_info, *args, **kwargs)
            finally:
                exc = exc_info.exception
                self._ended(entry, request, getattr(exc, "exc", exc))

        def timed_out(soft: bool, timeout: float) -> Any:
            try:
                return on_timeout(soft, timeout)
            finally:
                if not soft:
                    self._ended(entry, request)

        request.execute_using_pool = execute_using_pool
        request.on_success, request.on_failure, request.on_timeout = ended_well, ended_badly, timed_out

    def _ended(self, entry: Entry, request: Any, exc: BaseException | None = None) -> None:
        # The closures and the request hold each other; let go, rather than leave it to the collector.
        for name in _HOOKS:
            request.__dict__.pop(name, None)
        try:
            self.poison.ended(entry, request, exc)
        finally:
            self.finish(entry)

    def finish(self, entry: Entry) -> None:
        """The message has ended here, whatever the end.  Harmless twice; from any thread."""
        slot = self.agent.ledger.finish(entry)
        if slot is not None:
            self.give_back(slot)

    # -- what nobody thought of ------------------------------------------------------------------------

    def sweep(self, grace_seconds: float) -> int:
        """Give back the slots of requests that Celery no longer has; returns how many.  Counted and logged.

        :param grace_seconds: entries younger than this are left alone; their hand-over may be under way.
        """
        now, found = time.monotonic(), 0
        for entry in self.agent.ledger.entries():
            if now - entry.since < grace_seconds or entry.phase is Phase.WAITING:
                continue
            request = entry.request
            alive = request is not None and (
                request in state.reserved_requests
                or request in state.active_requests
                or (entry.phase is Phase.DELAYED and not request.message.acknowledged)
                or _is_in_pool(request)
            )
            if alive or not entry.missed:
                # The main loop may be in the middle of its end: the next sweep looks again.
                entry.missed = not alive
                continue
            found += 1
            # Celery has ended a cancelled one by itself (cold shutdown); its process is about to follow.
            if entry.slot is not None and not getattr(request, "_already_cancelled", False):
                self.agent.count("swept")
                logger.error(
                    "slot %s was held for a task that has ended unseen; given back",
                    entry.slot.token,
                    extra={"action": "swept", "token": entry.slot.token, "worker": self.agent.name},
                )
            self.finish(entry)
        return found

    def forget_unstarted(self) -> None:
        """The broker's connection is gone: what has not begun will be delivered anew, here or elsewhere.

        Celery has dropped it by now (``Consumer.on_close``).  Only a pool that cannot take back what it was given
        runs that too.
        """
        self._waiting.clear()
        self.poison.forget_waiting()
        flushes = bool(getattr(self.agent.controller.pool, "flush", None))
        for entry in self.agent.ledger.entries():
            request = entry.request
            if (
                entry.phase is Phase.HANDED
                and request is not None
                and (request in state.active_requests or not flushes)
            ):
                continue
            self.finish(entry)

    @staticmethod
    def is_due(request: Any) -> bool:
        """Is the eta of a request in the past, or about to be?"""
        eta = request.eta
        return eta is not None and bool(eta.timestamp() <= time.time() + _DUE_SECONDS)


def _is_in_pool(request: Any) -> bool:
    """A request that was terminated is no longer Celery's, but its process is not replaced before the pool has seen it."""
    result = getattr(request, "_apply_result", None)
    result = result() if callable(result) else None
    ready = getattr(result, "ready", None)
    return ready is not None and not ready()


def _mail_of(entry: Entry, request: Any) -> Mail:
    """The outside of a message whose token is used up and whose origin has been restored."""
    mail = Mail.read(entry.message)
    info = entry.message.delivery_info or {}
    origin = {**mail.origin, "exchange": info.get("exchange") or "", "routing_key": info.get("routing_key") or ""}
    origin["queue"] = entry.queue
    return Mail(mail.task, request.id, entry.queue, mail.node, None, 0, origin, entry.redelivered)
