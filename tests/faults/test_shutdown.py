"""Workers that go and come again under load: nothing is lost, nothing runs twice, and nobody sends to who is leaving."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from celery import signals
from support.fleet import Fleet, Fleets
from support.sampling import Sampler

TWO = {"w1@north": {}, "w2@south": {}}
THREE = {**TWO, "w3@east": {}}
SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 3,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
}


class Sender(threading.Thread):
    """Sends early- and late-acknowledged tasks in turn, and notes where each goes."""

    def __init__(self, fleet: Fleet, key: str, pause_seconds: float = 0.03) -> None:
        super().__init__(daemon=True)
        self.fleet, self.key, self.pause_seconds = fleet, key, pause_seconds
        self.sent = 0
        #: When the call began, and the queue that it was published to.
        self.published: list[tuple[float, str]] = []
        self._began = 0.0
        self._ending = threading.Event()

    def run(self) -> None:
        signals.after_task_publish.connect(self._note)
        while not self._ending.is_set():
            self._began = time.monotonic()
            name = "record_late" if self.sent % 2 else "record"
            self.fleet.tasks[name].delay(key=f"{self.key}-{self.sent}", seconds=0.05)
            self.sent += 1
            self._ending.wait(self.pause_seconds)

    def _note(self, routing_key: Any = None, **kwargs: Any) -> None:
        self.published.append((self._began, routing_key))

    def __enter__(self) -> Sender:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.set()
        self.join(30)
        signals.after_task_publish.disconnect(self._note)


@pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_a_rolling_restart_of_three_workers(fleets: Fleets, broker_kind: str, key: str) -> None:
    with fleets.own(broker_kind, THREE, SHORT) as fleet, Sampler(fleet.registry):
        away: list[tuple[str, float, float]] = []
        with Sender(fleet, key) as sender:
            for name, worker in fleet.workers.items():
                worker.terminate()

                def offers_nothing(name: str = name) -> bool:
                    view = fleet.view(name)
                    return view is None or view.capacity is None

                fleet.wait(offers_nothing, 30, f"{name} to offer no slots")
                gone_at = time.monotonic()
                worker.wait(60)
                worker.close()
                away.append((name, gone_at, time.monotonic()))
                worker.start()
                fleet.wait_ready()
        keys = {f"{key}-{number}" for number in range(sender.sent)}
        fleet.wait(lambda: {run.key for run in fleet.runs(key) if not run.open} == keys, 60, "every task to have run")
        fleet.settle()
        assert sender.sent > 50
        assert set(fleet.journal.executions_by_key().values()) == {1}
        assert {run.outcome for run in fleet.runs(key)} == {"returned"}
        queues = {queue for _, queue in sender.published}
        for name, gone_at, closed_at in away:
            own = fleet.own_queue(name)
            assert own in queues, "it was sent to before and after"
            assert [at for at, queue in sender.published if queue == own and gone_at < at < closed_at] == []


def test_two_signals_do_no_more_than_one(fleets: Fleets, key: str) -> None:
    with fleets.own("redis", TWO, SHORT) as fleet, Sampler(fleet.registry):
        gate = fleet.fill(4)
        for number in range(6):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        worker = fleet.workers["w1@north"]
        worker.terminate()
        worker.wait_log("Warm shutdown", 20)
        worker.terminate()
        fleet.journal.open_gate(gate)
        assert worker.wait(60) == 0
        assert len(fleet.ended(key, 6)) == 6
        assert {run.outcome for run in fleet.ended(gate, 4)} == {"returned"}
        fleet.settle()
        assert set(fleet.journal.executions().values()) == {1}


def test_the_queue_of_one_that_is_gone_for_good_is_removed_and_a_message_never(fleets: Fleets, key: str) -> None:
    with fleets.own("rabbitmq", TWO, SHORT) as fleet, Sampler(fleet.registry):
        gone, own = fleet.workers["w1@north"], fleet.own_queue("w1@north")
        gone.kill()
        # On its way while the worker died, and found by whoever cleans up; the other is full meanwhile.
        gate = fleet.fill(2, node="south")
        for number in range(3):
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"})
        fleet.wait(lambda: not fleet.exists(own), 40, "the queue to be removed")
        assert fleet.runs(key) == []
        fleet.journal.open_gate(gate)
        assert {run.worker for run in fleet.ended(key, 3, 40)} == {"w2@south"}
        fleet.settle(20)
        assert set(fleet.journal.executions().values()) == {1}
        fleet.workers["w2@south"].terminate(60)
        fleet.wait(lambda: not fleet.exists(fleet.own_queue("w2@south")), 20, "the queue of the last one, too")
