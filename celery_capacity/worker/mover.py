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
from ..models import Demand, Slot
from ..naming import HEADER, node_lot, unknown_lot
from ..registry import Registry, Reservation

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
    #: ``queue``, ``exchange``, ``routing_key``, ``node`` and ``when_full`` of the dispatch, as far as they are known.
    origin: Mapping[str, Any] = field(default_factory=dict)
    #: It was delivered before; also if this is a copy of what was.
    redelivered: bool = False

    @classmethod
    def read(cls, message: Any) -> Mail:
        """From the headers (task protocol 2), or from the body (protocol 1)."""
        headers = message.headers if isinstance(message.headers, Mapping) else {}
        ours = headers.get(HEADER)
        ours = dict(ours) if isinstance(ours, Mapping) else {}
        task, task_id = headers.get("task"), headers.get("id")
        if task is None:
            body = _decoded(message)
            if isinstance(body, Mapping):
                task, task_id = body.get("task"), body.get("id")
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
        )


class Mover:
    """Has a broker connection and a registry client of its own; used by one thread."""

    def __init__(self, agent: WorkerAgent, registry: Registry) -> None:
        self.agent = agent
        self.registry = registry
        self._connection: Any = None

    def move(self, message: Any, mail: Mail, queue: str, *, unknown: bool = False, keep: bool = True) -> Slot | None:
        """Send a copy of ``message``, a task of the managed queue ``queue``, to where it can run, and acknowledge it.

        :param unknown: no worker that was asked knows the task; if nobody else does, it waits in a lot of its own.
        :param keep: the caller can run it itself; else this worker is sent a copy like any other.
        :returns: a slot, if the choice fell on this very worker: then nothing was sent, and the message is the
            caller's to run.
        :raises OSError: or another of the broker's errors: nothing is lost, the message is not acknowledged.
        """
        namespace = self.agent.settings.namespace
        lot = node_lot(namespace, queue, mail.node) if mail.node else queue
        if unknown:
            lot = unknown_lot(namespace, queue)
        demand = Demand(
            queue=queue,
            task=mail.task,
            node=mail.node,
            task_id=mail.task_id,
            ttl_seconds=self.agent.settings.reservation_seconds,
            park_lot=lot,
        )
        try:
            answer = self.registry.select_and_reserve(demand)
        except RegistryError:
            answer = None
        origin = {**mail.origin, "queue": queue}
        if mail.redelivered:
            origin["redelivered"] = True
        if isinstance(answer, Reservation):
            slot = answer.slot
            if keep and slot.worker == self.agent.name and slot.epoch == self.agent.epoch:
                return answer.transfer()
            with answer:
                header = {**origin, "token": slot.token, "worker": slot.worker}
                header["epoch"] = slot.epoch
                self._publish(message, own_queue(namespace, slot.worker), header, declare=False)
                answer.transfer()
            where = slot.worker
        else:
            # The managed queue is there: the message came from it.
            self._publish(message, self._lot(lot, queue), origin, declare=lot != queue)
            where = lot
        message.ack()
        self.agent.count("moved")
        logger.info(
            "task %s[%s] moved to %s",
            mail.task,
            mail.task_id,
            where,
            extra={"action": "moved", "task": mail.task, "task_id": mail.task_id, "to": where},
        )
        return None

    def set_aside(self, message: Any, where: str, queue: str, story: Mapping[str, Any]) -> None:
        """Send a copy of ``message``, a task of ``queue``, to a queue that nobody reads.

        :raises OSError: or another of the broker's errors.
        """
        mail = Mail.read(message)
        header = {**mail.origin, "queue": queue, "dead_letter": dict(story)}
        self._publish(message, self._lot(where, queue), header, declare=True)

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
        return self._connection

    def close(self) -> None:
        """Harmless twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()

    def _lot(self, lot: str, queue: str) -> Queue:
        like = self.agent.app.amqp.queues.get(queue) or Queue(queue)
        return lot_queue(lot, like)

    def _publish(self, message: Any, queue: Queue, header: Mapping[str, Any], *, declare: bool) -> None:
        headers = dict(message.headers)
        # Kombu has decompressed the body; the copy is compressed again.
        compression = headers.pop("compression", None)
        headers[HEADER] = dict(header)
        properties = message.properties or {}
        expiration = properties.get("expiration")
        with self.connection().channel() as channel:
            Producer(channel, auto_declare=False).publish(
                message.body,
                exchange="",
                routing_key=queue.name,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                compression=compression,
                headers=headers,
                priority=properties.get("priority"),
                delivery_mode=properties.get("delivery_mode") or 2,
                # In the message it is in milliseconds, and for Kombu in seconds.
                expiration=int(expiration) / 1000 if expiration else None,
                declare=[queue] if declare else [],
                **{key: properties[key] for key in _PROPERTIES if properties.get(key) is not None},
            )


def _decoded(message: Any) -> Any:
    try:
        return message.payload
    except Exception:  # noqa: BLE001 - whatever a serializer raises; the worker will say so when it runs
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
