"""The bootsteps: one in the worker, for what outlives a broker connection, and one in its consumer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import click
from celery import bootsteps, signals
from celery.apps.worker import Worker
from celery.worker import state

from ..errors import ConfigurationError, RegistryError
from .acceptance import Acceptance
from .agent import WorkerAgent
from .gate import Gatekeeper
from .heart import Heart, last_words, tell_counters
from .intake import Intake
from .mover import Mover
from .redis_lots import open_reader
from .sweeper import Sweeper, clean_up, give_back_unacked
from .unacked import let_go, remember_owed

__all__ = ("Announce", "Gate")

logger = logging.getLogger(__name__)

#: Without an event loop, how long the consumer waits for the broker before it looks at freed slots again.
_SLICE_SECONDS = 0.02
_JOIN_SECONDS = 5.0
#: How long a worker that stops waits for reservations that are still on their way to it.
_FAREWELL_SECONDS = 2.0


class _WrongSettings(click.ClickException):
    #: As of the other commands.
    exit_code = 2


class Announce(bootsteps.StartStopStep):  # type: ignore[misc]
    """Creates the worker's agent; its heartbeat and its sweeper begin when the pool is there."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        try:
            self.agent: WorkerAgent = worker.app.capacity.employ(worker)
        except ConfigurationError as exc:
            if isinstance(worker, Worker):
                # The command says one line; a worker that a program has started gets the error itself.
                raise _WrongSettings(str(exc)) from exc
            raise
        worker.capacity_agent = self.agent

    def start(self, worker: Any) -> None:
        """Once; it outlives the broker's connections."""
        agent = self.agent
        if agent.registry.url.startswith("memory:"):
            logger.warning(
                "the registry %s is for the process that has it: producers in other processes see no worker in it, and"
                " send as plain Celery does; for the processes of one machine there is sqlite:///path/to/file.db",
                agent.registry.url,
                extra={"action": "memory_registry", "worker": agent.name},
            )
        agent.heart = Heart(agent)
        agent.announce = agent.heart.announce
        agent.sweeper = Sweeper(agent)
        agent.heart.start()
        agent.sweeper.start()

    def info(self, worker: Any) -> dict[str, Any]:
        agent = self.agent
        return {
            "capacity": {
                "node": agent.node,
                "epoch": agent.epoch,
                "slots": agent.announced_capacity,
                "held": agent.ledger.held,
                "delayed": agent.ledger.delayed,
                "draining": agent.draining,
                "counters": agent.counters,
            }
        }

    # stop() is empty on purpose: Celery stops this step before the tasks have ended.  See Gate.shutdown.


