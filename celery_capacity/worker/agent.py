"""One worker's state, shared by the parts that work for it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kombu import Queue

from ..dispatch import lot_queue, own_queue
from ..errors import RegistryError
from ..models import Advert, Lot, Slot
from ..naming import new_token, node_lot, node_of
from ..registry import Registry

if TYPE_CHECKING:
    from ..outage import Outage
    from ..settings import Settings

__all__ = ("WorkerAgent",)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerAgent:
    """Who this worker is, what it serves, and its standing with the registry.

    It lives as long as the worker; connections and consumers come and go under it.
    """

    def __init__(
        self, controller: Any, settings: Settings, registry: Registry, heart_registry: Registry, outage: Outage
    ) -> None:
        self.controller = controller
        self.app = controller.app
        self.settings = settings
        self.registry = registry
        #: The heartbeat thread's own: a lock that it holds must never be copied into a forked pool process.
        self.heart_registry = heart_registry
        self.outage = outage
        self.name: str = controller.hostname
        self.node: str = settings.node or node_of(self.name)
        self.epoch = 0
        self.epoch_lock = threading.RLock()
        self.counters: Counter[str] = Counter()
        #: Own queue declared and consumed, on a living connection.
        self.consuming = False
        #: A newer registration of the same name is there: take no more work.
        self.replaced = False
        self.draining: str | None = None
        self.stopping = False
        self.announced_capacity: int | None = None
        self._select_queues()

    def _select_queues(self) -> None:
        """Split what the worker consumes into managed queues (its lots) and the rest (left to Celery)."""
        manages = self.app.capacity.dispatcher.managed_queue
        selected = list(self.app.amqp.queues.consume_from.values())
        self.managed: dict[str, Queue] = {q.name: q for q in selected if manages(q, None, None) is not None}
        self.unmanaged: list[Queue] = [q for q in selected if q.name not in self.managed]
        kinds = [(q.queue_arguments or {}).get("x-queue-type") for q in selected]
        quorum = "quorum" in kinds or self.app.conf.get("task_default_queue_type") == "quorum"
        # As durable as the queues it stands in for: messages wait in it too, if only for a moment.
        self.own_queue: Queue = own_queue(
            self.settings.namespace, self.name, {"x-queue-type": "quorum"} if quorum else None
        )

    def lots(self) -> tuple[Lot, ...]:
        """The lots that this worker takes from: its queues' own, then those of its node."""
        namespace = self.settings.namespace
        queues = list(self.managed)
        return tuple(Lot(q, q) for q in queues) + tuple(Lot(node_lot(namespace, q, self.node), q) for q in queues)

    def lot_queues(self) -> dict[str, Queue]:
        """The broker queue of each lot, by name."""
        namespace = self.settings.namespace
        named = dict(self.managed)
        for name, queue in self.managed.items():
            lot = node_lot(namespace, name, self.node)
            named[lot] = lot_queue(lot, queue)
        return named

    def capacity(self) -> int | None:
        """How many tasks can run at once; ``None`` while none can be taken.

        With an autoscaler it is the maximum, since the pool only grows when there is more to run than it has
        processes.
        """
        if not self.consuming or self.replaced:
            return None
        autoscaler = getattr(self.controller, "autoscaler", None)
        if autoscaler is not None:
            return int(autoscaler.max_concurrency)
        pool = self.controller.pool
        return None if pool is None else int(pool.num_processes or 0)

    def advert(self) -> Advert:
        """What to register with."""
        return Advert(
            worker=self.name,
            node=self.node,
            # The own queue stands for work that reaches the worker past the managed queues (broadcasts, queues
            # that are left out): it too takes slots.
            queues=(*self.managed, self.own_queue.name),
            tasks=frozenset(self.app.tasks),
            capacity=self.capacity(),
            lease_seconds=self.settings.lease_seconds,
            lapse_seconds=self.settings.lapse_seconds,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """A registry call of the worker's main thread, behind the circuit breaker."""
        return self.outage.call(function, *args, **kwargs)

    def local_slot(self, queue: str, held: int) -> Slot | None:
        """Without the registry: admit by the local count alone.  It is reconciled at the next heartbeat."""
        capacity = self.capacity()
        if capacity is None or held >= capacity:
            return None
        self.count("admitted_locally")
        return Slot(new_token(self.name, self.epoch), self.name, self.epoch, queue, self.node, committed=True)

    def resize(self, registry: Registry) -> None:
        """Tell the registry the capacity, if it is another than what it knows."""
        capacity = self.capacity()
        with self.epoch_lock:
            if self.epoch and capacity != self.announced_capacity:
                registry.resize(self.name, self.epoch, capacity)
                logger.info(
                    "worker %s offers %s slots",
                    self.name,
                    "no" if capacity is None else capacity,
                    extra={"action": "resize", "worker": self.name, "capacity": capacity},
                )
                self.announced_capacity = capacity

    def withdraw(self) -> None:
        """Not eligible from now on.  Best effort: without the registry the lease does it."""
        self.consuming = False
        try:
            self.call(self.resize, self.registry)
        except RegistryError as exc:
            logger.warning("could not withdraw worker %s: %s", self.name, exc, extra={"action": "withdraw_failed"})

    def count(self, action: str, n: int = 1) -> None:
        """Count something that must never be silent."""
        self.counters[action] += n

    @property
    def may_take_work(self) -> bool:
        """Nothing but slots stands between this worker and more work."""
        return self.consuming and not self.replaced and not self.stopping and self.draining is None

    @staticmethod
    def now() -> float:
        """The worker's own monotonic clock, for its own intervals."""
        return time.monotonic()
