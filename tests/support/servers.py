"""Servers for tests: own ones on free ports that a test may break, and a place of its own on shared ones.

Own servers (:class:`RedisServer`, :class:`RabbitServer`) are context managers, and are ended by their process
id only.  :func:`shared_redis_url` and :func:`shared_rabbit_url` give a database or a virtual host that nobody
else uses, on the server named by ``CAPACITY_TEST_REDIS`` / ``CAPACITY_TEST_RABBITMQ``, else on the standard
port, else on a server that is started once for the whole test run.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import quote, urlsplit

import psutil
import pytest
import redis
from kombu.connection import Connection
from typing_extensions import Self

from .processes import ManagedProcess
from .waiting import wait_until

__all__ = (
    "RabbitServer",
    "RedisServer",
    "free_port",
    "missing",
    "sentinel_of",
    "shared_rabbit_url",
    "shared_redis_url",
    "unique",
)

_LOCALHOST = "127.0.0.1"
_REDIS_READY_LIMIT = 20.0
#: The Erlang machine takes 5 to 10 seconds on two idle processors.
_RABBIT_READY_LIMIT = 90.0
_RABBIT_BIN = Path("/usr/lib/rabbitmq/bin")
Lifetime = Literal["test", "session"]


def missing(what: str) -> NoReturn:
    """A service is not there: skip the test, but fail it where everything has to be there (``CI=true``)."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def unique(prefix: str) -> str:
    """A name that nobody else has, for queues, namespaces and nodes."""
    return f"{prefix}-{uuid.uuid4().hex[:10]}"


def free_port() -> int:
    """A port that was free a moment ago.  Another process may take it before it is used."""
    with socket.socket() as sock:
        sock.bind((_LOCALHOST, 0))
        return int(sock.getsockname()[1])


class _Server(ManagedProcess):
    """A server that a test may break in every way."""

    ready_limit: float

    def start(self) -> Self:
        """Start it and wait until it answers.

        :raises AssertionError: with the tail of its log, if it does not in time.
        """
        self._launch()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        def answers() -> bool:
            if not self.running:
                raise AssertionError(f"{self.name} ended ({self.returncode})")
            return self._answers()

        try:
            wait_until(answers, self.ready_limit, 0.05, what=f"{self.name} to answer")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log_tail()}") from None

    def kill(self) -> None:
        """SIGKILL: nothing is written, nobody is told.  :meth:`restart` brings it back."""
        self.close()

    def stop(self) -> None:
        """An orderly end.  Harmless if it has ended."""
        if self.running:
            # A paused process would never see the other signal.
            self.resume()
            self.signal(signal.SIGTERM)
            self.wait(60.0)
        self.close()

    def restart(self, *, warm: bool = True) -> Self:
        """End it, by :meth:`stop` or by :meth:`kill`, and start it with the same address and the same files."""
        if self.started:
            if warm:
                self.stop()
            else:
                self.kill()
        return self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered."""
        self.signal(signal.SIGSTOP, group=True)

    def resume(self) -> None:
        self.signal(signal.SIGCONT, group=True)

    def _launch(self) -> None:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self if self.started else self.start()


# -- Redis -----------------------------------------------------------------------------------------------


class RedisServer(_Server):
    """A Redis of one's own.  ``persistence``: every write is on disk before it is answered, so a restart keeps
    all; without it a restart is the loss of the store."""

    ready_limit = _REDIS_READY_LIMIT

    def __init__(
        self,
        directory: Path,
        *,
        persistence: bool = False,
        unix_socket: bool = False,
        password: str | None = None,
        config: Mapping[str, str] | None = None,
        lifetime: Lifetime = "test",
    ) -> None:
        executable = shutil.which("redis-server")
        if executable is None:
            missing("redis-server is not installed")
        self.port = free_port()
        super().__init__(f"redis-{self.port}", directory / f"redis-{self.port}.log", lifetime=lifetime)
        directory.mkdir(parents=True, exist_ok=True)
        self.password = password
        # The path of a socket may have about a hundred characters, which directories of tests may exceed.
        self.socket_path = Path(tempfile.gettempdir()) / f"{unique('cap-redis')}.sock" if unix_socket else None
        options = {
            "bind": _LOCALHOST,
            "port": str(self.port),
            "dir": str(directory),
            "save": "",
            "appendonly": "yes" if persistence else "no",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            **({"unixsocket": str(self.socket_path)} if self.socket_path else {}),
            **({"requirepass": password} if password else {}),
            **(config or {}),
        }
        self.executable = executable
        self._argv = [executable]
        for key, value in options.items():
            self._argv += [f"--{key}", value]

    @property
    def url(self) -> str:
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{secret}{_LOCALHOST}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The same server through its socket, as the redis client spells it."""
        if self.socket_path is None:
            raise RuntimeError("started without unix_socket=True")
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"unix://{secret}{self.socket_path}?db=0"

    def client(self, db: int = 0) -> redis.Redis:
        return redis.Redis(host=_LOCALHOST, port=self.port, db=db, password=self.password, decode_responses=True)

    def close(self) -> None:
        super().close()
        if self.socket_path is not None:
            self.socket_path.unlink(missing_ok=True)

    def _launch(self) -> None:
        self.spawn(self._argv, os.environ)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        # Still loading its file, or not listening yet.
        except (redis.ConnectionError, redis.TimeoutError):
            return False


