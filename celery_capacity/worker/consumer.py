"""The worker's task consumer: its own queue, and the queues that the plugin leaves to Celery."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu import Consumer, Queue

if TYPE_CHECKING:
    from .agent import WorkerAgent

__all__ = ("CapacityTaskConsumer",)


class CapacityTaskConsumer(Consumer):  # type: ignore[misc]
    """Stands where Celery's task consumer stands.

    Managed queues are not consumed: the intake fetches from them when a slot is free.  For remote control
    (``add_consumer``, ``cancel_consumer``) they count as consumed all the same.
    """

    def __init__(self, agent: WorkerAgent, channel: Any, **options: Any) -> None:
        self.agent = agent
        self._handler: Callable[[Any], Any] | None = None
        super().__init__(channel, queues=[agent.own_queue, *agent.unmanaged], **options)

    @property
    def queues(self) -> list[Queue]:
        """The queues of the pool, then those that are really consumed: for ``inspect active_queues``.

        Kombu itself keeps and uses the latter alone.
        """
        return [*self.agent.managed.values(), *self._queues.values()]

    @queues.setter
    def queues(self, queues: list[Queue]) -> None:
        self._queues = {queue.name: queue for queue in queues}

    @property
    def on_message(self) -> Callable[[Any], Any] | None:
        """What Kombu calls for a message: the plugin's acceptance, once Celery has set its handler here."""
        return None if self._handler is None else self.agent.accept

    @on_message.setter
    def on_message(self, handler: Callable[[Any], Any] | None) -> None:
        self._handler = handler

    @property
    def handler(self) -> Callable[[Any], Any] | None:
        """Celery's handler of task messages, once its loop has begun."""
        return self._handler

    def declare(self) -> None:
        """Declare what is consumed, and the managed queues, as every Celery worker would."""
        super().declare()
        for queue in self.agent.managed.values():
            queue(self.channel).declare()

    def consume(self, no_ack: bool | None = None) -> None:
        """Begin to consume; from now on the worker can be chosen."""
        super().consume(no_ack)
        self.agent.turned()
        self.agent.consuming = True
        self.agent.announce()

    def add_queue(self, queue: Queue) -> Queue:
        """Serve one more queue."""
        if self.agent.app.capacity.dispatcher.managed_queue(queue, None, None) is None:
            return super().add_queue(queue)
        bound = queue(self.channel)
        bound.declare()
        self.agent.serve(queue)
        return bound

    def cancel_by_queue(self, queue: str) -> None:
        """Serve a queue no longer."""
        if queue in self.agent.managed:
            self.agent.unserve(queue)
        else:
            super().cancel_by_queue(queue)

    def consuming_from(self, queue: Any) -> bool:
        """Is the queue served?"""
        name = queue.name if isinstance(queue, Queue) else queue
        return name in self.agent.managed or bool(super().consuming_from(queue))
