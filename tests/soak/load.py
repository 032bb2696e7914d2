"""What the fleet is given to do, and what has to have become of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from celery import Celery, chain
from kombu.exceptions import OperationalError
from support.servers import unique

__all__ = ("Load", "Sent")

#: No more than this many tasks are on their way at a time, or a fleet that is down would be buried.
_OPEN_LIMIT = 150
_LINKS = 3


@dataclass
class Sent:
    """One thing that was sent: a task, or a chain of them."""

    kind: str
    keys: tuple[str, ...]
    ids: tuple[str, ...]
    late: bool
    began: float
    #: Seconds on the machine's monotonic clock; between the two, the publish was under way.
    ended: float = 0.0
    #: The publish has raised: it may have arrived or not.
    unsure: bool = False
    #: It may end without having returned: it was revoked, or has a time limit that it exceeds.
    may_fail: bool = False


@dataclass
class Load(threading.Thread):
    """Sends a mixture of tasks until it is told to stop."""

    app: Celery
    seed: int
    per_second: float
    #: How many of what was sent have not run yet, as far as is known.
    still_open: Callable[[], int]
    sent: list[Sent] = field(default_factory=list)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        super().__init__(name="soak-load", daemon=True)
        self._random = random.Random(self.seed)
        self._ending = threading.Event()
        self._prefix = unique("soak")

    def __hash__(self) -> int:
        return id(self)

    def end(self) -> None:
        """Stop sending, and wait for the publish that is under way."""
        self._ending.set()
        self.join(120.0)
        if self.is_alive():
            raise AssertionError("a publish hangs")
        if self.failure is not None:
            raise AssertionError("the load failed") from self.failure

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                burst = self._random.choice((1, 1, 1, 2, 3, 12))
                for _ in range(burst):
                    if not self._ending.is_set() and self.still_open() < _OPEN_LIMIT:
                        self._send()
                self._ending.wait(self._random.expovariate(1.0) * burst / self.per_second)
        except BaseException as exc:  # noqa: BLE001 - raised again by end()
            self.failure = exc

    def _send(self) -> None:
        kinds = ("record", "late", "pinned", "later", "retry", "chain", "late chain", "hard")
        kind = self._random.choices(kinds, (30, 30, 8, 8, 8, 6, 6, 2))[0]
        number = len(self.sent)
        key = f"{self._prefix}-{number}-"
        seconds = self._random.choice((0.0, 0.02, 0.1, 0.3, 0.8))
        late = kind in ("late", "late chain")
        keys = tuple(f"{key}{link}" for link in range(_LINKS if "chain" in kind else 1))
        ids = tuple(unique("id") for _ in keys)
        sent = Sent(kind, keys, ids, late, time.monotonic(), may_fail=kind == "hard")
        tasks = self.app.tasks
        name = "record_late" if late else "record"
        kwargs = {"key": keys[0], "seconds": seconds}
        # Before it is sent: a run may be seen before the publish is through.
        self.sent.append(sent)
        try:
            if "chain" in kind:
                links = [
                    tasks[name].si(key=k, seconds=seconds / _LINKS).set(task_id=i)
                    for k, i in zip(keys, ids, strict=True)
                ]
                chain(*links).apply_async()
            elif kind == "retry":
                retry = {"times": 2, "countdown": 0.2, "key": keys[0]}
                tasks["retry_n"].apply_async(kwargs=retry, task_id=ids[0])
            elif kind == "hard":
                tasks["hard"].apply_async(kwargs={"key": keys[0]}, task_id=ids[0])
            else:
                options = {"task_id": ids[0]}
                if kind == "pinned":
                    options["node"] = self._random.choice(("north", "south", "east"))
                elif kind == "later":
                    options["countdown"] = self._random.uniform(0.5, 4.0)
                tasks[name].apply_async(kwargs=kwargs, **options)
        except OperationalError:
            sent.unsure = True
        finally:
            sent.ended = time.monotonic()
