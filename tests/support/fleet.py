"""Workers on one broker that several tests share, and what a test asks about them.

Starting a worker takes seconds, so tests that leave their workers as they found them take a fleet from
:class:`Fleets`, which keeps it for the next test.  Whether they do is checked: leaving :meth:`Fleets.use` waits
until the fleet is quiet (no slot held, no message left, nothing to complain about in a log), and a fleet that is
not is ended, so that the next test gets a new one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from celery_capacity import open_registry
from celery_capacity.models import WorkerView
from celery_capacity.naming import later_lot, node_lot, own_queue_name, unknown_lot
from celery_capacity.registry import Registry

from .journal import Journal
from .sampling import Sampler
from .servers import RedisServer, shared_rabbit_url, unique
from .tasks_app import build_app
from .waiting import wait_until
from .workers import WorkerProcess, end_workers

__all__ = ("BROKERS", "Fleet", "Fleets", "close_app", "registry_kind")

#: The brokers of the matrix.
BROKERS = ("redis", "rabbitmq", "rabbitmq-quorum")

_QUORUM = {
    "task_default_queue_type": "quorum",
    "task_create_missing_queue_type": "quorum",
    "broker_transport_options": {"confirm_publish": True},
}
#: Slots that were not given back by the end of their task, but found later; and parts that broke down.
COMPLAINTS = (
    r"was held for a task that has ended unseen",
    r"were held in the registry and not here",
    r"the intake of \S+ failed",
    r"heartbeat of \S+ failed",
    r"sweep of \S+: ",
    r"could not (hand back|give back|withdraw|deregister)",
    r"Unrecoverable error",
)
#: Seconds.  Less than the time after which the sweeps would find a slot that was forgotten.
QUIET_LIMIT = 12.0


def registry_kind() -> str:
    """``redis`` or ``sqlite``: what the workers' registry is on, unless a test says otherwise.

    ``CAPACITY_TEST_REGISTRY`` decides it for the whole run.
    """
    found = importlib.util.find_spec("celery_capacity.registry.redis")
    return os.environ.get("CAPACITY_TEST_REGISTRY") or ("sqlite" if found is None else "redis")


def close_app(app: Celery) -> None:
    """Close the connections that an app has opened as a producer; a socket that is left open is a warning later."""
    if app.conf.result_backend and app.conf.result_backend.startswith("redis"):
        consumer = app.backend.result_consumer
        consumer.stop()
        # Or a result that is collected later would try to unsubscribe, at a server that may be gone.
        consumer._pubsub = None
        app.backend.client.connection_pool.disconnect()
    app.close()


class Fleet:
    """Some workers with the plugin, the app that sends to them, and their registry."""

    def __init__(
        self,
        directory: Path,
        *,
        broker: str,
        backend: str | None,
        registry: str,
        conf: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.broker = broker
        self.backend = backend
        self.namespace = unique("ns")
        self.queue = unique("acceptance")
        self.journal = Journal(directory / "journal")
        self.conf: dict[str, Any] = {
            "task_default_queue": self.queue,
            "capacity_registry": registry,
            "capacity_namespace": self.namespace,
            **(conf or {}),
        }
        self.workers: dict[str, WorkerProcess] = {}
        self.app: Celery = self.build_app()
        self.registry: Registry = open_registry(registry, self.namespace)
        self._complaints_seen: dict[str, int] = {}
        #: Workers that have answered to remote control.
        self._hears: set[str] = set()

    def build_app(self, *, plugin: bool = True, conf: Mapping[str, Any] | None = None) -> Celery:
        """One more app of a producer, with or without the plugin."""
        settings = {**self.conf, **(conf or {})}
        if not plugin:
            settings = {key: value for key, value in settings.items() if not key.startswith("capacity_")}
        return build_app(broker_url=self.broker, result_backend=self.backend, conf=settings, plugin=plugin)

    @property
    def tasks(self) -> Mapping[str, Any]:
        tasks: Mapping[str, Any] = self.app.tasks
        return tasks

    # -- workers -----------------------------------------------------------------------------------------

    def start(self, nodename: str, **options: Any) -> WorkerProcess:
        """Start a worker, without waiting for it.  ``conf`` is added to the fleet's."""
        name, _, host = nodename.partition("@")
        conf = {**self.conf, **options.pop("conf", {})}
        plugin = options.pop("plugin", True)
        if not plugin:
            conf = {key: value for key, value in conf.items() if not key.startswith("capacity_")}
        options.setdefault("queues", [self.queue])
        options.setdefault("directory", self.directory / "workers")
        worker = WorkerProcess(
            name,
            host=host,
            broker=self.broker,
            backend=self.backend,
            journal=self.journal,
            conf=conf,
            plugin=plugin,
            **options,
        )
        # Several tests may use it: it is ended with the fleet, and not with the test that started it.
        worker.lifetime = "session"
        self.workers[nodename if nodename not in self.workers else unique(nodename)] = worker
        return worker.start()

    def wait_ready(self, limit: float = 60.0) -> None:
        """Until every worker has started, and those with the plugin can be chosen."""
        for worker in self.workers.values():
            if worker.started:
                worker.wait_ready(limit)
        names = {worker.nodename for worker in self.workers.values() if worker.running and worker.env[_PLUGIN] == "1"}
        self.wait(lambda: names <= {view.name for view in self.views() if view.capacity is not None}, limit, "capacity")

    @property
    def control(self) -> Any:
        """The app's remote control, once every worker hears it: on Redis, what is said before is said to nobody."""
        control = self.app.control
        names = {worker.nodename for worker in self.workers.values() if worker.running} - self._hears
        if names:
            self.wait(lambda: names <= _answer_to(control, names), 20, "the workers to hear remote control")
            self._hears |= names
        return control

    def close(self) -> None:
        """End the workers.  Harmless twice."""
        end_workers(self.workers.values())
        self.registry.close()
        runtime = self.app.__dict__.get("capacity")
        if runtime is not None:
            runtime.registry.close()
        close_app(self.app)

    # -- the registry ------------------------------------------------------------------------------------

    def views(self) -> tuple[WorkerView, ...]:
        return self.registry.overview().workers

    def view(self, nodename: str) -> WorkerView | None:
        return next((view for view in self.views() if view.name == nodename), None)

    def held(self) -> dict[str, int]:
        """Slots held, by worker; only of workers that hold any."""
        return {view.name: view.held for view in self.views() if view.held}

    # -- the broker --------------------------------------------------------------------------------------

    def depth(self, queue: str) -> int:
        """How many messages a queue has ready; 0 if it does not exist."""
        with self.app.connection_for_write() as connection:
            try:
                return int(connection.channel().queue_declare(queue=queue, passive=True).message_count)
            except connection.channel_errors:
                return 0

    def exists(self, queue: str) -> bool:
        """Only meaningful on RabbitMQ: elsewhere an empty queue does not exist."""
        with self.app.connection_for_write() as connection:
            try:
                connection.channel().queue_declare(queue=queue, passive=True)
            except connection.channel_errors:
                return False
            return True

    def own_queue(self, nodename: str) -> str:
        return own_queue_name(self.namespace, nodename)

    def lot(self, node: str, queue: str | None = None) -> str:
        return node_lot(self.namespace, queue or self.queue, node)

    def left(self) -> dict[str, int]:
        """Messages that are anywhere in the broker."""
        nodes = {worker.nodename.partition("@")[2] for worker in self.workers.values()}
        queues = [
            self.queue,
            unknown_lot(self.namespace, self.queue),
            later_lot(self.namespace, self.queue),
            *(self.own_queue(worker.nodename) for worker in self.workers.values()),
            *(self.lot(node) for node in nodes),
        ]
        found = {queue: depth for queue in queues if (depth := self.depth(queue))}
        if self.broker.startswith("redis"):
            with self.app.connection_for_write() as connection:
                if unacked := int(connection.default_channel.client.hlen("unacked")):
                    found["unacked"] = unacked
        return found

    # -- waiting -----------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], limit: float, what: str) -> Any:
        """As :func:`wait_until`; a failure shows the fleet."""
        try:
            return wait_until(condition, limit, 0.05, what=what)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.summary()}") from None

    def started(self, prefix: str, count: int, limit: float = 30.0) -> list[Any]:
        """Wait until ``count`` runs have started whose key begins with ``prefix``; returns the runs."""
        return self.runs(prefix, count, limit, ended=False)

    def ended(self, prefix: str, count: int, limit: float = 30.0) -> list[Any]:
        """Wait until ``count`` runs have ended whose key begins with ``prefix``; returns the runs."""
        return self.runs(prefix, count, limit, ended=True)

    def runs(self, prefix: str, count: int = 0, limit: float = 0.0, *, ended: bool = False) -> list[Any]:
        def seen() -> list[Any]:
            return [run for run in self.journal.runs() if run.key.startswith(prefix) and (not ended or not run.open)]

        what = f"{count} runs of {prefix}* to have {'ended' if ended else 'started'}"
        try:
            self.wait(lambda: len(seen()) >= count, limit, what)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.journal.summary()}") from None
        return seen()

    def max_parallel(self, prefix: str = "", worker: str | None = None) -> int:
        """The most runs at one time whose key begins with ``prefix``.

        A shared fleet's journal has runs whose process was killed in it, which seem to end a little late.
        """
        return self.journal.max_parallel_by(
            lambda run: str(run.key.startswith(prefix) and worker in (None, run.worker))
        ).get("True", 0)

    def settle(self, limit: float = QUIET_LIMIT) -> None:
        """Wait until nothing is held and nothing is left, and see that no part has complained."""
        self.journal.note_dead()
        self.wait(lambda: not self.journal.running(), limit, "all tasks to end")
        self.wait(lambda: not self.held(), limit, "all slots to be given back")
        self.wait(lambda: not self.left(), limit, "all queues to be empty")
        assert self.complaints() == []

    def fill(self, count: int, *, name: str = "hold", **options: Any) -> str:
        """Start ``count`` tasks that run until their gate is opened; returns the gate, which is their key, too."""
        gate = unique("fill")
        for number in range(count):
            self.tasks[name].apply_async(kwargs={"gate": gate, "key": f"{gate}-{number}"}, **options)
        self.started(gate, count)
        return gate

    def publish_raw(self, body: Any, *, routing_key: str | None = None, **options: Any) -> None:
        """A message that no Celery has made."""
        with self.app.connection_for_write() as connection, connection.Producer() as producer:
            producer.publish(body, exchange="", routing_key=routing_key or self.queue, **options)

    def assert_takes(self, capacity: int, *, key: str | None = None, already: int = 0, **options: Any) -> None:
        """The workers run exactly ``capacity`` tasks at once, and one more only when one of those has ended.

        That many beside ``already`` that run.
        """
        key = key or unique("takes")
        self.wait(lambda: sum(self.held().values()) == already, QUIET_LIMIT, "all slots to be given back")
        for number in range(capacity + 1):
            self.tasks["hold"].apply_async(kwargs={"gate": key, "key": f"{key}-{number}"}, **options)
        self.started(key, capacity)
        assert sum(self.held().values()) == capacity + already, self.summary()
        assert len(self.runs(key)) == capacity
        self.journal.open_gate(key)
        self.ended(key, capacity + 1)

    # -- what was wrong ----------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """New lines of the workers' logs that should not be there."""
        found = []
        for name, worker in self.workers.items():
            log = worker.logs()
            new = log[self._complaints_seen.get(name, 0) :]
            self._complaints_seen[name] = len(log)
            found += [line for line in new.splitlines() if any(re.search(pattern, line) for pattern in COMPLAINTS)]
        return found

    def summary(self) -> str:
        workers = [
            f"  {view.name}: {view.state.value}, capacity {view.capacity}, reserved {view.reserved},"
            f" committed {view.committed}"
            for view in self.views()
        ]
        return "\n".join(["the fleet:", *workers, f"  left: {json.dumps(self.left())}"])


