"""Ends process groups when the test run is gone, even if it was killed with SIGKILL.

Runs as a process of its own, in a session of its own, so that Ctrl-C does not reach it.  It reads lines from
its standard input: ``+ PGID`` to watch over a group, ``- PGID`` when the group has ended.  End of file means
that the test process is no more, and whatever is still on the list is killed.
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
    for pgid in groups:
        with suppress(ProcessLookupError):
            os.killpg(pgid, signal.SIGKILL)


if __name__ == "__main__":
    main()
