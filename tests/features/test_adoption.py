"""Installed and removed while tasks keep coming: nothing is lost, and nothing runs twice.

Producers and workers of both kinds beside each other, without a change: ``TestMixedFleets`` of the main job.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from support.fleet import Fleet, Fleets, close_app
from support.journal import Run
from support.sampling import Sampler
from support.workers import WorkerProcess

CONF = {"capacity_poll_seconds": 0.2, "worker_proc_alive_timeout": 10.0}
PLAIN: Mapping[str, Any] = {"plugin": False}


class Load:
    """Sends tasks of several kinds, one every few milliseconds, through whichever app is its ``app`` now."""

    def __init__(self, app: Celery, key: str) -> None:
        self.app = app
        self.key = key
        #: Key → how often it must run.
        self.sent: dict[str, int] = {}
        self.failure: BaseException | None = None
        #: Worker and time of each warm shutdown.
        self.stops: list[tuple[str, float]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def _run(self) -> None:
        try:
            for number in itertools.count():
                if self._stopping.wait(0.03):
                    return
                key = f"{self.key}-{number}"
                tasks = self.app.tasks
                kind = number % 10
                if kind == 0:
                    tasks["retry_n"].delay(1, key=key)
                elif kind == 1:
                    tasks["record"].apply_async(kwargs={"key": key}, countdown=0.7)
                elif kind == 2:
                    tasks["record_late"].delay(key=key, seconds=0.05)
                else:
                    tasks["record"].delay(key=key, seconds=0.03)
                self.sent[key] = 2 if kind == 0 else 1
        except BaseException as exc:  # noqa: BLE001 - raised again in the thread of the test
            self.failure = exc

    def stop_warmly(self, worker: WorkerProcess) -> None:
        self.stops.append((worker.nodename, time.monotonic()))
        worker.terminate(60)

    def excused(self, run: Run) -> bool:
        """Was it running on a worker that was stopping?

        Celery's prefork pool, with the plugin or without, may lose what a process says while the loop of the worker
        ends; then an acknowledgement is never sent, and the broker delivers the task once more.
        """
        return any(run.worker == name and run.end is not None and run.end >= since for name, since in self.stops)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Harmless twice."""
        self._stopping.set()
        self._thread.join(60)
        if self.failure is not None:
            raise AssertionError("a task could not be sent") from self.failure


def goes_on(fleet: Fleet, key: str, more: int = 15) -> None:
    before = len(fleet.runs(key))
    fleet.wait(lambda: len(fleet.runs(key)) >= before + more, 60, f"{more} more runs")


@contextmanager
def exactly_once(fleet: Fleet, load: Load) -> Iterator[None]:
    yield
    load.stop()
    assert len(load.sent) > 100
    fleet.wait(lambda: len(fleet.runs(load.key)) >= sum(load.sent.values()), 60, "all tasks to have run")
    fleet.wait(lambda: not fleet.left(), 20, "nothing to be left")
    runs: dict[tuple[str, int], list[Run]] = {}
    for run in fleet.runs(load.key):
        runs.setdefault((run.key, run.retries), []).append(run)
    assert runs.keys() == {(key, retries) for key, times in load.sent.items() for retries in range(times)}
    for first, *again in runs.values():
        assert all(run.redelivered and load.excused(first) for run in again), (first, again)
    assert {run.outcome for run in fleet.ended(load.key, 1)} == {"returned", "Retry"}


@pytest.mark.parametrize("broker_kind", ["redis", "rabbitmq", pytest.param("rabbitmq-quorum", marks=pytest.mark.soak)])
class TestUnderLoad:
    def test_installed(self, fleets: Fleets, broker_kind: str, key: str, tmp_path: Path) -> None:
        with fleets.own(broker_kind, {"w1@north": PLAIN, "w2@south": PLAIN}, CONF) as fleet, Sampler(fleet.registry):
            plain = fleet.build_app(plugin=False)
            load = Load(plain, key)
            old = list(fleet.workers.values())
            with load, exactly_once(fleet, load):
                goes_on(fleet, key)
                # One worker, then the producer, then the other worker; each under its old name.
                load.stop_warmly(old[0])
                fleet.start("w1@north", directory=tmp_path)
                fleet.wait_ready()
                goes_on(fleet, key)
                load.app = fleet.app
                goes_on(fleet, key)
                load.stop_warmly(old[1])
                fleet.start("w2@south", directory=tmp_path)
                fleet.wait_ready()
                goes_on(fleet, key)
            assert {run.worker for run in fleet.runs(key)[-20:]} == {"w1@north", "w2@south"}
            fleet.settle()
            close_app(plain)

    def test_removed(self, fleets: Fleets, broker_kind: str, key: str, tmp_path: Path) -> None:
        with fleets.own(broker_kind, {"w1@north": {}, "w2@south": {}}, CONF) as fleet, Sampler(fleet.registry):
            plain = fleet.build_app(plugin=False)
            load = Load(fleet.app, key)
            old = list(fleet.workers.values())
            with load, exactly_once(fleet, load):
                goes_on(fleet, key)
                # The other way round: the workers before the producer.
                load.stop_warmly(old[0])
                fleet.start("w1@north", directory=tmp_path, plugin=False).wait_ready()
                goes_on(fleet, key)
                load.stop_warmly(old[1])
                fleet.start("w2@south", directory=tmp_path, plugin=False).wait_ready()
                goes_on(fleet, key)
                load.app = plain
                goes_on(fleet, key)
            # At most a name is left, which offers nothing and holds nothing.
            assert [(view.capacity, view.held) for view in fleet.views()] == [(None, 0)] * len(fleet.views())
            # An own queue may be left as well, if the last worker could not wait for what may have been on its way.
            assert not any(fleet.depth(fleet.own_queue(worker.nodename)) for worker in old)
            close_app(plain)


@pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_a_plain_worker_empties_the_lots_that_are_left(fleets: Fleets, broker_kind: str, key: str) -> None:
    """As the how-to says; and the retries of what had a node find their way without the plugin."""
    with fleets.own(broker_kind, {"w1@north": {}}) as fleet:
        gate = fleet.fill(2)
        for number in range(3):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, node="north")
        fleet.tasks["retry_n"].apply_async((1,), {"key": f"{key}-retry"}, node="north")
        worker = fleet.workers["w1@north"]
        worker.terminate()
        fleet.journal.open_gate(gate)
        worker.wait(30)
        assert fleet.left() == {fleet.lot("north"): 4}

        fleet.start("w2@north", plugin=False, queues=[fleet.queue, fleet.lot("north")])

        assert {run.worker for run in fleet.ended(key, 5, 60)} == {"w2@north"}
        fleet.wait(lambda: not fleet.left(), 20, "nothing to be left")


def test_a_pin_without_any_capacity_worker_is_for_later(fleets: Fleets, key: str) -> None:
    """A producer that is ahead of its workers may use the options of the plugin already."""
    with fleets.own("redis", {"w1@north": PLAIN}) as fleet:
        for number in range(4):
            fleet.tasks["retry_n"].apply_async((1,), {"key": f"{key}-{number}"}, node="south", when_full="refuse")
        runs = fleet.ended(key, 8, 60)
        assert {(run.worker, run.outcome) for run in runs} == {("w1@north", "Retry"), ("w1@north", "returned")}
        fleet.wait(lambda: not fleet.left(), 20, "nothing to be left")
