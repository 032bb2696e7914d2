"""Contract: what is counted, so that healing is never silent.  Invariants 4, 10 and 16."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from ..errors import InvalidCounterError
from ..models import CommitOutcome, ReleaseOutcome, Standing, StoreCounter, WorkerState
from ..registry.contract import Registry, Reservation
from ._base import LONG_SECONDS, SHORT_SECONDS, ContractBase, OpenRegistry, counters, take, view

__all__ = ("CounterContract",)

EXPIRED = StoreCounter.RESERVATIONS_EXPIRED.value
LAPSED = StoreCounter.WORKERS_LAPSED.value
FREED = StoreCounter.SLOTS_FREED_BY_LAPSE.value
STALE = StoreCounter.STALE_REFUSED.value


class CounterContract(ContractBase):
    """add_counters, and what a store counts by itself."""

    # -- told by others ----------------------------------------------------------------------------------

    def test_nothing_is_counted_at_first(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        assert registry.overview().counters == ()

    def test_counts_add_up_in_name_order(self, registry: Registry) -> None:
        registry.add_counters({"moved": 2, "healed": 1})
        registry.add_counters({"moved": 3, "zwölf": 12, "x" * 64: 1})
        counted = registry.overview().counters
        assert counted == (("healed", 1), ("moved", 5), ("x" * 64, 1), ("zwölf", 12))
        assert (counted[0].name, counted[0].total) == ("healed", 1)

    def test_counters_outlive_the_worker(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        registry.add_counters({"healed": 7})
        registry.deregister("w1", epoch)
        registry.expire("cleaner")
        assert registry.forget("w1", epoch)
        assert counters(registry) == {"healed": 7}

    def test_counters_are_shared_in_a_namespace_and_nowhere_else(self, open_registry: OpenRegistry) -> None:
        with open_registry("one") as one, open_registry("one") as same, open_registry("other") as other:
            one.add_counters({"healed": 1})
            same.add_counters({"healed": 1})
            assert counters(one) == counters(same) == {"healed": 2}
            assert counters(other) == {}

    def test_counting_nothing_is_harmless(self, registry: Registry) -> None:
        registry.add_counters({})
        assert counters(registry) == {}

    @pytest.mark.parametrize("name", ["", "x" * 65, None, 3, b"healed"])
    def test_wrong_name_is_an_error_and_nothing_is_counted(self, registry: Registry, name: Any) -> None:
        with pytest.raises(InvalidCounterError, match="64") as caught:
            registry.add_counters({"healed": 1, name: 1})
        assert caught.value.value == name
        assert counters(registry) == {}

    @pytest.mark.parametrize("count", [0, -1, 1.0, True, None, "1", 2**64])
    def test_wrong_count_is_an_error_that_names_it_and_nothing_is_counted(self, registry: Registry, count: Any) -> None:
        with pytest.raises(InvalidCounterError, match="moved is") as caught:
            registry.add_counters({"healed": 1, "moved": count})
        assert (caught.value.name, caught.value.value) == ("moved", count)
        assert counters(registry) == {}

    def test_simultaneous_counts_are_all_counted(self, open_registry: OpenRegistry) -> None:
        with open_registry("crowd") as registry:
            crowd = [
                threading.Thread(target=lambda: [registry.add_counters({"a": 1, "b": 2}) for _ in range(25)])
                for _ in range(4)
            ]
            for thread in crowd:
                thread.start()
            for thread in crowd:
                thread.join()
            assert counters(registry) == {"a": 100, "b": 200}

    # -- seen by the store alone -------------------------------------------------------------------------

    def test_reservation_that_nobody_took_over_is_counted_once(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=3))
        take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        take(registry, self.demand(ttl_seconds=LONG_SECONDS))
        self.wait_until(lambda: view(registry, "w1").held == 1)
        registry.expire("cleaner")
        registry.expire("cleaner")
        assert counters(registry) == {EXPIRED: 2}

    def test_reservation_that_a_choice_finds_expired_is_counted(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=1))
        take(registry, self.demand(ttl_seconds=SHORT_SECONDS))
        self.wait_until(lambda: isinstance(registry.select_and_reserve(self.demand()), Reservation))
        assert counters(registry) == {EXPIRED: 1}

    def test_reservation_that_ended_in_time_is_not_counted(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1", capacity=3))
        first, second, third = (take(registry, self.demand(ttl_seconds=1.0)) for _ in range(3))
        registry.commit(first.token, "w1", epoch)
        registry.cancel(second.token)
        registry.release(third.token, epoch)
        until = registry.heartbeat("w1", epoch, [first.token]).store_time + 1.0
        self.wait_until(lambda: registry.heartbeat("w1", epoch, [first.token]).store_time > until)
        registry.expire("cleaner")
        assert counters(registry) == {}

    def test_lapse_is_counted_with_the_slots_that_it_frees(self, registry: Registry) -> None:
        self._let_lapse(registry, "w1", slots=2)
        self._let_lapse(registry, "w2", slots=0)
        registry.expire("cleaner")
        registry.expire("cleaner")
        assert counters(registry) == {LAPSED: 2, FREED: 2}

    def test_lapse_without_slots_frees_none(self, registry: Registry) -> None:
        self._let_lapse(registry, "w1", slots=0)
        registry.expire("cleaner")
        assert counters(registry) == {LAPSED: 1}

    def _let_lapse(self, registry: Registry, name: str, slots: int) -> None:
        registry.register(self.advert(name, lease_seconds=0.5, lapse_seconds=0.5))
        for _ in range(slots):
            take(registry, self.demand(node=f"node-of-{name}"))
        self.wait_until(lambda: view(registry, name).state is WorkerState.LAPSED)

    def test_worker_that_leaves_or_registers_anew_has_not_lapsed(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        take(registry, self.demand())
        epoch = registry.register(self.advert("w1"))
        take(registry, self.demand())
        registry.deregister("w1", epoch)
        registry.expire("cleaner")
        assert counters(registry) == {}

    def test_every_word_of_an_older_epoch_is_counted_and_logged(
        self, registry: Registry, caplog: pytest.LogCaptureFixture
    ) -> None:
        old = registry.register(self.advert("w1"))
        new = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        with caplog.at_level(logging.INFO):
            assert registry.commit(slot.token, "w1", old) is CommitOutcome.STALE
            assert counters(registry) == {STALE: 1}
            assert registry.release(slot.token, old).outcome is ReleaseOutcome.STALE
            assert counters(registry) == {STALE: 2}
            assert registry.heartbeat("w1", old).standing is Standing.REPLACED
            assert counters(registry) == {STALE: 3}
            assert registry.deregister("w1", old) is False
            assert counters(registry) == {STALE: 4}
        refused = [record for record in caplog.records if getattr(record, "action", "") == STALE]
        assert [vars(record)["operation"] for record in refused] == ["commit", "release", "heartbeat", "deregistration"]
        assert {vars(record)["epoch"] for record in refused} == {old}
        assert registry.commit(slot.token, "w1", new) is CommitOutcome.COMMITTED, "nothing was changed"

    def test_commit_of_a_slot_of_another_worker_is_counted(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        epoch = registry.register(self.advert("w2"))
        assert registry.commit(slot.token, "w2", epoch) is CommitOutcome.STALE
        assert counters(registry) == {STALE: 1}

    def test_what_is_only_late_or_said_twice_is_not_stale(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        slot = take(registry, self.demand())
        registry.release(slot.token, epoch)
        registry.release(slot.token, epoch)
        registry.commit(slot.token, "w1", epoch)
        registry.heartbeat("nobody", epoch)
        registry.deregister("w1", epoch)
        registry.deregister("w1", epoch)
        registry.heartbeat("w1", epoch)
        assert counters(registry) == {}
