"""Registries that hang, are locked, or are deleted under a running fleet."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import RedisServer

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
        assert fleet.workers[name].logs().count("is away; going on without it") <= 2


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
