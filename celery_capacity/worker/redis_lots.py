"""Fetching from lots on a Redis broker in one step.

Kombu pops the message and then, in a second call, writes it down as unacknowledged: a worker that dies in between
loses it.  (Its consumers have that gap; the intake need not.)  And it makes a new client for each of the two,
which costs the worker more than the calls.  Here both are one script.  What is written is Kombu's own format, so
that acknowledging, restoring and the visibility time-out are Kombu's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from .queues import LotReader

__all__ = ("RedisLotReader", "open_reader")

# KEYS: the lists of the queue, one for each priority, in order; then the index and the hash of what is unacknowledged.
# ARGV: now, in seconds.
# Returns the message, or nothing if there is none, or 0 if it is not Kombu's (then nothing has changed).
_FETCH = """
for i = 1, #KEYS - 2 do
  local item = redis.call('LINDEX', KEYS[i], -1)
  if item then
    local read, payload = pcall(cjson.decode, item)
    local properties = read and type(payload) == 'table' and payload.properties
    local info = type(properties) == 'table' and properties.delivery_info
    local tag = info and properties.delivery_tag
    if type(tag) ~= 'string' or type(info.routing_key) ~= 'string' then return 0 end
    redis.call('RPOP', KEYS[i])
    redis.call('ZADD', KEYS[#KEYS - 1], ARGV[1], tag)
    redis.call('HSET', KEYS[#KEYS], tag, '[' .. item .. ',' .. cjson.encode(info.exchange) .. ','
      .. cjson.encode(info.routing_key) .. ']')
    return item
  end
end
"""


class RedisLotReader(LotReader):
    """On a channel of Kombu's Redis transport that writes down what is unacknowledged."""

    def _get(self, name: str) -> Any:
        channel = self._channel
        if getattr(channel, "_expires", None):
            # A queue that expires is kept alive by whoever fetches from it.
            return super()._get(name)
        prefix = channel.global_keyprefix
        keys = [channel._q_for_pri(name, priority) for priority in channel.priority_steps]
        keys += [channel.unacked_index_key, channel.unacked_key]
        item = channel.client.eval(_FETCH, len(keys), *(prefix + key for key in keys), time.time())
        if item is None:
            return None
        if not isinstance(item, (bytes, str)):
            return super()._get(name)
        message = channel.Message(loads(bytes_to_str(item)), channel=channel)
        # Its own append would write it down once more.
        virtual.QoS.append(channel.qos, message, message.delivery_tag)
        return message


def open_reader(connection: Any, count: Callable[[str], None]) -> LotReader:
    """The reader for the transport of a connection.

    :param count: called with the name of what must never be silent.
    """
    redis_transport = sys.modules.get("kombu.transport.redis")
    if redis_transport is not None:
        channel = connection.channel()
        if isinstance(channel, redis_transport.Channel) and channel.ack_emulation:
            return RedisLotReader(connection, count, channel)
        channel.close()
    return LotReader(connection, count)
