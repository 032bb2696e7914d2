"""``celery -A proj capacity``: what the registry knows of the fleet, and draining by hand.

Exit status: 0 done, 1 no such worker, 2 wrong arguments or settings, 69 the registry does not answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from celery.bin.base import CeleryCommand, handle_preload_options
from click_didyoumean import DYMGroup
from kombu.exceptions import OperationalError

from . import tables, views
from .errors import ConfigurationError, RegistryError
from .install import Runtime
from .models import Overview, WorkerState, WorkerView
from .naming import later_lot, node_lot, unknown_lot
from .registry import Registry, mask_url
from .settings import Settings

__all__ = ("capacity",)


class _NoSuchWorker(click.ClickException):
    exit_code = 1


class _WrongSettings(click.ClickException):
    exit_code = 2


class _Unavailable(click.ClickException):
    #: ``EX_UNAVAILABLE`` of sysexits.h, as in Celery's own commands.
    exit_code = 69


def _above_zero(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value:g} is not a number of seconds above 0", ctx, param)
    return value


def _limit(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    if value == "default":
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is not a whole number from 0 up, or 'default'", ctx, param)
    return int(value)


@click.group(cls=DYMGroup)
@click.pass_context
@handle_preload_options
def capacity(ctx: click.Context, **_preloaded: Any) -> None:
    """Who can take a task, and why not: the capacity registry.

    The registry and the namespace come from the app's settings, capacity_registry and capacity_namespace.
    """


@capacity.command(cls=CeleryCommand)
@click.option("--json", "as_json", is_flag=True, help="One JSON document in a fixed form, for scripts.")
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show all workers and queues, the slots that are held, and what was counted."""
    with _registry(ctx) as (registry, _):
        overview = registry.overview()
    if as_json:
        _write_json(views.status_document(overview))
        return
    _show_workers(ctx, overview)
    queues = views.public_views(overview)
    if queues:
        rows = [[q.name, _number(q.limit, "none"), str(q.held), "yes" if q.waiting else "no"] for q in queues]
        tables.show("queues", ("queue", "limit", "held", "waiting"), rows, color=not ctx.obj.no_color)
    _show_lots(ctx, views.waiting_lots(overview))
    if overview.counters:
        click.echo(f"counters: {', '.join(f'{name} {total}' for name, total in overview.counters)}")


@capacity.command(cls=CeleryCommand)
@click.argument("queue")
@click.option("--task", metavar="NAME", help="A task of this name; without it, any task.")
@click.option("--node", metavar="NODE", help="A task that is pinned to this node.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for scripts.")
@click.pass_context
def explain(ctx: click.Context, queue: str, task: str | None, node: str | None, as_json: bool) -> None:
    """Say for every worker why it could or could not be chosen now for a task of QUEUE."""
    for option, value in (("QUEUE", queue), ("--task", task), ("--node", node)):
        if value == "":
            raise click.UsageError(f"{option} is empty; it takes a name")
    with _registry(ctx) as (registry, settings):
        census = registry.census(queue, task, node)
        overview = registry.overview()
    if not settings.manages(queue):
        message = f"queue {queue!r} is not selected by capacity_queues: its tasks are sent as plain Celery sends them"
        click.echo(message, err=True)
    if as_json:
        _write_json(views.explain_document(census, overview))
        return
    click.echo(views.summary(census))
    if census.workers:
        rows = [
            [w.name, w.node, w.state.value, _slots(w), views.why(w, census, settings.namespace)] for w in census.workers
        ]
        tables.show("workers", ("worker", "node", "state", "held", "why"), rows, color=not ctx.obj.no_color)
    _show_lots(ctx, views.waiting_lots(overview, queue))


@capacity.command(cls=CeleryCommand)
@click.argument("worker")
@click.option("--reason", metavar="TEXT", default="by hand", show_default=True, help="Shown by status and explain.")
@click.option(
    "--seconds",
    type=float,
    metavar="SECONDS",
    callback=_above_zero,
    help="End the drain by itself after so long.  [default: at admit]",
)
@click.pass_context
def drain(ctx: click.Context, worker: str, reason: str, seconds: float | None) -> None:
    """Choose WORKER for no more tasks; those that it holds it finishes.

    It lasts until admit, until the seconds have passed, or until the worker registers anew.
    """
    with _registry(ctx) as (registry, _):
        if not registry.drain(worker, reason, seconds):
            _no_such_worker(registry, worker)
    until = "until it is admitted" if seconds is None else f"for {seconds:g} s"
    click.echo(f"worker {worker} is draining {until}: {reason}")


@capacity.command(cls=CeleryCommand)
@click.argument("worker")
@click.pass_context
def admit(ctx: click.Context, worker: str) -> None:
    """End the drain of WORKER.  Harmless if it was not draining."""
    with _registry(ctx) as (registry, _):
        if not registry.admit(worker):
            _no_such_worker(registry, worker)
    click.echo(f"worker {worker} is admitted")


@capacity.command(cls=CeleryCommand)
@click.argument("queue")
@click.argument("limit", metavar="N|default", callback=_limit)
@click.pass_context
def limit(ctx: click.Context, queue: str, limit: int | None) -> None:
    """Let at most N tasks of QUEUE run at once, over all workers; 0 pauses it.

    It holds, whatever capacity_queue_limits says, until "default" takes it back.  What runs is never stopped.
    """
    with _registry(ctx) as (registry, settings):
        if not settings.manages(queue):
            raise click.UsageError(
                f"queue {queue!r} is not selected by capacity_queues: nothing that is set here holds for it"
            )
        registry.set_limit(queue, limit)
        census = registry.census(queue)
    shown = "no limit" if census.limit is None else f"limit {census.limit}"
    click.echo(f"queue {queue}: {shown}, {census.held} held{' (as the workers declare)' if limit is None else ''}")


