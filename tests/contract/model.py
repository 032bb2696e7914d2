"""What a registry is, written as plainly as possible: every question is answered by walking over everything.

It shares no idea with any store, is slow, and knows nothing of threads.  Where the contract leaves a store free (which
of several true reasons it gives, say), the model answers with the set of right answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from celery_capacity.models import Advert, Demand, Lot, Reason


@dataclass
class ModelWorker:
    advert: Advert
    epoch: int
    capacity: int | None
    beat: float
    drain: str | None = None
    drain_until: float = math.inf
    inherited_until: float = 0.0


@dataclass
class ModelSlot:
    worker: str
    epoch: int
    queue: str
    deadline: float
    committed_at: float | None = None


@dataclass
class ModelMark:
    queue: str
    version: int
    parked_until: float
    found_empty: bool = False


@dataclass
class ModelGone:
    epoch: int
    settled_at: float
    cleaner: str | None = None
    cleaner_until: float = 0.0


@dataclass
class Model:
    now: float = 0.0
    workers: dict[str, ModelWorker] = field(default_factory=dict)
    slots: dict[str, ModelSlot] = field(default_factory=dict)
    marks: dict[str, ModelMark] = field(default_factory=dict)
    #: Set by hand, and declared by workers.
    ordered: dict[str, int] = field(default_factory=dict)
    declared: dict[str, int] = field(default_factory=dict)
    gone: dict[str, ModelGone] = field(default_factory=dict)
    #: The names that the cursor of a pool may stand at.  More than one only where a pool was empty for a moment.
    cursors: dict[tuple[str, str | None, str | None], set[str]] = field(default_factory=dict)
    version: int = 0

    # -- time --------------------------------------------------------------------------------------------

    def move_to(self, now: float) -> None:
        self.now = now
        for token, slot in list(self.slots.items()):
            if slot.committed_at is None and now >= slot.deadline:
                del self.slots[token]
        for worker in self.workers.values():
            if worker.drain is not None and now >= worker.drain_until:
                worker.drain = None

    # -- questions ---------------------------------------------------------------------------------------

    def held_by(self, worker: str) -> list[ModelSlot]:
        return [s for s in self.slots.values() if s.worker == worker]

    def held_for(self, queue: str) -> int:
        return sum(s.queue == queue for s in self.slots.values())

    def limit(self, queue: str) -> int | None:
        return self.ordered.get(queue, self.declared.get(queue))

    def has_room(self, queue: str) -> bool:
        limit = self.limit(queue)
        return limit is None or self.held_for(queue) < limit

    def share_held(self, name: str, queue: str) -> int:
        return sum(s.queue == queue for s in self.held_by(name))

    def share_taken(self, name: str, queue: str) -> bool:
        limit = self.workers[name].advert.worker_queues.get(queue)
        return limit is not None and self.share_held(name, queue) >= limit

    def lapsed(self, worker: ModelWorker) -> bool:
        return self.now >= worker.beat + worker.advert.lapse_seconds

    def served(self, queue: str) -> bool:
        return any(queue in w.advert.queues and not self.lapsed(w) for w in self.workers.values())

    def waiting(self, queue: str) -> bool:
        return any(mark.queue == queue and not mark.found_empty for mark in self.marks.values())

    def mismatches(self, name: str, queue: str, task: str | None, node: str | None) -> set[Reason]:
        advert = self.workers[name].advert
        reasons = set()
        if queue not in advert.queues:
            reasons.add(Reason.OTHER_QUEUE)
        if task is not None and task not in advert.tasks:
            reasons.add(Reason.UNKNOWN_TASK)
        if node is not None and node != advert.node:
            reasons.add(Reason.OTHER_NODE)
        return reasons

    def conditions(self, name: str) -> set[Reason]:
        """What keeps this worker from taking anything, besides being full."""
        worker = self.workers[name]
        reasons = set()
        if self.lapsed(worker):
            reasons.add(Reason.LAPSED)
        elif self.now >= worker.beat + worker.advert.lease_seconds:
            reasons.add(Reason.LATE)
        if worker.drain is not None:
            reasons.add(Reason.DRAINING)
        if worker.capacity is None:
            reasons.add(Reason.UNKNOWN_CAPACITY)
        return reasons

    def full(self, name: str) -> bool:
        capacity = self.workers[name].capacity
        return capacity is not None and len(self.held_by(name)) >= capacity

    def why_not(self, name: str, queue: str, task: str | None = None, node: str | None = None) -> set[Reason]:
        reasons = self.mismatches(name, queue, task, node) | self.conditions(name)
        if self.full(name):
            reasons.add(Reason.FULL)
        if self.share_taken(name, queue):
            reasons.add(Reason.WORKER_LIMIT)
        if not self.has_room(queue):
            reasons.add(Reason.LIMIT)
        return reasons

    def choices(self, demand: Demand) -> set[str]:
        """The workers that may be chosen now: one, unless it is open where the cursor stands."""
        if demand.prefer_node is not None and demand.node is None:
            preferred = self.choices(replace(demand, node=demand.prefer_node))
            if preferred:
                return preferred
        names = sorted(n for n in self.workers if not self.why_not(n, demand.queue, demand.task, demand.node))
        if not names:
            return set()
        cursors = self.cursors.get((demand.queue, demand.task, demand.node), {""})
        return {next((n for n in names if n > cursor), names[0]) for cursor in cursors}

    def refusals(self, demand: Demand) -> set[Reason]:
        """The reasons that a refusal may give."""
        if not self.served(demand.queue):
            return {Reason.NO_WORKER}
        reasons = set() if self.has_room(demand.queue) else {Reason.LIMIT}
        matching = [n for n in self.workers if not self.mismatches(n, demand.queue, demand.task, demand.node)]
        busy = {Reason.FULL for n in matching if self.full(n) and not self.conditions(n)}
        busy |= {Reason.WORKER_LIMIT for n in matching if self.share_taken(n, demand.queue) and not self.conditions(n)}
        if busy:
            return reasons | busy
        for name in matching:
            reasons |= self.conditions(name)
        if not matching:
            reasons |= {Reason.UNKNOWN_TASK, Reason.OTHER_NODE}
        return reasons

    # -- changes -----------------------------------------------------------------------------------------

    def reserved(self, token: str, worker: str, demand: Demand, *, commit: bool = False) -> None:
        owner = self.workers[worker]
        deadline = self.now + demand.ttl_seconds
        self.slots[token] = ModelSlot(worker, owner.epoch, demand.queue, deadline, self.now if commit else None)

    def chosen(self, worker: str, demand: Demand) -> None:
        node = demand.node
        if node is None and self.workers[worker].advert.node == demand.prefer_node:
            node = demand.prefer_node
        self.cursors[demand.queue, demand.task, node] = {worker}

    def put_back(self, worker: str, token: str, queue: str) -> bool:
        if token in self.slots:
            return False
        self.slots[token] = ModelSlot(worker, self.workers[worker].epoch, queue, math.inf, self.now)
        return True

    def make_room(self, worker: str, restored: int) -> None:
        capacity, owner = self.workers[worker].capacity, self.workers[worker]
        for _ in range(restored):
            held = [token for token, slot in self.slots.items() if slot.worker == worker]
            reserved = [token for token in held if self.slots[token].committed_at is None]
            if capacity is None or len(held) <= capacity or not reserved:
                return
            latest = max(reversed(reserved), key=lambda token: self.slots[token].deadline)
            owner.inherited_until = max(owner.inherited_until, self.slots.pop(latest).deadline)

    def park(self, demand: Demand) -> None:
        if demand.park_lot is None or not self.served(demand.queue):
            return
        self.version += 1
        until = self.now + demand.ttl_seconds
        older = self.marks.get(demand.park_lot)
        if older is not None:
            until = max(until, older.parked_until)
        self.marks[demand.park_lot] = ModelMark(demand.queue, self.version, until)

    def first_lot(self, worker: str, lots: tuple[Lot, ...], *, marked_only: bool = True) -> Lot | None:
        """The lot that a claim of this worker goes to."""
        for lot in lots:
            mark = self.marks.get(lot.name)
            counts = lot.seen == Lot.SURE or (mark is not None and mark.version != lot.seen)
            if (counts or not marked_only) and not self.why_not(worker, lot.queue):
                return lot
        return None

    def found_empty(self, lot: str, version: int) -> bool:
        """Compare and clear; whether the mark is still there."""
        mark = self.marks.get(lot)
        if mark is not None and mark.version == version and self.now >= mark.parked_until:
            del self.marks[lot]
        elif mark is not None and mark.version == version:
            mark.found_empty = True
        return lot in self.marks

    def remove(self, name: str) -> ModelWorker:
        """Take a worker out with all its slots."""
        self.slots = {token: s for token, s in self.slots.items() if s.worker != name}
        worker = self.workers.pop(name)
        for queue in list(self.declared):
            if not any(queue in w.advert.queues for w in self.workers.values()):
                del self.declared[queue]
        for (queue, task, node), cursors in list(self.cursors.items()):
            if all(self.mismatches(n, queue, task, None) for n in self.workers):
                # Nobody is left in the pool, so that its turns are forgotten.
                del self.cursors[queue, task, node]
            elif all(self.mismatches(n, queue, task, node) for n in self.workers):
                # Nobody is left on that node: a store may forget the turns there.
                cursors.add("")
        return worker

    def registered(self, advert: Advert, epoch: int) -> None:
        inherited_until = 0.0
        cursors = {key: set(names) for key, names in self.cursors.items()}
        if advert.worker in self.workers:
            inherited_until = self.settled_at(advert.worker)
            self.remove(advert.worker)
        elif advert.worker in self.gone:
            inherited_until = self.gone.pop(advert.worker).settled_at
        self.workers[advert.worker] = ModelWorker(
            advert, epoch, advert.capacity, self.now, inherited_until=inherited_until
        )
        for queue in advert.queues:
            self.declared.pop(queue, None)
        self.declared.update(advert.queue_limits)
        for key, names in cursors.items():
            if key not in self.cursors and not self.mismatches(advert.worker, *key[:2], None):
                # The pool was empty only within this one step: a store may or may not have noticed.
                self.cursors[key] = names | {""}

    def settled_at(self, name: str) -> float:
        """Until when a reservation may be on its way to this worker."""
        uncommitted = [s.deadline for s in self.held_by(name) if s.committed_at is None]
        return max([self.workers[name].inherited_until, *uncommitted])

    def bury(self, name: str) -> None:
        settled_at = self.settled_at(name)
        self.gone[name] = ModelGone(self.remove(name).epoch, settled_at)

    def expire(self, cleaner: str, lease_seconds: float) -> list[tuple[str, int, bool]]:
        for name in [n for n, w in self.workers.items() if self.lapsed(w)]:
            self.bury(name)
        mine = []
        for name, gone in sorted(self.gone.items()):
            if gone.cleaner in (None, cleaner) or self.now >= gone.cleaner_until:
                gone.cleaner, gone.cleaner_until = cleaner, self.now + lease_seconds
                mine.append((name, gone.epoch, self.now >= gone.settled_at))
        return mine
