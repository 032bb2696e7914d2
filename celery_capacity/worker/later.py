"""Tasks that are not due, beyond those that a worker may hold (``capacity_eta_limit``): a lot of their own.

In the queue they would stand before what could run now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..models import Lot
from ..naming import later_lot

if TYPE_CHECKING:
    from .agent import WorkerAgent
    from .mover import Mover
    from .queues import LotReader

__all__ = ("Later",)

#: A worker that holds as many tasks that are not due as it may looks through this many of those in a lot, once in
#: ``poll_seconds``: some of them may have become due.
_STEPS = 16


class Later:
    """The lots of what is not due.  Used by the worker's main loop."""

    def __init__(self, agent: WorkerAgent) -> None:
        self.agent = agent
        self.reader: LotReader | None = None
        self._look_at = 0.0

    @property
    def holds_enough(self) -> bool:
        """Does the worker hold as many tasks that are not due as it may?"""
        return not self.agent.ledger.may_delay(self.agent.settings.eta_limit)

    def expect(self, queue: str, mover: Mover) -> None:
        """A task of ``queue`` is held back; from now on its lot is looked at.

        If one worker puts tasks there and ends, those that it held come back, and whoever takes them looks.
        """
        lot = self._lot(queue)
        if self.reader is not None and not self.reader.knows(lot):
            mover.declare(lot.name, queue)
            self.reader.exists(lot)

    def look_through(self, take: Callable[[Lot], bool]) -> None:
        """Run what has become due, while no more can be held; the rest goes to the end of its lot.

        :param take: takes one message of a lot; false if there is none, or no slot.
        """
        assert self.reader is not None
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + self.agent.settings.poll_seconds
        if not self.holds_enough:
            return  # they are fetched as all others are
        for lot in map(self._lot, [*self.agent.managed]):
            steps = min(_STEPS, self.reader.ready(lot)) if self.reader.knows(lot) else 0
            while steps and take(lot):
                steps -= 1

    def _lot(self, queue: str) -> Lot:
        return Lot(later_lot(self.agent.settings.namespace, queue), queue)
