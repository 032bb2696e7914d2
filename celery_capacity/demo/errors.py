"""What can go wrong in the demo."""

from __future__ import annotations

from ..errors import CapacityError

__all__ = ("DemoFailed",)


class DemoFailed(CapacityError):
    """The demo cannot go on, or did not show what it has to show."""
