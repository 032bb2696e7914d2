"""A Celery app for tests: ``python -m celery -A support.tasks_app worker``, configured by the environment.

``CELERY_BROKER_URL``, ``CELERY_RESULT_BACKEND``
    as Celery reads them.
``CAPACITY_TEST_CONF``
    a JSON object of Celery settings, ``capacity_…`` among them.
``CAPACITY_TEST_PLUGIN``
    ``1``: ``celery_capacity.install(app)``.
``CAPACITY_TEST_EXTRA_TASK``
    the name of one more task, that other workers do not know.
``CAPACITY_TEST_BROADCAST``
    the name of a broadcast queue, beside the default one.
``CAPACITY_TEST_JOURNAL``
    a directory: every task but ``noop`` and ``ping`` writes its start and end there (:mod:`support.journal`).

In the test's own process use :func:`build_app`, which has the same tasks under the same names.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

CONF_ENV = "CAPACITY_TEST_CONF"
PLUGIN_ENV = "CAPACITY_TEST_PLUGIN"
EXTRA_ENV = "CAPACITY_TEST_EXTRA_TASK"
BROADCAST_ENV = "CAPACITY_TEST_BROADCAST"

if CONF_ENV in os.environ and os.environ.get("COVERAGE_PROCESS_START"):
    # In a worker, where no .pth file of coverage has done it; before the plugin is imported.
    import coverage

    coverage.process_startup()

from celery import Celery, Task, chord
from celery.exceptions import Ignore, Reject
from kombu import Queue
from kombu.common import Broadcast

from . import calling_tasks
from .journal import JOURNAL_ENV, journalled

__all__ = ("BROADCAST_ENV", "CONF_ENV", "EXTRA_ENV", "PLUGIN_ENV", "app", "build_app")

_DEFAULTS: dict[str, Any] = {
    "broker_connection_retry_on_startup": True,
    # A machine that runs many tests at once starts pool processes slowly.
    "worker_proc_alive_timeout": 30.0,
}


class JournalledTask(Task):  # type: ignore[misc]
    """Writes the start and the end of each run.  The key is the keyword argument ``key``, else the task id."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        delivery = request.delivery_info or {}
        with journalled(
            str(kwargs.get("key") or request.id),
            id=request.id,
            task=self.name,
            worker=request.hostname or "",
            retries=request.retries or 0,
            queue=delivery.get("routing_key") or "",
            redelivered=bool(delivery.get("redelivered")),
            priority=delivery.get("priority"),
        ):
            return self.run(*args, **kwargs)


