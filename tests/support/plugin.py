"""Fixtures for every test that starts processes; loaded by ``tests/conftest.py``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import processes
from .fleet import Fleets
from .journal import Journal
from .servers import unique
from .workers import WorkerProcess, end_workers

__all__ = ("fleets", "journal", "key", "start_worker")

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """What the tasks of this test write down."""
    return Journal(tmp_path / "journal")


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    """Workers that the tests of a module share, on local processes only."""
    fleets = Fleets(tmp_path_factory.mktemp("fleets"))
    yield fleets
    fleets.close()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """What the keys of this test's runs begin with."""
    return unique(request.path.stem.removeprefix("test_"))


@pytest.fixture
def start_worker(tmp_path: Path, journal: Journal) -> Iterator[StartWorker]:
    """Start a worker, with the arguments of :class:`WorkerProcess` and this test's journal.

    It is not waited for: start all of them, then call ``wait_ready`` on each.
    """
    workers: list[WorkerProcess] = []

    def start(name: str, **options: Any) -> WorkerProcess:
        options.setdefault("journal", journal)
        options.setdefault("directory", tmp_path / "workers")
        worker = WorkerProcess(name, **options)
        workers.append(worker)
        return worker.start()

    yield start
    end_workers(workers)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "own_servers: the test stops or restarts its broker, so it gets one of its own")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"acceptance", "features"} & set(item.path.parts):
            # Celery's Redis result consumer leaves sockets to the collector, which blames whatever test is running.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    processes.forget_ended()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for process in processes.seen():
            report.sections.append((f"log of {process.name}", process.log_tail()))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    try:
        yield
    finally:
        # What a test started outside a fixture or a with block.
        for process in processes.live():
            if process.lifetime == "test":
                process.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    for process in reversed(processes.live()):
        process.close()