class Gate(bootsteps.StartStopStep):  # type: ignore[misc]
    """Puts acceptance, gatekeeper and intake around Celery's consumer, for each connection anew."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        agent: WorkerAgent = consumer.controller.capacity_agent
        self.agent = agent
        agent.consumer = consumer
        self._wakeup: _Wakeup | None = None
        self._main_thread = threading.get_ident()
        self.mover = Mover(agent, agent.registry)
        self.intake = Intake(agent, consumer.call_soon)
        self.gatekeeper = Gatekeeper(agent, consumer.on_task_request, self.intake.give_back, self.mover)
        self.acceptance = Acceptance(agent, self.gatekeeper, self.intake)
        self.intake.gatekeeper = self.gatekeeper
        self.intake.acceptance = self.acceptance
        self.gatekeeper.acceptance = self.acceptance
        agent.accept = self.acceptance.on_consumed
        agent.wake = self._wake
        # Before Celery builds its strategies, which keep what they find here.
        consumer.on_task_request = self.gatekeeper.on_request
        signals.task_received.connect(self._on_received, sender=consumer, weak=True)
        if consumer.hub is None:
            consumer.loop = _sliced(consumer.loop, self._tick)

    def _on_received(self, request: Any = None, **kwargs: Any) -> None:
        self.gatekeeper.on_received(request)

    def start(self, consumer: Any) -> None:
        agent = self.agent
        self._main_thread = threading.get_ident()
        sweeper = agent.sweeper
        if sweeper is not None:
            sweeper.gatekeeper = self.gatekeeper
        agent.stopping = False
        if consumer.connection.transport.driver_type == "redis":
            remember_owed(consumer.connection, agent.owed)
            self._give_back(consumer)
        self.intake.start(open_reader(consumer.connection, agent))

    def _give_back(self, consumer: Any) -> None:
        """What this worker has not acknowledged and does not hold.

        It was an earlier process's of this name, or the connection was cut before it was here.  Before anything is
        consumed or fetched on the new one, so nothing is on its way.
        """
        agent = self.agent
        messages = [entry.message for entry in agent.ledger.entries()]
        keep = {message.delivery_tag for message in messages if not message.acknowledged} | agent.owed
        try:
            # On another connection: Kombu before 5.7 stops polling on Redis when a channel of this one is closed.
            give_back_unacked(agent, self.mover.connection(), agent.name, lambda: True, keep)
            self.mover.close()
        except consumer.connection_errors:
            raise
        except Exception as exc:  # noqa: BLE001 - they come back after the visibility time-out
            logger.warning("what %s left is not given back: %r", agent.name, exc, extra={"action": "restore_failed"})

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Called by Celery each time its event loop begins."""
        self._close_wakeup()
        self._wakeup = _Wakeup()
        hub.add_reader(self._wakeup.reader, self._woken)
        # Scheduled anew each time, since the time of the next look changes.
        hub.call_later(0.0, self._poll, hub, self._wakeup)

    def _poll(self, hub: Any, wakeup: _Wakeup) -> None:
        if wakeup is not self._wakeup:
            return  # of a connection that is gone
        self.agent.turned()
        self._check_standing()
        if self.intake.poll_in <= 0:
            self.intake.schedule()
        hub.call_later(min(max(self.intake.poll_in, 0.005), 0.25), self._poll, hub, wakeup)

    def _tick(self) -> None:
        self.agent.turned()
        self._check_standing()
        self.intake.tick()

    def _woken(self) -> None:
        if self._wakeup is not None:
            self._wakeup.clear()
        self._check_standing()
        self.intake.schedule()

    def _wake(self) -> None:
        """From any thread: there may be something to do."""
        if threading.get_ident() == self._main_thread:
            self.intake.schedule()
        elif self._wakeup is not None:
            self._wakeup.set()

    def _check_standing(self) -> None:
        """What the heartbeat's thread has found out, done in the main loop."""
        agent = self.agent
        if agent.look_wanted:
            agent.look_wanted = False
            self.intake.probe()
        if agent.replaced and agent.consuming:
            agent.consuming = False
            consumer = agent.consumer.task_consumer
            if consumer is not None:
                consumer.cancel_by_queue(agent.own_queue.name)

    def stop(self, consumer: Any) -> None:
        """The connection is lost, or the worker stops: take nothing more."""
        agent = self.agent
        ending = consumer.blueprint.state != bootsteps.RUN
        agent.stopping = ending
        agent.withdraw()
        self.intake.stop()
        self._close_wakeup()
        entries = agent.ledger.entries()
        self.gatekeeper.forget_unstarted()
        if ending:
            if consumer.task_consumer is not None:
                _quietly(consumer.task_consumer.cancel)
            self._hand_back()
        else:
            self.intake.close()
            for entry in entries:
                # On Redis, closing the old channel would give it back: what runs goes on and is acknowledged at its
                # end; the rest is given back by the next start, and must not be once more, under whoever has it then.
                if entry.queue in agent.managed or agent.ledger.find(entry.message) is entry:
                    let_go(entry.message)

    terminate = stop

    def shutdown(self, consumer: Any) -> None:
        """The pool is empty and the worker ends."""
        agent = self.agent
        agent.stopping = True
        signals.task_received.disconnect(self._on_received, sender=consumer)
        self.intake.stop()
        self.intake.close()
        # What was received and never begun goes back to its queue.
        unfinished = [entry for entry in agent.ledger.entries() if not entry.message.acknowledged]
        if consumer.task_consumer is not None:
            _quietly(consumer.task_consumer.cancel)
            _quietly(consumer.task_consumer.channel.close)
        if agent.sweeper is not None:
            agent.sweeper.end(_JOIN_SECONDS)
        if agent.heart is not None:
            agent.heart.end(_JOIN_SECONDS)
        self._hand_back()
        last_words(agent)
        if not unfinished:
            # Else the broker may be about to give back to the own queue what was cut off (cold shutdown).
            self._farewell()
            tell_counters(agent)
        self.mover.close()
        agent.app.capacity.dismiss(agent)

    def _hand_back(self) -> None:
        """Send what is in the own queue to where it can run."""
        agent = self.agent
        fallback = next(iter(agent.managed), None) or agent.app.conf.task_default_queue
        try:
            self.mover.drain(agent.own_queue.name, fallback)
        except Exception as exc:  # noqa: BLE001 - another worker's sweeper does it then
            self.mover.close()
            agent.count("hand_back_failed")
            logger.warning(
                "could not hand back what is in %s: %r", agent.own_queue.name, exc, extra={"action": "hand_back_failed"}
            )

    def _farewell(self) -> None:
        """What was on its way while the worker left.  The rest is for the sweepers of the others."""
        agent = self.agent
        fallback = next(iter(agent.managed), None)
        until = time.monotonic() + _FAREWELL_SECONDS
        try:
            while True:
                mine = [w for w in agent.call(agent.registry.expire, agent.name) if w.name == agent.name]
                if not mine or clean_up(self.mover, mine[0], fallback) or time.monotonic() > until:
                    return
                time.sleep(_SLICE_SECONDS)
        except RegistryError as exc:
            logger.debug("farewell of %s: %s", agent.name, exc)
        except Exception as exc:  # noqa: BLE001 - as above
            agent.count("hand_back_failed")
            logger.warning("farewell of %s: %r", agent.name, exc, extra={"action": "hand_back_failed"})

    def _close_wakeup(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            hub = self.agent.consumer.hub
            if hub is not None:
                hub.remove(wakeup.reader)
            wakeup.close()


class _Wakeup:
    """Wakes an event loop from another thread."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            if self.writer < 0:
                return
            try:
                os.write(self.writer, b"x")
            except BlockingIOError:
                pass  # full: it will wake up anyway

    def clear(self) -> None:
        try:
            while os.read(self.reader, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            os.close(self.reader)
            os.close(self.writer)
            self.reader = self.writer = -1


def _sliced(loop: Callable[..., Any], tick: Callable[[], None]) -> Callable[..., Any]:
    """Celery's blocking loop, on a connection whose ``drain_events`` lets us look up in between."""

    def run(consumer: Any, connection: Any, *args: Any, **kwargs: Any) -> Any:
        def running() -> bool:
            ending = any(flag is not None and flag is not False for flag in (state.should_stop, state.should_terminate))
            return bool(consumer.blueprint.state == bootsteps.RUN) and not ending

        return loop(consumer, _SlicedConnection(connection, tick, running), *args, **kwargs)

    return run


class _SlicedConnection:
    """A connection that waits for events in slices, with a tick before each."""

    def __init__(self, connection: Any, tick: Callable[[], None], running: Callable[[], bool]) -> None:
        self._connection = connection
        self._tick = tick
        self._running = running

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def drain_events(self, timeout: float | None = None, **kwargs: Any) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if not self._running():
                # Celery looks at its flags when we return; until then, nothing more is to be taken.
                raise TimeoutError
            self._tick()
            try:
                return self._connection.drain_events(timeout=_SLICE_SECONDS, **kwargs)
            except TimeoutError:
                if not self._running() or (until is not None and time.monotonic() >= until):
                    raise


def _quietly(function: Callable[[], Any]) -> None:
    """At the end, when the connection may be gone: Celery does the same."""
    try:
        function()
    except Exception as exc:  # noqa: BLE001
        logger.debug("while stopping: %r", exc)
