"""A witness of the first invariant: ``0 <= held <= capacity``, at every instant that anyone can observe."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from types import TracebackType

from typing_extensions import Self

from celery_capacity.errors import RegistryUnavailable
from celery_capacity.models import Overview
from celery_capacity.registry import Registry

__all__ = ("Sampler",)


class Sampler:
    """Polls ``registry.overview()`` from a thread of its own, and says at the end what was wrong.

    Use it as a context manager; leaving the block asserts, unless an exception is already on its way.  A
    number that was lowered takes nothing away, so what was held before may stay above it, but may not grow.
    While the registry does not answer there is nothing to see: such polls are counted in ``unanswered``.
    """

    def __init__(self, registry: Registry, interval: float = 0.05) -> None:
        self.registry = registry
        self.interval = interval
        self.samples = 0
        self.unanswered = 0
        self.violations: list[str] = []
        #: The most that was seen held, by worker name.
        self.most_held: dict[str, int] = {}
        self._allowed: dict[Hashable, int] = {}
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0

    def start(self) -> Self:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="capacity-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread.  Harmless twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=30.0)
            if self._thread.is_alive():
                raise AssertionError("the sampler hangs in registry.overview()")
            self._thread = None

    def check(self, overview: Overview) -> None:
        """Look at one overview.  The thread calls it; tests may, too."""
        self.samples += 1
        for worker in overview.workers:
            who = f"worker {worker.name} (epoch {worker.epoch})"
            if worker.reserved < 0 or worker.committed < 0:
                self._violation(f"{who}: reserved={worker.reserved} committed={worker.committed}")
            self._compare(("worker", worker.name, worker.epoch), who, worker.held, worker.capacity)
            for share in worker.shares:
                whose = ("share", worker.name, worker.epoch, share.queue)
                self._compare(whose, f"{who}, queue {share.queue}", share.held, share.limit)
            self.most_held[worker.name] = max(worker.held, self.most_held.get(worker.name, 0))
        for queue in overview.queues:
            self._compare(("queue", queue.name), f"queue {queue.name}", queue.held, queue.limit)

    def assert_clean(self) -> None:
        """:raises AssertionError: if anything was wrong, or if nothing was ever seen."""
        if self._failure is not None:
            raise AssertionError("the sampler failed") from self._failure
        if not self.samples:
            raise AssertionError(f"the sampler saw nothing ({self.unanswered} polls without an answer)")
        if self.violations:
            shown = "\n  ".join(self.violations[:20])
            raise AssertionError(f"{len(self.violations)} violations in {self.samples} samples:\n  {shown}")

    def _compare(self, key: Hashable, who: str, held: int, limit: int | None) -> None:
        if held < 0:
            self._violation(f"{who}: held={held}")
        if limit is None:
            self._allowed.pop(key, None)
            return
        ceiling = max(limit, self._allowed.get(key, limit))
        if held > ceiling:
            self._violation(f"{who}: held={held} of {limit}")
        # What is over a lowered limit may only shrink: the next sample is held to what is left now.
        self._allowed[key] = max(limit, min(ceiling, held))

    def _violation(self, text: str) -> None:
        self.violations.append(f"sample {self.samples}, {time.monotonic() - self._began:.2f} s: {text}")

    def _run(self) -> None:
        try:
            while True:
                # Read before the poll, so that one whole poll is made after the last thing that a test did.
                last = self._stopping.is_set()
                try:
                    self.check(self.registry.overview())
                except RegistryUnavailable:
                    self.unanswered += 1
                if last:
                    return
                self._stopping.wait(self.interval)
        except BaseException as exc:  # noqa: BLE001 - raised again in the thread of the test
            self._failure = exc

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()
        if exc_type is None:
            self.assert_clean()
