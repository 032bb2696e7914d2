"""What all parts of the contract suite use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..models import Advert, Demand, QueueView, Refusal, Slot, WorkerView
from ..registry.contract import Registry, Reservation

__all__ = ("ContractBase", "OpenRegistry", "counters", "slots_held", "take", "view", "wait_until")

# This module is imported before the others, so that their failing assertions show values.
pytest.register_assert_rewrite(
    *(
        f"{__package__}.{part}"
        for part in ("_choice", "_cleanup", "_counters", "_crowd", "_limits", "_lots", "_slots", "_workers")
    )
)

OpenRegistry = Callable[[str], Registry]

#: Long enough never to pass while a test runs.
LONG_SECONDS = 600.0
#: Short enough to wait for.
SHORT_SECONDS = 0.2


def wait_until(
    condition: Callable[[], object], limit_seconds: float = 15.0, advance: Callable[[float], None] = time.sleep
) -> None:
    """Return as soon as ``condition()`` is true; fail the test if that takes longer than the limit."""
    give_up_at = time.monotonic() + limit_seconds
    while not condition():
        if time.monotonic() > give_up_at:
            pytest.fail(f"waited {limit_seconds:g} s in vain for {condition}")
        advance(0.01)


def take(registry: Registry, demand: Demand) -> Slot:
    """Reserve, expecting to get a slot, and keep it."""
    answer = registry.select_and_reserve(demand)
    assert isinstance(answer, Reservation), answer
    return answer.transfer()


def refused(registry: Registry, demand: Demand) -> Refusal:
    """Reserve, expecting to be refused."""
    answer = registry.select_and_reserve(demand)
    assert isinstance(answer, Refusal), answer
    return answer


def view(registry: Registry, worker: str) -> WorkerView:
    """One worker of the overview."""
    (found,) = [w for w in registry.overview().workers if w.name == worker]
    return found


def queue_view(registry: Registry, queue: str) -> QueueView:
    """One queue of the overview; an idle one need not be listed."""
    for found in registry.overview().queues:
        if found.name == queue:
            return found
    return QueueView(queue, None, 0, False)


def counters(registry: Registry) -> dict[str, int]:
    """The totals of the namespace."""
    return dict(registry.overview().counters)


def slots_held(registry: Registry) -> int:
    """All slots that are held, after checking that the two ways to count them agree."""
    overview = registry.overview()
    by_worker = sum(w.held for w in overview.workers)
    assert by_worker == sum(q.held for q in overview.queues)
    return by_worker


class ContractBase:
    """Fixtures and short words for the tests."""

    _advance: Callable[[float], None]

    @pytest.fixture
    def advance(self) -> Callable[[float], None]:
        """Move the store's clock; the default lets it run."""
        return time.sleep

    @pytest.fixture(autouse=True)
    def _use_advance(self, advance: Callable[[float], None]) -> None:
        self._advance = advance

    @pytest.fixture
    def registry(self, open_registry: OpenRegistry) -> Iterator[Registry]:
        """A registry of an empty namespace."""
        with open_registry("contract") as registry:
            yield registry

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, advance=self._advance)

    @staticmethod
    def advert(worker: str = "w1", **changes: Any) -> Advert:
        values: dict[str, Any] = {
            "worker": worker,
            "node": f"node-of-{worker}",
            "queues": ("q",),
            "tasks": frozenset({"t", "u"}),
            "capacity": 2,
            "lease_seconds": LONG_SECONDS,
            "lapse_seconds": LONG_SECONDS,
            "host": f"host-of-{worker}",
            "pid": 4711,
        }
        return Advert(**{**values, **changes})

    @staticmethod
    def demand(**changes: Any) -> Demand:
        return Demand(**{"queue": "q", "task": "t", "ttl_seconds": LONG_SECONDS, **changes})
