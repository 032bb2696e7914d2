"""A circuit breaker in front of the registry: one warning an outage, and nobody hammers a dead store."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import RegistryError, RegistryUnavailable

__all__ = ("Outage",)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Outage:
    """Remembers that the registry is away.

    While it is, calls fail at once with :exc:`RegistryUnavailable`, but for one attempt every
    ``retry_seconds``; so a publish does not pay the store's time-out each time.  Thread-safe and fork-safe.

    :param peer: that of another client of the same store in the same process.  Of an outage that both see, only the
        first one tells, and when one is back, the other tries at once.
    """

    def __init__(
        self,
        url: str,
        retry_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        peer: Outage | None = None,
    ) -> None:
        self.url = url
        self.retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_at: float | None = None
        self._hurry = False
        self._peer = peer
        #: Not empty from the warning to the all-clear.  Shared without a lock: a thread that forks must not hold one.
        self._told: dict[str, object] = {} if peer is None else peer._told
        if peer is not None:
            peer._peer = self
        _outages.add(self)

    @property
    def active(self) -> bool:
        """The registry was away at the last attempt."""
        return self._retry_at is not None

    @property
    def away(self) -> bool:
        """Whether it is away for this client, or for its peer."""
        peer = self._peer
        return self.active or (peer is not None and peer.active)

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
        if self._retry_at is not None or self._told:
            self._ended()
        return result

    def _may_try(self) -> bool:
        with self._lock:
            now = self._clock()
            if self._retry_at is None or self._hurry or now >= self._retry_at:
                self._hurry = False
                # Others keep failing at once while this attempt is under way.
                self._retry_at = now + self.retry_seconds
                return True
            return False

    def _began(self, exc: RegistryError) -> None:
        with self._lock:
            self._hurry = False
            self._retry_at = self._clock() + self.retry_seconds
        me = object()
        self._told["failed_at"] = self._clock()
        if self._told.setdefault("by", me) is me:
            logger.warning(
                "registry %s is away; going on without it: %s", self.url, exc, extra={"action": "registry_away"}
            )

    def _ended(self) -> None:
        with self._lock:
            self._retry_at = None
        peer = self._peer
        if peer is not None and peer.active:
            # It tells, when it is back too.
            peer._hurry = True
            return
        # One that answers now and then is still away.
        failed_at = self._told.get("failed_at")
        if isinstance(failed_at, float) and self._clock() - failed_at < self.retry_seconds:
            return
        if self._told.pop("by", None) is not None:
            self._told.pop("failed_at", None)
            logger.warning("registry %s is back", self.url, extra={"action": "registry_back"})

    def _after_fork(self) -> None:
        # The other one's thread is not here, nor whoever may have held the lock.
        self._lock = threading.Lock()
        self._peer, self._told = None, {"by": self} if self.active else {}


_outages: weakref.WeakSet[Outage] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for outage in _outages:
        outage._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
