"""One worker of eight processes: at most two reports at a time on it, and three over all workers."""

import os
import tempfile
import time
from pathlib import Path

from celery import Celery

import celery_capacity

app = Celery("per_queue_concurrency")
if url := os.environ.get("REDIS_URL"):
    app.conf.broker_url = app.conf.result_backend = app.conf.capacity_registry = url
else:
    folder = Path(tempfile.gettempdir()).resolve() / "celery_capacity_per_queue_concurrency"
    for name in ("queue", "control", "results"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    app.conf.broker_url = "filesystem://"
    app.conf.broker_transport_options = {
        "data_folder_in": str(folder / "queue"),
        "data_folder_out": str(folder / "queue"),
        "control_folder": str(folder / "control"),
        "polling_interval": 0.05,
    }
    app.conf.result_backend = f"file://{folder / 'results'}"
    app.conf.capacity_registry = f"sqlite:///{folder / 'capacity.db'}"
app.conf.capacity_namespace = "per_queue_concurrency"
app.conf.task_routes = {"app.report": "reports", "app.mail": "mails"}
app.conf.capacity_worker_queues = {"reports": 2}
app.conf.capacity_queue_limits = {"reports": 3}
celery_capacity.install(app)


@app.task(bind=True)
def report(self, seconds: float = 1.0) -> tuple[str, float, float]:
    """Heavy.  Returns who ran it, from when to when."""
    began = time.time()
    time.sleep(seconds)
    return str(self.request.hostname), began, time.time()


@app.task(bind=True)
def mail(self, seconds: float = 0.05) -> tuple[str, float, float]:
    """Light, and must not wait for reports."""
    began = time.time()
    time.sleep(seconds)
    return str(self.request.hostname), began, time.time()