# -- RabbitMQ --------------------------------------------------------------------------------------------


class RabbitServer(_Server):
    """A RabbitMQ of one's own, with its own name, cookie, files and epmd.  It takes 5 to 10 seconds to start.

    Durable queues outlive :meth:`restart` and :meth:`kill`, and so do persistent messages, but after a kill only
    those that the broker had confirmed: publish with ``broker_transport_options={"confirm_publish": True}``.
    """

    ready_limit = _RABBIT_READY_LIMIT

    def __init__(self, directory: Path, *, config: str = "", lifetime: Lifetime = "test") -> None:
        self._server = _rabbit_script("rabbitmq-server")
        self._ctl = _rabbit_script("rabbitmqctl")
        epmd = shutil.which("epmd")
        if epmd is None:
            missing("epmd (Erlang) is not installed")
        self.port = free_port()
        super().__init__(f"rabbitmq-{self.port}", directory / f"rabbitmq-{self.port}.log", lifetime=lifetime)
        self.directory = directory / f"rabbitmq-{self.port}"
        self.directory.mkdir(parents=True)
        (self.directory / "enabled_plugins").write_text("[].\n")
        # Instead of the machine's own file, which would name the machine's own node.
        (self.directory / "env.conf").write_text("")
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = {_LOCALHOST}:{self.port}\nvm_memory_high_watermark.absolute = 1GB\n"
            f"disk_free_limit.absolute = 50MB\n{config}\n"
        )
        epmd_port = free_port()
        # The server would start one as a daemon, which outlives it; this one is ended with it.
        self._epmd = ManagedProcess(f"epmd-{epmd_port}", directory / f"epmd-{epmd_port}.log", lifetime=lifetime)
        self._epmd_argv = [epmd, "-port", str(epmd_port), "-address", _LOCALHOST]
        self._epmd_port = epmd_port
        # Without what an environment may say about another node.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
        self._env = {
            **inherited,
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": _LOCALHOST,
            "ERL_FLAGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_NODENAME": f"capacity{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": _LOCALHOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_LOGS": "-",
            # So that the script becomes the server, instead of waiting for it: one process, and its id.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{_LOCALHOST}:{self.port}//"

    def ctl(self, *arguments: str, limit: float = 60.0) -> str:
        """Run rabbitmqctl against this server, and return what it prints."""
        return _run([self._ctl, "--quiet", *arguments], self._env, limit)

    def close_all_connections(self, reason: str = "closed by a test") -> None:
        """The broker closes every client's connection, as an operator would."""
        self.ctl("close_all_connections", reason)

    def close(self) -> None:
        super().close()
        self._epmd.close()

    def _launch(self) -> None:
        if not self._epmd.running:
            self._epmd.close()
            self._epmd.spawn(self._epmd_argv, self._env)
        wait_until(lambda: _listens(self._epmd_port), 10.0, what="epmd to listen")
        self.spawn([self._server], self._env)

    def _answers(self) -> bool:
        return _speaks_amqp(self.url)


def _rabbit_script(name: str) -> str:
    # Debian's wrappers on the path change the user and the directory; the scripts themselves do not.
    script = _RABBIT_BIN / name
    found = str(script) if script.exists() else shutil.which(name)
    if found is None:
        missing(f"{name} is not installed")
    return found


def _run(argv: list[str], env: Mapping[str, str], limit: float) -> str:
    # A session of its own: Ctrl-C is for the tests, which still need to clean up through it.
    done = subprocess.run(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit,
        start_new_session=True,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise AssertionError(f"{' '.join(argv)} ended with {done.returncode}\n{output}")
    return output


def _listens(port: int) -> bool:
    try:
        socket.create_connection((_LOCALHOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _speaks_amqp(url: str) -> bool:
    connection: Any = Connection(url, connect_timeout=2)  # type: ignore[no-untyped-call]
    try:
        connection.connect()
    except connection.connection_errors:
        return False
    finally:
        connection.release()
    return True


# -- shared servers --------------------------------------------------------------------------------------

#: Started for the whole run where the machine has none running.
_session_servers: dict[str, _Server] = {}
_OWNER_KEY = "capacity-test:owner"

_CLAIM = """
-- KEYS[1] owner key; ARGV[1] new owner, ARGV[2] owner whose process is gone, or ''. Returns 1 if claimed.
local owner = redis.call('GET', KEYS[1])
if owner == false and redis.call('DBSIZE') > 0 then return 0 end
if owner and owner ~= ARGV[2] then return 0 end
redis.call('FLUSHDB')
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""


@contextmanager
def shared_redis_url(*, exclude: tuple[int, ...] = (0, 15)) -> Iterator[str]:
    """The URL of a database that nobody else uses; it is emptied afterwards.

    A database is only taken if it is empty, or if it was left by a test run that is no more, which a key in it
    says.  ``exclude``: the default database and the one of the contract suite are never taken.
    """
    server = _shared_redis()
    with redis.Redis(**server, db=0) as client:
        databases = int(client.config_get("databases")["databases"])
    for db in range(databases):
        if db in exclude:
            continue
        with redis.Redis(**server, db=db, decode_responses=True) as client:
            if not _claim(client):
                continue
            try:
                secret = f":{quote(server['password'], safe='')}@" if server["password"] else ""
                yield f"redis://{secret}{server['host']}:{server['port']}/{db}"
            finally:
                client.flushdb()
            return
    raise AssertionError(f"no empty Redis database among {databases}: is something else using them?")


@contextmanager
def sentinel_of(server: RedisServer, directory: Path) -> Iterator[int]:
    """A Sentinel that knows the server as ``fleet``; its port."""
    port = free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind {_LOCALHOST}\ndir {directory}\nsentinel monitor fleet {_LOCALHOST} {server.port} 1\n"
        "sentinel down-after-milliseconds fleet 500\nsentinel failover-timeout fleet 3000\n"
    )
    with ManagedProcess("sentinel", directory / "sentinel.log") as sentinel:
        sentinel.spawn([server.executable, str(config), "--sentinel"], os.environ)
        wait_until(lambda: _listens(port), _REDIS_READY_LIMIT, what="the Sentinel")
        yield port


def _claim(client: redis.Redis) -> bool:
    owner = client.get(_OWNER_KEY)
    gone = owner if owner is not None and not _owner_alive(str(owner)) else ""
    me = f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time()}:{uuid.uuid4().hex}"
    return bool(client.eval(_CLAIM, 1, _OWNER_KEY, me, gone))


def _owner_alive(owner: str) -> bool:
    host, pid, created, _ = owner.split(":")
    if host != socket.gethostname():
        return True
    try:
        return bool(abs(psutil.Process(int(pid)).create_time() - float(created)) < 1.0)
    except psutil.NoSuchProcess:
        return False


def _shared_redis() -> dict[str, Any]:
    """Where it is, as arguments of the client."""
    url = os.environ.get("CAPACITY_TEST_REDIS", f"redis://{_LOCALHOST}:6379/0")
    parts = urlsplit(url)
    server: dict[str, Any] = {
        "host": parts.hostname or _LOCALHOST,
        "port": parts.port or 6379,
        "password": parts.password,
    }
    try:
        with redis.Redis(**server, socket_connect_timeout=2) as client:
            client.ping()
    except redis.RedisError as exc:
        if "CAPACITY_TEST_REDIS" in os.environ:
            missing(f"no Redis at {server['host']}:{server['port']}: {exc}")
    else:
        return server
    own = _session_server("redis", RedisServer)
    return {"host": _LOCALHOST, "port": own.port, "password": None}


@contextmanager
def shared_rabbit_url() -> Iterator[str]:
    """The URL of a virtual host that nobody else uses; it is deleted afterwards, with all that is in it.

    On a server that this user may not administer (``CAPACITY_TEST_RABBITMQ`` elsewhere, no right to run
    rabbitmqctl) it is the plain URL: name queues with :func:`unique`, and delete them.
    """
    given = os.environ.get("CAPACITY_TEST_RABBITMQ")
    base = given or f"amqp://guest:guest@{_LOCALHOST}:5672//"
    ctl = _machine_ctl
    if not _speaks_amqp(base):
        if given:
            missing(f"no RabbitMQ at {re.sub(r'//.*@', '//', given)}")
        own = _session_server("rabbitmq", RabbitServer)
        base, ctl = own.url, own.ctl
    vhost = unique("captest")
    user = urlsplit(base).username or "guest"
    try:
        ctl("eval", _ADD_VHOST.format(vhost=vhost, user=user))
    except (AssertionError, OSError, subprocess.TimeoutExpired) as exc:
        if given or base.endswith(":5672//"):
            yield base
            return
        raise AssertionError("could not make a virtual host on the run's own RabbitMQ") from exc
    try:
        parts = urlsplit(base)
        yield parts._replace(path=f"/{vhost}").geturl()
    finally:
        ctl("eval", _DELETE_VHOST.format(vhost=vhost))


# One call each: every start of rabbitmqctl costs a third of a second.
_ADD_VHOST = (
    'ok = rabbit_vhost:add(<<"{vhost}">>, <<"tests">>), '
    'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, <<"{vhost}">>, '
    '<<".*">>, <<".*">>, <<".*">>, <<"tests">>).'
)
_DELETE_VHOST = 'rabbit_vhost:delete(<<"{vhost}">>, <<"tests">>).'


def _machine_ctl(*arguments: str) -> str:
    executable = shutil.which("rabbitmqctl")
    if executable is None:
        raise FileNotFoundError("rabbitmqctl")
    return _run([executable, "--quiet", *arguments], os.environ, 60.0)


def _session_server(name: str, server_class: type[Any]) -> Any:
    server = _session_servers.get(name)
    if server is None or not server.running:
        directory = Path(tempfile.mkdtemp(prefix=f"capacity-{name}-"))
        # Runs after the plugin has ended the server.
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        server = server_class(directory, lifetime="session").start()
        _session_servers[name] = server
    return server
