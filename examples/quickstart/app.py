"""An app with the plugin.  On a Redis (``REDIS_URL``), or without any server."""

import os
import tempfile
import time
from pathlib import Path

from celery import Celery

import celery_capacity

app = Celery("quickstart")
if url := os.environ.get("REDIS_URL"):
    app.conf.broker_url = app.conf.result_backend = app.conf.capacity_registry = url
else:
    folder = Path(tempfile.gettempdir()).resolve() / "celery_capacity_quickstart"
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
app.conf.task_default_queue = app.conf.capacity_namespace = "quickstart"
celery_capacity.install(app)


@app.task(bind=True)
def work(self, seconds: float) -> str:
    """Take a while, and say which worker it was."""
    time.sleep(seconds)
    return str(self.request.hostname)
