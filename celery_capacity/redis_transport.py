"""Kombu's Redis transport with one client a channel.

Kombu makes a new client for every message that it publishes and for every one that it acknowledges, and making one takes as
long as what it is made for.  All that differs from one client to the next is what redis-py keeps for its own use; the connections
are those of the channel's pool, one for each command, whatever client asks for it.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis

__all__ = ("Channel", "Transport")


class Channel(redis.Channel):  # type: ignore[misc]
    """Keeps the client for everything but waiting for messages, which has always had a client of its own."""

    _kept: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:
            return super()._create_client(asynchronous=True)
        # After an error and after a fork there is another pool.
        if self._kept is None or self._kept.connection_pool is not self.pool:
            self._kept = super()._create_client()
        return self._kept


class Transport(redis.Transport):  # type: ignore[misc]
    """What ``redis://`` and ``rediss://`` mean for an app with the plugin."""

    Channel = Channel
