"""Contract: many at once.  Invariants 1, 2 and 4, from the threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ..models import CommitOutcome, Reason, Refusal, ReleaseOutcome
from ..registry.contract import Registry, Reservation
from ._base import LONG_SECONDS, ContractBase, slots_held, take

__all__ = ("CrowdContract",)

CROWD = 16


T = TypeVar("T")


def together(count: int, call: Callable[[int], T]) -> list[T]:
    """``call(0) … call(count - 1)`` in as many threads, let go at the same instant."""
    gate = threading.Barrier(count)

    def run(index: int) -> T:
        gate.wait(timeout=30)
        return call(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def _call_together(calls: Sequence[Callable[[], object]]) -> list[object]:
    return together(len(calls), lambda index: calls[index]())


class CrowdContract(ContractBase):
    """What holds when it happens at once."""

    def test_as_many_as_there_are_slots_all_succeed(self, registry: Registry) -> None:
        for index in range(4):
            registry.register(self.advert(f"w{index}", capacity=CROWD // 4))
        for _ in range(5):
            answers = together(CROWD, lambda _: registry.select_and_reserve(self.demand()))
            granted = [a for a in answers if isinstance(a, Reservation)]
            assert len(granted) == CROWD
            assert set(Counter(a.slot.worker for a in granted).values()) == {CROWD // 4}
            assert len({a.slot.token for a in granted}) == CROWD
            for claim in granted:
                claim.release()
        assert slots_held(registry) == 0

    def test_one_more_than_there_are_slots_is_refused(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=CROWD - 1))
        answers = together(CROWD, lambda _: registry.select_and_reserve(self.demand()))
        assert [a.reason for a in answers if isinstance(a, Refusal)] == [Reason.FULL]

    def test_one_more_than_the_limit_is_refused(self, registry: Registry) -> None:
        registry.register(self.advert("w1", capacity=CROWD))
        registry.set_limit("q", CROWD - 1)
        answers = together(CROWD, lambda _: registry.select_and_reserve(self.demand()))
        assert [a.reason for a in answers if isinstance(a, Refusal)] == [Reason.LIMIT]

    def test_one_of_many_releases_counts(self, registry: Registry) -> None:
        registry.register(self.advert("w1"))
        slot, _other = take(registry, self.demand()), take(registry, self.demand())
        answers = together(CROWD, lambda _: registry.release(slot.token).outcome)
        assert Counter(answers) == {ReleaseOutcome.RELEASED: 1, ReleaseOutcome.ALREADY: CROWD - 1}
        assert slots_held(registry) == 1

    def test_commit_and_cancel_race_has_one_winner(self, registry: Registry) -> None:
        epoch = registry.register(self.advert("w1"))
        for _ in range(10):
            slot = take(registry, self.demand())
            committed, cancelled = _call_together(
                [partial(registry.commit, slot.token, "w1", epoch), partial(registry.cancel, slot.token)]
            )
            if committed is CommitOutcome.COMMITTED:
                assert cancelled is ReleaseOutcome.COMMITTED
                assert registry.release(slot.token, epoch).outcome is ReleaseOutcome.RELEASED
            else:
                assert (committed, cancelled) == (CommitOutcome.GONE, ReleaseOutcome.RELEASED)
            assert slots_held(registry) == 0

    def test_registrations_at_once_get_epochs_of_their_own(self, registry: Registry) -> None:
        epochs = sorted(together(CROWD, lambda _: registry.register(self.advert("w1"))))
        assert len(set(epochs)) == CROWD
        (shown,) = registry.overview().workers
        assert shown.epoch == epochs[-1]

    def test_gone_worker_is_handed_to_one_of_many_cleaners(self, registry: Registry) -> None:
        registry.deregister("w1", registry.register(self.advert("w1")))
        answers = together(CROWD, lambda i: registry.expire(f"cleaner-{i}", LONG_SECONDS))
        assert sum(bool(answer) for answer in answers) == 1
