"""The app of the fleet benchmark, configured by the environment.

``BENCH_BROKER``, ``BENCH_REGISTRY`` (empty: plain Celery), ``BENCH_NAMESPACE``, ``BENCH_LOG`` (a file that tasks
append to; a line of less than 4 KiB is written whole).
"""

from __future__ import annotations

import os
import time

from celery import Celery

app = Celery("bench", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    task_default_queue=os.environ["BENCH_NAMESPACE"],
)
if os.environ["BENCH_REGISTRY"]:
    import celery_capacity

    app.conf.capacity_registry = os.environ["BENCH_REGISTRY"]
    app.conf.capacity_namespace = os.environ["BENCH_NAMESPACE"]
    celery_capacity.install(app)

_log: list[int] = []


def _append(line: bytes) -> None:
    if not _log:
        _log.append(os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    os.write(_log[0], line)


@app.task(name="nap", shared=False)
def nap(key: str, seconds: float) -> None:
    """Takes its time; the start and the end are on the clock of the machine."""
    started = time.time()
    time.sleep(seconds)
    _append(f"{key} {started!r} {time.time()!r} {os.getpid()}\n".encode())


@app.task(name="tick", shared=False)
def tick() -> None:
    """As good as nothing."""
    _append(b".\n")
