"""Chains, groups, chords, and tasks that send tasks: each part is a dispatch of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from celery import chain, chord, group
from support.fleet import Fleet, Fleets

THREE = {"w1@north": {}, "w2@south": {}, "w3@west": {}}
TOTAL = 6


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, THREE) as fleet:
        yield fleet


class TestCanvas:
    def test_a_chain(self, fleet: Fleet, key: str) -> None:
        add = fleet.tasks["add"]
        assert chain(add.s(1, 2), add.s(3), add.s(4)).apply_async().get(timeout=30) == 10

    def test_a_group_that_is_wider_than_the_fleet(self, fleet: Fleet, key: str) -> None:
        record = fleet.tasks["record"]
        results = group(record.si(key=f"{key}-{n}", seconds=0.05) for n in range(20)).apply_async()
        assert results.get(timeout=60) == [f"{key}-{n}" for n in range(20)]
        assert set(Counter(run.key for run in fleet.runs(key)).values()) == {1}

    def test_a_chord(self, fleet: Fleet) -> None:
        add, total = fleet.tasks["add"], fleet.tasks["total"]
        assert chord(add.s(n, n) for n in range(20))(total.s()).get(timeout=60) == 380

    def test_a_chord_that_a_task_sends(self, fleet: Fleet) -> None:
        body_id = fleet.tasks["chord_inside"].delay(12).get(timeout=60)
        assert fleet.app.AsyncResult(body_id).get(timeout=60) == sum(n + 1 for n in range(12))

    def test_a_chord_with_a_part_that_fails(self, fleet: Fleet) -> None:
        add, fail, total = fleet.tasks["add"], fleet.tasks["fail"], fleet.tasks["total"]
        result = chord([add.s(1, 1), fail.s(), add.s(2, 2)])(total.s())
        fleet.wait(result.ready, 30, "the chord to fail")
        assert result.state == "FAILURE"

    def test_the_parts_of_a_chain_keep_their_pins(self, fleet: Fleet, key: str) -> None:
        record = fleet.tasks["record"]
        nodes = ["west", "north", "south"]
        chain(record.si(key=f"{key}-{node}").set(node=node) for node in nodes).apply_async().get(timeout=30)
        assert [run.worker for run in fleet.ended(key, 3)] == ["w3@west", "w1@north", "w2@south"]

    def test_tasks_that_tasks_send(self, fleet: Fleet, key: str) -> None:
        # More than there are slots, so that some of them are sent while the fleet is full.
        for number in range(3 * TOTAL):
            fleet.tasks["send"].delay(
                "record",
                {"key": f"{key}-child-{number}"},
                {"node": "west"} if number % 3 == 0 else {},
                key=f"{key}-{number}",
            )
        runs = fleet.ended(key, 6 * TOTAL, 60)
        assert set(Counter(run.key for run in runs).values()) == {1}
        pinned = {f"{key}-child-{number}" for number in range(0, 3 * TOTAL, 3)}
        assert {run.worker for run in runs if run.key in pinned} == {"w3@west"}
