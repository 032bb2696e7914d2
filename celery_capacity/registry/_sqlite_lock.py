"""The advisory lock that lets one writer at a time into a registry's SQLite file."""

from __future__ import annotations

import os
import sys
import time

try:
    import fcntl
except ImportError:  # Windows: SQLite's own lock is all there is
    fcntl = None  # type: ignore[assignment]

__all__ = ("FileLock", "is_green")

#: Between two looks whether the lock is free.
_POLL_SECONDS = 0.0002


class FileLock:
    """``flock`` on a file of its own, waited for no longer than a given time.

    Not for two threads at once: its owner has a lock for those.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._identity = (0, 0)

    def acquire(self, give_up_at: float) -> bool:
        """Whether the lock was got before ``give_up_at`` (on ``time.monotonic``)."""
        if fcntl is None:
            return True
        while True:
            if self._fd < 0:
                self._open()
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= give_up_at:
                        return False
                    time.sleep(_POLL_SECONDS)
            if self._is_in_place():
                return True
            self.close()

    def release(self) -> None:
        """Let the next one in.  Harmless if it was not held."""
        if fcntl is not None and self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file.  In a forked child this does not release what the parent holds."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        # Reading is enough for flock, and works for a user who may not write the file.
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        found = os.fstat(self._fd)
        self._identity = (found.st_dev, found.st_ino)

    def _is_in_place(self) -> bool:
        # Whoever deletes the database deletes this file too; the others then lock the new one.
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._identity


def is_green() -> bool:
    """Whether threads are greenlets here: a wait inside the kernel would stop all of them."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return True
    eventlet = sys.modules.get("eventlet.patcher")
    return eventlet is not None and bool(eventlet.is_monkey_patched("thread"))
