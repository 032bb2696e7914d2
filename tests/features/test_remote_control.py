"""``celery inspect`` and ``celery control``: what they show is true, what they do has its effect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery.app.control import Inspect
from kombu import Exchange
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import unique

TWO = {"w1@north": {}, "w2@south": {}}
SHORT = {"capacity_lease_seconds": 1.5, "capacity_lapse_seconds": 3, "capacity_sweep_seconds": 0.5}


@pytest.fixture(params=["redis", "rabbitmq"])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, TWO) as fleet:
        yield fleet


def ask(fleet: Fleet, *workers: str) -> Inspect:
    """Answers of these workers; it waits no longer than for the last of them."""
    names = list(workers or TWO)
    inspect: Inspect = fleet.control.inspect(names, timeout=10, limit=len(names))
    return inspect


def told(answers: Any) -> set[str]:
    return {text for answer in answers for reply in answer.values() for text in reply.values()}


class TestInspect:
    def test_a_full_fleet_answers(self, fleet: Fleet) -> None:
        """Remote control needs no slot."""
        gate = fleet.fill(4)
        for _ in range(3):
            fleet.tasks["record"].delay(key=f"waits-{gate}")
        assert ask(fleet).ping() == {name: {"ok": "pong"} for name in TWO}
        active = ask(fleet).active()
        assert {name: len(tasks) for name, tasks in active.items()} == dict.fromkeys(TWO, 2)
        running = {task["id"] for tasks in active.values() for task in tasks}
        assert running == {run.id for run in fleet.runs(gate)}
        # Nothing is taken that cannot run.
        assert [task for tasks in ask(fleet).reserved().values() for task in tasks if task["id"] not in running] == []
        fleet.journal.open_gate(gate)
        fleet.ended(f"waits-{gate}", 3)

    def test_active_says_where_a_task_came_from(self, fleet: Fleet, key: str) -> None:
        """The queue that the caller knows, and not the one of the worker."""
        gate = fleet.fill(1)
        (task,) = [task for tasks in ask(fleet).active().values() for task in tasks]
        assert task["delivery_info"]["routing_key"] == fleet.queue
        assert task["name"] == "hold"
        fleet.journal.open_gate(gate)

    def test_query_task(self, fleet: Fleet) -> None:
        gate = fleet.fill(1)
        (run,) = fleet.runs(gate)
        answer = ask(fleet, run.worker).query_task(run.id)
        assert answer[run.worker][run.id][0] == "active"
        fleet.journal.open_gate(gate)

    def test_scheduled(self, fleet: Fleet, key: str) -> None:
        sent = {fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{n}"}, countdown=5).id for n in range(4)}

        def scheduled() -> set[str]:
            return {entry["request"]["id"] for entries in ask(fleet).scheduled().values() for entry in entries}

        fleet.wait(lambda: scheduled() == sent, 4, "the tasks to be in the timers")
        assert fleet.held() == {}
        stats = ask(fleet).stats()
        assert sum(answer["capacity"]["delayed"] for answer in stats.values()) == 4
        assert len(fleet.ended(key, 4)) == 4

    def test_stats(self, fleet: Fleet) -> None:
        gate = fleet.fill(3)
        stats = ask(fleet).stats()
        for name, node in (("w1@north", "north"), ("w2@south", "south")):
            shown, view = stats[name]["capacity"], fleet.view(name)
            assert view is not None
            assert (shown["node"], shown["slots"], shown["epoch"]) == (node, 2, view.epoch)
            assert shown["held"] == view.held
            assert stats[name]["pool"]["max-concurrency"] == 2
        assert sum(answer["capacity"]["held"] for answer in stats.values()) == 3
        fleet.journal.open_gate(gate)

    def test_active_queues_names_the_queues_of_the_pool(self, fleet: Fleet) -> None:
        for name, queues in ask(fleet).active_queues().items():
            names = [queue["name"] for queue in queues]
            assert names == [fleet.queue, fleet.own_queue(name)]
            assert queues[0]["exchange"]["type"] == "direct"
            assert queues[0]["routing_key"] == fleet.queue

    def test_registered_and_report(self, fleet: Fleet) -> None:
        for tasks in ask(fleet).registered().values():
            assert {"record", "hold"} <= set(tasks)
        for answer in ask(fleet).report().values():
            assert "celery" in answer["ok"]


class TestControl:
    def test_rate_limit(self, fleet: Fleet, key: str) -> None:
        """What waits for its turn holds no slot."""
        answers = fleet.control.rate_limit("record", "12/m", reply=True, timeout=10, limit=2)
        assert told(answers) == {"new rate limit set successfully"}
        for number in range(4):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        # One of each worker.
        fleet.ended(key, 2)
        fleet.wait(lambda: not fleet.held() and not fleet.depth(fleet.queue), 4, "the others to wait without a slot")
        gate = fleet.fill(4)
        assert len(fleet.runs(key)) == 2
        fleet.journal.open_gate(gate)
        fleet.control.rate_limit("record", 0, reply=True, timeout=10, limit=2)
        # Those two have their turn already.
        assert len(fleet.ended(key, 4)) == 4

    def test_a_topic_queue_is_added_and_cancelled(self, fleet: Fleet, key: str) -> None:
        """Other kinds of queues: as Celery consumes them; and what is added shows in active_queues."""
        name, exchange = unique("added"), unique("exchange")
        fleet.control.add_consumer(
            name, exchange, "topic", "a.*", destination=["w1@north"], reply=True, timeout=10, limit=1
        )

        def shown() -> dict[str, bool]:
            return {
                worker: name in [queue["name"] for queue in queues]
                for worker, queues in ask(fleet).active_queues().items()
            }

        fleet.wait(lambda: shown() == {"w1@north": True, "w2@south": False}, 15, "the queue to be served by w1")
        fleet.wait(lambda: fleet.view("w1@north"), 10, "it to be registered")
        for number in range(3):
            fleet.tasks["record"].apply_async(
                kwargs={"key": f"{key}-{number}"},
                exchange=exchange,
                exchange_type="topic",
                routing_key="a.b",
                declare=[Exchange(exchange, "topic")],
            )
        assert {run.worker for run in fleet.ended(key, 3)} == {"w1@north"}
        fleet.control.cancel_consumer(name, destination=["w1@north"], reply=True, timeout=10, limit=1)
        fleet.wait(lambda: shown() == {"w1@north": False, "w2@south": False}, 15, "the queue to be left")
        fleet.wait(lambda: all(view.capacity for view in fleet.views()), 10, "both to be registered")

    def test_a_pool_is_restarted(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", {"w1@north": {}}, {"worker_pool_restarts": True}) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(2)
            told = fleet.control.pool_restart(reply=True, timeout=20, limit=1)
            assert told == [{"w1@north": {"ok": "reload started"}}]
            fleet.journal.open_gate(gate)
            assert [run.outcome for run in fleet.ended(gate, 2)] == ["returned"] * 2
            fleet.assert_takes(2)
            fleet.settle()


@pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_shutdown(fleets: Fleets, broker_kind: str, key: str) -> None:
    """What runs there ends, what waits goes to the others, and the worker is gone."""
    with fleets.own(broker_kind, TWO, SHORT) as fleet, Sampler(fleet.registry):
        gate = fleet.fill(4)
        for number in range(4):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        began = time.monotonic()
        fleet.control.shutdown(destination=["w2@south"])
        worker = fleet.workers["w2@south"]
        fleet.wait(lambda: getattr(fleet.view("w2@south"), "capacity", None) is None, 10, "it to offer no slots")
        fleet.journal.open_gate(gate)
        assert worker.wait(30) == 0
        assert time.monotonic() - began < 30
        assert {run.worker for run in fleet.ended(key, 4)} == {"w1@north"}
        assert [run.outcome for run in fleet.ended(gate, 4)] == ["returned"] * 4
        fleet.wait(lambda: [view.name for view in fleet.views()] == ["w1@north"], 10, "it to be gone")
        fleet.settle()
