"""Rates, time limits, late acknowledgement and priorities.

More of it: the acceptance tests of ends and of prefetching, and the fault tests of poison and of what is unacknowledged.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from celery.exceptions import TimeLimitExceeded
from celery.result import AsyncResult
from kombu import Queue
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import unique

CAPACITY = 2
ONE = {"w1@test": {"concurrency": CAPACITY}}
QUICK = ("--without-mingle", "--without-gossip")
SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 3,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
}


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, ONE) as fleet:
        yield fleet
        fleet.assert_takes(CAPACITY)


def state_of(fleet: Fleet, result: AsyncResult) -> str:
    fleet.wait(result.ready, 20, f"a result of {result.id}, which is {result.state}")
    return str(result.state)


class TestRates:
    def test_of_a_task_that_is_revoked_while_it_waits_for_its_turn(self, fleet: Fleet, key: str) -> None:
        fleet.control.rate_limit("record", "10/m", reply=True)
        try:
            first = fleet.tasks["record"].delay(key=f"{key}-0")
            waiting = [fleet.tasks["record"].delay(key=f"{key}-{number}") for number in range(1, 2)]
            assert state_of(fleet, first) == "SUCCESS"
            fleet.wait(lambda: not fleet.held() and not fleet.depth(fleet.queue), 10, "it to wait without a slot")
            fleet.control.revoke([result.id for result in waiting], reply=True)
            # It leaves when its turn comes, six seconds after the first; nobody waits for it.
            assert fleet.tasks["add"].delay(1, 2).get(timeout=10) == 3
            assert {state_of(fleet, result) for result in waiting} == {"REVOKED"}
            assert len(fleet.runs(key)) == 1
        finally:
            fleet.control.rate_limit("record", 0, reply=True)


class TestTimeLimits:
    def test_of_a_call(self, fleet: Fleet, key: str) -> None:
        """D6: the limits of apply_async reach the worker, and every slot is free again."""
        results = [fleet.tasks["sleep"].apply_async((60,), {}, time_limit=0.5, shadow=key) for _ in range(3 * CAPACITY)]
        assert {state_of(fleet, result) for result in results} == {"FAILURE"}
        assert {type(result.result) for result in results} == {TimeLimitExceeded}
        fleet.journal.note_dead()

    def test_of_a_greenlet(self, fleets: Fleets, key: str) -> None:
        with fleets.use("redis", {"w1@test": {"pool": "gevent", "concurrency": 2}}) as fleet:
            results = [fleet.tasks["hard"].delay(key=f"{key}-{number}") for number in range(4)]
            assert {state_of(fleet, result) for result in results} == {"FAILURE"}
            fleet.wait(lambda: not fleet.held(), 5, "the slots to be free")
            fleet.assert_takes(2)


class TestLateAcknowledgement:
    def test_a_child_that_is_lost(self, fleet: Fleet, key: str) -> None:
        """Without reject_on_worker_lost it has failed, and is acknowledged."""
        result = fleet.app.send_task("exit_child", kwargs={"key": key}, headers={"unused": 1})
        assert state_of(fleet, result) == "FAILURE"
        fleet.journal.note_dead()
        assert len(fleet.runs(key)) == 1

    def test_a_time_limit(self, fleet: Fleet, key: str) -> None:
        result = fleet.tasks["hold_late"].apply_async(kwargs={"gate": key, "key": key}, time_limit=0.5)
        assert state_of(fleet, result) == "FAILURE"
        fleet.journal.note_dead()
        assert len(fleet.runs(key)) == 1

    @pytest.mark.parametrize("name", ["fail_late", "reject", "ignore"])
    def test_more_ends_than_there_are_slots(self, fleet: Fleet, key: str, name: str) -> None:
        """D22."""
        for number in range(3 * CAPACITY):
            fleet.tasks[name].delay(key=f"{key}-{number}")
        fleet.ended(key, 3 * CAPACITY)
        fleet.settle()
        assert len(fleet.runs(key)) == 3 * CAPACITY

    @pytest.mark.parametrize("pool", ["prefork", "threads"])
    @pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
    def test_of_what_ends_during_a_warm_shutdown(self, fleets: Fleets, broker_kind: str, pool: str, key: str) -> None:
        """F9, F12, F13: what runs ends and is acknowledged, what waits has not begun, and nothing has failed."""
        with fleets.own(broker_kind, {"w1@test": {"pool": pool}}) as fleet, Sampler(fleet.registry):
            held = [fleet.tasks["hold_late"].delay(gate=key, key=f"{key}-{number}") for number in range(2)]
            fleet.started(key, 2)
            parked = [fleet.tasks["record_late"].delay(key=f"parked-{key}-{number}") for number in range(8)]
            worker = fleet.workers["w1@test"]
            worker.terminate()
            worker.wait_log("Warm shutdown", 10)
            fleet.journal.open_gate(key)
            worker.wait(30)
            assert fleet.left() == {fleet.queue: 8}

            worker.close()
            worker.start()

            assert {state_of(fleet, result) for result in held + parked} == {"SUCCESS"}
            assert set(fleet.journal.executions().values()) == {1}
            fleet.settle()


class TestRejected:
    """What a queue does with a rejected message, it does whichever way the message took to its worker."""

    def test_goes_to_the_dead_letter_exchange_of_its_queue(self, fleets: Fleets, key: str) -> None:
        queue, dead = unique("mortal"), unique("dead")
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
        conf = {"task_queues": {queue: {"exchange": queue, "routing_key": queue, "queue_arguments": arguments}}}
        with fleets.own("rabbitmq", {"w1@test": {"queues": [queue]}}, conf) as fleet, Sampler(fleet.registry):
            with fleet.app.connection_for_write() as connection:
                Queue(dead)(connection.default_channel).declare()
            straight = fleet.tasks["reject"].apply_async(kwargs={"key": f"{key}-straight"}, queue=queue)
            fleet.wait(lambda: fleet.depth(dead) == 1, 20, "the first dead letter")
            gate = fleet.fill(2, queue=queue)
            parked = fleet.tasks["fail_late"].apply_async(kwargs={"key": f"{key}-parked"}, queue=queue)
            pinned = fleet.tasks["reject"].apply_async(kwargs={"key": f"{key}-pinned"}, queue=queue, node="test")
            assert fleet.depth(queue) == fleet.depth(fleet.lot("test", queue)) == 1
            fleet.journal.open_gate(gate)

            fleet.wait(lambda: fleet.depth(dead) == 3, 20, "the dead letters")
            found = {}
            with fleet.app.connection_for_write() as connection:
                bound = Queue(dead)(connection.default_channel)
                while (message := bound.get()) is not None:
                    (death,) = message.headers["x-death"]
                    found[message.headers["id"]] = (death["reason"], death["queue"], "capacity" in message.headers)
                    message.ack()
            assert found[straight.id] == found[parked.id] == ("rejected", queue, False)
            assert found[pinned.id][:2] == ("rejected", queue)
            assert len(fleet.ended(key, 3)) == 3
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")


class TestDuplicates:
    @pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
    def test_a_task_that_has_succeeded_is_not_run_again(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        """worker_deduplicate_successful_tasks, of a message that was delivered before and moved since."""
        conf = {**SHORT, "worker_deduplicate_successful_tasks": True}
        with fleets.own(broker_kind, {"w1@north": {}, "w2@south": {}}, conf) as fleet, Sampler(fleet.registry):
            result = fleet.tasks["record_late"].apply_async(kwargs={"key": key}, node="north")
            assert result.get(timeout=20) == key
            # The same message once more, as one that was delivered before: pinned, so that it is moved on the way.
            busy = fleet.fill(2, node="north")
            again = {"capacity": {"queue": fleet.queue, "node": "north", "redelivered": True}}
            fleet.app.send_task("record_late", kwargs={"key": key}, task_id=result.id, countdown=0)
            fleet.publish_raw(
                [[], {"key": key}, {}],
                headers={"task": "record_late", "id": result.id, "lang": "py", "root_id": None, **again},
            )
            fleet.ended(key, 2)
            fleet.journal.open_gate(busy)
            fleet.settle()
            # The one that was sent anew has run, as it should; the other one has not.
            assert len(fleet.runs(key)) == 2
            logs = fleet.workers["w1@north"].logs() + fleet.workers["w2@south"].logs()
            assert "already completed successfully" in logs


class TestPriorities:
    @pytest.mark.parametrize("pool", ["prefork", "threads"])
    def test_of_a_queue_of_rabbitmq(self, fleets: Fleets, key: str, pool: str) -> None:
        """I5, I6: parked and sent straight, the number stays with the task."""
        conf = {"task_queue_max_priority": 9}
        with fleets.own("rabbitmq", {"w1@test": {"concurrency": 1, "pool": pool}}, conf) as fleet:
            gate = fleet.fill(1)
            for number, priority in enumerate((0, 3, 9, 6, 3)):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{priority}-{number}"}, priority=priority)
            fleet.journal.open_gate(gate)
            order = [run.key.removeprefix(f"{key}-") for run in fleet.ended(key, 5)]
            assert order == ["9-2", "6-3", "3-1", "3-4", "0-0"]
            fleet.settle()


class TestDelayedWork:
    def test_an_autoscaled_pool_grows_for_it(self, fleets: Fleets, key: str) -> None:
        """Celery's autoscaler looks at what is received, and at the rest only every 30 s."""
        worker = {"args": ("--autoscale", "3,1", *QUICK)}
        with fleets.own("redis", {"w1@test": worker}) as fleet, Sampler(fleet.registry):
            for number in range(3):
                fleet.tasks["hold"].apply_async(kwargs={"gate": key, "key": f"{key}-{number}"}, countdown=4)
            fleet.wait(lambda: not fleet.depth(fleet.queue), 3.5, "them to be received before they are due")
            fleet.started(key, 3, 15)
            fleet.journal.open_gate(key)
            fleet.settle()


