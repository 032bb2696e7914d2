"""The nodes of the acceptance tests: pytest-celery's API, on local processes or on Docker.

``CAPACITY_TEST_NODES=local`` (the default) or ``docker``.  The tests are the same; they take ``celery_setup``
and say what they need by overriding one of these fixtures in their module or class, or by
``@pytest.mark.parametrize`` over its name:

``broker_kind``
    ``redis``, ``rabbitmq`` or ``rabbitmq-quorum``; all three without an override.
``worker_names``
    one worker each; ``("w1@test",)``.  What follows the ``@`` is the node, for affinity.
``worker_options``
    ``pool``, ``concurrency``, ``args``, ``loglevel``, as in :func:`support.workers.worker_arguments`.
``capacity_plugin``
    whether ``celery_capacity.install`` is called, in the workers and in the tests' app; ``False``.
``capacity_conf``
    Celery settings, ``capacity_…`` among them, for workers and tests.  :data:`REGISTRY` in a value stands for
    the URL of a Redis database for the registry, which on Docker differs between the two.

Nodes that a test stops or restarts: ``@pytest.mark.own_servers``, since RabbitMQ is shared otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.app import setup_default_app
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
)
from support import docker_nodes, local_nodes
from support.docker_nodes import capacity_worker_image  # noqa: F401 - a fixture
from support.fleet import close_app, registry_kind
from support.journal import JOURNAL_ENV, Journal
from support.servers import RabbitServer, RedisServer, shared_rabbit_url, unique
from support.tasks_app import build_app
from support.workers import WorkerProcess, end_workers, worker_arguments, worker_environment

#: In ``capacity_conf``: the URL of a database of its own on the backend's Redis.
REGISTRY = "{registry}"

_QUORUM = {
    "task_default_queue_type": "quorum",
    "task_create_missing_queue_type": "quorum",
    "broker_transport_options": {"confirm_publish": True},
}


class CapacityTestSetup(CeleryTestSetup):  # type: ignore[misc]
    """pytest-celery's own ping is a shared task: it would go to whichever app is the current one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ping = self.app.tasks["ping"]


# -- what a test may say -----------------------------------------------------------------------------------


@pytest.fixture(params=["redis", "rabbitmq", "rabbitmq-quorum"])
def broker_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def worker_names() -> tuple[str, ...]:
    return ("w1@test",)


@pytest.fixture
def worker_options() -> Mapping[str, Any]:
    return {}


@pytest.fixture
def capacity_plugin() -> bool:
    return False


@pytest.fixture
def capacity_conf(capacity_plugin: bool, tmp_path: Path) -> Mapping[str, Any]:
    if not capacity_plugin:
        return {}
    return {"capacity_registry": REGISTRY if registry_kind() == "redis" else f"sqlite:///{tmp_path / 'capacity.db'}"}


# -- nodes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nodes_kind() -> str:
    kind = os.environ.get("CAPACITY_TEST_NODES", "local")
    if kind not in ("local", "docker"):
        raise pytest.UsageError(f"CAPACITY_TEST_NODES={kind!r}: it takes local or docker")
    if kind == "docker":
        docker_nodes.require_docker()
    return kind


@pytest.fixture
def celery_broker(
    request: pytest.FixtureRequest, nodes_kind: str, broker_kind: str, tmp_path: Path
) -> Iterator[CeleryTestBroker]:
    with ExitStack() as stack:
        if nodes_kind == "docker":
            # Asked for by name: as an argument it would be set up, and need Docker, for local nodes, too.
            name = "celery_redis_broker" if broker_kind == "redis" else "celery_rabbitmq_broker"
            broker = request.getfixturevalue(name)
        elif broker_kind == "redis":
            broker = local_nodes.LocalRedisBroker(stack.enter_context(RedisServer(tmp_path / "broker")))
        elif request.node.get_closest_marker("own_servers"):
            server = stack.enter_context(RabbitServer(tmp_path / "broker"))
            broker = local_nodes.LocalRabbitBroker(server, server.url)
        else:
            broker = local_nodes.LocalRabbitBroker(None, stack.enter_context(shared_rabbit_url()))
        yield broker
        broker.teardown()