@capacity.command(cls=CeleryCommand)
@click.argument("queues", metavar="[QUEUE]...", nargs=-1)
@click.option("--node", "nodes", metavar="NODE", multiple=True, help="The lots of this node too; can be repeated.")
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@click.pass_context
def purge(ctx: click.Context, queues: tuple[str, ...], nodes: tuple[str, ...], force: bool) -> None:
    """Delete the tasks that wait, in each QUEUE and in its lots; without QUEUE, in all managed queues of the app.

    As celery purge does, which knows no lots.  What is on its way to a worker or runs there goes on.  A lot is found if
    the registry knows that tasks wait there, or knows a worker of its node, or by --node.
    """
    app = ctx.obj.app
    with _registry(ctx) as (registry, settings):
        known = [name for name in app.amqp.queues if settings.manages(name)]
        overview = registry.overview()
        nodes = tuple({*nodes, *(worker.node for worker in overview.workers)})
        names = [name for queue in queues or known for name in _places(queue, nodes, overview)]
        if not force:
            click.confirm(f"Delete all tasks in {', '.join(names)}? They cannot be brought back", abort=True)
        with app.connection_for_write() as connection:
            try:
                connection.ensure_connection(max_retries=1)
                purged = {name: _purge(connection, name) for name in names}
            except (OperationalError, *connection.connection_errors) as exc:
                raise _Unavailable(f"broker {connection.as_uri()}: {exc}") from exc
        for lot in overview.lots:
            if lot.name in purged:
                registry.found_empty(lot.name, lot.mark)
    for name, count in purged.items():
        if count:
            click.echo(f"{views.counted(count, 'task')} deleted from {name}")
    if not any(purged.values()):
        click.echo("no task was waiting")


def _places(queue: str, nodes: Iterable[str], overview: Overview) -> list[str]:
    """Where tasks of a queue may wait, that one first."""
    namespace = overview.namespace
    lots = {unknown_lot(namespace, queue), later_lot(namespace, queue)}
    lots |= {node_lot(namespace, queue, node) for node in nodes}
    lots |= {lot.name for lot in overview.lots if lot.queue == queue}
    return [queue, *sorted(lots - {queue})]


def _purge(connection: Any, queue: str) -> int:
    """How many messages were deleted; none if there is no such queue."""
    # RabbitMQ closes the channel when there is none.
    channel = connection.channel()
    try:
        return int(channel.queue_purge(queue) or 0)
    except connection.channel_errors:
        return 0
    finally:
        channel.close()


@contextmanager
def _registry(ctx: click.Context) -> Iterator[tuple[Registry, Settings]]:
    """The registry of the app's settings.  What goes wrong inside ends the command with one message."""
    try:
        # Whether the app has the plugin installed makes no difference: the settings are all that is needed.
        runtime = Runtime(ctx.obj.app)
        settings = runtime.settings
    except ConfigurationError as exc:
        raise _WrongSettings(str(exc)) from exc
    if settings.registry.lower().startswith("memory:"):
        click.echo("memory:// has only what this process put there; no worker is seen through it", err=True)
    try:
        with runtime.open_registry() as registry:
            yield registry, settings
    except ConfigurationError as exc:
        raise _WrongSettings(str(exc)) from exc
    except RegistryError as exc:
        raise _unavailable(exc, settings.registry) from exc


def _unavailable(exc: RegistryError, url: str) -> _Unavailable:
    shown = mask_url(url)
    message = " ".join(str(exc).replace(url, shown).split())
    return _Unavailable(message if shown in message else f"registry {shown}: {message}")


def _no_such_worker(registry: Registry, worker: str) -> NoReturn:
    names = [view.name for view in registry.overview().workers]
    known = f"known are {', '.join(names)}" if names else "none is registered"
    raise _NoSuchWorker(f"no worker {worker!r} in namespace {registry.namespace!r}; {known}")


def _show_workers(ctx: click.Context, overview: Overview) -> None:
    if not overview.workers:
        click.echo(f"no worker in namespace {overview.namespace!r}")
        return
    header = ("worker", "node", "state", "capacity", "held", "free", "queues", "seen", "detail")
    rows = [
        [
            worker.name,
            worker.node,
            worker.state.value,
            _number(worker.capacity, "?"),
            f"{worker.held} ({worker.reserved}+{worker.committed})",
            str(worker.free) if worker.state is WorkerState.READY else "-",
            views.queues_with_shares(worker, overview.namespace),
            f"{worker.lease_age:.0f} s ago",
            views.detail(worker),
        ]
        for worker in overview.workers
    ]
    title = f"workers in namespace {overview.namespace!r}; held = reserved + committed"
    tables.show(title, header, rows, color=not ctx.obj.no_color)


def _show_lots(ctx: click.Context, lots: list[views.LotDocument]) -> None:
    if lots:
        rows = [[lot["queue"], lot["name"], views.what_waits(lot)] for lot in lots]
        tables.show("tasks wait", ("queue", "lot", "for what"), rows, color=not ctx.obj.no_color)


def _slots(worker: WorkerView) -> str:
    return f"{worker.held}/{_number(worker.capacity, '?')}"


def _number(value: int | None, none: str) -> str:
    return none if value is None else str(value)


def _write_json(document: Mapping[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))
