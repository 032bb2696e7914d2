"""Contract: a slot's life, and the reservation object.  Invariants 3, 4, 10 and 11."""

from __future__ import annotations

import logging

import pytest

from ..errors import RegistryError, ReservationLost
from ..models import CommitOutcome, Reason, ReleaseOutcome, Slot
from ..registry.contract import Registry, Reservation
from ._base import LONG_SECONDS, SHORT_SECONDS, ContractBase, OpenRegistry, refused, slots_held, take, view

__all__ = ("SlotContract",)


class SlotContract(ContractBase):
    """commit, release, cancel, deadlines."""

    def _committed(self, registry: Registry, epoch: int) -> Slot:
        slot = take(registry, self.demand())
        assert registry.commit(slot.token, slot.worker, epoch) is CommitOutcome.COMMITTED
        return slot

    def test_slot_says_what_was_reserved(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", node="east"))
        slot = take(registry, self.demand(task_id="id-1", node="east"))
        assert (slot.worker, slot.epoch, slot.queue, slot.node) == ("w1", epoch, "q", "east")
        assert (slot.task, slot.task_id, slot.committed) == ("t", "id-1", False)
        now = registry.heartbeat("w1", epoch).store_time
        assert now < slot.deadline <= now + LONG_SECONDS
        assert slot.token

    def test_tokens_are_never_used_twice(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=1))
        tokens = []
        for _ in range(50):
            tokens.append(take(registry, self.demand()).token)
            registry.cancel(tokens[-1])
        assert len(set(tokens)) == 50

    # -- commit ------------------------------------------------------------------------------------------

    def test_commit_changes_no_count(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=1))
        slot = take(registry, self.demand())
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (1, 0)
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.COMMITTED
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (0, 1)
        assert refused(registry, self.demand()).reason is Reason.FULL

    def test_second_commit_says_so(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = self._committed(registry, epoch)
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.ALREADY
        assert view(registry, "w1").held == 1

    def test_commit_by_an_older_epoch_is_told_so(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        newer = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        assert registry.commit(slot.token, "w1", older) is CommitOutcome.STALE
        assert view(registry, "w1").committed == 0
        assert registry.commit(slot.token, "w1", newer) is CommitOutcome.COMMITTED

    def test_commit_by_another_worker_changes_nothing(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        other = registry.register(self.advert("w2"))
        assert registry.commit(slot.token, "w2", other) in (CommitOutcome.STALE, CommitOutcome.GONE)
        assert (view(registry, "w1").committed, view(registry, "w2").committed) == (0, 0)
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.COMMITTED

    def test_commit_of_an_unknown_or_released_token(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert registry.commit("never-was", "w1", epoch) is CommitOutcome.GONE
        slot = take(registry, self.demand())
        registry.cancel(slot.token)
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.GONE
        assert slots_held(registry) == 0

    # -- the deadline ------------------------------------------------------------------------------------

    def test_reservation_ends_at_its_deadline(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=1))
        slot = take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        self.wait_until(lambda: view(registry, "w1").held == 0)
        assert slots_held(registry) == 0
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.GONE
        assert registry.release(slot.token).outcome is ReleaseOutcome.ALREADY
        assert registry.cancel(slot.token) is ReleaseOutcome.ALREADY
        take(registry, self.demand())
        assert refused(registry, self.demand()).reason is Reason.FULL

    def test_ended_reservation_makes_room_without_any_sweep(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=1))
        take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        self.wait_until(lambda: isinstance(registry.select_and_reserve(self.demand()), Reservation))

    def test_ended_reservation_makes_room_in_the_queues_limit(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        registry.set_limit("q", 1)
        take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        self.wait_until(lambda: isinstance(registry.select_and_reserve(self.demand()), Reservation))
        assert registry.census("q").held == 1

    def test_commit_at_the_deadline_is_too_late_without_any_sweep(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        # Only another worker's heartbeat looks at the clock: nothing else touches the reservation.
        other = registry.register(self.advert("w2"))
        self.wait_until(lambda: registry.heartbeat("w2", other).store_time >= slot.deadline)
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.GONE

    def test_committed_slot_has_no_deadline(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand(ttl_seconds=2.0))
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.COMMITTED
        self.wait_until(lambda: registry.heartbeat("w1", epoch, [slot.token]).store_time > slot.deadline)
        assert view(registry, "w1").committed == 1
        assert registry.release(slot.token, epoch).outcome is ReleaseOutcome.RELEASED

    # -- release and cancel ------------------------------------------------------------------------------

    def test_release_gives_the_slot_back_once(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        first, _second = self._committed(registry, epoch), self._committed(registry, epoch)
        assert registry.release(first.token, epoch).outcome is ReleaseOutcome.RELEASED
        for _ in range(2):
            assert registry.release(first.token, epoch).outcome is ReleaseOutcome.ALREADY
        assert view(registry, "w1").held == 1
        assert registry.release("never-was").outcome is ReleaseOutcome.ALREADY

    def test_release_by_an_epoch_that_does_not_hold_the_token(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = self._committed(registry, epoch)
        other = registry.register(self.advert("w2"))
        for wrong in (epoch - 1, other):
            assert registry.release(slot.token, wrong).outcome is ReleaseOutcome.STALE
        assert slots_held(registry) == 1

    def test_release_of_a_reservation_without_an_epoch(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        released = registry.release(slot.token)
        assert (released.outcome, released.claim, released.waiting) == (ReleaseOutcome.RELEASED, None, False)
        assert slots_held(registry) == 0

    def test_cancel_gives_a_reservation_back_once(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=1))
        slot = take(registry, self.demand())
        assert registry.cancel(slot.token) is ReleaseOutcome.RELEASED
        take(registry, self.demand())
        assert registry.cancel(slot.token) is ReleaseOutcome.ALREADY
        assert slots_held(registry) == 1
        assert registry.cancel("never-was") is ReleaseOutcome.ALREADY

    def test_cancel_leaves_what_the_worker_has_committed(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = self._committed(registry, epoch)
        assert registry.cancel(slot.token) is ReleaseOutcome.COMMITTED
        assert view(registry, "w1").committed == 1
        assert registry.release(slot.token, epoch).outcome is ReleaseOutcome.RELEASED

    # -- the reservation as a context manager ------------------------------------------------------------

    def _reserve(self, registry: Registry) -> Reservation:
        answer = registry.select_and_reserve(self.demand())
        assert isinstance(answer, Reservation)
        return answer

    def test_leaving_the_block_gives_the_slot_back(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        with self._reserve(registry):
            assert slots_held(registry) == 1
        assert slots_held(registry) == 0
        with pytest.raises(LookupError), self._reserve(registry):
            raise LookupError
        assert slots_held(registry) == 0

    def test_transferred_or_committed_reservation_outlives_the_block(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        with self._reserve(registry) as claim:
            claim.transfer()
        with self._reserve(registry) as claim:
            claim.commit()
            claim.commit()
        claim.release()
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (1, 1)

    def test_slot_committed_from_the_start_outlives_the_block(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        answer = registry.reserve_worker("w1", epoch, self.demand(), commit=True)
        assert isinstance(answer, Reservation)
        assert "handed over" in repr(answer)
        with answer as claim:
            pass
        claim.release()
        assert claim.commit() == claim.slot
        assert view(registry, "w1").committed == 1
        assert registry.release(claim.slot.token, epoch).outcome is ReleaseOutcome.RELEASED

    def test_committing_a_lost_reservation_raises(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        with self._reserve(registry) as claim:
            registry.register(self.advert("w1"))
            with pytest.raises(ReservationLost):
                claim.commit()
        assert slots_held(registry) == 0

    def test_failing_to_give_back_is_logged_and_does_not_hide_the_error(
        self, registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(token: str) -> ReleaseOutcome:
            raise RegistryError("disk full")

        registry.register(self.advert("w1"))
        with caplog.at_level(logging.ERROR), pytest.raises(LookupError), self._reserve(registry) as claim:
            monkeypatch.setattr(registry, "cancel", fail)
            raise LookupError
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        for expected in ("w1", claim.slot.token, "disk full"):
            assert expected in record.getMessage()

    # -- namespaces and several openings -----------------------------------------------------------------

    def test_registries_of_one_namespace_share_their_state(
        self, registry: Registry, open_registry: OpenRegistry
    ) -> None:
        epoch = registry.register(self.advert("w1"))
        with open_registry("contract") as other:
            slot = take(other, self.demand())
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.COMMITTED

    def test_namespaces_never_see_each_other(self, registry: Registry, open_registry: OpenRegistry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        registry.set_limit("q", 5)
        with open_registry("other") as other:
            assert other.overview().workers == ()
            assert refused(other, self.demand()).reason is Reason.NO_WORKER
            assert other.census("q").limit is None
            assert other.release(slot.token).outcome is ReleaseOutcome.ALREADY
            assert other.commit(slot.token, "w1", epoch) is CommitOutcome.GONE
            assert other.expire("cleaner") == ()
        assert registry.overview().namespace == registry.namespace
        assert slots_held(registry) == 1

    def test_closing_twice_is_harmless_and_keeps_the_state(
        self, registry: Registry, open_registry: OpenRegistry
    ) -> None:
        registry.register(self.advert("w1"))
        other = open_registry("contract")
        take(other, self.demand())
        other.close()
        other.close()
        assert slots_held(registry) == 1
