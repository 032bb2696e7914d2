"""``sqlite:///path/to/file.db``: a registry for all processes of one machine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import unquote

from ..errors import ConfigurationError
from ..models import (
    Advert,
    Census,
    Claim,
    CommitOutcome,
    Demand,
    LapsedWorker,
    Lot,
    Overview,
    Pulse,
    Reason,
    Refusal,
    Released,
    ReleaseOutcome,
    Slot,
    Standing,
    StoreCounter,
    check_capacity,
    check_counts,
    check_limit,
)
from . import _sqlite_rows as rows
from . import _sqlite_views as views
from ._sqlite_choice import choose, condition, is_draining, is_served, why_nobody, why_not
from ._sqlite_file import DatabaseFile, Transaction
from .contract import Registry, Reservation
from .urls import mask_url

__all__ = ("SQLiteRegistry",)

_BEAT = "UPDATE worker SET beat = :now, late = 0 WHERE id = :id"
_COMMITTED = """
    SELECT token, committed_at FROM slot WHERE worker = :id AND committed_at IS NOT NULL ORDER BY committed_at, token
"""
_RESIZE = "UPDATE worker SET capacity = :capacity WHERE ns = :ns AND name = :name AND epoch = :epoch"
_DRAIN = "UPDATE worker SET drain = :reason, drain_until = :until WHERE ns = :ns AND name = :name"
_COMMIT = "UPDATE slot SET committed_at = :now, deadline = NULL WHERE ns = :ns AND token = :token"
_STRIKE = """
    INSERT INTO strike (ns, key, count, until) VALUES (:ns, :key, 1, :until)
        ON CONFLICT (ns, key) DO UPDATE SET count = count + 1, until = excluded.until
"""
_MARK = "SELECT version FROM mark WHERE ns = :ns AND lot = :lot"
_SET_LIMIT = """
    INSERT INTO queue (ns, name, ordered) VALUES (:ns, :queue, :limit)
        ON CONFLICT (ns, name) DO UPDATE SET ordered = excluded.ordered
"""
_DROP_IDLE_QUEUE = "DELETE FROM queue WHERE ns = :ns AND name = :queue AND held = 0 AND maximum IS NULL"
_LAPSED = "SELECT name FROM worker WHERE ns = :ns AND :now - beat >= lapse_seconds ORDER BY name"
_HAND_OUT = """
    UPDATE gone SET cleaner = :cleaner, cleaner_until = :until
     WHERE ns = :ns AND (cleaner IS NULL OR cleaner = :cleaner OR cleaner_until <= :now)
