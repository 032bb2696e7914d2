"""One run after the other: plain Celery, then the plugin, then the table."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery

from ..errors import CapacityExhausted
from ..registry import mask_url, open_registry
from . import report
from .app import PLUGIN_KEY, build_app
from .errors import DemoFailed
from .figures import Figures, Sent, measure
from .fleet import Fleet
from .interrupts import Interrupts
from .place import POLLING_SECONDS, Place
from .plan import LONG_SECONDS, SHORT_SECONDS, SLOTS, WORKERS, Job, waves
from .screen import Screen

__all__ = ("Options", "demo")

_LOOK_SECONDS = 0.02
#: A wave that takes this many times what a perfect queue would take has lost a task.
_LIMIT_SECONDS = 40.0
_QUIET_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    """What can be asked for.  ``None``: the filesystem as broker, an SQLite file as registry."""

    broker: str | None = None
    registry: str | None = None
    waves: int = 3


def demo(options: Options, screen: Screen, interrupts: Interrupts) -> None:
    """Both runs and the table.

    :raises DemoFailed: it did not show what it has to show.
    :raises CapacityError: another of the plugin's errors.
    """
    # Resolved, since a registry's URL does not take a path with symbolic links everywhere.
    folder = Path(tempfile.mkdtemp(prefix="celery-capacity-demo-")).resolve()
    try:
        screen.say(_introduction(options))
        places = {plugin: Place(folder / name, options.broker, options.registry) for plugin, name in _RUNS.items()}
        places[True].check()
        results: dict[bool, Figures] = {}
        refusal = ""
        for plugin, place in places.items():
            try:
                results[plugin], message = _run(place, plugin, options, screen, interrupts)
            finally:
                place.clean()
            refusal = refusal or message
        screen.say()
        screen.say(report.table(results[False], results[True]))
        screen.say()
        screen.say(f"refused at the source (when_full='refuse', every slot taken; nothing was published):\n  {refusal}")
        _judge(results[True])
    finally:
        interrupts.no_more()
        shutil.rmtree(folder, ignore_errors=True)


_RUNS = {False: "plain", True: "capacity"}


def _introduction(options: Options) -> str:
    broker = mask_url(options.broker) if options.broker else "the filesystem, in a temporary folder"
    registry = mask_url(options.registry) if options.registry else "an SQLite file, in a temporary folder"
    jobs = [job for wave in waves(1) for job in wave]
    long, pinned = sum(job.kind == "long" for job in jobs), sum(job.node is not None for job in jobs)
    return (
        f"broker: {broker}; registry: {registry}\n"
        f"{len(WORKERS)} workers of {SLOTS} processes on two nodes; {options.waves} waves of {long} long tasks"
        f" ({LONG_SECONDS:g} s) and {len(jobs) - long} short ones ({SHORT_SECONDS:g} s),"
        f" {pinned} of the {len(jobs)} pinned to a node.\n"
        f"{_same(options)}"
        "Below: L a long task runs, s a short one, . a free slot, +n tasks that a worker holds and does not run."
    )


def _same(options: Options) -> str:
    if options.broker and not options.broker.startswith("filesystem:"):
        return ""
    return f"In both runs workers look into the folder every {POLLING_SECONDS * 1000:g} ms; Kombu's default is 1 s.\n"


def _run(place: Place, plugin: bool, options: Options, screen: Screen, interrupts: Interrupts) -> tuple[Figures, str]:
    """One run; its figures, and the message of the refusal (with the plugin)."""
    title = "with celery_capacity" if plugin else "plain Celery, its defaults"
    screen.say(f"\n{title}: starting {len(WORKERS)} workers")
    conf: dict[str, Any] = {**place.conf, PLUGIN_KEY: plugin, **(place.capacity_conf if plugin else {})}
    with Fleet(place, plugin, interrupts) as fleet, build_app(conf) as app:
        sent = [
            _send_and_wait(app, fleet, jobs, screen, f"wave {number}", pins=plugin)
            for number, jobs in enumerate(waves(options.waves), 1)
        ]
        figures = measure(sent, fleet.journal.read())
        refusal = ""
        if plugin:
            _wait_held(place, 0, "all tasks have ended")
            refusal = _refused(app, fleet, screen)
            _wait_held(place, 0, "all tasks have ended")
    return figures, refusal


def _send_and_wait(app: Celery, fleet: Fleet, jobs: list[Job], screen: Screen, title: str, *, pins: bool) -> list[Sent]:
    since = time.monotonic()
    sent = []
    for job in jobs:
        at = time.monotonic()
        # The one difference between the two runs: plain Celery knows no node.
        where = {"node": job.node} if pins and job.node else {}
        result = app.tasks[job.kind].apply_async((job.seconds,), **where)
        sent.append(Sent(job, result.id, at))
    _wait(fleet, sent, screen, title, since)
    return sent


def _wait(fleet: Fleet, sent: list[Sent], screen: Screen, title: str, since: float) -> None:
    kinds = {one.task_id: one.job.kind for one in sent}
    screen.show(fleet, kinds, title, since, now=True)
    while fleet.journal.read().ended(kinds) < len(kinds):
        fleet.check()
        if time.monotonic() - since > _LIMIT_SECONDS:
            done = fleet.journal.ended(kinds)
            raise DemoFailed(f"{title}: {len(kinds) - done} of {len(kinds)} tasks did not end in {_LIMIT_SECONDS:g} s")
        screen.show(fleet, kinds, title, since)
        time.sleep(_LOOK_SECONDS)
    screen.show(fleet, kinds, title, since, now=True)


def _refused(app: Celery, fleet: Fleet, screen: Screen) -> str:
    """Fill every slot, then dispatch one more that does not want to wait."""
    since = time.monotonic()
    filling = [Job(-1, "long", LONG_SECONDS, None)] * (SLOTS * len(WORKERS))
    sent = [Sent(job, app.tasks[job.kind].apply_async((job.seconds,)).id, since) for job in filling]
    _wait_held(fleet.place, len(sent), "a task was sent for each slot")
    try:
        app.tasks["short"].apply_async((SHORT_SECONDS,), when_full="refuse")
    except CapacityExhausted as exc:
        message = str(exc)
    else:
        raise DemoFailed("every slot was taken, and a dispatch with when_full='refuse' was not refused")
    _wait(fleet, sent, screen, "full  ", since)
    return message


def _wait_held(place: Place, slots: int, why: str) -> None:
    """Until the registry counts so many slots as held.  A task ends a little before its slot is given back."""
    until = time.monotonic() + _QUIET_SECONDS
    with open_registry(place.registry, place.namespace) as registry:
        while True:
            held = {worker.name: worker.held for worker in registry.overview().workers}
            if sum(held.values()) == slots:
                return
            if time.monotonic() > until:
                raise DemoFailed(f"{why}, so {slots} slots should be held; the registry says: {held}")
            time.sleep(_LOOK_SECONDS)


def _judge(figures: Figures) -> None:
    most = max(figures.most_held.values())
    if most > SLOTS:
        raise DemoFailed(f"a worker held {most} tasks at one time, and has {SLOTS} slots")
    if figures.pinned_right != figures.pinned:
        raise DemoFailed(f"only {figures.pinned_right} of {figures.pinned} pinned tasks ran on their node")
