"""Fetching from lots on a Redis broker in one step.

Kombu pops the message and then, in a second call, writes it down as unacknowledged: a worker that dies in between
loses it.  (Its consumers have that gap; the intake need not.)  And it makes a new client for each of the two,
which costs the worker more than the calls.  Here both are one script.  What is written is Kombu's own format, so
that acknowledging, restoring and the visibility time-out are Kombu's.  Only that it goes back to the very queue that
it was fetched from, and not through the exchange that brought it there.

The same script notes the delivery tag in a sorted set of the worker, for whoever has to give back what the worker
held when it died (:mod:`.unacked`).  Nothing is done about it when a message is acknowledged: each fetch looks at the
few tags that were looked at the longest ago, and removes those that are acknowledged.  So the set stays at about one
and a half times what is unacknowledged.
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
from .queues import LotReader
from .unacked import is_redis

if TYPE_CHECKING:
    from .agent import WorkerAgent

__all__ = ("RedisLotReader", "open_reader")

# KEYS: the lists of the queue, one for each priority, in order; then the index and the hash of what is unacknowledged,
# and the worker's set.
# ARGV: now, in seconds; the queue; how many old tags to look at.
# Returns the message, or nothing if there is none, or 0 if it is not Kombu's (then nothing has changed).
_FETCH = """
local index, hash, mine = KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS]
for i = 1, #KEYS - 3 do
  local item = redis.call('LINDEX', KEYS[i], -1)
  if item then
    local read, payload = pcall(cjson.decode, item)
    local properties = read and type(payload) == 'table' and payload.properties
    local info = type(properties) == 'table' and properties.delivery_info
    local tag = info and properties.delivery_tag
    if type(tag) ~= 'string' or type(info.routing_key) ~= 'string' then return 0 end
    redis.call('RPOP', KEYS[i])
    redis.call('ZADD', index, ARGV[1], tag)
    redis.call('HSET', hash, tag, '[' .. item .. ',"",' .. cjson.encode(ARGV[2]) .. ']')
    for _, old in ipairs(redis.call('ZRANGE', mine, 0, ARGV[3] - 1)) do
      if redis.call('HEXISTS', hash, old) == 1 then
        redis.call('ZADD', mine, ARGV[1], old)
      else
        redis.call('ZREM', mine, old)
      end
    end
    redis.call('ZADD', mine, ARGV[1], tag)
    return item
  end
end
"""


# KEYS: the lists of the queue.  Returns how many messages are in them.
_COUNT = """
local count = 0
for _, key in ipairs(KEYS) do count = count + redis.call('LLEN', key) end
return count
"""

#: Each fetch adds one tag and looks at three: of those in the set, a third at most are acknowledged.
_LOOK_AT = 3


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
        prefix = channel.global_keyprefix
        keys = [
            *self._lists(name),
            *(prefix + key for key in (channel.unacked_index_key, channel.unacked_key, self._mine)),
        ]
        item = channel.client.eval(_FETCH, len(keys), *keys, time.time(), name, _LOOK_AT)
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
        keys = self._lists(lot.name)
        return int(self._channel.client.eval(_COUNT, len(keys), *keys))

    def _lists(self, name: str) -> list[str]:
        """The keys of a queue: a list for each priority, the most urgent first."""
        channel = self._channel
        return [channel.global_keyprefix + channel._q_for_pri(name, step) for step in channel.priority_steps]

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
