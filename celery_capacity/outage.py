"""A circuit breaker in front of the registry: one warning an outage, and nobody hammers a dead store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import RegistryError, RegistryUnavailable

__all__ = ("Outage",)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Outage:
    """Remembers that the registry is away.

    While it is, calls fail at once with :exc:`RegistryUnavailable`, but for one attempt every
    ``retry_seconds``; so a publish does not pay the store's time-out each time.  Thread-safe.
    """

    def __init__(self, url: str, retry_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self.retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_at: float | None = None

    @property
    def active(self) -> bool:
        """The registry was away at the last attempt."""
        return self._retry_at is not None

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args, **kwargs)``, unless the registry is known to be away.

        :raises RegistryError: whatever the store raises, or :exc:`RegistryUnavailable` at once.
        """
        if self._retry_at is not None and not self._may_try():
            raise RegistryUnavailable(f"registry {self.url} is away; the next attempt is due shortly")
        try:
            result = function(*args, **kwargs)
        except RegistryError as exc:
            self._began(exc)
            raise
        if self._retry_at is not None:
            self._ended()
        return result

    def _may_try(self) -> bool:
        with self._lock:
            now = self._clock()
            if self._retry_at is None or now >= self._retry_at:
                # Others keep failing at once while this attempt is under way.
                self._retry_at = now + self.retry_seconds
                return True
            return False

    def _began(self, exc: RegistryError) -> None:
        with self._lock:
            first = self._retry_at is None
            self._retry_at = self._clock() + self.retry_seconds
        if first:
            logger.warning(
                "registry %s is away; going on without it: %s", self.url, exc, extra={"action": "registry_away"}
            )

    def _ended(self) -> None:
        with self._lock:
            was_away, self._retry_at = self._retry_at is not None, None
        if was_away:
            logger.warning("registry %s is back", self.url, extra={"action": "registry_back"})
