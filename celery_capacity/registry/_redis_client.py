"""Scripts and connections: one call is one script, and one round trip.

The driver's own client costs nearly twice what its connection does (101 and 51 µs for an empty script), and repeats calls
by itself.  So this uses its connections, and decides itself what may be sent again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
from collections import deque
from collections.abc import Callable
from importlib.resources import files
from itertools import count
from typing import Any

import redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from ..errors import RegistryError, RegistryUnavailable
from ._redis_urls import opener_of
from .urls import mask_url

__all__ = ("Client", "Script")

logger = logging.getLogger("celery_capacity.registry.redis")

_UNAVAILABLE = (
    redis.ConnectionError,  # busy loading, too
    redis.TimeoutError,
    ClusterDownError,
    ReadOnlyError,
    TryAgainError,
    # The slot is on its way to another node, and its keys are on both.  Nothing was run: KEYS[1] never exists, so
    # that the node refuses the whole script instead of failing in its middle.
    AskError,
    MovedError,
)
_DENIED = (AuthenticationError, AuthorizationError)
#: The same as said by a server, where the driver has no class for it (older ones have some only for clusters).
_UNAVAILABLE_WORDS = (
    "ASK",
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "MOVED",
    "NOREPLICAS",
    "READONLY",
    "TRYAGAIN",
)
#: Of these, the ones of a server that refuses every write and still answers a script that has nothing to write.
_READS_ONLY_WORDS = ("MISCONF", "NOREPLICAS", "READONLY")
#: How often one call follows the slot of the namespace through a cluster.
_MOST_MOVES = 4


class Script:
    """A Lua script of this package, with the shared parts that it needs put before it.

    :param rarely: names of functions that the script reaches as ``rarely().name``.  The parts are then defined only when
        it does, which saves a script that is called for every task the time.
    """

    def __init__(self, name: str, *parts: str, rarely: tuple[str, ...] = ()) -> None:
        self.name = name
        shared = "".join(map(_read, parts))
        if rarely:
            table = ", ".join(f"{function} = {function}" for function in rarely)
            shared = f"local function rarely()\n{shared}return {{{table}}}\nend\n"
        self.text = _read("_clock") + shared + _read(name)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def _read(name: str) -> str:
    return (files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")


class Client:
    """Runs scripts.  Thread-safe and fork-safe without a lock: connections that nobody uses are in a deque.

    :raises ConfigurationError: if the URL or the timeout is wrong.
    """

    def __init__(self, url: str, namespace: str, timeout_seconds: float) -> None:
        self._url = mask_url(url)
        #: Every key begins with it.  The braces put all of a namespace into one slot of a cluster.
        self._prefix = f"{{capacity:{namespace}}}"
        self._opener = opener_of(url, timeout_seconds)
        self._eviction_checked = False
        self._start()

    def _start(self) -> None:
        """In this process nothing is open yet; what a parent has opened stays the parent's."""
        self._pid = os.getpid()
        #: Connections that nobody uses, the last one used last, each with :func:`_has_news` of it.
        self._idle: deque[tuple[Any, Callable[[], bool]]] = deque()
        #: The server has refused to write, and nothing was written since.
        self._reads_only = False
        self._nonce = os.urandom(8).hex()
        self._count = count()

    def nonce(self) -> str:
        """A word that no other process and no other call gets."""
        if self._pid != os.getpid():
            self._start()
        return f"{self._nonce}{next(self._count):x}"

    def run(self, script: Script, *arguments: Any) -> Any:
        """Run a script once, and return its reply.

        :raises RegistryUnavailable: nothing answered; whether it was run is not known.
        :raises RegistryError: the server said no.
        """
        try:
            return self._run(script, ("EVALSHA", script.sha, 1, self._prefix, *arguments))
        except redis.RedisError as exc:
            if _is_unavailable(exc):
                raise RegistryUnavailable(f"{self._url} did not answer {script.name!r}: {exc}") from exc
            raise RegistryError(f"{self._url} refused {script.name!r}: {exc}") from exc
        except OSError as exc:
            raise RegistryUnavailable(f"{self._url} did not answer {script.name!r}: {exc}") from exc

    def close(self) -> None:
        """Close the connections that nobody uses.  Harmless twice; a later call opens new ones."""
        if self._pid != os.getpid():
            self._start()
        idle = self._idle
        while idle:
            try:
                connection, _ = idle.pop()
            except IndexError:  # another thread took the last one
                return
            connection.disconnect()

    def _run(self, script: Script, command: tuple[Any, ...]) -> Any:
        if self._pid != os.getpid():
            self._start()
        idle = self._idle
        moves = 0
        while True:
            try:
                connection, has_news = idle.pop()
            except IndexError:
                connection, has_news = self._connect()
                fresh = True
            else:
                if has_news():  # it was closed while it waited
                    connection.disconnect()
                    continue
                fresh = False
            try:
                if self._reads_only:
                    # Or a script with nothing to write would be answered, and the registry taken for one that is back.
                    self._check_writable(connection)
                packed = connection.pack_command(*command)
                try:
                    connection.send_packed_command(packed, check_health=False)
                except (redis.ConnectionError, OSError):
                    if fresh:
                        raise
                    # It ended just now, and nobody can have run a part of a command: once more, on another one.
                    connection.disconnect()
                    continue
                try:
                    reply = connection.read_response()
                except NoScriptError:
                    # The server is new or was flushed; this gives it the script, and runs it.
                    connection.send_packed_command(connection.pack_command("EVAL", script.text, *command[2:]), False)
                    reply = connection.read_response()
            except ResponseError as exc:
                address = _moved_to(exc)
                if address is None and not _is_unavailable(exc):
                    idle.append((connection, has_news))
                    raise
                self._reads_only = self._reads_only or _is_reads_only(exc)
                # Whoever was asked is not the one to ask, or not now; new connections find out who is.
                connection.disconnect()
                self.close()
                if address is None or moves == _MOST_MOVES:
                    raise
                # Nothing was run: the slot is on another node.
                self._opener.moved(*address)
                moves += 1
            except BaseException:
                # Also when a greenlet is killed: the answer to this call must not become that to another.
                connection.disconnect()
                raise
            else:
                idle.append((connection, has_news))
                return reply

    def _connect(self) -> tuple[Any, Callable[[], bool]]:
        connection = self._opener.connect()
        if not self._eviction_checked:
            self._eviction_checked = True
            try:
                self._check_eviction(connection)
            except BaseException:
                self._eviction_checked = False
                connection.disconnect()
                raise
        return connection, _has_news(connection)

    def _check_writable(self, connection: Any) -> None:
        connection.send_command("SET", f"{self._prefix}:writable", "1", "PX", 1)
        try:
            connection.read_response()
        except ResponseError as exc:
            if _is_unavailable(exc):
                raise
            # Not allowed, or out of memory, where a script may still give slots back.
        self._reads_only = False

    def _check_eviction(self, connection: Any) -> None:
        """Warn once if this server may throw away keys when its memory is full."""
        connection.send_command("INFO", "memory")
        try:
            lines = connection.read_response().decode().splitlines()
        except ResponseError:
            return  # not allowed to ask
        memory = dict(line.split(":", 1) for line in lines if ":" in line)
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and int(memory.get("maxmemory", 0)) > 0:
            logger.warning(
                "%s evicts keys when its memory is full (maxmemory-policy is %s): slots and workers of the registry may "
                "vanish; set it to noeviction, or use a Redis of its own",
                self._url,
                policy,
                extra={"action": "eviction_policy", "policy": policy},
            )


def _is_unavailable(exc: redis.RedisError) -> bool:
    """Whether waiting may help."""
    if isinstance(exc, _DENIED):
        return False
    return isinstance(exc, _UNAVAILABLE) or str(exc).partition(" ")[0] in _UNAVAILABLE_WORDS


def _is_reads_only(exc: ResponseError) -> bool:
    return isinstance(exc, ReadOnlyError) or str(exc).partition(" ")[0] in _READS_ONLY_WORDS


def _moved_to(exc: ResponseError) -> tuple[str, int] | None:
    """The node of a cluster that has the slot, as told by another node."""
    text = str(exc)
    if not isinstance(exc, MovedError) and not text.startswith("MOVED "):
        return None
    host, _, port = text.rpartition(" ")[2].rpartition(":")
    return host, int(port)


def _has_news(connection: Any) -> Callable[[], bool]:
    """A function that tells whether an idle connection has something to read, which it has only once it was closed."""
    sock = getattr(connection, "_sock", None)
    if sock is None or not hasattr(select, "poll"):
        return lambda: bool(connection.can_read(0))
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLERR | select.POLLHUP)
    poll = poller.poll
    return lambda: bool(poll(0))
