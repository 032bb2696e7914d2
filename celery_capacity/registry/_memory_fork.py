"""What a forked child finds in the place of a world of ``memory://``."""

from __future__ import annotations

from ..errors import RegistryError

__all__ = ("Disowned",)


class Disowned:
    """Stands in for the lock of a world that was copied by a fork: nothing can be done with it any more.

    The copy would give out slots that the parent gives out as well; and its real lock may be held for ever by a
    thread that exists in the parent only.
    """

    def __enter__(self) -> bool:
        raise RegistryError(
            "memory:// is for one process only, and this process was forked from the one that has it; "
            "use sqlite:///path/to/file.db for the processes of one machine, or redis:// for a fleet"
        )

    def __exit__(self, *exc_info: object) -> None: ...
