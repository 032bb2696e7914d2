"""What this worker holds: every slot, with the message and the request that it is held for.

The ledger is the worker's truth.  The registry is compared with it at every heartbeat.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..models import Slot

__all__ = ("Entry", "Ledger", "Phase")


class Phase(Enum):
    """Where the message of an entry is."""

    RECEIVED = "received"
    #: In the timer (eta) or waiting for a rate-limit token; holds no slot.
    DELAYED = "delayed"
    #: Due, but every slot is taken and it cannot be given to anybody else (not from a managed queue).
    WAITING = "waiting"
    HANDED = "handed to the pool"


@dataclass(eq=False)
class Entry:
    """One message that this worker has taken and not finished."""

    message: Any
    #: The managed queue that it belongs to, or ``None``.
    queue: str | None
    node: str | None = None
    slot: Slot | None = None
    #: The message was delivered before, here or elsewhere.
    redelivered: bool = False
    #: The registry has counted that it was begun here.
    struck: bool = False
    phase: Phase = Phase.RECEIVED
    #: The last sweep did not find its request.
    missed: bool = False
    since: float = field(default_factory=time.monotonic)
    _request: weakref.ReferenceType[Any] | None = None

    @property
    def request(self) -> Any:
        """Celery's request, while Celery keeps it.  Weak: Celery's own sets of requests are weak too, and an
        entry must not keep one alive that Celery has dropped."""
        return self._request() if self._request is not None else None

    @request.setter
    def request(self, request: Any) -> None:
        self._request = weakref.ref(request)

    @property
    def was_requested(self) -> bool:
        """Celery has made a request of the message (and not refused it at receipt)."""
        return self._request is not None


class Ledger:
    """Thread-safe.  Every slot leaves it exactly once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._claims: dict[str, Slot] = {}
        #: Not sure to be ours: about to be released, or about to be committed.
        self._unsure: set[str] = set()
        self._carried: set[str] = set()
        self._doubtful: list[str] = []

    def add(self, entry: Entry) -> Entry:
        """Take an entry in.  If its slot was a claim, it is now the entry's."""
        with self.lock:
            self._entries[id(entry.message)] = entry
            if entry.slot is not None:
                self._claims.pop(entry.slot.token, None)
        return entry

    def find(self, message: Any) -> Entry | None:
        """The entry of this very message object."""
        return self._entries.get(id(message))

    def finish(self, entry: Entry) -> Slot | None:
        """Take the entry out; its slot is returned to the first caller, and ``None`` to all others.

        The slot counts as held until :meth:`unclaim`, which belongs after its release: a heartbeat in between
        would take it for a leak.
        """
        with self.lock:
            if self._entries.get(id(entry.message)) is entry:
                del self._entries[id(entry.message)]
            return self.detach(entry)

    def detach(self, entry: Entry) -> Slot | None:
        """Take the slot from the entry, which stays.  As for :meth:`finish`, it counts until :meth:`unclaim`."""
        with self.lock:
            slot, entry.slot = entry.slot, None
            if slot is not None:
                self._claims[slot.token] = slot
            return slot

    def attach(self, entry: Entry, slot: Slot) -> None:
        """Give the entry a slot."""
        with self.lock:
            self._claims.pop(slot.token, None)
            entry.slot = slot

    def claim(self, slot: Slot) -> None:
        """Note a slot that is held to fetch a message with, or for one that has just come."""
        with self.lock:
            self._claims[slot.token] = slot
            self._unsure.discard(slot.token)

    def unsure(self, slot: Slot) -> None:
        """Note that the registry is being asked to release the slot, or to commit it.

        Until its answer the slot counts as held, so that a heartbeat does not take it for a leak; but it is not
        put back if the registry does not know it: it may have been given to somebody else in the same moment.
        """
        with self.lock:
            self._claims[slot.token] = slot
            self._unsure.add(slot.token)

    def unclaim(self, slot: Slot) -> None:
        """The slot is given back."""
        with self.lock:
            self._claims.pop(slot.token, None)
            self._unsure.discard(slot.token)
            if slot.token in self._carried:
                self._carried.discard(slot.token)
                self.defer(slot)

    def carry(self) -> list[Slot]:
        """A copy of the slots that are surely held, which the registry is about to be told to put back.

        One that is given back at the same time may be released first and put back after that, so all of them
        come out of :meth:`doubtful` in the end.
        """
        with self.lock:
            slots = [slot for slot in self.slots() if slot.token not in self._unsure]
            self._carried.update(slot.token for slot in slots)
            return slots

    def defer(self, slot: Slot) -> None:
        """The registry did not answer when the slot was given back: it is to be told once more."""
        with self.lock:
            if slot.token not in self._doubtful:
                self._doubtful.append(slot.token)

    def doubtful(self) -> list[str]:
        """Tokens that were given back, and of which the registry may not know it, until :meth:`settle`."""
        with self.lock:
            return list(self._doubtful)

    def settle(self, token: str) -> None:
        """The registry has been told once more that this token is given back."""
        with self.lock:
            self._doubtful.remove(token)

    def entries(self) -> list[Entry]:
        """A copy of all entries."""
        with self.lock:
            return list(self._entries.values())

    def slots(self) -> list[Slot]:
        """A copy of all slots held, claims included."""
        with self.lock:
            held = [entry.slot for entry in self._entries.values() if entry.slot is not None]
            return held + list(self._claims.values())

    def holds(self, token: str) -> bool:
        """Is the token held for a message or a claim?"""
        with self.lock:
            return token in self._claims or any(
                entry.slot is not None and entry.slot.token == token for entry in self._entries.values()
            )

    @property
    def held(self) -> int:
        """How many slots are held."""
        with self.lock:
            return len(self._claims) + sum(entry.slot is not None for entry in self._entries.values())

    def held_for(self, queue: str) -> int:
        """How many of them are held for this queue."""
        with self.lock:
            held = [*self._claims.values(), *(e.slot for e in self._entries.values() if e.slot is not None)]
            return sum(slot.queue == queue for slot in held)

    def may_delay(self, limit: int) -> bool:
        """Are fewer than ``limit`` messages held that are not due?"""
        # Nearly always there are fewer messages than that altogether.
        return len(self._entries) < limit or self.delayed < limit

    @property
    def delayed(self) -> int:
        """How many messages are held that are not due."""
        with self.lock:
            return sum(entry.phase is Phase.DELAYED for entry in self._entries.values())
