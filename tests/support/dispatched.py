"""An app with the producer's hook, on an in-memory broker; its workers are only registered, and run nowhere."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from celery import Celery, signals
from kombu.transport import memory

from celery_capacity.dispatch import Dispatcher, own_queue
from celery_capacity.models import Advert
from celery_capacity.naming import own_queue_name
from celery_capacity.outage import Outage
from celery_capacity.registry import Registry, open_registry
from celery_capacity.settings import load_settings

FOR_EVER = 1e6
HEADER = "capacity"

__all__ = ("HEADER", "Dispatched", "Sent", "clear_broker", "own", "publishing")


class Sent(SimpleNamespace):
    """One message in the broker."""

    queue: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    body: Any

    @property
    def mark(self) -> dict[str, Any]:
        found: dict[str, Any] = self.headers.get(HEADER, {})
        return found


class Counting:
    """Passes everything on to a registry, and remembers the operations; ``error`` is raised by all of them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.operations: list[str] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._registry, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.operations.append(name)
            if self.error is not None:
                raise self.error
            return operation(*args, **kwargs)

        return call


class Dispatched:
    """An app with the hook, its registry, and what was published."""

    def __init__(self, **conf: Any) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        self.registry = open_registry(self.url)
        self.asked = Counting(self.registry)
        self.now = 0.0
        self.app = app = Celery("dispatched", broker="memory://", set_as_current=False)
        app.amqp_cls = "celery_capacity.dispatch:CapacityAMQP"
        app.conf.update(
            {"result_backend": "cache+memory://", "task_default_queue": "q", "capacity_registry": self.url, **conf}
        )
        self.settings = load_settings(app.conf)
        self.outage = Outage(self.url, self.settings.registry_retry_seconds, lambda: self.now)
        dispatcher = Dispatcher(app, self.settings, lambda: self.asked, self.outage)  # type: ignore[arg-type,return-value]
        app.capacity = SimpleNamespace(dispatcher=dispatcher, task_consumer=lambda *args, **kwargs: None)

        @app.task(name="t", shared=False, ignore_result=True)
        def t(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("nothing runs here")

        self.t = t

    def worker(self, name: str = "w1@north", slots: int | None = 1, **fields: Any) -> None:
        """Register a worker, as if it ran and had declared its own queue."""
        advert = {
            "node": name.partition("@")[2],
            "queues": ("q",),
            "tasks": frozenset({"t"}),
            "lease_seconds": FOR_EVER,
            "lapse_seconds": FOR_EVER,
            **fields,
        }
        self.registry.register(Advert(name, capacity=slots, **advert))
        with self.app.connection() as connection:
            own_queue(self.settings.namespace, name)(connection.default_channel).declare()

    def held(self) -> int:
        return sum(worker.held for worker in self.registry.overview().workers)

    def waiting(self, queue: str = "q") -> bool:
        return any(view.waiting for view in self.registry.overview().queues if view.name == queue)

    def taken(self) -> list[Sent]:
        """Take all messages out of the broker, queue by queue."""
        found = []
        with self.app.connection() as connection:
            channel = connection.default_channel
            for name in sorted(memory.Channel.queues):
                while (message := channel.basic_get(name, no_ack=True)) is not None:
                    found.append(
                        Sent(
                            queue=name,
                            headers=message.headers,
                            properties=message.properties,
                            body=json.loads(message.body),
                        )
                    )
        return found

    def one(self) -> Sent:
        (sent,) = self.taken()
        return sent


def clear_broker() -> None:
    """Nothing is left in the in-memory broker of this process."""
    memory.Channel.queues.clear()
    memory.Transport.global_state.clear()


@contextmanager
def publishing() -> Iterator[list[dict[str, Any]]]:
    """What Celery is about to publish: exchange, routing key, what is declared, …"""
    found: list[dict[str, Any]] = []

    def note(**details: Any) -> None:
        found.append(details)

    signals.before_task_publish.connect(note, weak=False)
    try:
        yield found
    finally:
        signals.before_task_publish.disconnect(note)


def own(name: str) -> str:
    return own_queue_name("default", name)
