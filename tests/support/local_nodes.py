"""pytest-celery's nodes on local processes, without Docker.

pytest-celery's classes wrap an object of the Docker client.  :class:`LocalContainer` has the part of that
object's interface that they use, and stands on a process; so the wrappers and the nodes keep nearly all of
their own code, and a test can't tell whether it runs on Docker.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import celery
import psutil
import pytest_docker_tools.exceptions
from pytest_celery import (
    CeleryTestContainer,
    CeleryTestNode,
    CeleryTestWorker,
    CeleryWorkerContainer,
    RabbitMQContainer,
    RabbitMQTestBroker,
    RedisContainer,
    RedisTestBackend,
    RedisTestBroker,
)
from pytest_celery.defaults import RESULT_TIMEOUT

from .processes import ManagedProcess
from .servers import RabbitServer, RedisServer
from .waiting import wait_until
from .workers import WorkerProcess, end_workers

__all__ = (
    "LocalContainer",
    "LocalRabbitBroker",
    "LocalRedisBackend",
    "LocalRedisBroker",
    "LocalWorker",
)


#: By another name than ``signal.SIGKILL``, since Docker's client has an argument that is named ``signal``.
SIGKILL = int(signal.SIGKILL)


class _Restartable(Protocol):
    """What the container needs of a process: a worker's and a server's differ in how they start."""

    def start(self) -> Any: ...

    def wait_ready(self) -> Any: ...


class LocalContainer:
    """What ``docker.models.containers.Container`` is to pytest-celery, on a process.

    ``process`` is ``None`` for a server that is shared by many tests, and so may not be touched by one.
    """

    def __init__(self, process: ManagedProcess | None, name: str) -> None:
        self.process = process
        self.name = name
        #: Docker's are hexadecimal and pytest-celery cuts them to twelve characters.
        self.id = f"local-{name}"
        #: No networks and no exposed ports: nothing there to wait for.
        self.attrs: dict[str, Any] = {
            "Config": {"Hostname": name, "Env": []},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
        }

    @property
    def status(self) -> str:
        """``running`` or ``exited``; always as of now, so there is nothing to reload."""
        return "running" if self.process is None or self.process.running else "exited"

    def reload(self) -> None:
        pass

    def logs(self) -> bytes:
        return b"" if self.process is None else self.process.logs().encode()

    def kill(self, signal: str | int | None = None) -> None:
        """As in Docker: SIGKILL ends everything in the container, another signal goes to its main process."""
        process = self._own()
        number = _signal_number(signal)
        if number != SIGKILL:
            process.signal(number)
        elif isinstance(process, WorkerProcess):
            process.kill()
        else:
            process.signal(number, group=True)
            process.wait(10.0)

    def restart(self, timeout: float = 10) -> None:
        """As in Docker: SIGTERM, SIGKILL after ``timeout`` seconds, and start; then wait until it is ready,
        since the words that pytest-celery looks for are in the log of the first start already."""
        process = self._own()
        if process.running:
            process.signal(signal.SIGTERM)
            try:
                process.wait(timeout)
            except AssertionError:
                self.kill("SIGKILL")
        process.close()
        restartable: _Restartable = process  # type: ignore[assignment]
        restartable.start()
        restartable.wait_ready()

    def pause(self) -> None:
        self._own().signal(signal.SIGSTOP, group=True)

    def unpause(self) -> None:
        self._own().signal(signal.SIGCONT, group=True)

    def exec_run(self, cmd: str | Sequence[str], **_: Any) -> tuple[int, bytes]:
        """Run a command in the surroundings of the process."""
        argv = shlex.split(cmd) if isinstance(cmd, str) else list(cmd)
        env: Mapping[str, str] = self.process.env if isinstance(self.process, WorkerProcess) else os.environ
        done = subprocess.run(
            argv, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60.0, check=False
        )
        return done.returncode, done.stdout

    def _own(self) -> ManagedProcess:
        if self.process is None:
            raise RuntimeError(
                f"{self.name} is shared by many tests; one that stops or restarts it needs @pytest.mark.own_servers"
            )
        return self.process


def _signal_number(value: str | int | None) -> int:
    if value is None:
        return SIGKILL
    return signal.Signals[value].value if isinstance(value, str) else int(value)


# -- containers ------------------------------------------------------------------------------------------


class LocalWorkerContainer(CeleryWorkerContainer):  # type: ignore[misc]
    """A worker's process in the place of its container."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__(LocalContainer(worker, worker.nodename))
        self.worker = worker

    @property
    def ready_prompt(self) -> str:
        return f"{self.worker.nodename} ready."

    # Methods of the class in pytest-celery, where one image means one name and one queue.
    def worker_name(self) -> str:
        return self.worker.nodename.partition("@")[0]

    def worker_queue(self) -> str:
        return self.worker.queues[0]

    @classmethod
    def version(cls) -> str:
        return str(celery.__version__)


