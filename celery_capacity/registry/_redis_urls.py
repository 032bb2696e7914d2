"""From a URL to something that opens connections: one server, the master behind Sentinels, or a node of a cluster."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.retry import Retry

from ..errors import ConfigurationError
from .urls import mask_url

__all__ = ("Opener", "opener_of")

_EXPECTED = {
    "socket": "redis+socket:///path/to/redis.sock?db=0",
    "sentinel": "redis+sentinel://[user:password@]host:port,host2:port2/service/db",
    "cluster": "redis+cluster://[user:password@]host:port,host2:port2",
    "server": "redis://[user:password@]host:port/db",
}


class Opener(Protocol):
    """Opens connections to whoever is to be asked."""

    def connect(self) -> Any:
        """A new connection of the driver.  Raises the driver's errors."""

    def moved(self, host: str, port: int) -> None:
        """The one that was asked says that this one is to be asked."""


class _Server:
    """One server, at one address."""

    def __init__(self, connection_class: Callable[..., Any], options: dict[str, Any]) -> None:
        self._class = connection_class
        self._options = options
        self.new()  # a wrong option is an error of the URL, and not of the first call

    def new(self, **address: Any) -> Any:
        """A connection that is not connected yet."""
        return self._class(**{**self._options, **address})

    def connect(self) -> Any:
        connection = self.new()
        connection.connect()
        return connection

    def moved(self, host: str, port: int) -> None:
        """A cluster behind a plain URL: it is for the caller's next error to say so."""


class _Master(_Server):
    """The master that the Sentinels name; each connection asks them anew, and checks whom it has got."""

    def __init__(self, sentinels: list[tuple[str, int]], service: str, options: dict[str, Any]) -> None:
        from redis import sentinel  # most fleets never need it

        # Typed or not, as the release of redis has it.
        make_sentinel: Any = sentinel.Sentinel
        pool: Any = sentinel.SentinelConnectionPool

        theirs = {key: options[key] for key in ("retry", "socket_timeout", "socket_connect_timeout")}
        theirs |= {
            key.removeprefix("sentinel_"): options.pop(key) for key in [k for k in options if k.startswith("sentinel_")]
        }
        manager = make_sentinel(
            sentinels,
            min_other_sentinels=int(options.pop("min_other_sentinels", 0)),
            sentinel_kwargs=theirs,
        )
        # Only to make connections, which need it; it holds none.
        self.pool: Any = pool(service, manager, is_master=True, check_connection=True, **options)
        super().__init__(self.pool.connection_class, dict(self.pool.connection_kwargs))


class _Cluster(_Server):
    """The node of a cluster that has the slot of the namespace.  Whoever is asked instead names it, so that the map of all
    slots is not needed."""

    def __init__(
        self, nodes: list[tuple[str, int]], connection_class: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        self._nodes = nodes
        self._at = nodes[0]
        self._seconds = float(options["socket_connect_timeout"])
        super().__init__(connection_class, options)

    def connect(self) -> Any:
        give_up_at = time.monotonic() + self._seconds
        for host, port in dict.fromkeys((self._at, *self._nodes)):
            connection = self.new(host=host, port=port)
            try:
                connection.connect()
            except (redis.ConnectionError, redis.TimeoutError) as exc:
                failure: redis.RedisError = exc
                if isinstance(exc, redis.AuthenticationError) or time.monotonic() > give_up_at:
                    break
            else:
                self._at = (host, port)
                return connection
        raise failure

    def moved(self, host: str, port: int) -> None:
        self._at = (host or self._at[0], port)


def opener_of(url: str, timeout_seconds: float) -> Opener:
    """What opens connections for this URL.  Nothing is connected yet.

    :param timeout_seconds: for connecting, and for each answer; the URL's own options prevail.
    :raises ConfigurationError: naming the URL, without the password.
    """
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, (int, float)):
        raise ConfigurationError("timeout_seconds", timeout_seconds, "a number of seconds above 0")
    if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
        raise ConfigurationError("timeout_seconds", timeout_seconds, "a number of seconds above 0")
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower().replace("valkeys", "rediss").replace("valkey", "redis")
    base, _, kind = scheme.partition("+")
    kind = "socket" if scheme == "unix" else kind or "server"
    try:
        if "#" in rest:
            raise ValueError("a '#' in a password must be quoted, and nothing else may have one")
        if kind == "socket":
            return _socket(rest, timeout_seconds)
        if kind == "sentinel":
            return _sentinel(base, rest, timeout_seconds)
        if kind == "cluster":
            return _cluster(base, rest, timeout_seconds)
        _check_database(urlsplit(f"{base}://{rest}").path.strip("/"))
        options = _options(f"{base}://{rest}", timeout_seconds)
        return _Server(options.pop("connection_class", Connection), options)
    except (ValueError, TypeError, redis.RedisError) as exc:
        # The original error may show the password; of what Python says of an argument only the name is taken.
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(exc))
        hint = f" (the driver has no option {unknown[1]!r})" if unknown else ""
        raise ConfigurationError("capacity_registry", mask_url(url), f"a URL like {_EXPECTED[kind]}{hint}") from None


