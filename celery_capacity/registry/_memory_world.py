"""The state behind ``memory://``: one world per (name, namespace), shared by every registry opened on it.

Nothing here takes the lock; :mod:`.memory` does, around whole operations.

The cost of a choice must not grow with the fleet, so nothing here ever walks over the workers to choose one.  A
worker has one *status*, and for each queue it serves it is a member of two *groups*: one of all nodes and one
of its own node, each for one set of task names (a capability class).  A group keeps the names of its ready
members in order, and counts the others by status; both change only when a worker's status does.  For a queue that has
a limit on the worker there is a *share*, with a status of its own that follows the worker's.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from threading import Lock

from ..models import Demand, Reason, Slot, StoreCounter
from ._memory_fork import Disowned
from ._memory_marks import Marks
from ._memory_records import (
    DRAINING,
    FULL,
    LAPSED,
    LATE,
    LIMITED,
    READY,
    REASONS,
    UNKNOWN,
    Gone,
    Group,
    Held,
    Queue,
    Share,
    Worker,
)

__all__ = ("World",)

#: Closed reservations left in the heap of deadlines before it is worth looking whether to rebuild it.
_COMPACT_AT = 1024


class World:
    """All state of one namespace.  Its clock is the store's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lock: Lock | Disowned = Lock()
        self.epoch = 0
        self.workers: dict[str, Worker] = {}
        self.gone: dict[str, Gone] = {}
        self.queues: dict[str, Queue] = {}
        self.marks = Marks()
        self.slots: dict[str, Held] = {}
        self.counters: Counter[str] = Counter()
        #: How many, and until when they are remembered.
        self.strikes: dict[str, tuple[int, float]] = {}
        self._serial = 0
        self._token_prefix = f"{os.urandom(6).hex()}-"
        #: Deadlines of reservations, and instants at which a worker's status may change.  The sentinels spare
        #: every operation a look whether they are empty.
        self.deadlines: list[tuple[float, int, Held]] = [(math.inf, 0, Held("", None, None, math.inf, None))]
        self.alarms: list[tuple[float, int, Worker | None]] = [(math.inf, 0, None)]
        self._closed_deadlines = 0

    def disown(self) -> None:
        """This process is a forked child: every operation raises from now on."""
        self.lock = Disowned()

    # -- time --------------------------------------------------------------------------------------------

    def tick(self) -> float:
        """Let everything happen that is due by now, so that no operation sees the past; returns now."""
        now = self.clock()
        if self.deadlines[0][0] <= now or self.alarms[0][0] <= now:
            self.catch_up(now)
        return now

    def catch_up(self, now: float) -> None:
        """End the reservations whose deadline has passed; bring the status of workers up to date."""
        deadlines, alarms = self.deadlines, self.alarms
        while deadlines[0][0] <= now:
            at, _, held = heappop(deadlines)
            if held.deadline == at:
                self.give_back(held)
                self.count(StoreCounter.RESERVATIONS_EXPIRED)
            self._closed_deadlines -= 1
        while alarms[0][0] <= now:
            at, _, worker = heappop(alarms)
            if worker is not None and worker.alarm_at == at and self.workers.get(worker.name) is worker:
                worker.alarm_at = math.inf
                self.refresh(worker, now)

    def count(self, what: StoreCounter, n: int = 1) -> None:
        self.counters[what.value] += n

    def strike(self, key: str, ttl_seconds: float, now: float) -> int:
        """Count one more for ``key``; with 0 seconds, forget it."""
        self.strikes = {k: struck for k, struck in self.strikes.items() if struck[1] > now}
        count = self.strikes.pop(key, (0, 0.0))[0] + 1
        if ttl_seconds <= 0:
            return 0
        self.strikes[key] = (count, now + ttl_seconds)
        return count

    def _set_alarm(self, worker: Worker, now: float) -> None:
        """Wake when this worker's status may change next.  A heartbeat only makes that later, so the alarm that is
        set already is left to ring and looks again."""
        beat, advert = worker.beat, worker.advert
        instants = (
            beat + advert.lease_seconds,
            beat + advert.lapse_seconds,
            worker.drain_until if worker.drain is not None else math.inf,
        )
        at = min((instant for instant in instants if instant > now), default=math.inf)
        if at < worker.alarm_at:
            worker.alarm_at = at
            self._serial += 1
            heappush(self.alarms, (at, self._serial, worker))

    # -- workers -----------------------------------------------------------------------------------------

    def enroll(self, worker: Worker, now: float) -> None:
        """Put a worker where choices find it.  Its slots may be there already."""
        self.workers[worker.name] = worker
        tasks = worker.advert.tasks
        for name in dict.fromkeys(worker.advert.queues):
            queue = self.queue(name)
            queue.declare(worker.advert.queue_limits.get(name))
            joined = tuple(
                queue.groups.setdefault(node, {}).setdefault(tasks, Group(tasks)) for node in (None, worker.node)
            )
            share = worker.shares.get(name)
            if share is None:
                worker.groups += joined
            else:
                share.groups = joined
            for group in joined:
                group.counts[worker.status] += 1
        self.refresh(worker, now)

    def withdraw(self, worker: Worker) -> None:
        """Free its slots, and take it out of every group; prune groups, cursors and queues nobody is left for."""
        for held in list(worker.slots.values()):
            self.give_back(held)
        if worker.status == READY:
            self._set_status(worker, UNKNOWN)
        members: tuple[Worker | Share, ...] = (worker, *worker.shares.values())
        for member in members:
            for group in member.groups:
                group.counts[member.status] -= 1
            member.groups = ()
        del self.workers[worker.name]
        for name in dict.fromkeys(worker.advert.queues):
            queue = self.queues[name]
            if self._prune_groups(queue, worker.node, worker.advert.tasks):
                for key in [k for k in queue.cursors if not queue.matching(*k)]:
                    del queue.cursors[key]
            self.drop_if_idle(queue)

    @staticmethod
    def _prune_groups(queue: Queue, node: str, tasks: frozenset[str]) -> bool:
        pruned = False
        for key in (None, node):
            by_class = queue.groups[key]
            if not any(by_class[tasks].counts):
                pruned = True
                del by_class[tasks]
                if not by_class:
                    del queue.groups[key]
        return pruned

    def bury(self, worker: Worker) -> None:
        """The worker is gone: free its slots and leave an entry for the sweepers."""
        settled_at = self.settled_at(worker)
        self.withdraw(worker)
        self.gone[worker.name] = Gone(worker, settled_at)

    @staticmethod
    def settled_at(worker: Worker) -> float:
        """Until when a reservation may be on its way to it.  To be asked before its slots are freed."""
        deadlines = (held.deadline for held in worker.slots.values() if held.committed_at is None)
        return max(worker.inherited_until, max(deadlines, default=0.0))

    def refresh(self, worker: Worker, now: float) -> None:
        """The one derivation of a worker's status."""
        age = now - worker.beat
        if worker.drain is not None and now >= worker.drain_until:
            worker.drain = None
        if age >= worker.advert.lapse_seconds:
            status = LAPSED
        elif age >= worker.advert.lease_seconds:
            status = LATE
        elif worker.drain is not None:
            status = DRAINING
        elif worker.capacity is None:
            status = UNKNOWN
        elif len(worker.slots) >= worker.capacity:
            status = FULL
        else:
            status = READY
        if status != worker.status:
            self._set_status(worker, status)
        self._set_alarm(worker, now)

    def _set_status(self, worker: Worker, status: int) -> None:
        self._move(worker.name, worker, status)
        for share in worker.shares.values():
            self._refresh_share(worker, share)

    def _refresh_share(self, worker: Worker, share: Share) -> None:
        limited = worker.status == READY and share.held >= share.limit
        status = LIMITED if limited else worker.status
        if status != share.status:
            self._move(worker.name, share, status)

    @staticmethod
    def _move(name: str, member: Worker | Share, status: int) -> None:
        old = member.status
        member.status = status
        for group in member.groups:
            group.counts[old] -= 1
            group.counts[status] += 1
            if old == READY:
                group.names.remove(name)
            elif status == READY:
                group.names.add(name)

    # -- slots -------------------------------------------------------------------------------------------

    def choose(self, queue: Queue, task: str | None, node: str | None) -> Worker | None:
        """The first ready worker, in name order, after the last one chosen, else the first of all."""
        key = (task, node)
        cursor = queue.cursors.get(key, "")
        following = first = None
        for group in queue.groups.get(node, {}).values():
            if task is not None and task not in group.tasks:
                continue
            name = group.names.after(cursor)
            if name is not None:
                following = name if following is None else min(name, following)
            elif following is None:
                name = group.names.first
                if name is not None:
                    first = name if first is None else min(name, first)
        chosen = following or first
        if chosen is None:
            return None
        queue.cursors[key] = chosen
        return self.workers[chosen]

    def why_not(self, worker: Worker, queue: str, task: str | None = None, node: str | None = None) -> Reason | None:
        """Why this worker could not be chosen for this now; ``None`` = it could.  Agrees with :meth:`choose`."""
        advert = worker.advert
        if queue not in advert.queues:
            return Reason.OTHER_QUEUE
        if task is not None and task not in advert.tasks:
            return Reason.UNKNOWN_TASK
        if node is not None and node != advert.node:
            return Reason.OTHER_NODE
        if worker.status != READY:
            return REASONS[worker.status]
        share = worker.shares.get(queue)
        if share is not None and share.status != READY:
            return REASONS[share.status]
        return None if self.queues[queue].has_room else Reason.LIMIT

    def claim(
        self,
        worker: Worker,
        queue: Queue,
        now: float,
        demand: Demand | None = None,
        *,
        commit: bool = True,
        lot: str | None = None,
        mark: int = 0,
    ) -> Slot:
        """Take one slot of a worker that was just found ready."""
        self._serial = serial = self._serial + 1
        token = f"{self._token_prefix}{serial:x}"
        task = task_id = None
        deadline = now
        if demand is not None:
            task, task_id = demand.task, demand.task_id
            deadline += demand.ttl_seconds
        if commit:
            held = Held(token, worker, queue, math.inf, now)
            worker.committed += 1
        else:
            held = Held(token, worker, queue, deadline, None)
            heappush(self.deadlines, (deadline, serial, held))
        slots = worker.slots
        self.slots[token] = slots[token] = held
        queue.held += 1
        if worker.shares:
            self._count_share(worker, queue, 1)
        if len(slots) >= worker.capacity:  # type: ignore[operator]  # a ready worker's capacity is known
            self._set_status(worker, FULL)
        return Slot(
            token, worker.name, worker.epoch, queue.name, worker.node, task, task_id, deadline, commit, lot, mark
        )

    def put_back(self, worker: Worker, slot: Slot, now: float) -> bool:
        """Record a slot that the worker really holds, even past its capacity.  False if the token is known."""
        if slot.token in self.slots:
            return False
        queue = self.queue(slot.queue)
        held = Held(slot.token, worker, queue, math.inf, now)
        self.slots[slot.token] = worker.slots[slot.token] = held
        worker.committed += 1
        queue.held += 1
        self._count_share(worker, queue, 1)
        return True

    def _count_share(self, worker: Worker, queue: Queue, n: int) -> None:
        share = worker.shares.get(queue.name)
        if share is not None:
            share.held += n
            self._refresh_share(worker, share)

    def make_room(self, worker: Worker, restored: int) -> None:
        """Where what was put back has no room, push out as many reservations, the latest first."""
        if worker.capacity is None:
            return
        surplus = max(0, min(restored, len(worker.slots) - worker.capacity))
        # At equal deadlines the one that was made last.
        reserved = [held for held in reversed(worker.slots.values()) if held.committed_at is None]
        for held in sorted(reserved, key=lambda held: -held.deadline)[:surplus]:
            # Its message may still be on its way.
            worker.inherited_until = max(worker.inherited_until, held.deadline)
            self.give_back(held)

    def commit(self, held: Held, now: float) -> None:
        held.committed_at = now
        held.worker.committed += 1
        self._close_deadline(held)

    def give_back(self, held: Held) -> None:
        """The slot is free again, for whoever comes next."""
        worker, queue = held.worker, held.queue
        del self.slots[held.token]
        slots = worker.slots
        del slots[held.token]
        queue.held -= 1
        if held.committed_at is None:
            self._close_deadline(held)
        else:
            worker.committed -= 1
        if worker.shares:
            self._count_share(worker, queue, -1)
        if worker.status == FULL and len(slots) < worker.capacity:  # type: ignore[operator]
            self._set_status(worker, READY)
        if not queue.held and not queue.groups:
            self.drop_if_idle(queue)

    def _close_deadline(self, held: Held) -> None:
        held.deadline = math.inf
        self._closed_deadlines += 1
        if self._closed_deadlines > _COMPACT_AT and self._closed_deadlines * 2 > len(self.deadlines):
            # Each rebuild is paid for by at least as many closings as it looks at entries.
            self.deadlines[:] = [entry for entry in self.deadlines if entry[0] == entry[2].deadline]
            heapify(self.deadlines)
            self._closed_deadlines = 0

    # -- queues ------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(name)
        return queue

    def drop_if_idle(self, queue: Queue) -> None:
        if not queue.groups:
            # What workers have declared holds as long as there are any.
            queue.declare(None)
            if not queue.held and queue.ordered is None:
                self.queues.pop(queue.name, None)
