"""What a registry's SQLite file looks like.

``slot`` is the truth: one row for each slot that is held.  ``worker.held``, ``queue.held``, ``seat.held`` and ``seat.open``
are derived from it by triggers, inside the very statement that changes it, so that no code path can forget them.

Instants are seconds on the store's clock, durations are seconds.
"""

from __future__ import annotations

import sqlite3

from ..errors import RegistryError

__all__ = ("APPLICATION_ID", "SCHEMA", "VERSION", "ensure_schema")

#: Tells our files from other people's (PRAGMA application_id); it reads "cCap".
APPLICATION_ID = 0x63436170
#: PRAGMA user_version.  Raise it with every change of the schema that an older release would not understand.
VERSION = 4

SCHEMA = (
    # How far the store's clock is ahead of the machine's monotonic one since this boot.  One row at most.
    "CREATE TABLE clock (boot TEXT NOT NULL, ahead REAL NOT NULL)",
    # epoch and mark: the last ones given out.
    """
    CREATE TABLE namespace (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        epoch INTEGER NOT NULL DEFAULT 0,
        mark INTEGER NOT NULL DEFAULT 0
    )
    """,
    # A capability class: one set of task names, shared by all workers of one build, whatever their namespace.
    "CREATE TABLE class (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE)",
    "CREATE TABLE class_task (class INTEGER NOT NULL, task TEXT NOT NULL, PRIMARY KEY (class, task)) WITHOUT ROWID",
    # beat: the last heartbeat.  late: found late by a choice, so out of the open seats until the next heartbeat.
    # drain: the reason, NULL = not draining.  inherited_until: until then a reservation of an older registration
    # may be on its way to it.  queues: as JSON, in order.
    """
    CREATE TABLE worker (
        id INTEGER PRIMARY KEY,
        ns INTEGER NOT NULL,
        name TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        node TEXT NOT NULL,
        class INTEGER NOT NULL,
        capacity INTEGER,
        held INTEGER NOT NULL DEFAULT 0,
        late INTEGER NOT NULL DEFAULT 0,
        drain TEXT,
        drain_until REAL,
        beat REAL NOT NULL,
        inherited_until REAL NOT NULL,
        lease_seconds REAL NOT NULL,
        lapse_seconds REAL NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        queues TEXT NOT NULL,
        open INTEGER GENERATED ALWAYS AS (late = 0 AND drain IS NULL AND capacity IS NOT NULL AND held < capacity),
        UNIQUE (ns, name)
    )
    """,
    "CREATE INDEX worker_class ON worker (class)",
    # Drains that end by themselves.  Usually empty, so that looking whether one is due costs nothing.
    "CREATE INDEX worker_drained ON worker (ns, drain_until) WHERE drain_until IS NOT NULL",
    # One row for each queue that a worker serves.  maximum: the limit of the queue on this worker, NULL = none; held is
    # only kept where there is one.  open: worker.open, and room below the maximum.
    """
    CREATE TABLE seat (
        worker INTEGER NOT NULL,
        queue TEXT NOT NULL,
        ns INTEGER NOT NULL,
        class INTEGER NOT NULL,
        node TEXT NOT NULL,
        name TEXT NOT NULL,
        open INTEGER NOT NULL,
        maximum INTEGER,
        held INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (worker, queue)
    ) WITHOUT ROWID
    """,
    # These two are why a choice costs the same in every fleet: the next free worker after the cursor is one step down
    # an index that holds nobody else.
    "CREATE INDEX seat_open ON seat (ns, queue, class, name) WHERE open = 1",
    "CREATE INDEX seat_open_on_node ON seat (ns, queue, node, class, name) WHERE open = 1",
    # For refusals, and for the pruning of cursors.
    "CREATE INDEX seat_served ON seat (ns, queue, class, node)",
    # The classes that serve a queue, so that a choice need not look for them among the seats.
    """
    CREATE TABLE pool (
        ns INTEGER NOT NULL,
        queue TEXT NOT NULL,
        class INTEGER NOT NULL,
        workers INTEGER NOT NULL,
        PRIMARY KEY (ns, queue, class)
    ) WITHOUT ROWID
    """,
    # The last worker chosen.  task and node are '' for any.
    """
    CREATE TABLE cursor (
        ns INTEGER NOT NULL,
        queue TEXT NOT NULL,
        task TEXT NOT NULL,
        node TEXT NOT NULL,
        name TEXT NOT NULL,
        PRIMARY KEY (ns, queue, task, node)
    ) WITHOUT ROWID
    """,
    # Limits (NULL = none) and what is held for the queue; a row only while there is something to say.  ordered: set by
    # hand; declared: by the latest registration that serves the queue.
    """
    CREATE TABLE queue (
        ns INTEGER NOT NULL,
        name TEXT NOT NULL,
        ordered INTEGER,
        declared INTEGER,
        maximum INTEGER GENERATED ALWAYS AS (coalesce(ordered, declared)),
        held INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (ns, name)
    ) WITHOUT ROWID
    """,
    # A reservation has a deadline; a committed slot has the instant it was committed at, and no deadline.
    """
    CREATE TABLE slot (
        ns INTEGER NOT NULL,
        token TEXT NOT NULL,
        worker INTEGER NOT NULL,
        queue TEXT NOT NULL,
        deadline REAL,
        committed_at REAL,
        PRIMARY KEY (ns, token),
        CHECK ((deadline IS NULL) <> (committed_at IS NULL))
    ) WITHOUT ROWID
    """,
    "CREATE INDEX slot_worker ON slot (worker)",
    "CREATE INDEX slot_deadline ON slot (ns, deadline) WHERE deadline IS NOT NULL",
    # Somebody has parked a task in this lot.  version: see namespace.mark.  empty: it was found empty since, though a
    # message may still be on its way.
    """
    CREATE TABLE mark (
        ns INTEGER NOT NULL,
        lot TEXT NOT NULL,
        queue TEXT NOT NULL,
        version INTEGER NOT NULL,
        parked_until REAL NOT NULL,
        empty INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (ns, lot)
    ) WITHOUT ROWID
    """,
    # Workers that are gone and wait to be cleaned up after, with what a status shows of them.
    """
    CREATE TABLE gone (
        ns INTEGER NOT NULL,
        name TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        settled_at REAL NOT NULL,
        cleaner TEXT,
        cleaner_until REAL,
        node TEXT NOT NULL,
        capacity INTEGER,
        beat REAL NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        queues TEXT NOT NULL,
        PRIMARY KEY (ns, name)
    ) WITHOUT ROWID
    """,
    # How often something has happened in the namespace: what workers tell, and what only the store sees.
    """
    CREATE TABLE counter (
        ns INTEGER NOT NULL,
        name TEXT NOT NULL,
        total INTEGER NOT NULL,
        PRIMARY KEY (ns, name)
    ) WITHOUT ROWID
    """,
    # Tasks that were begun and never ended: how often, and until when that is remembered.
    """
    CREATE TABLE strike (
        ns INTEGER NOT NULL,
        key TEXT NOT NULL,
        count INTEGER NOT NULL,
        until REAL NOT NULL,
        PRIMARY KEY (ns, key)
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER slot_taken AFTER INSERT ON slot BEGIN
        UPDATE worker SET held = held + 1 WHERE id = new.worker;
        UPDATE seat SET held = held + 1, open = open AND held + 1 < maximum
         WHERE worker = new.worker AND queue = new.queue AND maximum IS NOT NULL;
        INSERT INTO queue (ns, name, held) VALUES (new.ns, new.queue, 1)
            ON CONFLICT (ns, name) DO UPDATE SET held = held + 1;
    END
    """,
    """
    CREATE TRIGGER slot_freed AFTER DELETE ON slot BEGIN
        UPDATE seat SET held = held - 1 WHERE worker = old.worker AND queue = old.queue AND maximum IS NOT NULL;
        UPDATE worker SET held = held - 1 WHERE id = old.worker;
        UPDATE seat SET open = held < maximum AND (SELECT open FROM worker WHERE id = old.worker)
         WHERE worker = old.worker AND queue = old.queue AND maximum IS NOT NULL;
        UPDATE queue SET held = held - 1 WHERE ns = old.ns AND name = old.queue;
    END
    """,
    """
    CREATE TRIGGER queue_idle AFTER UPDATE ON queue WHEN new.held = 0 AND new.maximum IS NULL BEGIN
        DELETE FROM queue WHERE ns = new.ns AND name = new.name;
    END
    """,
    """
    CREATE TRIGGER worker_opens AFTER UPDATE OF held, late, drain, capacity ON worker WHEN new.open <> old.open BEGIN
        UPDATE seat SET open = new.open AND (maximum IS NULL OR held < maximum) WHERE worker = new.id;
    END
    """,
    """
    CREATE TRIGGER seat_added AFTER INSERT ON seat BEGIN
        INSERT INTO pool (ns, queue, class, workers) VALUES (new.ns, new.queue, new.class, 1)
            ON CONFLICT (ns, queue, class) DO UPDATE SET workers = workers + 1;
    END
    """,
    """
    CREATE TRIGGER seat_removed AFTER DELETE ON seat BEGIN
        UPDATE pool SET workers = workers - 1 WHERE ns = old.ns AND queue = old.queue AND class = old.class;
        DELETE FROM pool WHERE ns = old.ns AND queue = old.queue AND class = old.class AND workers = 0;
        UPDATE queue SET declared = NULL
         WHERE ns = old.ns AND name = old.queue AND declared IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM pool WHERE ns = old.ns AND queue = old.queue);
    END
    """,
)


def ensure_schema(connection: sqlite3.Connection, path: str) -> None:
    """Make the tables of a file that has none yet; harmless on one that has them.

    To be called within a transaction that may write.

    :raises RegistryError: the file at ``path`` is of another release of this package, or of another program.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application == APPLICATION_ID:
        if version != VERSION:
            raise RegistryError(
                f"{path} has schema version {version}, of {'a newer' if version > VERSION else 'an older'} "
                f"release of celery_capacity; this one knows version {VERSION}: use the same release "
                f"everywhere on this machine, or another file"
            )
        return
    if connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise RegistryError(f"{path} is the database of something else; give the registry a file of its own")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
