"""What is rejected goes where its queue sends what is rejected, whichever queue it came through.

RabbitMQ does it for a message that was fetched from the queue itself.  Of one that was sent straight to this worker,
or waited in a lot, the broker would ask the worker's own queue or the lot, which have no dead-letter exchange.
"""

from __future__ import annotations

import logging
from types import MethodType
from typing import TYPE_CHECKING, Any

from kombu import Queue
from kombu.transport import virtual

from .mover import Mover

if TYPE_CHECKING:
    from .agent import WorkerAgent

__all__ = ("keep_dead_letters",)

logger = logging.getLogger(__name__)


def keep_dead_letters(agent: WorkerAgent, message: Any, queue: Queue | None, routing_key: str) -> None:
    """If the queue declares a dead-letter exchange, ``message`` will go there when it is rejected.

    :param routing_key: with which it was sent to its queue.
    """
    arguments = (queue.queue_arguments if queue is not None else None) or {}
    exchange = arguments.get("x-dead-letter-exchange")
    if queue is None or exchange is None or isinstance(message.channel, virtual.Channel):
        return
    key = arguments.get("x-dead-letter-routing-key") or routing_key
    reject = message.reject_log_error

    # Looked up on the message by Celery's consumer, for requests and for what it can make no request of.
    def reject_log_error(message: Any, log: Any, errors: Any, requeue: bool = False) -> None:
        if requeue:
            reject(log, errors, requeue)
            return
        # Called from any thread, so on a connection of its own.
        mover = Mover(agent, agent.registry)
        try:
            mover.dead_letter(message, str(queue.name), exchange, key, routing_key)
        except Exception as exc:  # noqa: BLE001 - as Celery, which also goes on
            # Not acknowledged: it comes back when the connection is closed.
            logger.critical(
                "could not reject a message of queue %r to exchange %r: %r",
                queue.name,
                exchange,
                exc,
                extra={"action": "reject_failed", "queue": queue.name},
            )
            agent.count("reject_failed")
            return
        finally:
            mover.close()
        message.ack_log_error(log, errors)

    # A method, since that is how Celery knows at its end what it must still acknowledge.
    message.reject_log_error = MethodType(reject_log_error, message)
