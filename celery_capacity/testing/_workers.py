"""Contract: a worker's life.  Invariants 4, 10 and 14."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..errors import InvalidAdvertError
from ..models import CommitOutcome, Reason, ReleaseOutcome, Slot, Standing, WorkerState
from ..registry.contract import Registry
from ._base import SHORT_SECONDS, ContractBase, queue_view, refused, slots_held, take, view

__all__ = ("WorkerContract",)


def _slot(token: str, worker: str = "w1") -> Slot:
    return Slot(token, worker, epoch=1, queue="q", task="t", committed=True)


class WorkerContract(ContractBase):
    """register, heartbeat, restore, resize, deregister, drain and admit."""

    # -- register ----------------------------------------------------------------------------------------

    def test_registered_worker_is_shown_as_it_advertised(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=3, queues=("q", "r"), node="east"))
        shown = view(registry, "w1")
        assert (shown.name, shown.node, shown.epoch, shown.capacity) == ("w1", "east", epoch, 3)
        assert (shown.state, shown.reason, shown.held, shown.free) == (WorkerState.READY, None, 0, 3)
        assert (shown.host, shown.pid) == ("host-of-w1", 4711)
        assert sorted(shown.queues) == ["q", "r"]
        assert shown.lease_age >= 0

    def test_every_epoch_is_higher_than_the_ones_before(self, registry: Registry) -> None:
        epochs = [registry.register(self.advert("w1")) for _ in range(3)]
        registry.deregister("w1", epochs[-1])
        epochs.append(registry.register(self.advert("w1")))
        registry.deregister("w1", epochs[-1])
        registry.expire("cleaner")
        registry.forget("w1", epochs[-1])
        epochs.append(registry.register(self.advert("w1")))
        assert epochs == sorted(set(epochs))

    def test_epochs_of_two_workers_differ(self, registry: Registry) -> None:
        assert registry.register(self.advert("w1")) != registry.register(self.advert("w2"))

    def test_registering_anew_releases_what_the_older_registration_held(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        committed, reserved = take(registry, self.demand()), take(registry, self.demand())
        registry.commit(committed.token, "w1", epoch)
        newer = registry.register(self.advert("w1"))
        assert slots_held(registry) == 0
        assert registry.commit(reserved.token, "w1", newer) is CommitOutcome.GONE
        assert registry.release(committed.token, newer).outcome is ReleaseOutcome.ALREADY
        assert view(registry, "w1").free == 2

    def test_registering_anew_with_other_queues_tasks_and_node(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        registry.register(self.advert("w1", queues=("r",), tasks=frozenset({"v"}), node="elsewhere"))
        assert refused(registry, self.demand()).reason is Reason.NO_WORKER
        assert take(registry, self.demand(queue="r", task="v", node="elsewhere")).worker == "w1"
        assert refused(registry, self.demand(queue="r", task="t")).reason is Reason.UNKNOWN_TASK
        assert refused(registry, self.demand(queue="r", task="v", node="node-of-w1")).reason is Reason.OTHER_NODE

    def test_holding_is_put_back_under_the_new_epoch(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        registry.commit(slot.token, "w1", older)
        newer = registry.register(self.advert("w1"), holding=[slot])
        shown = view(registry, "w1")
        assert (shown.reserved, shown.committed) == (0, 1)
        assert queue_view(registry, "q").held == 1
        assert registry.release(slot.token, older).outcome is ReleaseOutcome.STALE
        assert slots_held(registry) == 1
        assert registry.release(slot.token, newer).outcome is ReleaseOutcome.RELEASED
        assert slots_held(registry) == 0

    def test_holding_counts_each_token_once(self, registry: Registry) -> None:
        registry.register(self.advert("w1"), holding=[_slot("a"), _slot("a"), _slot("b")])
        assert view(registry, "w1").committed == 2

    def test_holding_does_not_take_a_slot_of_another_worker(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        registry.register(self.advert("w2"), holding=[slot])
        assert (view(registry, "w1").held, view(registry, "w2").held) == (1, 0)

    def test_holding_past_the_capacity_is_recorded_and_nothing_is_admitted(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=1), holding=[_slot("a"), _slot("b")])
        shown = view(registry, "w1")
        assert (shown.held, shown.free, shown.reason) == (2, 0, Reason.FULL)
        registry.release("a", epoch)
        assert refused(registry, self.demand()).reason is Reason.FULL
        registry.release("b", epoch)
        assert take(registry, self.demand()).worker == "w1"

    def test_registration_that_raises_leaves_no_trace(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())

        def broken() -> Iterator[Slot]:
            yield _slot("a")
            raise LookupError

        before = registry.overview().queues
        with pytest.raises(LookupError):
            registry.register(self.advert("w1", capacity=9), holding=broken())
        with pytest.raises(LookupError):
            registry.register(self.advert("w2"), holding=broken())
        assert [w.name for w in registry.overview().workers] == ["w1"]
        assert view(registry, "w1").capacity == 2
        assert registry.overview().queues == before
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.COMMITTED

    # -- heartbeat ---------------------------------------------------------------------------------------

    def test_heartbeat_renews_the_lease(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", lease_seconds=1.0))
        self.wait_until(lambda: view(registry, "w1").state is WorkerState.LATE)
        assert refused(registry, self.demand()).reason is Reason.LATE
        # On a slow machine the lease may end again between the two, so they are repeated.
        self.wait_until(lambda: registry.heartbeat("w1", epoch) and view(registry, "w1").state is WorkerState.READY)
        assert view(registry, "w1").lease_age < 1.0

    def test_late_worker_keeps_its_slots(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", lease_seconds=SHORT_SECONDS))
        slots = [registry.reserve_worker("w1", epoch, self.demand(), commit=True) for _ in range(2)]
        self.wait_until(lambda: view(registry, "w1").state is WorkerState.LATE)
        assert registry.expire("cleaner") == ()
        assert view(registry, "w1").committed == len(slots)

    def test_heartbeat_of_an_unknown_worker_is_gone(self, registry: Registry) -> None:
        assert registry.heartbeat("w1", 1).standing is Standing.GONE
        assert registry.overview().workers == ()

    def test_heartbeat_of_a_deregistered_worker_is_gone(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.deregister("w1", epoch)
        assert registry.heartbeat("w1", epoch).standing is Standing.GONE

    def test_heartbeat_of_an_older_epoch_is_told_who_replaced_it_and_heals_nothing(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        newer = registry.register(self.advert("w1", host="other-host", pid=99))
        slot = take(registry, self.demand())
        registry.commit(slot.token, "w1", newer)
        since = registry.heartbeat("w1", newer, holding=[slot.token]).store_time
        pulse = registry.heartbeat("w1", older, holding=[], since=since + LONG)
        assert pulse.standing is Standing.REPLACED
        assert pulse.by == "host=other-host pid=99"
        assert pulse.healed == ()
        assert view(registry, "w1").committed == 1

    def test_heartbeat_heals_a_leak(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        kept, leaked = take(registry, self.demand()), take(registry, self.demand())
        for slot in (kept, leaked):
            registry.commit(slot.token, "w1", epoch)
        healed: list[str] = []

        def beat() -> bool:
            # The first pulse may carry the very instant of the commit; that is not before it.
            since = registry.heartbeat("w1", epoch, holding=[kept.token, leaked.token]).store_time
            healed.extend(registry.heartbeat("w1", epoch, holding=[kept.token], since=since).healed)
            return bool(healed)

        self.wait_until(beat)
        assert healed == [leaked.token]
        assert view(registry, "w1").held == 1
        assert registry.release(leaked.token, epoch).outcome is ReleaseOutcome.ALREADY

    def test_heartbeat_leaves_what_was_committed_since(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        since = registry.heartbeat("w1", epoch).store_time
        slot = take(registry, self.demand())
        registry.commit(slot.token, "w1", epoch)
        assert registry.heartbeat("w1", epoch, holding=[], since=since).healed == ()
        assert view(registry, "w1").committed == 1

    def test_first_heartbeat_heals_nothing(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"), holding=[_slot("a")])
        assert registry.heartbeat("w1", epoch, holding=[]).healed == ()

    def test_heartbeat_leaves_reservations(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        take(registry, self.demand())
        since = registry.heartbeat("w1", epoch).store_time
        assert registry.heartbeat("w1", epoch, holding=[], since=since + LONG).healed == ()
        assert view(registry, "w1").reserved == 1

    def test_missing_tokens_are_reported_and_restored(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=1))
        pulse = registry.heartbeat("w1", epoch, holding=["lost"])
        assert (pulse.standing, pulse.missing) == (Standing.CURRENT, ("lost",))
        assert slots_held(registry) == 0, "only reported, not put back"
        assert registry.restore("w1", epoch, [_slot("lost")]) == 1
        assert refused(registry, self.demand()).reason is Reason.FULL
        assert registry.heartbeat("w1", epoch, holding=["lost"]).missing == ()
        assert (view(registry, "w1").committed, view(registry, "w1").reason) == (1, Reason.FULL)
        assert registry.restore("w1", epoch, [_slot("lost")]) == 0
        assert view(registry, "w1").committed == 1
        assert registry.release("lost", epoch).outcome is ReleaseOutcome.RELEASED
        assert take(registry, self.demand()).worker == "w1"

    def test_what_is_restored_pushes_out_reservations(self, registry: Registry) -> None:
        """It runs, and what is reserved has not arrived yet: no more is ever held than the capacity."""
        epoch = registry.register(self.advert("w1", capacity=3))
        first, second, third = (take(registry, self.demand()) for _ in range(3))
        assert registry.commit(first.token, "w1", epoch) is CommitOutcome.COMMITTED
        assert registry.restore("w1", epoch, [_slot("a")]) == 1
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (1, 2)
        assert registry.commit(third.token, "w1", epoch) is CommitOutcome.GONE
        assert registry.restore("w1", epoch, [_slot("b"), _slot("c")]) == 2
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (0, 4)
        assert registry.commit(second.token, "w1", epoch) is CommitOutcome.GONE
        assert refused(registry, self.demand()).reason is Reason.FULL
        for token in (first.token, "a", "b", "c"):
            assert registry.release(token, epoch).outcome is ReleaseOutcome.RELEASED
        assert slots_held(registry) == 0

    def test_what_was_reserved_before_a_resize_stays_when_something_is_restored(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=4))
        for _ in range(4):
            take(registry, self.demand())
        assert registry.resize("w1", epoch, 1)
        assert registry.restore("w1", epoch, [_slot("a")]) == 1
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (3, 1)

    def test_restore_of_an_older_epoch_or_a_known_token_changes_nothing(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        newer = registry.register(self.advert("w1"))
        other = registry.register(self.advert("w2"))
        slot = take(registry, self.demand(node="node-of-w1"))
        assert registry.restore("w1", older, [_slot("a")]) == 0
        assert registry.restore("nobody", newer, [_slot("a")]) == 0
        assert registry.restore("w2", other, [slot]) == 0
        assert (view(registry, "w1").reserved, view(registry, "w1").committed) == (1, 0)
        assert view(registry, "w2").held == 0

    # -- resize ------------------------------------------------------------------------------------------

    def test_unknown_capacity_is_never_chosen_until_it_is_said(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=None))
        shown = view(registry, "w1")
        assert (shown.state, shown.reason, shown.free) == (WorkerState.UNKNOWN, Reason.UNKNOWN_CAPACITY, 0)
        assert refused(registry, self.demand()).reason is Reason.UNKNOWN_CAPACITY
        assert registry.resize("w1", epoch, 1)
        assert take(registry, self.demand()).worker == "w1"
        assert registry.resize("w1", epoch, None)
        assert refused(registry, self.demand()).reason is Reason.UNKNOWN_CAPACITY
        assert view(registry, "w1").held == 1

    def test_capacity_lowered_below_what_is_held(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=3))
        slots = [take(registry, self.demand()) for _ in range(3)]
        assert registry.resize("w1", epoch, 1)
        assert view(registry, "w1").held == 3
        for slot in slots[:2]:
            assert refused(registry, self.demand()).reason is Reason.FULL
            registry.release(slot.token)
        assert refused(registry, self.demand()).reason is Reason.FULL
        registry.release(slots[2].token)
        take(registry, self.demand())
        assert refused(registry, self.demand()).reason is Reason.FULL

    def test_raised_capacity_is_offered_at_once(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=0))
        assert refused(registry, self.demand()).reason is Reason.FULL
        registry.resize("w1", epoch, 1)
        take(registry, self.demand())

    @pytest.mark.parametrize("capacity", [-1, 1.5, True, "2"])
    def test_bad_capacity_changes_nothing(self, registry: Registry, capacity: Any) -> None:
        epoch = registry.register(self.advert("w1"))
        with pytest.raises(InvalidAdvertError):
            registry.resize("w1", epoch, capacity)
        assert view(registry, "w1").capacity == 2

    def test_resize_by_an_older_epoch_or_an_unknown_worker(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        newer = registry.register(self.advert("w1"))
        assert not registry.resize("w1", older, 7)
        assert not registry.resize("nobody", newer, 7)
        assert [w.capacity for w in registry.overview().workers] == [2]

    # -- deregister --------------------------------------------------------------------------------------

    def test_deregistered_worker_frees_its_slots_and_is_not_chosen(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        assert registry.deregister("w1", epoch)
        assert slots_held(registry) == 0
        assert refused(registry, self.demand()).reason is Reason.NO_WORKER
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.GONE
        assert registry.census("q").workers == ()

    def test_deregistering_twice_is_harmless(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert registry.deregister("w1", epoch)
        assert not registry.deregister("w1", epoch)
        assert not registry.deregister("nobody", epoch)

    def test_older_epoch_cannot_deregister(self, registry: Registry) -> None:
        older = registry.register(self.advert("w1"))
        registry.register(self.advert("w1"))
        assert not registry.deregister("w1", older)
        take(registry, self.demand())

    # -- drain and admit ---------------------------------------------------------------------------------

    def test_draining_worker_is_not_chosen_and_keeps_its_slots(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        assert registry.drain("w1", "new release")
        shown = view(registry, "w1")
        assert (shown.state, shown.reason, shown.held) == (WorkerState.DRAINING, Reason.DRAINING, 1)
        assert "new release" in shown.detail
        assert refused(registry, self.demand()).reason is Reason.DRAINING
        assert registry.heartbeat("w1", epoch).draining == "new release"
        assert registry.commit(slot.token, "w1", epoch) is CommitOutcome.COMMITTED
        assert registry.release(slot.token, epoch).outcome is ReleaseOutcome.RELEASED
        assert refused(registry, self.demand()).reason is Reason.DRAINING
        assert registry.admit("w1")
        assert registry.heartbeat("w1", epoch).draining is None
        take(registry, self.demand())

    def test_drain_ends_by_itself(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.drain("w1", "for a moment", SHORT_SECONDS)
        self.wait_until(lambda: view(registry, "w1").reason is None)
        take(registry, self.demand())
        assert registry.heartbeat("w1", epoch).draining is None

    def test_second_drain_replaces_reason_and_expiry(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.drain("w1", "long", LONG)
        registry.drain("w1", "short", SHORT_SECONDS)
        self.wait_until(lambda: view(registry, "w1").reason is None)
        registry.drain("w1", "short", SHORT_SECONDS)
        registry.drain("w1", "for ever")
        assert registry.heartbeat("w1", epoch).draining == "for ever"
        self._advance(2 * SHORT_SECONDS)
        assert registry.heartbeat("w1", epoch).draining == "for ever"

    def test_registering_anew_ends_a_drain(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        registry.drain("w1", "stays")
        registry.register(self.advert("w1"))
        take(registry, self.demand())

    def test_drain_and_admit_of_an_unknown_worker(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        assert not registry.drain("nobody", "why")
        assert not registry.admit("nobody")
        assert registry.admit("w1")
        registry.deregister("w1", epoch)
        assert not registry.drain("w1", "why")
        assert not registry.admit("w1")


#: Added to an instant of the store to get one that lies in its future.
LONG = 3600.0
