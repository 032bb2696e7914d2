"""Composition: settings, registry and hooks are put together here, and only here."""

from __future__ import annotations

from typing import Any

__all__ = ("install",)


def install(app: Any) -> Any:
    """Placed here first so that the package can be imported; the parts follow."""
    return app
