"""Contract: workers that are gone, and who cleans up after them.  Invariants 4, 10 and 16."""

from __future__ import annotations

from typing import Any

from ..models import CommitOutcome, Demand, LapsedWorker, Lot, Reason, ReleaseOutcome, Slot, Standing, WorkerState
from ..registry.contract import Registry, Reservation
from ._base import LONG_SECONDS, SHORT_SECONDS, ContractBase, refused, slots_held, take, view

__all__ = ("CleanupContract",)


class CleanupContract(ContractBase):
    """expire, forget, and what is left of a gone worker."""

    def _lapse(self, registry: Registry, *demands: Demand, name: str = "w1") -> tuple[int, list[str]]:
        """Register a worker, reserve on it, and wait until it has lapsed; nothing is swept yet."""
        epoch = registry.register(self.advert(name, lease_seconds=0.5, lapse_seconds=0.5))
        tokens = [take(registry, demand).token for demand in demands]
        self.wait_until(lambda: view(registry, name).state is WorkerState.LAPSED)
        return epoch, tokens

    def test_nothing_to_clean_up(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        assert registry.expire("cleaner") == ()
        assert take(registry, self.demand()).worker == "w1"

    def test_lapsed_worker_is_swept(self, registry: Registry) -> None:
        epoch, tokens = self._lapse(registry, self.demand(), self.demand())
        assert view(registry, "w1").reason is Reason.LAPSED
        (gone,) = registry.expire("cleaner")
        assert (gone.name, gone.epoch) == ("w1", epoch)
        assert slots_held(registry) == 0
        assert registry.census("q").workers == ()
        assert view(registry, "w1").state is WorkerState.LAPSED
        assert refused(registry, self.demand()).served is False
        assert registry.heartbeat("w1", epoch).standing is Standing.GONE
        assert registry.commit(tokens[0], "w1", epoch) is CommitOutcome.GONE
        assert registry.release(tokens[1], epoch).outcome is ReleaseOutcome.ALREADY
        assert not registry.resize("w1", epoch, 5)
        assert registry.restore("w1", epoch, []) == 0
        assert not registry.deregister("w1", epoch)

    def test_worker_that_beats_does_not_lapse(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", lease_seconds=3.0, lapse_seconds=3.0))
        other = registry.register(self.advert("w2"))
        start = registry.heartbeat("w2", other).store_time

        def beat() -> bool:
            return registry.heartbeat("w1", epoch).store_time > start + 3.5

        self.wait_until(beat)
        assert registry.expire("cleaner") == ()
        assert registry.heartbeat("w1", epoch).standing is Standing.CURRENT

    def test_deregistered_worker_is_handed_out(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.deregister("w1", epoch)
        assert view(registry, "w1").state is WorkerState.LAPSED
        assert registry.expire("cleaner") == (LapsedWorker("w1", epoch, settled=True),)

    def test_each_gone_worker_is_handed_to_one_cleaner_at_a_time(self, registry: Registry) -> None:
        epochs = {name: registry.register(self.advert(name)) for name in ("w1", "w2")}
        registry.deregister("w1", epochs["w1"])
        assert [g.name for g in registry.expire("a", LONG_SECONDS)] == ["w1"]
        assert registry.expire("b", LONG_SECONDS) == ()
        registry.deregister("w2", epochs["w2"])
        assert [g.name for g in registry.expire("b", LONG_SECONDS)] == ["w2"]
        assert [g.name for g in registry.expire("a", LONG_SECONDS)] == ["w1"], "again the same one"

    def test_cleaner_that_died_is_followed_by_another(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.deregister("w1", epoch)
        assert registry.expire("a", SHORT_SECONDS)
        self.wait_until(lambda: registry.expire("b", LONG_SECONDS))
        assert registry.expire("a", LONG_SECONDS) == ()

    def test_every_call_of_a_cleaner_renews_its_hold(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.deregister("w1", epoch)
        assert registry.expire("a", SHORT_SECONDS)
        assert registry.expire("a", LONG_SECONDS)
        self._advance(2 * SHORT_SECONDS)
        assert registry.expire("b") == ()

    def test_settled_only_after_the_last_deadline(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        take(registry, self.demand(ttl_seconds=1.0))
        registry.deregister("w1", epoch)
        self.wait_until(lambda: registry.expire("cleaner")[0].settled)
        other = registry.register(self.advert("w2"))
        take(registry, self.demand(ttl_seconds=LONG_SECONDS))
        later = take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        self.wait_until(lambda: registry.heartbeat("w2", other).store_time > later.deadline)
        registry.deregister("w2", other)
        assert [g.settled for g in registry.expire("cleaner") if g.name == "w2"] == [False]

    def test_settled_counts_a_reservation_that_was_made_before_registering_anew(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        take(registry, self.demand(ttl_seconds=LONG_SECONDS))
        for _ in range(2):
            # Once over a live registration, once over a gone one.
            registry.deregister("w1", registry.register(self.advert("w1")))
            assert [g.settled for g in registry.expire("cleaner")] == [False], "its message may still be on its way"

    def _settled(self, registry: Registry, name: str = "w1") -> bool:
        """Of a worker that is gone."""
        (settled,) = [gone.settled for gone in registry.expire("cleaner") if gone.name == name]
        return settled

    def _commit(self, registry: Registry, epoch: int, **changes: Any) -> Slot:
        slot = take(registry, self.demand(**changes))
        assert registry.commit(slot.token, slot.worker, epoch) is CommitOutcome.COMMITTED
        return slot

    def test_what_was_committed_has_arrived(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=3))
        self._commit(registry, epoch)
        released = self._commit(registry, epoch)
        assert registry.release(released.token, epoch).outcome is ReleaseOutcome.RELEASED
        registry.deregister("w1", epoch)
        assert self._settled(registry)

    def test_what_a_worker_claimed_for_itself_or_put_back_is_not_in_flight(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=3))
        claim = registry.reserve_worker("w1", epoch, self.demand(), commit=True)
        assert isinstance(claim, Reservation)
        assert isinstance(registry.claim_parked("w1", epoch, [Lot("q", "q")], marked_only=False), Slot)
        assert registry.restore("w1", epoch, [Slot("lost", "w1", epoch, "q", committed=True)]) == 1
        registry.deregister("w1", epoch)
        assert self._settled(registry)

    def test_what_was_cancelled_was_never_sent(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert registry.cancel(take(registry, self.demand()).token) is ReleaseOutcome.RELEASED
        answer = registry.reserve_worker("w1", epoch, self.demand())
        assert isinstance(answer, Reservation)
        answer.release()
        registry.deregister("w1", epoch)
        assert self._settled(registry)

    def test_what_was_released_before_it_was_committed_has_arrived(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert registry.release(take(registry, self.demand()).token, epoch).outcome is ReleaseOutcome.RELEASED
        registry.deregister("w1", epoch)
        assert self._settled(registry)

    def test_reservation_whose_deadline_has_passed_is_not_in_flight(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        self.wait_until(lambda: registry.heartbeat("w1", epoch).store_time > slot.deadline)
        registry.deregister("w1", epoch)
        assert self._settled(registry)

    def test_one_of_several_that_is_uncommitted_is_waited_for(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=4))
        self._commit(registry, epoch)
        uncommitted = take(registry, self.demand(ttl_seconds=2.0))
        registry.cancel(take(registry, self.demand()).token)
        self._commit(registry, epoch)
        registry.deregister("w1", epoch)
        assert not self._settled(registry)
        self.wait_until(lambda: self._settled(registry))
        other = registry.register(self.advert("w2"))
        assert registry.heartbeat("w2", other).store_time >= uncommitted.deadline

    def test_the_latest_of_several_that_are_uncommitted_is_waited_for(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=4))
        for seconds in (SHORT_SECONDS, LONG_SECONDS, SHORT_SECONDS):
            take(registry, self.demand(ttl_seconds=seconds))
        registry.deregister("w1", epoch)
        self._advance(2 * SHORT_SECONDS)
        assert not self._settled(registry)

    def test_lapsed_worker_is_settled_but_for_what_is_uncommitted(self, registry: Registry) -> None:
        for name, committed in (("w1", True), ("w2", False)):
            epoch = registry.register(self.advert(name, queues=(name,), lease_seconds=2.0, lapse_seconds=2.0))
            slot = take(registry, self.demand(queue=name))
            if committed:
                registry.commit(slot.token, name, epoch)
        for name in ("w1", "w2"):
            self.wait_until(lambda name=name: view(registry, name).state is WorkerState.LAPSED)  # type: ignore[misc]
        assert [(gone.name, gone.settled) for gone in registry.expire("cleaner")] == [("w1", True), ("w2", False)]

    def test_registering_anew_inherits_only_what_is_uncommitted(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = self._commit(registry, epoch)
        registry.cancel(take(registry, self.demand()).token)
        newer = registry.register(self.advert("w1"), holding=[slot])
        self._commit(registry, newer)
        registry.deregister("w1", newer)
        assert self._settled(registry)
        newest = registry.register(self.advert("w1"))
        self._commit(registry, newest)
        registry.deregister("w1", newest)
        assert self._settled(registry)

    def test_what_was_inherited_stays_whatever_is_committed_later(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        older = take(registry, self.demand(ttl_seconds=2.0))
        newer = registry.register(self.advert("w1"))
        assert registry.commit(older.token, "w1", newer) is CommitOutcome.GONE
        self._commit(registry, newer)
        take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        registry.deregister("w1", newer)
        self._advance(2 * SHORT_SECONDS)
        assert not self._settled(registry), "the older registration's message may still be on its way"
        self.wait_until(lambda: self._settled(registry))

    def test_worker_that_registers_again_is_not_handed_out(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        registry.deregister("w1", older)
        assert registry.expire("cleaner")
        newer = registry.register(self.advert("w1"))
        assert registry.expire("cleaner") == ()
        assert not registry.forget("w1", older)
        assert registry.heartbeat("w1", newer).standing is Standing.CURRENT
        assert take(registry, self.demand()).epoch == newer

    def test_lapsed_worker_that_registers_before_the_sweep(self, registry: Registry) -> None:
        self._lapse(registry, self.demand())
        newer = registry.register(self.advert("w1"))
        assert registry.expire("cleaner") == ()
        assert slots_held(registry) == 0
        assert take(registry, self.demand()).epoch == newer

    def test_gone_worker_comes_back_with_what_it_holds(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        registry.commit(slot.token, "w1", epoch)
        registry.deregister("w1", epoch)
        newer = registry.register(self.advert("w1"), holding=[slot])
        assert view(registry, "w1").committed == 1
        assert registry.release(slot.token, newer).outcome is ReleaseOutcome.RELEASED

    def test_forget(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.deregister("w1", epoch)
        registry.expire("cleaner")
        assert registry.forget("w1", epoch)
        assert registry.expire("cleaner") == ()
        assert registry.overview().workers == ()
        registry.forget("w1", epoch)
        registry.forget("nobody", epoch)

    def test_forget_of_another_epoch_or_a_live_worker_changes_nothing(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        epoch = registry.register(self.advert("w1"))
        assert not registry.forget("w1", epoch)
        registry.deregister("w1", epoch)
        registry.forget("w1", older)
        assert [g.epoch for g in registry.expire("cleaner")] == [epoch]

    def test_strikes_are_counted_by_key_until_they_are_forgotten(self, registry: Registry) -> None:
        assert [registry.strike(key, LONG_SECONDS) for key in ("a", "a", "b", "a")] == [1, 2, 1, 3]
        assert registry.strike("a", 0) == 0
        assert registry.strike("nobody", 0) == 0
        assert registry.strike("a", LONG_SECONDS) == 1
        assert registry.strike("b", LONG_SECONDS) == 2

    def test_strikes_are_forgotten_some_time_after_the_last_one(self, registry: Registry) -> None:
        assert registry.strike("kept", LONG_SECONDS) == 1
        # The last one says for how long.
        assert registry.strike("a", LONG_SECONDS) == 1
        assert registry.strike("a", SHORT_SECONDS) == 2
        self._advance(2 * SHORT_SECONDS)
        assert registry.strike("a", SHORT_SECONDS) == 1
        assert registry.strike("kept", LONG_SECONDS) == 2

    def test_overview_is_in_name_order_with_the_gone_ones(self, registry: Registry) -> None:
        epochs = {n: registry.register(self.advert(n, queues=("r", "q"))) for n in ("w3", "w1", "w2")}
        registry.deregister("w2", epochs["w2"])
        overview = registry.overview()
        assert [(w.name, w.state) for w in overview.workers] == [
            ("w1", WorkerState.READY),
            ("w2", WorkerState.LAPSED),
            ("w3", WorkerState.READY),
        ]
        assert [q.name for q in overview.queues] == ["q", "r"]
