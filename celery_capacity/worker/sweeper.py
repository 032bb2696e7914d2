"""Cleans up after workers that are gone, whoever they were; one sweeper at a time for each of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ..errors import RegistryError
from ..models import LapsedWorker
from ..naming import own_queue_name
from .mover import Mover
from .queues import look_at
from .unacked import pay_owed, restore_unacked
from .visibility import VisibilityKeeper

if TYPE_CHECKING:
    from .agent import WorkerAgent
    from .gate import Gatekeeper

__all__ = ("Sweeper", "clean_up", "give_back_unacked")

logger = logging.getLogger(__name__)

_SHORTEST_TURN_SECONDS = 3.0
#: How often it is looked whether what is held has to be kept from the visibility timeout.
_LOOK_SECONDS = 0.5


class Sweeper(threading.Thread):
    """Every ``sweep_seconds``: this worker's own ledger, then the workers that have lapsed.

    And, on Redis, keeps what is held from the visibility timeout: see :mod:`.visibility`.
    """

    def __init__(self, agent: WorkerAgent) -> None:
        super().__init__(name=f"capacity-sweeper-{agent.name}", daemon=True)
        self.agent = agent
        self.gatekeeper: Gatekeeper | None = None
        self._ended = threading.Event()

    def end(self, timeout_seconds: float) -> None:
        """Stop.  Harmless twice."""
        self._ended.set()
        if self.is_alive():
            self.join(timeout_seconds)

    def run(self) -> None:
        """Until :meth:`end`."""
        registry = self.agent.open_registry()
        mover = Mover(self.agent, registry)
        keeper = VisibilityKeeper(self.agent.ledger, mover.connection)
        every = self.agent.settings.sweep_seconds
        sweep_at = time.monotonic() + min(1.0, every)
        try:
            while not self._ended.wait(max(0.0, min(sweep_at - time.monotonic(), _LOOK_SECONDS))):
                try:
                    keeper.keep()
                    self._pay(mover)
                    if time.monotonic() >= sweep_at:
                        sweep_at = time.monotonic() + every
                        self.sweep(mover)
                except RegistryError as exc:
                    logger.debug("sweep of %s: %s", self.agent.name, exc)
                except Exception as exc:
                    # The broker may be away; what is left is seen to at the next sweep, here or elsewhere.
                    self.agent.count("sweep_failed")
                    logger.warning(
                        "sweep of %s: %r", self.agent.name, exc, exc_info=True, extra={"action": "sweep_failed"}
                    )
                    mover.close()
        finally:
            mover.close()
            registry.close()

    def _pay(self, mover: Mover) -> None:
        agent = self.agent
        if not agent.owed:
            return
        paid = pay_owed(mover.connection(), agent.settings.namespace, agent.name, agent.owed)
        if paid:
            agent.count("acknowledged_late", paid)
            logger.warning(
                "%d acknowledgements of worker %s that its broker had not heard were made up for",
                paid,
                agent.name,
                extra={"action": "acknowledged_late", "worker": agent.name, "tasks": paid},
            )

    def sweep(self, mover: Mover) -> None:
        """One pass."""
        agent = self.agent
        if self.gatekeeper is not None and agent.consuming:
            self.gatekeeper.sweep(agent.settings.sweep_seconds)
        if not agent.may_take_work:
            return
        for gone in expire(mover):
            if not self._ended.is_set():
                clean_up(mover, gone, next(iter(agent.managed), None))


def expire(mover: Mover) -> tuple[LapsedWorker, ...]:
    """The workers that are gone and are this one's to clean up after.

    For two sweeps: if this one dies in the middle of it, the next does not wait for longer than for its lapse.  Two
    that clean up after the same worker would do no harm.
    """
    agent = mover.agent
    return mover.registry.expire(agent.name, max(_SHORTEST_TURN_SECONDS, 2 * agent.settings.sweep_seconds))


def clean_up(mover: Mover, gone: LapsedWorker, fallback: str | None) -> bool:
    """Give back what a worker that is gone has not acknowledged, and move what is in its own queue; delete the queue
    when nothing can come any more.

    :param fallback: the managed queue of messages that do not say which one is theirs.
    :returns: whether it is finished with.
    """
    agent = mover.agent
    name = own_queue_name(agent.settings.namespace, gone.name)
    restored = give_back_unacked(
        agent,
        mover.connection(),
        gone.name,
        lambda: any((w.name, w.epoch) == (gone.name, gone.epoch) for w in expire(mover)),
    )
    moved = 0
    if look_at(mover.connection(), name) is not None:
        moved = mover.drain(name, fallback or agent.app.conf.task_default_queue)
    if moved:
        agent.count("rehomed", moved)
        logger.warning(
            "%d tasks of worker %s, which is gone, were moved",
            moved,
            gone.name,
            extra={"action": "rehomed", "worker": gone.name, "tasks": moved},
        )
    if not gone.settled or moved or restored:
        return False
    state = look_at(mover.connection(), name)
    if state is not None:
        if state.ready or state.consumers:
            # Something came just now; or the worker has lost the registry and not its broker.
            return False
        with mover.connection().channel() as channel:
            channel.queue_delete(name)
    return mover.registry.forget(gone.name, gone.epoch)


def give_back_unacked(
    agent: WorkerAgent,
    connection: Any,
    worker: str,
    still_gone: Callable[[], bool],
    keep: Collection[str] = (),
) -> int:
    """:func:`.unacked.restore_unacked`, counted and logged."""
    restored = restore_unacked(connection, agent.settings.namespace, worker, still_gone, keep)
    if restored:
        agent.count("restored_unacked", restored)
        logger.warning(
            "%d messages that worker %s had received and not acknowledged were given back to their queues",
            restored,
            worker,
            extra={"action": "restored_unacked", "worker": worker, "tasks": restored},
        )
    return restored
