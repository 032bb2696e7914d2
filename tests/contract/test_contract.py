"""Every store passes the one contract suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_capacity.registry import Registry
from celery_capacity.testing import RegistryContract


class TestEveryStore(RegistryContract):
    @pytest.fixture
    def open_registry(self, store) -> Callable[[str], Registry]:
        return store.open

    @pytest.fixture
    def advance(self, store) -> Callable[[float], None]:
        return store.advance
