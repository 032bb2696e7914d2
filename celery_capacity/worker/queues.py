"""Looking into queues, and taking one message at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kombu.message import Message
from kombu.transport import virtual

from ..models import Lot

__all__ = ("LotReader", "QueueState", "look_at", "look_through")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueueState:
    """What is in a queue: messages that could be fetched now, and consumers as far as the broker counts them."""

    ready: int
    consumers: int = 0


def look_through(channel: Any, name: str) -> QueueState:
    """Look at a queue that is known to be there, through a channel that is open already.

    :raises ChannelError: or another of the transport's ``channel_errors``: there is no such queue.  The broker has
        closed the channel.
    """
    if isinstance(channel, virtual.Channel):
        # Kombu's emulation: whoever fetches from a queue that is not there finds it empty.  Asked whether there is
        # one, it says no to all of them on a Redis with a ``global_keyprefix``.
        return QueueState(int(channel._size(name)))
    answer = channel.queue_declare(queue=name, passive=True)
    return QueueState(int(answer.message_count), int(answer.consumer_count))


def look_at(connection: Any, name: str) -> QueueState | None:
    """Look at a queue that may not be there; ``None`` if it is not.

    :raises OSError: or another of the broker's connection errors.
    """
    with connection.channel() as channel:
        try:
            return look_through(channel, name)
        except connection.channel_errors:
            return None


class LotReader:
    """Fetches from lots, on a channel of its own of the consumer's connection; used by the worker's main loop.

    Those beside a queue's own need not exist; RabbitMQ closes the channel of whoever fetches from a queue that is
    not there, and with it gives back all that was fetched through it.

    :param count: called with the name of what must never be silent.
    :param declare: declares a managed queue, by its name, on a channel.
    """

    def __init__(
        self,
        connection: Any,
        count: Callable[[str], None],
        declare: Callable[[str, Any], None],
        channel: Any = None,
    ) -> None:
        self._connection = connection
        self._count = count
        self._declare = declare
        self._channel = connection.channel() if channel is None else channel
        self._known: set[str] = set()

    def fetch(self, lot: Lot) -> Any:
        """One message, or ``None``.

        :raises OSError: or another of the broker's connection errors.
        """
        if lot.name != lot.queue and not self.exists(lot):
            return None
        try:
            return self._get(lot.name)
        except self._connection.channel_errors as exc:
            # The queue was deleted under us.
            self._count("fetch_failed")
            logger.warning("cannot fetch from %s: %s", lot.name, exc, extra={"action": "fetch_failed", "lot": lot.name})
            self._open_anew(lot)
            return None

    def _get(self, name: str) -> Any:
        raw = self._channel.basic_get(name, no_ack=False)
        return raw if raw is None or isinstance(raw, Message) else self._channel.message_to_python(raw)

    def ready(self, lot: Lot) -> int:
        """How many messages could be fetched now."""
        try:
            return look_through(self._channel, lot.name).ready
        except self._connection.channel_errors:
            self._open_anew(lot)
            return 0

    def knows(self, lot: Lot) -> bool:
        """The lot was there when it was last asked for."""
        return lot.name in self._known

    def exists(self, lot: Lot) -> bool:
        """Whether the lot is there; asks until it is."""
        if lot.name not in self._known:
            # Kombu's emulation has every queue.  And before 5.7, its Redis transport stops polling for the whole
            # connection when a channel of it is closed, as look_at does with its own.
            if not isinstance(self._channel, virtual.Channel) and look_at(self._connection, lot.name) is None:
                return False
            self._known.add(lot.name)
        return True

    def has_consumer(self, name: str) -> bool:
        """Whether somebody consumes the queue ``name``, as far as the broker says; asks by a channel of its own."""
        if isinstance(self._channel, virtual.Channel):
            return True
        state = look_at(self._connection, name)
        return state is not None and state.consumers > 0

    def close(self) -> None:
        """What was fetched and not acknowledged goes back to its lot.  Harmless when the connection is gone."""
        try:
            self._channel.close()
        except Exception as exc:  # noqa: BLE001 - the connection is gone, and with it the channel
            logger.debug("closing the intake's channel: %r", exc)

    def _open_anew(self, lot: Lot) -> None:
        self._known.discard(lot.name)
        if getattr(self._channel, "is_open", True) is False:
            self._channel = self._connection.channel()
        if lot.name != lot.queue:
            return
        # A consumer would have been told that its queue was deleted, and Celery would declare it again.
        self._declare(lot.queue, self._channel)
        self._count("declared_again")
        logger.warning(
            "queue %s is not there any more; it was declared again",
            lot.queue,
            extra={"action": "declared_again", "queue": lot.queue},
        )
