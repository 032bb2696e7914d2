"""Names in order, for many thousands of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

__all__ = ("SortedNames",)

#: A chunk is split when it is twice as long.
_CHUNK = 64


class SortedNames:
    """A set of names, each at most once, kept in order.

    One plain list would do, but to delete from a list of ten thousand moves 40 kB on average, and a worker with one
    slot leaves and enters at every task.  So it is a list of short lists.
    """

    __slots__ = ("_chunks", "_lasts")

    def __init__(self) -> None:
        self._chunks: list[list[str]] = []
        #: The last name of each chunk.
        self._lasts: list[str] = []

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def add(self, name: str) -> None:
        """Put in a name that is not there."""
        lasts = self._lasts
        if not lasts:
            self._chunks.append([name])
            lasts.append(name)
            return
        at = bisect_left(lasts, name)
        if at == len(lasts):
            at -= 1
            lasts[at] = name
        chunk = self._chunks[at]
        insort(chunk, name)
        if len(chunk) > 2 * _CHUNK:
            self._chunks.insert(at, chunk[:_CHUNK])
            lasts.insert(at, chunk[_CHUNK - 1])
            del chunk[:_CHUNK]

    def remove(self, name: str) -> None:
        """Take out a name that is there."""
        at = bisect_left(self._lasts, name)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, name)]
        if not chunk:
            del self._chunks[at], self._lasts[at]
        elif name == self._lasts[at]:
            self._lasts[at] = chunk[-1]

    @property
    def first(self) -> str | None:
        return self._chunks[0][0] if self._chunks else None

    def after(self, name: str) -> str | None:
        """The first one that comes after ``name``, which need not be there itself."""
        at = bisect_right(self._lasts, name)
        if at == len(self._lasts):
            return None
        chunk = self._chunks[at]
        return chunk[bisect_right(chunk, name)]
