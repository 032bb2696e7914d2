"""Real worker processes, each in a session of its own, so that they end when the demo says so and not before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..models import WorkerState
from ..registry import open_registry
from .app import CONF_ENV, JOURNAL_KEY, PLUGIN_KEY
from .errors import DemoFailed
from .interrupts import Interrupts
from .journal import Journal
from .place import Place
from .plan import SLOTS, WORKERS

__all__ = ("Fleet",)

_READY_SECONDS = 60.0
_STOP_SECONDS = 15.0
_LOOK_SECONDS = 0.05
_LOG_LINES = 15


class Fleet:
    """The workers of one run.

    :param plugin: whether they run with the plugin.
    """

    def __init__(self, place: Place, plugin: bool, interrupts: Interrupts) -> None:
        self.place = place
        self.plugin = plugin
        self.journal = Journal(place.journal)
        self._interrupts = interrupts
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Fleet:
        try:
            for name in WORKERS:
                self._start(name)
            self._wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if exc_type is None:
                self.stop()
        finally:
            self.kill()

    def check(self) -> None:
        """See whether all workers live.

        :raises DemoFailed: with the end of the log of one that does not.
        """
        for name, process in self._workers.items():
            if process.poll() is not None:
                how = f"status {process.returncode}"
                if process.returncode < 0:
                    how = signal.Signals(-process.returncode).name
                raise DemoFailed(f"worker {name} died ({how}); the end of its log:\n{self._log_tail(name)}")

    def stop(self) -> None:
        """Ask all of them to end, and wait.

        :raises DemoFailed: one did not end, or badly.
        """
        self.check()
        for process in self._workers.values():
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _STOP_SECONDS
        for name, process in self._workers.items():
            try:
                status = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                message = (
                    f"worker {name} did not end in {_STOP_SECONDS:g} s; the end of its log:\n{self._log_tail(name)}"
                )
                raise DemoFailed(message) from None
            if status:
                raise DemoFailed(
                    f"worker {name} ended with status {status}; the end of its log:\n{self._log_tail(name)}"
                )

    def kill(self) -> None:
        """End what is left, pool processes too.  Harmless twice."""
        for process in self._workers.values():
            # Also if the worker itself has ended: its pool processes may not have.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._workers.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._workers.clear()

    def _start(self, name: str) -> None:
        conf = {**self.place.conf, PLUGIN_KEY: self.plugin, JOURNAL_KEY: str(self.place.journal)}
        if self.plugin:
            conf |= self.place.capacity_conf
        # Gossip, mingle and heartbeats are the chatter of workers among themselves; nobody listens here.
        arguments = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "INFO")
        with self._interrupts.held(), self._log(name).open("wb") as log:
            self._workers[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "-A", "celery_capacity.demo.app", "worker"),
                    *("--hostname", name, "--concurrency", str(SLOTS), "--queues", self.place.queue, *arguments),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, CONF_ENV: json.dumps(conf)},
                start_new_session=True,
            )

    def _wait_ready(self) -> None:
        until = time.monotonic() + _READY_SECONDS
        while not self._ready():
            self.check()
            if time.monotonic() > until:
                missing = next((name for name in WORKERS if name not in self.journal.ready), WORKERS[0])
                message = f"worker {missing} was not ready in {_READY_SECONDS:g} s; the end of its log:"
                raise DemoFailed(f"{message}\n{self._log_tail(missing)}")
            time.sleep(_LOOK_SECONDS)

    def _ready(self) -> bool:
        if len(self.journal.read().ready) < len(WORKERS):
            return False
        if not self.plugin:
            return True
        with open_registry(self.place.registry, self.place.namespace) as registry:
            workers = registry.overview().workers
        return len(workers) == len(WORKERS) and all(
            worker.state is WorkerState.READY and worker.capacity == SLOTS for worker in workers
        )

    def _log(self, name: str) -> Path:
        return self.place.folder / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])
