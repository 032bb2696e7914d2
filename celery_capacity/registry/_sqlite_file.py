"""One SQLite file as one process uses it: its connection, its locks, its clock, its errors.

**One connection a process**, behind a lock: writers take turns anyway, and every further connection would cost a page
cache and a file lock of its own.

**Writers take turns by a lock file**, not by SQLite's own lock: SQLite waits for that one by sleeping, longer each time, so
that whoever has waited longest is the least likely to get it.

**fork**: SQLite keeps a table of its open files and their locks in the process, and a child inherits that table without the
locks.  So not even a connection of its own is safe in a child, unless nothing was open at the moment of the fork;
hence everything is closed before a fork, and opened again when it is next needed, on both sides.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from ..errors import ConfigurationError, RegistryError, RegistryUnavailable
from ._sqlite_clock import shared_clock
from ._sqlite_lock import FairLock, FileLock, pause
from ._sqlite_schema import ensure_schema

__all__ = ("DatabaseFile", "Transaction")

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: The first with generated columns.
_MINIMUM_SQLITE = (3, 31, 0)
#: What SQLite says when it is worth trying again, or when it is not even known what happened.  By text, since
#: Python 3.10 does not tell the code.
_LOCKED = ("database is locked", "database table is locked", "locking protocol")
_UNREACHABLE = (*_LOCKED, "unable to open database file", "disk I/O error")
#: An operation changes a few short rows, each on a page of its own, and every such page is written to the log whole and
#: synced with it.  A quarter of SQLite's usual page makes a reserve and cancel 1.4 to 1.7 times as fast on a disk.
_PAGE_BYTES = 1024
#: What the log may grow to before it is written back.  SQLite's usual size; counted in pages, it would be a quarter of it.
_LOG_BYTES = 4096 * 1000
#: Deleting is three files one after the other, and each can make one try fail.
_TRIES_TO_OPEN = 4
_DAMAGED = ("file is not a database", "database disk image is malformed")


class Transaction:
    """What an operation works with: one consistent state, one instant."""

    __slots__ = ("execute", "now", "ns", "reports", "tokens")

    def __init__(self, execute: Callable[..., sqlite3.Cursor], ns: int, now: float, tokens: Iterator[str]) -> None:
        self.execute = execute
        #: Tokens that nobody has had before.
        self.tokens = tokens
        #: The id of the namespace.
        self.ns = ns
        self.now = now
        self.reports: list[Callable[[], None]] = []

    def one(self, sql: str, parameters: dict[str, Any]) -> Any:
        """The first row, or ``None``."""
        return self.execute(sql, parameters).fetchone()

    def report(self, level: int, message: str, *arguments: object, **extra: object) -> None:
        """Log this once the transaction is done, and nobody waits for it."""
        self.reports.append(lambda: logger.log(level, message, *arguments, extra=extra))


class DatabaseFile:
    """The file at ``path``, opened when it is first used.

    :param timeout_seconds: how long an operation may wait for others before it is given up.
    :param clock: the store's clock, for tests; all processes must then use the same.
    :raises ConfigurationError: this Python's SQLite is too old.
    """

    def __init__(
        self, path: str, namespace: str, timeout_seconds: float, clock: Callable[[], float] | None = None
    ) -> None:
        if sqlite3.sqlite_version_info < _MINIMUM_SQLITE:
            needed = ".".join(map(str, _MINIMUM_SQLITE))
            raise ConfigurationError("sqlite3.sqlite_version", sqlite3.sqlite_version, f"{needed} or later")
        self.path = path
        self.namespace = namespace
        self.timeout_seconds = timeout_seconds
        self._clock = clock
        self._now = clock or time.time
        self._flock = FileLock(path + ".lock")
        self._disown()
        _files.add(self)

    def _disown(self) -> None:
        self._pid = os.getpid()
        self._mutex = FairLock()
        self._busy_thread = 0
        self._connection: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self._ns = 0
        self._tokens = _new_tokens()

    # -- transactions ------------------------------------------------------------------------------------

    def write(self) -> AbstractContextManager[Transaction]:
        """A transaction of its own that may write.  Nobody else writes meanwhile.

        :raises RegistryUnavailable: others had the file for too long, or it could not be opened.
        :raises RegistryError: SQLite said no.
        """
        return self._transaction(writes=True)

    def read(self) -> AbstractContextManager[Transaction]:
        """A transaction that only reads, and waits for no writer of another process."""
        return self._transaction(writes=False)

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[Transaction]:
        if self._pid != os.getpid():
            self._abandon()
        give_up_at = time.monotonic() + self.timeout_seconds
        if not self._mutex.acquire(timeout=self.timeout_seconds):
            self._give_up("other threads of this process")
        self._busy_thread = threading.get_ident()
        try:
            try:
                connection = self._writers_turn(give_up_at) if writes else self._readers_turn(give_up_at)
                self._begin(connection, writes, give_up_at)
                transaction = Transaction(connection.execute, self._ns, self._now(), self._tokens)
                yield transaction
                connection.execute("COMMIT")
                reports = transaction.reports
            except BaseException:
                self._roll_back()
                raise
            finally:
                self._flock.release()
        except (sqlite3.Error, OSError) as exc:
            raise self._mapped(exc) from exc
        finally:
            self._busy_thread = 0
            self._mutex.release()
        for report in reports:
            report()

    def _writers_turn(self, give_up_at: float) -> sqlite3.Connection:
        if not self._flock.acquire(give_up_at):
            self._give_up("another process")
        return self._open_connection() or self._reopen(give_up_at)

    def _readers_turn(self, give_up_at: float) -> sqlite3.Connection:
        # Only to open the file does a reader have to keep the others out.
        return self._open_connection() or self._writers_turn(give_up_at)

    @staticmethod
    def _begin(connection: sqlite3.Connection, writes: bool, give_up_at: float) -> None:
        def attempt() -> None:
            if writes:
                connection.execute("BEGIN IMMEDIATE")
                return
            connection.execute("BEGIN")
            try:
                # Only the first look takes the snapshot, and only then the file can turn out to be locked.
                connection.execute("SELECT 1 FROM namespace").fetchone()
            except sqlite3.Error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

        _patiently(attempt, give_up_at)

    def _roll_back(self) -> None:
        connection = self._connection
        if connection is not None and connection.in_transaction:
            try:
                connection.execute("ROLLBACK")
            except sqlite3.Error:
                self._drop_connection()

    # -- opening and closing -----------------------------------------------------------------------------

    def _open_connection(self) -> sqlite3.Connection | None:
        """The connection, if there is one to the file that is at the path now."""
        if self._connection is None:
            return None
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        return self._connection if (found.st_dev, found.st_ino) == self._identity else None

    def _reopen(self, give_up_at: float) -> sqlite3.Connection:
        """Open the file, and create it if need be; the lock of the writers is held."""
        self._drop_connection()
        tried = 0
        while True:
            try:
                return self._open(give_up_at)
            except (sqlite3.DatabaseError, FileNotFoundError):
                # Somebody who deletes the files under it may have taken one of them away since the last look.
                tried += 1
                if tried == _TRIES_TO_OPEN or time.monotonic() >= give_up_at:
                    raise
            pause(0)

    def _open(self, give_up_at: float) -> sqlite3.Connection:
        if not os.path.exists(self.path):
            # Left behind by somebody who deleted the database alone: they would be taken for the new one's.
            for suffix in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.unlink(self.path + suffix)
        # No timeout of SQLite's own: it would stop every greenlet, and sleep the longer the longer it waits.
        connection = sqlite3.connect(
            self.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            _patiently(lambda: self._prepare(connection), give_up_at)
            found = os.stat(self.path)
        except BaseException:
            connection.close()
            raise
        self._tokens = _new_tokens()
        self._connection, self._identity = connection, (found.st_dev, found.st_ino)
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # Of a new file; one that is there keeps its own.
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise RegistryError(f"{self.path} cannot be used by several processes: it must be on a local disk")
        # A crash of a process loses nothing.  A power cut may lose what was written since the last checkpoint, never
        # the file's consistency: after the reboot no worker of this machine is left anyway, and each says anew what
        # it holds.  Syncing at every commit would cost a disk's latency for each slot.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_BYTES // _PAGE_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            ensure_schema(connection, self.path)
            self._ns = self._namespace_id(connection)
            self._now = self._clock or shared_clock(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _namespace_id(self, connection: sqlite3.Connection) -> int:
        connection.execute("INSERT OR IGNORE INTO namespace (name) VALUES (?)", (self.namespace,))
        (ns,) = connection.execute("SELECT id FROM namespace WHERE name = ?", (self.namespace,)).fetchone()
        return int(ns)

    def close(self) -> None:
        """Close the file; the next transaction opens it again."""
        if self._pid != os.getpid():
            self._abandon()
        with self._mutex:
            self._drop_connection()
            self._flock.close()

    def __del__(self) -> None:
        # An app that is dropped takes its registry along; Python closes neither the lock files nor, without a warning,
        # the database.
        if self.__dict__.get("_flock") is not None:
            self._flock.close()
            if self._pid == os.getpid():
                self._drop_connection()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    # -- errors ------------------------------------------------------------------------------------------

    def _give_up(self, who: str) -> NoReturn:
        raise RegistryUnavailable(f"{self.path} was in use by {who} for more than {self.timeout_seconds:g} s")

    def _mapped(self, exc: Exception) -> RegistryError:
        """The one place where SQLite's errors and the system's become the registry's."""
        text = str(exc)
        if isinstance(exc, OSError):
            kind = RegistryUnavailable if isinstance(exc, FileNotFoundError) else RegistryError
            return kind(f"{self.path} cannot be used: {exc.strerror} ({exc.filename})")
        if text.startswith(_LOCKED):
            return RegistryUnavailable(
                f"{self.path} was locked by another program for more than {self.timeout_seconds:g} s"
            )
        # After these the connection may not be what it was.
        self._drop_connection()
        if text.startswith(_UNREACHABLE):
            return RegistryUnavailable(f"{self.path} cannot be used: {text}")
        if text.startswith(_DAMAGED):
            return RegistryError(
                f"{self.path} is damaged ({text}): delete it, and the workers register again by themselves"
            )
        return RegistryError(f"{self.path}: {text}")

    # -- forks -------------------------------------------------------------------------------------------

    def before_fork(self) -> bool:
        """Close everything and keep other threads out.  False if that cannot be done now."""
        if self._busy_thread == threading.get_ident():
            return False  # forked from inside an operation, by a signal handler
        if not self._mutex.acquire(timeout=self.timeout_seconds):
            return False
        self._drop_connection()
        self._flock.close()
        return True

    def after_fork_in_parent(self) -> None:
        """Let other threads in again."""
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        """Start afresh."""
        self._abandon()

    def _abandon(self) -> None:
        # A connection of the parent must not be closed here: that would take locks away and delete files.
        if self._connection is not None:
            _abandoned.append(self._connection)
        # An open copy would keep the lock of a parent that is killed inside an operation.
        self._flock.close()
        self._disown()


