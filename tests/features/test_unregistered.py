"""A rolling deploy: a task that only new workers know is never discarded by an old one."""

from __future__ import annotations

import json
import re

import pytest
from celery import chain
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.tasks_app import EXTRA_ENV

from celery_capacity.naming import unknown_lot

OLD = {"w1@old": {}}
NEW = "new.task"
BROKERS = ["redis", "rabbitmq-quorum", pytest.param("rabbitmq", marks=pytest.mark.soak)]
SHORT = {"capacity_lease_seconds": 1.5, "capacity_lapse_seconds": 3, "capacity_sweep_seconds": 0.5}


def start_new(fleet: Fleet) -> None:
    fleet.start("w2@new", env={EXTRA_ENV: NEW})
    fleet.wait_ready()


def waiting(fleet: Fleet) -> int:
    return fleet.depth(unknown_lot(fleet.namespace, fleet.queue))


@pytest.mark.parametrize("broker_kind", BROKERS)
def test_producers_first(fleets: Fleets, broker_kind: str, key: str) -> None:
    """More than the fleet has slots, from producers with the plugin and without, due and not due, and in a chain."""
    with fleets.own(broker_kind, OLD, SHORT) as fleet, Sampler(fleet.registry):
        plain = fleet.build_app(plugin=False)
        for number in range(4):
            fleet.app.send_task(NEW, kwargs={"key": f"{key}-{number}"})
            plain.send_task(NEW, kwargs={"key": f"{key}-plain-{number}"})
        fleet.app.send_task(NEW, kwargs={"key": f"{key}-later"}, countdown=1)
        chain(fleet.tasks["record"].si(key=f"old-{key}"), fleet.app.signature(NEW, (), {"key": f"{key}-link"})).delay()
        fleet.wait(lambda: waiting(fleet) == 10, 20, "all of them to wait")
        # The old worker goes on with what it knows.
        fleet.assert_takes(2)
        assert fleet.runs(key) == []
        assert len(fleet.ended(f"old-{key}", 1)) == 1

        start_new(fleet)

        runs = fleet.ended(key, 10, 40)
        assert {run.worker for run in runs} == {"w2@new"}
        assert {run.queue for run in runs} == {fleet.queue}
        assert set(fleet.journal.executions().values()) == {1}
        assert {run.worker for run in fleet.runs(key) if run.retries} == set()
        fleet.settle()
        plain.close()


@pytest.mark.parametrize("broker_kind", ["rabbitmq", pytest.param("redis", marks=pytest.mark.soak)])
def test_half_of_the_fleet(fleets: Fleets, broker_kind: str, key: str) -> None:
    """It goes to the new half at once; if that is full it waits for it, though the old half is idle."""
    with fleets.own(broker_kind, {**OLD, "w2@new": {"env": {EXTRA_ENV: NEW}}}, SHORT) as fleet, Sampler(fleet.registry):
        for number in range(4):
            fleet.app.send_task(NEW, kwargs={"key": f"{key}-{number}"}).forget()
        assert {run.worker for run in fleet.ended(key, 4)} == {"w2@new"}
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")

        gate = fleet.fill(2, node="new")
        for number in range(4):
            fleet.app.send_task(NEW, kwargs={"key": f"full-{key}-{number}"})
        # Tasks that both know run on the old half meanwhile.
        for number in range(4):
            fleet.tasks["record"].delay(key=f"both-{key}-{number}")
        assert {run.worker for run in fleet.ended(f"both-{key}", 4)} == {"w1@old"}
        assert fleet.runs(f"full-{key}") == []
        fleet.journal.open_gate(gate)
        assert {run.worker for run in fleet.ended(f"full-{key}", 4)} == {"w2@new"}
        assert set(fleet.journal.executions().values()) == {1}
        fleet.settle()


def test_it_outlives_the_old_workers(fleets: Fleets, key: str) -> None:
    """The last old worker is stopped before the first new one starts; and everybody is told what waits."""
    with fleets.own("rabbitmq", OLD, SHORT) as fleet:
        for number in range(3):
            fleet.app.send_task(NEW, kwargs={"key": f"{key}-{number}"})
        fleet.wait(lambda: waiting(fleet) == 3, 20, "all of them to wait")
        old = fleet.workers["w1@old"]
        assert len(set(re.findall(r"task new.task\[(\S+)\] is not registered on w1@old", old.logs()))) == 3
        assert "Received unregistered task" not in old.logs()
        lots = [(lot.name, lot.queue) for lot in fleet.registry.overview().lots]
        assert (unknown_lot(fleet.namespace, fleet.queue), fleet.queue) in lots
        old.terminate(30)
        assert waiting(fleet) == 3

        start_new(fleet)

        assert {run.worker for run in fleet.ended(key, 3, 40)} == {"w2@new"}
        fleet.settle()


def test_two_builds_do_not_throw_it_to_and_fro(fleets: Fleets, key: str) -> None:
    """Nobody knows it: each old worker has it in its hands once, and then leaves it alone."""
    with fleets.own("redis", {"w1@old": {}, "w2@older": {"env": {EXTRA_ENV: "another.task"}}}, SHORT) as fleet:
        fleet.app.send_task(NEW, kwargs={"key": key})
        fleet.wait(lambda: waiting(fleet) == 1, 20, "it to wait")
        for _ in range(3):
            fleet.assert_takes(4)
        moved = [worker.logs().count("is not registered on") for worker in fleet.workers.values()]
        assert sum(moved) >= 1, json.dumps(moved)
        assert max(moved) <= 2, json.dumps(moved)
        start_new(fleet)
        assert {run.worker for run in fleet.ended(key, 1, 40)} == {"w2@new"}
        fleet.settle()
