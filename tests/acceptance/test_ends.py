"""Every end of a task gives its slot back: at once, and not by a sweep or a heartbeat.

Each test ends with as many tasks at a time as the worker has slots, and with a quiet fleet (``Fleets.use``).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.result import AsyncResult
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import unique
from support.tasks_app import EXTRA_ENV

from celery_capacity.naming import unknown_lot

CAPACITY = 2
ONE = {"w1@test": {"concurrency": CAPACITY}}
MATRIX = ["redis", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("rabbitmq", "rabbitmq-quorum"))]


@pytest.fixture(params=MATRIX)
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, ONE) as fleet:
        yield fleet
        fleet.assert_takes(CAPACITY)


def state_of(fleet: Fleet, result: AsyncResult, limit: float = 20.0) -> str:
    fleet.wait(result.ready, limit, f"a result of {result.id}, which is {result.state}")
    return str(result.state)


class TestOfTheTaskItself:
    def test_success(self, fleet: Fleet, key: str) -> None:
        assert fleet.tasks["record"].delay(key=key).get(timeout=20) == key

    def test_failure(self, fleet: Fleet, key: str) -> None:
        assert state_of(fleet, fleet.tasks["fail"].delay(key=key)) == "FAILURE"

    @pytest.mark.parametrize("countdown", [0, 0.5])
    def test_retry(self, fleet: Fleet, key: str, countdown: float) -> None:
        result = fleet.tasks["retry_n"].delay(2, countdown=countdown, key=key)

        assert result.get(timeout=30) == 2
        runs = fleet.ended(key, 3)
        assert [(run.retries, run.outcome) for run in runs] == [(0, "Retry"), (1, "Retry"), (2, "returned")]
        # The request was given back its origin, which a retry copies.
        assert {run.queue for run in runs} == {fleet.queue}

    def test_ignore(self, fleet: Fleet, key: str) -> None:
        fleet.tasks["ignore"].delay(key=key)
        assert [run.outcome for run in fleet.ended(key, 1)] == ["Ignore"]

    def test_reject(self, fleet: Fleet, key: str) -> None:
        fleet.tasks["reject"].delay(key=key)
        assert [run.outcome for run in fleet.ended(key, 1)] == ["Reject"]

    def test_reject_and_requeue(self, fleet: Fleet, key: str) -> None:
        fleet.tasks["reject_until"].delay(gate=key, key=key)
        fleet.ended(key, 3)
        fleet.journal.open_gate(key)
        fleet.wait(lambda: fleet.runs(key)[-1].outcome == "returned", 20, "the last run")

    def test_a_failure_that_is_not_acknowledged(self, fleet: Fleet, key: str) -> None:
        for number in range(3):
            fleet.tasks["fail_late"].delay(key=f"{key}-{number}")
        assert [run.outcome for run in fleet.ended(key, 3)] == ["RuntimeError"] * 3

    def test_a_task_that_is_replaced(self, fleet: Fleet, key: str) -> None:
        fleet.tasks["replaced"].delay(key=key)
        runs = fleet.ended(key, 2)
        assert [run.task for run in runs] == ["replaced", "record"]
        assert {run.queue for run in runs} == {fleet.queue}


class TestRevoked:
    def test_before_it_is_received(self, fleet: Fleet, key: str) -> None:
        task_id = unique("revoked")
        fleet.control.revoke(task_id, reply=True)
        result = fleet.tasks["record"].apply_async(kwargs={"key": key}, task_id=task_id)

        assert state_of(fleet, result) == "REVOKED"
        assert fleet.runs(key) == []

    def test_while_it_is_parked(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(CAPACITY)
        parked = [fleet.tasks["record"].delay(key=f"{key}-{number}") for number in range(3)]
        fleet.control.revoke([parked[0].id, parked[2].id], reply=True)
        fleet.journal.open_gate(gate)

        assert [state_of(fleet, result) for result in parked] == ["REVOKED", "SUCCESS", "REVOKED"]
        assert fleet.journal.executions_by_key()[f"{key}-1"] == 1
        assert len(fleet.runs(key)) == 1

    def test_while_it_waits_for_its_time(self, fleet: Fleet, key: str) -> None:
        results = [
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, countdown=4) for number in range(6)
        ]
        fleet.wait(lambda: not fleet.depth(fleet.queue), 3, "the worker to have taken them")
        fleet.control.revoke([result.id for result in results], reply=True)

        fleet.wait(lambda: not fleet.held(), 3, "no slot to be held")
        assert {state_of(fleet, result) for result in results} == {"REVOKED"}
        assert fleet.runs(key) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_while_it_runs_several_in_a_row(self, fleet: Fleet, key: str, number: signal.Signals) -> None:
        for turn in range(3):
            results = [fleet.tasks["hold"].delay(gate=key, key=f"{key}-{turn}-{index}") for index in range(CAPACITY)]
            fleet.started(f"{key}-{turn}", CAPACITY)
            fleet.control.revoke([result.id for result in results], terminate=True, signal=number.name)
            assert {state_of(fleet, result) for result in results} == {"REVOKED"}
            fleet.journal.note_dead()

    def test_when_it_has_ended_already(self, fleet: Fleet, key: str) -> None:
        results = [fleet.tasks["record"].delay(key=f"{key}-{number}") for number in range(6)]
        fleet.ended(key, 6)
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")

        fleet.control.revoke([result.id for result in results], reply=True)

        view = fleet.view("w1@test")
        assert view is not None
        assert view.free == CAPACITY


class TestExpired:
    def test_while_it_is_parked(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(CAPACITY)
        sent = time.monotonic()
        parked = [fleet.tasks["record"].apply_async(kwargs={"key": key}, expires=1) for _ in range(4)]
        fleet.wait(lambda: time.monotonic() > sent + 1.2, 5, "the tasks to expire")
        fresh = fleet.tasks["record"].delay(key=f"fresh-{key}")
        fleet.journal.open_gate(gate)

        assert fresh.get(timeout=20) == f"fresh-{key}"
        assert fleet.runs(key) == []
        if fleet.broker.startswith("redis"):
            # RabbitMQ drops an expired message by itself, and then nobody is told.
            assert {state_of(fleet, result) for result in parked} == {"REVOKED"}


class TestTimeLimits:
    def test_soft(self, fleet: Fleet, key: str) -> None:
        result = fleet.tasks["soft"].delay(key=key)
        assert state_of(fleet, result) == "FAILURE"
        assert [run.outcome for run in fleet.ended(key, 1)] == ["SoftTimeLimitExceeded"]

    def test_hard(self, fleet: Fleet, key: str) -> None:
        results = [fleet.tasks["hard"].delay(key=f"{key}-{number}") for number in range(2 * CAPACITY)]
        assert {state_of(fleet, result, 40) for result in results} == {"FAILURE"}
        assert {type(result.result) for result in results} == {TimeLimitExceeded}
        fleet.journal.note_dead()


class TestLostProcesses:
    def test_a_child_that_is_gone(self, fleet: Fleet, key: str) -> None:
        results = [fleet.tasks["exit_child"].delay(key=f"{key}-{number}") for number in range(2 * CAPACITY)]
        assert {state_of(fleet, result, 40) for result in results} == {"FAILURE"}
        assert {type(result.result) for result in results} == {WorkerLostError}
        fleet.journal.note_dead()


class TestMessagesThatAreNoTasks:
    """Celery logs and drops them; the slot that they were fetched with comes free."""

    MESSAGES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("no task at all", {"hello": "world"}, {}),
        ("not what it says it is", b"{not json", {"content_type": "application/json", "content_encoding": "utf-8"}),
        ("of a forbidden kind", b"\x80", {"content_type": "application/x-python-serialize"}),
        (
            "a task with a body that makes no sense",
            "nonsense",
            {"headers": {"task": "record", "id": "bad-1", "lang": "py", "root_id": None, "parent_id": None}},
        ),
        (
            "a task with arguments that are none",
            [1, 2, 3],
            {"headers": {"task": "record", "id": "bad-2", "lang": "py", "root_id": None, "parent_id": None}},
        ),
    )

    @pytest.mark.parametrize("to_own_queue", [False, True], ids=["lot", "own queue"])
    @pytest.mark.parametrize(("body", "options"), [m[1:] for m in MESSAGES], ids=[m[0] for m in MESSAGES])
    def test_dropped(self, fleet: Fleet, body: Any, options: dict[str, Any], to_own_queue: bool) -> None:
        target = fleet.own_queue("w1@test") if to_own_queue else fleet.queue
        for _ in range(3):
            fleet.publish_raw(body, routing_key=target, **options)

        fleet.wait(lambda: not fleet.left(), 20, "the messages to be gone")


def test_a_message_that_comes_twice(fleet: Fleet, key: str) -> None:
    task_id = unique("twice")
    for _ in range(2):
        fleet.tasks["record"].apply_async(kwargs={"key": key, "seconds": 0.3}, task_id=task_id)
    assert len(fleet.ended(key, 2)) == 2


def test_tasks_that_share_one_eta_start_as_slots_come_free(fleet: Fleet, key: str) -> None:
    eta = datetime.now(timezone.utc) + timedelta(seconds=2)
    for number in range(6):
        fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}", "seconds": 0.3}, eta=eta)

    runs = fleet.ended(key, 6)

    assert len(runs) == 6
    assert fleet.max_parallel(key) == CAPACITY


def test_processes_that_live_for_one_task(fleets: Fleets, key: str) -> None:
    args = ("--max-tasks-per-child", "1", "--without-mingle", "--without-gossip")
    with fleets.use("redis", {"w1@test": {"args": args}}) as fleet:
        for number in range(8):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        runs = fleet.ended(key, 8)
        assert len({run.pid for run in runs}) == 8
        results = [fleet.tasks["hold"].delay(gate=key, key=f"{key}-held-{number}") for number in range(CAPACITY)]
        fleet.started(f"{key}-held", CAPACITY)
        fleet.control.revoke([result.id for result in results], terminate=True)
        assert {state_of(fleet, result) for result in results} == {"REVOKED"}
        fleet.journal.note_dead()
        fleet.assert_takes(CAPACITY)


class TestTasksThatWaitInTheWorker:
    """They hold no slot, and stand in nobody's way."""

    @pytest.mark.parametrize("broker_kind", ["redis", "rabbitmq", "rabbitmq-quorum"])
    def test_for_their_time(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, ONE) as fleet, Sampler(fleet.registry):
            for number in range(3 * CAPACITY):
                fleet.tasks["record"].apply_async(kwargs={"key": f"later-{key}-{number}"}, countdown=3600)

            assert fleet.tasks["record"].delay(key=key).get(timeout=10) == key
            fleet.assert_takes(CAPACITY)

            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert fleet.complaints() == []

    def test_for_their_rate(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", ONE) as fleet, Sampler(fleet.registry):
            for number in range(10):
                fleet.tasks["rated"].delay(key=f"rated-{key}-{number}")
            fleet.ended(f"rated-{key}", 1)

            assert fleet.tasks["record"].delay(key=key).get(timeout=10) == key
            fleet.assert_takes(CAPACITY)

            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert len(fleet.runs(f"rated-{key}")) == 1
            assert fleet.complaints() == []


def test_a_task_that_nobody_knows_waits_for_a_worker_that_does(fleets: Fleets, key: str) -> None:
    with fleets.own("redis", ONE) as fleet, Sampler(fleet.registry):
        fleet.app.send_task("only.elsewhere", kwargs={"key": key})
        lot = unknown_lot(fleet.namespace, fleet.queue)
        fleet.wait(lambda: fleet.depth(lot) == 1, 20, "the task to be in the lot of unknown tasks")
        fleet.assert_takes(CAPACITY)

        fleet.start("w2@test", env={EXTRA_ENV: "only.elsewhere"}, conf={})

        assert [run.worker for run in fleet.ended(key, 1, 60)] == ["w2@test"]
        fleet.settle()
