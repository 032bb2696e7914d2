"""Hosts whose clocks are ten minutes apart: leases, deadlines and order are the store's, so nothing changes."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import support
from support.fleet import Fleets
from support.sampling import Sampler
from support.workers import worker_environment

SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 3,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
}
_CLOCK = Path(support.__file__).parent / "clock"


def ahead(seconds: float) -> dict[str, Any]:
    """Options of a worker whose clock is wrong."""
    path = worker_environment(broker="")["PYTHONPATH"]
    return {
        "env": {"PYTHONPATH": os.pathsep.join([str(_CLOCK), path]), "CAPACITY_TEST_CLOCK_AHEAD": str(seconds)},
    }


def _written_at(log: str) -> datetime:
    found = re.search(r"\[([-\d]+ [:\d]+),\d+: .*registered: node", log)
    assert found is not None
    return datetime.fromisoformat(found.group(1))


@pytest.mark.parametrize("store", ["redis", pytest.param("sqlite", marks=pytest.mark.soak)])
def test_ten_minutes_apart(fleets: Fleets, tmp_path: Path, store: str, key: str) -> None:
    servers = {} if store == "redis" else {"registry": f"sqlite:///{tmp_path / 'capacity.db'}"}
    workers = {"w1@north": ahead(600.0), "w2@south": ahead(-600.0)}
    with fleets.own("redis", workers, SHORT, **servers) as fleet, Sampler(fleet.registry):
        # As their logs say, which are written by their clocks.
        apart = _written_at(fleet.workers["w1@north"].logs()) - _written_at(fleet.workers["w2@south"].logs())
        assert 1100 < apart.total_seconds() < 1300
        for number in range(20):
            fleet.tasks["record_late" if number % 2 else "record"].delay(key=f"{key}-{number}", seconds=0.1)
        runs = fleet.ended(key, 20)
        assert {run.worker for run in runs} == {"w1@north", "w2@south"}
        fleet.settle()
        counters = dict(fleet.registry.overview().counters)
        wrong = {"workers_lapsed", "lapsed", "healed", "restored", "reservations_expired", "restored_unacked"}
        assert set(counters) & wrong == set()
        assert set(fleet.journal.executions().values()) == {1}

        gate = fleet.fill(2, name="hold_late", node="north")
        fleet.workers["w1@north"].kill()
        fleet.wait(lambda: fleet.view("w1@north") is None or fleet.view("w1@north").held == 0, 20, "the lapse")
        # They wait for their node, which the one that died was alone on.
        fleet.wait(lambda: fleet.depth(fleet.lot("north")) == 2, 20, "what it ran to be given back")
        fleet.start("w3@north", **ahead(600.0))
        assert [run.worker for run in fleet.started(gate, 4, 60)][2:] == ["w3@north"] * 2
        fleet.journal.open_gate(gate)
        fleet.settle()
