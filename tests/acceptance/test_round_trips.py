"""What a task costs: how often the registry is asked, and how much memory the plugin takes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import redis
from support.fleet import Fleet, Fleets
from support.servers import RedisServer

#: Heartbeats and looks at empty lots during the test.
QUIET = {"capacity_heartbeat_seconds": 7.0, "capacity_poll_seconds": 5.0, "capacity_sweep_seconds": 60.0}
TASKS = 40


def _calls(server: RedisServer) -> int:
    """How many scripts the registry has run; nothing else on this server uses scripts."""
    client = redis.Redis.from_url(server.url)
    try:
        return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))
    finally:
        client.close()


def _one_after_the_other(fleet: Fleet, key: str) -> None:
    for number in range(TASKS):
        fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"})
        fleet.ended(f"{key}-{number}", 1)


def test_a_worker_that_is_not_full_asks_twice_for_each_task(fleets: Fleets, tmp_path: Path, key: str) -> None:
    with (
        RedisServer(tmp_path / "registry") as server,
        fleets.own("redis", {"w1@north": {"concurrency": 4}}, QUIET, registry=server.url) as fleet,
    ):
        _one_after_the_other(fleet, f"{key}-warm")
        before = _calls(server)
        _one_after_the_other(fleet, key)
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
        asked = _calls(server) - before
        # One of the three is the producer's.  The rest are heartbeats, and this test's own looks.
        assert 3 * TASKS <= asked <= 3 * TASKS + 15


def test_a_full_worker_asks_once_for_each_task(fleets: Fleets, tmp_path: Path, key: str) -> None:
    with (
        RedisServer(tmp_path / "registry") as server,
        fleets.own("redis", {"w1@north": {"concurrency": 1}}, QUIET, registry=server.url) as fleet,
    ):
        gate = fleet.fill(1)
        for number in range(TASKS):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": 0.12})
        before = _calls(server)
        fleet.journal.open_gate(gate)
        fleet.ended(key, TASKS)
        asked = _calls(server) - before
        assert TASKS - 1 <= asked <= TASKS + 10


_GROWTH = """
    import sys, celery, celery.apps.worker, kombu.transport.redis, redis
    from celery import Celery
    import psutil
    app = Celery("footprint", broker="redis://")
    if sys.argv[1] == "capacity":
        import celery_capacity
        app.conf.capacity_registry = "redis://"
        celery_capacity.install(app)
        app.amqp.send_task_message
        app.capacity.registry
        import celery_capacity.worker.steps
    print(psutil.Process().memory_info().rss)
"""


def _rss(which: str) -> int:
    code = textwrap.dedent(_GROWTH)
    return int(subprocess.run([sys.executable, "-c", code, which], capture_output=True, check=True, text=True).stdout)


def test_a_process_grows_by_at_most_15_mib() -> None:
    growth = min(_rss("capacity") for _ in range(3)) - min(_rss("plain") for _ in range(3))
    assert 0 < growth <= 15 * 2**20, f"{growth / 2**20:.1f} MiB"
