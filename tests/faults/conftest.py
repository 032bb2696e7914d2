"""Fleets whose servers and processes the tests take away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fleet import Fleets
from support.servers import unique


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    """Workers of their own for each test; the registry's Redis is shared."""
    fleets = Fleets(tmp_path_factory.mktemp("faults"))
    yield fleets
    fleets.close()


@pytest.fixture
def key() -> str:
    return unique("fault")