"""
_HANDED_OUT = "SELECT name, epoch, settled_at <= :now FROM gone WHERE ns = :ns AND cleaner = :cleaner ORDER BY name"
_FORGET = "DELETE FROM gone WHERE ns = :ns AND name = :name AND epoch = :epoch"


class SQLiteRegistry(Registry):
    """A registry in an SQLite file, shared by all processes of this machine that open it.

    The file is created when it is first used, on a local disk.  Beside it are SQLite's own ``-wal`` and ``-shm``, and
    ``.lock`` and ``.lock-waiting``, with which the processes take turns.  If it is deleted while it is in use, everybody
    goes on with a new, empty one, and the workers register again.

    :param url: ``sqlite:///relative/path.db`` or ``sqlite:////absolute/path.db``.
    :param timeout_seconds: how long an operation may wait for its turn.
    :param clock: the store's clock, in seconds, never going back; given by tests that move time themselves.
    :raises ConfigurationError: the URL names no file, or this Python's SQLite is too old.
    """

    def __init__(
        self,
        url: str,
        namespace: str = "default",
        *,
        timeout_seconds: float = 5.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.url = mask_url(url)
        self.namespace = namespace
        self._file = DatabaseFile(_path_of(url), namespace, timeout_seconds, clock)

    # -- a worker's life ---------------------------------------------------------------------------------

    def register(self, advert: Advert, holding: Iterable[Slot] = ()) -> int:
        slots = tuple(holding)
        with self._file.write() as tx:
            rows.catch_up(tx)
            older = rows.find_worker(tx, advert.worker)
            inherited_until = rows.take_out_gone(tx, advert.worker)
            if older is not None:
                _report_freed(tx, logging.INFO, older, "it registers anew")
                inherited_until = rows.settled_at(tx, older)
                rows.withdraw(tx, older)
            epoch = rows.next_epoch(tx, time.time())
            worker = rows.enroll(tx, advert, epoch, inherited_until)
            for slot in slots:
                rows.put_back(tx, worker, slot)
            if older is not None:
                rows.prune_cursors(tx, older.queues)
            return epoch

    def heartbeat(self, worker: str, epoch: int, holding: Iterable[str] = (), since: float = 0.0) -> Pulse:
        tokens = dict.fromkeys(holding)
        with self._file.write() as tx:
            current = rows.find_worker(tx, worker)
            if current is None:
                return Pulse(Standing.GONE, store_time=tx.now)
            if current.epoch != epoch:
                self._stale(tx, "heartbeat", epoch, worker=worker)
                by = f"host={current.host} pid={current.pid}"
                return Pulse(Standing.REPLACED, store_time=tx.now, by=by)
            tx.execute(_BEAT, {"id": current.id, "now": tx.now})
            committed = dict(tx.execute(_COMMITTED, {"id": current.id}).fetchall())
            leaked = [token for token, at in committed.items() if token not in tokens and at < since]
            for token in leaked:
                rows.free(tx, token)
            return Pulse(
                Standing.CURRENT,
                healed=tuple(leaked),
                missing=tuple(t for t in tokens if t not in committed and rows.find_slot(tx, t) is None),
                store_time=tx.now,
                draining=current.drain if is_draining(current, tx.now) else None,
            )

    def restore(self, worker: str, epoch: int, slots: Iterable[Slot]) -> int:
        slots = tuple(slots)
        with self._file.write() as tx:
            rows.catch_up(tx)
            current = rows.find_worker(tx, worker)
            if current is None or current.epoch != epoch:
                return 0
            restored = sum(rows.put_back(tx, current.id, slot) for slot in slots)
            rows.make_room(tx, current.id, restored)
            return restored

    def resize(self, worker: str, epoch: int, capacity: int | None) -> bool:
        check_capacity(capacity)
        with self._file.write() as tx:
            asked = {"ns": tx.ns, "name": worker, "epoch": epoch, "capacity": capacity}
            return tx.execute(_RESIZE, asked).rowcount > 0

    def deregister(self, worker: str, epoch: int) -> bool:
        with self._file.write() as tx:
            rows.catch_up(tx)
            current = rows.find_worker(tx, worker)
            if current is None:
                return False
            if current.epoch != epoch:
                self._stale(tx, "deregistration", epoch, worker=worker)
                return False
            rows.bury(tx, current)
            return True

    def drain(self, worker: str, reason: str, seconds: float | None = None) -> bool:
        return self._set_drain(worker, reason, seconds)

    def admit(self, worker: str) -> bool:
        return self._set_drain(worker, None, None)

    def _set_drain(self, worker: str, reason: str | None, seconds: float | None) -> bool:
        with self._file.write() as tx:
            until = None if seconds is None else tx.now + seconds
            return tx.execute(_DRAIN, {"ns": tx.ns, "name": worker, "reason": reason, "until": until}).rowcount > 0

    # -- slots -------------------------------------------------------------------------------------------

    def select_and_reserve(self, demand: Demand) -> Reservation | Refusal:
        with self._file.write() as tx:
            worker = None
            if demand.prefer_node is not None and demand.node is None:
                worker = choose(tx, replace(demand, node=demand.prefer_node))
            worker = worker or choose(tx, demand)
            if worker is not None:
                return Reservation(self, rows.take(tx, worker, demand.queue, demand, commit=False))
            if not is_served(tx, demand.queue):
                return Refusal(Reason.NO_WORKER, served=False)
            return self._refuse(tx, demand, why_nobody(tx, demand))

    def reserve_worker(self, worker: str, epoch: int, demand: Demand, *, commit: bool = False) -> Reservation | Refusal:
        with self._file.write() as tx:
            rows.catch_up(tx)
            current = rows.find_worker(tx, worker)
            if current is None:
                return self._refuse(tx, demand, Reason.NO_WORKER)
            if current.epoch != epoch:
                return self._refuse(tx, demand, Reason.REPLACED)
            reason = why_not(tx, current, demand.queue, demand.task, demand.node)
            if reason is not None:
                return self._refuse(tx, demand, reason, current.drain or "")
            return Reservation(self, rows.take(tx, current, demand.queue, demand, commit=commit))

    def _refuse(self, tx: Transaction, demand: Demand, reason: Reason, detail: str = "") -> Refusal:
        served = is_served(tx, demand.queue)
        if served and demand.park_lot is not None:
            rows.park(tx, demand.park_lot, demand)
        return Refusal(reason, served, detail)

    def claim_parked(self, worker: str, epoch: int, lots: Sequence[Lot], *, marked_only: bool = True) -> Slot | Refusal:
        with self._file.write() as tx:
            rows.catch_up(tx)
            current = rows.find_worker(tx, worker)
            if current is None:
                return Refusal(Reason.NO_WORKER, served=False)
            if current.epoch != epoch:
                return Refusal(Reason.REPLACED)
            return self._claim_from(tx, current, lots, marked_only)

    def _claim_from(
        self, tx: Transaction, worker: rows.WorkerRow, lots: Iterable[Lot], marked_only: bool
    ) -> Slot | Refusal:
        unfit = condition(worker, tx.now)
        if unfit is not None:
            return Refusal(unfit, detail=worker.drain or "")
        refusal = Refusal(Reason.NOT_WAITING)
        for lot in lots:
            mark = tx.one(_MARK, {"ns": tx.ns, "lot": lot.name})
            counts = lot.seen == Lot.SURE or (mark is not None and mark[0] != lot.seen)
            if marked_only and not counts:
                continue
            reason = why_not(tx, worker, lot.queue)
            if reason is None:
                return rows.take(tx, worker, lot.queue, lot=lot.name, mark=mark[0] if mark else 0)
            if refusal.reason is Reason.NOT_WAITING:
                refusal = Refusal(reason)
        return refusal

    def commit(self, token: str, worker: str, epoch: int) -> CommitOutcome:
        with self._file.write() as tx:
            current = rows.find_worker(tx, worker)
            slot = rows.find_slot(tx, token)
            stale = current is not None and current.epoch != epoch
            if slot is None and not stale:
                return CommitOutcome.GONE
            if stale or slot is None or current is None or slot.worker != current.id:
                self._stale(tx, "commit", epoch, worker=worker, token=token)
                return CommitOutcome.STALE
            if slot.committed_at is not None:
                return CommitOutcome.ALREADY
            tx.execute(_COMMIT, {"ns": tx.ns, "token": token, "now": tx.now})
            return CommitOutcome.COMMITTED

    def release(
        self, token: str, epoch: int | None = None, *, then: Claim | None = None, emptied: Slot | None = None
    ) -> Released:
        with self._file.write() as tx:
            slot = rows.find_slot(tx, token)
            if slot is None:
                return Released(ReleaseOutcome.ALREADY)
            if epoch is not None and slot.epoch != epoch:
                self._stale(tx, "release", epoch, token=token)
                return Released(ReleaseOutcome.STALE)
            rows.free(tx, token)
            lot = emptied.lot if emptied is not None else None
            waiting = False
            if emptied is not None and lot is not None:
                rows.clear_mark(tx, lot, emptied.mark)
                waiting = tx.one(_MARK, {"ns": tx.ns, "lot": lot}) is not None
            claim = None
            if then is not None and then.epoch == slot.epoch:
                claim = self._claim_freed(tx, slot, then, lot)
            return Released(ReleaseOutcome.RELEASED, claim, waiting)

    def found_empty(self, lot: str, mark: int) -> bool:
        with self._file.write() as tx:
            rows.clear_mark(tx, lot, mark)
            return tx.one(_MARK, {"ns": tx.ns, "lot": lot}) is not None

    def strike(self, key: str, ttl_seconds: float) -> int:
        with self._file.write() as tx:
            tx.execute("DELETE FROM strike WHERE ns = :ns AND until <= :now", {"ns": tx.ns, "now": tx.now})
            asked = {"ns": tx.ns, "key": key, "until": tx.now + ttl_seconds}
            if ttl_seconds <= 0:
                tx.execute("DELETE FROM strike WHERE ns = :ns AND key = :key", {"ns": tx.ns, "key": key})
                return 0
            tx.execute(_STRIKE, asked)
            row = tx.one("SELECT count FROM strike WHERE ns = :ns AND key = :key", {"ns": tx.ns, "key": key})
            assert row is not None
            return int(row[0])

    def _claim_freed(self, tx: Transaction, slot: rows.SlotRow, then: Claim, emptied: str | None) -> Slot | None:
        rows.catch_up(tx)
        worker = rows.find_worker(tx, then.worker)
        if worker is None or worker.id != slot.worker:
            return None
        lots = [lot for lot in then.lots if lot.name != emptied]
        answer = self._claim_from(tx, worker, lots, marked_only=True)
        if isinstance(answer, Refusal) and not then.marked_only:
            answer = self._claim_from(tx, worker, lots, marked_only=False)
        return answer if isinstance(answer, Slot) else None

    def cancel(self, token: str) -> ReleaseOutcome:
        with self._file.write() as tx:
            slot = rows.find_slot(tx, token)
            if slot is None:
                return ReleaseOutcome.ALREADY
            if slot.committed_at is not None:
                return ReleaseOutcome.COMMITTED
            rows.free(tx, token)
            return ReleaseOutcome.RELEASED

    def _stale(self, tx: Transaction, operation: str, epoch: int, **whose: str) -> None:
        rows.count(tx, StoreCounter.STALE_REFUSED.value)
        tx.reports.append(lambda: self.report_stale(operation, epoch, **whose))

    # -- limits, clean-up, views -------------------------------------------------------------------------

    def set_limit(self, queue: str, limit: int | None) -> None:
        check_limit(limit)
        with self._file.write() as tx:
            asked = {"ns": tx.ns, "queue": queue, "limit": limit}
            tx.execute(_SET_LIMIT, asked)
            tx.execute(_DROP_IDLE_QUEUE, asked)

    def expire(self, cleaner: str, lease_seconds: float = 30.0) -> tuple[LapsedWorker, ...]:
        with self._file.write() as tx:
            rows.catch_up(tx)
            asked = {"ns": tx.ns, "now": tx.now, "cleaner": cleaner, "until": tx.now + lease_seconds}
            for (name,) in tx.execute(_LAPSED, asked).fetchall():
                worker = rows.find_worker(tx, name)
                if worker is not None:
                    _report_freed(tx, logging.WARNING, worker, "it has lapsed")
                    rows.count(tx, StoreCounter.WORKERS_LAPSED.value)
                    if worker.held:
                        rows.count(tx, StoreCounter.SLOTS_FREED_BY_LAPSE.value, worker.held)
                    rows.bury(tx, worker)
            tx.execute(_HAND_OUT, asked)
            return tuple(
                LapsedWorker(name, epoch, settled=bool(settled))
                for name, epoch, settled in tx.execute(_HANDED_OUT, asked)
            )

    def forget(self, worker: str, epoch: int) -> bool:
        with self._file.write() as tx:
            return tx.execute(_FORGET, {"ns": tx.ns, "name": worker, "epoch": epoch}).rowcount > 0

    def census(self, queue: str, task: str | None = None, node: str | None = None) -> Census:
        with self._file.read() as tx:
            return views.census(tx, queue, task, node)

    def add_counters(self, counts: Mapping[str, int]) -> None:
        check_counts(counts)
        if not counts:
            return
        with self._file.write() as tx:
            for name, n in counts.items():
                rows.count(tx, name, n)

    def overview(self) -> Overview:
        with self._file.read() as tx:
            return views.overview(tx, self.namespace)

    def close(self) -> None:
        self._file.close()


def _report_freed(tx: Transaction, level: int, worker: rows.WorkerRow, why: str) -> None:
    if worker.held:
        tx.report(
            level,
            "the %d slots that worker %s (epoch %d) held are released: %s",
            worker.held,
            worker.name,
            worker.epoch,
            why,
            action="slots_freed",
            worker=worker.name,
            epoch=worker.epoch,
        )


def _path_of(url: str) -> str:
    """The absolute path, so that a later change of directory (daemons do that) leads nowhere else."""
    _, _, rest = url.partition("://")
    path = unquote(rest[1:])
    if not rest.strip("/") or path == ":memory:" or rest == ":memory:":
        expected = "a file: sqlite:///relative/path.db or sqlite:////absolute/path.db; for one process without a file, memory://"
        raise ConfigurationError("capacity_registry", mask_url(url), expected)
    if not rest.startswith("/"):
        expected = f"three slashes before a relative path: sqlite:///{rest}, or four before an absolute one"
        raise ConfigurationError("capacity_registry", mask_url(url), expected)
    if "?" in rest or "\0" in path:
        raise ConfigurationError("capacity_registry", mask_url(url), "a path alone, without a query")
    return os.path.abspath(path)
