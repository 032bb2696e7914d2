"""Errors of celery_capacity.  One base; fields are typed; messages name the thing, the value and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import Census, WorkerView

__all__ = (
    "CapacityError",
    "CapacityExhausted",
    "ConfigurationError",
    "InvalidAdvertError",
    "InvalidCounterError",
    "InvalidDemandError",
    "RegistryError",
    "RegistryUnavailable",
    "ReservationLost",
)


class CapacityError(Exception):
    """Base of every error that celery_capacity raises on purpose."""


class _InvalidValue(CapacityError, ValueError):
    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(name, value, expected)
        self.name = name
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.name} is {self.value!r}, but it takes {self.expected}"


class ConfigurationError(_InvalidValue):
    """A setting is wrong or misspelled.  ``name``, ``value`` and ``expected`` say which, what, and what it takes.

    When several are wrong these are the first one's, and ``problems`` has them all.  No value shows a password.
    """

    def __init__(self, name: str, value: object, expected: str, problems: tuple[ConfigurationError, ...] = ()) -> None:
        super().__init__(name, value, expected)
        # With all of them in it the error survives pickling, as on its way out of a child process.
        self.args = (name, value, expected, problems)
        self._problems = problems

    @classmethod
    def joined(cls, problems: Sequence[ConfigurationError]) -> ConfigurationError:
        """One error for one or more; a single one stays as it is."""
        first = problems[0]
        if len(problems) == 1:
            return first
        return cls(first.name, first.value, first.expected, tuple(problems))

    @property
    def problems(self) -> tuple[ConfigurationError, ...]:
        """Every single problem; only this error itself if it is the only one."""
        return self._problems or (self,)

    def describe(self) -> str:
        """This one problem in one line."""
        return super().__str__()

    def __str__(self) -> str:
        if not self._problems:
            return self.describe()
        lines = "".join(f"\n  - {problem.describe()}" for problem in self._problems)
        return f"{len(self._problems)} settings are wrong:{lines}"


class InvalidAdvertError(_InvalidValue):
    """A worker advertised something that makes no sense; the registry kept no trace of it."""


class InvalidDemandError(_InvalidValue):
    """A dispatch asked for something that makes no sense; nothing was reserved and nothing was published."""


class InvalidCounterError(_InvalidValue):
    """A count was told that makes no sense; nothing was counted."""


class RegistryError(CapacityError):
    """The registry answered, but not with what was asked (wrong data, read-only, out of memory).

    The store's own error is the ``__cause__``.
    """


class RegistryUnavailable(RegistryError):
    """The registry could not be reached or did not answer in time.  The driver's error is the ``__cause__``."""


class ReservationLost(CapacityError):
    """A reservation was committed, but it is no longer the caller's (deadline passed, or worker replaced)."""


class CapacityExhausted(CapacityError):
    """The dispatch was refused at the source: no worker has a free slot for it.  Nothing was published.

    ``census`` says for every worker why it could not take the task; it is a text if the error comes from a result
    backend.  ``retry_after`` is a hint in seconds.

    Of a group or chord, ``group_id`` and ``group_index`` say which part was refused, counted from 0: the parts
    before it are published, it and those after it are not, and a chord's body fails with a
    ``ChordError`` that says so.
    """

    def __init__(
        self,
        queue: str,
        task: str | None,
        reason: str,
        census: Census,
        retry_after: float,
        group_id: str | None = None,
        group_index: int | None = None,
    ) -> None:
        super().__init__(queue, task, reason, census, retry_after, group_id, group_index)
        self.queue = queue
        self.task = task
        self.reason = reason
        self.census = census
        self.retry_after = retry_after
        self.group_id = group_id
        self.group_index = group_index

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args)

    def _held(self, worker: WorkerView) -> str:
        held = f"{worker.held}/{'?' if worker.capacity is None else worker.capacity}"
        shares = [share for share in worker.shares if share.queue == self.queue]
        return f"{held}; {shares[0].held}/{shares[0].limit} for this queue" if shares else held

    def __str__(self) -> str:
        what = f"task {self.task!r} for queue {self.queue!r}" if self.task else f"queue {self.queue!r}"
        if self.group_index is not None:
            before = f"{self.group_index} before it are published" if self.group_index else "nothing is published"
            what = f"part {self.group_index} of group {self.group_id} ({before}): {what}"
        if not hasattr(self.census, "workers"):
            # It comes from a result backend, which keeps a text of the census.
            return f"{what} refused ({self.reason}); retry in {self.retry_after:g} s"
        pin = f" on node {self.census.node!r}" if self.census.node else ""
        if not self.census.workers:
            return f"{what}{pin} refused: no worker for queue {self.queue!r}; retry in {self.retry_after:g} s"
        why = ", ".join(
            f"{w.name} {w.reason.value if w.reason else 'free'} ({self._held(w)})" for w in self.census.workers[:8]
        )
        limit = (
            "" if self.census.limit is None else f"; limit of the queue: {self.census.held} of {self.census.limit} held"
        )
        more = len(self.census.workers) - 8
        tail = f" and {more} more" if more > 0 else ""
        return f"{what}{pin} refused ({self.reason}): {why}{tail}{limit}; retry in {self.retry_after:g} s"
