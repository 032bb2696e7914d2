"""The worker's side of the lots: claim a slot first, then fetch one message.

All of it runs in the worker's main loop, one step at a time; other threads only leave a slot and wake the loop.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import RegistryError
from ..models import Claim, Lot, Refusal, Slot
from .later import Later
from .mover import Mail
from .turns import Turns

if TYPE_CHECKING:
    from .acceptance import Acceptance
    from .agent import WorkerAgent
    from .gate import Gatekeeper
    from .queues import LotReader

__all__ = ("Intake",)

logger = logging.getLogger(__name__)

#: Steps of one turn of the loop; the rest comes in the next turn, so that acknowledgements and remote control
#: are never kept waiting.
_STEPS = 16
#: For this long after the registry has confirmed a slot, the next message of the same lot may use it without
#: asking again: the counts are the same, and a drain or a lowered limit is obeyed at most this much later.
_REUSE_SECONDS = 0.1
#: The first wait when a lot is marked but its message has not arrived yet; doubled up to the slow poll.
_FIRST_WAIT_SECONDS = 0.01
#: How often a worker looks whether its own queue is still there, and how soon after it began to consume.
_CHECK_SECONDS = 10.0
_FIRST_CHECK_SECONDS = 1.0
#: A lot of unknown tasks is left alone for this long after it gave one that this worker does not know either.
_UNKNOWN_SECONDS = 15.0


class Intake:
    """Turns freed slots into messages.

    :param call_soon: runs a function in the main loop, from the main loop.
    """

    def __init__(self, agent: WorkerAgent, call_soon: Callable[[Callable[[], None]], Any]) -> None:
        self.agent = agent
        self.gatekeeper: Gatekeeper | None = None
        self.acceptance: Acceptance | None = None
        self.later = Later(agent)
        self._call_soon = call_soon
        self._freed: deque[Slot] = deque()
        self._running = False
        self._reader: LotReader | None = None
        self._pumping = False
        self._scheduled = False
        #: When the registry last confirmed a slot of ours, by token.
        self._confirmed: dict[str, float] = {}
        #: Lots that had a message when we last looked.
        self._hot: set[str] = set()
        #: The next poll looks into those too, marked or not.
        self._probe = True
        #: The version of each lot's mark with which it was found empty; looked at again after a while.
        self._seen: dict[str, int] = {}
        self._turns = Turns(agent.settings.namespace, agent.node)
        self._poll_at = 0.0
        #: When all lots are due to be looked into; a poll before that is about those of which something is known.
        self._all_at = 0.0
        self._check_at = 0.0
        self._wait = _FIRST_WAIT_SECONDS

    # -- life ------------------------------------------------------------------------------------------

    def start(self, reader: LotReader) -> None:
        """Begin, or begin again on a new connection."""
        self._reader = self.later.reader = reader
        self._running = True
        self._check_at = time.monotonic() + _FIRST_CHECK_SECONDS
        # What was scheduled on the old connection's loop went with it.
        self._scheduled = False
        self.probe()

    def stop(self) -> None:
        """Take nothing more; slots that come free are given back at once.  Harmless twice."""
        self._running = False
        while self._freed:
            self._give_up(self._freed.popleft())

    def close(self) -> None:
        """Close the channel: what was fetched and not acknowledged goes back to its lot.  Harmless twice."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # -- what the main loop calls ----------------------------------------------------------------------

    def give_back(self, slot: Slot) -> None:
        """Take a slot that has come free.  From any thread; the caller wakes the loop if it is another one."""
        if self._running:
            self._freed.append(slot)
            self.agent.wake()
        else:
            self._give_up(slot)

    def schedule(self) -> None:
        """Pump in the next turn of the loop.  From the main loop only; harmless twice."""
        if not self._scheduled and self._running:
            self._scheduled = True
            self._call_soon(self._pump_scheduled)

    def look_now(self) -> None:
        """There may be more to take: look at all lots in the next turn."""
        self._poll_at = 0.0
        self.schedule()

    def probe(self) -> None:
        """As after a loss of the registry, when no mark can be relied on: the next poll looks into every lot."""
        self._probe = True
        self._poll_at = 0.0

    def leave_alone(self, lot: str) -> None:
        """Somebody else's: not looked at for a while."""
        self._turns.leave_alone(lot, _UNKNOWN_SECONDS)

    def tick(self) -> None:
        """To be called often: pumps if there is something to do."""
        if self._freed or time.monotonic() >= self._poll_at:
            self.pump()

    def pump(self) -> None:
        """Give back what has come free, and take what there is.  Does nothing inside itself."""
        if self._pumping or not self._running:
            # A task that runs in this very thread (solo) ends inside the pump.
            return
        self._pumping = True
        consumer = self.agent.consumer
        try:
            self._pump()
        except (*consumer.connection_errors, *consumer.channel_errors):
            # Celery's consumer connects again.
            raise
        except Exception:
            # A worker that takes nothing is better off than one that has died; the heartbeat heals the slots.
            self.agent.count("intake_failed")
            logger.exception("the intake of %s failed", self.agent.name, extra={"action": "intake_failed"})
        finally:
            self._pumping = False

    def _pump_scheduled(self) -> None:
        self._scheduled = False
        self.pump()

    def _pump(self) -> None:
        assert self.gatekeeper is not None
        steps = _STEPS
        while self._freed and steps:
            steps -= 1
            slot = self._freed.popleft()
            if self.gatekeeper.has_waiting:
                self._confirmed.pop(slot.token, None)
                self.agent.release(slot)
                self.gatekeeper.serve_waiting()
            else:
                self._turn_over(slot)
        if time.monotonic() >= self._poll_at:
            self._poll(steps or 1)
        if self._freed:
            self.schedule()

    # -- a slot has come free --------------------------------------------------------------------------

    def _turn_over(self, slot: Slot) -> None:
        confirmed = self._confirmed.pop(slot.token, 0.0)
        if not self._may_fetch():
            self.agent.release(slot)
            return
        # Only where there is one queue: with several, each turn is another one's.
        if slot.queue in self._hot and [*self.agent.managed] == [slot.queue] and self._fresh(confirmed):
            lot = Lot(slot.queue, slot.queue)
            message = self._fetch(lot, slot)
            if message is not None:
                self._confirmed[slot.token] = confirmed
                self._accept(message, slot)
                return
            self._hot.discard(lot.name)
        if self.agent.is_over:
            self.agent.release(slot)
            return
        self._use(self._release(slot, None, self._in_turn()))

    def _fresh(self, confirmed: float) -> bool:
        return time.monotonic() - confirmed < _REUSE_SECONDS and not self.agent.outage.active

    def _release(self, slot: Slot, emptied: Slot | None, lots: tuple[Lot, ...]) -> Slot | None:
        """Give the slot back and, in the same step, claim for a parked task."""
        agent = self.agent
        then = Claim(agent.name, agent.epoch, lots) if lots else None
        released = agent.release(slot, then, emptied)
        if released is None:
            # Nobody claims for us now.
            self.look_now()
            return None
        if emptied is not None:
            before = self._seen.pop(emptied.lot or "", None)
            if released.waiting:
                # Somebody has parked, and the message may still be on its way.
                self._seen[emptied.lot or ""] = emptied.mark
                if emptied.mark != before:
                    self._wait = _FIRST_WAIT_SECONDS
                self._back_off()
        return self._note(released.claim)

    def _use(self, claim: Slot | None) -> bool:
        """Fetch one message with a claim; lots that turn out empty pass it on.  True if a message was found."""
        while claim is not None:
            lot = Lot(claim.lot or claim.queue, claim.queue)
            message = self._fetch(lot, claim)
            if message is not None:
                self._hot.add(lot.name)
                self._wait = _FIRST_WAIT_SECONDS
                self._accept(message, claim)
                return True
            self._hot.discard(lot.name)
            self._confirmed.pop(claim.token, None)
            claim = self._release(claim, claim, self._in_turn())
        return False

    def _note(self, claim: Slot | None) -> Slot | None:
        if claim is not None:
            self.agent.ledger.claim(claim)
            self.confirm(claim)
        return claim

    def confirm(self, slot: Slot) -> None:
        """The registry has just said that the slot is held by this worker."""
        self._confirmed[slot.token] = time.monotonic()

    # -- nobody has come free: look anyway -------------------------------------------------------------

    def _poll(self, steps: int) -> None:
        """Take what there is while there are free slots: marked lots, and what nobody announced."""
        assert self.gatekeeper is not None
        poll_seconds = self.agent.settings.poll_seconds
        self._look_after(poll_seconds, earliest=False)
        self._check_own_queue()
        if self.gatekeeper.has_waiting and self.gatekeeper.serve_waiting():
            return
        probe, found = self._probe, False
        # Without the registry nobody tells where something waits.
        every = probe or self.agent.outage.active or time.monotonic() >= self._all_at
        for lot in self._in_turn():
            if not (every or lot.name in self._seen or lot.name in self._hot) or not self._worth_a_look(lot, probe):
                continue
            if not steps or not self._may_fetch() or not self._has_free_slot():
                return
            if self._take(lot, every):
                steps, found = steps - 1, True
        self._probe = False
        if every:
            self._all_at = time.monotonic() + poll_seconds
        self.later.look_through(self._take_later)
        if found:
            # One of each lot in turn, until all are empty or all slots are taken.
            self.look_now()

    def _check_own_queue(self) -> None:
        """Somebody may have deleted it, and what is published to it is lost then.

        Celery connects again when the broker says so, unless it says so while the loop begins (``_quick_drain``).
        """
        assert self._reader is not None
        now = time.monotonic()
        if not self.agent.consuming or now < self._check_at:
            return
        self._check_at = now + _CHECK_SECONDS
        if not self._reader.has_consumer(self.agent.own_queue.name):
            raise ConnectionResetError(f"queue {self.agent.own_queue.name} was deleted under the worker")

    def _worth_a_look(self, lot: Lot, probe: bool) -> bool:
        """A lot beside the queue's own is, once it is known or marked; or to find out whether it is there."""
        assert self._reader is not None
        if lot.name == lot.queue or self._reader.knows(lot):
            return True
        return (probe or lot.name in self._seen) and self._reader.exists(lot)

    def _has_free_slot(self) -> bool:
        if self.agent.size() is not None and self.agent.has_room:
            return True
        # The slot that comes free next looks, then.
        self._seen.clear()
        return False

    def _take(self, lot: Lot, every: bool) -> bool:
        """If there is a message in the lot: claim a slot for it, and fetch it.  True if one was found.

        Looking first, since a claim for nothing would take a slot away from a dispatch for a moment, and a fan
        exactly as wide as its pool would be refused.
        """
        agent = self.agent
        assert self._reader is not None
        if not self._reader.ready(lot):
            self._hot.discard(lot.name)
            if lot.name in self._seen:
                self._look_again(lot.name, self._seen[lot.name], ask=every)
            return False
        if not agent.epoch and not agent.outage.away:
            # It is about to be registered; without that no limit over the fleet would be kept.
            return False
        if not agent.epoch or agent.outage.active:
            return self._take_locally(lot)
        try:
            claim = agent.call(agent.registry.claim_parked, agent.name, agent.epoch, (lot,), marked_only=False)
        except RegistryError:
            return self._take_locally(lot)
        return not isinstance(claim, Refusal) and self._use(self._note(claim))

    def _take_later(self, lot: Lot) -> bool:
        while self._freed:
            self._turn_over(self._freed.popleft())
        return self._may_fetch() and self._has_free_slot() and self._take(lot, every=True)

    def _look_again(self, lot: str, mark: int, ask: bool) -> None:
        """The lot is empty, and was marked.  Is it still?  A mark stands for so long that not every look need ask."""
        agent, waiting = self.agent, True
        if ask:
            with suppress(RegistryError):
                waiting = agent.call(agent.registry.found_empty, lot, mark)
        if waiting:
            self._back_off()
        else:
            self._seen.pop(lot, None)

    def _back_off(self) -> None:
        self._look_after(self._wait)
        self._wait = min(self._wait * 2, self.agent.settings.poll_seconds)

    def _take_locally(self, lot: Lot) -> bool:
        """Without the registry."""
        slot = self.agent.local_slot(lot.queue)
        if slot is None:
            return False
        message = self._fetch(lot, slot)
        if message is None:
            self._hot.discard(lot.name)
            self.agent.ledger.unclaim(slot)
            return False
        self._hot.add(lot.name)
        self._accept(message, slot)
        return True

    def _look_after(self, seconds: float, earliest: bool = True) -> None:
        at = time.monotonic() + seconds
        self._poll_at = min(at, self._poll_at) if earliest and self._poll_at else at

    @property
    def poll_in(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, self._poll_at - time.monotonic())

    def _may_fetch(self) -> bool:
        return self._running and self.agent.may_take_work

    def _in_turn(self) -> tuple[Lot, ...]:
        """The lots in their turn.  One that had a message a moment ago probably has another, announced or not."""
        names = self._turns.names(self.agent.managed, later=not self.later.holds_enough)
        return tuple(
            Lot(name, queue, Lot.SURE if name in self._hot else self._seen.get(name, 0)) for name, queue in names
        )

    # -- the message -----------------------------------------------------------------------------------

    def _fetch(self, lot: Lot, slot: Slot) -> Any:
        """One message of a lot, or ``None``.  If the connection fails, the slot is given back."""
        assert self._reader is not None
        try:
            return self._reader.fetch(lot)
        except BaseException:
            self._give_up(slot)
            raise

    def _accept(self, message: Any, slot: Slot) -> None:
        assert self.acceptance is not None
        consumer = self.agent.consumer
        message.accept = consumer.task_consumer.accept
        self._turns.served = slot.queue
        if message.errors:
            try:
                message._reraise_error(consumer.on_decode_error)
            finally:
                self.give_back(slot)
            return
        self.acceptance.accept(message, Mail.read(message), slot)

    def _give_up(self, slot: Slot) -> None:
        self._confirmed.pop(slot.token, None)
        self.agent.release(slot)
