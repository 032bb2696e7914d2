"""Ends process groups when the test run is gone, even if it was killed with SIGKILL.

Runs as a process of its own, in a session of its own, so that Ctrl-C does not reach it.  It reads lines from
its standard input: ``+ PGID`` to watch over a group, ``- PGID`` when the group has ended.  End of file means
that the test process is no more: whatever is still on the list is killed, with all of its descendants.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

__all__ = ("main",)


def main() -> None:
    groups: set[int] = set()
    # Not an iteration over the file: that reads ahead and would hold lines back.
    for line in iter(sys.stdin.readline, ""):
        sign, _, pgid = line.strip().partition(" ")
        if sign == "+":
            groups.add(int(pgid))
        else:
            groups.discard(int(pgid))
    # Listed before the first is killed: an orphan no longer says whose child it was.
    strays = [pid for pgid in groups for pid in _descendants(pgid)]
    for pgid in groups:
        with suppress(ProcessLookupError):
            os.killpg(pgid, signal.SIGKILL)
    for pid in strays:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    """Children may be in a group of their own."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/stat") as file:
                # After the name, which is in parentheses and may hold anything: the state, the parent.
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    main()
