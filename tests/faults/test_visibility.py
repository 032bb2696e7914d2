"""Tasks that take longer than Redis's visibility timeout: they are held, and not given to a second worker."""

from __future__ import annotations

import time

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler

TWO = {"w1@north": {}, "w2@south": {}}
SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 4,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
    "broker_transport_options": {"visibility_timeout": 3},
}


def _restored_by_kombu(fleet: Fleet) -> None:
    """What each worker does every ten seconds: give back what was delivered too long ago."""
    with fleet.app.connection_for_write() as connection:
        connection.default_channel.qos.restore_visible(interval=1)


def test_nobody_gets_what_somebody_runs(fleets: Fleets, key: str) -> None:
    """F2, F4, F5: running, waiting for its eta, or parked: each is delivered once."""
    with fleets.own("redis", TWO, SHORT) as fleet, Sampler(fleet.registry):
        later = 10.0
        for number in range(3):
            fleet.tasks["record_late"].apply_async(kwargs={"key": f"later-{key}-{number}"}, countdown=later)
        # They are fetched only by a worker that has a free slot.
        fleet.wait(lambda: fleet.left().get("unacked") == 3, 10, "what is not due to be received")
        gate = fleet.fill(4, name="hold_late")
        for number in range(6):
            fleet.tasks["record_late"].delay(key=f"{key}-{number}")
        until = time.monotonic() + later + 2
        while time.monotonic() < until:
            _restored_by_kombu(fleet)
            assert fleet.left().get("unacked", 0) <= 7
            time.sleep(0.5)
        assert fleet.held() == {"w1@north": 2, "w2@south": 2}
        assert len(fleet.runs(gate)) == 4
        fleet.journal.open_gate(gate)
        fleet.ended(key, 6)
        fleet.ended(f"later-{key}", 3)
        fleet.settle()
        assert set(fleet.journal.executions().values()) == {1}


def test_what_a_dead_worker_held_comes_back_all_the_same(fleets: Fleets, key: str) -> None:
    with fleets.own("redis", {"w1@north": {}}, SHORT) as fleet, Sampler(fleet.registry):
        gate = fleet.fill(2, name="hold_late")
        # For longer than the timeout, so that it was kept.
        until = time.monotonic() + 4
        while time.monotonic() < until:
            _restored_by_kombu(fleet)
            time.sleep(0.25)
        fleet.start("w2@south")
        fleet.wait_ready()
        fleet.workers["w1@north"].kill()
        assert [run.worker for run in fleet.started(gate, 4, 40)][2:] == ["w2@south"] * 2
        fleet.journal.open_gate(gate)
        fleet.settle()


@pytest.mark.soak
def test_a_worker_whose_main_loop_stands_still(fleets: Fleets, key: str) -> None:
    with fleets.own("redis", {"w1@north": {"pool": "solo", "concurrency": 1}}, SHORT) as fleet:
        gate = fleet.fill(1, name="hold_late")
        fleet.start("w2@south")
        fleet.wait_ready()
        until = time.monotonic() + 7
        while time.monotonic() < until:
            _restored_by_kombu(fleet)
            time.sleep(0.25)
        assert len(fleet.runs(gate)) == 1
        fleet.journal.open_gate(gate)
        fleet.settle()
        assert set(fleet.journal.executions().values()) == {1}
