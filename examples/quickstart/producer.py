"""Fill every slot of two workers of two processes, and try one more."""

from collections import Counter

from app import work

from celery_capacity import CapacityExhausted

results = [work.delay(3) for _ in range(4)]
print("4 tasks sent, one for each slot")
try:
    work.apply_async((0.1,), when_full="refuse")
except CapacityExhausted as exc:
    print(exc)
# Without when_full it waits in the queue for the first slot that comes free.
results.append(work.delay(0.1))
ran = Counter(result.get(timeout=30) for result in results[:4])
print(", ".join(f"{worker} ran {count}" for worker, count in sorted(ran.items())))
print("the fifth ran on", "one of them" if results[4].get(timeout=30) in ran else "another")