class OverridingTask(JournalledTask):
    """As projects have them: with an ``apply_async`` of its own."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        headers = {**(options.pop("headers", None) or {}), "tenant": "acme"}
        return super().apply_async(args, kwargs, headers=headers, **options)


def gate_is_open(gate: str) -> bool:
    return (Path(os.environ[JOURNAL_ENV]) / f"gate-{gate}").exists()


def wait_for_gate(gate: str, limit: float) -> None:
    """Until :meth:`support.journal.Journal.open_gate` has opened it."""
    deadline = time.monotonic() + limit
    while not gate_is_open(gate):
        if time.monotonic() > deadline:
            raise TimeoutError(f"gate {gate} was not opened")
        time.sleep(0.02)


def build_app(
    *,
    broker_url: str,
    result_backend: str | None = None,
    conf: Mapping[str, Any] | None = None,
    plugin: bool = False,
    name: str = "support",
    set_as_current: bool = False,
) -> Celery:
    """An app with the test tasks; ``app.tasks["record"].delay(key="a")``."""
    app = Celery(name, set_as_current=set_as_current)
    settings = {**_DEFAULTS, "broker_url": broker_url, **(conf or {})}
    if result_backend:
        settings["result_backend"] = result_backend
    if broadcast := os.environ.get(BROADCAST_ENV):
        settings["task_queues"] = [Queue(settings["task_default_queue"]), Broadcast(broadcast, routing_key=broadcast)]
    app.config_from_object(settings)
    define_tasks(app)
    calling_tasks.define(app, JournalledTask)
    if plugin:
        # As an attribute looked up late: the module must be usable with and without the plugin.
        importlib.import_module("celery_capacity").install(app)
    return app


def define_tasks(app: Celery) -> None:
    """Register every test task on ``app``, under its short name."""

    # Celery's default, shared=True, would put them into every other app of the process, too.
    task: Callable[..., Callable[[Callable[..., Any]], Any]] = functools.partial(app.task, shared=False)

    @task(name="noop", ignore_result=True)
    def noop() -> None:
        pass

    # For CeleryTestSetup.ready(ping=True); pytest-celery's own would need the Docker client in every worker.
    @task(name="ping")
    def ping() -> str:
        return "pong"

    @task(name="add", base=JournalledTask)
    def add(x: float, y: float) -> float:
        return x + y

    @task(name="sleep", base=JournalledTask)
    def sleep(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @task(name="record", base=JournalledTask)
    def record(key: str | None = None, seconds: float = 0.0) -> str | None:
        if seconds:
            time.sleep(seconds)
        return key

    @task(name="record_late", base=JournalledTask, acks_late=True)
    def record_late(key: str | None = None, seconds: float = 0.0) -> str | None:
        """As ``record``, acknowledged after the run."""
        if seconds:
            time.sleep(seconds)
        return key

    @task(name="fail", base=JournalledTask)
    def fail(message: str = "meant to fail", key: str | None = None) -> NoReturn:
        raise RuntimeError(message)

    @task(name="retry_n", base=JournalledTask, bind=True)
    def retry_n(self: Task, times: int, countdown: float = 0.0, key: str | None = None) -> int:
        """Retry ``times`` times, then return how often it was retried."""
        if self.request.retries < times:
            raise self.retry(countdown=countdown, max_retries=times)
        return int(self.request.retries)

    # Celery acknowledges before the run otherwise, and then a rejection means nothing.
    @task(name="reject", base=JournalledTask, acks_late=True)
    def reject(requeue: bool = False, key: str | None = None) -> NoReturn:
        raise Reject("meant to be rejected", requeue=requeue)

    @task(name="ignore", base=JournalledTask)
    def ignore(key: str | None = None) -> NoReturn:
        raise Ignore()

    @task(name="hard", base=JournalledTask, time_limit=1)
    def hard(seconds: float = 60.0, key: str | None = None) -> None:
        """Its process is killed after a second (prefork)."""
        time.sleep(seconds)

    @task(name="soft", base=JournalledTask, soft_time_limit=1)
    def soft(seconds: float = 60.0, key: str | None = None) -> None:
        """SoftTimeLimitExceeded after a second (prefork)."""
        time.sleep(seconds)

    @task(name="exit_child", base=JournalledTask)
    def exit_child(code: int = 1, key: str | None = None) -> NoReturn:
        """Its process ends in the middle of the task, as by the kernel's hand.  Journal.note_dead() sees it."""
        os._exit(code)

    @task(name="poison", base=JournalledTask, acks_late=True)
    def poison(key: str | None = None) -> None:
        """Kills its worker (prefork)."""
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    @task(name="poison_child", base=JournalledTask, acks_late=True, reject_on_worker_lost=True)
    def poison_child(key: str | None = None) -> NoReturn:
        """Kills its process, again and again."""
        os._exit(1)

    @task(name="spin", base=JournalledTask)
    def spin(seconds: float, key: str | None = None) -> int:
        """Keep the interpreter busy, and its lock as long as Python lets one thread have it."""
        turns, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            turns += sum(range(1000)) > 0
        return turns

    @task(name="hold", base=JournalledTask)
    def hold(gate: str, key: str | None = None, limit: float = 60.0) -> str | None:
        """Run until the test opens the gate."""
        wait_for_gate(gate, limit)
        return key

    @task(name="retry_at_gate", base=JournalledTask, bind=True)
    def retry_at_gate(self: Task, gate: str, key: str | None = None) -> int:
        """Retry once, as soon as the gate is open."""
        wait_for_gate(gate, 60.0)
        if not self.request.retries:
            raise self.retry(countdown=0)
        return int(self.request.retries)

    @task(name="hold_late", base=JournalledTask, acks_late=True)
    def hold_late(gate: str, key: str | None = None, limit: float = 60.0) -> str | None:
        """As ``hold``, acknowledged after the run."""
        wait_for_gate(gate, limit)
        return key

    @task(name="reject_until", base=JournalledTask, acks_late=True)
    def reject_until(gate: str, key: str | None = None) -> None:
        """Back to the queue, again and again, until the gate is open."""
        if not gate_is_open(gate):
            time.sleep(0.05)
            raise Reject("not yet", requeue=True)

    @task(name="southern", base=JournalledTask, node="south")
    def southern(key: str | None = None) -> str | None:
        """Pinned by an attribute of the task."""
        return key

    @task(name="rated", base=JournalledTask, rate_limit="1/m")
    def rated(key: str | None = None) -> str | None:
        return key

    @task(name="fail_late", base=JournalledTask, acks_late=True, acks_on_failure_or_timeout=False)
    def fail_late(key: str | None = None) -> NoReturn:
        """Never acknowledged: it is rejected."""
        raise RuntimeError("meant to fail")

    @task(name="overriding", base=OverridingTask, bind=True)
    def overriding(self: Task, key: str | None = None) -> Any:
        """Returns the header that its base class added."""
        return (self.request.headers or {}).get("tenant") or self.request.get("tenant")

    @task(name="replaced", base=JournalledTask, bind=True)
    def replaced(self: Task, key: str | None = None) -> Any:
        """Puts another task into its own place."""
        return self.replace(app.tasks["record"].si(key=f"{key}-replacement"))

    @task(name="chord_inside", base=JournalledTask)
    def chord_inside(width: int, key: str | None = None) -> str:
        """A chord that is sent from inside a worker; returns the id of its body."""
        header = [app.tasks["add"].s(number, 1) for number in range(width)]
        return str(chord(header)(app.tasks["total"].s()).id)

    @task(name="total", base=JournalledTask)
    def total(numbers: list[float], key: str | None = None) -> float:
        return sum(numbers)

    if extra := os.environ.get(EXTRA_ENV):

        @task(name=extra, base=JournalledTask)
        def only_here(key: str | None = None) -> str | None:
            return key

    @task(name="send", base=JournalledTask)
    def send(
        name: str,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> str:
        """Publish another task from inside a worker; returns its id."""
        return str(app.send_task(name, kwargs=dict(kwargs or {}), **(options or {})).id)


app = build_app(
    broker_url=os.environ.get("CELERY_BROKER_URL", "memory://"),
    result_backend=os.environ.get("CELERY_RESULT_BACKEND"),
    conf=json.loads(os.environ.get(CONF_ENV, "{}")),
    plugin=os.environ.get(PLUGIN_ENV) == "1",
)
