"""Producers that die, or whose broker does, between the reservation and the publish."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from threading import Thread

import pytest
from kombu.exceptions import OperationalError
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import RabbitServer, RedisServer
from support.workers import worker_environment

ONE = {"w1@north": {}}
CONF = {"capacity_reservation_seconds": 2, "capacity_sweep_seconds": 0.5}

_DIES = """
    import os, signal
    from celery import signals
    from support.tasks_app import app

    @signals.before_task_publish.connect
    def die(**kwargs):
        # The slot is reserved by now, and nothing is published.
        os.kill(os.getpid(), signal.SIGKILL)

    app.tasks["record"].apply_async(kwargs={"key": "never"})
"""


def _dies(fleet: Fleet) -> int:
    """A producer that is killed between the reservation and the publish; its exit code."""
    env = worker_environment(broker=fleet.broker, backend=fleet.backend, conf=fleet.conf, plugin=True)
    return subprocess.run([sys.executable, "-c", textwrap.dedent(_DIES)], env=env, check=False, timeout=60).returncode


def test_one_that_is_killed_costs_its_slot_until_the_deadline(fleets: Fleets, key: str) -> None:
    with fleets.own("redis", ONE, CONF) as fleet, Sampler(fleet.registry):
        assert [_dies(fleet) for _ in range(2)] == [-9, -9]
        view = fleet.view("w1@north")
        assert view is not None
        assert view.committed == 0
        fleet.wait(lambda: not fleet.held(), 10, "the reservations to end")
        assert fleet.left() == {}
        fleet.assert_takes(2)


@pytest.mark.parametrize("broker_kind", ["redis", "rabbitmq"])
def test_a_publish_that_fails_gives_its_slot_back_at_once(
    fleets: Fleets, tmp_path: Path, broker_kind: str, key: str
) -> None:
    server = RedisServer(tmp_path / "broker") if broker_kind == "redis" else RabbitServer(tmp_path / "broker")
    long = {**CONF, "capacity_reservation_seconds": 600}
    # A worker that is only a name, since a real one would lose its broker, too, and not be chosen.
    with server, fleets.own(broker_kind, {}, long, broker=server.url) as fleet:
        from celery_capacity.models import Advert

        advert = Advert("w1@north", "north", (fleet.queue,), frozenset({"record"}), 2, 600.0, 600.0)
        fleet.registry.register(advert)
        server.stop()
        for _ in range(5):
            with pytest.raises(OperationalError):
                fleet.tasks["record"].apply_async(kwargs={"key": key}, retry=False)
            assert fleet.held() == {}


def test_a_publish_that_is_retried_past_the_deadline_runs_once(fleets: Fleets, tmp_path: Path, key: str) -> None:
    with (
        RedisServer(tmp_path / "broker") as server,
        fleets.own("redis", ONE, CONF, broker=server.url) as fleet,
        Sampler(fleet.registry),
    ):
        fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-before"})
        fleet.ended(f"{key}-before", 1)
        server.pause()
        sender = Thread(target=fleet.tasks["record"].apply_async, kwargs={"kwargs": {"key": f"{key}-late"}})
        sender.start()
        try:
            fleet.wait(lambda: fleet.held(), 10, "the reservation")
            fleet.wait(lambda: not fleet.held(), 10, "its deadline")
        finally:
            server.resume()
            sender.join(30)
        assert len(fleet.ended(f"{key}-late", 1)) == 1
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")
        assert fleet.journal.executions_by_key()[f"{key}-late"] == 1
        fleet.assert_takes(2)
