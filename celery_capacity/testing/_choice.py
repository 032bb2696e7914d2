"""Contract: who is chosen, who is refused and why.  Invariants 1, 2, 5 to 9."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ..errors import InvalidDemandError
from ..models import Census, Reason, Refusal
from ..registry.contract import Registry, Reservation
from ._base import SHORT_SECONDS, ContractBase, queue_view, refused, slots_held, take, view

__all__ = ("ChoiceContract",)


def _reasons(census: Census) -> dict[str, Reason | None]:
    return {w.name: w.reason for w in census.workers}


class ChoiceContract(ContractBase):
    """select_and_reserve, reserve_worker, limits and census."""

    def _chosen(self, registry: Registry, count: int, **changes: Any) -> list[str]:
        return [take(registry, self.demand(**changes)).worker for _ in range(count)]

    # -- rotation ----------------------------------------------------------------------------------------

    def test_rotation_is_fair_and_in_name_order(self, registry: Registry) -> None:
        for name in ("w3", "w1", "w2"):
            registry.register(self.advert(name, capacity=10))
        assert self._chosen(registry, 9) == ["w1", "w2", "w3"] * 3

    def test_names_are_ordered_by_code_point(self, registry: Registry) -> None:
        names = ["w10", "w9", "W1", "é", "z", "日", "\U0001f600", "￿"]
        for name in names:
            registry.register(self.advert(name))
        assert self._chosen(registry, len(names)) == sorted(names)
        assert [w.name for w in registry.census("q").workers] == sorted(names)

    def test_full_worker_is_skipped_without_disturbing_the_turns(self, registry: Registry) -> None:
        for name, capacity in (("w1", 10), ("w2", 1), ("w3", 10)):
            registry.register(self.advert(name, capacity=capacity))
        assert self._chosen(registry, 7) == ["w1", "w2", "w3", "w1", "w3", "w1", "w3"]

    def test_draining_worker_is_skipped_and_has_its_turn_again(self, registry: Registry) -> None:
        for name in ("w1", "w2", "w3"):
            registry.register(self.advert(name, capacity=10))
        assert self._chosen(registry, 1) == ["w1"]
        registry.drain("w2", "why")
        assert self._chosen(registry, 3) == ["w3", "w1", "w3"]
        registry.admit("w2")
        assert self._chosen(registry, 3) == ["w1", "w2", "w3"]

    def test_turn_passes_on_when_the_last_one_chosen_leaves(self, registry: Registry) -> None:
        epochs = {name: registry.register(self.advert(name, capacity=10)) for name in ("w1", "w2", "w3")}
        assert self._chosen(registry, 2) == ["w1", "w2"]
        registry.deregister("w2", epochs["w2"])
        assert self._chosen(registry, 3) == ["w3", "w1", "w3"]

    def test_newcomer_takes_its_place_in_name_order(self, registry: Registry) -> None:
        for name in ("w1", "w3"):
            registry.register(self.advert(name, capacity=10))
        assert self._chosen(registry, 1) == ["w1"]
        registry.register(self.advert("w2", capacity=10))
        assert self._chosen(registry, 3) == ["w2", "w3", "w1"]

    def test_each_pool_has_turns_of_its_own(self, registry: Registry) -> None:
        for name in ("w1", "w2"):
            registry.register(self.advert(name, capacity=20, queues=("q", "r"), node="east"))
        assert self._chosen(registry, 1) == ["w1"]
        assert self._chosen(registry, 1, task="u") == ["w1"]
        assert self._chosen(registry, 1, task=None) == ["w1"]
        assert self._chosen(registry, 1, node="east") == ["w1"]
        assert self._chosen(registry, 1, queue="r") == ["w1"]
        assert self._chosen(registry, 2) == ["w2", "w1"]

    def test_turns_go_across_workers_of_different_builds(self, registry: Registry) -> None:
        for index, name in enumerate(("w1", "w2", "w3", "w4")):
            registry.register(self.advert(name, capacity=10, tasks=frozenset({"t", f"build-{index % 2}"})))
        assert self._chosen(registry, 8) == ["w1", "w2", "w3", "w4"] * 2
        assert self._chosen(registry, 3, task="build-1") == ["w2", "w4", "w2"]

    def test_a_preferred_node_comes_first_and_any_other_next(self, registry: Registry) -> None:
        for name, node in (("w1", "a"), ("w2", "b"), ("w3", "b"), ("w4", "c")):
            registry.register(self.advert(name, node=node, capacity=2))
        assert self._chosen(registry, 5, prefer_node="b") == ["w2", "w3", "w2", "w3", "w1"]
        assert self._chosen(registry, 3, prefer_node="nowhere") == ["w4", "w1", "w4"]
        assert refused(registry, self.demand(prefer_node="b")).reason is Reason.FULL

    def test_a_preferred_node_means_nothing_to_a_pinned_demand(self, registry: Registry) -> None:
        registry.register(self.advert("w1", node="a"))
        registry.register(self.advert("w2", node="b"))
        assert self._chosen(registry, 2, node="a", prefer_node="b") == ["w1", "w1"]
        assert refused(registry, self.demand(node="a", prefer_node="b")).reason is Reason.FULL

    def test_a_preferred_node_keeps_to_every_other_rule(self, registry: Registry) -> None:
        registry.register(self.advert("w1", node="a"))
        registry.register(self.advert("w2", node="b", tasks=frozenset({"u"})))
        registry.register(self.advert("w3", node="c", queues=("r",)))
        registry.register(self.advert("w4", node="d", worker_queues={"q": 0}))
        registry.register(self.advert("w5", node="e"))
        registry.drain("w5", "a test")
        for node in "bcde":
            slot = take(registry, self.demand(prefer_node=node))
            assert slot.worker == "w1"
            registry.cancel(slot.token)

    def test_refusals_and_counting_move_no_turn(self, registry: Registry) -> None:
        epochs = {name: registry.register(self.advert(name, capacity=1)) for name in ("w1", "w2", "w3")}
        for _ in range(2):
            assert refused(registry, self.demand(node="nowhere")).reason is Reason.OTHER_NODE
            registry.census("q", "t")
        registry.set_limit("q", 0)
        refused(registry, self.demand())
        registry.set_limit("q", None)
        slots = [take(registry, self.demand()) for _ in range(2)]
        assert [s.worker for s in slots] == ["w1", "w2"]
        take(registry, self.demand())
        for _ in range(2):
            refused(registry, self.demand())
        for slot in slots:
            registry.cancel(slot.token)
        answer = registry.reserve_worker("w1", epochs["w1"], self.demand())
        assert isinstance(answer, Reservation)
        answer.release()
        registry.census("q", "t")
        registry.overview()
        assert self._chosen(registry, 2) == ["w1", "w2"]

    def test_turns_of_a_pool_without_workers_are_forgotten(self, registry: Registry) -> None:
        epochs = {name: registry.register(self.advert(name, capacity=9)) for name in ("w1", "w2")}
        # It serves the queue, but is not in the pool of task t.
        registry.register(self.advert("w9", tasks=frozenset({"u"})))
        assert self._chosen(registry, 1) == ["w1"]
        for name, epoch in epochs.items():
            registry.deregister(name, epoch)
        for name in ("w1", "w2"):
            registry.register(self.advert(name))
        assert self._chosen(registry, 1) == ["w1"]

    def test_shares_are_even(self, registry: Registry) -> None:
        names = [f"w{i}" for i in range(7)]
        for name in names:
            registry.register(self.advert(name, capacity=20))
        assert Counter(self._chosen(registry, 70)) == dict.fromkeys(names, 10)

    # -- counts ------------------------------------------------------------------------------------------

    def test_every_slot_is_given_out_and_no_more(self, registry: Registry) -> None:
        for name in ("w1", "w2"):
            registry.register(self.advert(name, capacity=3))
        self._chosen(registry, 6)
        answer = refused(registry, self.demand())
        assert (answer.reason, answer.served) == (Reason.FULL, True)
        assert [w.held for w in registry.overview().workers] == [3, 3]

    def test_refusal_writes_nothing_for_the_workers(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=0))
        before = _without_ages(registry)
        refused(registry, self.demand())
        assert _without_ages(registry) == before

    def test_fan_as_wide_as_its_pool_is_never_refused(self, registry: Registry) -> None:
        epochs = {name: registry.register(self.advert(name, capacity=2)) for name in ("w1", "w2")}
        for _ in range(1000):
            slots = [take(registry, self.demand()) for _ in range(4)]
            for slot in slots:
                registry.commit(slot.token, slot.worker, epochs[slot.worker])
            for slot in slots:
                registry.release(slot.token, slot.epoch)
        assert slots_held(registry) == 0

    def test_batch_answers_each_demand_in_order(self, registry: Registry) -> None:
        for name in ("w1", "w2"):
            registry.register(self.advert(name, capacity=1))
        answers = registry.select_and_reserve_many(
            [self.demand(), self.demand(queue="r"), self.demand(), self.demand()]
        )
        assert [a.slot.worker if isinstance(a, Reservation) else a.reason for a in answers] == [
            "w1",
            Reason.NO_WORKER,
            "w2",
            Reason.FULL,
        ]
        assert registry.select_and_reserve_many([]) == []

    # -- who matches -------------------------------------------------------------------------------------

    def test_no_worker_at_all(self, registry: Registry) -> None:
        answer = refused(registry, self.demand(park_lot="q"))
        assert (answer.reason, answer.served) == (Reason.NO_WORKER, False)
        assert queue_view(registry, "q").waiting is False, "a plain Celery queue has no mark"

    def test_worker_of_another_queue_does_not_serve(self, registry: Registry) -> None:
        registry.register(self.advert("w1", queues=("r",)))
        answer = refused(registry, self.demand())
        assert (answer.reason, answer.served) == (Reason.NO_WORKER, False)
        assert _reasons(registry.census("q")) == {"w1": Reason.OTHER_QUEUE}

    def test_worker_serves_each_of_its_queues_from_the_same_slots(self, registry: Registry) -> None:
        registry.register(self.advert("w1", queues=("q", "r"), capacity=2))
        self._chosen(registry, 1)
        self._chosen(registry, 1, queue="r")
        assert refused(registry, self.demand()).reason is Reason.FULL
        assert (queue_view(registry, "q").held, queue_view(registry, "r").held) == (1, 1)

    def test_only_workers_that_know_the_task_are_chosen(self, registry: Registry) -> None:
        registry.register(self.advert("w1", tasks=frozenset({"u"})))
        answer = refused(registry, self.demand(task="t"))
        assert (answer.reason, answer.served) == (Reason.UNKNOWN_TASK, True)
        registry.register(self.advert("w2", tasks=frozenset({"t"})))
        assert self._chosen(registry, 2, task="t") == ["w2", "w2"]
        assert _reasons(registry.census("q", "t")) == {"w1": Reason.UNKNOWN_TASK, "w2": Reason.FULL}
        assert self._chosen(registry, 1, task=None) == ["w1"]

    def test_pin_matches_exactly_its_node(self, registry: Registry) -> None:
        for name, node in (("w1", "east"), ("w2", "east-2"), ("w3", "West")):
            registry.register(self.advert(name, node=node, capacity=1))
        assert self._chosen(registry, 1, node="east-2") == ["w2"]
        for node in ("west", "eas", "east-"):
            assert refused(registry, self.demand(node=node)).reason is Reason.OTHER_NODE
        assert refused(registry, self.demand(node="east-2")).reason is Reason.FULL
        assert self._chosen(registry, 2) == ["w1", "w3"], "without a pin every node matches"
        assert _reasons(registry.census("q", node="east")) == {
            "w1": Reason.FULL,
            "w2": Reason.OTHER_NODE,
            "w3": Reason.OTHER_NODE,
        }

    def test_worker_that_turned_ineligible_is_not_claimed(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert registry.census("q").eligible
        registry.drain("w1", "since it was listed")
        assert refused(registry, self.demand()).reason is Reason.DRAINING
        answer = registry.reserve_worker("w1", epoch, self.demand())
        assert isinstance(answer, Refusal)
        assert answer.reason is Reason.DRAINING

    def test_lapsed_worker_serves_nobody(self, registry: Registry) -> None:
        registry.register(self.advert("w1", lease_seconds=SHORT_SECONDS, lapse_seconds=SHORT_SECONDS))
        self.wait_until(lambda: refused_or_none(registry, self.demand()) is Reason.NO_WORKER)
        assert refused(registry, self.demand(park_lot="q")).served is False
        assert queue_view(registry, "q").waiting is False

    # -- the reasons of a refusal ------------------------------------------------------------------------

    def test_refusal_gives_the_reason_that_helps_most(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=0))
        registry.register(self.advert("w2", capacity=None))
        registry.register(self.advert("w3"))
        registry.drain("w3", "why")
        registry.register(self.advert("w4", tasks=frozenset({"u"})))
        assert refused(registry, self.demand()).reason is Reason.FULL
        registry.deregister("w1", epoch)
        assert refused(registry, self.demand()).reason in (Reason.DRAINING, Reason.UNKNOWN_CAPACITY)
        registry.set_limit("q", 0)
        registry.admit("w3")
        assert refused(registry, self.demand()).reason is Reason.LIMIT

    # -- one named worker --------------------------------------------------------------------------------

    def test_reserve_worker_claims_that_worker(self, registry: Registry) -> None:
        epochs = {name: registry.register(self.advert(name, capacity=1)) for name in ("w1", "w2")}
        answer = registry.reserve_worker("w2", epochs["w2"], self.demand())
        assert isinstance(answer, Reservation)
        assert (answer.slot.worker, answer.slot.committed) == ("w2", False)
        again = registry.reserve_worker("w2", epochs["w2"], self.demand())
        assert isinstance(again, Refusal)
        assert (again.reason, again.served) == (Reason.FULL, True)
        assert [w.held for w in registry.overview().workers] == [0, 1]

    def test_reserve_worker_can_commit_at_once(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        answer = registry.reserve_worker("w1", epoch, self.demand(ttl_seconds=SHORT_SECONDS), commit=True)
        assert isinstance(answer, Reservation)
        assert answer.transfer().committed
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (0, 1)
        self._advance(2 * SHORT_SECONDS)
        assert view(registry, "w1").committed == 1

    def test_reserve_worker_checks_all_of_its_eligibility(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        epoch = registry.register(self.advert("w1", capacity=None))

        def reason(epoch: int, **changes: Any) -> Reason:
            answer = registry.reserve_worker("w1", epoch, self.demand(**changes))
            assert isinstance(answer, Refusal)
            return answer.reason

        assert reason(older) is Reason.REPLACED
        assert reason(epoch, queue="r") is Reason.OTHER_QUEUE
        assert reason(epoch, task="v") is Reason.UNKNOWN_TASK
        assert reason(epoch, node="elsewhere") is Reason.OTHER_NODE
        assert reason(epoch) is Reason.UNKNOWN_CAPACITY
        registry.resize("w1", epoch, 0)
        assert reason(epoch) is Reason.FULL
        registry.resize("w1", epoch, 1)
        registry.set_limit("q", 0)
        assert reason(epoch) is Reason.LIMIT
        registry.set_limit("q", None)
        registry.drain("w1", "why")
        assert reason(epoch) is Reason.DRAINING
        assert isinstance(registry.reserve_worker("nobody", epoch, self.demand()), Refusal)
        assert slots_held(registry) == 0

    # -- limits ------------------------------------------------------------------------------------------

    def test_queue_limit_holds_over_the_fleet(self, registry: Registry) -> None:
        for name in ("w1", "w2"):
            registry.register(self.advert(name, capacity=5, queues=("q", "r")))
        registry.set_limit("q", 3)
        slots = [take(registry, self.demand()) for _ in range(3)]
        answer = refused(registry, self.demand())
        assert (answer.reason, answer.served) == (Reason.LIMIT, True)
        census = registry.census("q", "t")
        assert (census.limit, census.held, census.eligible, census.free) == (3, 3, (), 0)
        assert _reasons(census) == {"w1": Reason.LIMIT, "w2": Reason.LIMIT}
        assert len(self._chosen(registry, 4, queue="r")) == 4, "another queue is not limited"
        registry.cancel(slots[0].token)
        self._chosen(registry, 1)
        assert (queue_view(registry, "q").limit, queue_view(registry, "q").held) == (3, 3)

    def test_lowered_limit_takes_nothing_away(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=5))
        slots = [take(registry, self.demand()) for _ in range(3)]
        registry.set_limit("q", 1)
        assert queue_view(registry, "q").held == 3
        for slot in slots:
            assert refused(registry, self.demand()).reason is Reason.LIMIT
            registry.release(slot.token)
        self._chosen(registry, 1)
        registry.set_limit("q", None)
        self._chosen(registry, 4)
        assert queue_view(registry, "q").limit is None

    @pytest.mark.parametrize("limit", [-1, 1.5, True, "2"])
    def test_bad_limit_changes_nothing(self, registry: Registry, limit: Any) -> None:
        registry.set_limit("q", 4)
        with pytest.raises(InvalidDemandError):
            registry.set_limit("q", limit)
        assert registry.census("q").limit == 4

    # -- census ------------------------------------------------------------------------------------------

    def test_census_gives_a_reason_for_every_worker(self, registry: Registry) -> None:
        adverts: dict[str, dict[str, Any]] = {
            "a-full": {"capacity": 0},
            "b-unknown": {"capacity": None},
            "c-node": {"node": "elsewhere"},
            "d-queue": {"queues": ("r",)},
            "e-task": {"tasks": frozenset({"u"})},
            "f-drain": {},
            "g-late": {"lease_seconds": SHORT_SECONDS},
            "h-lapsed": {"lease_seconds": SHORT_SECONDS, "lapse_seconds": SHORT_SECONDS},
            "i-ready": {"capacity": 3},
        }
        for name, changes in adverts.items():
            registry.register(self.advert(name, **{"node": "here", **changes}))
        registry.drain("f-drain", "old release")
        self.wait_until(lambda: {Reason.LATE, Reason.LAPSED} <= set(_reasons(registry.census("q")).values()))
        census = registry.census("q", "t", "here")
        assert (census.queue, census.task, census.node) == ("q", "t", "here")
        assert _reasons(census) == {
            "a-full": Reason.FULL,
            "b-unknown": Reason.UNKNOWN_CAPACITY,
            "c-node": Reason.OTHER_NODE,
            "d-queue": Reason.OTHER_QUEUE,
            "e-task": Reason.UNKNOWN_TASK,
            "f-drain": Reason.DRAINING,
            "g-late": Reason.LATE,
            "h-lapsed": Reason.LAPSED,
            "i-ready": None,
        }
        assert [w.name for w in census.workers] == sorted(adverts)
        assert (census.free, [w.name for w in census.eligible]) == (3, ["i-ready"])
        assert "old release" in next(w.detail for w in census.workers if w.name == "f-drain")

    def test_census_of_an_unknown_queue(self, registry: Registry) -> None:
        census = registry.census("nothing")
        assert (census.workers, census.limit, census.held, census.waiting) == ((), None, 0, False)
        assert all(q.name != "nothing" for q in registry.overview().queues)


def refused_or_none(registry: Registry, demand: Any) -> Reason | None:
    """The reason of a refusal; a reservation is given back."""
    answer = registry.select_and_reserve(demand)
    if isinstance(answer, Reservation):
        answer.release()
        return None
    return answer.reason


def _without_ages(registry: Registry) -> list[tuple[Any, ...]]:
    return [(w.name, w.epoch, w.state, w.capacity, w.reserved, w.committed) for w in registry.overview().workers]