_PLUGIN = "CAPACITY_TEST_PLUGIN"


class Fleets:
    """Fleets by what they are made of.  Only a few are kept at a time: idle workers cost time, too."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = keep
        self._stack = ExitStack()
        self._redis: RedisServer | None = None
        self._next_db = 0
        self._kept: dict[str, tuple[Fleet, ExitStack]] = {}

    @property
    def redis(self) -> RedisServer:
        """One Redis for everything; each fleet has databases of its own."""
        if self._redis is None:
            server = RedisServer(self.directory / "redis", config={"databases": "512"}, lifetime="session")
            self._redis = self._stack.enter_context(server)
        return self._redis

    def redis_url(self) -> str:
        """A database that nobody has used."""
        self._next_db += 1
        return self.redis.url.rpartition("/")[0] + f"/{self._next_db - 1}"

    @contextmanager
    def use(
        self, broker_kind: str, workers: Mapping[str, Mapping[str, Any]], conf: Mapping[str, Any] | None = None
    ) -> Iterator[Fleet]:
        """A fleet for one test, sampled while the test runs and quiet when it has ended."""
        key = json.dumps([broker_kind, workers, conf or {}], sort_keys=True, default=str)
        if key not in self._kept:
            while len(self._kept) >= self.keep:
                self._end(next(iter(self._kept)))
            self._kept[key] = self._start(broker_kind, workers, conf)
        fleet, _ = self._kept[key] = self._kept.pop(key)
        try:
            with Sampler(fleet.registry):
                yield fleet
                fleet.settle()
        except BaseException:
            self._end(key)
            raise

    @contextmanager
    def own(
        self,
        broker_kind: str,
        workers: Mapping[str, Mapping[str, Any]],
        conf: Mapping[str, Any] | None = None,
        **servers: Any,
    ) -> Iterator[Fleet]:
        """A fleet that a test may break.  ``broker`` and ``registry``: URLs of servers of its own."""
        fleet, stack = self._start(broker_kind, workers, conf, **servers)
        with stack:
            yield fleet

    def close(self) -> None:
        for key in list(self._kept):
            self._end(key)
        self._stack.close()

    def _start(
        self,
        broker_kind: str,
        workers: Mapping[str, Mapping[str, Any]],
        conf: Mapping[str, Any] | None,
        broker: str | None = None,
        registry: str | None = None,
    ) -> tuple[Fleet, ExitStack]:
        stack = ExitStack()
        directory = self.directory / unique("fleet")
        directory.mkdir()
        try:
            if broker is None:
                broker = self.redis_url() if broker_kind == "redis" else stack.enter_context(shared_rabbit_url())
            if registry is None:
                registry = self.redis_url() if registry_kind() == "redis" else f"sqlite:///{directory / 'capacity.db'}"
            conf = {**(_QUORUM if broker_kind == "rabbitmq-quorum" else {}), **(conf or {})}
            backend = conf.pop("result_backend", None) or self.redis_url()
            fleet = Fleet(directory, broker=broker, backend=backend, registry=registry, conf=conf)
            stack.callback(fleet.close)
            for nodename, options in workers.items():
                fleet.start(nodename, **options)
            fleet.wait_ready()
        except BaseException:
            stack.close()
            raise
        return fleet, stack

    def _end(self, key: str) -> None:
        _fleet, stack = self._kept.pop(key)
        stack.close()


def _answer_to(control: Any, names: set[str]) -> set[str]:
    answers = control.ping(destination=sorted(names), timeout=2, limit=len(names))
    return {name for answer in answers for name in answer}
