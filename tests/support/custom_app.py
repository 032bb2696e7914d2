"""``support.tasks_app`` with what projects add to Celery themselves: ``-A support.custom_app``.

Nothing of it knows the plugin.  Sent from the tests by name: ``fleet.app.send_task("requested")``.
``NOTE …`` lines in the worker's log say that a part was used.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from celery import Task, bootsteps
from celery.worker import strategy
from celery.worker.autoscale import Autoscaler
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from kombu import Consumer as KombuConsumer
from kombu import Exchange, Queue
from kombu.serialization import register

from .tasks_app import JournalledTask, app

__all__ = ("OTHER_QUEUE", "SERIALIZER", "app", "register_serializer")

SERIALIZER = "shout"
#: Where the plain Kombu consumer of :class:`OtherConsumer` listens, within the app's own queue name.
OTHER_QUEUE = "{queue}.other"


def note(text: str) -> None:
    logging.getLogger(__name__).warning("NOTE %s", text)


def register_serializer() -> None:
    """A serializer of the project's own; to be called on both sides."""

    def loads(data: Any) -> Any:
        text = data.decode() if isinstance(data, (bytes, memoryview)) else data
        return json.loads(text[1:])

    register(
        SERIALIZER,
        lambda obj: "!" + json.dumps(obj),
        loads,
        content_type="application/x-shout",
        content_encoding="utf-8",
    )


register_serializer()


class NotingRequest(Request):  # type: ignore[misc]
    """Notes every end that Celery tells a request; Celery's own fast ``on_success`` does not call this one's."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        note(f"on_failure {self.name}")
        return super().on_failure(exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        note(f"on_timeout {self.name} {'soft' if soft else 'hard'}")
        return super().on_timeout(soft, timeout)

    def on_retry(self, exc_info: Any) -> Any:
        note(f"on_retry {self.name}")
        return super().on_retry(exc_info)


class RequestedTask(JournalledTask):
    abstract = True
    Request = "support.custom_app:NotingRequest"


@app.task(name="requested", base=RequestedTask, bind=True, shared=False, time_limit=2)
def requested(self: Task, end: str, key: str | None = None) -> str:
    if end == "fail":
        raise RuntimeError("meant to fail")
    if end == "retry" and not self.request.retries:
        raise self.retry(countdown=0)
    if end == "hang":
        threading.Event().wait(60)
    return end


class SelectiveTask(JournalledTask):
    """Its messages may be dropped at receipt, before Celery makes a request of them."""

    abstract = True

    def Strategy(self, task: Any, app: Any, consumer: Any) -> Callable[..., Any]:  # noqa: N802
        inner = strategy.default(task, app, consumer)

        def handler(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any) -> Any:
            if message.headers.get("unwanted"):
                note("dropped")
                return ack(None, ())
            return inner(message, body, ack, reject, callbacks, **kwargs)

        return handler


@app.task(name="selective", base=SelectiveTask, shared=False)
def selective(key: str | None = None) -> str | None:
    return key


class BatchedTask(JournalledTask):
    """Collects messages, and runs them in one job that it gives to the pool by itself."""

    abstract = True
    size = 3

    def Strategy(self, task: Any, app: Any, consumer: Any) -> Callable[..., Any]:  # noqa: N802
        waiting: list[Any] = []

        def handler(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any) -> None:
            request = Request(
                message, on_ack=ack, on_reject=reject, app=app, task=task, hostname=consumer.hostname, headers=None
            )
            waiting.append(request)
            if len(waiting) >= self.size:
                batch, waiting[:] = list(waiting), []
                consumer.pool.apply_async(
                    run_batch,
                    ([request.kwargs["key"] for request in batch],),
                    callback=lambda result: [request.acknowledge() for request in batch],
                )

        return handler


def run_batch(keys: list[str]) -> None:
    from .journal import journalled

    with journalled("+".join(keys), task="batched"):
        pass


@app.task(name="batched", base=BatchedTask, shared=False)
def batched(key: str) -> None:
    raise AssertionError("it is run by run_batch")


class NotingConsumer(Consumer):  # type: ignore[misc]
    """For ``worker_consumer``: with an ``on_task_request`` of its own."""

    def __init__(self, on_task_request: Callable[[Any], Any], *args: Any, **kwargs: Any) -> None:
        def noting(request: Any) -> Any:
            note(f"consumer {request.name}")
            return on_task_request(request)

        super().__init__(noting, *args, **kwargs)


class PatientAutoscaler(Autoscaler):  # type: ignore[misc]
    """For ``worker_autoscaler``: the pool grows when it is told to, and not by itself."""

    def _maybe_scale(self, req: Any = None) -> None:
        pass


class OtherConsumer(bootsteps.ConsumerStep):  # type: ignore[misc]
    """A plain Kombu consumer in the worker, on the worker's connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def get_consumers(self, channel: Any) -> list[Any]:
        name = OTHER_QUEUE.format(queue=app.conf.task_default_queue)
        queue = Queue(name, Exchange(""), routing_key=name, durable=True)
        return [KombuConsumer(channel, queues=[queue], callbacks=[self.on_message], accept=["json"])]

    def on_message(self, body: Any, message: Any) -> None:
        note(f"other {body}")
        message.ack()


class Ticker(bootsteps.StartStopStep):  # type: ignore[misc]
    """A worker step with a timer and a name that the plugin has, too."""

    requires = ("celery.worker.components:Timer",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self.entry: Any = None

    def start(self, worker: Any) -> None:
        self.entry = worker.timer.call_repeatedly(0.2, note, ("tick",))

    def stop(self, worker: Any) -> None:
        note("ticker stopped")


class Announce(Ticker):
    """As a step of the plugin is called."""


app.steps["consumer"].add(OtherConsumer)
app.steps["worker"].add(Announce)
