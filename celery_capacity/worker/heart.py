"""The worker's sign of life, from an OS thread of its own.

So that a solo worker inside a long task, or a main loop that is held for a while, does not lose its lease.  It
never touches the broker.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import CapacityError, RegistryError
from ..models import Pulse, Standing
from ..outage import Outage
from ..registry import Registry

if TYPE_CHECKING:
    from .agent import WorkerAgent

__all__ = ("Heart", "last_words", "tell_counters")

logger = logging.getLogger(__name__)

#: How soon a change of the capacity is told, at the latest.
_TICK_SECONDS = 1.0
#: How long a worker that has lapsed waits for its main loop before it registers again.
_TURN_SECONDS = 1.0
_PAUSE_SECONDS = 0.01


class Heart(threading.Thread):
    """Registers the worker, renews its lease, tells its capacity, and compares what it holds with the registry."""

    def __init__(self, agent: WorkerAgent) -> None:
        super().__init__(name=f"capacity-heart-{agent.name}", daemon=True)
        self.agent = agent
        self._registry: Registry | None = None
        self._outage: Outage | None = None
        self._wake = threading.Event()
        self._ended = False
        self._next_beat = 0.0
        self._since = 0.0
        self._stalled = False

    def announce(self) -> None:
        """Look at once.  From any thread."""
        self._wake.set()

    def end(self, timeout_seconds: float) -> None:
        """Stop beating.  Harmless twice."""
        self._ended = True
        self._wake.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout_seconds)

    def run(self) -> None:
        """Until :meth:`end`."""
        while not self._ended:
            try:
                self.look()
            except RegistryError as exc:
                logger.debug("heartbeat of %s: %s", self.agent.name, exc)
            except Exception:
                # Whatever it is, a worker without a heartbeat is worse.
                self.agent.count("heartbeat_failed")
                logger.exception("heartbeat of %s failed", self.agent.name, extra={"action": "heartbeat_failed"})
            self._wake.wait(min(_TICK_SECONDS, self.agent.settings.heartbeat_seconds))
            self._wake.clear()
        if self._registry is not None:
            self._registry.close()

    def look(self) -> None:
        """One step: register if need be, tell a changed capacity, beat if it is time.

        :raises RegistryError: it could not be done; it is tried again at the next look.
        """
        agent = self.agent
        if self._registry is None:
            self._registry = agent.open_registry()
            retry = min(_TICK_SECONDS, agent.settings.heartbeat_seconds)
            self._outage = Outage(self._registry.url, retry, peer=agent.outage)
        if agent.replaced:
            # It has no lease any more, but it has something to tell: that it was replaced, for one.
            if agent.now() >= self._next_beat:
                self._next_beat = agent.now() + agent.settings.heartbeat_seconds
                self._tell_counters()
            return
        if not agent.epoch:
            # Before it can take a task it says nothing at all.
            if agent.capacity() is not None:
                self._register()
            return
        for token in agent.ledger.doubtful():
            # Given back while a registration carried it, or while the registry did not answer.  Before the next beat,
            # which would put back beside it what was taken on since.
            self._call(self._registry.release, token, agent.epoch)
            agent.ledger.settle(token)
        self._look_at_main_loop()
        # Not asked when there is nothing to tell: that would look as if the registry had answered.
        if agent.capacity() != agent.announced_capacity and self._call(agent.resize, self._registry):
            agent.look()
        if agent.holding_untold or agent.now() >= self._next_beat:
            self._beat()
            # After it, since the beat may have found something.
            self._tell_counters()

    def _look_at_main_loop(self) -> None:
        agent, was = self.agent, self._stalled
        self._stalled = agent.consuming and agent.stalled
        if self._stalled and not was:
            agent.count("stalled")
            logger.error(
                "the main loop of %s has stood still for %.0f s, most likely since the broker does not answer; until it"
                " goes on, no task is sent to it",
                agent.name,
                agent.now() - agent.turned_at,
                extra={"action": "stalled", "worker": agent.name},
            )

    def _tell_counters(self) -> None:
        registry = self._registry
        assert registry is not None
        self.agent.tell_counters(lambda counts: self._call(registry.add_counters, counts))

    def _call(self, function, *args, **kwargs):  # type: ignore[no-untyped-def]
        assert self._outage is not None
        return self._outage.call(function, *args, **kwargs)

    def _register(self) -> None:
        agent, registry = self.agent, self._registry
        assert registry is not None
        with agent.epoch_lock:
            advert = agent.advert()
            holding = [replace(slot, worker=agent.name, committed=True) for slot in agent.ledger.carry()]
            agent.epoch = self._call(registry.register, advert, holding)
            agent.announced_capacity = advert.capacity
        agent.known()
        self._since = 0.0
        self._next_beat = agent.now() + agent.settings.heartbeat_seconds
        logger.info(
            "worker %s registered: node %s, %s slots, queues %s",
            agent.name,
            agent.node,
            advert.capacity,
            ", ".join(agent.managed) or "none",
            extra={"action": "registered", "worker": agent.name, "epoch": agent.epoch, "capacity": advert.capacity},
        )
        agent.draining = None
        agent.look()
        # What was given back in the meantime is told in the next look.
        self._wake.set()

    def _beat(self) -> None:
        agent, registry = self.agent, self._registry
        assert registry is not None
        epoch = agent.epoch
        untold, agent.holding_untold = agent.holding_untold, False
        holding = [slot.token for slot in agent.ledger.slots()]
        try:
            pulse: Pulse = self._call(registry.heartbeat, agent.name, epoch, holding, self._since)
        except RegistryError:
            agent.holding_untold = agent.holding_untold or untold
            raise
        self._next_beat = agent.now() + agent.settings.heartbeat_seconds
        if pulse.standing is Standing.GONE:
            self._let_main_loop_turn()
            with agent.epoch_lock:
                if agent.epoch == epoch:
                    agent.epoch = 0
            agent.lapsed_at = agent.now()
            agent.count("lapsed")
            logger.warning(
                "the registry does not know worker %s any more; registering again",
                agent.name,
                extra={"action": "lapsed", "worker": agent.name},
            )
            self._wake.set()
            return
        if pulse.standing is Standing.REPLACED:
            if agent.epoch == epoch:
                self._replaced(pulse)
            return
        agent.known()
        self._since = pulse.store_time
        if pulse.healed:
            agent.count("healed", len(pulse.healed))
            logger.error(
                "%d slots of %s were held in the registry and not here; given back: %s",
                len(pulse.healed),
                agent.name,
                ", ".join(pulse.healed),
                extra={"action": "healed", "worker": agent.name, "tokens": pulse.healed},
            )
        if pulse.missing:
            self._restore(set(pulse.missing), epoch)
        was, agent.draining = agent.draining, pulse.draining
        if was is not None and pulse.draining is None:
            agent.look()
        if was is None and pulse.draining is not None:
            logger.info(
                "worker %s drains: %s", agent.name, pulse.draining, extra={"action": "drain", "worker": agent.name}
            )

    def _let_main_loop_turn(self) -> None:
        """A worker that stood still may hold slots for tasks that have ended meanwhile.

        They are nobody's any more: registered again, they would stand beside those of whoever was admitted since.
        """
        agent = self.agent
        until = agent.now() + _TURN_SECONDS
        # In the first turn it may still be before the news from the pool.
        for _ in range(2):
            seen = agent.turned_at
            agent.wake()
            # Infinite: a task runs in it.
            while agent.turned_at == seen < math.inf and agent.now() < until:
                time.sleep(_PAUSE_SECONDS)

    def _restore(self, missing: set[str], epoch: int) -> None:
        agent, registry = self.agent, self._registry
        assert registry is not None
        # Held while the registry answers, so that no slot ends between the look and the answer.
        with agent.ledger.lock:
            slots = [replace(s, epoch=epoch, committed=True) for s in agent.ledger.carry() if s.token in missing]
            restored = self._call(registry.restore, agent.name, epoch, slots) if slots else 0
        if restored:
            agent.count("restored", restored)
            logger.warning(
                "%d slots that %s holds were put back into the registry",
                restored,
                agent.name,
                extra={"action": "restored", "worker": agent.name, "slots": restored},
            )

    def _replaced(self, pulse: Pulse) -> None:
        agent = self.agent
        agent.replaced = True
        agent.count("replaced")
        logger.critical(
            "worker name %s is used twice: by this process (%s pid %d) and by a newer one (%s). This one takes no more"
            " tasks; give one of them another name with -n",
            agent.name,
            socket.gethostname(),
            os.getpid(),
            pulse.by or "unknown",
            extra={"action": "replaced", "worker": agent.name, "by": pulse.by},
        )
        agent.wake()


def tell_counters(agent: WorkerAgent) -> None:
    """Tell the registry what no heartbeat has told yet.  Best effort; from the main thread."""
    try:
        agent.tell_counters(lambda counts: agent.call(agent.registry.add_counters, counts))
    except CapacityError as exc:
        logger.warning(
            "what %s counted since its last heartbeat is lost: %s",
            agent.name,
            exc,
            extra={"action": "counters_lost", "worker": agent.name},
        )


def last_words(agent: WorkerAgent) -> None:
    """Tell the last counters, and deregister.  Best effort: without the registry the lapse does it."""
    tell_counters(agent)
    if not agent.epoch:
        return
    try:
        agent.call(agent.registry.deregister, agent.name, agent.epoch)
    except CapacityError as exc:
        logger.warning(
            "could not deregister %s; it will lapse: %s",
            agent.name,
            exc,
            extra={"action": "deregister_failed", "worker": agent.name},
        )
