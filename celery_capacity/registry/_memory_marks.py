"""The marks of the lots of one world of ``memory://``."""

from __future__ import annotations

from ._memory_records import Mark

__all__ = ("Marks",)


class Marks(dict[str, Mark]):
    """By the name of the lot."""

    def __init__(self) -> None:
        super().__init__()
        self._version = 0

    def park(self, lot: str, queue: str, until: float) -> None:
        """Somebody parks.  Versions are never used twice, so an answer to an older mark cannot clear a newer one."""
        mark = self.get(lot)
        if mark is None:
            mark = self[lot] = Mark(queue)
        self._version += 1
        mark.version = self._version
        mark.found_empty = False
        mark.parked_until = max(mark.parked_until, until)

    def still_waiting(self, lot: str, version: int, now: float) -> bool:
        """Compare and clear the mark of a lot that was found empty."""
        mark = self.get(lot)
        if mark is None:
            return False
        if mark.version == version:
            if now >= mark.parked_until:
                del self[lot]
                return False
            mark.found_empty = True
        return True

    def waiting(self) -> set[str]:
        """The queues in one of whose lots somebody has parked that nobody has found empty since."""
        return {mark.queue for mark in self.values() if not mark.found_empty}
