"""Retries: a new dispatch each time, with the same number, queue and pin, and never a slot while it waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.result import AsyncResult
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import unique

from celery_capacity import CapacityExhausted

TWO = {"w1@north": {}, "w2@south": {}}
TOTAL = 4
ONE_SLOT = {"w1@north": {"concurrency": 1}}
BROKERS = ["redis", "rabbitmq", pytest.param("rabbitmq-quorum", marks=pytest.mark.soak)]


@pytest.fixture(params=BROKERS)
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, TWO) as fleet:
        yield fleet


def numbers(fleet: Fleet, key: str, count: int) -> list[int]:
    return sorted(run.retries for run in fleet.ended(key, count))


class TestWhereARetryGoes:
    def test_it_is_routed_afresh(self, fleet: Fleet, key: str) -> None:
        """To whichever worker is next, and not back to the one that asked for it."""
        result = fleet.tasks["retry_n"].delay(5, key=key)
        assert result.get(timeout=30) == 5
        runs = fleet.ended(key, 6)
        assert [run.retries for run in runs] == list(range(6))
        assert {run.worker for run in runs} == set(TWO)
        assert {run.queue for run in runs} == {fleet.queue}

    def test_autoretry(self, fleet: Fleet, key: str) -> None:
        assert fleet.tasks["auto_retry"].delay(3, key=key).get(timeout=30) == 3
        assert numbers(fleet, key, 4) == [0, 1, 2, 3]

    def test_to_a_node(self, fleet: Fleet, key: str) -> None:
        for node, worker in (("north", "w1@north"), ("south", "w2@south")):
            fleet.tasks["retry_with"].delay({"node": node}, 2, key=f"{key}-{node}").get(timeout=30)
            assert {run.worker for run in fleet.ended(f"{key}-{node}", 3) if run.retries} == {worker}

    def test_a_pin_is_kept(self, fleet: Fleet, key: str) -> None:
        fleet.tasks["retry_n"].apply_async((3,), {"key": key}, node="south").get(timeout=30)
        assert {run.worker for run in fleet.ended(key, 4)} == {"w2@south"}

    def test_custom_headers_are_kept(self, fleet: Fleet, key: str) -> None:
        """G4: each attempt has a token of its own, and the caller's headers."""
        result = fleet.tasks["retry_with"].apply_async(({}, 3), {"key": key}, headers={"tenant": "acme"})
        assert result.get(timeout=30) == "acme"
        assert numbers(fleet, key, 4) == [0, 1, 2, 3]
        fleet.wait(lambda: not fleet.held(), 10, "every token to be released")


class TestOtherQueues:
    @pytest.mark.parametrize("broker_kind", BROKERS)
    def test_a_retry_stays_in_the_queue_of_the_call_or_goes_where_it_says(
        self, fleets: Fleets, broker_kind: str, key: str
    ) -> None:
        """G1."""
        first, other = unique("first"), unique("other")
        with fleets.own(broker_kind, {}) as fleet:
            fleet.start("w1@default")
            fleet.start("w2@first", queues=[first])
            fleet.start("w3@other", queues=[other])
            fleet.wait_ready()
            with Sampler(fleet.registry):
                fleet.tasks["retry_n"].apply_async((2,), {"key": f"{key}-stays"}, queue=first).get(timeout=30)
                runs = fleet.ended(f"{key}-stays", 3)
                assert {(run.worker, run.queue) for run in runs} == {("w2@first", first)}

                fleet.tasks["retry_with"].apply_async(({"queue": other}, 2), {"key": f"{key}-goes"}, queue=first).get(
                    30
                )
                runs = fleet.ended(f"{key}-goes", 3)
                assert [(run.worker, run.queue) for run in runs] == [
                    ("w2@first", first),
                    ("w3@other", other),
                    ("w3@other", other),
                ]
                fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert fleet.complaints() == []