@pytest.fixture
def celery_backend(request: pytest.FixtureRequest, nodes_kind: str, tmp_path: Path) -> Iterator[CeleryTestBackend]:
    if nodes_kind == "docker":
        yield request.getfixturevalue("celery_redis_backend")
        return
    with RedisServer(tmp_path / "backend") as server:
        backend = local_nodes.LocalRedisBackend(server)
        yield backend
        backend.teardown()


@pytest.fixture
def acceptance_conf(broker_kind: str, capacity_conf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of both sides, with the name of the queue, which is this test's own."""
    return {
        # On a RabbitMQ where no virtual host can be made, the tests share one.
        "task_default_queue": unique("acceptance"),
        **(_QUORUM if broker_kind == "rabbitmq-quorum" else {}),
        **capacity_conf,
    }


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    return CapacityTestSetup


@pytest.fixture
def celery_setup_app(
    celery_setup_config: dict[str, Any],
    celery_backend: CeleryTestBackend,
    acceptance_conf: dict[str, Any],
    capacity_plugin: bool,
) -> Iterator[Celery]:
    """The tests' side of the app: the tasks and settings of the workers, at the addresses seen from here."""
    app = build_app(
        broker_url=celery_setup_config["broker_url"],
        result_backend=celery_setup_config["result_backend"],
        conf=_with_registry(acceptance_conf, celery_backend.config()["host_url"]),
        plugin=capacity_plugin,
    )
    # pytest-celery's nodes make it the current app at every restart.
    with setup_default_app(app):
        yield app
    close_app(app)


@pytest.fixture
def celery_worker_cluster(
    request: pytest.FixtureRequest,
    nodes_kind: str,
    worker_names: tuple[str, ...],
    worker_options: Mapping[str, Any],
    capacity_plugin: bool,
    acceptance_conf: dict[str, Any],
    celery_worker_cluster_config: dict[str, Any],
    celery_backend: CeleryTestBackend,
    celery_setup_app: Celery,
    journal: Journal,
    tmp_path: Path,
) -> Iterator[CeleryWorkerCluster]:
    """All the workers, started side by side and ready."""
    environment: dict[str, Any] = {
        "broker": celery_worker_cluster_config["celery_broker_cluster_config"]["urls"][0],
        "backend": celery_worker_cluster_config["celery_backend_cluster_config"]["urls"][0],
        "conf": _with_registry(acceptance_conf, celery_backend.config()["url"]),
        "plugin": capacity_plugin,
    }
    queue = acceptance_conf["task_default_queue"]
    nodes: list[CeleryTestWorker] = []
    processes: list[WorkerProcess] = []
    with ExitStack() as stack:
        stack.callback(end_workers, processes)
        for nodename in worker_names:
            if nodes_kind == "docker":
                env = worker_environment(**environment, env={JOURNAL_ENV: docker_nodes.JOURNAL_MOUNT}, inherit=False)
                nodes.append(
                    stack.enter_context(
                        docker_nodes.docker_worker(
                            request.getfixturevalue("docker_client"),
                            image=request.getfixturevalue("capacity_worker_image").id,
                            network=request.getfixturevalue("default_pytest_celery_network").name,
                            nodename=nodename,
                            queue=queue,
                            arguments=worker_arguments(nodename, queues=[queue], **worker_options),
                            env=env,
                            journal=journal.directory,
                            app=celery_setup_app,
                        )
                    )
                )
                continue
            name, _, host = nodename.partition("@")
            process = WorkerProcess(
                name,
                host=host,
                directory=tmp_path / "workers",
                queues=[queue],
                journal=journal,
                **environment,
                **worker_options,
            )
            processes.append(process.start())
            nodes.append(local_nodes.LocalWorker(process, celery_setup_app))
        for process in processes:
            process.wait_ready()
        cluster = CeleryWorkerCluster(*nodes)
        yield cluster
        cluster.teardown()


@pytest.fixture
def celery_worker(celery_worker_cluster: CeleryWorkerCluster) -> CeleryTestWorker:
    """The first worker, for tests that want no setup around it."""
    return celery_worker_cluster[0]


def _with_registry(conf: Mapping[str, Any], redis_url: str) -> dict[str, Any]:
    registry = redis_url.rpartition("/")[0] + "/1"
    return {key: value.replace(REGISTRY, registry) if isinstance(value, str) else value for key, value in conf.items()}
