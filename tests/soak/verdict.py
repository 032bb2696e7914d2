"""Whether every task that had to be kept was kept, none has run twice without a reason, and nothing has leaked."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from datetime import datetime, timezone
from itertools import pairwise

from support.journal import Run
from support.sampling import Sampler

from celery_capacity.naming import dead_letter_queue

from .load import Load, Sent
from .world import NODES, SIZE, World

__all__ = ("Verdict", "open_tasks", "settle")

#: A task that a process had acknowledged may have begun, or be about to send what comes after it, for this long before
#: the process dies.
_AROUND_SECONDS = 10.0
#: What must not be counted at all, whatever happens: each of them is a defect.
_DEFECTS = ("heartbeat_failed", "intake_failed", "swept")
_RECEIVED = re.compile(r"^\[([-\d]+ [:\d]+,\d+): .*Task \w+\[([^]]+)\] received", re.MULTILINE)


def open_tasks(world: World, load: Load) -> list[Sent]:
    """What was sent and has not run to its end, as far as that had to be; explained losses are not among them."""
    ended: set[str] = set()
    for run in world.fleet.journal.runs():
        if run.outcome == "returned":
            ended.add(run.key)
    return [one for one in list(load.sent) if not one.unsure and not one.may_fail and not set(one.keys) <= ended]


def settle(world: World, load: Load, limit: float) -> None:
    """Wait until nothing is held or left; what is not there by then is judged."""
    fleet = world.fleet

    def quiet() -> bool:
        fleet.journal.note_dead()
        return not fleet.journal.running() and not fleet.held() and not fleet.left()

    until = time.monotonic() + limit
    seen = 0
    while True:
        # Twice in a row, since a chain has moments in which it is nowhere to be seen.
        seen = seen + 1 if quiet() else 0
        if seen == 3 or time.monotonic() > until:
            return
        time.sleep(0.5)


class Verdict:
    """Reads the journal and the logs, once all is quiet."""

    def __init__(self, world: World, load: Load, sampler: Sampler) -> None:
        self.world = world
        self.load = load
        self.sampler = sampler
        self.violations: list[str] = []
        #: Early-acknowledged tasks that went down with their process, and dead letters: why, by key.
        self.lost: dict[str, str] = {}
        #: Runs beyond the first, by what explains them.
        self.again = 0
        self._runs: dict[str, list[Run]] = defaultdict(list)
        for run in world.fleet.journal.runs():
            self._runs[run.key].append(run)
        self._received = self._read_logs()

    def reach(self) -> None:
        """Look at everything."""
        self.violations += self.sampler.violations
        if not self.sampler.samples:
            self.violations.append("nothing was sampled")
        for ended in self.world.ended:
            self.violations.append(f"ended by itself: {ended}")
        self._look_at_the_fleet()
        dead = self._dead_letters()
        for one in self.load.sent:
            self._look_at(one, dead)

    def _look_at_the_fleet(self) -> None:
        fleet = self.world.fleet
        overview = fleet.registry.overview()
        for view in overview.workers:
            if view.held:
                self.violations.append(f"leaked: {view.name} holds {view.reserved} + {view.committed} slots at the end")
        if {v.name for v in overview.workers if v.capacity == SIZE} != set(NODES):
            self.violations.append(f"the fleet is not whole: {overview.workers}")
        if left := fleet.left():
            self.violations.append(f"left in the broker: {left}")
        counters = dict(overview.counters)
        self.violations += [f"counter {name} is {counters[name]}" for name in _DEFECTS if counters.get(name)]

    def _look_at(self, one: Sent, dead: set[str]) -> None:
        for number, key in enumerate(one.keys):
            runs = self._runs[key]
            if any(run.outcome == "returned" for run in runs):
                self._look_for_more(one, key, runs)
                continue
            if one.unsure or one.may_fail:
                return
            why = self._why_lost(one, number, runs, dead)
            if why is None:
                how = ", ".join(f"{run.outcome} on {run.worker} at {run.start:.2f}" for run in runs) or "never begun"
                where = "; ".join(f"received by {w} at {at:.2f}" for w, at in self._received[one.ids[number]])
                self.violations.append(
                    f"lost: {one.kind} {key} [{one.ids[number]}] sent at {one.began:.2f}-{one.ended:.2f}: {how}; {where}"
                )
            else:
                self.lost[key] = why
            return

    def _why_lost(self, one: Sent, number: int, runs: list[Run], dead: set[str]) -> str | None:
        identity = one.ids[number]
        if identity in dead:
            killed = sum(run.outcome == "gone" for run in runs)
            # The first is not counted as a delivery that came to nothing until the second.
            return "dead letter" if killed >= 3 else None
        if one.late:
            return None
        if any(run.outcome in ("gone", "SystemExit") for run in runs):
            return "ran in a process that was killed"
        # Acknowledged and not yet begun; or ended, and about to send what comes after it.
        moments = list(self._received[identity])
        if number:
            moments += [(run.worker, run.end) for run in self._runs[one.keys[number - 1]] if run.end is not None]
        moments += [(run.worker, run.end) for run in runs if run.outcome == "Retry" and run.end is not None]
        for worker, at in moments:
            if any(loss.worker == worker and at <= loss.at + 0.5 < at + _AROUND_SECONDS for loss in self.world.losses):
                return "had just been given to a process that was killed"
        return None

    def _look_for_more(self, one: Sent, key: str, runs: list[Run]) -> None:
        by_try: dict[int, list[Run]] = defaultdict(list)
        for run in runs:
            by_try[run.retries].append(run)
        for tries in by_try.values():
            for first, second in pairwise(tries):
                self.again += 1
                if not self._why_again(one, first, second):
                    self.violations.append(
                        f"twice: {one.kind} {key} on {first.worker} at {first.start:.2f} ({first.outcome}) and on"
                        f" {second.worker} at {second.start:.2f}, and nothing happened"
                    )

    def _why_again(self, one: Sent, first: Run, second: Run) -> bool:
        """Something was done to the fleet between its publish and its second run."""
        return any(
            fault.began <= second.start and one.began <= (fault.healed or fault.undone) + _AROUND_SECONDS
            for fault in self.world.faults
        )

    def _dead_letters(self) -> set[str]:
        found = set()
        fleet = self.world.fleet
        with fleet.app.connection_for_write() as connection, connection.channel() as channel:
            try:
                while message := channel.basic_get(dead_letter_queue(fleet.namespace, fleet.queue)):
                    found.add(message.headers["id"])
            except connection.channel_errors:
                pass  # nobody had to make one
        return found

    def _read_logs(self) -> dict[str, list[tuple[str, float]]]:
        found: dict[str, list[tuple[str, float]]] = defaultdict(list)
        ahead = time.time() - time.monotonic()
        for name, worker in self.world.fleet.workers.items():
            for moment, identity in _RECEIVED.findall(worker.logs()):
                # Celery's logs are in local time.
                at = datetime.strptime(moment, "%Y-%m-%d %H:%M:%S,%f").astimezone(timezone.utc).timestamp()
                found[identity].append((name, at - ahead))
        return found
