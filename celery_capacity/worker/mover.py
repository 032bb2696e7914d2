"""Moves a message that is here to where it can run: another worker's own queue, or a lot.

The copy is published, and confirmed where the broker can, before the original is acknowledged; so a process
that dies in between leaves two copies and never none.  A move never uses up a retry of the task.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Producer, Queue

from ..dispatch import lot_queue, own_queue
from ..errors import RegistryError
from ..models import Demand, Reason, Refusal, Slot
from ..naming import HEADER, later_lot, node_lot, unknown_lot
from ..notices import Notices
from ..registry import Registry, Reservation
from .unacked import remember_owed

if TYPE_CHECKING:
    from .agent import WorkerAgent

__all__ = ("Mail", "Mover")

logger = logging.getLogger(__name__)

#: What a copy keeps of the message's properties.  Not ``user_id``, which the broker checks against the sender.
_PROPERTIES = ("correlation_id", "reply_to", "message_id", "timestamp", "type", "app_id")


@dataclass(frozen=True)
class Mail:
    """What can be read on the outside of a task message, whatever is inside."""

    task: str | None
    task_id: str | None
    queue: str | None
    node: str | None
    token: str | None
    epoch: int
    #: ``queue``, ``exchange``, ``routing_key``, and the options of the dispatch (:mod:`..options`), as far as they are known.
    origin: Mapping[str, Any] = field(default_factory=dict)
    #: It was delivered before; also if this is a copy of what was.
    redelivered: bool = False
    eta: Any = None

    @classmethod
    def read(cls, message: Any) -> Mail:
        """From the headers (task protocol 2), or from the body (protocol 1)."""
        headers = message.headers if isinstance(message.headers, Mapping) else {}
        ours = headers.get(HEADER)
        ours = dict(ours) if isinstance(ours, Mapping) else {}
        task, task_id, eta = headers.get("task"), headers.get("id"), headers.get("eta")
        if task is None:
            body = _decoded(message)
            if isinstance(body, Mapping):
                task, task_id, eta = body.get("task"), body.get("id"), body.get("eta")
        token, epoch = ours.pop("token", None), ours.pop("epoch", 0)
        ours.pop("worker", None)
        return cls(
            task=_text(task),
            task_id=_text(task_id),
            queue=_text(ours.get("queue")),
            node=_text(ours.get("node")),
            token=_text(token),
            epoch=epoch if isinstance(epoch, int) else 0,
            origin=ours,
            redelivered=bool(ours.pop("redelivered", False) or (message.delivery_info or {}).get("redelivered")),
            eta=eta,
        )


class Mover:
    """Has a broker connection and a registry client of its own; used by one thread."""

    def __init__(self, agent: WorkerAgent, registry: Registry) -> None:
        self.agent = agent
        self.registry = registry
        self._connection: Any = None
        self._notices = Notices()

    def move(self, message: Any, mail: Mail, queue: str, *, unknown: bool = False, keep: bool = True) -> Slot | None:
        """Send a copy of ``message``, a task of the managed queue ``queue``, to where it can run, and acknowledge it.

        :param unknown: no worker that was asked knows the task; if nobody else does, it waits in a lot of its own.
        :param keep: the caller can run it itself; else this worker is sent a copy like any other.
        :returns: a slot, if the choice fell on this very worker: then nothing was sent, and the message is the
            caller's to run.
        :raises OSError: or another of the broker's errors: nothing is lost, the message is not acknowledged.
        """
        namespace = self.agent.settings.namespace
        lot = unknown_lot(namespace, queue) if unknown else self._lot_of(mail, queue)
        demand = Demand(
            queue=queue,
            task=mail.task,
            node=mail.node,
            prefer_node=_text(mail.origin.get("prefer_node")),
            task_id=mail.task_id,
            ttl_seconds=self.agent.settings.reservation_seconds,
            park_lot=lot,
        )
        try:
            answer = self.registry.select_and_reserve(demand)
        except RegistryError:
            answer = None
        if isinstance(answer, Reservation):
            slot = answer.slot
            if keep and slot.worker == self.agent.name and slot.epoch == self.agent.epoch:
                return answer.transfer()
            with answer:
                header = {**_origin(mail, queue), "token": slot.token, "worker": slot.worker}
                header["epoch"] = slot.epoch
                self._publish(message, own_queue(namespace, slot.worker), header, declare=False)
                answer.transfer()
            if mail.node:
                self._notices.somewhere(queue, mail.node)
            self._moved(message, mail, slot.worker)
        else:
            self._leave(message, mail, queue, lot)
            if mail.node and isinstance(answer, Refusal) and answer.reason is Reason.OTHER_NODE:
                self._notices.nowhere(queue, mail.node, mail.task, lot)
        return None

    def park(self, message: Any, mail: Mail, queue: str) -> None:
        """Send a copy of ``message`` to its lot, and acknowledge it: nobody is asked for a slot.

        :raises OSError: or another of the broker's errors, as :meth:`move`.
        """
        self._leave(message, mail, queue, self._lot_of(mail, queue))

    def _lot_of(self, mail: Mail, queue: str) -> str:
        return node_lot(self.agent.settings.namespace, queue, mail.node) if mail.node else queue

    def _leave(self, message: Any, mail: Mail, queue: str, lot: str) -> None:
        # The managed queue is there: the message came from it.
        self._publish(message, self._lot(lot, queue), _origin(mail, queue), declare=lot != queue)
        self._moved(message, mail, lot)

    def _moved(self, message: Any, mail: Mail, where: str) -> None:
        message.ack()
        self.agent.count("moved")
        logger.info(
            "task %s[%s] moved to %s",
            mail.task,
            mail.task_id,
            where,
            extra={"action": "moved", "task": mail.task, "task_id": mail.task_id, "to": where},
        )

    def postpone(self, message: Any, mail: Mail, queue: str) -> None:
        """Send a copy of ``message``, a task of ``queue`` that is not due, to the end of its lot; acknowledge it.

        :raises OSError: or another of the broker's errors: nothing is lost, the message is not acknowledged.
        """
        lot = later_lot(self.agent.settings.namespace, queue)
        self._publish(message, self._lot(lot, queue), _origin(mail, queue), declare=True)
        message.ack()
        self.agent.count("postponed")
        # Not at INFO: the same ones come round again and again.
        logger.debug(
            "task %s[%s] is not due; it waits in %s",
            mail.task,
            mail.task_id,
            lot,
            extra={"action": "postponed", "task": mail.task, "task_id": mail.task_id, "to": lot},
        )

    def set_aside(self, message: Any, where: str, queue: str, story: Mapping[str, Any]) -> None:
        """Send a copy of ``message``, a task of ``queue``, to a queue that nobody reads.

        :raises OSError: or another of the broker's errors.
        """
        mail = Mail.read(message)
        header = {**mail.origin, "queue": queue, "dead_letter": dict(story)}
        self._publish(message, self._lot(where, queue), header, declare=True)

    def dead_letter(self, message: Any, queue: str, exchange: str, routing_key: str, sent_with: str) -> None:
        """Send a copy of ``message``, which was rejected, to the dead-letter exchange of its queue, as RabbitMQ would.

        :param sent_with: the routing key with which it was sent to its queue.
        :raises OSError: or another of the broker's errors.
        """
        death = {"reason": "rejected", "queue": queue, "exchange": "", "routing-keys": [sent_with], "count": 1}
        headers = {key: value for key, value in (message.headers or {}).items() if key != HEADER}
        first = {"x-first-death-reason": "rejected", "x-first-death-queue": queue, "x-first-death-exchange": ""}
        self._send(message, exchange, routing_key, {**first, **headers, "x-death": [death]}, [])

    def drain(self, name: str, fallback: str, limit: int | None = None, *, unknown: bool = False) -> int:
        """Move all messages (or ``limit`` of them) of queue ``name``; returns how many.

        :param fallback: the managed queue of those that do not say which one is theirs.
        """
        moved = 0
        with self.connection().channel() as channel:
            queue = Queue(name, Exchange(""), routing_key=name, channel=channel, no_declare=True)
            while limit is None or moved < limit:
                message = queue.get(accept=None)
                if message is None:
                    break
                mail = Mail.read(message)
                self.move(message, mail, mail.queue or fallback, unknown=unknown, keep=False)
                moved += 1
        return moved

    def connection(self) -> Any:
        """The connection, opened at the first use and after an error."""
        if self._connection is None or not self._connection.connected:
            self.close()
            options = dict(self.agent.app.conf.broker_transport_options or {}, confirm_publish=True)
            self._connection = self.agent.app.connection_for_write(transport_options=options)
            self._connection.ensure_connection(max_retries=2, interval_start=0.1)
            remember_owed(self._connection, self.agent.owed)
        return self._connection

    def close(self) -> None:
        """Harmless twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()

    def declare(self, lot: str, queue: str) -> None:
        """Make a lot of ``queue``, unless it is there."""
        with self.connection().channel() as channel:
            self._lot(lot, queue)(channel).declare()

    def _lot(self, lot: str, queue: str) -> Queue:
        like = self.agent.app.amqp.queues.get(queue) or Queue(queue)
        return lot_queue(lot, like)

    def _publish(self, message: Any, queue: Queue, header: Mapping[str, Any], *, declare: bool) -> None:
        headers = {**message.headers, HEADER: dict(header)}
        self._send(message, "", queue.name, headers, [queue] if declare else [])

    def _send(
        self, message: Any, exchange: str, routing_key: str, headers: Mapping[str, Any], declare: list[Queue]
    ) -> None:
        headers = dict(headers)
        # Kombu has decompressed the body; the copy is compressed again.
        compression = headers.pop("compression", None)
        properties = message.properties or {}
        expiration = properties.get("expiration")
        with self.connection().channel() as channel:
            Producer(channel, auto_declare=False).publish(
                message.body,
                exchange=exchange,
                routing_key=routing_key,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                compression=compression,
                headers=headers,
                priority=properties.get("priority"),
                delivery_mode=properties.get("delivery_mode") or 2,
                # In the message it is in milliseconds, and for Kombu in seconds.
                expiration=int(expiration) / 1000 if expiration else None,
                declare=declare,
                **{key: properties[key] for key in _PROPERTIES if properties.get(key) is not None},
            )


def _origin(mail: Mail, queue: str) -> dict[str, Any]:
    origin = {**mail.origin, "queue": queue}
    if mail.redelivered:
        origin["redelivered"] = True
    return origin


def _decoded(message: Any) -> Any:
    try:
        return message.payload
    except Exception:  # noqa: BLE001 - whatever a serializer raises; the worker will say so when it runs
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
