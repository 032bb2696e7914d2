"""Contract: the marks of lots, and claims for parked tasks.  Invariants 2, 5 and 12."""

from __future__ import annotations

from typing import Any

from ..models import Claim, Lot, Reason, Refusal, ReleaseOutcome, Slot
from ..registry.contract import Registry
from ._base import LONG_SECONDS, SHORT_SECONDS, ContractBase, queue_view, refused, slots_held, take, view

__all__ = ("LotContract",)

Q, R, NODE = Lot("q", "q"), Lot("r", "r"), Lot("lot.q.east", "q")


def claimed(answer: Slot | Refusal | None) -> Slot:
    """The claim, expecting that there is one."""
    assert isinstance(answer, Slot), answer
    return answer


def unclaimed(answer: Slot | Refusal) -> Reason:
    """Why there is no claim, expecting that there is none."""
    assert isinstance(answer, Refusal), answer
    return answer.reason


class LotContract(ContractBase):
    """Refusals set marks, claims answer them, an empty lot clears them."""

    def _park(self, registry: Registry, lot: Lot = Q, **changes: Any) -> Refusal:
        """Be refused, and park; by a pin that no worker matches, so that free slots stay free."""
        return refused(registry, self.demand(queue=lot.queue, node="nowhere", park_lot=lot.name, **changes))

    # -- setting the mark --------------------------------------------------------------------------------

    def test_refusal_that_parks_sets_the_mark(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=0))
        refused(registry, self.demand())
        assert not queue_view(registry, "q").waiting, "it did not want to park"
        assert refused(registry, self.demand(park_lot="q")).served
        assert queue_view(registry, "q").waiting
        assert registry.census("q").waiting
        registry.resize("w1", epoch, 1)
        slot = claimed(registry.claim_parked("w1", epoch, [Q]))
        assert (slot.worker, slot.epoch, slot.queue, slot.lot, slot.committed) == ("w1", epoch, "q", "q", True)
        assert slot.mark > 0
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (0, 1)

    def test_granted_demand_sets_no_mark(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        take(registry, self.demand(park_lot="q"))
        assert not queue_view(registry, "q").waiting

    def test_lot_of_a_node_is_marked_though_no_worker_is_there(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert self._park(registry, NODE).served
        assert unclaimed(registry.claim_parked("w1", epoch, [Q])) is Reason.NOT_WAITING
        assert claimed(registry.claim_parked("w1", epoch, [Q, NODE])).lot == NODE.name

    def test_overview_shows_the_lots_where_tasks_wait(self, registry: Registry) -> None:
        assert registry.overview().lots == ()
        registry.register(self.advert("w1", queues=("q", "r"), capacity=0))
        for lot in (Lot("r", "r"), NODE, Q):
            self._park(registry, lot, ttl_seconds=SHORT_SECONDS / 10)
        lots = registry.overview().lots
        assert [(lot.name, lot.queue) for lot in lots] == sorted([("r", "r"), (NODE.name, NODE.queue), ("q", "q")])
        self._advance(SHORT_SECONDS)
        for shown in lots:
            assert not registry.found_empty(shown.name, shown.mark), "its version is the one of the mark"
        assert registry.overview().lots == ()

    def test_refused_claim_of_a_named_worker_sets_the_mark_too(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=0))
        assert isinstance(registry.reserve_worker("w1", epoch, self.demand(park_lot="q")), Refusal)
        assert queue_view(registry, "q").waiting

    def test_limit_that_refuses_sets_the_mark(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.set_limit("q", 0)
        refused(registry, self.demand(park_lot="q"))
        assert unclaimed(registry.claim_parked("w1", epoch, [Q])) is Reason.LIMIT
        registry.set_limit("q", 1)
        claimed(registry.claim_parked("w1", epoch, [Q]))

    # -- claiming ----------------------------------------------------------------------------------------

    def test_nothing_waits(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert unclaimed(registry.claim_parked("w1", epoch, [Q])) is Reason.NOT_WAITING
        assert unclaimed(registry.claim_parked("w1", epoch, [])) is Reason.NOT_WAITING
        assert slots_held(registry) == 0

    def test_first_marked_lot_is_claimed(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", queues=("q", "r"), capacity=9))
        self._park(registry, R)
        assert claimed(registry.claim_parked("w1", epoch, [Q, R])).lot == "r"
        self._park(registry, Q)
        assert claimed(registry.claim_parked("w1", epoch, [Q, R])).lot == "q"
        assert claimed(registry.claim_parked("w1", epoch, [R, Q])).lot == "r"
        registry.set_limit("r", 2)
        assert claimed(registry.claim_parked("w1", epoch, [R, Q])).lot == "q", "the limit of r has no room"

    def test_unmarked_lot_can_be_claimed_on_purpose(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", queues=("q", "r"), capacity=9))
        slot = claimed(registry.claim_parked("w1", epoch, [Q, R], marked_only=False))
        assert (slot.lot, slot.queue, slot.mark) == ("q", "q", 0)
        registry.set_limit("q", 1)
        assert claimed(registry.claim_parked("w1", epoch, [Q, R], marked_only=False)).lot == "r"
        registry.release(slot.token, epoch)
        self._park(registry, Q)
        assert claimed(registry.claim_parked("w1", epoch, [Q, R], marked_only=False)).mark > 0

    def test_claim_checks_the_worker(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        epoch = registry.register(self.advert("w1", capacity=1))
        self._park(registry)
        assert unclaimed(registry.claim_parked("w1", older, [Q])) is Reason.REPLACED
        assert isinstance(registry.claim_parked("nobody", epoch, [Q]), Refusal)
        registry.drain("w1", "why")
        assert unclaimed(registry.claim_parked("w1", epoch, [Q])) is Reason.DRAINING
        registry.admit("w1")
        registry.resize("w1", epoch, None)
        assert unclaimed(registry.claim_parked("w1", epoch, [Q])) is Reason.UNKNOWN_CAPACITY
        registry.resize("w1", epoch, 1)
        claimed(registry.claim_parked("w1", epoch, [Q]))
        assert unclaimed(registry.claim_parked("w1", epoch, [Q])) is Reason.FULL
        assert slots_held(registry) == 1

    def test_claim_moves_no_turn(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.register(self.advert("w2"))
        self._park(registry)
        claimed(registry.claim_parked("w1", epoch, [Q]))
        assert take(registry, self.demand()).worker == "w1"

    # -- release into a claim ----------------------------------------------------------------------------

    def test_release_turns_the_slot_into_a_claim(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=1))
        slot = take(registry, self.demand())
        registry.commit(slot.token, "w1", epoch)
        refused(registry, self.demand(park_lot="q"))
        then = Claim("w1", epoch, (Q,))
        released = registry.release(slot.token, epoch, then=then)
        assert released.outcome is ReleaseOutcome.RELEASED
        claim = claimed(released.claim)
        assert (claim.worker, claim.epoch, claim.lot, claim.queue, claim.committed) == ("w1", epoch, "q", "q", True)
        assert claim.mark > 0
        assert claim.token != slot.token
        assert view(registry, "w1").committed == 1
        assert refused(registry, self.demand()).reason is Reason.FULL, "a newcomer does not overtake"
        again = registry.release(slot.token, epoch, then=then)
        assert (again.outcome, again.claim) == (ReleaseOutcome.ALREADY, None)
        assert view(registry, "w1").committed == 1

    def _release_then(self, registry: Registry, *lots: Lot, epoch: int | None = None) -> Slot | None:
        """Take and release a slot of w1; the claim that comes of it."""
        current = view(registry, "w1").epoch
        slot = take(registry, self.demand())
        registry.commit(slot.token, "w1", current)
        claim = Claim("w1", current if epoch is None else epoch, lots)
        released = registry.release(slot.token, current, then=claim)
        assert released.outcome is ReleaseOutcome.RELEASED
        return released.claim

    def test_release_without_a_marked_lot_claims_nothing(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        assert self._release_then(registry, Q) is None
        self._park(registry, Q)
        assert self._release_then(registry, R) is None
        assert self._release_then(registry) is None
        assert slots_held(registry) == 0

    def test_release_claims_the_first_marked_lot_whose_queue_has_room(self, registry: Registry) -> None:
        registry.register(self.advert("w1", queues=("q", "r"), capacity=9))
        for lot in (R, NODE, Q):
            self._park(registry, lot)
        assert claimed(self._release_then(registry, R, Q)).lot == "r"
        registry.set_limit("r", 1)
        assert claimed(self._release_then(registry, R, NODE, Q)).lot == NODE.name

    def test_release_makes_room_in_the_limit_for_its_own_claim(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        self._park(registry)
        registry.set_limit("q", 1)
        claimed(self._release_then(registry, Q))
        assert refused(registry, self.demand()).reason is Reason.LIMIT

    def test_release_for_an_older_epoch_claims_nothing(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        registry.register(self.advert("w1"))
        self._park(registry)
        assert self._release_then(registry, Q, epoch=older) is None
        assert slots_held(registry) == 0

    def test_stale_release_neither_frees_nor_claims(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        self._park(registry)
        released = registry.release(slot.token, older, then=Claim("w1", older, (Q,)))
        assert (released.outcome, released.claim) == (ReleaseOutcome.STALE, None)
        assert slots_held(registry) == 1

    def test_release_on_a_worker_that_may_not_be_chosen_claims_nothing(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=3))
        self._park(registry)
        slots = [take(registry, self.demand()) for _ in range(3)]
        then = Claim("w1", epoch, (Q,))
        registry.drain("w1", "why")
        assert registry.release(slots[0].token, epoch, then=then).claim is None
        registry.admit("w1")
        registry.resize("w1", epoch, 1)
        assert registry.release(slots[1].token, epoch, then=then).claim is None, "still at its new capacity"
        assert view(registry, "w1").held == 1
        claimed(registry.release(slots[2].token, epoch, then=then).claim)
        assert view(registry, "w1").held == 1

    def _release_then_any(self, registry: Registry, *lots: Lot) -> Slot | None:
        """As :meth:`_release_then`, for unmarked lots too."""
        epoch = view(registry, "w1").epoch
        slot = take(registry, self.demand())
        registry.commit(slot.token, "w1", epoch)
        return registry.release(slot.token, epoch, then=Claim("w1", epoch, lots, marked_only=False)).claim

    def test_release_can_claim_an_unmarked_lot_on_purpose(self, registry: Registry) -> None:
        registry.register(self.advert("w1", queues=("q", "r"), capacity=9))
        claim = claimed(self._release_then_any(registry, R, Q))
        assert (claim.lot, claim.queue, claim.mark, claim.committed) == ("r", "r", 0, True)
        registry.set_limit("r", 1)
        assert claimed(self._release_then_any(registry, R, Q)).lot == "q", "the limit of r has no room"
        assert self._release_then_any(registry, R) is None
        assert self._release_then_any(registry) is None

    def test_marked_lots_come_first_in_a_release(self, registry: Registry) -> None:
        registry.register(self.advert("w1", queues=("q", "r"), capacity=9))
        self._park(registry, R)
        claim = claimed(self._release_then_any(registry, Q, R))
        assert claim.lot == "r"
        assert claim.mark > 0
        registry.set_limit("r", 1)
        assert claimed(self._release_then_any(registry, Q, R)).lot == "q", "the marked one has no room"

    def test_unmarked_claim_on_a_worker_that_may_not_be_chosen(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=2))
        slots = [take(registry, self.demand()) for _ in range(2)]
        then = Claim("w1", epoch, (Q,), marked_only=False)
        registry.drain("w1", "why")
        assert registry.release(slots[0].token, epoch, then=then).claim is None
        registry.admit("w1")
        assert registry.release(slots[1].token, epoch - 1, then=then).outcome is ReleaseOutcome.STALE
        assert slots_held(registry) == 1

    def test_emptied_lot_is_not_claimed_again_without_a_mark_either(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", queues=("q", "r")))
        claim = claimed(registry.claim_parked("w1", epoch, [Q], marked_only=False))
        then = Claim("w1", epoch, (Q, R), marked_only=False)
        released = registry.release(claim.token, epoch, then=then, emptied=claim)
        claim = claimed(released.claim)
        assert (claim.lot, released.waiting) == ("r", False)
        then = Claim("w1", epoch, (R,), marked_only=False)
        released = registry.release(claim.token, epoch, then=then, emptied=claim)
        assert released.claim is None
        assert slots_held(registry) == 0

    # -- an empty lot ------------------------------------------------------------------------------------

    def test_mark_is_cleared_once_the_last_parked_message_must_have_arrived(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        self._park(registry, ttl_seconds=SHORT_SECONDS)

        def fetch_nothing() -> bool:
            claim = claimed(registry.claim_parked("w1", epoch, [Q]))
            released = registry.release(claim.token, epoch, emptied=claim)
            assert released.outcome is ReleaseOutcome.RELEASED
            assert not queue_view(registry, "q").waiting, "nobody has parked since it was found empty"
            return not released.waiting

        self.wait_until(fetch_nothing)
        assert unclaimed(registry.claim_parked("w1", epoch, [Q])) is Reason.NOT_WAITING
        assert slots_held(registry) == 0

    def test_mark_stays_while_a_parked_message_may_be_on_its_way(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        self._park(registry, ttl_seconds=LONG_SECONDS)
        # A later park of a shorter one does not bring the instant forward.
        self._park(registry, ttl_seconds=SHORT_SECONDS / 10)
        self._advance(SHORT_SECONDS)
        claim = claimed(registry.claim_parked("w1", epoch, [Q]))
        released = registry.release(claim.token, epoch, then=Claim("w1", epoch, (Q,)), emptied=claim)
        assert (released.outcome, released.waiting) == (ReleaseOutcome.RELEASED, True)
        assert released.claim is None, "the lot that was just found empty is not claimed again at once"
        assert not queue_view(registry, "q").waiting
        assert registry.found_empty("q", claim.mark)
        assert not registry.census("q").waiting
        self._park(registry, ttl_seconds=LONG_SECONDS)
        assert queue_view(registry, "q").waiting
        assert registry.found_empty("q", claim.mark), "somebody has parked since"
        assert registry.census("q").waiting
        assert slots_held(registry) == 0

    def test_mark_that_was_seen_does_not_count_until_somebody_parks(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", queues=("q", "r"), capacity=4))
        self._park(registry, ttl_seconds=LONG_SECONDS)
        first = claimed(registry.claim_parked("w1", epoch, [Q]))
        seen = Lot("q", "q", first.mark)
        assert unclaimed(registry.claim_parked("w1", epoch, [seen])) is Reason.NOT_WAITING
        assert registry.release(first.token, epoch, then=Claim("w1", epoch, (seen,))).claim is None
        other = claimed(registry.claim_parked("w1", epoch, [seen, R], marked_only=False))
        assert (other.lot, other.mark) == ("q", first.mark), "on purpose it can be claimed all the same"
        self._park(registry, ttl_seconds=LONG_SECONDS)
        again = claimed(registry.release(other.token, epoch, then=Claim("w1", epoch, (seen,))).claim)
        assert again.lot == "q"
        assert again.mark != first.mark

    def test_lot_that_is_surely_not_empty_counts_as_marked(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", queues=("q", "r"), capacity=4))
        claim = claimed(registry.claim_parked("w1", epoch, [Q, Lot("r", "r", Lot.SURE)]))
        assert (claim.lot, claim.mark) == ("r", 0)
        self._park(registry)
        then = Claim("w1", epoch, (Lot("r", "r", Lot.SURE), Q))
        assert claimed(registry.release(claim.token, epoch, then=then).claim).lot == "r", "in the order given"

    def test_lot_can_be_found_empty_without_a_slot(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert not registry.found_empty("q", 0)
        self._park(registry, ttl_seconds=SHORT_SECONDS)
        claim = claimed(registry.claim_parked("w1", epoch, [Q]))
        registry.release(claim.token, epoch)
        assert registry.found_empty("q", claim.mark), "the message may be on its way"
        self._park(registry, ttl_seconds=SHORT_SECONDS)
        newer = claimed(registry.claim_parked("w1", epoch, [Q]))
        self.wait_until(lambda: not registry.found_empty("q", newer.mark))
        assert not registry.found_empty("q", newer.mark)
        self._park(registry, ttl_seconds=SHORT_SECONDS / 10)
        self._advance(SHORT_SECONDS)
        assert registry.found_empty("q", newer.mark), "somebody has parked since"

    def test_mark_stays_if_somebody_parked_since(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        self._park(registry, ttl_seconds=SHORT_SECONDS / 10)
        older = claimed(registry.claim_parked("w1", epoch, [Q]))
        self._park(registry, ttl_seconds=SHORT_SECONDS / 10)
        self._advance(SHORT_SECONDS)
        assert registry.release(older.token, epoch, emptied=older).waiting
        newer = claimed(registry.claim_parked("w1", epoch, [Q]))
        assert newer.mark != older.mark
        assert not registry.release(newer.token, epoch, emptied=newer).waiting

    def test_cleared_mark_never_comes_back_with_the_same_version(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=4))
        self._park(registry, ttl_seconds=SHORT_SECONDS / 10)
        first, second = (claimed(registry.claim_parked("w1", epoch, [Q])) for _ in range(2))
        self._advance(SHORT_SECONDS)
        assert not registry.release(first.token, epoch, emptied=first).waiting
        self._park(registry, ttl_seconds=SHORT_SECONDS / 10)
        self._advance(SHORT_SECONDS)
        assert registry.release(second.token, epoch, emptied=second).waiting, "that answer was to the mark before"

    def test_empty_unmarked_lot(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        claim = claimed(registry.claim_parked("w1", epoch, [Q], marked_only=False))
        self._park(registry, ttl_seconds=SHORT_SECONDS / 10)
        self._advance(SHORT_SECONDS)
        assert registry.release(claim.token, epoch, emptied=claim).waiting, "it was parked after the look"
        claim = claimed(registry.claim_parked("w1", epoch, [Q]))
        assert not registry.release(claim.token, epoch, emptied=claim).waiting
        claim = claimed(registry.claim_parked("w1", epoch, [Q], marked_only=False))
        assert not registry.release(claim.token, epoch, emptied=claim).waiting

    def test_emptied_lot_gives_way_to_the_next_one(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", queues=("q", "r"), capacity=1))
        for lot in (Q, R):
            self._park(registry, lot)
        claim = claimed(registry.claim_parked("w1", epoch, [Q, R]))
        released = registry.release(claim.token, epoch, then=Claim("w1", epoch, (Q, R)), emptied=claim)
        assert (claimed(released.claim).lot, released.waiting) == ("r", True)

    def test_mark_outlives_the_worker(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        self._park(registry)
        registry.deregister("w1", epoch)
        epoch = registry.register(self.advert("w2"))
        claimed(registry.claim_parked("w2", epoch, [Q]))
