"""From a URL to something that opens connections: one server, the master behind Sentinels, or a node of a cluster."""

from __future__ import annotations

import math
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

    def open(self) -> Any:
        """A connection of the driver, not yet connected.  May raise the driver's errors."""

    def look_again(self) -> None:
        """The one that was asked is not, or not any more, the one to ask."""


class _Server:
    """One server, at one address."""

    def __init__(self, connection_class: Callable[..., Any], options: dict[str, Any]) -> None:
        self._class = connection_class
        self._options = options
        self.open()  # a wrong option is an error of the URL, and not of the first call

    def open(self) -> Any:
        return self._class(**self._options)

    def look_again(self) -> None:
        """There is nobody else."""


class _Master:
    """The master that the Sentinels name; each connection asks them anew, and checks who it has got."""

    def __init__(self, sentinels: list[tuple[str, int]], service: str, options: dict[str, Any]) -> None:
        from redis.sentinel import Sentinel, SentinelConnectionPool  # most fleets never need it

        theirs = {key: options[key] for key in ("retry", "socket_timeout", "socket_connect_timeout")}
        theirs |= {
            key.removeprefix("sentinel_"): options.pop(key) for key in [k for k in options if k.startswith("sentinel_")]
        }
        manager: Any = Sentinel(  # type: ignore[no-untyped-call]
            sentinels,
            min_other_sentinels=int(options.pop("min_other_sentinels", 0)),
            sentinel_kwargs=theirs,
        )
        self._pool: Any = SentinelConnectionPool(  # type: ignore[no-untyped-call]
            service, manager, is_master=True, check_connection=True, **options
        )
        self.open()

    def open(self) -> Any:
        return self._pool.connection_class(**self._pool.connection_kwargs)

    def look_again(self) -> None:
        """Every connection does."""


class _Cluster:
    """The node of the cluster that has the slot of the namespace."""

    def __init__(self, nodes: list[tuple[str, int]], key: str, options: dict[str, Any]) -> None:
        from redis.cluster import RedisCluster

        self._class = RedisCluster
        self._nodes = nodes
        self._key = key
        self._options = options
        self._client: Any = None

    def open(self) -> Any:
        try:
            return self._open()
        except redis.RedisError:
            raise
        except redis.RedisClusterException as exc:  # not one of the driver's RedisErrors
            raise redis.ConnectionError(f"the cluster does not answer for the slot of {self._key}: {exc}") from exc

    def _open(self) -> Any:
        from redis.cluster import ClusterNode

        client = self._client
        if client is None:
            nodes = [ClusterNode(host, port) for host, port in self._nodes]  # type: ignore[no-untyped-call]
            client = self._client = self._class(startup_nodes=nodes, **self._options)
        node = client.get_node_from_key(self._key)
        pool = client.get_redis_connection(node).connection_pool
        return pool.connection_class(**pool.connection_kwargs)

    def look_again(self) -> None:
        """Ask the cluster anew who has which slot."""
        self._client = None


def opener_of(url: str, key: str, timeout_seconds: float) -> Opener:
    """What opens connections for this URL.  Nothing is connected yet.

    :param key: a key of the namespace; all its keys are in one slot.
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
        if kind == "socket":
            return _socket(rest, timeout_seconds)
        if kind == "sentinel":
            return _sentinel(base, rest, timeout_seconds)
        if kind == "cluster":
            return _cluster(base, rest, key, timeout_seconds)
        _check_database(urlsplit(f"{base}://{rest}").path.strip("/"))
        options = _options(f"{base}://{rest}", timeout_seconds)
        return _Server(options.pop("connection_class", Connection), options)
    except (ValueError, TypeError, redis.RedisError):
        # The original error may show the password.
        raise ConfigurationError("capacity_registry", mask_url(url), f"a URL like {_EXPECTED[kind]}") from None


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


def _cluster(base: str, rest: str, key: str, timeout_seconds: float) -> Opener:
    credentials, addresses, path, query = _split(rest)
    if path.strip("/") not in ("", "0"):
        raise ValueError("a cluster has database 0 only")
    options = _options(f"redis://{credentials}cluster?{query}", timeout_seconds)
    options.pop("host")
    options.pop("db", None)
    if base == "rediss":
        options["ssl"] = True
    # The driver's own check that every slot is covered would make an outage elsewhere ours.
    options.setdefault("require_full_coverage", False)
    return _Cluster(_addresses(addresses, 6379), key, options)


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
