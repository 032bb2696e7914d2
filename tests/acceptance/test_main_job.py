"""The main job: no worker is ever sent more than it can run, on every broker, with every pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker as embedded_worker
from pytest_celery import CeleryTestSetup
from support.fleet import BROKERS, Fleet, Fleets
from support.journal import JOURNAL_ENV, Journal
from support.sampling import Sampler
from support.servers import unique
from support.tasks_app import build_app
from support.waiting import wait_until

from celery_capacity import open_registry

TWO = {"w1@north": {}, "w2@south": {}}


def send_wave(app: Celery, count: int, *, seconds: float = 0.15) -> None:
    """Every third task acknowledges late."""
    for number in range(count):
        name = "record_late" if number % 3 == 2 else "record"
        app.tasks[name].delay(key=f"wave-{number}", seconds=seconds)


def assert_each_ran_once(journal: Journal, count: int, limit: float = 60.0) -> None:
    journal.wait(lambda seen: len(seen.ended()) >= count, limit, what="all tasks to end")
    assert set(journal.executions_by_key()) == {f"wave-{number}" for number in range(count)}
    assert set(journal.executions().values()) == {1}


class TestOnNodes:
    """On pytest-celery's nodes, so on Docker, too."""

    @pytest.fixture
    def capacity_plugin(self) -> bool:
        return True

    @pytest.fixture
    def worker_names(self) -> tuple[str, ...]:
        return ("w1@north", "w2@south")

    @pytest.mark.parametrize("broker_kind", BROKERS)
    def test_every_task_runs_once_and_nobody_holds_more_than_it_can_run(
        self, celery_setup: CeleryTestSetup, journal: Journal
    ) -> None:
        app = celery_setup.app
        registry = app.capacity.registry
        wait_until(lambda: len(registry.overview().workers) == 2, 30, what="both workers to be registered")

        with Sampler(registry) as sampler:
            send_wave(app, 24)
            assert_each_ran_once(journal, 24)
            wait_until(lambda: all(not w.held for w in registry.overview().workers), 10, what="all slots to be free")

        assert journal.max_parallel_by_worker() == {"w1@north": 2, "w2@south": 2}
        assert sampler.most_held == {"w1@north": 2, "w2@south": 2}


class TestPools:
    @pytest.fixture(params=["threads", "gevent", "solo"])
    def pool(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(
        params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)],
    )
    def fleet(self, fleets: Fleets, pool: str, request: pytest.FixtureRequest) -> Iterator[Fleet]:
        size = 1 if pool == "solo" else 2
        workers = {name: {"pool": pool, "concurrency": size} for name in TWO}
        with fleets.use(request.param, workers) as fleet:
            yield fleet

    def test_every_pool_runs_each_task_once_within_its_capacity(self, fleet: Fleet, pool: str) -> None:
        size = 1 if pool == "solo" else 2
        assert {view.capacity for view in fleet.views()} == {size}

        send_wave(fleet.app, 18)

        assert_each_ran_once(fleet.journal, 18)
        assert fleet.journal.max_parallel_by_worker() == {"w1@north": size, "w2@south": size}


def test_on_the_filesystem_broker(fleets: Fleets, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    (folder / "control").mkdir(parents=True)
    options = {
        "data_folder_in": str(folder),
        "data_folder_out": str(folder),
        "control_folder": str(folder / "control"),
        "store_processed": False,
    }
    conf = {"broker_transport_options": options}
    with fleets.own("filesystem", TWO, conf, broker="filesystem://") as fleet, Sampler(fleet.registry):
        send_wave(fleet.app, 18)

        assert_each_ran_once(fleet.journal, 18)
        assert fleet.journal.max_parallel_by_worker() == {"w1@north": 2, "w2@south": 2}
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be given back")
        assert fleet.left() == {}
        assert fleet.complaints() == []


@pytest.fixture
def kept_logging() -> Iterator[None]:
    """A worker takes the root logger for its own; the tests that come after have captured logs to look at."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.usefixtures("kept_logging")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("pool", "concurrency"), [("solo", 1), ("threads", 3)])
def test_a_worker_that_is_embedded_in_the_process_of_the_producer(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, pool: str, concurrency: int
) -> None:
    monkeypatch.setenv(JOURNAL_ENV, str(journal.directory))
    namespace = unique("ns")
    conf = {
        "task_default_queue": unique("acceptance"),
        "capacity_registry": "memory://",
        "capacity_namespace": namespace,
        # So long a worker that leaves is kept in mind, since something may be on its way to it.
        "capacity_reservation_seconds": 0.5,
    }
    app = build_app(broker_url="memory://", result_backend="cache+memory://", conf=conf, plugin=True)
    registry = open_registry("memory://", namespace)

    with Sampler(registry, interval=0.01) as sampler:
        with embedded_worker(app, pool=pool, concurrency=concurrency, perform_ping_check=False):
            # While it starts it looks for work, with a slot in its hand.
            wait_until(lambda: [w.free for w in registry.overview().workers] == [concurrency], 10, what="the worker")
            send_wave(app, 12, seconds=0.05)
            assert_each_ran_once(journal, 12)
            wait_until(lambda: not any(w.held for w in registry.overview().workers), 10, what="all slots to be free")
        assert list(registry.overview().workers) == []

    assert journal.max_parallel() == concurrency
    assert list(sampler.most_held.values()) == [concurrency]


class TestMixedFleets:
    """Producers and workers take up the plugin in any order."""

    @pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
    def broker_kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def test_a_worker_with_the_plugin_runs_what_a_plain_producer_sends(self, fleets: Fleets, broker_kind: str) -> None:
        with fleets.use(broker_kind, {"w1@north": {}}) as fleet:
            plain = fleet.build_app(plugin=False)
            key = unique("plain")
            for number in range(8):
                plain.tasks["record"].delay(key=f"{key}-{number}", seconds=0.1)

            runs = fleet.ended(key, 8)

            assert {run.worker for run in runs} == {"w1@north"}
            assert set(fleet.journal.executions_by_key().values()) == {1}
            assert fleet.journal.max_parallel() == 2
            plain.close()

    def test_plain_workers_run_what_a_producer_with_the_plugin_sends(self, fleets: Fleets, broker_kind: str) -> None:
        plain: Mapping[str, Mapping[str, Any]] = {"w1@north": {"plugin": False}}
        with fleets.use(broker_kind, plain) as fleet:
            for number in range(6):
                fleet.tasks["record"].delay(key=f"wave-{number}")

            assert_each_ran_once(fleet.journal, 6)
            assert fleet.views() == ()

    def test_plain_workers_beside_workers_with_the_plugin(self, fleets: Fleets, broker_kind: str) -> None:
        mixed: Mapping[str, Mapping[str, Any]] = {"w1@north": {"plugin": False}, "w2@south": {}}
        with fleets.own(broker_kind, mixed) as fleet, Sampler(fleet.registry):
            plain = fleet.build_app(plugin=False)
            for number in range(24):
                app = plain if number % 2 else fleet.app
                app.tasks["record"].delay(key=f"wave-{number}", seconds=0.2)

            assert_each_ran_once(fleet.journal, 24)
            # What could not be reserved was parked in the queue that both of them read.
            assert {run.worker for run in fleet.journal.runs()} == {"w1@north", "w2@south"}
            assert fleet.journal.max_parallel(worker="w2@south") == 2
            fleet.settle()
            plain.close()