def _options(url: str, timeout_seconds: float) -> dict[str, Any]:
    """The driver's options.  No retries: it is for the caller to know whether a call may be made again."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    if int(redis.__version__.partition(".")[0]) >= 5:
        options["protocol"] = 2  # nothing is pushed to us, so connecting takes fewer steps
    options |= parse_url(url)  # type: ignore[no-untyped-call]
    if options.get("health_check_interval") is None:
        options.pop("health_check_interval", None)
    options["decode_responses"] = False
    options.pop("max_connections", None)
    options.pop("blocking", None)
    return options


def _socket(rest: str, timeout_seconds: float) -> Opener:
    # Kombu's name for the database of a socket.
    options = _options(f"unix://{rest.replace('virtual_host=', 'db=')}", timeout_seconds)
    if not options.get("path"):
        raise ValueError("no path")
    options.pop("socket_connect_timeout")
    options["db"] = int(options.get("db", 0))
    return _Server(options.pop("connection_class"), options)


def _sentinel(base: str, rest: str, timeout_seconds: float) -> Opener:
    credentials, addresses, path, query = _split(rest)
    service, _, database = path.strip("/").partition("/")
    if not service:
        raise ValueError("no service name")
    _check_database(database)
    options = _options(f"redis://{credentials}sentinel/{database or 0}?{query}", timeout_seconds)
    options.pop("host")
    if base == "rediss":
        options["ssl"] = True
    return _Master(_addresses(addresses, 26379), unquote(service), options)


def _cluster(base: str, rest: str, timeout_seconds: float) -> Opener:
    credentials, addresses, path, query = _split(rest)
    if path.strip("/") not in ("", "0"):
        raise ValueError("a cluster has database 0 only")
    options = _options(f"{base}://{credentials}cluster?{query}", timeout_seconds)
    options.pop("db", None)
    return _Cluster(_addresses(addresses, 6379), options.pop("connection_class", Connection), options)


def _split(rest: str) -> tuple[str, str, str, str]:
    """Credentials with their ``@``, addresses, path, query."""
    rest, _, query = rest.partition("?")
    before, at, after = rest.rpartition("@")
    addresses, _, path = after.partition("/")
    parse_qs(query, strict_parsing=bool(query))
    return before + at, addresses, path, query


def _addresses(text: str, default_port: int) -> list[tuple[str, int]]:
    found = []
    for address in text.split(","):
        parts = urlsplit(f"//{address}")
        if not parts.hostname:
            raise ValueError("no host")
        found.append((parts.hostname, parts.port or default_port))
    return found


def _check_database(text: str) -> None:
    # The driver takes what is not a number for database 0.
    if text and not text.isdecimal():
        raise ValueError("the database is not a number")
