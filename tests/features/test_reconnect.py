"""Connections to the broker that are cut, fall silent, or find that a queue is gone."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kombu import Exchange, Queue
from support.fleet import Fleet, Fleets
from support.proxy import Proxy
from support.sampling import Sampler
from support.servers import unique

SHORT = {"capacity_lease_seconds": 3, "capacity_lapse_seconds": 60, "capacity_sweep_seconds": 0.5}


def through(proxy: Proxy, fleet: Fleet, **options: Any) -> dict[str, Any]:
    return {"env": {"CELERY_BROKER_URL": proxy.through(fleet.broker)}, **options}


def back(fleet: Fleet, worker: str, times: int) -> None:
    """It has connected so many times, and offers its slots."""
    fleet.workers[worker].wait_log("(?s)" + ".*".join(["Connected to"] * times), 40)
    fleet.wait(lambda: getattr(fleet.view(worker), "capacity", None), 30, "its slots to be offered")


@pytest.mark.parametrize("broker_kind", ["rabbitmq-quorum", "redis"])
def test_all_slots_are_used_again(fleets: Fleets, broker_kind: str, key: str) -> None:
    """K1, K6, K7: with seven of eight running and many waiting, there is one free slot before and after."""
    with fleets.own(broker_kind, {}, SHORT) as fleet, Proxy.to(fleet.broker) as proxy:
        fleet.start("w1@north", **through(proxy, fleet, concurrency=8))
        fleet.wait_ready()
        with Sampler(fleet.registry) as sampler:
            gate = fleet.fill(7)
            for turn in range(2):
                assert proxy.cut() > 0
                back(fleet, "w1@north", 2 + turn)
                fleet.wait(lambda: fleet.held() == {"w1@north": 7}, 10, "seven slots to be held")
                waits = fleet.fill(1)
                for number in range(20):
                    fleet.tasks["record"].delay(key=f"{key}-{turn}-{number}")
                assert fleet.held() == {"w1@north": 8}
                assert fleet.depth(fleet.queue) == 20
                if turn == 1:
                    # Cut while it is full: it stays as full as it is.
                    proxy.cut()
                    back(fleet, "w1@north", 4)
                    assert fleet.held() == {"w1@north": 8}
                    assert fleet.runs(f"{key}-1") == []
                fleet.journal.open_gate(waits)
                assert len(fleet.ended(f"{key}-{turn}", 20)) == 20
            fleet.journal.open_gate(gate)
            assert [run.outcome for run in fleet.ended(gate, 7)] == ["returned"] * 7
            fleet.assert_takes(8)
        assert sampler.most_held == {"w1@north": 8}
        assert fleet.max_parallel() == 8
        assert set(fleet.journal.executions().values()) == {1}


@pytest.mark.parametrize("broker_kind", ["rabbitmq", pytest.param("redis", marks=pytest.mark.soak)])
def test_only_the_selected_queues_are_served(fleets: Fleets, broker_kind: str, key: str) -> None:
    """K4: what -Q did not select stays where it is, before and after."""
    chosen, other = unique("chosen"), unique("other")
    conf = {**SHORT, "task_queues": {chosen: {}, other: {}}}
    with fleets.own(broker_kind, {}, conf) as fleet, Proxy.to(fleet.broker) as proxy:
        fleet.start("w1@north", **through(proxy, fleet, queues=[chosen]))
        fleet.wait_ready()
        proxy.cut()
        back(fleet, "w1@north", 2)
        fleet.tasks["record"].apply_async(kwargs={"key": f"other-{key}"}, queue=other)
        for number in range(4):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, queue=chosen)
        assert len(fleet.ended(key, 4)) == 4
        assert fleet.depth(other) == 1
        assert fleet.runs(f"other-{key}") == []
        view = fleet.view("w1@north")
        assert view is not None
        assert set(view.queues) == {chosen, fleet.own_queue("w1@north")}


@pytest.mark.parametrize(
    ("broker_kind", "pool"),
    [
        ("redis", "threads"),
        ("rabbitmq", "prefork"),
        pytest.param("redis", "gevent", marks=pytest.mark.soak),
        pytest.param("rabbitmq", "gevent", marks=pytest.mark.soak),
    ],
)
def test_a_worker_whose_broker_is_silent_is_sent_nothing(fleets: Fleets, broker_kind: str, pool: str, key: str) -> None:
    """K8: its registry is there and its heart beats, so only its main loop knows."""
    with fleets.own(broker_kind, {"w2@south": {}}, SHORT) as fleet, Proxy.to(fleet.broker) as proxy:
        fleet.start("w1@north", **through(proxy, fleet, pool=pool))
        fleet.wait_ready()
        proxy.stall()
        fleet.wait(
            lambda: getattr(fleet.view("w1@north"), "capacity", 0) is None, 8, "the silent worker to offer no slots"
        )
        for number in range(8):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        assert {run.worker for run in fleet.ended(key, 8)} == {"w2@south"}
        assert "stalled" in dict(fleet.registry.overview().counters) or "has stood still" in (
            fleet.workers["w1@north"].logs()
        )
        assert fleet.depth(fleet.own_queue("w1@north")) == 0

        proxy.go_on()

        fleet.wait(lambda: getattr(fleet.view("w1@north"), "capacity", None) == 2, 20, "it to offer them again")
        fleet.assert_takes(4)
        assert set(fleet.journal.executions().values()) == {1}


def test_a_solo_worker_in_a_long_task_is_not_taken_for_a_silent_one(fleets: Fleets, key: str) -> None:
    conf = {**SHORT, "capacity_lease_seconds": 1.5}
    with fleets.own("redis", {"w1@north": {"pool": "solo", "concurrency": 1}}, conf) as fleet:
        gate = fleet.fill(1)
        (run,) = fleet.runs(gate)
        # Longer than it takes to notice a stall.
        fleet.tasks["record"].delay(key=key)
        states = set()

        def looked() -> bool:
            view = fleet.view("w1@north")
            assert view is not None
            states.add((view.state.value, view.capacity, view.held))
            return time.monotonic() > run.start + 5

        fleet.wait(looked, 15, "five seconds to pass")
        assert states == {("ready", 1, 1)}
        fleet.journal.open_gate(gate)
        fleet.ended(key, 1)
        assert "has stood still" not in fleet.workers["w1@north"].logs()


def test_a_retry_after_its_queue_and_exchange_were_deleted(fleets: Fleets, key: str) -> None:
    """K11: the worker declares them again, so that attempt 2 runs."""
    topic = unique("topic")
    queues: dict[str, Any] = {topic: {"exchange": f"x-{topic}", "exchange_type": "topic", "routing_key": topic}}
    conf = {**SHORT, "task_queues": queues}
    with fleets.own("rabbitmq", {}, conf) as fleet:
        fleet.start("w1@north", queues=[topic])
        fleet.wait_ready()
        result = fleet.tasks["retry_at_gate"].apply_async((key,), {"key": key}, queue=topic)
        fleet.started(key, 1)
        with fleet.app.connection_for_write() as connection, connection.channel() as channel:
            Queue(topic)(channel).delete()
            Exchange(f"x-{topic}", "topic")(channel).delete()
        fleet.workers["w1@north"].wait_log(f"queue {topic} is not there any more; it was declared again", 20)
        assert fleet.exists(topic)

        fleet.journal.open_gate(key)

        assert result.get(timeout=30) == 1
        assert [run.outcome for run in fleet.ended(key, 2)] == ["Retry", "returned"]


@pytest.mark.parametrize("broker_kind", ["rabbitmq", pytest.param("rabbitmq-quorum", marks=pytest.mark.soak)])
def test_a_queue_that_is_deleted_is_declared_again(fleets: Fleets, broker_kind: str, key: str) -> None:
    """As Celery does when the broker cancels its consumer."""
    with fleets.own(broker_kind, {"w1@north": {}}, SHORT) as fleet, Sampler(fleet.registry):
        with fleet.app.connection_for_write() as connection, connection.channel() as channel:
            Queue(fleet.queue)(channel).delete()
        fleet.wait(lambda: fleet.exists(fleet.queue), 10, "the queue to be there again")
        fleet.assert_takes(2)
        assert "fetch_failed" not in dict(fleet.registry.overview().counters)
        fleet.settle()
