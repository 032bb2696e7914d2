"""Kombu's Redis transport, with one client a channel, and own queues from which nothing is lost.

**One client a channel.**  Kombu makes a new client for every message that it publishes and for every one that it
acknowledges, and making one takes as long as what it is made for.  All that differs from one client to the next is what
redis-py keeps for its own use; the connections are those of the channel's pool, one for each command, whatever client asks
for it.

**Own queues.**  Kombu's consumer pops a message (``BRPOP``) and writes it down as unacknowledged in a second step; what is
between the two when the process dies is lost.  A worker's own queue is only *looked* at with the command that blocks: it
moves the next message to the place that it is in (``BLMOVE``).  Then one script takes it and writes it down, in one
step.  That is as many round trips as Kombu makes.

**Acknowledgements** that the broker does not hear are remembered by whoever has asked for it (:attr:`Transport.owed`).
"""

from __future__ import annotations

import logging
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis, virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import NoPermissionError

from .naming import is_own_queue
from .redis_fetch import fetch

__all__ = ("Channel", "SentinelChannel", "SentinelTransport", "Transport")

logger = logging.getLogger(__name__)

#: How often the lists of other priorities are looked at.  Only a process without the plugin puts anything there, when it
#: gives back what was unacknowledged for longer than the visibility timeout.
_LOOK_EVERYWHERE_SECONDS = 10.0
#: What a server before 6.2 says.
_NO_SUCH_COMMAND = "unknown command"


class QoS(redis.QoS):  # type: ignore[misc]
    """Writes nothing down a second time, and remembers what the broker has not heard."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note a message that was delivered."""
        if delivery_tag == self.channel._written_down:
            self.channel._written_down = None
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """:raises OSError: or another of the broker's errors: the broker may not have heard it."""
        try:
            super().ack(delivery_tag)
        except self.channel.connection_errors:
            owed = self.channel.connection.owed
            if owed is not None:
                owed.add(delivery_tag)
                # Or closing the channel would give the message back.
                virtual.QoS.ack(self, delivery_tag)
            raise

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """As Kombu: what is not put back is acknowledged."""
        if requeue:
            super().reject(delivery_tag, requeue=True)
        else:
            self.ack(delivery_tag)


class Channel(redis.Channel):  # type: ignore[misc]
    """Of one server."""

    QoS = QoS

    _kept: Any = None
    #: The delivery tag of the message that is being delivered, if it is written down already.
    _written_down: str | None = None
    #: The own queue that the pending command looks at.
    _looks_at: str | None = None
    _look_everywhere_at = 0.0
    #: Redis before 6.2 has no such command, and a user may be forbidden to use it.
    _may_look = True

    def _create_client(self, asynchronous: bool = False) -> Any:
        # The client that waits for messages has always been one of its own.
        if asynchronous:
            return super()._create_client(asynchronous=True)
        # After an error and after a fork there is another pool.
        if self._kept is None or self._kept.connection_pool is not self.pool:
            self._kept = super()._create_client()
        return self._kept

    def _get_message_priority(self, message: Any, *, reverse: bool = False) -> int:
        # Which of the queue's lists it is put in; only one of them is looked at.  No order is lost: what is in an own
        # queue has a slot.  And the message keeps its priority, for the day when it is handed on.
        info = (message.get("properties") or {}).get("delivery_info") or {}
        if is_own_queue(info.get("routing_key") or ""):
            return 0
        return int(super()._get_message_priority(message, reverse=reverse))

    def _brpop_start(self, timeout: float | None = None) -> None:
        queue = self._lookable()
        if queue is None:
            super()._brpop_start(timeout)
            return
        connection = self.client.connection
        self._looks_at = queue
        self._in_poll = connection
        # Kombu's check of a server that has become silent.
        self._brpop_sent_at = monotonic()
        key = self.global_keyprefix + queue
        timeout = self.brpop_timeout if timeout is None else timeout
        connection.send_command("BLMOVE", key, key, "RIGHT", "RIGHT", timeout or 0)

    def _lookable(self) -> str | None:
        """The own queue, if it is all that is consumed here: there is no command that looks at several queues."""
        active = self.active_queues
        if not self._may_look or not self.ack_emulation or len(active) != 1 or not is_own_queue(active[0]):
            return None
        return None if self._expires and active[0] in self._expires else str(active[0])

    def _brpop_read(self, **options: Any) -> bool:
        queue, self._looks_at = self._looks_at, None
        if queue is None:
            return bool(super()._brpop_read(**options))
        client = self.client
        try:
            seen = client.parse_response(client.connection, "BLMOVE", **options)
        except self.connection_errors:
            client.connection.disconnect()
            raise
        except self.ResponseError as exc:
            if not str(exc).startswith(_NO_SUCH_COMMAND) and not isinstance(exc, NoPermissionError):
                raise
            self._may_look = False
            raise Empty from None
        finally:
            self._in_poll = None
            if hasattr(self, "_flush_brpop_reauth"):
                # Since Kombu 5.7: nothing is pending on the connection now.
                self._flush_brpop_reauth()
        if queue not in self.active_queues:
            raise Empty  # cancelled meanwhile: what there is stays where it is
        if seen is None and monotonic() < self._look_everywhere_at:
            raise Empty
        self._look_everywhere_at = monotonic() + _LOOK_EVERYWHERE_SECONDS
        # By the other client, whose connection nobody watches.
        item = fetch(self, self._create_client(), queue)
        if item is None:
            raise Empty
        if not isinstance(item, (bytes, str)):
            # Nobody's task: as Kombu does with it.
            payload = self._get(queue)
        else:
            payload = loads(bytes_to_str(item))
            self._written_down = payload["properties"]["delivery_tag"]
        self.connection._deliver(payload, queue)
        return True

    def close(self) -> None:
        """Kombu waits for the answer of what is pending, since a message may be in it.  Here there is none."""
        if self._looks_at is not None:
            self._looks_at = None
            connection, self._in_poll = self._in_poll, None
            if connection:
                connection.disconnect()
        elif self._in_poll and not self.closed:
            try:
                self._brpop_read()
            except Empty:
                pass
            except self.connection_errors as exc:
                # With Kombu the closing ends here, and is done again when the connection is gone, which ends the worker.
                logger.debug("closing a channel of a lost connection: %r", exc)
        if self.connection is not None and self.connection.client is None:
            # Nobody knows any more where to give messages back.  They stay written down.
            self.do_restore = False
        super().close()


class SentinelChannel(Channel, redis.SentinelChannel):  # type: ignore[misc]
    """Of the server that the Sentinels name."""


class Transport(redis.Transport):  # type: ignore[misc]
    """What ``redis://`` and ``rediss://`` mean for an app with the plugin."""

    Channel = Channel
    #: Delivery tags whose acknowledgement met an error of the connection are added to it, if there is one.
    owed: set[str] | None = None


class SentinelTransport(redis.SentinelTransport):  # type: ignore[misc]
    """What ``sentinel://`` means for an app with the plugin."""

    Channel = SentinelChannel
    owed: set[str] | None = None
