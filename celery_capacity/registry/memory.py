"""``memory://``: a registry for the threads of one process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock

from ..errors import ConfigurationError
from ..models import (
    Advert,
    Census,
    Claim,
    CommitOutcome,
    Demand,
    LapsedWorker,
    Lot,
    Overview,
    Pulse,
    Reason,
    Refusal,
    Released,
    ReleaseOutcome,
    Slot,
    Standing,
    StoreCounter,
    check_capacity,
    check_counts,
    check_limit,
)
from . import _memory_views as views
from ._memory_records import DRAINING, FULL, LAPSED, LATE, LIMITED, READY, REASONS, UNKNOWN, Worker
from ._memory_world import World
from .contract import Registry, Reservation
from .urls import mask_url

__all__ = ("MemoryRegistry",)

_worlds: dict[tuple[str, str], World] = {}
_worlds_lock = Lock()


def _disown_worlds() -> None:
    global _worlds_lock
    _worlds_lock = Lock()  # another thread of the parent may have held it
    for world in _worlds.values():
        world.disown()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_disown_worlds)


class MemoryRegistry(Registry):
    """A registry in the memory of this process.

    All that are opened with the same URL and namespace share their state, which lives as long as the process;
    ``memory://name`` keeps separate worlds by name.  After a fork the child's copy raises
    :exc:`~celery_capacity.errors.RegistryError` from every operation.

    :param clock: the store's clock, in seconds, never going back; given by tests that move time themselves.
    :raises ConfigurationError: if this world is there already with another clock.
    """

    def __init__(
        self, url: str = "memory://", namespace: str = "default", *, clock: Callable[[], float] | None = None
    ) -> None:
        self.url = mask_url(url)
        self.namespace = namespace
        key = (url.partition("://")[2], namespace)
        with _worlds_lock:
            world = _worlds.get(key)
            if world is None:
                world = _worlds[key] = World(clock or time.monotonic)
        if clock is not None and world.clock is not clock:
            raise ConfigurationError("clock", clock, f"the clock that {self.url} was opened with before")
        self._world = world

    # -- a worker's life ---------------------------------------------------------------------------------

    def register(self, advert: Advert, holding: Iterable[Slot] = ()) -> int:
        slots = tuple(holding)
        world = self._world
        with world.lock:
            now = world.tick()
            world.epoch += 1
            worker = Worker(advert, world.epoch, now)
            older = world.workers.get(advert.worker)
            gone = world.gone.pop(advert.worker, None)
            if older is not None:
                worker.inherited_until = world.settled_at(older)
                world.withdraw(older)
            elif gone is not None:
                worker.inherited_until = gone.settled_at
            for slot in slots:
                world.put_back(worker, slot, now)
            world.enroll(worker, now)
            return worker.epoch

    def heartbeat(self, worker: str, epoch: int, holding: Iterable[str] = (), since: float = 0.0) -> Pulse:
        tokens = dict.fromkeys(holding)
        world = self._world
        with world.lock:
            now = world.tick()
            current = world.workers.get(worker)
            if current is None:
                return Pulse(Standing.GONE, store_time=now)
            if current.epoch == epoch:
                current.beat = now
                leaked = [
                    held
                    for token, held in current.slots.items()
                    if token not in tokens and held.committed_at is not None and held.committed_at < since
                ]
                for held in leaked:
                    world.give_back(held)
                world.refresh(current, now)
                return Pulse(
                    Standing.CURRENT,
                    healed=tuple(held.token for held in leaked),
                    missing=tuple(token for token in tokens if token not in world.slots),
                    store_time=now,
                    draining=current.drain,
                )
            world.count(StoreCounter.STALE_REFUSED)
            by = f"host={current.advert.host} pid={current.advert.pid}"
        # Outside the lock: whatever a handler of the log does, nobody waits for it.
        self.report_stale("heartbeat", epoch, worker=worker)
        return Pulse(Standing.REPLACED, store_time=now, by=by)

    def restore(self, worker: str, epoch: int, slots: Iterable[Slot]) -> int:
        slots = tuple(slots)
        world = self._world
        with world.lock:
            now = world.tick()
            current = world.workers.get(worker)
            if current is None or current.epoch != epoch:
                return 0
            restored = sum(world.put_back(current, slot, now) for slot in slots)
            world.make_room(current, restored)
            world.refresh(current, now)
            return restored

    def resize(self, worker: str, epoch: int, capacity: int | None) -> bool:
        check_capacity(capacity)
        world = self._world
        with world.lock:
            now = world.tick()
            current = world.workers.get(worker)
            if current is None or current.epoch != epoch:
                return False
            current.capacity = capacity
            world.refresh(current, now)
            return True

    def deregister(self, worker: str, epoch: int) -> bool:
        world = self._world
        with world.lock:
            world.tick()
            current = world.workers.get(worker)
            if current is None:
                return False
            if current.epoch == epoch:
                world.bury(current)
                return True
            world.count(StoreCounter.STALE_REFUSED)
        self.report_stale("deregistration", epoch, worker=worker)
        return False

    def drain(self, worker: str, reason: str, seconds: float | None = None) -> bool:
        return self._set_drain(worker, reason, seconds)

    def admit(self, worker: str) -> bool:
        return self._set_drain(worker, None, None)

    def _set_drain(self, name: str, reason: str | None, seconds: float | None) -> bool:
        world = self._world
        with world.lock:
            now = world.tick()
            worker = world.workers.get(name)
            if worker is None:
                return False
            worker.drain = reason
            worker.drain_until = float("inf") if seconds is None else now + seconds
            world.refresh(worker, now)
            return True

    # -- slots -------------------------------------------------------------------------------------------

    def select_and_reserve(self, demand: Demand) -> Reservation | Refusal:
        world = self._world
        with world.lock:
            now = world.tick()
            queue = world.queues.get(demand.queue)
            if queue is not None and (queue.limit is None or queue.held < queue.limit):
                worker = None
                if demand.prefer_node is not None and demand.node is None:
                    worker = world.choose(queue, demand.task, demand.prefer_node)
                worker = worker or world.choose(queue, demand.task, demand.node)
                if worker is not None:
                    return Reservation(self, world.claim(worker, queue, now, demand, commit=False))
            return self._refuse(demand, self._why_nobody(demand), now)

    def reserve_worker(self, worker: str, epoch: int, demand: Demand, *, commit: bool = False) -> Reservation | Refusal:
        world = self._world
        with world.lock:
            now = world.tick()
            current = world.workers.get(worker)
            if current is None:
                return self._refuse(demand, Reason.NO_WORKER, now)
            if current.epoch != epoch:
                return self._refuse(demand, Reason.REPLACED, now)
            reason = world.why_not(current, demand.queue, demand.task, demand.node)
            if reason is not None:
                return self._refuse(demand, reason, now, current.drain or "")
            queue = world.queues[demand.queue]
            return Reservation(self, world.claim(current, queue, now, demand, commit=commit))

    def _why_nobody(self, demand: Demand) -> Reason:
        """The most useful single reason, from the groups' counts alone."""
        queue = self._world.queues.get(demand.queue)
        if queue is None or not queue.served:
            return Reason.NO_WORKER
        if not queue.has_room:
            return Reason.LIMIT
        groups = queue.matching(demand.task, demand.node)
        for status in (FULL, LIMITED, DRAINING, UNKNOWN, LATE, LAPSED):
            if any(group.counts[status] for group in groups):
                return REASONS[status] or Reason.NO_WORKER
        return Reason.OTHER_NODE if queue.matching(demand.task, None) else Reason.UNKNOWN_TASK

    def _refuse(self, demand: Demand, reason: Reason, now: float, detail: str = "") -> Refusal:
        world = self._world
        queue = world.queues.get(demand.queue)
        served = queue is not None and queue.served
        if served and demand.park_lot is not None:
            world.marks.park(demand.park_lot, demand.queue, now + demand.ttl_seconds)
        return Refusal(reason, served, detail)

    def claim_parked(self, worker: str, epoch: int, lots: Sequence[Lot], *, marked_only: bool = True) -> Slot | Refusal:
        world = self._world
        with world.lock:
            now = world.tick()
            current = world.workers.get(worker)
            if current is None:
                return Refusal(Reason.NO_WORKER, served=False)
            if current.epoch != epoch:
                return Refusal(Reason.REPLACED)
            if current.status != READY:
                return Refusal(REASONS[current.status] or Reason.FULL, detail=current.drain or "")
            return self._claim_from(current, lots, now, marked_only)

    def _claim_from(self, worker: Worker, lots: Iterable[Lot], now: float, marked_only: bool) -> Slot | Refusal:
        world = self._world
        why_not = Reason.NOT_WAITING
        for lot in lots:
            mark = world.marks.get(lot.name)
            counts = lot.seen == Lot.SURE or (mark is not None and mark.version != lot.seen)
            if marked_only and not counts:
                continue
            reason = world.why_not(worker, lot.queue)
            if reason is None:
                queue = world.queues[lot.queue]
                return world.claim(worker, queue, now, lot=lot.name, mark=mark.version if mark else 0)
            if why_not is Reason.NOT_WAITING:
                why_not = reason
        return Refusal(why_not)

    def commit(self, token: str, worker: str, epoch: int) -> CommitOutcome:
        world = self._world
        with world.lock:
            now = world.tick()
            current = world.workers.get(worker)
            if current is None or current.epoch == epoch:
                held = world.slots.get(token)
                if held is None:
                    return CommitOutcome.GONE
                if held.worker is current:
                    if held.committed_at is not None:
                        return CommitOutcome.ALREADY
                    world.commit(held, now)
                    return CommitOutcome.COMMITTED
            world.count(StoreCounter.STALE_REFUSED)
        self.report_stale("commit", epoch, worker=worker, token=token)
        return CommitOutcome.STALE

    def release(
        self, token: str, epoch: int | None = None, *, then: Claim | None = None, emptied: Slot | None = None
    ) -> Released:
        world = self._world
        with world.lock:
            now = world.tick()
            held = world.slots.get(token)
            if held is None:
                return Released(ReleaseOutcome.ALREADY)
            worker = held.worker
            if epoch is None or worker.epoch == epoch:
                world.give_back(held)
                lot = emptied.lot if emptied is not None else None
                waiting = False
                if emptied is not None and lot is not None:
                    waiting = world.marks.still_waiting(lot, emptied.mark, now)
                claim = self._claim_freed(worker, then, lot, now) if then is not None else None
                return Released(ReleaseOutcome.RELEASED, claim, waiting)
            world.count(StoreCounter.STALE_REFUSED)
        self.report_stale("release", epoch, token=token)
        return Released(ReleaseOutcome.STALE)

    def _claim_freed(self, worker: Worker, then: Claim, emptied: str | None, now: float) -> Slot | None:
        if worker.status != READY or (worker.name, worker.epoch) != (then.worker, then.epoch):
            return None
        lots = [lot for lot in then.lots if lot.name != emptied]
        answer = self._claim_from(worker, lots, now, marked_only=True)
        if isinstance(answer, Refusal) and not then.marked_only:
            answer = self._claim_from(worker, lots, now, marked_only=False)
        return answer if isinstance(answer, Slot) else None

    def found_empty(self, lot: str, mark: int) -> bool:
        with self._world.lock:
            return self._world.marks.still_waiting(lot, mark, self._world.tick())

    def strike(self, key: str, ttl_seconds: float) -> int:
        with self._world.lock:
            return self._world.strike(key, ttl_seconds, self._world.tick())

    def cancel(self, token: str) -> ReleaseOutcome:
        world = self._world
        with world.lock:
            world.tick()
            held = world.slots.get(token)
            if held is None:
                return ReleaseOutcome.ALREADY
            if held.committed_at is not None:
                return ReleaseOutcome.COMMITTED
            world.give_back(held)
            return ReleaseOutcome.RELEASED

    # -- limits, clean-up, views -------------------------------------------------------------------------

    def set_limit(self, queue: str, limit: int | None) -> None:
        check_limit(limit)
        world = self._world
        with world.lock:
            world.tick()
            state = world.queue(queue)
            state.order(limit)
            world.drop_if_idle(state)

    def expire(self, cleaner: str, lease_seconds: float = 30.0) -> tuple[LapsedWorker, ...]:
        world = self._world
        with world.lock:
            now = world.tick()
            for worker in [w for w in world.workers.values() if w.status == LAPSED]:
                world.count(StoreCounter.WORKERS_LAPSED)
                if worker.slots:
                    world.count(StoreCounter.SLOTS_FREED_BY_LAPSE, len(worker.slots))
                world.bury(worker)
            mine = []
            for name, gone in sorted(world.gone.items()):
                if gone.cleaner in (None, cleaner) or now >= gone.cleaner_until:
                    gone.cleaner, gone.cleaner_until = cleaner, now + lease_seconds
                    mine.append(LapsedWorker(name, gone.worker.epoch, settled=now >= gone.settled_at))
            return tuple(mine)

    def forget(self, worker: str, epoch: int) -> bool:
        world = self._world
        with world.lock:
            world.tick()
            gone = world.gone.get(worker)
            if gone is None or gone.worker.epoch != epoch:
                return False
            del world.gone[worker]
            return True

    def census(self, queue: str, task: str | None = None, node: str | None = None) -> Census:
        with self._world.lock:
            return views.census(self._world, self._world.tick(), queue, task, node)

    def add_counters(self, counts: Mapping[str, int]) -> None:
        check_counts(counts)
        with self._world.lock:
            self._world.counters.update(counts)

    def overview(self) -> Overview:
        with self._world.lock:
            return views.overview(self._world, self._world.tick(), self.namespace)

    def close(self) -> None:
        """Nothing to close: the state stays for whoever opens the same URL and namespace."""
