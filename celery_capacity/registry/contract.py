"""The registry's contract: what every store does, and what a reservation is.

Every operation is one atomic step: no caller ever sees half of one.  All of them may raise
:exc:`~celery_capacity.errors.RegistryUnavailable` (nothing answered; it is not known whether the operation
was carried out) or :exc:`~celery_capacity.errors.RegistryError` (the store said no; nothing changed).
Implementations are thread-safe, fork-safe (a client is reopened in the child) and work under gevent.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

from ..errors import CapacityError, ReservationLost
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
    Refusal,
    Released,
    ReleaseOutcome,
    Slot,
    StoreCounter,
)

__all__ = ("Registry", "Reservation")

logger = logging.getLogger(__name__)


class Registry(ABC):
    """A capacity registry for one namespace.

    **Who may be chosen** (design, invariant 9; one derivation in each store, used by every operation that
    chooses or claims): the worker is registered, serves ``demand.queue``, has ``demand.task`` registered
    (if given), advertises exactly ``demand.node`` (if given), is not draining, its last heartbeat is
    younger than its ``lease_seconds``, its capacity is known, and ``held < capacity``; what it holds for the queue
    is below the queue's limit on this worker, if it has one; and the queue's limit over the fleet, if it has one, is
    above what is held for the queue.

    A reservation whose deadline has passed no longer counts and can no longer be committed, from that very
    instant, whether or not a sweep has run.
    """

    #: Prefix of everything that this registry stores.
    namespace: str
    #: The URL that it was opened with, without the password.
    url: str

    # -- a worker's life ---------------------------------------------------------------------------------

    @abstractmethod
    def register(self, advert: Advert, holding: Iterable[Slot] = ()) -> int:
        """Register a worker, or register it anew, and return its epoch: higher than any that the name had.

        Whatever an older registration of the name held is released in the same step; then ``holding``, the
        slots that the worker really holds now (it comes back after a lapse, or the store was lost), are put
        back as committed, under their old tokens and the new epoch, even past the capacity, since they run.
        The deadlines of what was released without having been committed are remembered, for the day when the
        worker is gone (:attr:`~celery_capacity.models.LapsedWorker.settled`).
        All or nothing: nothing is left behind by a call that raises.
        """

    @abstractmethod
    def heartbeat(self, worker: str, epoch: int, holding: Iterable[str] = (), since: float = 0.0) -> Pulse:
        """Renew the lease and compare ``holding`` (tokens) with what is recorded as committed.

        A committed token that is not in ``holding`` is released, if it was committed before ``since`` (the
        ``store_time`` of the previous pulse): one that was committed later may have been taken on after the
        caller listed what it holds.  Tokens that are not known come back as ``missing``.
        """

    @abstractmethod
    def restore(self, worker: str, epoch: int, slots: Iterable[Slot]) -> int:
        """Put back, as committed, slots that the worker holds and the registry lost; returns how many.

        They run, so where the capacity has no room for them each pushes out a reservation of the worker, those with
        the latest deadline first.  What was reserved is on its way and will ask anew; until its deadline the worker
        is not :attr:`~celery_capacity.models.LapsedWorker.settled`.
        A token that is known already, or an epoch that is not current, changes nothing.
        """

    @abstractmethod
    def resize(self, worker: str, epoch: int, capacity: int | None) -> bool:
        """Say how many slots the worker offers from now on; ``None`` = not known, so it is not chosen.

        Nothing is taken away when it is lowered below what is held.  False if the epoch is not current.

        :raises InvalidAdvertError: if ``capacity`` is not ``None`` or an integer from 0 up.
        """

    @abstractmethod
    def deregister(self, worker: str, epoch: int) -> bool:
        """The worker is gone: free all its slots and leave an entry for :meth:`expire` to hand out.

        The deadlines of those that are not committed are kept in the entry: until then the worker is not
        :attr:`~celery_capacity.models.LapsedWorker.settled`.

        False, and nothing changed, if the epoch is not current; so a second call is harmless.
        """

    @abstractmethod
    def drain(self, worker: str, reason: str, seconds: float | None = None) -> bool:
        """Make a worker ineligible until :meth:`admit`, until ``seconds`` have passed, or until it registers
        anew.  A second call replaces reason and expiry.  False if there is no such worker."""

    @abstractmethod
    def admit(self, worker: str) -> bool:
        """End a drain.  False if there is no such worker; harmless if it was not draining."""

    # -- slots -------------------------------------------------------------------------------------------

    @abstractmethod
    def select_and_reserve(self, demand: Demand) -> Reservation | Refusal:
        """Choose a worker and claim one of its slots, in one step.

        Rotation: the first eligible worker, in name order, after the last one chosen for the same (queue,
        task, node), else the first of all.  With ``demand.prefer_node`` it is as if the demand was pinned to that node,
        if a worker of it can be chosen now; its turns are those of the pinned ones then.  A refusal moves no cursor and
        creates none; it sets the mark of ``demand.park_lot`` if there is one and a live worker serves the queue.
        """

    def select_and_reserve_many(self, demands: Sequence[Demand]) -> list[Reservation | Refusal]:
        """As :meth:`select_and_reserve` for each, in order.  Each is a step of its own."""
        return [self.select_and_reserve(demand) for demand in demands]

    @abstractmethod
    def reserve_worker(self, worker: str, epoch: int, demand: Demand, *, commit: bool = False) -> Reservation | Refusal:
        """Claim a slot on one named worker, checking all of its eligibility now.  No cursor is moved.

        With ``commit`` the slot is committed from the start, and the reservation handed over: for a worker that
        claims for itself.
        """

    @abstractmethod
    def claim_parked(self, worker: str, epoch: int, lots: Sequence[Lot], *, marked_only: bool = True) -> Slot | Refusal:
        """Claim a committed slot on this worker, to fetch one parked task with.

        The first of ``lots`` whose mark is set (or simply the first, without ``marked_only``) and whose
        queue's limit has room; its name and mark are in the slot.  ``Reason.NOT_WAITING`` if none is marked.
        """

    @abstractmethod
    def commit(self, token: str, worker: str, epoch: int) -> CommitOutcome:
        """The worker takes a reservation over.  No count changes.  A second call answers ``ALREADY``."""

    @abstractmethod
    def release(
        self, token: str, epoch: int | None = None, *, then: Claim | None = None, emptied: Slot | None = None
    ) -> Released:
        """Give a slot back, once; again is a no-op that answers ``ALREADY``.

        ``epoch``, if given, is the epoch of the worker that speaks; one that does not hold the token
        changes nothing.  ``then``: turn the slot that was freed by this very call into a claim for a parked
        task, if one of the lots is marked (or without a mark: see :class:`~celery_capacity.models.Claim`),
        the worker is eligible but for being full, and it is not above its capacity.  ``emptied`` is the claim
        whose lot was found empty: its mark is cleared, unless somebody has parked since (another version) or the
        last parked message may still be on its way (parked less than the demand's ``ttl_seconds`` ago); and it is
        not claimed again by ``then``.
        """

    @abstractmethod
    def found_empty(self, lot: str, mark: int) -> bool:
        """A lot was found empty without a slot to fetch with: as ``emptied`` of :meth:`release`.

        ``mark`` is the version that was seen before the look.  True if the lot's mark is still set: somebody has
        parked since, or the last parked message may still be on its way.  Harmless twice.
        """

    @abstractmethod
    def cancel(self, token: str) -> ReleaseOutcome:
        """Give back a reservation that was not handed over (the producer's undo).

        A slot that a worker has committed stays as it is (``COMMITTED``): the message arrived after all.
        """

    # -- poison ------------------------------------------------------------------------------------------

    @abstractmethod
    def strike(self, key: str, ttl_seconds: float) -> int:
        """Count one more for ``key``, and return how many there are by now.

        The count is forgotten ``ttl_seconds`` after the last strike; at once with 0, which returns 0.
        """

    # -- limits, clean-up, views -------------------------------------------------------------------------

    @abstractmethod
    def set_limit(self, queue: str, limit: int | None) -> None:
        """At most ``limit`` slots are held for the queue over the fleet, whatever the workers declare; 0 = paused.

        ``None`` takes that back: what holds then is what the latest registration that serves the queue declares
        (:attr:`~celery_capacity.models.Advert.queue_limits`), or no limit.  Lowering takes nothing away.

        :raises InvalidDemandError: if ``limit`` is not ``None`` or an integer from 0 up.
        """

    @abstractmethod
    def expire(self, cleaner: str, lease_seconds: float = 30.0) -> tuple[LapsedWorker, ...]:
        """Free the slots of workers that have lapsed, and hand out the workers to clean up after.

        Each gone worker is handed to one ``cleaner`` at a time; it stays its until ``lease_seconds`` after
        its last call, then another may get it.  Called again by the same cleaner it is handed out again.
        A worker that registers again is no longer handed out.

        One is ``settled`` from the latest deadline on of the reservations that were uncommitted when it went, or
        when it registered anew before that, under whatever epoch.  Reservations that were committed, cancelled or
        released in time do not count.
        """

    @abstractmethod
    def forget(self, worker: str, epoch: int) -> bool:
        """The clean-up after this gone worker is finished.  False if it registered again; harmless twice."""

    @abstractmethod
    def census(self, queue: str, task: str | None = None, node: str | None = None) -> Census:
        """For every registered worker, in name order: could it be chosen for this now, and if not, why.

        Changes nothing that anyone can observe.
        """

    @abstractmethod
    def add_counters(self, counts: Mapping[str, int]) -> None:
        """Add to the totals of the namespace, which outlive the workers; all or nothing.

        A store adds to them by itself what only it sees (:class:`~celery_capacity.models.StoreCounter`), in the very
        step in which it happens.  A second call counts a second time; one without counts does nothing.

        :raises InvalidCounterError: a name is not a string of 1 to 64 characters, or a count is not an integer
            from 1 up; nothing was counted then.
        """

    @abstractmethod
    def overview(self) -> Overview:
        """All workers (gone ones that await clean-up as ``lapsed``), all queues and all counters, in name order."""

    @abstractmethod
    def close(self) -> None:
        """Close connections.  Harmless twice; the registry's state stays."""

    def report_stale(self, operation: str, epoch: int | None, *, worker: str = "", token: str = "") -> None:
        """Log that an older epoch was refused.  For stores; not to be called inside their atomic step."""
        logger.info(
            "%s of %s was refused: epoch %s is not the current one",
            operation,
            f"worker {worker}" if worker else f"slot {token}",
            epoch,
            extra={
                "action": StoreCounter.STALE_REFUSED.value,
                "operation": operation,
                "worker": worker,
                "token": token,
                "epoch": epoch,
                "namespace": self.namespace,
            },
        )

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Reservation:
    """A slot that was claimed and must now be handed over or given back.

    Use it as a context manager: leaving the block without :meth:`commit` or :meth:`transfer` gives the slot
    back.  If that fails, an error naming the worker and the token is logged, since the slot is lost until its
    deadline; the exception that left the block is never replaced.  A slot that is committed already
    (``reserve_worker(..., commit=True)``) counts as handed over: its worker holds it until
    :meth:`Registry.release`, and leaving the block does nothing.
    """

    __slots__ = ("_open", "_registry", "slot")

    def __init__(self, registry: Registry, slot: Slot) -> None:
        self._registry = registry
        self.slot = slot
        self._open = not slot.committed

    def commit(self) -> Slot:
        """Take the slot over for the worker it is on.  A second call is harmless.

        :raises ReservationLost: if it is no longer this caller's.
        """
        outcome = self._registry.commit(self.slot.token, self.slot.worker, self.slot.epoch)
        self._open = False
        if outcome not in (CommitOutcome.COMMITTED, CommitOutcome.ALREADY):
            raise ReservationLost(f"slot {self.slot.token} on {self.slot.worker}: {outcome.value}")
        return self.slot

    def transfer(self) -> Slot:
        """The slot is somebody else's to commit and release from here on (its token travels with the message)."""
        self._open = False
        return self.slot

    def release(self) -> None:
        """Give the slot back now, unless it was handed over.  Harmless twice."""
        if not self._open:
            return
        self._open = False
        try:
            self._registry.cancel(self.slot.token)
        except CapacityError as exc:
            logger.error(
                "could not give back slot %s on worker %s; it is lost until its deadline: %s",
                self.slot.token,
                self.slot.worker,
                exc,
                extra={"action": "release_failed", "token": self.slot.token, "worker": self.slot.worker},
            )

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Reservation {self.slot.token} on {self.slot.worker}{'' if self._open else ' (handed over)'}>"
