"""Two nodes with GPUs: a queue that both serve, and one for each node's own data."""

import os
import tempfile
import time
from pathlib import Path

from celery import Celery

import celery_capacity

app = Celery("gpu_fleet")
if url := os.environ.get("REDIS_URL"):
    app.conf.broker_url = app.conf.result_backend = app.conf.capacity_registry = url
else:
    folder = Path(tempfile.gettempdir()).resolve() / "celery_capacity_gpu_fleet"
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
app.conf.capacity_namespace = "gpu_fleet"
app.conf.task_default_queue = "gpu"
# Who asks for a task that no slot is free for is told so, but for training, which may wait.
app.conf.capacity_when_full = {"gpu": "refuse", "*": "park"}
celery_capacity.install(app)


@app.task(bind=True)
def infer(self, seconds: float = 0.5) -> str:
    """Runs on either node, or where the caller says."""
    time.sleep(seconds)
    return str(self.request.hostname)


# As an attribute of the task: always there.
@app.task(bind=True, node="gpu2")
def calibrate(self) -> str:
    """The instrument is on the second node."""
    return str(self.request.hostname)


@app.task(bind=True)
def train(self, seconds: float = 0.5) -> str:
    """Sent to the queue of the node that has the data."""
    time.sleep(seconds)
    return str(self.request.hostname)
