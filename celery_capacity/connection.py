"""The broker connection of an app with the plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kombu import Connection

__all__ = ("CapacityConnection",)

_FILESYSTEM = "celery_capacity.filesystem:Transport"


class CapacityConnection(Connection):  # type: ignore[misc]
    """A Kombu connection that loses no message on the filesystem, either: see :mod:`.filesystem`."""

    def get_transport_cls(self) -> Any:
        """The transport of the URL; for Kombu's filesystem transport, the one that is built on it."""
        if self._on_filesystem():
            # Late, since Kombu's needs a package of its own on Windows.
            from .filesystem import Transport

            return Transport
        return super().get_transport_cls()

    def _info(self, resolve: bool = True) -> Iterable[tuple[str, Any]]:
        info: Iterable[tuple[str, Any]] = super()._info(resolve)
        if resolve or not self._on_filesystem():
            return info
        # What a copy is made of.  Those of a pool are of a class of Kombu's, which knows no more than this.
        return [(key, _FILESYSTEM if key == "transport" else value) for key, value in info]

    def _on_filesystem(self) -> bool:
        return self.transport_cls in ("filesystem", _FILESYSTEM)
