"""Random sequences of operations: every store answers as the plain model does."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import Model

from celery_capacity.models import (
    Advert,
    Claim,
    CommitOutcome,
    Demand,
    Lot,
    Reason,
    Refusal,
    ReleaseOutcome,
    Slot,
    Standing,
    WorkerState,
)
from celery_capacity.registry import Reservation

WORKERS = st.sampled_from(["a", "b", "b2", "c"])
NODES = st.sampled_from(["east", "west"])
QUEUES = st.sampled_from(["q", "r"])
TASKS = st.sampled_from(["t", "u"])
#: Limits of the queues that a worker serves, on it and over the fleet.
LIMITS = st.sampled_from([{}, {}, {}, {"q": 1}, {"q": 2}, {"q": 0, "r": 1}, {"r": 2}])
CAPACITIES = st.sampled_from([None, 0, 1, 1, 2, 3])
LOTS = st.permutations([Lot("q", "q"), Lot("r", "r"), Lot("q-east", "q")]).map(tuple)
THEN = st.sampled_from([None, "marked lots", "any lot"])

_STATE_OF = {
    Reason.LAPSED: WorkerState.LAPSED,
    Reason.LATE: WorkerState.LATE,
    Reason.DRAINING: WorkerState.DRAINING,
    Reason.UNKNOWN_CAPACITY: WorkerState.UNKNOWN,
}


def machine(store: Any) -> type[RuleBasedStateMachine]:
    """The machine for one store.  Time moves only where a test can move it; elsewhere nothing ever ends."""
    by_hand = store.clock is not None
    lease, lapse, ttls = (10, 30, [3, 15, 40]) if by_hand else (3600, 3600, [3600])
    # Few different demands, so that sequences come back to the same pools and lots.
    demands = st.builds(
        Demand,
        queue=st.sampled_from(["q", "q", "q", "r"]),
        task=st.sampled_from(["t", "t", "t", "u", None]),
        node=st.sampled_from([None, None, None, "east", "west"]),
        ttl_seconds=st.sampled_from(ttls),
        park_lot=st.sampled_from([None, "q", "q-east"]),
        prefer_node=st.sampled_from([None, None, "east", "nowhere"]),
    ).map(lambda d: replace(d, park_lot="r") if d.queue == "r" and d.park_lot else d)
    opened = iter(range(10**9))

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.registry = store.open(f"machine{next(opened)}")
            self.model = Model()
            self.epochs: dict[str, list[int]] = {}
            #: Every slot that the store ever handed out, and the model's version of the mark that it answers.
            self.seen: list[Slot] = []
            self.versions: dict[str, int] = {}
            self.pulses: dict[tuple[str, int], tuple[float, set[str]]] = {}
            self.invented = 0
            self._see_time()

        def _see_time(self) -> None:
            self.model.move_to(store.clock() if by_hand else 0.0)

        def _epoch(self, data: st.DataObject, worker: str) -> int:
            """Mostly the current one."""
            known = self.epochs.get(worker, [1])
            return data.draw(st.sampled_from([known[-1]] * 4 + known))

        def _token(self, data: st.DataObject) -> str:
            """Mostly one that is held."""
            held = list(self.model.slots)[-12:]
            return data.draw(st.sampled_from(held * 4 + [s.token for s in self.seen[-12:]] + ["never-was"]))

        def _current(self, worker: str, epoch: int) -> bool:
            return worker in self.model.workers and self.model.workers[worker].epoch == epoch

        def _see_slot(self, slot: Slot) -> None:
            assert slot.token not in {s.token for s in self.seen}
            assert (slot.epoch, slot.node) == (
                self.model.workers[slot.worker].epoch,
                self.model.workers[slot.worker].advert.node,
            )
            self.seen.append(slot)

        def _see_claim(self, slot: Slot, lot: Lot) -> None:
            self._see_slot(slot)
            assert (slot.lot, slot.queue, slot.committed) == (lot.name, lot.queue, True)
            mark = self.model.marks.get(lot.name)
            assert bool(slot.mark) == (mark is not None)
            self.versions[slot.token] = mark.version if mark else 0
            self.model.reserved(slot.token, slot.worker, Demand(lot.queue), commit=True)

        # -- a worker's life -----------------------------------------------------------------------------

        @initialize(capacities=st.lists(st.integers(1, 3), min_size=3, max_size=3))
        def start_a_fleet(self, capacities):
            for worker, node, capacity in zip("abc", ("east", "west", "east"), capacities, strict=True):
                self._register(Advert(worker, node, ("q", "r"), frozenset({"t", "u"}), capacity, lease, lapse), [])

        @rule(
            data=st.data(),
            worker=WORKERS,
            node=NODES,
            queues=st.sets(QUEUES, min_size=1),
            tasks=st.frozensets(TASKS, min_size=1),
            capacity=CAPACITIES,
            shares=LIMITS,
            limits=LIMITS,
        )
        def register(self, data, worker, node, queues, tasks, capacity, shares, limits):
            advert = Advert(
                worker,
                node,
                tuple(sorted(queues)),
                tasks,
                capacity,
                lease,
                lapse,
                worker_queues={queue: limit for queue, limit in shares.items() if queue in queues},
                queue_limits={queue: limit for queue, limit in limits.items() if queue in queues},
            )
            self._register(
                advert, data.draw(st.lists(st.sampled_from(self.seen[-8:]), max_size=2) if self.seen else st.just([]))
            )

        def _register(self, advert: Advert, holding: list[Slot]) -> None:
            worker = advert.worker
            epoch = self.registry.register(advert, holding)
            assert all(epoch > max(known) for known in self.epochs.values())
            self.epochs.setdefault(worker, []).append(epoch)
            self.model.registered(advert, epoch)
            for slot in holding:
                self.model.put_back(worker, slot.token, slot.queue)

        @rule(data=st.data())
        def everybody_beats(self, data):
            for worker in sorted(self.model.workers):
                self._beat(data, worker, self.model.workers[worker].epoch)

        @rule(data=st.data(), worker=WORKERS)
        def heartbeat(self, data, worker):
            self._beat(data, worker, self._epoch(data, worker))

        def _beat(self, data: st.DataObject, worker: str, epoch: int) -> None:
            mine = [t for t, s in self.model.slots.items() if s.worker == worker and s.committed_at is not None]
            leaks = data.draw(st.sampled_from([0, 0, 0, 1]))
            keep = set(data.draw(st.permutations(mine))[leaks:])
            extra = data.draw(st.sampled_from([[], [], ["lost-1"]]))
            since, committed_by_then = self.pulses.get((worker, epoch), (0.0, set()))
            pulse = self.registry.heartbeat(worker, epoch, [*keep, *extra], since)
            if worker not in self.model.workers:
                assert pulse.standing is Standing.GONE
                return
            if not self._current(worker, epoch):
                assert (pulse.standing, pulse.healed) == (Standing.REPLACED, ())
                return
            assert pulse.standing is Standing.CURRENT
            old_enough = set(mine) - keep
            if by_hand:
                expected = {t for t in old_enough if self.model.slots[t].committed_at < since}
                assert set(pulse.healed) == expected
            else:
                # The store's clock may not have ticked between a commit and the pulse after it.
                assert set(pulse.healed) <= old_enough & committed_by_then
            for token in pulse.healed:
                del self.model.slots[token]
            assert set(pulse.missing) == set(extra) - set(self.model.slots)
            assert pulse.draining == self.model.workers[worker].drain
            self.model.workers[worker].beat = self.model.now
            self.pulses[worker, epoch] = (pulse.store_time, set(mine))

        @rule(data=st.data(), worker=WORKERS, queue=QUEUES, again=st.booleans())
        def restore(self, data, worker, queue, again):
            epoch = self._epoch(data, worker)
            if not again:
                self.invented += 1
            slot = Slot(f"invented-{self.invented}", worker, epoch, queue, committed=True)
            expected = self._current(worker, epoch) and self.model.put_back(worker, slot.token, queue)
            assert self.registry.restore(worker, epoch, [slot]) == int(expected)
            if expected:
                self.model.make_room(worker, 1)
                self.seen.append(slot)

        @rule(data=st.data(), worker=WORKERS, capacity=CAPACITIES)
        def resize(self, data, worker, capacity):
            epoch = self._epoch(data, worker)
            assert self.registry.resize(worker, epoch, capacity) == self._current(worker, epoch)
            if self._current(worker, epoch):
                self.model.workers[worker].capacity = capacity

        @rule(data=st.data(), worker=WORKERS)
        def deregister(self, data, worker):
            epoch = self._epoch(data, worker)
            assert self.registry.deregister(worker, epoch) == self._current(worker, epoch)
            if self._current(worker, epoch):
                self.model.bury(worker)

        @rule(worker=WORKERS, seconds=st.sampled_from([None, 5, 50] if by_hand else [None, 3600]))
        def drain(self, worker, seconds):
            assert self.registry.drain(worker, f"for {seconds}", seconds) == (worker in self.model.workers)
            if worker in self.model.workers:
                owner = self.model.workers[worker]
                owner.drain = f"for {seconds}"
                owner.drain_until = float("inf") if seconds is None else self.model.now + seconds

        @rule(worker=WORKERS)
        def admit(self, worker):
            assert self.registry.admit(worker) == (worker in self.model.workers)
            if worker in self.model.workers:
                self.model.workers[worker].drain = None

        # -- slots ---------------------------------------------------------------------------------------

        @rule(demand=demands)
        def select_and_reserve(self, demand):
            self._select(demand)

        @rule(task=TASKS, lot=st.sampled_from(["q", "q-east"]))
        def park(self, task, lot):
            self._select(Demand("q", task, "nowhere", ttl_seconds=ttls[0], park_lot=lot))

        @rule(demand=demands, count=st.integers(2, 5))
        def select_and_reserve_in_a_row(self, demand, count):
            for _ in range(count):
                self._select(demand)

        def _select(self, demand: Demand) -> None:
            answer = self.registry.select_and_reserve(demand)
            choices = self.model.choices(demand)
            if isinstance(answer, Refusal):
                assert not choices
                assert answer.served == self.model.served(demand.queue)
                assert answer.reason in self.model.refusals(demand)
                self.model.park(demand)
                return
            slot = answer.transfer()
            assert slot.worker in choices
            assert (slot.queue, slot.task, slot.committed) == (demand.queue, demand.task, False)
            self._see_slot(slot)
            self.model.reserved(slot.token, slot.worker, demand)
            self.model.chosen(slot.worker, demand)

        @rule(data=st.data(), worker=WORKERS, demand=demands, commit=st.booleans())
        def reserve_worker(self, data, worker, demand, commit):
            epoch = self._epoch(data, worker)
            answer = self.registry.reserve_worker(worker, epoch, demand, commit=commit)
            why_not = (
                self.model.why_not(worker, demand.queue, demand.task, demand.node)
                if self._current(worker, epoch)
                else {Reason.REPLACED, Reason.NO_WORKER, Reason.LAPSED}
            )
            if isinstance(answer, Reservation):
                assert not why_not
                assert answer.slot.committed == commit
                self._see_slot(answer.transfer())
                self.model.reserved(answer.slot.token, worker, demand, commit=commit)
            else:
                assert answer.reason in why_not
                self.model.park(demand)

        @rule(data=st.data(), worker=WORKERS, lots=LOTS, marked_only=st.booleans())
        def claim_parked(self, data, worker, lots, marked_only):
            epoch = self._epoch(data, worker)
            answer = self.registry.claim_parked(worker, epoch, lots, marked_only=marked_only)
            lot = self.model.first_lot(worker, lots, marked_only=marked_only) if self._current(worker, epoch) else None
            if isinstance(answer, Slot):
                assert lot is not None
                assert answer.worker == worker
                self._see_claim(answer, lot)
            else:
                assert lot is None

        @rule(data=st.data())
        def commit(self, data):
            token = self._token(data)
            slot = self.model.slots.get(token)
            worker = data.draw(st.sampled_from([slot.worker] * 5 + ["a"])) if slot else data.draw(WORKERS)
            epoch = self._epoch(data, worker)
            outcome = self.registry.commit(token, worker, epoch)
            if slot is None or (slot.worker, slot.epoch) != (worker, epoch):
                assert outcome in (CommitOutcome.GONE, CommitOutcome.STALE)
                if worker in self.model.workers and not self._current(worker, epoch):
                    assert outcome is CommitOutcome.STALE
                elif slot is None:
                    assert outcome is CommitOutcome.GONE
            elif slot.committed_at is not None:
                assert outcome is CommitOutcome.ALREADY
            else:
                assert outcome is CommitOutcome.COMMITTED
                slot.committed_at = self.model.now

        @rule(data=st.data(), with_epoch=st.booleans(), then=THEN, lots=LOTS)
        def release(self, data, with_epoch, then, lots):
            self._release(data, self._token(data), with_epoch, then, lots)

        @rule(data=st.data(), then=THEN, lots=LOTS)
        def find_a_lot_empty(self, data, then, lots):
            claims = [s.token for s in self.seen if s.lot is not None and s.token in self.model.slots]
            if claims:
                self._release(data, data.draw(st.sampled_from(claims)), True, then, lots, empty=True)

        def _release(self, data, token, with_epoch, then, lots, empty=False):
            slot = self.model.slots.get(token)
            worker = slot.worker if slot else "a"
            epoch = self._epoch(data, worker) if with_epoch else None
            marked_only = then != "any lot"
            then = Claim(worker, self._epoch(data, worker), lots, marked_only) if then else None
            # Whether a store takes the news of an empty lot with a slot that is not held any more is its own affair.
            held = slot is not None and epoch in (None, slot.epoch)
            claims = [s for s in self.seen if s.token == token and s.lot is not None] if held else []
            emptied = data.draw(st.sampled_from(claims if empty and claims else [None, *claims]))
            released = self.registry.release(token, epoch, then=then, emptied=emptied)
            if not held:
                expected = ReleaseOutcome.ALREADY if slot is None else ReleaseOutcome.STALE
                assert (released.outcome, released.claim) == (expected, None)
                return
            assert released.outcome is ReleaseOutcome.RELEASED
            del self.model.slots[token]
            waiting = False
            if emptied is not None:
                waiting = self.model.found_empty(emptied.lot, self.versions[token])
                lots = tuple(lot for lot in lots if lot.name != emptied.lot)
            assert released.waiting == waiting
            lot = None
            if then is not None and then.epoch == slot.epoch:
                lot = self.model.first_lot(worker, lots)
                if lot is None and not marked_only:
                    lot = self.model.first_lot(worker, lots, marked_only=False)
            if lot is None:
                assert released.claim is None
            else:
                assert released.claim is not None
                assert released.claim.worker == worker
                self._see_claim(released.claim, lot)

        @rule(data=st.data())
        def cancel(self, data):
            token = self._token(data)
            slot = self.model.slots.get(token)
            outcome = self.registry.cancel(token)
            if slot is None:
                assert outcome is ReleaseOutcome.ALREADY
            elif slot.committed_at is not None:
                assert outcome is ReleaseOutcome.COMMITTED
            else:
                assert outcome is ReleaseOutcome.RELEASED
                del self.model.slots[token]

        # -- limits, clean-up, views ---------------------------------------------------------------------

        @rule(queue=QUEUES, limit=st.sampled_from([None, None, 0, 1, 3]))
        def set_limit(self, queue, limit):
            self.registry.set_limit(queue, limit)
            self.model.ordered.pop(queue, None)
            if limit is not None:
                self.model.ordered[queue] = limit

        @rule(cleaner=st.sampled_from(["x", "y"]), seconds=st.sampled_from([5, 100] if by_hand else [3600]))
        def expire(self, cleaner, seconds):
            handed_out = [(g.name, g.epoch, g.settled) for g in self.registry.expire(cleaner, seconds)]
            assert sorted(handed_out) == self.model.expire(cleaner, seconds)

        @rule(data=st.data(), worker=WORKERS)
        def forget(self, data, worker):
            epoch = self._epoch(data, worker)
            gone = self.model.gone.get(worker)
            forgotten = self.registry.forget(worker, epoch)
            if gone is not None and gone.epoch == epoch:
                assert forgotten
                del self.model.gone[worker]
            elif worker in self.model.workers:
                assert not forgotten

        @precondition(lambda self: by_hand)
        @rule(seconds=st.sampled_from([1, 1, 2, 3, 5, 9, 10, 31]))
        def time_passes(self, seconds):
            store.advance(float(seconds))
            self._see_time()

        @rule(queue=QUEUES, task=st.none() | TASKS, node=st.none() | NODES)
        def census(self, queue, task, node):
            census = self.registry.census(queue, task, node)
            assert [w.name for w in census.workers] == sorted(self.model.workers)
            for shown in census.workers:
                assert (shown.reason or None) in (self.model.why_not(shown.name, queue, task, node) or {None})
            assert (census.limit, census.held) == (self.model.limit(queue), self.model.held_for(queue))
            assert census.waiting == self.model.waiting(queue)

        @invariant()
        def overview_is_true(self):
            overview = self.registry.overview()
            assert [w.name for w in overview.workers] == sorted({*self.model.workers, *self.model.gone})
            for shown in overview.workers:
                if shown.name in self.model.gone:
                    assert (shown.state, shown.held) == (WorkerState.LAPSED, 0)
                    continue
                worker = self.model.workers[shown.name]
                conditions = self.model.conditions(shown.name)
                held = self.model.held_by(shown.name)
                committed = sum(s.committed_at is not None for s in held)
                assert (shown.epoch, shown.capacity, shown.node) == (worker.epoch, worker.capacity, worker.advert.node)
                assert (shown.reserved, shown.committed) == (len(held) - committed, committed)
                assert shown.state in ({_STATE_OF[c] for c in conditions} or {WorkerState.READY})
                reasons = conditions | ({Reason.FULL} if self.model.full(shown.name) else set())
                assert shown.reason in (reasons or {None})
                limits = sorted(worker.advert.worker_queues.items())
                assert shown.shares == tuple((q, self.model.share_held(shown.name, q), limit) for q, limit in limits)
            queues = {q.name: (q.limit, q.held, q.waiting) for q in overview.queues}
            for name in ("q", "r"):
                model = (self.model.limit(name), self.model.held_for(name), self.model.waiting(name))
                assert queues.get(name, (None, 0, False)) == model
            lots = [(lot.name, lot.queue) for lot in overview.lots]
            assert lots == sorted((name, mark.queue) for name, mark in self.model.marks.items() if not mark.found_empty)

        def teardown(self):
            self.registry.close()

    return Machine


def test_store_answers_as_the_model_does(store):
    """By default the same sequences every time; CAPACITY_TEST_EXAMPLES=5000 looks for new ones."""
    asked = os.environ.get("CAPACITY_TEST_EXAMPLES")
    examples = int(asked) if asked else 150 if store.name.startswith("memory") else 30
    run_state_machine_as_test(
        machine(store),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=asked is None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
