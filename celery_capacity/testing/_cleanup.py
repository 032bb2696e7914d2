"""Contract: workers that are gone, and who cleans up after them.  Invariants 4, 10 and 16."""

from __future__ import annotations

from ..models import CommitOutcome, Demand, LapsedWorker, Reason, ReleaseOutcome, Standing, WorkerState
from ..registry.contract import Registry
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
