"""The one list of stores that every contract test runs on."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_capacity.registry import Registry, open_registry

REDIS_URL = os.environ.get("CAPACITY_TEST_REDIS", "redis://127.0.0.1:6379/15")


class ManualClock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Store:
    """One store under test.  Each has namespaces that nobody else uses, and takes them away afterwards."""

    def __init__(self, name: str, url: str, **options: Any) -> None:
        self.name = name
        self.url = url
        self.options = options
        self.advance: Callable[[float], None] = time.sleep
        #: Only where the tests move time by hand.
        self.clock: ManualClock | None = None
        self.suffix = uuid.uuid4().hex[:12]
        self._opened = ExitStack()

    def namespace(self, name: str) -> str:
        return f"{name}-{self.suffix}"

    def open(self, namespace: str) -> Registry:
        return self._opened.enter_context(open_registry(self.url, self.namespace(namespace), **self.options))

    def close(self) -> None:
        self._opened.close()


def _memory(tmp_path: Path) -> Store:
    return Store("memory", "memory://contract")


def _memory_by_hand(tmp_path: Path) -> Store:
    clock = ManualClock()
    store = Store("memory-by-hand", f"memory://{uuid.uuid4().hex}", clock=clock)
    store.clock, store.advance = clock, clock.advance
    return store


def _sqlite(tmp_path: Path) -> Store:
    return Store("sqlite", f"sqlite:///{tmp_path / 'capacity.db'}")


def _sqlite_by_hand(tmp_path: Path) -> Store:
    clock = ManualClock()
    store = Store("sqlite-by-hand", f"sqlite:///{tmp_path / 'capacity.db'}", clock=clock)
    store.clock, store.advance = clock, clock.advance
    return store


def _redis(tmp_path: Path) -> Store:
    client = redis.Redis.from_url(REDIS_URL)
    try:
        client.ping()
    except redis.RedisError as exc:
        _missing(f"no Redis at {REDIS_URL}: {exc}")
    store = Store("redis", REDIS_URL)

    def clean() -> None:
        for key in client.scan_iter(match=f"*{store.suffix}*", count=1000):
            client.delete(key)
        client.close()

    store._opened.callback(clean)
    return store


def _missing(what: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


STORES: dict[str, Callable[[Path], Store]] = {
    "memory": _memory,
    "memory-by-hand": _memory_by_hand,
    "sqlite": _sqlite,
    "sqlite-by-hand": _sqlite_by_hand,
    "redis": _redis,
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = STORES[request.param](tmp_path)
    yield store
    store.close()
