"""Fixtures of the tests of the producer's side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.dispatched import Dispatched, clear_broker


@pytest.fixture
def make() -> Iterator[Callable[..., Dispatched]]:
    """Makes apps; each test finds an empty broker."""
    made: list[Dispatched] = []

    def build(**conf: Any) -> Dispatched:
        made.append(Dispatched(**conf))
        return made[-1]

    clear_broker()
    yield build
    for fixture in made:
        fixture.app.close()
        fixture.registry.close()
    clear_broker()


@pytest.fixture
def fx(make: Callable[..., Dispatched]) -> Dispatched:
    return make()