def _patiently(attempt: Callable[[], T], give_up_at: float) -> T:
    """Try again while SQLite itself says that the file is locked: by a stranger, or by one who is just opening it."""
    started = time.monotonic()
    while True:
        try:
            return attempt()
        except sqlite3.OperationalError as exc:
            now = time.monotonic()
            if not str(exc).startswith(_LOCKED) or now >= give_up_at:
                raise
        pause(now - started)


def _new_tokens() -> Iterator[str]:
    """Unique by a prefix for each opening; in a row after that, so that the slots of one process share pages."""
    prefix = os.urandom(8).hex()
    return (f"{prefix}-{serial:x}" for serial in count(1))


_files: WeakSet[DatabaseFile] = WeakSet()
_abandoned: list[sqlite3.Connection] = []
#: Files that are closed for a fork that is under way.
_held_for_fork: list[DatabaseFile] = []
_fork_gate = threading.Lock()


def _before_fork() -> None:
    _fork_gate.acquire()
    _held_for_fork.extend(file for file in list(_files) if file.before_fork())


def _after_fork_in_parent() -> None:
    while _held_for_fork:
        _held_for_fork.pop().after_fork_in_parent()
    _fork_gate.release()


def _after_fork_in_child() -> None:
    global _fork_gate
    _fork_gate = threading.Lock()
    _held_for_fork.clear()
    for file in list(_files):
        file.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
