"""The clock of a registry's SQLite file."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

__all__ = ("shared_clock",)


def shared_clock(connection: sqlite3.Connection) -> Callable[[], float]:
    """The store's clock, in seconds: the machine's monotonic one, which all its processes share and which nobody sets.

    It starts again with every boot, while the file stays; so the first to open the file after a boot writes
    down what to add, for all: enough to be at the wall-clock time, and not before anything that is in the file.
    After that, all that was there before the boot ends in the normal way.  It stands still while the machine sleeps,
    as the workers do.  Where boots can't be told apart, it is the wall clock.

    To be called within a transaction that may write; a second call gives the same clock.
    """
    boot = _boot_id()
    if not boot:
        return time.time
    row = connection.execute("SELECT boot, ahead FROM clock").fetchone()
    if row is None or row[0] != boot:
        (last_beat,) = connection.execute("SELECT max(beat) FROM worker").fetchone()
        row = (boot, max(time.time(), last_beat or 0.0) - time.monotonic())
        connection.execute("DELETE FROM clock")
        connection.execute("INSERT INTO clock (boot, ahead) VALUES (?, ?)", row)
    ahead = float(row[1])
    return lambda: time.monotonic() + ahead


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
