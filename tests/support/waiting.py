"""Waiting for a condition, always with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ("wait_until",)

T = TypeVar("T")


def wait_until(condition: Callable[[], T], limit: float, interval: float = 0.02, *, what: str = "the condition") -> T:
    """Call ``condition`` until it answers something true, and return that answer.

    ``limit`` and ``interval`` are in seconds.  The condition is called at least once, and once more when the
    limit has passed, so that a process that was not scheduled for a while does not fail the test.  What the
    condition raises is not caught.

    :raises AssertionError: with ``what`` and the last answer, when the limit has passed.
    """
    deadline = time.monotonic() + limit
    while True:
        last_try = time.monotonic() >= deadline
        answer = condition()
        if answer:
            return answer
        if last_try:
            raise AssertionError(f"waited {limit:g} s in vain for {what}; last answer: {answer!r}")
        time.sleep(min(interval, max(0.0, deadline - time.monotonic())))
