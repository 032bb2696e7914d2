"""The demo's Celery app: ``python -m celery -A celery_capacity.demo.app worker``, configured by the environment."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

from celery import Celery, signals
from celery.app.amqp import AMQP

from .. import install
from ..connection import CapacityConnection
from . import journal

__all__ = ("CONF_ENV", "JOURNAL_KEY", "PLUGIN_KEY", "app", "build_app")

#: A JSON object: Celery settings, :data:`PLUGIN_KEY` and :data:`JOURNAL_KEY`.
CONF_ENV = "CELERY_CAPACITY_DEMO"
PLUGIN_KEY = "demo_plugin"
JOURNAL_KEY = "demo_journal"


class PlainAMQP(AMQP):  # type: ignore[misc]
    """Plain Celery's, on the same filesystem transport as with the plugin: Kombu's own loses a message now and then."""

    Connection = CapacityConnection


def build_app(conf: dict[str, Any]) -> Celery:
    """An app with the demo's tasks."""
    settings = {key: value for key, value in conf.items() if key not in (PLUGIN_KEY, JOURNAL_KEY)}
    app = Celery("demo", set_as_current=False)
    app.config_from_object(settings)
    if conf.get(PLUGIN_KEY):
        install(app)
    else:
        app.amqp_cls = PlainAMQP

    @app.task(name="short", shared=False)  # type: ignore[untyped-decorator]
    def short(seconds: float) -> None:
        time.sleep(seconds)

    @app.task(name="long", shared=False)  # type: ignore[untyped-decorator]
    def long(seconds: float) -> None:
        time.sleep(seconds)

    return app


def _watch_parent() -> None:
    """When the demo itself is killed, its end of the pipe closes; then nothing of it may stay."""

    def watch() -> None:
        # Not sys.stdin, whose lock a thread must not hold when the interpreter ends.
        while os.read(0, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="demo-watch", daemon=True).start()


def _keep_journal(path: str) -> None:
    @signals.worker_ready.connect(weak=False)  # type: ignore[untyped-decorator]
    def ready(sender: Any, **_: Any) -> None:
        journal.write(path, "ready", sender.hostname)

    @signals.task_received.connect(weak=False)  # type: ignore[untyped-decorator]
    def received(request: Any, **_: Any) -> None:
        journal.write(path, "received", request.hostname, request.id)

    @signals.task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
    def begun(task_id: str, task: Any, **_: Any) -> None:
        journal.write(path, "begun", task.request.hostname, task_id)

    @signals.task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def ended(task_id: str, task: Any, **_: Any) -> None:
        journal.write(path, "ended", task.request.hostname, task_id)


_conf: dict[str, Any] = json.loads(os.environ.get(CONF_ENV, "{}"))
app = build_app(_conf)
if JOURNAL_KEY in _conf:
    _keep_journal(_conf[JOURNAL_KEY])
    signals.worker_init.connect(lambda **_: _watch_parent(), weak=False)