class _Addressed(CeleryTestContainer):  # type: ignore[misc]
    """A server at one URL, the same for the tests and for the workers."""

    def __init__(self, server: ManagedProcess | None, url: str, name: str) -> None:
        super().__init__(LocalContainer(server, name))
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    @property
    def host_url(self) -> str:
        return self._url

    @property
    def hostname(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self._url.rpartition(":")[2].partition("/")[0])

    @property
    def vhost(self) -> str:
        return self._url.rpartition(":")[2].partition("/")[2]


class LocalRedisContainer(_Addressed, RedisContainer):  # type: ignore[misc]
    def __init__(self, server: RedisServer) -> None:
        super().__init__(server, server.url, server.name)


class LocalRabbitContainer(_Addressed, RabbitMQContainer):  # type: ignore[misc]
    """``server`` is ``None`` for a virtual host on a shared one."""

    def __init__(self, server: RabbitServer | None, url: str) -> None:
        super().__init__(server, url, server.name if server else "shared-rabbitmq")

    @property
    def ready_prompt(self) -> str | None:
        return super().ready_prompt if self._container.process else None


# -- nodes -----------------------------------------------------------------------------------------------


class _LocalNode(CeleryTestNode):  # type: ignore[misc]
    """What is the same for every local node."""

    @property
    def process(self) -> ManagedProcess:
        """The process, for what Docker can't do; a test that uses it runs on local nodes only."""
        process: ManagedProcess = self.container._container._own()
        return process

    def wait_for_log(self, log: str, message: str = "", timeout: int = RESULT_TIMEOUT) -> None:
        """As pytest-celery's, which looks once a second: fifty times a second."""
        message = message or f"{self.name()} to log {log!r}"
        try:
            wait_until(lambda: log in self.logs(), timeout, what=message)
        except AssertionError as exc:
            # The exception that assert_log_exists and assert_log_does_not_exist turn into their own.
            raise pytest_docker_tools.exceptions.TimeoutError(str(exc)) from None


class LocalWorker(_LocalNode, CeleryTestWorker):  # type: ignore[misc]
    """A worker on a process; ``celery_setup.worker.process`` is its :class:`WorkerProcess`."""

    def __init__(self, worker: WorkerProcess, app: celery.Celery) -> None:
        super().__init__(LocalWorkerContainer(worker), app)

    def hostname(self) -> str:
        return str(self.container.worker.nodename)

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """As pytest-celery's; a container sees its own processes only, and so does this."""
        worker: WorkerProcess = self.container.worker
        infos = []
        for pid in [worker.pid, *worker.children()]:
            try:
                infos.append(
                    psutil.Process(pid).as_dict(
                        columns
                        or ["pid", "name", "username", "cmdline", "cpu_percent", "memory_percent", "create_time"]
                    )
                )
            except psutil.NoSuchProcess:
                continue
        return [info for info in infos if all(info.get(key) == value for key, value in (filters or {}).items())]

    def teardown(self) -> None:
        end_workers([self.container.worker])


class LocalRedisBroker(_LocalNode, RedisTestBroker):  # type: ignore[misc]
    def __init__(self, server: RedisServer) -> None:
        super().__init__(LocalRedisContainer(server))


class LocalRabbitBroker(_LocalNode, RabbitMQTestBroker):  # type: ignore[misc]
    def __init__(self, server: RabbitServer | None, url: str) -> None:
        super().__init__(LocalRabbitContainer(server, url))


class LocalRedisBackend(_LocalNode, RedisTestBackend):  # type: ignore[misc]
    def __init__(self, server: RedisServer) -> None:
        super().__init__(LocalRedisContainer(server))
