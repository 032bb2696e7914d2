"""Ctrl-C, and what else ends a program, at a time when nothing can be left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ("Interrupted", "Interrupts")

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal asked the demo to end.  Not an ``Exception``, so that no library catches it on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """Raises :exc:`Interrupted` for the first signal, and nothing for those after it: the clean-up is under way."""

    def __init__(self) -> None:
        self._arrived: int | None = None
        self._held = False
        self._raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            # Set even where it is ignored, as for a command that a shell script runs in the background.
            self._before[number] = signal.signal(number, self._arrive)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a signal waits: for the moment between a process's start and its entry in a list."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self._raise()

    def no_more(self) -> None:
        """From now on signals change nothing: what is left is short, and must be done."""
        self._raised = True

    def _arrive(self, number: int, _frame: FrameType | None) -> None:
        if self._arrived is None:
            self._arrived = number
        if not self._held:
            self._raise()

    def _raise(self) -> None:
        if self._arrived is not None and not self._raised:
            self._raised = True
            raise Interrupted(self._arrived)
