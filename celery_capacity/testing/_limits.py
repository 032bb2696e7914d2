"""Limits of queues: over the fleet, and on single workers."""

from __future__ import annotations

from typing import Any

import pytest

from ..errors import InvalidAdvertError, InvalidDemandError
from ..models import Claim, Lot, Reason, Refusal, Share, Slot
from ..registry.contract import Registry, Reservation
from ._base import ContractBase, queue_view, refused, take, view

__all__ = ("LimitContract",)


class LimitContract(ContractBase):
    """What workers declare, and what is set over it."""

    # -- of a queue on one worker ------------------------------------------------------------------------

    def test_a_worker_is_never_given_more_of_a_queue_than_its_share(self, registry: Registry) -> None:
        registry.register(self.advert(queues=("q", "r"), capacity=8, worker_queues={"q": 2}))
        slots = [take(registry, self.demand()) for _ in range(2)]
        assert refused(registry, self.demand()).reason is Reason.WORKER_LIMIT
        assert [take(registry, self.demand(queue="r")).worker for _ in range(6)] == ["w1"] * 6
        assert refused(registry, self.demand(queue="r")).reason is Reason.FULL
        assert view(registry, "w1").shares == (Share("q", 2, 2),)
        registry.cancel(slots[0].token)
        assert view(registry, "w1").shares == (Share("q", 1, 2),)
        assert take(registry, self.demand()).worker == "w1"

    def test_a_share_that_is_taken_is_skipped_and_turns_go_on(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=9))
        registry.register(self.advert("w2", capacity=9, worker_queues={"q": 1}))
        registry.register(self.advert("w3", capacity=9, node="node-of-w2"))
        chosen = [take(registry, self.demand()) for _ in range(7)]
        assert [s.worker for s in chosen] == ["w1", "w2", "w3", "w1", "w3", "w1", "w3"]
        registry.cancel(chosen[1].token)
        assert [take(registry, self.demand()).worker for _ in range(3)] == ["w1", "w2", "w3"]
        assert take(registry, self.demand(node="node-of-w2")).worker == "w3"

    def test_a_share_of_none_pauses_the_queue_on_that_worker(self, registry: Registry) -> None:
        epoch = registry.register(self.advert(queues=("q", "r"), worker_queues={"q": 0}))
        assert refused(registry, self.demand()).reason is Reason.WORKER_LIMIT
        answer = registry.reserve_worker("w1", epoch, self.demand())
        assert isinstance(answer, Refusal)
        assert answer.reason is Reason.WORKER_LIMIT
        assert take(registry, self.demand(queue="r")).worker == "w1"

    def test_every_way_to_claim_counts_for_the_share(self, registry: Registry) -> None:
        epoch = registry.register(self.advert(queues=("q", "r"), capacity=9, worker_queues={"q": 4}))
        own = registry.reserve_worker("w1", epoch, self.demand(), commit=True)
        assert isinstance(own, Reservation)
        parked = registry.claim_parked("w1", epoch, [Lot("q", "q")], marked_only=False)
        assert isinstance(parked, Slot)
        assert registry.restore("w1", epoch, [Slot("restored", "w1", epoch, "q", committed=True)]) == 1
        take(registry, self.demand())
        assert view(registry, "w1").shares == (Share("q", 4, 4),)
        for answer in (
            registry.reserve_worker("w1", epoch, self.demand()),
            registry.claim_parked("w1", epoch, [Lot("q", "q")], marked_only=False),
            registry.select_and_reserve(self.demand()),
        ):
            assert isinstance(answer, Refusal)
            assert answer.reason is Reason.WORKER_LIMIT
        assert registry.restore("w1", epoch, [Slot("runs anyway", "w1", epoch, "q", committed=True)]) == 1
        assert view(registry, "w1").shares == (Share("q", 5, 4),)
        for token in ("restored", "runs anyway"):
            registry.release(token)
        assert isinstance(registry.select_and_reserve(self.demand()), Reservation)

    def test_a_freed_slot_goes_to_a_lot_whose_share_has_room(self, registry: Registry) -> None:
        epoch = registry.register(self.advert(queues=("q", "r"), capacity=2, worker_queues={"q": 1}))
        take(registry, self.demand())
        other = take(registry, self.demand(queue="r"))
        for queue in ("q", "r"):
            refused(registry, self.demand(queue=queue, park_lot=queue))
        lots = (Lot("q", "q"), Lot("r", "r"))
        released = registry.release(other.token, then=Claim("w1", epoch, lots))
        assert released.claim is not None
        assert (released.claim.lot, released.claim.queue) == ("r", "r")
        again = registry.release(released.claim.token, then=Claim("w1", epoch, lots[:1]))
        assert again.claim is None

    def test_a_reservation_that_ends_makes_room_in_the_share(self, registry: Registry) -> None:
        registry.register(self.advert(capacity=9, worker_queues={"q": 1}))
        take(registry, self.demand(ttl_seconds=0.2))
        assert refused(registry, self.demand()).reason is Reason.WORKER_LIMIT
        self.wait_until(lambda: view(registry, "w1").held == 0)
        assert view(registry, "w1").shares == (Share("q", 0, 1),)
        assert take(registry, self.demand()).worker == "w1"

    def test_a_share_stands_through_draining_and_resizing(self, registry: Registry) -> None:
        epoch = registry.register(self.advert(queues=("q", "r"), capacity=9, worker_queues={"q": 1}))
        slot = take(registry, self.demand())
        registry.drain("w1", "a test")
        assert refused(registry, self.demand()).reason is Reason.DRAINING
        registry.admit("w1")
        registry.resize("w1", epoch, 5)
        assert refused(registry, self.demand()).reason is Reason.WORKER_LIMIT
        registry.drain("w1", "a test")
        registry.cancel(slot.token)
        registry.admit("w1")
        assert take(registry, self.demand()).worker == "w1"
        assert refused(registry, self.demand()).reason is Reason.WORKER_LIMIT

    def test_a_new_registration_says_new_shares(self, registry: Registry) -> None:
        epoch = registry.register(self.advert(capacity=9, worker_queues={"q": 1}))
        held = registry.reserve_worker("w1", epoch, self.demand(), commit=True)
        assert isinstance(held, Reservation)
        registry.register(self.advert(capacity=9, worker_queues={"q": 2}), holding=[held.slot])
        assert view(registry, "w1").shares == (Share("q", 1, 2),)
        take(registry, self.demand())
        assert refused(registry, self.demand()).reason is Reason.WORKER_LIMIT
        registry.register(self.advert(capacity=9))
        assert view(registry, "w1").shares == ()
        assert [take(registry, self.demand()).worker for _ in range(3)] == ["w1"] * 3

    def test_the_census_says_which_limit_it_is(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=9, worker_queues={"q": 1}))
        registry.register(self.advert("w2", capacity=1))
        for _ in range(2):
            take(registry, self.demand())
        census = registry.census("q", "t")
        assert [w.reason for w in census.workers] == [Reason.WORKER_LIMIT, Reason.FULL]
        assert census.workers[0].shares == (Share("q", 1, 1),)
        assert census.free == 0

    # -- of a queue over the fleet -----------------------------------------------------------------------

    def test_a_declared_limit_holds_from_the_registration_on(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=9, queue_limits={"q": 2}))
        registry.register(self.advert("w2", capacity=9, queue_limits={"q": 2}))
        assert {take(registry, self.demand()).worker for _ in range(2)} == {"w1", "w2"}
        assert refused(registry, self.demand()).reason is Reason.LIMIT
        assert queue_view(registry, "q").limit == 2

    def test_the_latest_registration_says_the_limit(self, registry: Registry) -> None:
        registry.register(self.advert("w1", queue_limits={"q": 2}))
        registry.register(self.advert("w2", queue_limits={"q": 5}))
        assert queue_view(registry, "q").limit == 5
        registry.register(self.advert("w3", queues=("r",)))
        assert queue_view(registry, "q").limit == 5
        registry.register(self.advert("w1"))
        assert queue_view(registry, "q").limit is None

    def test_what_is_set_by_hand_holds_until_it_is_taken_back(self, registry: Registry) -> None:
        epoch = registry.register(self.advert(capacity=9, queue_limits={"q": 2}))
        registry.set_limit("q", 3)
        registry.register(self.advert("w2", capacity=9, queue_limits={"q": 1}))
        for _ in range(3):
            take(registry, self.demand())
        assert refused(registry, self.demand()).reason is Reason.LIMIT
        registry.set_limit("q", None)
        assert queue_view(registry, "q").limit == 1
        registry.set_limit("q", 7)
        registry.deregister("w1", epoch)
        assert queue_view(registry, "q").limit == 7

    def test_what_was_declared_goes_with_the_last_worker(self, registry: Registry) -> None:
        epochs = [registry.register(self.advert(name, queue_limits={"q": 1})) for name in ("w1", "w2")]
        registry.deregister("w1", epochs[0])
        assert queue_view(registry, "q").limit == 1
        registry.deregister("w2", epochs[1])
        assert queue_view(registry, "q").limit is None
        registry.register(self.advert("w3"))
        assert queue_view(registry, "q").limit is None

    @pytest.mark.parametrize("field", ["worker_queues", "queue_limits"])
    @pytest.mark.parametrize("wrong", [{"q": -1}, {"q": True}, {"q": "2"}, {"not served": 1}, ["q"]])
    def test_limits_that_make_no_sense_are_named(self, registry: Registry, field: str, wrong: Any) -> None:
        with pytest.raises(InvalidAdvertError, match=field):
            registry.register(self.advert("w1", **{field: wrong}))
        assert registry.overview().workers == ()

    @pytest.mark.parametrize("wrong", [-1, True, "2", 1.5])
    def test_a_set_limit_that_makes_no_sense_is_named(self, registry: Registry, wrong: object) -> None:
        with pytest.raises(InvalidDemandError, match="limit"):
            registry.set_limit("q", wrong)  # type: ignore[arg-type]
        assert registry.overview().queues == ()
