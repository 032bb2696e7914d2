"""What is left when a part of a group or chord is refused: an error that says what was not published, and no chord
that waits for ever.

Celery publishes the parts one after the other, and nobody says beforehand how many there will be.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import states
from celery.canvas import maybe_signature
from celery.exceptions import ChordError

__all__ = ("ChordKeeper", "Part", "parts_of")

logger = logging.getLogger(__name__)

_UNLOCK = "celery.chord_unlock"
#: Chords in chords whose unlock tasks are remembered, for each thread.
_KEPT = 32


@dataclass(frozen=True)
class Part:
    """Which part of which group a message is, and the body of the chord if the group is one's header."""

    group_id: str
    index: int
    body: Mapping[str, Any] | None


def parts_of(message: Any) -> tuple[Part, ...]:
    """What the message is a part of, the innermost group first; nothing if it is none, or of task protocol 1."""
    headers, _, body, _ = message
    embedded = body[2] if isinstance(body, Sequence) and len(body) == 3 else {}
    group_id, index, chord = headers.get("group"), headers.get("group_index"), embedded.get("chord")
    if group_id is None and embedded.get("chain"):
        # The first task of a chain that is a part: the last one, which comes first here, says so.
        options = embedded["chain"][0].get("options", {})
        group_id, index, chord = options.get("group_id"), options.get("group_index"), options.get("chord")
    found: list[Part] = []
    while isinstance(group_id, str) and isinstance(index, int) and len(found) < _KEPT:
        found.append(Part(group_id, index, chord))
        options = (chord or {}).get("options", {})
        group_id, index, chord = options.get("group_id"), options.get("group_index"), options.get("chord")
    return tuple(found)


class ChordKeeper:
    """Ends the chords of a part that was not published.  Thread-safe."""

    def __init__(self, app: Any) -> None:
        self.app = app
        #: For each thread: the parts of the chords whose unlock tasks it has published.  Their headers follow.
        self._kept = threading.local()

    def note(self, name: str, message: Any) -> None:
        """A message is about to be published.  Only unlock tasks, of backends without native joins, are noted."""
        if name != _UNLOCK:
            return
        body = message[2]
        if isinstance(body, Sequence) and len(body) == 3 and body[0]:
            args, kwargs, _ = body
            unlocking = self._unlocking
            unlocking[args[0]] = list(_ids(kwargs.get("result") or ()))
            while len(unlocking) > _KEPT:
                unlocking.popitem(last=False)

    def broken_off(self, parts: Sequence[Part], exc: Exception) -> None:
        """The message with these ``parts`` is not published, nor what would have followed.  Never raises."""
        published = False
        for part in parts:
            published = published or part.index > 0
            try:
                self._end(part, exc, published)
            except Exception as error:  # noqa: BLE001 - a result backend may raise anything, and exc is to be raised
                logger.warning(
                    "group %s is broken off, and the failure of its chord could not be stored: %r",
                    part.group_id,
                    error,
                    extra={"action": "chord_not_failed", "group_id": part.group_id},
                )

    def _end(self, part: Part, exc: Exception, published: bool) -> None:
        ids = self._unlocking.pop(part.group_id, None)
        if ids is not None:
            # The unlock task polls until every part has ended; then it fails the body.
            for task_id in ids[part.index :]:
                self.app.backend.store_result(task_id, exc, states.FAILURE)
        elif part.body and published:
            # If nothing was published, nobody waits.
            try:
                raise ChordError(f"part {part.index} was not published: {exc}") from exc
            except ChordError as error:  # Celery wants it to have been raised
                self.app.backend.chord_error_from_stack(maybe_signature(part.body, app=self.app), error)

    @property
    def _unlocking(self) -> OrderedDict[str, list[str]]:
        unlocking: OrderedDict[str, list[str]] | None = getattr(self._kept, "unlocking", None)
        if unlocking is None:
            unlocking = self._kept.unlocking = OrderedDict()
        return unlocking


def _ids(results: Any) -> Iterator[str]:
    """The id of each part of a chord, in order, from the tuples that Celery makes of its results."""
    for head, children in results:
        if children:
            yield from _ids(children)
        else:
            yield head if isinstance(head, str) else head[0]
