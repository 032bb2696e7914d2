"""What really happened, written down by the workers themselves: received, begun, ended.

One file of JSON lines.  Each line is one ``write`` to a file opened with ``O_APPEND``, so that any number of
processes may write at once.  Times are on the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ("Journal", "Trace", "write")


def write(path: str | Path, event: str, worker: str, task_id: str = "") -> None:
    """Add one line."""
    line = json.dumps({"at": time.monotonic(), "event": event, "worker": worker, "id": task_id, "pid": os.getpid()})
    # Not held open: a descriptor would be shared with every pool process.
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


@dataclass
class Trace:
    """One task's way.  A list, where it should have one entry, has one for every time that it happened."""

    received: list[tuple[float, str]] = field(default_factory=list)
    begun: list[tuple[float, str]] = field(default_factory=list)
    ended: list[tuple[float, str]] = field(default_factory=list)


class Journal:
    """Reads on from where it last stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ready: set[str] = set()
        self.traces: dict[str, Trace] = {}
        self._offset = 0

    def read(self) -> Journal:
        """Take in what is new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            self._take(json.loads(line))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        what = event["event"]
        if what == "ready":
            self.ready.add(event["worker"])
            return
        trace = self.traces.setdefault(event["id"], Trace())
        getattr(trace, what).append((event["at"], event["worker"]))

    def ended(self, ids: Iterable[str]) -> int:
        """How many of these tasks have ended."""
        return sum(bool(self.traces[i].ended) for i in ids if i in self.traces)

    def now(self, worker: str) -> tuple[list[str], int]:
        """The ids of what the worker runs at this moment, and how many tasks it has besides that it has not begun."""
        running, waiting = [], 0
        for task_id, trace in self.traces.items():
            if trace.ended or not trace.received or trace.received[-1][1] != worker:
                continue
            if trace.begun:
                running.append(task_id)
            else:
                waiting += 1
        return running, waiting

    def most_held(self, worker: str) -> int:
        """The most tasks that the worker had received and not ended at one time."""
        steps = []
        for trace in self.traces.values():
            steps += [(at, 1) for at, name in trace.received if name == worker]
            steps += [(at, -1) for at, name in trace.ended if name == worker]
        held = most = 0
        # What ends at the same instant has ended: -1 before 1.
        for _, step in sorted(steps):
            held += step
            most = max(most, held)
        return most