class TestSlots:
    def test_one_slot_at_a_time(self, fleet: Fleet, key: str) -> None:
        result = fleet.tasks["retry_and_hold"].delay(key, key=key)
        fleet.started(key, 2)
        fleet.wait(lambda: sum(fleet.held().values()) == 1, 5, "the slot of the first attempt to be free")
        fleet.assert_takes(TOTAL - 1, key=unique("beside"), already=1)
        fleet.journal.open_gate(key)
        assert result.get(timeout=20) == 1

    def test_a_retry_that_waits_for_its_time_holds_none(self, fleet: Fleet, key: str) -> None:
        results = [fleet.tasks["retry_n"].delay(1, 4.0, key=f"{key}-{number}") for number in range(TOTAL + 2)]
        fleet.ended(key, TOTAL + 2)
        fleet.wait(lambda: not fleet.held(), 3, "no slot to be held")
        assert len(fleet.runs(key)) == TOTAL + 2
        fleet.assert_takes(TOTAL)
        assert [result.get(timeout=30) for result in results] == [1] * (TOTAL + 2)
        assert fleet.max_parallel(key) <= TOTAL


class TestTheNumberOfRetries:
    def test_parking_costs_none(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(TOTAL)
        results = [fleet.tasks["retry_n"].delay(2, key=f"{key}-{number}") for number in range(6)]
        assert fleet.depth(fleet.queue) == 6
        fleet.journal.open_gate(gate)
        assert [result.get(timeout=30) for result in results] == [2] * 6
        assert numbers(fleet, key, 18) == [0] * 6 + [1] * 6 + [2] * 6

    def test_max_retries_counts_attempts_alone(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(TOTAL)
        fleet.tasks["retry_for_ever"].delay(key=key)
        fleet.journal.open_gate(gate)
        # Not by its result: Celery publishes a retry before it writes RETRY, which may come after a quick FAILURE.
        assert numbers(fleet, key, 3) == [0, 1, 2]
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")
        assert numbers(fleet, key, 3) == [0, 1, 2]

    def test_a_hand_back_costs_none(self, fleets: Fleets, key: str) -> None:
        """The worker stops with tasks in its own queue, which another one then runs."""
        with fleets.own("redis", TWO) as fleet:
            gate = fleet.fill(2, node="south")
            fleet.workers["w1@north"].stop()
            results = [fleet.tasks["retry_n"].delay(2, key=f"{key}-{number}") for number in range(2)]
            assert fleet.held() == {"w1@north": 2, "w2@south": 2}
            fleet.workers["w1@north"].terminate()
            fleet.workers["w1@north"].cont()
            fleet.journal.open_gate(gate)
            assert [result.get(timeout=30) for result in results] == [2, 2]
            assert numbers(fleet, key, 6) == [0, 0, 1, 1, 2, 2]


class TestWhatWasAdmittedGoesOn:
    """Celery drops a task whose retry could not be published; so a retry is never refused."""

    @pytest.fixture
    def strict(self, fleets: Fleets) -> Iterator[Fleet]:
        """With one slot, which the task itself holds while it asks for a retry."""
        with fleets.use("redis", ONE_SLOT, {"capacity_when_full": "refuse"}) as fleet:
            yield fleet

    @pytest.mark.parametrize("name", ["retry_n", "auto_retry"])
    def test_a_retry_on_a_full_fleet_that_refuses(self, strict: Fleet, key: str, name: str) -> None:
        result: AsyncResult = strict.tasks[name].delay(2, key=key)
        assert result.get(timeout=30) == 2

    @pytest.mark.parametrize("kind", ["task", "chain", "group"])
    def test_a_replacement_on_a_full_fleet_that_refuses(self, strict: Fleet, key: str, kind: str) -> None:
        expected: dict[str, Any] = {"task": 3, "chain": 6, "group": [0, 2, 4]}
        assert strict.tasks["replace_with"].delay(kind, key=key).get(timeout=30) == expected[kind]

    def test_what_a_task_calls_by_itself_is_refused(self, strict: Fleet, key: str) -> None:
        call = {"name": "record", "kwargs": {"key": f"{key}-child"}, "options": {}}
        result = strict.tasks["send_all"].delay([call], key=key)
        strict.wait(result.ready, 20, "the task to fail")
        assert (result.state, type(result.result)) == ("FAILURE", CapacityExhausted)
        assert "refused (full)" in str(result.result)
        assert strict.runs(f"{key}-child") == []
