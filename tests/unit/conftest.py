"""Fixtures of the tests of the producer's side and of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from support.dispatched import Dispatched, clear_broker

from celery_capacity.cli import capacity
from celery_capacity.registry import Registry, open_registry

Run = Callable[..., Result]


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


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/capacity.db"


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with open_registry(url) as opened:
        yield opened


@pytest.fixture
def run(url: str) -> Run:
    def call(*arguments: str, **conf: Any) -> Result:
        app = Celery("proj", broker="memory://", set_as_current=False)
        app.conf.update({"capacity_registry": url, **conf})
        context = CLIContext(app, no_color=True, workdir=None)
        # Before 8.2, click mixes the two streams unless it is told not to.
        separate = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
        return CliRunner(**separate).invoke(capacity, list(arguments), obj=context, catch_exceptions=False)

    return call
