"""One worker's state, shared by the parts that work for it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kombu import Queue

from ..dispatch import own_queue
from ..errors import RegistryError
from ..models import Advert, Claim, Demand, Reason, Refusal, Released, Slot
from ..naming import new_token, node_of
from ..registry import Registry, Reservation
from .consumer import CapacityTaskConsumer
from .ledger import Ledger

if TYPE_CHECKING:
    from ..outage import Outage
    from ..settings import Settings
    from .heart import Heart
    from .sweeper import Sweeper

__all__ = ("WorkerAgent",)

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: A main loop that stands still for less than this is never taken for one that hangs.
_SHORTEST_STALL_SECONDS = 2.0


class WorkerAgent:
    """Who this worker is, what it serves, what it holds, and its standing with the registry.

    It lives as long as the worker; connections and consumers come and go under it.
    """

    def __init__(
        self,
        controller: Any,
        settings: Settings,
        registry: Registry,
        open_registry: Callable[[], Registry],
        outage: Outage,
    ) -> None:
        self.controller = controller
        self.app = controller.app
        self.settings = settings
        #: Shared with the producers of this process; used from the worker's main loop.
        self.registry = registry
        #: For threads: a lock that one of them holds must never be copied into a forked pool process.
        self.open_registry = open_registry
        self.outage = outage
        self.name: str = controller.hostname
        self.node: str = settings.node or node_of(self.name)
        self.ledger = Ledger()
        self._counters: Counter[str] = Counter()
        #: Of these, what the registry has not been told yet.
        self._untold: Counter[str] = Counter()
        self._counters_lock = threading.Lock()
        #: Celery's consumer; set by the consumer's bootstep.
        self.consumer: Any = None
        #: Called for every message that the task consumer receives; set by the consumer's bootstep.
        self.accept: Callable[[Any], Any] | None = None
        #: Wakes the main loop.  From any thread.
        self.wake: Callable[[], None] = _nothing
        #: Called, from any thread, to make the heartbeat's thread look at once.
        self.announce: Callable[[], None] = _nothing
        #: Registered, grown or admitted: the intake looks into every lot.
        self.look_wanted = False
        #: On a Redis broker: delivery tags whose acknowledgement it has not heard.
        self.owed: set[str] = set()
        self.heart: Heart | None = None
        self.sweeper: Sweeper | None = None
        #: 0 until it is registered.
        self.epoch = 0
        self.epoch_lock = threading.RLock()
        #: Own queue declared and consumed, on a living connection.
        self.consuming = False
        #: When the registry last knew this worker, and when it was last found that it may have lapsed since.
        self.known_at = self.now()
        self.lapsed_at = 0.0
        #: Slots were taken that the registry does not know of.
        self.holding_untold = False
        #: When the main loop was last seen to turn; infinity while a task runs in it.
        self.turned_at = self.now()
        #: A newer registration of the same name is there: take no more work.
        self.replaced = False
        self.draining: str | None = None
        self.stopping = False
        self.announced_capacity: int | None = None
        self._select_queues()

    # -- what it serves --------------------------------------------------------------------------------

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

    def serve(self, queue: Queue) -> None:
        """Serve one more managed queue (remote control)."""
        self.managed[queue.name] = queue
        self.announced_capacity = None
        self._register_anew()

    def unserve(self, queue: str) -> None:
        """Serve a managed queue no longer (remote control)."""
        self.managed.pop(queue, None)
        self._register_anew()

    def declare(self, queue: str, channel: Any) -> None:
        """Declare a managed queue as the app has it, its exchange and its binding with it."""
        if queue in self.managed:
            self.managed[queue](channel).declare()

    def _register_anew(self) -> None:
        # What a worker serves is part of its registration.
        with self.epoch_lock:
            self.epoch = 0
        self.announce()

    def task_consumer(self, channel: Any, accept: Any = None, **options: Any) -> CapacityTaskConsumer:
        """The consumer of the own queue and of the queues that are left to Celery."""
        if accept is None:
            accept = self.app.conf.accept_content
        return CapacityTaskConsumer(self, channel, accept=accept, **options)

    # -- who it is -------------------------------------------------------------------------------------

    def capacity(self) -> int | None:
        """How many tasks can run at once; ``None`` while none can be taken.

        With an autoscaler it is the maximum, since the pool only grows when there is more to run than it has
        processes.
        """
        if not self.consuming or self.replaced or self.stopping or self.stalled:
            return None
        return self.size()

    @property
    def stalled(self) -> bool:
        """The main loop stands still, most likely in a call of the broker that is not answered: it can begin no task."""
        patience = self.settings.lease_seconds - self.settings.heartbeat_seconds
        return self.now() - self.turned_at > max(patience, _SHORTEST_STALL_SECONDS)

    def turned(self) -> None:
        """The main loop turns."""
        self.turned_at = self.now()

    def size(self) -> int | None:
        """How many tasks the pool can run at once, whether or not more can be taken now."""
        autoscaler = getattr(self.controller, "autoscaler", None)
        if autoscaler is not None:
            return int(autoscaler.max_concurrency)
        pool = self.controller.pool
        if pool is None:
            return None
        if getattr(pool, "is_green", False):
            # Before Celery 5.7, num_processes of the gevent pool says how many greenlets are busy.
            return int(getattr(pool._pool, "size", None) or pool.limit or 0)
        # Celery shrinks below 0 if it is asked to while processes are about to go.
        return max(0, int(pool.num_processes or 0))

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
            worker_queues=self.settings.limits_on_worker(self.managed),
            queue_limits=self.settings.limits_over_fleet(self.managed),
        )

    @property
    def may_take_work(self) -> bool:
        """Nothing but slots stands between this worker and more work."""
        return self.consuming and not self.replaced and not self.stopping and self.draining is None

    @property
    def has_room(self) -> bool:
        """By the worker's own count, which knows what it took on while the registry did not answer."""
        size = self.size()
        return size is None or self.ledger.held < size

    @property
    def is_over(self) -> bool:
        """More is held than can run: what came free is not to be used again."""
        size = self.size()
        return size is not None and self.ledger.held > size

    def tell_holding(self) -> None:
        """The registry does not know all that is held: let a heartbeat tell it at once.  From any thread."""
        self.holding_untold = True
        self.announce()

    # -- with the registry -----------------------------------------------------------------------------

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """A registry call of the worker's main thread, behind the circuit breaker."""
        return self.outage.call(function, *args, **kwargs)

    def claim(self, queue: str | None, task: str | None = None, task_id: str | None = None) -> Slot | Refusal:
        """A committed slot of this worker for a message that it has; noted in the ledger.

        Work that does not come from a managed queue is accounted to the worker's own queue.
        """
        name = queue if queue in self.managed else self.own_queue.name
        known = task if task in self.app.tasks else None
        demand = Demand(name, known, task_id=task_id, ttl_seconds=self.settings.reservation_seconds)
        if not self.has_room:
            return Refusal(Reason.FULL)
        if self.epoch:
            try:
                answer = self.call(self.registry.reserve_worker, self.name, self.epoch, demand, commit=True)
            except RegistryError:
                pass
            else:
                if isinstance(answer, Reservation):
                    slot = answer.transfer()
                    self.ledger.claim(slot)
                    return slot
                if answer.reason not in (Reason.REPLACED, Reason.NO_WORKER, Reason.UNKNOWN_CAPACITY) or self.replaced:
                    return answer
                # Not registered as what it is now: a heartbeat is about to say so.
                self.announce()
        return self.local_slot(name) or Refusal(Reason.FULL)

    def local_slot(self, queue: str) -> Slot | None:
        """Without the registry: admit by the local count alone.  It is reconciled at the next heartbeat."""
        size = self.size()
        limit = self.settings.limits_on_worker([queue]).get(queue)
        with self.ledger.lock:
            if size is None or self.replaced or self.ledger.held >= size:
                return None
            if limit is not None and self.ledger.held_for(queue) >= limit:
                return None
            slot = Slot(new_token(self.name, self.epoch), self.name, self.epoch, queue, self.node, committed=True)
            self.ledger.claim(slot)
        self.holding_untold = True
        self.count("admitted_locally")
        logger.info(
            "slot %s is taken without the registry; a heartbeat will tell it",
            slot.token,
            extra={"action": "admitted_locally", "token": slot.token, "worker": self.name},
        )
        return slot

    def release(self, slot: Slot, then: Claim | None = None, emptied: Slot | None = None) -> Released | None:
        """Give a slot back, as the registry's ``release``; ``None`` without the registry: a heartbeat will do it."""
        self.ledger.unsure(slot)
        try:
            return self.call(self.registry.release, slot.token, self.epoch, then=then, emptied=emptied)
        except RegistryError as exc:
            self.count("release_deferred")
            self.ledger.defer(slot)
            logger.info(
                "slot %s will be given back by a heartbeat: %s",
                slot.token,
                exc,
                extra={"action": "release_deferred", "token": slot.token, "worker": self.name},
            )
            return None
        finally:
            self.ledger.unclaim(slot)

    def cancel(self, slot: Slot) -> None:
        """Undo a reservation that is not taken over.  Best effort: at its deadline it ends anyway."""
        try:
            self.call(self.registry.cancel, slot.token)
        except RegistryError as exc:
            logger.debug("reservation %s ends at its deadline: %s", slot.token, exc)

    def resize(self, registry: Registry) -> bool:
        """Tell the registry the capacity, if it is another than what it knows.  True if it has become more."""
        capacity = self.capacity()
        with self.epoch_lock:
            before = self.announced_capacity
            if not self.epoch or capacity == before:
                return False
            if not registry.resize(self.name, self.epoch, capacity):
                return False
            self.announced_capacity = capacity
        logger.info(
            "worker %s offers %s slots",
            self.name,
            "no" if capacity is None else capacity,
            extra={"action": "resize", "worker": self.name, "capacity": capacity},
        )
        return (capacity or 0) > (before or 0)

    def withdraw(self) -> None:
        """Not eligible from now on.  Best effort: without the registry the lease does it."""
        self.consuming = False
        if not self.epoch or self.capacity() == self.announced_capacity:
            return
        try:
            self.call(self.resize, self.registry)
        except RegistryError as exc:
            self.count("withdraw_failed")
            logger.warning("could not withdraw worker %s: %s", self.name, exc, extra={"action": "withdraw_failed"})

    def known(self) -> None:
        """The registry has just said that it knows this worker."""
        if self.now() - self.known_at > self.settings.lapse_seconds:
            self.lapsed_at = self.now()
        self.known_at = self.now()

    def may_have_lapsed_since(self, moment: float) -> bool:
        """Others may have cleaned up after this worker since ``moment`` (see :meth:`now`)."""
        return moment < self.lapsed_at or self.now() - self.known_at > self.settings.lapse_seconds

    def look(self) -> None:
        """There may be more to take.  From any thread."""
        self.look_wanted = True
        self.wake()

    # -- what must never be silent ---------------------------------------------------------------------

    def count(self, action: str, n: int = 1) -> None:
        """Count something that must never be silent.  From any thread."""
        with self._counters_lock:
            self._counters[action] += n
            self._untold[action] += n

    @property
    def counters(self) -> dict[str, int]:
        """A copy of what this worker has counted since it began."""
        with self._counters_lock:
            return dict(self._counters)

    def tell_counters(self, tell: Callable[[Mapping[str, int]], object]) -> None:
        """Call ``tell`` with what was counted since it was last told, if there is anything.  From any thread.

        What ``tell`` raises is raised; then it is told the next time.
        """
        with self._counters_lock:
            # Taken out first, so that two threads never tell the same.
            counts, self._untold = self._untold, Counter()
        if not counts:
            return
        try:
            tell(counts)
        except BaseException:
            with self._counters_lock:
                self._untold.update(counts)
            raise

    @staticmethod
    def now() -> float:
        """The worker's own monotonic clock, for its own intervals."""
        return time.monotonic()


def _nothing() -> None:
    """Until the part that does it is there."""
