"""On a Redis broker: what this worker holds unacknowledged stays its own, however long it takes.

Kombu gives a message to the next worker when it was delivered longer ago than the visibility timeout, whether or not
somebody runs it: a task that takes longer, or that waits for its eta for longer, runs twice, and once more with every
period.  So while a worker lives, it says again and again that its messages were delivered just now.  What it holds when
it dies is given back by the sweepers (:mod:`.unacked`), or at the latest by the visibility timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .unacked import is_redis

if TYPE_CHECKING:
    from .ledger import Ledger

__all__ = ("VisibilityKeeper",)

#: How often, within one visibility timeout: one that fails is made up for by the next.
_TIMES = 4
_RETRY_SECONDS = 2.0


class VisibilityKeeper:
    """Used by one thread, that is not the main loop's: that may stand still for as long as a task takes.

    :param connection: returns the broker connection, opened if need be.
    """

    def __init__(self, ledger: Ledger, connection: Callable[[], Any], clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._connection = connection
        self._clock = clock
        self._next_at = 0.0

    def keep(self) -> int:
        """If it is time, say of all messages that are held that they were delivered just now; returns of how many.

        :raises OSError: or another of the broker's errors; it is tried again shortly.
        """
        now = time.monotonic()
        tags = self._tags() if now >= self._next_at else []
        if not tags:
            return 0
        self._next_at = now + _RETRY_SECONDS
        with self._connection().channel() as channel:
            if not is_redis(channel):
                self._next_at = float("inf")
                return 0
            # Only those that are still written down: they may be acknowledged at the same time.
            delivered = dict.fromkeys(tags, self._clock())
            kept = int(channel.client.zadd(channel.unacked_index_key, delivered, xx=True, ch=True))
            self._next_at = now + channel.visibility_timeout / _TIMES
        return kept

    def _tags(self) -> list[str]:
        messages = [entry.message for entry in self._ledger.entries()]
        return [message.delivery_tag for message in messages if not message.acknowledged]
