"""Processes that the tests start, and that are never left behind."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

import psutil
from typing_extensions import Self

from .waiting import wait_until

__all__ = ("ManagedProcess", "forget_ended", "live", "seen")

#: Every process object that was started, until :func:`forget_ended`: for the log tails of a failed test.
_seen: list[ManagedProcess] = []


def seen() -> list[ManagedProcess]:
    """What was started since the last :func:`forget_ended`, and what is still running."""
    return list(_seen)


def live() -> list[ManagedProcess]:
    return [process for process in _seen if process.started]


def forget_ended() -> None:
    _seen[:] = live()


class ManagedProcess:
    """One process in a group of its own, with its output in a file, ended by its id only.

    ``lifetime="test"``: the plugin of the tests ends it when the test has ended, whatever the test did;
    ``"session"`` is for servers that several tests share.  If the test run itself dies, the group is killed
    by :mod:`support.reaper`.
    """

    def __init__(self, name: str, log_path: Path, *, lifetime: Literal["test", "session"] = "test") -> None:
        self.name = name
        self.log_path = log_path
        self.lifetime = lifetime
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    # -- life --------------------------------------------------------------------------------------------

    def spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it.  The log of an earlier start stays; :meth:`wait_log` looks at the new part."""
        if self.started:
            raise RuntimeError(f"{self.name} has been started already")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _watch("+", self._popen.pid)
        if self not in _seen:
            _seen.append(self)

    @property
    def started(self) -> bool:
        """True from :meth:`spawn` to :meth:`close`, even if the process has ended by itself."""
        return self._popen is not None

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int:
        """The process that was started, which is also the id of its group."""
        if self._popen is None:
            raise RuntimeError(f"{self.name} is not started")
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return None if self._popen is None else self._popen.poll()

    def wait(self, limit: float) -> int:
        """Wait until it has ended by itself.

        :raises AssertionError: with the tail of the log, if it has not after ``limit`` seconds.
        """
        if self._popen is None:
            raise RuntimeError(f"{self.name} is not started")
        try:
            return self._popen.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} is still running after {limit:g} s\n{self.log_tail()}") from None

    def children(self, recursive: bool = True) -> list[int]:
        """Ids of the processes below it, such as the processes of a pool."""
        if not self.running:
            return []
        try:
            return [child.pid for child in psutil.Process(self.pid).children(recursive=recursive)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group.  Nothing happens if it has ended."""
        if not group:
            if self._popen is not None:
                self._popen.send_signal(number)
        elif self._popen is not None:
            _signal_group(self._popen.pid, number)

    def close(self) -> None:
        """Kill what is left of it, all of its descendants, and reap it.  Harmless twice."""
        if self._popen is None:
            return
        pid = self._popen.pid
        # Listed before the kill: afterwards, nothing tells what left the group from a stranger.
        family = self._family()
        _signal_group(pid, signal.SIGKILL)
        for process in family:
            # psutil compares the time of creation, so a process id that was given anew is not hit.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait(30.0)
        wait_until(
            lambda: not _group_alive(pid) and not any(_alive(process) for process in family),
            30.0,
            what=f"the processes of {self.name} to be gone",
        )
        self._popen = None
        _watch("-", pid)

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True) if self.running else []
        except psutil.NoSuchProcess:
            return []

    # -- log ---------------------------------------------------------------------------------------------

    def logs(self, *, since_start: bool = False) -> str:
        """All that it has written, or only since it was last started."""
        try:
            data = self.log_path.read_bytes()
        except FileNotFoundError:
            return ""
        return data[self._log_start if since_start else 0 :].decode(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.logs().splitlines()[-lines:])

    def wait_log(self, pattern: str, limit: float, *, since_start: bool = True) -> re.Match[str]:
        """Wait for a line that matches the regular expression.

        :raises AssertionError: with the tail of the log, when ``limit`` seconds have passed, or at once if
            the process has ended without it.
        """
        expression = re.compile(pattern, re.MULTILINE)

        def found() -> re.Match[str] | None:
            # Asked first, or what it wrote last would be missed.
            ended = not self.running
            match = expression.search(self.logs(since_start=since_start))
            if match is None and ended:
                raise AssertionError(f"{self.name} ended ({self.returncode}) without logging {pattern!r}")
            return match

        try:
            match = wait_until(found, limit, what=f"{self.name} to log {pattern!r}")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log_tail()}") from None
        assert match is not None
        return match

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _signal_group(pgid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pgid, number)


def _alive(process: psutil.Process) -> bool:
    # One that died and waits for init to reap it holds nothing any more.
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _group_alive(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return any(_pgid_of(process.pid) == pgid and _alive(process) for process in psutil.process_iter())


def _pgid_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


# -- the reaper ------------------------------------------------------------------------------------------

#: The reaper of this process, with the id of the process that it belongs to: a fork starts its own.
_reaper: tuple[int, subprocess.Popen[bytes], IO[bytes]] | None = None


def _watch(sign: str, pgid: int) -> None:
    global _reaper
    if _reaper is None or _reaper[0] != os.getpid():
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py"))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert popen.stdin is not None
        _reaper = (os.getpid(), popen, popen.stdin)
    pipe = _reaper[2]
    pipe.write(f"{sign} {pgid}\n".encode())
    pipe.flush()


@atexit.register
def _end_everything() -> None:
    if _reaper is None or _reaper[0] != os.getpid():
        return
    for process in live():
        process.close()
    _reaper[2].close()
    _reaper[1].wait(10.0)
