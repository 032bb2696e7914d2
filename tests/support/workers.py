"""Real Celery workers, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from .journal import JOURNAL_ENV, Journal
from .processes import ManagedProcess
from .tasks_app import CONF_ENV, PLUGIN_ENV

__all__ = ("READY_LIMIT", "WorkerProcess", "end_workers", "worker_arguments", "worker_environment")

#: Seconds.  A worker takes about one on an idle machine; many are started at once on a busy one.
READY_LIMIT = 60.0

#: One of these is set where coverage follows subprocesses.
_COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
_TESTS = Path(__file__).resolve().parent.parent
#: They cost a second at every start, and say nothing that the tests ask about.
_QUICK = ("--without-mingle", "--without-gossip")


def worker_environment(
    *,
    broker: str,
    backend: str | None = None,
    conf: Mapping[str, Any] | None = None,
    plugin: bool = False,
    journal: Journal | None = None,
    env: Mapping[str, str] | None = None,
    inherit: bool = True,
) -> dict[str, str]:
    """The environment of a process that uses :mod:`support.tasks_app`: a worker, beat, the command line.

    The rest of this process's environment is passed on, so that coverage finds what it looks for; without
    ``inherit``, for another machine, only what the app itself reads is there.
    """
    own = {
        "CELERY_BROKER_URL": broker,
        CONF_ENV: json.dumps(dict(conf or {})),
        PLUGIN_ENV: "1" if plugin else "0",
    }
    if backend:
        own["CELERY_RESULT_BACKEND"] = backend
    if journal is not None:
        own[JOURNAL_ENV] = str(journal.directory)
    if not inherit:
        return {**own, **(env or {})}
    path = [str(_TESTS), str(_TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    inherited = {key: value for key, value in os.environ.items() if key != "CELERY_RESULT_BACKEND"}
    return {**inherited, **own, **(env or {})}


def worker_arguments(
    nodename: str,
    *,
    queues: Sequence[str] = (),
    pool: str = "prefork",
    concurrency: int = 2,
    args: Sequence[str] = _QUICK,
    loglevel: str = "INFO",
) -> list[str]:
    """What follows ``celery -A APP``."""
    return [
        *("worker", "-n", nodename, "-P", pool, "-c", str(concurrency), "-l", loglevel),
        *(("-Q", ",".join(queues)) if queues else ()),
        *args,
    ]


class WorkerProcess(ManagedProcess):
    """``python -m celery -A support.tasks_app worker …``.

    Its nodename is ``name@host``; the host part is the node that the plugin takes for affinity.  It is
    started by :meth:`start` or on entering it as a context manager, and ready after :meth:`wait_ready`::

        with WorkerProcess("w1", broker=url, directory=tmp_path) as worker:
            worker.wait_ready()
    """

    def __init__(
        self,
        name: str,
        *,
        broker: str,
        directory: Path,
        backend: str | None = None,
        host: str = "test",
        queues: Sequence[str] = (),
        pool: str = "prefork",
        concurrency: int = 2,
        conf: Mapping[str, Any] | None = None,
        plugin: bool = False,
        journal: Journal | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = _QUICK,
        app: str = "support.tasks_app",
        loglevel: str = "INFO",
    ) -> None:
        self.nodename = f"{name}@{host}"
        super().__init__(self.nodename, directory / f"{self.nodename}.log")
        self.journal = journal
        self.queues = tuple(queues)
        self.argv = [
            *(sys.executable, "-m", "celery", "-A", app),
            *worker_arguments(
                self.nodename, queues=queues, pool=pool, concurrency=concurrency, args=args, loglevel=loglevel
            ),
        ]
        self.env = worker_environment(
            broker=broker, backend=backend, conf=conf, plugin=plugin, journal=journal, env=env
        )

    def start(self) -> Self:
        self.spawn(self.argv, self.env)
        return self

    def wait_ready(self, limit: float = READY_LIMIT) -> Self:
        """Wait until it consumes.

        :raises AssertionError: with the tail of its log, if it is not ready in time or has ended.
        """
        self.wait_log(rf"{self.nodename} ready\.", limit)
        return self

    def terminate(self, limit: float | None = None) -> int | None:
        """Warm shutdown; with ``limit`` also wait that many seconds for the end and return the exit code."""
        self.signal(signal.SIGTERM)
        return None if limit is None else self.wait(limit)

    def quit(self, limit: float | None = None) -> int | None:
        """Cold shutdown; ``limit`` as for :meth:`terminate`."""
        self.signal(signal.SIGQUIT)
        return None if limit is None else self.wait(limit)

    def kill(self, *, children: bool = True) -> None:
        """SIGKILL, and the end is waited for.

        Without ``children`` only the main process is killed: a prefork child ends when it has noticed, after
        the task that it is in.  The runs that were killed are ended in the journal.
        """
        killed = [self.pid, *(self.children() if children else ())]
        before = time.monotonic()
        self.signal(signal.SIGKILL, group=children)
        self.wait(10.0)
        if self.journal is not None:
            self.journal.note_gone(killed, at=before)

    def stop(self, *, children: bool = True) -> None:
        """SIGSTOP: it hangs, as a machine that is out of breath.  See :meth:`cont`."""
        self.signal(signal.SIGSTOP, group=children)

    def cont(self, *, children: bool = True) -> None:
        self.signal(signal.SIGCONT, group=children)

    def restart(self, limit: float = READY_LIMIT, *, warm: bool = True) -> Self:
        """End it, warm or by SIGKILL, start it anew with the same name, and wait until it is ready."""
        if self.running:
            if warm:
                self.terminate(limit)
            else:
                self.kill()
        self.close()
        return self.start().wait_ready(limit)

    def __enter__(self) -> Self:
        return self if self.started else self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        end_workers([self])


def end_workers(workers: Iterable[WorkerProcess]) -> None:
    """End them side by side, whatever state they are in, and reap them.  Harmless twice.

    A warm shutdown takes two seconds, so they are killed; but where coverage is measured they get the time to
    write what they have.
    """
    workers = list(workers)
    if any(name in os.environ for name in _COVERAGE):
        running = [worker for worker in workers if worker.running]
        for worker in running:
            worker.cont()
            worker.terminate()
        for worker in running:
            # Whatever is not through by then is killed below.
            with suppress(AssertionError):
                worker.wait(15.0)
    for worker in workers:
        worker.close()