class TestProcesses:
    def test_that_end_after_some_tasks(self, fleets: Fleets, key: str) -> None:
        """D25."""
        worker = {"concurrency": 4, "args": ("--max-tasks-per-child", "10", *QUICK)}
        with fleets.use("redis", {"w1@test": worker}) as fleet:
            for number in range(200):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            runs = fleet.ended(key, 200, 60)
            assert len({run.pid for run in runs}) >= 20
            assert set(Counter(run.id for run in runs).values()) == {1}
            fleet.assert_takes(4)

    def test_a_task_that_hangs_keeps_its_slot(self, fleets: Fleets, key: str) -> None:
        """D27: for longer than the lapse, and nobody takes it for dead."""
        with fleets.own("redis", {"w1@test": {"concurrency": 1}}, SHORT) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(1)
            before = fleet.view("w1@test")
            fleet.tasks["record"].delay(key=key)
            fleet.wait(lambda: time.monotonic() > fleet.runs(gate)[0].start + 5, 10, "longer than the lapse")
            after = fleet.view("w1@test")
            assert before is not None
            assert after is not None
            assert (after.epoch, after.committed) == (before.epoch, 1)
            assert fleet.runs(key) == []
            inspected = fleet.control.inspect(["w1@test"]).active()
            assert [task["args"] for task in inspected["w1@test"]] == [[]]
            fleet.journal.open_gate(gate)
            fleet.ended(key, 1)
            fleet.settle()


def test_a_queue_that_is_cancelled_and_added_again_and_again(fleet: Fleet, key: str) -> None:
    """D23: what arrives in between is neither forgotten in the worker nor run twice."""
    cancel, add = (getattr(fleet.control, name) for name in ("cancel_consumer", "add_consumer"))
    for turn in range(6):
        cancel(fleet.queue)
        for number in range(20):
            fleet.tasks["record"].delay(key=f"{key}-{turn}-{number}")
        add(fleet.queue)
    fleet.ended(key, 120, 60)
    assert set(Counter(run.key for run in fleet.runs(key)).values()) == {1}
    fleet.wait(lambda: any(fleet.queue in view.queues for view in fleet.views()), 20, "the queue to be served")
