"""The producer's side: destination, reservation, publish, and the undo when the publish fails.

The hook sits where Celery publishes (``AMQP.send_task_message``), since only there the final destination,
the task id, the eta and the outcome of the publish are known together.  A reservation made in a
``task_routes`` function would leak whenever the caller's own destination wins.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.app.amqp import AMQP
from celery.app.routes import Router
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Exchange, Queue
from kombu.common import Broadcast

from .connection import CapacityConnection
from .continuation import goes_on
from .errors import CapacityExhausted, RegistryError
from .models import Demand, Reason, Refusal, Slot
from .naming import HEADER, node_lot, own_queue_name
from .notices import Notices
from .options import OPTIONS, CallOptions
from .parts import ChordKeeper, parts_of
from .registry import Registry, Reservation

if TYPE_CHECKING:
    from .outage import Outage
    from .settings import Settings

__all__ = ("CapacityAMQP", "CapacityAMQPMixin", "Dispatcher", "is_future", "lot_queue", "own_queue")

logger = logging.getLogger(__name__)

#: How long a producer that was refused is advised to wait.
RETRY_AFTER_SECONDS = 1.0
#: For this long after a refusal, tasks of the same kind are parked without asking again.  The refusal has set the
#: lot's mark, which stands for at least ``reservation_seconds``, so no wake-up is lost; and a slot that comes
#: free in between goes to a parked task anyway.  It takes most of the registry's cost out of a burst.
REFUSED_SECONDS = 0.005
#: Kinds of dispatch that are remembered; names may be made up by the caller, so there is an end to it.
_KINDS = 10_000


def own_queue(namespace: str, worker: str, arguments: Mapping[str, Any] | None = None) -> Queue:
    """The worker's own queue, reached through the default exchange alone."""
    name = own_queue_name(namespace, worker)
    return Queue(name, Exchange(""), routing_key=name, durable=True, queue_arguments=dict(arguments or {}) or None)


def lot_queue(name: str, like: Queue) -> Queue:
    """A lot beside a queue's own: durable, of the same queue type, reached through the default exchange."""
    kind = {k: v for k, v in (like.queue_arguments or {}).items() if k in ("x-queue-type", "x-max-priority")}
    return Queue(name, Exchange(""), routing_key=name, durable=True, queue_arguments=kind or None)


class CapacityRouter(Router):  # type: ignore[misc]
    """Celery's router, which also carries the plugin's options of a message over to its retry.

    A retry resends the headers of the message (Celery's ``signature_from_request``), and only here can an
    option that the caller gave be told from one that a route adds.
    """

    def route(
        self, options: dict[str, Any], name: str, args: Any = (), kwargs: Any = None, task_type: Any = None
    ) -> dict[str, Any]:
        inherited = (options.get("headers") or {}).get(HEADER)
        if isinstance(inherited, Mapping):
            for key in OPTIONS:
                if inherited.get(key) is not None:
                    options.setdefault(key, inherited[key])
        routed: dict[str, Any] = super().route(options, name, args, kwargs, task_type)
        return routed


class CapacityAMQPMixin:
    """What the plugin adds to an app's AMQP class.  ``app.capacity`` has the parts."""

    Connection = CapacityConnection

    app: Any
    queues: Any

    def _create_task_sender(self) -> Callable[..., Any]:
        sender: Callable[..., Any] = super()._create_task_sender()  # type: ignore[misc]
        dispatcher: Dispatcher = self.app.capacity.dispatcher

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            return dispatcher.send(sender, producer, name, message, **options)

        return send_task_message

    def Router(self, queues: Any = None, create_missing: Any = None) -> CapacityRouter:  # noqa: N802
        plain = super().Router(queues, create_missing)  # type: ignore[misc]
        return CapacityRouter(plain.routes, plain.queues, plain.create_missing, app=plain.app)

    def TaskConsumer(self, channel: Any, queues: Any = None, accept: Any = None, **kw: Any) -> Any:  # noqa: N802
        consumer = None if queues else self.app.capacity.task_consumer(channel, accept=accept, **kw)
        if consumer is not None:
            return consumer
        return super().TaskConsumer(channel, queues=queues, accept=accept, **kw)  # type: ignore[misc]


class CapacityAMQP(CapacityAMQPMixin, AMQP):  # type: ignore[misc]
    """Celery's AMQP with the plugin.  At module level, so that an app can still be pickled."""


