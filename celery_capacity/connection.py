"""The broker connection of an app with the plugin."""

from __future__ import annotations

from typing import Any

from kombu import Connection

__all__ = ("CapacityConnection",)


class CapacityConnection(Connection):  # type: ignore[misc]
    """A Kombu connection that loses no message on the filesystem, either: see :mod:`.filesystem`."""

    def get_transport_cls(self) -> Any:
        """The transport of the URL; for Kombu's filesystem transport, the one that is built on it."""
        transport = super().get_transport_cls()
        if (transport.__module__, transport.__qualname__) != ("kombu.transport.filesystem", "Transport"):
            return transport
        # Late, since Kombu's needs a package of its own on Windows.
        from .filesystem import Transport

        return Transport
