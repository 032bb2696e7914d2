"""What really ran, where and when, written by the tasks themselves and independent of broker and backend.

One file of JSON lines, opened with ``O_APPEND`` and written with one ``write`` a line, so that any number of
processes may write at once and a killed one leaves at most a line without its end.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .waiting import wait_until

__all__ = ("JOURNAL_ENV", "Journal", "Run", "journalled")

#: Names the directory; without it nothing is written.
JOURNAL_ENV = "CAPACITY_TEST_JOURNAL"
_FILE = "journal.jsonl"


def _append(directory: str | Path, event: dict[str, Any]) -> None:
    # CLOCK_MONOTONIC is one clock for all processes of a machine, and never steps.
    line = json.dumps({"time": time.time(), "mono": time.monotonic(), **event}) + "\n"
    # Not held open: a descriptor would be shared with forks, and closed by daemonising pools.
    handle = os.open(Path(directory) / _FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


@contextmanager
def journalled(key: str, **details: Any) -> Iterator[None]:
    """Write the start and the end of one run.  ``details`` are JSON values that identify it."""
    directory = os.environ.get(JOURNAL_ENV)
    if not directory:
        yield
        return
    run = {"run": uuid.uuid4().hex, "pid": os.getpid()}
    _append(
        directory,
        {
            "event": "start",
            "key": key,
            "host": socket.gethostname(),
            "thread": threading.get_ident(),
            **run,
            **details,
        },
    )
    outcome = "returned"
    try:
        yield
    except BaseException as exc:
        outcome = type(exc).__name__
        raise
    finally:
        _append(directory, {"event": "end", "outcome": outcome, **run})


@dataclass
class Run:
    """One execution of a task.  Times are on the machine's monotonic clock, in seconds."""

    run: str
    id: str
    key: str
    task: str
    worker: str
    pid: int
    retries: int
    queue: str
    redelivered: bool
    start: float
    end: float | None = None
    priority: int | None = None
    #: ``returned``, the name of the exception, or ``gone`` if its process died.
    outcome: str | None = None

    @property
    def open(self) -> bool:
        return self.end is None


class Journal:
    """Reads the journal, from where it last stopped.

    An interval lies within the time that the task held its slot, so two that overlap held two slots at once:
    :meth:`max_parallel` never says too much.  A run whose process was killed has no end; :meth:`note_gone`
    gives it one (the worker helpers do), and :meth:`note_dead` looks for processes that are no more.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / _FILE
        self._events: list[dict[str, Any]] = []
        self._runs: dict[str, Run] = {}
        self._offset = 0
        self._lock = threading.Lock()

    # -- reading -----------------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """All events, in the order in which they were written."""
        self._read()
        return list(self._events)

    def runs(self, *, task: str | None = None, worker: str | None = None, key: str | None = None) -> list[Run]:
        """All executions, in the order in which they started."""
        self._read()
        return [
            run
            for run in self._runs.values()
            if (task is None or run.task == task)
            and (worker is None or run.worker == worker)
            and (key is None or run.key == key)
        ]

    def started(self, **which: Any) -> list[str]:
        """Keys of the runs that have started.  ``which`` as in :meth:`runs`, here and below."""
        return [run.key for run in self.runs(**which)]

    def ended(self, **which: Any) -> list[str]:
        """Keys of the runs that have ended, whatever way."""
        return [run.key for run in self.runs(**which) if not run.open]

    def running(self, **which: Any) -> list[Run]:
        return [run for run in self.runs(**which) if run.open]

    def executions(self) -> Counter[str]:
        """How often each task id was started.  A retry has the id of the first try: see ``Run.retries``."""
        return Counter(run.id for run in self.runs())

    def executions_by_key(self) -> Counter[str]:
        return Counter(run.key for run in self.runs())

    def max_parallel(self, **which: Any) -> int:
        """The most runs that were under way at one time."""
        return _most_at_once(self.runs(**which))

    def max_parallel_by_worker(self) -> dict[str, int]:
        return self.max_parallel_by(lambda run: run.worker)

    def max_parallel_by_task(self) -> dict[str, int]:
        return self.max_parallel_by(lambda run: run.task)

    def max_parallel_by(self, group: Callable[[Run], str]) -> dict[str, int]:
        """:meth:`max_parallel` within each group, for instance ``lambda run: run.queue``."""
        groups: dict[str, list[Run]] = {}
        for run in self.runs():
            groups.setdefault(group(run), []).append(run)
        return {name: _most_at_once(runs) for name, runs in groups.items()}

    def wait(self, condition: Callable[[Journal], Any], limit: float, *, what: str = "the journal") -> Any:
        """Wait until ``condition(journal)`` is true; on failure say what the journal holds.

        :raises AssertionError: when ``limit`` seconds have passed.
        """
        try:
            return wait_until(lambda: condition(self), limit, what=what)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.summary()}") from None

    def summary(self, last: int = 20) -> str:
        runs = self.runs()
        lines = [f"journal: {len(runs)} started, {sum(run.open for run in runs)} of them still running"]
        lines += [
            f"  {run.key} {run.task} on {run.worker}[{run.pid}] {run.outcome or 'running'}" for run in runs[-last:]
        ]
        return "\n".join(lines)

    # -- what a test tells its tasks -----------------------------------------------------------------------

    def open_gate(self, gate: str) -> None:
        """Let the tasks ``hold`` and ``hold_late`` that wait for this gate end, now and later.  Harmless twice."""
        (self.directory / f"gate-{gate}").touch()

    # -- what the tasks could not write --------------------------------------------------------------------

    def note_gone(self, pids: Iterable[int], at: float | None = None) -> None:
        """These processes were killed: their runs end ``at`` (``time.monotonic()``, default now).

        Give the time just before the kill: then the runs are never said to have lasted longer than they did.
        """
        for pid in pids:
            _append(self.directory, {"event": "gone", "pid": pid, "mono": time.monotonic() if at is None else at})

    def note_dead(self) -> None:
        """Look for runs whose process is no more, and end them now."""
        self.note_gone({run.pid for run in self.running() if not _alive(run.pid)})

    def _read(self) -> None:
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    file.seek(self._offset)
                    data = file.read()
            except FileNotFoundError:
                return
            whole, newline, _ = data.rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            for line in whole.splitlines():
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        kind = event["event"]
        if kind == "start":
            self._runs[event["run"]] = Run(
                run=event["run"],
                id=event.get("id", event["key"]),
                key=event["key"],
                task=event.get("task", ""),
                worker=event.get("worker", ""),
                pid=event["pid"],
                retries=event.get("retries", 0),
                queue=event.get("queue", ""),
                redelivered=event.get("redelivered", False),
                start=event["mono"],
                priority=event.get("priority"),
            )
        elif kind == "end":
            run = self._runs[event["run"]]
            run.end, run.outcome = event["mono"], event["outcome"]
        elif kind == "gone":
            for run in self._runs.values():
                if run.pid == event["pid"] and run.open:
                    run.end, run.outcome = event["mono"], "gone"


def _most_at_once(runs: Iterable[Run]) -> int:
    # At equal times the end comes first: it is the reading that can't accuse anyone wrongly.
    steps: list[tuple[float, int]] = []
    for run in runs:
        steps.append((run.start, 1))
        if run.end is not None:
            steps.append((run.end, -1))
    now = most = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def _alive(pid: int) -> bool:
    try:
        # The name, in parentheses, may hold anything; the state follows it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie runs nothing: its parent has only not asked for its exit code yet.
    return state not in ("Z", "X")
