"""Brokers that cut connections, and queues that are taken away."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import RabbitServer, RedisServer, free_port, sentinel_of

TWO = {"w1@north": {}, "w2@south": {}}
CONF = {"capacity_reservation_seconds": 2, "capacity_sweep_seconds": 0.5}


@pytest.mark.parametrize("broker_kind", ["redis", "rabbitmq"])
def test_a_connection_that_is_cut_three_times(fleets: Fleets, tmp_path: Path, broker_kind: str, key: str) -> None:
    server = RedisServer(tmp_path / "broker") if broker_kind == "redis" else RabbitServer(tmp_path / "broker")
    with server, fleets.own(broker_kind, TWO, CONF, broker=server.url) as fleet, Sampler(fleet.registry):
        sent = 0
        for cut in range(3):
            for _ in range(20):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{sent}", "seconds": 0.05})
                sent += 1
            # In the middle of connecting, Kombu's client for Redis makes up for a lost connection without a word.
            if isinstance(server, RedisServer):
                fleet.wait(partial(_waiting, server, 2), 30, "both workers to wait for messages")
            _cut(server)
            fleet.wait(partial(_all_connected, fleet, cut + 2), 60, "the workers to connect again")
        fleet.wait(lambda: len({run.key for run in fleet.runs(key)}) == sent, 60, "every task to have run")
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 30, "a quiet fleet")
        # Everything is there again, once.
        fleet.assert_takes(4)
        assert fleet.max_parallel(worker="w1@north") <= 2
        assert fleet.max_parallel(worker="w2@south") <= 2


def test_late_acknowledged_tasks_that_end_while_redis_is_away(fleets: Fleets, tmp_path: Path, key: str) -> None:
    """Nobody gives back what its worker still runs, and what it could not acknowledge at once it does later."""
    server = RedisServer(tmp_path / "broker", persistence=True)
    with server, fleets.own("redis", TWO, CONF, broker=server.url) as fleet, Sampler(fleet.registry):
        short, long = fleet.fill(2, name="hold_late"), fleet.fill(2, name="hold_late")
        server.stop()
        for worker in fleet.workers.values():
            worker.wait_log("(?i)connection to broker lost|connection error", 30)
        fleet.journal.open_gate(short)
        fleet.ended(short, 2)
        server.start()
        fleet.wait(partial(_all_connected, fleet, 2), 60, "the workers to connect again")
        fleet.wait(lambda: fleet.left() == {"unacked": 2}, 30, "those that ended to be acknowledged")
        fleet.journal.open_gate(long)
        fleet.ended(long, 2)
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 30, "a quiet fleet")
        fleet.assert_takes(4)
        fleet.settle()
        assert set(fleet.journal.executions_by_key().values()) == {1}


def test_a_master_that_sentinels_name(fleets: Fleets, tmp_path: Path, key: str) -> None:
    server = RedisServer(tmp_path / "broker", persistence=True)
    with server, sentinel_of(server, tmp_path) as port:
        conf = {**CONF, "broker_transport_options": {"master_name": "fleet"}}
        url = f"sentinel://127.0.0.1:{free_port()};sentinel://127.0.0.1:{port}"
        with fleets.own("redis", TWO, conf, broker=url) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(4, name="hold_late")
            fleet.tasks["record"].delay(key=key)
            with server.client() as client:
                assert (client.llen(fleet.queue), client.hlen("unacked")) == (1, 4)
            fleet.journal.open_gate(gate)
            fleet.ended(key, 1)
            fleet.settle()
            fleet.assert_takes(4)
            with server.client() as client:
                fleet.wait(lambda: client.hlen("unacked") == 0, 20, "all to be acknowledged")
            assert set(fleet.journal.executions_by_key().values()) == {1}


def _all_connected(fleet: Fleet, times: int) -> bool:
    return all(worker.logs().count("Connected to") >= times for worker in fleet.workers.values())


def _waiting(server: RedisServer, clients: int) -> bool:
    with server.client() as client:
        return int(client.info("clients")["blocked_clients"]) == clients


def _cut(server: RedisServer | RabbitServer) -> None:
    if isinstance(server, RedisServer):
        client = server.client()
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        client.close()
    else:
        server.ctl("close_all_connections", "cut by a test")


def test_an_own_queue_that_is_purged_costs_its_slots_until_the_deadline(fleets: Fleets, key: str) -> None:
    with fleets.own("rabbitmq", {"w1@north": {}}, CONF) as fleet, Sampler(fleet.registry):
        worker = fleet.workers["w1@north"]
        worker.stop()
        for number in range(2):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"})
        assert fleet.held() == {"w1@north": 2}
        with fleet.app.connection_for_write() as connection:
            connection.default_channel.queue_purge(fleet.own_queue("w1@north"))
        worker.cont()
        fleet.wait(lambda: not fleet.held(), 20, "the reservations to end")
        fleet.assert_takes(2)


def test_a_queue_that_is_deleted_under_the_workers(fleets: Fleets, key: str) -> None:
    with fleets.own("rabbitmq", TWO, CONF) as fleet, Sampler(fleet.registry):
        with fleet.app.connection_for_write() as connection:
            connection.default_channel.queue_delete(fleet.queue)
        for number in range(12):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": 0.05})
        assert len(fleet.ended(key, 12, 60)) == 12
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")
        fleet.assert_takes(4)


def test_an_own_queue_that_is_deleted_is_there_again(fleets: Fleets, key: str) -> None:
    with fleets.own("rabbitmq", {"w1@north": {}}, CONF) as fleet, Sampler(fleet.registry):
        with fleet.app.connection_for_write() as connection:
            connection.default_channel.queue_delete(fleet.own_queue("w1@north"))
        worker = fleet.workers["w1@north"]
        fleet.wait(lambda: worker.logs().count("Connected to") >= 2, 60, "the worker to set up its consumer again")
        fleet.wait_ready()
        fleet.assert_takes(2)
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")
