"""One process of the hammer: several threads that reserve, commit and release as fast as they can.

    python hammer.py URL NAMESPACE THREADS ROUNDS

Prints how many rounds were done; leaves with an error at the first answer that is not right.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from celery_capacity.models import CommitOutcome, Demand, Refusal, ReleaseOutcome
from celery_capacity.registry import Registry, open_registry

DEMAND = Demand("q", "t", ttl_seconds=600.0)


def hammer(registry: Registry, rounds: int) -> int:
    """So many rounds, each of which got a slot; returns how many refusals there were on the way."""
    refusals = done = 0
    while done < rounds:
        answer = registry.select_and_reserve(DEMAND)
        if isinstance(answer, Refusal):
            if not answer.served:
                raise AssertionError(f"there are workers, but: {answer}")
            refusals += 1
            continue
        slot = answer.transfer()
        if done % 10 == 9:
            outcome: object = registry.cancel(slot.token)
            expected: object = ReleaseOutcome.RELEASED
        else:
            outcome = registry.commit(slot.token, slot.worker, slot.epoch)
            expected = CommitOutcome.COMMITTED
        if outcome is not expected:
            raise AssertionError(f"{outcome} instead of {expected}")
        if done % 10 != 9 and registry.release(slot.token, slot.epoch).outcome is not ReleaseOutcome.RELEASED:
            raise AssertionError(f"{slot} was released by somebody else")
        if done % 50 == 0 and registry.release(slot.token, slot.epoch).outcome is not ReleaseOutcome.ALREADY:
            raise AssertionError(f"{slot} was released twice")
        done += 1
    return refusals


def hammer_in_threads(registry: Registry, threads: int, rounds: int) -> int:
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: hammer(registry, rounds), range(threads)))


if __name__ == "__main__":
    url, namespace, threads, rounds = sys.argv[1:]
    with open_registry(url, namespace) as opened:
        print(hammer_in_threads(opened, int(threads), int(rounds)))
