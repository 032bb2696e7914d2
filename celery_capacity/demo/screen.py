"""What is seen while it runs: redrawn in place on a terminal, a line now and then when piped."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from .fleet import Fleet
from .plan import SLOTS, WORKERS

__all__ = ("Screen",)

_TERMINAL_SECONDS = 0.1
_PIPED_SECONDS = 0.5


class Screen:
    """Writes text to ``stream``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._redraws = self._stream.isatty()
        self._next = 0.0
        self._open_line = False

    def say(self, text: str = "") -> None:
        """One or more lines, that stay."""
        if self._open_line:
            self._stream.write("\n")
            self._open_line = False
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def show(self, fleet: Fleet, kinds: dict[str, str], title: str, since: float, *, now: bool = False) -> None:
        """The slots of the fleet, if it is time (or ``now``).

        :param kinds: ``short`` or ``long``, by task id.
        :param since: when what is shown began, on the monotonic clock.
        """
        at = time.monotonic()
        if at < self._next and not now:
            return
        self._next = at + (_TERMINAL_SECONDS if self._redraws else _PIPED_SECONDS)
        cells = []
        for worker in WORKERS:
            running, waiting = fleet.journal.now(worker)
            letters = "".join(sorted(kinds.get(task_id, "?")[0].upper() for task_id in running))
            more = f"+{waiting}" if waiting else ""
            cells.append(f"{worker} [{letters.replace('S', 's'):.<{SLOTS}}]{more:<3}")
        done = fleet.journal.ended(kinds)
        line = f"  {title} {at - since:4.1f} s  {' '.join(cells)}  {done:>2}/{len(kinds)} done"
        if self._redraws:
            self._stream.write(f"\r\x1b[K{line}")
            self._open_line = True
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
