"""Registries that hang, are locked, or are deleted under a running fleet."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Fleet, Fleets
from support.proxy import Proxy
from support.sampling import Sampler
from support.servers import RedisServer

from celery_capacity import open_registry
from celery_capacity.errors import RegistryError

TWO = {"w1@north": {}, "w2@south": {}}
CONF: Mapping[str, Any] = {
    "capacity_lease_seconds": 3,
    "capacity_lapse_seconds": 60,
    "capacity_sweep_seconds": 1,
    "capacity_registry_timeout_seconds": 0.5,
    "capacity_registry_retry_seconds": 0.5,
}


def _goes_on_without(fleet: Fleet, key: str) -> None:
    """What is sent while there is no registry runs, by the workers' own count."""
    for number in range(12):
        fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": 0.1})
    assert len(fleet.ended(key, 12, 60)) == 12
    for name in TWO:
        assert fleet.max_parallel(worker=name) <= 2
        assert fleet.workers[name].logs().count("is away; going on without it") <= 1


def _is_whole_again(fleet: Fleet, gate: str, held: int) -> None:
    def seen() -> int | None:
        try:
            return sum(fleet.held().values())
        except RegistryError:
            return None

    fleet.wait(lambda: seen() == held, 60, f"held to be the {held} that run")
    fleet.journal.open_gate(gate)
    fleet.ended(gate, held)
    fleet.wait(lambda: seen() == 0, 30, "all slots to be free")
    fleet.wait(lambda: all(view.capacity == 2 for view in fleet.views()), 30, "both workers")
    fleet.assert_takes(4)
    fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")


def _says_it_is_back(fleet: Fleet, name: str) -> bool:
    return "is back" in fleet.workers[name].logs()


def test_one_that_hangs(fleets: Fleets, tmp_path: Path, key: str) -> None:
    with RedisServer(tmp_path / "registry") as server, fleets.own("redis", TWO, CONF, registry=server.url) as fleet:
        gate = fleet.fill(3)
        server.pause()
        try:
            _goes_on_without(fleet, key)
        finally:
            server.resume()
        _is_whole_again(fleet, gate, 3)


def test_one_that_forgets_its_scripts(fleets: Fleets, tmp_path: Path, key: str) -> None:
    with (
        RedisServer(tmp_path / "registry") as server,
        fleets.own("redis", TWO, CONF, registry=server.url) as fleet,
        Sampler(fleet.registry),
    ):
        client = server.client()
        for number in range(30):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": 0.02})
            client.script_flush()
        client.close()
        assert len(fleet.ended(key, 30, 60)) == 30
        fleet.wait(lambda: not fleet.held(), 20, "all slots to be free")
        for name in TWO:
            assert "is away; going on without it" not in fleet.workers[name].logs()


def test_one_that_takes_200_ms_for_an_operation(fleets: Fleets, tmp_path: Path, key: str) -> None:
    """Everything is slow then, and nothing is wrong."""
    with RedisServer(tmp_path / "registry") as server, Proxy(server.port, 0.2) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        conf = {**CONF, "capacity_registry_timeout_seconds": 5}
        with fleets.own("redis", TWO, conf, registry=url) as fleet:
            direct = open_registry(server.url, fleet.namespace)
            with Sampler(direct):
                for number in range(16):
                    fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": 0.1})
                assert len(fleet.ended(key, 16, 60)) == 16
                fleet.wait(lambda: not fleet.held() and not fleet.left(), 30, "a quiet fleet")
                gate = fleet.fill(4)
                assert fleet.held() == {"w1@north": 2, "w2@south": 2}
                fleet.journal.open_gate(gate)
                fleet.ended(gate, 4)
                fleet.wait(lambda: not fleet.held(), 30, "all slots to be free")
            direct.close()
            assert set(fleet.journal.executions().values()) == {1}
            assert (
                set(dict(fleet.registry.overview().counters)) & {"workers_lapsed", "lapsed", "healed", "swept"} == set()
            )
            for name in TWO:
                assert "is away; going on without it" not in fleet.workers[name].logs()


def test_one_that_is_a_replica_after_a_failover(fleets: Fleets, tmp_path: Path, key: str) -> None:
    """It reads, and does not write, until it is the master again; by then it has forgotten all."""
    with (
        RedisServer(tmp_path / "other") as other,
        RedisServer(tmp_path / "registry") as server,
        fleets.own("redis", TWO, CONF, registry=server.url) as fleet,
    ):
        gate = fleet.fill(3)
        with server.client() as client:
            client.replicaof("127.0.0.1", other.port)
            _goes_on_without(fleet, key)
            client.replicaof("NO", "ONE")
        _is_whole_again(fleet, gate, 3)


def test_nobody_hammers_one_that_is_away(fleets: Fleets, tmp_path: Path, key: str) -> None:
    """For a while, and one warning in all of it; producers among them."""
    with RedisServer(tmp_path / "registry") as server, Proxy(server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with fleets.own("redis", TWO, CONF, registry=url) as fleet:
            gate = fleet.fill(3)
            proxy.shut()
            began, sent = time.monotonic(), 0
            while time.monotonic() - began < 8:
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{sent}"})
                sent += 1
                time.sleep(0.02)
            lasted, turned_away = time.monotonic() - began, proxy.turned_away
            assert len(fleet.ended(key, sent, 60)) == sent
            for name in TWO:
                assert fleet.workers[name].logs().count("is away; going on without it") == 1
            proxy.reopen()
            _is_whole_again(fleet, gate, 3)
            for name in TWO:
                # The heartbeat may have it back a moment before the main loop notices and says so.
                fleet.wait(partial(_says_it_is_back, fleet, name), 10, f"{name} to say that it is back")
                assert fleet.workers[name].logs().count("is back") == 1
            # Main loop and producer twice a second each, heartbeats and sweeps once.
            assert sent > 50
            assert 5 < turned_away < lasted * (2 + len(TWO) * (2 + 1 + 1)) * 1.5


class TestSQLite:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "capacity.db"

    def test_a_file_that_is_locked(self, fleets: Fleets, path: Path, key: str) -> None:
        with fleets.own("redis", TWO, CONF, registry=f"sqlite:///{path}") as fleet:
            gate = fleet.fill(3)
            lock = sqlite3.connect(path, isolation_level=None)
            lock.execute("BEGIN IMMEDIATE")
            try:
                _goes_on_without(fleet, key)
            finally:
                lock.execute("ROLLBACK")
                lock.close()
            _is_whole_again(fleet, gate, 3)

    def test_a_file_that_is_deleted(self, fleets: Fleets, path: Path, key: str) -> None:
        with fleets.own("redis", TWO, CONF, registry=f"sqlite:///{path}") as fleet:
            gate = fleet.fill(3)
            for file in path.parent.glob("capacity.db*"):
                file.unlink()
            _goes_on_without(fleet, key)
            _is_whole_again(fleet, gate, 3)
