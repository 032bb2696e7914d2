"""The same nodes on Docker: pytest-celery's own servers, and a worker image with this package in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import docker.errors
from celery import Celery
from pytest_celery import CeleryTestWorker, CeleryWorkerContainer
from pytest_docker_tools import build

from .servers import missing
from .waiting import wait_until

__all__ = ("JOURNAL_MOUNT", "capacity_worker_image", "docker_worker", "require_docker")

_ROOT = Path(__file__).resolve().parents[2]
#: Where a worker finds the directory of the journal.
JOURNAL_MOUNT = "/journal"

#: A fixture of the whole run: the package with the driver for Redis, and the test tasks.
capacity_worker_image = build(
    path=str(_ROOT), dockerfile="tests/support/Dockerfile", tag="celery-capacity/test-worker:latest"
)


def require_docker() -> None:
    """Skip the test, or fail it in CI, where no Docker engine answers."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        if host.startswith("unix://"):
            # Docker's client leaves a socket open when it can't connect, which is a warning, and so an error.
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(host.removeprefix("unix://"))
        docker.from_env().close()
    except (docker.errors.DockerException, OSError) as exc:
        missing(f"no Docker engine at {host}: {exc}")


class DockerWorkerContainer(CeleryWorkerContainer):  # type: ignore[misc]
    """Names and queue differ by worker, where pytest-celery has one of each for the image."""

    def __init__(self, container: Any, nodename: str, queue: str) -> None:
        super().__init__(container)
        self.nodename = nodename
        self._queue = queue

    @property
    def ready_prompt(self) -> str:
        return f"{self.nodename} ready."

    def worker_name(self) -> str:
        return self.nodename.partition("@")[0]

    def worker_queue(self) -> str:
        return self._queue


class DockerWorker(CeleryTestWorker):  # type: ignore[misc]
    def hostname(self) -> str:
        return str(self.container.nodename)


@contextmanager
def docker_worker(
    client: Any,
    *,
    image: str,
    network: str,
    nodename: str,
    queue: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    journal: Path,
    app: Celery,
) -> Iterator[DockerWorker]:
    """A worker in a container of its own, removed afterwards."""
    container = client.containers.run(
        image,
        ["celery", "-A", "support.tasks_app", *arguments],
        environment=dict(env),
        network=network,
        volumes={str(journal): {"bind": JOURNAL_MOUNT, "mode": "rw"}},
        detach=True,
    )
    try:
        wrapper = DockerWorkerContainer(container, nodename, queue)
        wait_until(wrapper.ready, 60.0, 0.2, what=f"the container of {nodename} to be ready")
        worker = DockerWorker(wrapper, app)
        yield worker
        worker.teardown()
    finally:
        container.remove(force=True)
