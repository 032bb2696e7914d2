"""The broker connection of an app with the plugin."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from kombu import Connection
from kombu.utils.imports import symbol_by_name

__all__ = ("CapacityConnection",)

#: Transports of Kombu's for which the plugin has one that is built on it.
_OURS = {
    "filesystem": "celery_capacity.filesystem:Transport",
    "redis": "celery_capacity.redis_transport:Transport",
    "rediss": "celery_capacity.redis_transport:Transport",
    "sentinel": "celery_capacity.redis_transport:SentinelTransport",
}


class CapacityConnection(Connection):  # type: ignore[misc]
    """A Kombu connection that loses no message on the filesystem (:mod:`.filesystem`) and on Redis, and is quicker there
    (:mod:`.redis_transport`).  On AMQP, a connection that is lost while a worker starts to listen to it is made again.
    """

    def get_transport_cls(self) -> Any:
        """The transport of the URL, or the one that is built on it."""
        ours = self._ours()
        # Late, since Kombu's for the filesystem needs a package of its own on Windows.
        if ours is not None:
            return symbol_by_name(ours)
        theirs = super().get_transport_cls()
        return _attentive(theirs) if getattr(theirs, "driver_type", None) == "amqp" else theirs

    def _info(self, resolve: bool = True) -> Iterable[tuple[str, Any]]:
        info: Iterable[tuple[str, Any]] = super()._info(resolve)
        ours = self._ours()
        if resolve or ours is None:
            return info
        # What a copy is made of.  Those of a pool are of a class of Kombu's, which knows no more than this.
        return [(key, ours if key == "transport" else value) for key, value in info]

    def _ours(self) -> str | None:
        if self.transport_cls in _OURS.values():
            return str(self.transport_cls)
        return _OURS.get(self.transport_cls)


@cache
def _attentive(theirs: type[Any]) -> type[Any]:
    """The AMQP transport ``theirs``, with an error that is known to be one of the connection when its socket is gone.

    The socket may be closed between the handshake and the moment when the worker's loop starts to listen to it.  The
    loop's ValueError (``file descriptor is None``) would end the worker, which connects again after any other loss.
    """

    class Transport(theirs):  # type: ignore[misc]
        def register_with_event_loop(self, connection: Any, loop: Any) -> None:
            try:
                super().register_with_event_loop(connection, loop)
            except ValueError as exc:
                raise ConnectionResetError(f"the broker closed the connection: {exc}") from exc

    Transport.__name__ = Transport.__qualname__ = theirs.__name__
    Transport.__module__ = theirs.__module__
    return Transport
