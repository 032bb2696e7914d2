"""How the threads of one process, and the processes of one machine, take turns."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows: SQLite's own lock is all there is
    fcntl = None  # type: ignore[assignment]

__all__ = ("FairLock", "FileLock", "pause")

#: So many times in a row a process takes the lock before it looks whether others wait.
_TURNS_IN_A_ROW = 2
_SHORTEST_PAUSE_SECONDS = 0.0001
_LONGEST_PAUSE_SECONDS = 0.01
_USUAL_WAIT_SECONDS = 0.05


def pause(waited_seconds: float) -> None:
    """Sleep before the next look: at first for the same short time, so that nobody's chances fall while it waits; after
    a wait that is no longer usual for ever longer, so as not to burn the processor."""
    unusual_seconds = waited_seconds - _USUAL_WAIT_SECONDS
    time.sleep(min(max(_SHORTEST_PAUSE_SECONDS, unusual_seconds / 20), _LONGEST_PAUSE_SECONDS))


class FairLock:
    """A lock for threads (or greenlets) that is handed on in the order in which they came.

    A plain one goes to whoever asks first after a release, which is nearly always the thread that had it (8 busy
    threads: p99 14 ms, worst 200 ms; here 3 ms and 5 ms).
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, timeout: float = -1) -> bool:
        with self._guard:
            if not self._held:
                self._held = True
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            handed_over = turn.acquire(timeout=timeout)
        except BaseException:  # an interrupt; nobody may wait for this one
            if not self._withdraw(turn):
                self.release()
            raise
        return handed_over or not self._withdraw(turn)

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def _withdraw(self, turn: threading.Lock) -> bool:
        """Wait no longer.  False if the lock was handed over in the meantime."""
        with self._guard:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()


class FileLock:
    """``flock`` on a file of its own, waited for no longer than a given time.

    Why nobody blocks in the kernel for it: such a wait has no timeout, so that one process stopped inside an operation (Ctrl-Z)
    would hang all others; it stops every greenlet of the thread; and it is not fair, since a busy process takes the
    lock again before the one that was woken is running (8 processes, 2 cores: p99 15 ms, worst 130 ms).

    Instead whoever has to wait holds a second file's lock, shared, and looks again every 0.1 ms; and a process that has
    had two turns in a row finds that out, and waits its turn too (p99 6 ms, worst 20 ms).

    Not for two threads at once: its owner has a lock for those.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock_fd = -1
        self._waiting_fd = -1
        self._identity = (0, 0)
        self._turns = 0

    def acquire(self, give_up_at: float) -> bool:
        """Whether the lock was got before ``give_up_at`` (on ``time.monotonic``)."""
        if fcntl is None:
            return True
        while True:
            if self._lock_fd < 0:
                self._open()
            if not self._take() and not self._wait(give_up_at):
                return False
            if self._is_in_place():
                return True
            # Whoever deletes the database deletes this file too; everybody then locks the new one.
            self.close()

    def release(self) -> None:
        """Let the next one in.  Harmless if it was not held."""
        if fcntl is not None and self._lock_fd >= 0:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files.  In a forked child this does not release what the parent holds."""
        for fd in (self._lock_fd, self._waiting_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._waiting_fd = -1

    def _take(self) -> bool:
        """Take the lock if it is free, unless it is the others' turn."""
        self._turns += 1
        if self._turns > _TURNS_IN_A_ROW:
            self._turns = 0
            if not _try(self._waiting_fd):
                return False
            fcntl.flock(self._waiting_fd, fcntl.LOCK_UN)
        return _try(self._lock_fd)

    def _wait(self, give_up_at: float) -> bool:
        self._turns = 0
        started = now = time.monotonic()
        try:
            # One who is just looking whether anybody waits may be in the way: then this one goes unseen, which does no harm.
            _try(self._waiting_fd, fcntl.LOCK_SH)
            while now < give_up_at:
                pause(now - started)
                if _try(self._lock_fd):
                    return True
                now = time.monotonic()
            return False
        finally:
            fcntl.flock(self._waiting_fd, fcntl.LOCK_UN)

    def _open(self) -> None:
        # Reading is enough for flock, so a user who may not write the file can still take part.
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC
        self._lock_fd = os.open(self.path, flags, 0o644)
        self._waiting_fd = os.open(self.path + "-waiting", flags, 0o644)
        found = os.fstat(self._lock_fd)
        self._identity = (found.st_dev, found.st_ino)

    def _is_in_place(self) -> bool:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._identity


def _try(fd: int, kind: int | None = None) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if kind is None else kind) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
