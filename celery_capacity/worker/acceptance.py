"""A message comes in: it gets a slot, or goes where there is one, and only then does Celery see it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..dispatch import exchange_name, is_future, rkey
from ..errors import RegistryError
from ..models import CommitOutcome, Refusal, Slot
from ..naming import HEADER, is_ours
from ..options import OPTIONS
from .ledger import Entry, Phase
from .mover import Mail
from .rejects import keep_dead_letters

if TYPE_CHECKING:
    from .agent import WorkerAgent
    from .gate import Gatekeeper
    from .intake import Intake

__all__ = ("Acceptance",)

logger = logging.getLogger(__name__)

#: Celery's native delayed delivery: its exchanges, and how many words of a routing key are delays.
_DELAYED = "celery_delayed_"
_DELAYS = 28


class Acceptance:
    """From the broker to Celery's task handler.  Used by the worker's main loop."""

    def __init__(self, agent: WorkerAgent, gatekeeper: Gatekeeper, intake: Intake) -> None:
        self.agent = agent
        self.gatekeeper = gatekeeper
        self.intake = intake

    def on_consumed(self, message: Any) -> None:
        """A message that the task consumer received."""
        agent = self.agent
        info = message.delivery_info or {}
        if info.get("routing_key") != agent.own_queue.name or info.get("exchange"):
            # A queue that is left to Celery; it takes a slot when it is handed to the pool.
            self.deliver(message, Mail.read(message), None, None)
            return
        mail = Mail.read(message)
        slot = self._take_over(mail)
        if slot is None and not agent.replaced:
            answer = agent.claim(mail.queue, mail.task, mail.task_id)
            slot = None if isinstance(answer, Refusal) else answer
        if slot is None:
            self.hand_away(message, mail)
        else:
            self.accept(message, mail, slot)

    def accept(self, message: Any, mail: Mail, slot: Slot) -> None:
        """Run a message here, in a slot that is this worker's; unless it does not know the task."""
        if mail.task is not None and mail.task not in self.agent.app.tasks:
            # Its queue may have been cancelled here since it was sent.
            queue = slot.queue if slot.queue in self.agent.managed else mail.queue
            if queue is not None:
                self._unknown(message, mail, slot, queue)
                return
        if self.intake.later.holds_enough and slot.queue in self.agent.managed and self._would_wait(mail):
            try:
                self.gatekeeper.mover.postpone(message, mail, slot.queue)
            finally:
                self.gatekeeper.give_back(slot)
            return
        if mail.node is not None and mail.node != self.agent.node and slot.queue in self.agent.managed:
            # From the shared queue: it has a countdown, or was sent when nobody served the queue.  It needs no slot
            # here: as soon as it is due, it goes to its node.
            self.gatekeeper.give_back(slot)
            self.deliver(message, mail, slot.queue, None)
            return
        self.deliver(message, mail, slot.queue if slot.queue in self.agent.managed else mail.queue, slot)

    def deliver(self, message: Any, mail: Mail, queue: str | None, slot: Slot | None) -> None:
        """Give the message to Celery, and see what has become of it."""
        agent = self.agent
        entry = agent.ledger.add(Entry(message, queue, mail.node, slot, mail.redelivered))
        came_by = (message.delivery_info or {}).get("routing_key")
        self._restore_origin(message, mail, queue)
        if queue is not None and is_ours(came_by):
            sent_with = mail.origin.get("routing_key") or queue
            keep_dead_letters(agent, message, agent.managed.get(queue), sent_with)
        try:
            self.gatekeeper.pass_on(message)
        finally:
            self._settle(entry)

    def hand_away(self, message: Any, mail: Mail) -> None:
        """There is no slot here: to another worker, or to the lot.

        When the broker fails here, so has the worker's own connection, or will; the message is not
        acknowledged, so it comes back.
        """
        agent = self.agent
        queue = mail.queue or next(iter(agent.managed), None) or agent.app.conf.task_default_queue
        agent.count("handed_away")
        logger.info(
            "task %s[%s] has no slot on %s; it goes to a worker that has one, or waits",
            mail.task,
            mail.task_id,
            agent.name,
            extra={"action": "handed_away", "task": mail.task, "task_id": mail.task_id, "worker": agent.name},
        )
        slot = self.gatekeeper.mover.move(message, mail, queue)
        if slot is not None:
            # A slot has come free here in the meantime.
            taken = self._take_over(replace(mail, queue=queue, token=slot.token, epoch=slot.epoch))
            if taken is not None:
                self.accept(message, mail, taken)
                return
            # It is full, and the registry does not know it yet; or the slot was lost at once.
            agent.cancel(slot)
            self.gatekeeper.mover.park(message, mail, queue)

    # -- inside ----------------------------------------------------------------------------------------

    def _take_over(self, mail: Mail) -> Slot | None:
        """Commit the reservation that the message carries; ``None`` if it is not to be had any more."""
        agent = self.agent
        if mail.token is None or agent.replaced:
            return None
        if agent.ledger.holds(mail.token):
            # The broker delivers it again while it runs here (its acknowledgement was lost): a run of its own.
            agent.count("delivered_again")
            logger.warning(
                "task %s[%s] was delivered again while %s runs it",
                mail.task,
                mail.task_id,
                agent.name,
                extra={"action": "delivered_again", "task_id": mail.task_id, "token": mail.token, "worker": agent.name},
            )
            return None
        if not agent.has_room:
            # The registry does not know yet what was taken on without it.  It will push the reservation out.
            agent.tell_holding()
            return None
        # A producer may have seen our registration before its answer has reached us.
        epoch = agent.epoch or mail.epoch
        if not epoch:
            return None
        slot = Slot(
            mail.token,
            agent.name,
            epoch,
            mail.queue or agent.own_queue.name,
            mail.node or "",
            mail.task,
            mail.task_id,
            committed=True,
        )
        # Noted first: a heartbeat must not take it for a leak.
        agent.ledger.unsure(slot)
        try:
            outcome = agent.call(agent.registry.commit, mail.token, agent.name, epoch)
        except RegistryError:
            agent.ledger.unclaim(slot)
            return None
        if outcome in (CommitOutcome.COMMITTED, CommitOutcome.ALREADY):
            agent.ledger.claim(slot)
            self.intake.confirm(slot)
            return slot
        agent.ledger.unclaim(slot)
        agent.count("reservation_lost")
        logger.info(
            "the reservation of task %s[%s] is gone (%s); asking for another slot",
            mail.task,
            mail.task_id,
            outcome.value,
            extra={
                "action": "reservation_lost",
                "task_id": mail.task_id,
                "token": mail.token,
                "outcome": outcome.value,
            },
        )
        return None

    def _restore_origin(self, message: Any, mail: Mail, queue_name: str | None) -> None:
        """Nothing that copies the request (retry, replace, chains) may see this worker's own queue, or a token."""
        headers = message.headers
        if isinstance(headers, dict) and HEADER in headers:
            kept = {key: mail.origin[key] for key in OPTIONS if mail.origin.get(key) is not None}
            if kept:
                headers[HEADER] = kept
            else:
                del headers[HEADER]
        info = message.delivery_info
        if not isinstance(info, dict):
            return
        if mail.redelivered:
            # Of a copy the broker does not know it; worker_deduplicate_successful_tasks asks here.
            info["redelivered"] = True
            return
        name, origin = mail.queue, mail.origin
        if name is None and str(info.get("exchange")).startswith(_DELAYED):
            # A retry would go there again, with the delays in its routing key.
            name, origin = queue_name, {"routing_key": str(info.get("routing_key")).split(".", _DELAYS)[-1]}
            queue = self.agent.managed.get(name) if name else None
            origin["exchange"] = exchange_name(queue) if queue is not None else None
        if name is None:
            return
        exchange, routing_key = origin.get("exchange"), origin.get("routing_key")
        if exchange is None or routing_key is None:
            queue = self.agent.managed.get(name)
            if queue is None:
                exchange, routing_key = "", name
            else:
                exchange, routing_key = exchange_name(queue), rkey(queue, None)
        info["exchange"], info["routing_key"] = exchange, routing_key

    def _would_wait(self, mail: Mail) -> bool:
        """Would Celery hold the task back, for its eta or for its rate limit?"""
        if is_future(mail.eta):
            return True
        bucket = self.agent.consumer.task_buckets.get(mail.task)
        return bucket is not None and (bool(bucket.contents) or bucket.expected_time(1) > 0)

    def _settle(self, entry: Entry) -> None:
        """After Celery's handler: handed to the pool, held back (not due, rate limit), or already ended."""
        agent = self.agent
        if entry.phase in (Phase.HANDED, Phase.WAITING):
            return
        request = entry.request
        if not entry.was_requested or request is None or entry.message.acknowledged:
            # Revoked, expired, unknown, undecodable: refused at receipt.
            self.gatekeeper.finish(entry)
            return
        entry.phase = Phase.DELAYED
        waits_for_its_rate = agent.consumer.task_buckets.get(request.task.name)
        if self.gatekeeper.is_due(request) and not waits_for_its_rate:
            # The timer is about to bring it back; it would only have to ask for its slot again.
            return
        slot = agent.ledger.detach(entry)
        if slot is not None:
            self.gatekeeper.give_back(slot)
        if entry.queue in agent.managed:
            # After that, since it asks the broker, which may fail.
            self.intake.later.expect(entry.queue, self.gatekeeper.mover)

    def _unknown(self, message: Any, mail: Mail, slot: Slot, queue: str) -> None:
        """The task is not registered here; Celery would discard it."""
        agent = self.agent
        agent.count("unknown_task")
        logger.warning(
            "task %s[%s] is not registered on %s; it goes to a worker that knows it, or waits",
            mail.task,
            mail.task_id,
            agent.name,
            extra={"action": "unknown_task", "task": mail.task, "task_id": mail.task_id, "worker": agent.name},
        )
        try:
            own = self.gatekeeper.mover.move(message, mail, queue, unknown=True)
        finally:
            if slot.lot is not None and slot.lot != slot.queue:
                self.intake.leave_alone(slot.lot)
            self.gatekeeper.give_back(slot)
        if own is not None:
            raise ReservationRace(f"{agent.name} was chosen for task {mail.task}, which it does not know")


class ReservationRace(RuntimeError):
    """A reservation that this process made a moment ago is gone; the message stays unacknowledged."""
