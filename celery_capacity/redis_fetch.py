"""Taking a message from a queue on a Redis broker, and writing it down as unacknowledged, in one step.

Kombu pops it and then, in a second call, writes it down; what is between the two when the process dies is lost.
"""

from __future__ import annotations

from time import time
from typing import Any

__all__ = ("fetch", "keys_of")

# KEYS: the lists of the queue, one for each priority, in order; then the index and the hash of what is unacknowledged,
# and the fetching worker's set of tags, if it keeps one.
# ARGV: how many lists; now, in seconds; the queue; how many old tags to look at.
# Returns the message, or nothing if there is none, or 0 if it is not Kombu's (then nothing has changed).
_FETCH = """
local lists = tonumber(ARGV[1])
local index, hash, mine = KEYS[lists + 1], KEYS[lists + 2], KEYS[lists + 3]
for i = 1, lists do
  local item = redis.call('LINDEX', KEYS[i], -1)
  if item then
    local read, payload = pcall(cjson.decode, item)
    local properties = read and type(payload) == 'table' and payload.properties
    local info = type(properties) == 'table' and properties.delivery_info
    local tag = info and properties.delivery_tag
    if type(tag) ~= 'string' or type(info.routing_key) ~= 'string' then return 0 end
    redis.call('ZADD', index, ARGV[2], tag)
    redis.call('HSET', hash, tag, '[' .. item .. ',"",' .. cjson.encode(ARGV[3]) .. ']')
    -- Last, since a server that is out of memory refuses the others and not this one.
    redis.call('RPOP', KEYS[i])
    if mine then
      for _, old in ipairs(redis.call('ZRANGE', mine, 0, ARGV[4] - 1)) do
        if redis.call('HEXISTS', hash, old) == 1 then
          redis.call('ZADD', mine, ARGV[2], old)
        else
          redis.call('ZREM', mine, old)
        end
      end
      redis.call('ZADD', mine, ARGV[2], tag)
    end
    return item
  end
end
"""

#: Each fetch adds one tag and looks at three: of those in the set, a third at most are acknowledged.
_LOOK_AT = 3


def keys_of(channel: Any, queue: str) -> list[str]:
    """The keys of a queue: a list for each priority, the most urgent first."""
    return [channel.global_keyprefix + channel._q_for_pri(queue, step) for step in channel.priority_steps]


def fetch(channel: Any, client: Any, queue: str, mine: str | None = None) -> Any:
    """Take one message and write it down as unacknowledged, in one step and in Kombu's own format.

    It goes back to the very queue that it was fetched from, and not through the exchange that brought it there.

    :param mine: the key of a sorted set that notes the delivery tag, too.  Nothing is done about it when the message is
        acknowledged: each fetch looks at the few tags that were looked at the longest ago, and removes those that are.
        So the set stays at about one and a half times what is unacknowledged.
    :returns: the message as it is stored; ``None`` if there is none; ``0`` if the next one is not Kombu's.
    """
    lists = keys_of(channel, queue)
    others = [channel.unacked_index_key, channel.unacked_key, *([mine] if mine else ())]
    keys = [*lists, *(channel.global_keyprefix + key for key in others)]
    return client.eval(_FETCH, len(keys), *keys, len(lists), time(), queue, _LOOK_AT)
