"""What a worker that is gone had received on a Redis broker, and not acknowledged: back to its queue at once.

Kombu keeps the unacknowledged messages of all consumers in one hash and one sorted set, by delivery tag and without
the consumer's name, and gives them back after the visibility time-out of an hour.  Whose they are is seen here from
two things: those that were pushed to a worker have its own queue as their routing key, and those that a worker
fetched from a lot have their tags in a sorted set of the worker (:mod:`.redis_lots` writes it in the step that
fetches).  Other brokers give back by themselves what a lost connection had not acknowledged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads

from ..naming import own_queue_name, unacked_name

__all__ = ("is_redis", "let_go", "pay_owed", "remember_owed", "restore_unacked", "still_ours")

logger = logging.getLogger(__name__)

#: Tags that one step looks at.
_BATCH = 100

# The tags of a worker that are still unacknowledged, each with the time of its delivery, which is as good as a
# version: a message that was given back and delivered again has another.  Those that are not are removed.
# KEYS: the worker's set, index, hash.  ARGV: from where on, how many.
_LIST = """
local found = {}
for _, tag in ipairs(redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[1] + ARGV[2] - 1)) do
  local since = redis.call('ZSCORE', KEYS[2], tag)
  if since and redis.call('HEXISTS', KEYS[3], tag) == 1 then
    found[#found + 1] = tag
    found[#found + 1] = since
  else
    redis.call('ZREM', KEYS[1], tag)
  end
end
return found
"""

# As above, for what came through one queue; one step of a scan.  In Kombu's record the routing key comes last.
# KEYS: index, hash.  ARGV: cursor, how many, the end of the records.
_SCAN = """
local page = redis.call('HSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
local found = {page[1]}
for i = 1, #page[2], 2 do
  if string.sub(page[2][i + 1], -#ARGV[3]) == ARGV[3] then
    local since = redis.call('ZSCORE', KEYS[1], page[2][i])
    if since then
      found[#found + 1] = page[2][i]
      found[#found + 1] = since
    end
  end
end
return found
"""

# What Kombu's transaction does, but only if the message has not been acknowledged, given back or delivered again
# since it was looked at.  (Kombu's watches the whole hash: under load something in it changes all the time.)
# KEYS: the worker's set, index, hash; the lists.  ARGV: tag, time of delivery; for each list what is put there.
_RESTORE = """
if redis.call('ZSCORE', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('HDEL', KEYS[3], ARGV[1]) == 0 then return 0 end
for i = 4, #KEYS do redis.call('RPUSH', KEYS[i], ARGV[i - 1]) end
return 1
"""

# Whether the message is the worker's.
# KEYS: the worker's set, hash.  ARGV: tag, the end of the records of the worker's own queue.
_IS_OURS = """
local record = redis.call('HGET', KEYS[2], ARGV[1])
local ours = record and (string.sub(record, -#ARGV[2]) == ARGV[2] or redis.call('ZSCORE', KEYS[1], ARGV[1]))
"""
_OURS = f"{_IS_OURS} return ours and 1 or 0"

# An acknowledgement, if it is.  KEYS: index, too.
_PAY = f"""
{_IS_OURS}
if not ours then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return redis.call('HDEL', KEYS[2], ARGV[1])
"""

_Found = list[tuple[str, str]]


def is_redis(channel: Any) -> bool:
    """A channel of Kombu's Redis transport that writes down what is unacknowledged."""
    redis_transport = sys.modules.get("kombu.transport.redis")
    return redis_transport is not None and isinstance(channel, redis_transport.Channel) and bool(channel.ack_emulation)


def restore_unacked(
    connection: Any,
    namespace: str,
    worker: str,
    still_gone: Callable[[], bool],
    keep: Collection[str] = (),
) -> int:
    """Put what ``worker`` has not acknowledged back into the queues that it came from; returns how many.

    Nothing is restored that was delivered after ``still_gone`` was last asked, nor twice by two that do it at once.

    :param still_gone: asked after each look and before anything is done about what was seen.
    :param keep: delivery tags of messages that stay where they are.
    :raises OSError: or another of the broker's errors; done again, it goes on where it was.
    """
    with connection.channel() as channel:
        if not is_redis(channel):
            return 0
        restored = 0
        for batch in _batches(channel, namespace, worker):
            if not still_gone():
                break
            restored += sum(_restore(channel, namespace, worker, tag, since) for tag, since in batch if tag not in keep)
        return restored


def still_ours(message: Any, namespace: str, worker: str) -> bool:
    """Whether ``message``, which ``worker`` has received and not acknowledged, has not been given back meanwhile.

    If it has, it is forgotten: or the closing of its channel would give it back once more, under whoever has it now.
    Where the broker knows its consumers, it is always the worker's.

    :raises OSError: or another of the broker's errors.
    """
    channel = message.channel
    if not is_redis(channel):
        return True
    prefix, tag = channel.global_keyprefix, message.delivery_tag
    keys = (prefix + unacked_name(namespace, worker), prefix + channel.unacked_key)
    if channel.client.eval(_OURS, 2, *keys, tag, _end(namespace, worker)):
        return True
    virtual.QoS.ack(channel.qos, tag)
    return False


def let_go(message: Any) -> None:
    """The closing of the message's channel does not give it back; whoever holds it goes on.  Harmless twice."""
    if is_redis(message.channel):
        virtual.QoS.ack(message.channel.qos, message.delivery_tag)


def remember_owed(connection: Any, owed: set[str]) -> None:
    """From now on, delivery tags are added to ``owed`` whose acknowledgement on this connection is cut off."""
    transport = connection.transport
    if hasattr(transport, "owed"):
        transport.owed = owed


def pay_owed(connection: Any, namespace: str, worker: str, owed: set[str]) -> int:
    """Acknowledge what is owed and still the worker's; returns how many.

    :raises OSError: or another of the broker's errors; done again, it goes on where it was.
    """
    paid = 0
    with connection.channel() as channel:
        prefix = channel.global_keyprefix
        names = (unacked_name(namespace, worker), channel.unacked_key, channel.unacked_index_key)
        keys, end = [prefix + name for name in names], _end(namespace, worker)
        for tag in list(owed):
            paid += int(channel.client.eval(_PAY, len(keys), *keys, tag, end))
            owed.discard(tag)
    return paid


def _end(namespace: str, worker: str) -> str:
    return str(dumps(own_queue_name(namespace, worker))) + "]"


def _batches(channel: Any, namespace: str, worker: str) -> Iterator[_Found]:
    prefix, evaluate = channel.global_keyprefix, channel.client.eval
    keys = [prefix + channel.unacked_index_key, prefix + channel.unacked_key]
    own = prefix + unacked_name(namespace, worker)
    # All of it first, since what is restored leaves the set; it is small (see redis_lots).
    listed: _Found = []
    size = int(evaluate("return redis.call('ZCARD', KEYS[1])", 1, own))
    for start in range(0, size, _BATCH)[::-1]:
        # From the end, since what is stale leaves it, too.
        listed = _pairs(evaluate(_LIST, 3, own, *keys, start, _BATCH)) + listed
    # The newest first: each is put before the one that was restored before it.
    listed.sort(key=lambda found: float(found[1]), reverse=True)
    for start in range(0, len(listed), _BATCH):
        yield listed[start : start + _BATCH]
    end = _end(namespace, worker)
    cursor = "0"
    while True:
        page = evaluate(_SCAN, 2, *keys, cursor, _BATCH, end)
        cursor = bytes_to_str(page[0])
        if len(page) > 1:
            yield _pairs(page[1:])
        if cursor == "0":
            return


def _pairs(flat: Iterable[Any]) -> _Found:
    texts = iter([bytes_to_str(item) for item in flat])
    return list(zip(texts, texts, strict=True))


def _restore(channel: Any, namespace: str, worker: str, tag: str, since: str) -> bool:
    record = channel.client.hget(channel.unacked_key, tag)
    if record is None:
        return False
    pushes = _Pushes()
    # Kombu makes the copy (redelivered, priority, where to), and it is kept until the script takes it.
    channel._do_restore_message(*loads(bytes_to_str(record)), pushes)
    if not pushes.made:
        # The binding is gone, or unknown here; Kombu would drop the message.
        logger.warning(
            "message %s of worker %s belongs to no queue that is known here; it comes back after the visibility"
            " time-out",
            tag,
            worker,
            extra={"action": "restore_failed", "worker": worker},
        )
        return False
    prefix = channel.global_keyprefix
    keys = [unacked_name(namespace, worker), channel.unacked_index_key, channel.unacked_key]
    keys += [key for key, _ in pushes.made]
    values = [value for _, value in pushes.made]
    return bool(channel.client.eval(_RESTORE, len(keys), *(prefix + key for key in keys), tag, since, *values))


class _Pushes:
    """Stands for the pipeline that Kombu would write with, and writes nothing."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []

    def rpush(self, key: str, value: Any) -> None:
        self.made.append((key, value))

    lpush = rpush
