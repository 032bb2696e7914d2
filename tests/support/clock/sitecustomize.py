"""On the path of a process whose clock is to differ: ``CAPACITY_TEST_CLOCK_AHEAD`` seconds are added to ``time.time()``."""

import os
import time

_ahead = float(os.environ.get("CAPACITY_TEST_CLOCK_AHEAD", "0"))
_true_time = time.time


def _wrong_time() -> float:
    return _true_time() + _ahead


# Before anything imports it from there.
time.time = _wrong_time
