"""A task that kills whoever runs it does not go round for ever, and takes nothing else with it."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import WorkerLostError
from support.fleet import Fleet, Fleets
from support.sampling import Sampler

from celery_capacity.naming import dead_letter_queue

SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 3,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
}
THREE = {name: {} for name in ("w1@north", "w2@south", "w3@east")}
BROKERS = ["redis", "rabbitmq"]


def dead_letters(fleet: Fleet) -> list[Any]:
    """The messages in the dead-letter queue, which are left there."""
    found = []
    with fleet.app.connection_for_write() as connection, connection.channel() as channel:
        while message := channel.basic_get(dead_letter_queue(fleet.namespace, fleet.queue)):
            found.append(message)
    return found


@pytest.mark.parametrize("broker_kind", BROKERS)
def test_one_that_kills_its_worker(fleets: Fleets, broker_kind: str, key: str) -> None:
    conf = {**SHORT, "capacity_max_deliveries": 2}
    with fleets.own(broker_kind, THREE, conf) as fleet, Sampler(fleet.registry):
        healthy = [fleet.tasks["record_late"].delay(key=f"{key}-{n}", seconds=0.3) for n in range(10)]
        result = fleet.tasks["poison"].apply_async(kwargs={"key": f"poison-{key}"})
        healthy += [fleet.tasks["record_late"].delay(key=f"{key}-{n}", seconds=0.3) for n in range(10, 20)]

        with pytest.raises(WorkerLostError, match="delivered 2 times, and its worker"):
            result.get(timeout=60)

        assert [one.get(timeout=30) for one in healthy] == [f"{key}-{n}" for n in range(20)]
        fleet.journal.note_dead()
        assert len(fleet.runs(f"poison-{key}")) == 2
        alive = [worker for worker in fleet.workers.values() if worker.running]
        assert len(alive) == 1
        assert alive[0].logs().count("was delivered 2 times, and its worker") == 1
        (letter,) = dead_letters(fleet)
        assert letter.headers["id"] == result.id
        story = letter.headers["capacity"]["dead_letter"]
        assert story.pop("at").endswith("Z")
        assert story.pop("reason").startswith("delivered 2 times")
        assert story == {
            "task": "poison",
            "task_id": result.id,
            "queue": fleet.queue,
            "deliveries": 3,
            "worker": alive[0].nodename,
        }
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")
        fleet.assert_takes(2)


@pytest.mark.parametrize("broker_kind", BROKERS)
def test_one_that_kills_its_process(fleets: Fleets, broker_kind: str, key: str) -> None:
    with fleets.own(broker_kind, {"w1@north": {}}, SHORT) as fleet, Sampler(fleet.registry):
        result = fleet.tasks["poison_child"].delay(key=f"poison-{key}")
        healthy = [fleet.tasks["record"].delay(key=f"{key}-{n}", seconds=0.1) for n in range(20)]
        with pytest.raises(WorkerLostError, match="delivered 3 times, and its worker"):
            result.get(timeout=60)
        assert [one.get(timeout=30) for one in healthy] == [f"{key}-{n}" for n in range(20)]
        fleet.journal.note_dead()
        assert len(fleet.runs(f"poison-{key}")) == 3
        assert len(dead_letters(fleet)) == 1
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")


def test_an_end_is_an_end(fleets: Fleets, key: str) -> None:
    """Rejected and delivered again as often as it likes."""
    with fleets.own("redis", {"w1@north": {}}, SHORT) as fleet, Sampler(fleet.registry):
        fleet.tasks["reject_until"].delay(gate=key, key=key)
        fleet.started(key, 8, 30)
        fleet.journal.open_gate(key)
        fleet.settle()
        assert dead_letters(fleet) == []


def test_zero_is_for_ever(fleets: Fleets, key: str) -> None:
    with fleets.own("redis", {"w1@north": {}}, {**SHORT, "capacity_max_deliveries": 0}) as fleet:
        fleet.tasks["poison_child"].delay(key=key)
        fleet.started(key, 6, 60)
        assert dead_letters(fleet) == []
