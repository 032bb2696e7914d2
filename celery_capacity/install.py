"""Composition: settings, registry, the producer's hook and the worker's bootsteps, put into an app."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from celery.app.amqp import AMQP
from celery.utils.imports import symbol_by_name

from .dispatch import CapacityAMQP, CapacityAMQPMixin, Dispatcher
from .outage import Outage
from .registry import Registry, open_registry
from .settings import Settings

if TYPE_CHECKING:
    from .worker.agent import WorkerAgent

__all__ = ("Runtime", "install")

logger = logging.getLogger(__name__)


class Runtime:
    """What the plugin keeps for one app; ``app.capacity``.

    Nothing is read from the configuration and nothing is connected before the first use, so that
    :func:`install` may be called before the app is configured.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._registry: Registry | None = None
        self._outage: Outage | None = None
        self._dispatcher: Dispatcher | None = None
        #: Workers of this process that run on this app (more than one only when they are embedded).
        self.agents: list[WorkerAgent] = []

    @property
    def settings(self) -> Settings:
        """The settings, read at the first use.

        :raises ConfigurationError: naming every setting that is wrong, misspelled or missing.
        """
        if self._settings is None:
            with self._lock:
                if self._settings is None:
                    self._settings = Settings.from_app(self.app)
        return self._settings

    @property
    def registry(self) -> Registry:
        """The registry that producers in this process share.  Opening it does not connect yet."""
        if self._registry is None:
            with self._lock:
                if self._registry is None:
                    self._registry = self.open_registry()
                    self._point_out_relative_path()
        return self._registry

    @property
    def outage(self) -> Outage:
        """The circuit breaker in front of :attr:`registry`."""
        if self._outage is None:
            with self._lock:
                if self._outage is None:
                    self._outage = Outage(self.registry.url, self.settings.registry_retry_seconds)
        return self._outage

    @property
    def dispatcher(self) -> Dispatcher:
        """The producer's side."""
        if self._dispatcher is None:
            with self._lock:
                if self._dispatcher is None:
                    self._dispatcher = Dispatcher(self.app, self.settings, lambda: self.registry, self.outage)
        return self._dispatcher

    def open_registry(self) -> Registry:
        """One more client of the app's registry; the caller closes it."""
        settings = self.settings
        scheme = settings.registry.partition("://")[0].lower()
        # A registry in this process's memory has nothing to wait for.
        options = {} if scheme == "memory" else {"timeout_seconds": settings.registry_timeout_seconds}
        return open_registry(settings.registry, settings.namespace, **options)

    def _point_out_relative_path(self) -> None:
        scheme, _, path = self.settings.registry.partition(":///")
        if scheme.lower() == "sqlite" and not path.startswith("/"):
            logger.warning(
                "capacity_registry %s is relative to the current directory, here %s: producers and workers that were"
                " started elsewhere have another registry; an absolute path has four slashes",
                self.settings.registry,
                os.getcwd(),
                extra={"action": "relative_registry"},
            )

    def employ(self, controller: Any) -> WorkerAgent:
        """The agent of a worker that is being set up."""
        from .worker.agent import WorkerAgent

        agent = WorkerAgent(controller, self.settings, self.registry, self.open_registry, self.outage)
        self.agents.append(agent)
        return agent

    def dismiss(self, agent: WorkerAgent) -> None:
        """The worker has ended.  Harmless twice."""
        if agent in self.agents:
            self.agents.remove(agent)

    def task_consumer(self, channel: Any, **options: Any) -> Any:
        """The consumer of the worker whose connection this is, or ``None`` if it is not one of ours."""
        for agent in self.agents:
            if agent.consumer is not None and agent.consumer.connection is channel:
                return agent.task_consumer(channel, **options)
        return None


def install(app: Any) -> Runtime:
    """Make ``app`` capacity-aware, as producer and as worker.  Call it once, next to ``app = Celery(...)``.

    A second call is harmless.  Settings are read later, at the first publish or when a worker starts; if the
    app is configured by now they are checked here.

    :raises ConfigurationError: the app is configured, and a ``capacity_`` setting is wrong, misspelled or missing.
    """
    present = app.__dict__.get("capacity")
    if isinstance(present, Runtime):
        return present
    runtime = app.capacity = Runtime(app)
    _hook_producer(app)
    # By name: a producer need not import the worker's side.
    app.steps["worker"].add("celery_capacity.worker.steps:Announce")
    app.steps["consumer"].add("celery_capacity.worker.steps:Gate")
    if app.configured:
        _ = runtime.settings
    return runtime


class InstalledAMQP(CapacityAMQP):
    """What an app has for its AMQP class.

    A pickled app takes little more along than the name of this class, so the plugin is put into its copy here.
    """

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        install(app)


def _hook_producer(app: Any) -> None:
    base = symbol_by_name(app.amqp_cls)
    if base is AMQP:
        app.amqp_cls = f"{__name__}:{InstalledAMQP.__name__}"
    elif not issubclass(base, CapacityAMQPMixin):
        app.amqp_cls = type(f"Capacity{base.__name__}", (CapacityAMQPMixin, base), {"__module__": base.__module__})
    old = app.__dict__.get("amqp")
    if old is None:
        return
    # Something has used app.amqp already; the new one takes over the queues, which the user may have added to.
    new = symbol_by_name(app.amqp_cls)(app=app)
    if "queues" in old.__dict__:
        new.queues = old.queues
    app.amqp = new
