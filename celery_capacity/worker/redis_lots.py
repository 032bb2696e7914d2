"""Fetching from lots on a Redis broker in one step.

Kombu pops the message and then, in a second call, writes it down as unacknowledged: a worker that dies in between
loses it.  And it makes a new client for each of the two, which costs the worker more than the calls.  Here both are one
script (:func:`..redis_fetch.fetch`), which also notes the delivery tag in a sorted set of the worker, for whoever has
to give back what the worker held when it died (:mod:`.unacked`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from ..models import Lot
from ..naming import unacked_name
from ..redis_fetch import fetch, keys_of
from .queues import LotReader
from .unacked import is_redis

if TYPE_CHECKING:
    from .agent import WorkerAgent

__all__ = ("RedisLotReader", "open_reader")

# KEYS: the lists of the queue.  Returns how many messages are in them.
_COUNT = """
local count = 0
for _, key in ipairs(KEYS) do count = count + redis.call('LLEN', key) end
return count
"""


class RedisLotReader(LotReader):
    """On a channel of Kombu's Redis transport that writes down what is unacknowledged.

    :param mine: the key of the worker's set of delivery tags.
    """

    def __init__(
        self,
        connection: Any,
        count: Callable[[str], None],
        declare: Callable[[str, Any], None],
        channel: Any,
        mine: str,
    ) -> None:
        super().__init__(connection, count, declare, channel)
        self._mine = mine

    def _get(self, name: str) -> Any:
        channel = self._channel
        if getattr(channel, "_expires", None):
            # A queue that expires is kept alive by whoever fetches from it.
            return self._get_as_kombu(name)
        item = fetch(channel, channel.client, name, self._mine)
        if item is None:
            return None
        if not isinstance(item, (bytes, str)):
            return self._get_as_kombu(name)
        message = channel.Message(loads(bytes_to_str(item)), channel=channel)
        # Its own append would write it down once more.
        virtual.QoS.append(channel.qos, message, message.delivery_tag)
        return message

    def ready(self, lot: Lot) -> int:
        """As the base class; Kombu makes a new client to ask each list for its length."""
        keys = keys_of(self._channel, lot.name)
        return int(self._channel.client.eval(_COUNT, len(keys), *keys))

    def _get_as_kombu(self, name: str) -> Any:
        message = super()._get(name)
        if message is not None:
            self._channel.client.zadd(self._mine, {message.delivery_tag: time.time()})
        return message


def open_reader(connection: Any, agent: WorkerAgent) -> LotReader:
    """The worker's reader for the transport of a connection."""
    channel = connection.channel()
    if is_redis(channel):
        mine = unacked_name(agent.settings.namespace, agent.name)
        return RedisLotReader(connection, agent.count, agent.declare, channel, mine)
    return LotReader(connection, agent.count, agent.declare, channel)
