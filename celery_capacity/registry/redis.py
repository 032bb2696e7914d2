"""``redis://`` and its kin: a registry for a fleet of machines."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InvalidAdvertError
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
    check_capacity,
    check_counts,
    check_limit,
)
from . import _redis_views as views
from ._redis_client import Client, Script
from .contract import Registry, Reservation
from .urls import mask_url

__all__ = ("RedisRegistry",)

logger = logging.getLogger(__name__)

_SLOTS = ("_base", "_shares", "_slots", "_settle")
_CLAIMS = (*_SLOTS, "_claims")
_CHOICE = (*_CLAIMS, "_choice")
_MEMBERS = (*_CHOICE, "_queues", "_members")

_REGISTER = Script("register", *_MEMBERS)
_HEARTBEAT = Script("heartbeat", *_SLOTS)
_RESTORE = Script("restore", *_SLOTS)
_RESIZE = Script("resize", *_SLOTS)
_DRAIN = Script("drain", *_SLOTS)
_DEREGISTER = Script("deregister", *_MEMBERS)
_RESERVE = Script(
    "reserve",
    *_CHOICE,
    rarely=(
        "answer",
        "classes_of",
        "count_share",
        "drop_entry",
        "next_after",
        "refuse",
        "set_listed",
        "settle",
        "turns_of",
        "why_nobody",
    ),
)
_RESERVE_WORKER = Script("reserve_worker", *_CLAIMS)
_CLAIM_PARKED = Script("claim_parked", *_CLAIMS, "_lots")
_COMMIT = Script("commit", *_SLOTS)
_CANCEL = Script("cancel", *_SLOTS)
_RELEASE = Script("release", *_CLAIMS, "_lots", "_marks")
_SET_LIMIT = Script("set_limit", *_MEMBERS)
_EXPIRE = Script("expire", *_MEMBERS)
_FORGET = Script("forget", "_base")
_FOUND_EMPTY = Script("found_empty", "_marks")
_ADD_COUNTERS = Script("add_counters")
_STRIKE = Script("strike", "_base")
_CENSUS = Script("census", *_CLAIMS, "_views")
_OVERVIEW = Script("overview", *_SLOTS, "_views")


class RedisRegistry(Registry):
    """A registry in Redis 5 or newer, or Valkey, shared by everything that reaches it.

    Every operation is one Lua script and one round trip, on the server's clock.  A call whose answer did not come is
    not repeated: whether it was carried out is not known.

    :param url: ``redis://[user:password@]host:port/db``, ``rediss://``, ``valkey://``, ``valkeys://``;
        ``unix:///path/to/redis.sock?db=0`` or ``redis+socket://``;
        ``redis+sentinel://[user:password@]host:port,host2:port2/service/db`` with ``sentinel_username=`` and
        ``sentinel_password=`` in the query if the Sentinels want their own (``rediss+sentinel://`` for TLS to the master);
        ``redis+cluster://[user:password@]host:port,host2:port2``.  The query may give every connection option of the driver
        (``socket_timeout=5``, ``ssl_ca_certs=…``) but the size of its pool.
    :param timeout_seconds: how long to wait for a connection, and for each answer.
    :raises ConfigurationError: the URL or the timeout is wrong.  Nothing is connected before the first operation.
    """

    def __init__(self, url: str, namespace: str = "default", *, timeout_seconds: float = 2.0) -> None:
        self.url = mask_url(url)
        self.namespace = namespace
        self._client = Client(url, namespace, timeout_seconds)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url} namespace={self.namespace!r}>"

    def _run(self, script: Script, *arguments: Any) -> list[Any]:
        reply: list[Any] = self._client.run(script, *arguments)
        if reply and reply[0] == b"EXPIRED":
            _, expired, reply = reply
            for token, worker in zip(expired[::2], expired[1::2], strict=True):
                logger.warning(
                    "reservation %s on worker %s was not taken over before its deadline; the slot is free again",
                    token.decode(),
                    worker.decode(),
                    extra={
                        "action": "reservation_expired",
                        "token": token.decode(),
                        "worker": worker.decode(),
                        "namespace": self.namespace,
                    },
                )
        return reply

    # -- a worker's life ---------------------------------------------------------------------------------

    def register(self, advert: Advert, holding: Iterable[Slot] = ()) -> int:
        slots = tuple(holding)
        for field in ("worker", "node"):
            if "\0" in getattr(advert, field):
                raise InvalidAdvertError(field, getattr(advert, field), "a name without a NUL character")
        queues, tasks = tuple(dict.fromkeys(advert.queues)), sorted(advert.tasks)
        epoch, freed, older = self._run(
            _REGISTER,
            advert.worker,
            advert.node,
            _class_of(tasks),
            _number(advert.capacity),
            _micros(advert.lease_seconds),
            _micros(advert.lapse_seconds),
            advert.host,
            advert.pid,
            json.dumps(queues, ensure_ascii=False),
            _limits(advert.worker_queues),
            _limits(advert.queue_limits),
            len(tasks),
            *tasks,
            *_pairs((slot.token, slot.queue) for slot in slots),
        )
        if freed:
            self._report_freed(logging.INFO, advert.worker, int(older), freed, "it registers anew")
        return int(epoch)

    def heartbeat(self, worker: str, epoch: int, holding: Iterable[str] = (), since: float = 0.0) -> Pulse:
        standing, now, by, *more = self._run(_HEARTBEAT, worker, epoch, _micros(since), *dict.fromkeys(holding))
        if not more:
            if standing == b"REPLACED":
                self.report_stale("heartbeat", epoch, worker=worker)
            return Pulse(Standing[standing.decode()], store_time=now / 1e6, by=by.decode())
        draining, reason, healed, missing = more
        return Pulse(
            Standing[standing.decode()],
            healed=tuple(token.decode() for token in healed),
            missing=tuple(token.decode() for token in missing),
            store_time=now / 1e6,
            draining=reason.decode() if draining else None,
        )

    def restore(self, worker: str, epoch: int, slots: Iterable[Slot]) -> int:
        (restored,) = self._run(_RESTORE, worker, epoch, *_pairs((slot.token, slot.queue) for slot in slots))
        return int(restored)

    def resize(self, worker: str, epoch: int, capacity: int | None) -> bool:
        check_capacity(capacity)
        return self._run(_RESIZE, worker, epoch, _number(capacity)) == [1]

    def deregister(self, worker: str, epoch: int) -> bool:
        (outcome,) = self._run(_DEREGISTER, worker, epoch)
        if outcome < 0:
            self.report_stale("deregistration", epoch, worker=worker)
        return bool(outcome > 0)

    def drain(self, worker: str, reason: str, seconds: float | None = None) -> bool:
        return self._run(_DRAIN, worker, 1, reason, "" if seconds is None else _micros(seconds)) == [1]

    def admit(self, worker: str) -> bool:
        return self._run(_DRAIN, worker, 0, "", "") == [1]

    # -- slots -------------------------------------------------------------------------------------------

    def select_and_reserve(self, demand: Demand) -> Reservation | Refusal:
        nonce = self._client.nonce()
        task, node = demand.task, demand.node
        reply = self._run(
            _RESERVE,
            demand.queue,
            "" if task is None else ":" + task,
            "" if node is None else ":" + node,
            _micros(demand.ttl_seconds),
            nonce,
            demand.park_lot or "",
            demand.prefer_node or "",
        )
        if not reply[0]:
            return _refusal(reply)
        name, number, _, host = reply[0].decode().split("\0", 3)
        return Reservation(self, _reserved(name, number, host, reply[1], nonce, demand, False))

    def reserve_worker(self, worker: str, epoch: int, demand: Demand, *, commit: bool = False) -> Reservation | Refusal:
        nonce = self._client.nonce()
        reply = self._run(
            _RESERVE_WORKER,
            worker,
            epoch,
            demand.queue,
            _optional(demand.task),
            _optional(demand.node),
            _micros(demand.ttl_seconds),
            nonce,
            demand.park_lot or "",
            int(commit),
        )
        if not reply[0]:
            return _refusal(reply)
        _, name, number, node, deadline = reply
        return Reservation(
            self, _reserved(name.decode(), number.decode(), node.decode(), deadline, nonce, demand, commit)
        )

    def claim_parked(self, worker: str, epoch: int, lots: Sequence[Lot], *, marked_only: bool = True) -> Slot | Refusal:
        nonce = self._client.nonce()
        reply = self._run(_CLAIM_PARKED, worker, epoch, nonce, int(marked_only), *_flat(lots))
        return _claim(reply, nonce) if reply[0] else _refusal(reply)

    def commit(self, token: str, worker: str, epoch: int) -> CommitOutcome:
        outcome = _COMMITS[self._run(_COMMIT, token, worker, epoch)[0]]
        if outcome is CommitOutcome.STALE:
            self.report_stale("commit", epoch, worker=worker, token=token)
        return outcome

    def release(
        self, token: str, epoch: int | None = None, *, then: Claim | None = None, emptied: Slot | None = None
    ) -> Released:
        nonce = self._client.nonce() if then is not None else ""
        lot = emptied.lot if emptied is not None else None
        outcome, *more = self._run(
            _RELEASE,
            token,
            _number(epoch),
            then.worker if then is not None else "",
            then.epoch if then is not None else "",
            int(then.marked_only) if then is not None else "",
            nonce,
            lot or "",
            emptied.mark if emptied is not None else "",
            *(_flat(then.lots) if then is not None else ()),
        )
        if outcome == b"STALE":
            self.report_stale("release", epoch, token=token)
        waiting, claim = (more + [None])[:2] if more else (0, None)
        return Released(_RELEASES[outcome], _claim(claim, nonce) if claim else None, bool(waiting))

    def found_empty(self, lot: str, mark: int) -> bool:
        return self._run(_FOUND_EMPTY, lot, mark) == [1]

    def cancel(self, token: str) -> ReleaseOutcome:
        return _RELEASES[self._run(_CANCEL, token)[0]]

    def strike(self, key: str, ttl_seconds: float) -> int:
        return int(self._run(_STRIKE, key, max(0, _micros(ttl_seconds)))[0])

    # -- limits, clean-up, views -------------------------------------------------------------------------

    def set_limit(self, queue: str, limit: int | None) -> None:
        check_limit(limit)
        self._run(_SET_LIMIT, queue, _number(limit))

    def expire(self, cleaner: str, lease_seconds: float = 30.0) -> tuple[LapsedWorker, ...]:
        lapsed, gone = self._run(_EXPIRE, cleaner, _micros(lease_seconds))
        for name, epoch, freed in _triples(lapsed):
            if freed:
                self._report_freed(logging.WARNING, name.decode(), int(epoch), freed, "it has lapsed")
        handed_out = [LapsedWorker(name.decode(), int(epoch), bool(settled)) for name, epoch, settled in _triples(gone)]
        return tuple(sorted(handed_out, key=lambda worker: worker.name))

    def forget(self, worker: str, epoch: int) -> bool:
        return self._run(_FORGET, worker, epoch) == [1]

    def census(self, queue: str, task: str | None = None, node: str | None = None) -> Census:
        return views.census(self._run(_CENSUS, queue, _optional(task), _optional(node)), queue, task, node)

    def add_counters(self, counts: Mapping[str, int]) -> None:
        check_counts(counts)
        if counts:
            self._run(_ADD_COUNTERS, *(value for count in counts.items() for value in count))

    def overview(self) -> Overview:
        return views.overview(self._run(_OVERVIEW), self.namespace)

    def close(self) -> None:
        self._client.close()

    def _report_freed(self, level: int, worker: str, epoch: int, freed: int, why: str) -> None:
        logger.log(
            level,
            "the %d slots that worker %s (epoch %d) held are released: %s",
            freed,
            worker,
            epoch,
            why,
            extra={"action": "slots_freed", "worker": worker, "epoch": epoch, "namespace": self.namespace},
        )


_COMMITS = {outcome.name.encode(): outcome for outcome in CommitOutcome}
_RELEASES = {outcome.name.encode(): outcome for outcome in ReleaseOutcome}


def _class_of(tasks: list[str]) -> str:
    """The capability class: the same for all workers that have the same tasks registered."""
    return hashlib.sha256("".join(f"{len(task)}:{task}" for task in tasks).encode()).hexdigest()[:16]


def _micros(seconds: float) -> int:
    """Instants and durations on the server's clock.  What is longer than a century is as good as for ever."""
    return round(min(seconds, _CENTURY) * 1e6)


_CENTURY = 3.2e9


def _number(value: int | None) -> int | str:
    return "" if value is None else value


def _limits(limits: Mapping[str, int]) -> str:
    return json.dumps(dict(limits), ensure_ascii=False) if limits else ""


def _optional(name: str | None) -> str:
    return "" if name is None else ":" + name


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [value for pair in pairs for value in pair]


def _flat(lots: Iterable[Lot]) -> list[str | int]:
    return [value for lot in lots for value in (lot.name, lot.queue, lot.seen)]


def _triples(flat: list[Any]) -> Iterable[tuple[Any, Any, Any]]:
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def _reserved(name: str, epoch: str, node: str, deadline: int, nonce: str, demand: Demand, commit: bool) -> Slot:
    return Slot(
        f"{nonce}.{epoch}.{name}",
        name,
        int(epoch),
        demand.queue,
        node,
        demand.task,
        demand.task_id,
        deadline / 1e6,
        commit,
    )


def _claim(reply: list[Any], nonce: str) -> Slot:
    _, name, epoch, node, now, queue, lot, mark = reply
    worker, number = name.decode(), epoch.decode()
    return Slot(
        f"{nonce}.{number}.{worker}",
        worker,
        int(number),
        queue.decode(),
        node.decode(),
        deadline=now / 1e6,
        committed=True,
        lot=lot.decode(),
        mark=mark,
    )


def _refusal(reply: list[Any]) -> Refusal:
    _, reason, served, detail = reply
    return Refusal(Reason[reason.decode()], bool(served), detail.decode())
