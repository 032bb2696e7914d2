"""The servers and the workers, and what is known of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from celery import Celery
from support.fleet import Fleet, close_app
from support.servers import RabbitServer, RedisServer
from support.tasks_app import build_app
from support.workers import WorkerProcess

from celery_capacity.errors import RegistryError

__all__ = ("LAPSE_SECONDS", "NODES", "SIZE", "Fault", "Loss", "World")

NODES = ("w1@north", "w2@south", "w3@east")
SIZE = 2
LAPSE_SECONDS = 5.0
#: Short enough that much happens in a minute, long enough for a machine that others use, too.
CONF = {
    "capacity_lease_seconds": 2.5,
    "capacity_lapse_seconds": LAPSE_SECONDS,
    "capacity_sweep_seconds": 1,
    "capacity_reservation_seconds": 4,
    "capacity_registry_timeout_seconds": 1,
    "capacity_registry_retry_seconds": 0.5,
    # A late task is kept, also when only its process dies.
    "task_reject_on_worker_lost": True,
    # Longer than a broker takes to come back: what is published inside a task (chains, retries) is not to be lost.
    "task_publish_retry_policy": {"max_retries": 200, "interval_start": 0.1, "interval_step": 0.1, "interval_max": 0.5},
    "broker_connection_max_retries": None,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
}


@dataclass
class Fault:
    """Something that was done to the fleet."""

    what: str
    whom: str
    began: float
    #: When it was undone; the fleet has to be whole again some time after that.
    undone: float = 0.0
    healed: float = 0.0

    @property
    def seconds(self) -> float:
        """From its end to a whole fleet."""
        return self.healed - self.undone


@dataclass(frozen=True)
class Loss:
    """Processes that were killed: what ran in them is lost, if it was acknowledged early."""

    at: float
    worker: str
    pids: frozenset[int]


class World:
    """Own servers on free ports, three workers, and the end of all of them."""

    def __init__(self, directory: Path, broker_kind: str) -> None:
        self._stack = ExitStack()
        self.broker_kind = broker_kind
        self.faults: list[Fault] = []
        self.losses: list[Loss] = []
        #: Workers that have ended by themselves, and the last line that says why.
        self.ended: list[str] = []
        #: The registrations of workers that were killed, by name: what is seen of these is no sign of life.
        self._gone: dict[str, int] = {}
        broker_class = RedisServer if broker_kind == "redis" else RabbitServer
        options = {"persistence": True} if broker_kind == "redis" else {}
        try:
            self.broker = self._stack.enter_context(
                broker_class(directory / "broker", lifetime="session", **options)  # type: ignore[arg-type]
            )
            self.store = self._stack.enter_context(
                RedisServer(directory / "registry", persistence=True, lifetime="session")
            )
            backend = self._stack.enter_context(RedisServer(directory / "backend", lifetime="session"))
            conf = dict(CONF)
            if broker_kind == "rabbitmq":
                conf["broker_transport_options"] = {"confirm_publish": True}
            self.fleet = Fleet(
                directory, broker=self.broker.url, backend=backend.url, registry=self.store.url, conf=conf
            )
            self._stack.callback(self.fleet.close)
            for name in NODES:
                self.fleet.start(name, concurrency=SIZE)
            self.fleet.wait_ready()
        except BaseException:
            self._stack.close()
            raise

    def producer(self) -> Celery:
        """An app to send with; nobody waits for results here."""
        app = build_app(broker_url=self.fleet.broker, conf=self.fleet.conf, plugin=True)
        self._stack.callback(close_app, app)
        return app

    def close(self) -> None:
        """End everything that was started here."""
        self._stack.close()

    def worker(self, name: str) -> WorkerProcess:
        return self.fleet.workers[name]

    def note_loss(self, worker: str, pids: list[int], *, whole: bool) -> None:
        """:param whole: the main process is among them."""
        self.losses.append(Loss(time.monotonic(), worker, frozenset(pids)))
        if whole:
            try:
                view = self.fleet.view(worker)
            except RegistryError:
                return
            if view is not None:
                self._gone[worker] = view.epoch

    def is_whole(self) -> bool:
        """Every worker can be chosen for all of its slots."""
        self.revive()
        try:
            views = self.fleet.views()
        except RegistryError:
            return False
        ready = {v.name for v in views if v.capacity == SIZE and v.state.value == "ready"}
        return ready == set(NODES) and all(v.epoch != self._gone.get(v.name) for v in views)

    def revive(self) -> None:
        """As whoever supervises the workers would: start anew what has ended by itself, and note it."""
        for name in NODES:
            worker = self.worker(name)
            if not worker.started or worker.running:
                continue
            lines = [line for line in worker.logs(since_start=True).splitlines() if "Unrecoverable error" in line]
            self.ended.append(f"{name}: {lines[-1] if lines else 'no word'}")
            pids = [worker.pid]
            worker.close()
            self.fleet.journal.note_dead()
            self.note_loss(name, pids, whole=True)
            worker.start()

    def wait_whole(self, limit: float) -> None:
        """:raises AssertionError: it did not heal in time."""
        self.until(self.is_whole, limit, "every worker to be back")

    def until(self, condition: Callable[[], object], limit: float, what: str) -> None:
        """As :meth:`Fleet.wait`, also while the registry does not answer."""

        def met() -> bool:
            try:
                return bool(condition())
            except RegistryError:
                return False

        self.fleet.wait(met, limit, what)
