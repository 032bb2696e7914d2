"""The URLs of the Redis store: one server, its socket, TLS, the master behind Sentinels, a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot
from support.servers import RedisServer, free_port, missing, sentinel_of
from support.waiting import wait_until

from celery_capacity.errors import ConfigurationError, RegistryError, RegistryUnavailable
from celery_capacity.models import Advert, Demand
from celery_capacity.registry import Registry, Reservation, open_registry
from celery_capacity.registry._redis_urls import opener_of

SECRET = "s3cr:et@/?#"
QUOTED = "s3cr%3Aet%40%2F%3F%23"
SLOTS = 16384


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, unix_socket=True, password=SECRET) as server:
        yield server


def use(registry: Registry) -> None:
    registry.register(Advert("w1", "n", ("q",), frozenset({"t"}), 5, 3600, 3600))
    answer = registry.select_and_reserve(Demand("q", "t"))
    assert isinstance(answer, Reservation)
    answer.release()
    assert [w.held for w in registry.overview().workers] == [0]


def connection(url: str, timeout_seconds: float = 2.0):
    return opener_of(url, timeout_seconds).new()


# -- parsing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", ("localhost", 6379, 0, None, None)),
        ("redis://h:1/2", ("h", 1, 2, None, None)),
        ("REDIS://h", ("h", 6379, 0, None, None)),
        (f"redis://:{QUOTED}@h", ("h", 6379, 0, None, SECRET)),
        (f"redis://u:{QUOTED}@h:1/3?socket_timeout=7", ("h", 1, 3, "u", SECRET)),
        ("redis://h?db=4&max_connections=5", ("h", 6379, 4, None, None)),
        ("redis://h/5?decode_responses=true", ("h", 6379, 5, None, None)),
        ("valkey://u:p@h:1/2", ("h", 1, 2, "u", "p")),
        ("rediss://h:1/2?ssl_cert_reqs=none", ("h", 1, 2, None, None)),
        ("valkeys://h:1/2", ("h", 1, 2, None, None)),
    ],
)
def test_server(url, expected):
    found = connection(url)
    # How the driver keeps the credentials depends on its version.
    assert (found.host, found.port, found.db, found.username, found.password) == expected
    assert isinstance(found, redis.SSLConnection) == (url.partition("://")[0] in ("rediss", "valkeys"))
    assert found.socket_timeout == (7 if "socket_timeout" in url else 2)
    assert found.socket_connect_timeout == 2


@pytest.mark.parametrize(
    ("url", "path", "db"),
    [
        ("unix:///run/redis.sock", "/run/redis.sock", 0),
        ("unix:///run/redis.sock?db=3", "/run/redis.sock", 3),
        ("redis+socket:///run/redis.sock?virtual_host=3", "/run/redis.sock", 3),
        ("redis+socket://u:p@/run/redis.sock", "/run/redis.sock", 0),
    ],
)
def test_socket(url, path, db):
    found = connection(url)
    assert (found.path, found.db) == (path, db)


@pytest.mark.parametrize("scheme", ["redis+sentinel", "rediss+sentinel"])
def test_sentinel(scheme):
    opener = opener_of(
        f"{scheme}://u:{QUOTED}@a:1,b,[::1]:3/my%20service/4?sentinel_password=other&min_other_sentinels=1&socket_timeout=9",
        2.0,
    )
    pool, found = opener.pool, opener.new()
    assert (pool.service_name, pool.is_master, found.db, found.username, found.password) == (
        "my service",
        True,
        4,
        "u",
        SECRET,
    )
    assert (found.socket_timeout, found.socket_connect_timeout) == (9, 2)
    assert isinstance(found, redis.SSLConnection) == scheme.startswith("rediss")
    manager = pool.sentinel_manager
    asked = [s.connection_pool.connection_kwargs for s in manager.sentinels]
    assert [(k["host"], k["port"]) for k in asked] == [("a", 1), ("b", 26379), ("::1", 3)]
    assert {k["password"] for k in asked} == {"other"}
    assert {k["socket_timeout"] for k in asked} == {9}
    assert manager.min_other_sentinels == 1


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{QUOTED}@h:port/0",
        f"redis://:{SECRET}@h/0",
        f"redis://:{QUOTED}@h/zero",
        f"redis://:{QUOTED}@h/0?socket_timeout=soon",
        f"redis://:{QUOTED}@h/0?socket_tiemout=2",
        "unix://",
        f"redis+sentinel://:{QUOTED}@a:1,b:2",
        f"redis+sentinel://:{QUOTED}@/service",
        f"redis+sentinel://:{QUOTED}@a:1/service/zero",
        f"redis+sentinel://:{QUOTED}@a:1/service/0?nonsense=1",
        f"redis+cluster://:{QUOTED}@a:1/2",
        f"redis+cluster://:{QUOTED}@a:x",
    ],
)
def test_wrong_url_is_named_without_the_password(url):
    with pytest.raises(ConfigurationError) as caught:
        open_registry(url)
    assert caught.value.name == "capacity_registry"
    assert "://" in caught.value.expected
    for text in (str(caught.value), repr(caught.value)):
        assert "s3cr" not in text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "2", True, None])
def test_wrong_timeout(timeout):
    with pytest.raises(ConfigurationError) as caught:
        open_registry("redis://h", timeout_seconds=timeout)
    assert caught.value.name == "timeout_seconds"


def test_nothing_is_connected_before_the_first_operation():
    with open_registry(f"redis://127.0.0.1:{free_port()}") as registry:
        assert "127.0.0.1" in repr(registry)
        with pytest.raises(RegistryUnavailable):
            registry.overview()


# -- real servers ----------------------------------------------------------------------------------------


def test_unix_socket(server):
    for scheme in ("unix", "redis+socket"):
        with open_registry(server.unix_url.replace("unix", scheme, 1)) as registry:
            use(registry)
            assert "s3cr" not in f"{registry.url} {registry!r}"


def test_valkey_scheme(server):
    with open_registry(server.url.replace("redis", "valkey", 1)) as registry:
        use(registry)


def test_tls(tmp_path):
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "cert.pem", free_port()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    config = {"tls-port": str(port), "tls-cert-file": str(certificate), "tls-key-file": str(key)}
    with RedisServer(tmp_path, config={**config, "tls-auth-clients": "no"}):
        for scheme in ("rediss", "valkeys"):
            with open_registry(f"{scheme}://127.0.0.1:{port}/0?ssl_ca_certs={certificate}") as registry:
                use(registry)
        with open_registry(f"rediss://127.0.0.1:{port}/0") as registry, pytest.raises(RegistryError):
            registry.overview()


# -- Sentinel --------------------------------------------------------------------------------------------


def test_sentinel_failover(tmp_path):
    with ExitStack() as stack:
        old = stack.enter_context(RedisServer(tmp_path / "old"))
        new = stack.enter_context(RedisServer(tmp_path / "new", config={"replicaof": f"127.0.0.1 {old.port}"}))
        with new.client() as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", 20.0)
        port = stack.enter_context(sentinel_of(old, tmp_path))
        asked = stack.enter_context(redis.Redis(port=port, decode_responses=True))

        def knows_the_replica() -> bool:
            try:
                return bool(asked.execute_command("SENTINEL", "REPLICAS", "fleet"))
            except redis.ConnectionError:
                return False

        wait_until(knows_the_replica, 30.0)
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/fleet/0"
        registry = stack.enter_context(open_registry(url))
        use(registry)
        with new.client() as client:
            wait_until(lambda: client.exists("{capacity:default}:worker:w1"), 20.0)
        old.kill()

        def works() -> bool:
            try:
                use(registry)
            except RegistryUnavailable:
                return False
            return True

        wait_until(works, 60.0, 0.2, what="the new master")
        with new.client() as client:
            assert client.info("replication")["role"] == "master"
            assert client.exists("{capacity:default}:worker:w1")


# -- Cluster ---------------------------------------------------------------------------------------------


def cluster_node(directory: Path, bus_port: int) -> RedisServer:
    config = {"cluster-enabled": "yes", "cluster-port": str(bus_port), "cluster-node-timeout": "2000"}
    return RedisServer(directory, config=config)


def is_up(client: redis.Redis) -> bool:
    # Parsed or not, depending on the driver.
    return re.search(r"cluster_state\W+ok", str(client.execute_command("CLUSTER", "INFO"))) is not None


def test_cluster_of_one_node(tmp_path):
    with (
        cluster_node(tmp_path, free_port()) as node,
        node.client() as client,
        open_registry(
            f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{node.port}", timeout_seconds=0.5
        ) as registry,
    ):
        # There is no cluster yet.
        with pytest.raises(RegistryUnavailable):
            registry.overview()
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        wait_until(lambda: is_up(client), 20.0)
        use(registry)
        node.pause()
        try:
            with pytest.raises(RegistryUnavailable):
                registry.overview()
        finally:
            node.resume()
        use(registry)


def test_slot_that_moves_to_another_node_is_followed(tmp_path):
    bus = free_port()
    with (
        cluster_node(tmp_path / "a", free_port()) as a,
        cluster_node(tmp_path / "b", bus) as b,
        a.client() as at_a,
        b.client() as at_b,
    ):
        names = [str(c.execute_command("CLUSTER", "MYID")) for c in (at_a, at_b)]
        slot = key_slot(b"{capacity:default}")
        at_a.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        at_b.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 7)
        at_a.execute_command("CLUSTER", "MEET", "127.0.0.1", b.port, bus)

        def ready() -> bool:
            nodes = [str(client.execute_command("CLUSTER", "NODES")) for client in (at_a, at_b)]
            return is_up(at_a) and is_up(at_b) and all(name in text for name in names for text in nodes)

        wait_until(ready, 30.0)
        with open_registry(f"redis+cluster://127.0.0.1:{b.port},127.0.0.1:{a.port}") as registry:
            use(registry)
            assert at_a.dbsize() > 0
            at_b.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
            at_a.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
            keys = at_a.keys()
            # While the keys are on both, nothing is run at all: it could stop in its middle.
            with pytest.raises(RegistryUnavailable):
                use(registry)
            at_a.execute_command("MIGRATE", "127.0.0.1", b.port, "", 0, 5000, "KEYS", *keys[: len(keys) // 2])
            with pytest.raises(RegistryUnavailable):
                registry.overview()
            at_a.execute_command("MIGRATE", "127.0.0.1", b.port, "", 0, 5000, "KEYS", *keys[len(keys) // 2 :])
            for client in (at_b, at_a):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])
            assert [w.held for w in registry.overview().workers] == [0]
            use(registry)
            assert at_a.dbsize() == 0