class Dispatcher:
    """Sends a task message: to the worker whose slot was claimed, to a lot, or as Celery would."""

    def __init__(self, app: Any, settings: Settings, registry: Callable[[], Registry], outage: Outage) -> None:
        self.app = app
        self.settings = settings
        self._registry = registry
        self._outage = outage
        self._chords = ChordKeeper(app)
        self._own_queues: dict[str, Queue] = {}
        self._notices = Notices()
        #: Until when a kind of dispatch is known to be refused, on the monotonic clock.
        self._refused: dict[tuple[str, str, str | None], float] = {}

    def send(
        self,
        sender: Callable[..., Any],
        producer: Any,
        name: str,
        message: Any,
        *,
        exchange: Any = None,
        routing_key: str | None = None,
        queue: Any = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Publish one task message; ``options`` are Celery's, and those of :mod:`.options`.

        :raises CapacityExhausted: under ``when_full="refuse"``; nothing was published.
        :raises RegistryError: under ``capacity_on_registry_error="raise"``; nothing was published.  Neither of the two
            for what goes on (:mod:`.continuation`).
        :raises ConfigurationError: one of the plugin's options makes no sense; nothing was published.
        """
        said = CallOptions.of(self._task(name), {option: options.pop(option, None) for option in OPTIONS})
        node, kept = said.node, said.kept
        # A token that arrives with the headers is the one of an earlier attempt: never trusted, never resent.
        clean = {k: v for k, v in (headers or {}).items() if k != HEADER}
        plain_headers = {**clean, HEADER: kept} if kept else clean

        def publish_plain() -> Any:
            return sender(
                producer,
                name,
                message,
                exchange=exchange,
                routing_key=routing_key,
                queue=queue,
                headers=plain_headers or None,
                **options,
            )

        self._chords.note(name, message)
        target = self.managed_queue(queue, exchange, routing_key, options.get("exchange_type"))
        if target is None or is_future(_field(message, "eta")):
            return publish_plain()
        policy = said.when_full or self.settings.policy_for(target.name)
        if policy == "refuse" and goes_on():
            policy = "park"
        lot = node_lot(self.settings.namespace, target.name, node) if node else target.name
        kind = (target.name, name, node)
        if policy == "park" and time.monotonic() < self._refused.get(kind, 0.0):
            return self._park(sender, producer, name, message, target, lot, kept, clean, publish_plain, options)
        demand = Demand(
            queue=target.name,
            task=name,
            node=node,
            prefer_node=said.prefer_node,
            task_id=_task_id(message),
            ttl_seconds=self.settings.reservation_seconds,
            park_lot=lot if policy == "park" else None,
        )
        try:
            claim = self._outage.call(self._registry().select_and_reserve, demand)
            if isinstance(claim, Refusal) and policy == "refuse":
                # In here, since the registry may go away before it has said why.
                self._refuse(demand, claim, message)
        except RegistryError as exc:
            if self.settings.on_registry_error == "raise" and not goes_on():
                self._chords.broken_off(parts_of(message), exc)
                raise
            # Without the registry nobody knows whether a pinned lot is read; its workers do read it.
            return self._park(sender, producer, name, message, target, lot, kept, clean, publish_plain, options)
        if isinstance(claim, Refusal):
            if not claim.served:
                self._notices.unserved(target.name)
                return publish_plain()
            self._note_refused(kind)
            parent = self.app.current_worker_task
            if parent is not None and not goes_on():
                self._notices.parked_by_task(name, parent.name)
            if node and claim.reason is Reason.OTHER_NODE:
                self._notices.nowhere(target.name, node, name, lot)
            return self._park(sender, producer, name, message, target, lot, kept, clean, publish_plain, options)
        if node:
            self._notices.somewhere(target.name, node)
        with claim:
            origin = {"queue": target.name, "exchange": exchange_name(target), "routing_key": rkey(target, routing_key)}
            result = self._to_worker(sender, producer, name, message, target, claim, {**kept, **origin}, clean, options)
            claim.transfer()
            return result

    # -- where to --------------------------------------------------------------------------------------

    def managed_queue(
        self, queue: Any, exchange: Any, routing_key: str | None, exchange_type: str | None = None
    ) -> Queue | None:
        """The queue whose pool takes this message, or ``None`` if it is to be left as it is.

        Left alone: exchange-only sends, broadcasts, exchanges that copy to several queues, queues that only one
        consumer may read, and those that ``capacity_queues`` does not select.
        """
        amqp = self.app.amqp
        if queue is None:
            if exchange is not None:
                return None
            queue = amqp.default_queue
        elif isinstance(queue, str):
            queue = amqp.queues[queue]
        if isinstance(queue, Broadcast) or not self.settings.manages(queue.name) or not _can_be_shared(queue):
            return None
        kind = exchange_type or (queue.exchange.type if queue.exchange else None) or "direct"
        if exchange and routing_key:
            return None  # the caller's own destination: a router's queue was only merged in beside it
        if kind == "direct":
            return queue
        if kind == "topic" and not exchange and _matches(queue, routing_key) and self._only_reader(queue):
            return queue
        return None

    def _only_reader(self, queue: Queue) -> bool:
        exchange = exchange_name(queue)
        queues = self.app.amqp.queues
        return not any(other.name != queue.name and exchange_name(other) == exchange for other in dict.values(queues))

    # -- what with -------------------------------------------------------------------------------------

    def _task(self, name: str) -> Any:
        tasks = self.app._tasks
        return tasks.get(name) if isinstance(tasks, dict) else None

    def _to_worker(
        self,
        sender: Callable[..., Any],
        producer: Any,
        name: str,
        message: Any,
        target: Queue,
        claim: Reservation,
        header: dict[str, Any],
        headers: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:
        slot = claim.slot
        header.update(token=slot.token, worker=slot.worker, epoch=slot.epoch)
        options = {**options, "exchange_type": "direct", "declare": []}
        if options.get("delivery_mode") is None and target.exchange is not None:
            options["delivery_mode"] = target.exchange.delivery_mode
        # The worker declared its own queue before it became eligible, so nothing is declared here: a
        # declaration cached by a producer says nothing about a queue that was deleted since.
        return sender(
            producer,
            name,
            message,
            queue=self._own_queue(slot),
            headers={**headers, HEADER: header},
            **options,
        )

    def _park(
        self,
        sender: Callable[..., Any],
        producer: Any,
        name: str,
        message: Any,
        target: Queue,
        lot: str,
        kept: dict[str, Any],
        headers: dict[str, Any],
        publish_plain: Callable[[], Any],
        options: dict[str, Any],
    ) -> Any:
        if lot == target.name:
            return publish_plain()
        header = {
            **kept,
            "queue": target.name,
            "exchange": exchange_name(target),
            "routing_key": rkey(target, None),
        }
        parked = lot_queue(lot, target)
        options = {**options, "exchange_type": "direct"}
        return sender(producer, name, message, queue=parked, headers={**headers, HEADER: header}, **options)

    def _note_refused(self, kind: tuple[str, str, str | None]) -> None:
        if len(self._refused) >= _KINDS:
            self._refused.clear()
        self._refused[kind] = time.monotonic() + min(REFUSED_SECONDS, self.settings.reservation_seconds / 4)

    def _own_queue(self, slot: Slot) -> Queue:
        queue = self._own_queues.get(slot.worker)
        if queue is None:
            queue = self._own_queues[slot.worker] = own_queue(self.settings.namespace, slot.worker)
        return queue

    # -- when nobody can take it -----------------------------------------------------------------------

    def _refuse(self, demand: Demand, refusal: Refusal, message: Any) -> None:
        """Raise, unless there is no capacity worker at all: then it is exactly plain Celery."""
        reason = refusal.reason.value
        if not refusal.served:
            if not self._outage.call(self._registry().overview).workers:
                return
            reason = f"no worker for queue {demand.queue!r}"
        census = self._outage.call(self._registry().census, demand.queue, demand.task, demand.node)
        parts = parts_of(message)
        which = (parts[0].group_id, parts[0].index) if parts else (None, None)
        exc = CapacityExhausted(demand.queue, demand.task, reason, census, RETRY_AFTER_SECONDS, *which)
        self._chords.broken_off(parts, exc)
        raise exc


def _can_be_shared(queue: Queue) -> bool:
    """Whether any worker may take any message, one at a time: not with one consumer at a time, nor from a stream."""
    arguments = queue.queue_arguments or {}
    one_reader = queue.exclusive or arguments.get("x-single-active-consumer")
    return not one_reader and arguments.get("x-queue-type") != "stream"


def _matches(queue: Queue, routing_key: str | None) -> bool:
    """Whether a message with this routing key reaches the queue through its topic exchange."""
    if routing_key is None or not queue.routing_key:
        return True
    words = (re.escape(word) for word in queue.routing_key.split("."))
    pattern = r"\.".join({r"\*": r"[^.]+", r"\#": r".*", "#": r".*"}.get(word, word) for word in words)
    # "#" is any number of words, none among them.
    pattern = pattern.replace(r"\..*", r"(\..*)?").replace(r".*\.", r"(.*\.)?")
    return re.fullmatch(pattern, routing_key) is not None


def exchange_name(queue: Queue) -> str:
    """The exchange that Celery publishes to for this queue: the default one if its own is direct."""
    if queue.exchange is None or (queue.exchange.type or "direct") == "direct":
        return ""
    return str(queue.exchange.name or "")


def rkey(queue: Queue, routing_key: str | None) -> str:
    """The routing key that goes with :func:`exchange_name`."""
    if exchange_name(queue) == "":
        return str(queue.name)
    return str(routing_key or queue.routing_key or queue.name)


def _field(message: Any, key: str) -> Any:
    headers, _, body, _ = message
    if key in headers:
        return headers[key]
    return body.get(key) if isinstance(body, Mapping) else None  # task protocol 1


def _task_id(message: Any) -> str | None:
    value = _field(message, "id")
    return None if value is None else str(value)


def is_future(eta: Any) -> bool:
    """Whether a message with this eta is not due yet."""
    if not eta:
        return False
    try:
        when: datetime = maybe_make_aware(maybe_iso8601(eta), timezone.utc)
        return when > datetime.now(timezone.utc)
    except (AttributeError, TypeError, ValueError):
        return True  # the worker will say what is wrong with it
