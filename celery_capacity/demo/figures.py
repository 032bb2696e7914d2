"""What follows from a journal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import DemoFailed
from .journal import Journal
from .plan import SLOTS, WORKERS, Job, perfect_queue

__all__ = ("Figures", "Sent", "measure", "quantile")


@dataclass(frozen=True)
class Sent:
    """A job on its way: its task id, and when the call that sent it began."""

    job: Job
    task_id: str
    at: float


@dataclass(frozen=True)
class Figures:
    """One run.  Durations are in seconds; what says ``perfect`` is the perfect queue's, with the same durations."""

    tasks: int
    makespan: float
    perfect_makespan: float
    p50: float
    p95: float
    perfect_p50: float
    perfect_p95: float
    longest: float
    perfect_longest: float
    #: By worker.
    most_held: dict[str, int]
    ran: dict[str, int]
    pinned: int
    pinned_right: int

    @property
    def ratio(self) -> float:
        """The makespan, as a multiple of the perfect queue's."""
        return self.makespan / self.perfect_makespan


def measure(waves: Sequence[Sequence[Sent]], journal: Journal) -> Figures:
    """The figures of one run, whose tasks have all ended.

    :raises DemoFailed: a task was lost, or ran twice.
    """
    everything = [sent for wave in waves for sent in wave]
    for sent in everything:
        _check_once(sent, journal)
    makespan = perfect_makespan = 0.0
    waits: list[float] = []
    perfect_waits: list[float] = []
    ran = dict.fromkeys(WORKERS, 0)
    right = 0
    for wave in waves:
        begun, ended = [], []
        for sent in wave:
            trace = journal.traces[sent.task_id]
            (start, worker), (end, _) = trace.begun[0], trace.ended[0]
            begun.append(start)
            ended.append(end)
            ran[worker] += 1
            right += sent.job.node is not None and worker.endswith(f"@{sent.job.node}")
        ideal, ideal_end = perfect_queue([end - start for start, end in zip(begun, ended, strict=True)], _ALL_SLOTS)
        makespan += max(ended) - wave[0].at
        perfect_makespan += ideal_end
        for sent, start, ideal_wait in zip(wave, begun, ideal, strict=True):
            if sent.job.kind == "short":
                waits.append(start - sent.at)
                perfect_waits.append(ideal_wait)
    return Figures(
        tasks=len(everything),
        makespan=makespan,
        perfect_makespan=perfect_makespan,
        p50=quantile(waits, 0.5),
        p95=quantile(waits, 0.95),
        perfect_p50=quantile(perfect_waits, 0.5),
        perfect_p95=quantile(perfect_waits, 0.95),
        longest=max(waits),
        perfect_longest=max(perfect_waits),
        most_held={worker: journal.most_held(worker) for worker in WORKERS},
        ran=ran,
        pinned=sum(sent.job.node is not None for sent in everything),
        pinned_right=right,
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the part ``q`` of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def _check_once(sent: Sent, journal: Journal) -> None:
    trace = journal.traces.get(sent.task_id)
    times = len(trace.begun) if trace is not None else 0
    if times != 1:
        what = "was lost" if times == 0 else f"ran {times} times"
        raise DemoFailed(f"task {sent.job.kind}[{sent.task_id}] {what}")


_ALL_SLOTS = SLOTS * len(WORKERS)
