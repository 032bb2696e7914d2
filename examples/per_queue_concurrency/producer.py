"""Twelve reports first, then twenty mails: the mails do not wait."""

import time

from app import mail, report


def at_once(runs: list) -> int:
    """The most that ran at one time."""
    return max(sum(other[1] <= run[1] < other[2] for other in runs) for run in runs)


reports = [report.delay() for _ in range(12)]
sent = time.time()
mails = [mail.delay() for _ in range(20)]

sent_mails = [result.get(timeout=30) for result in mails]
late = max(run[1] for run in sent_mails) - sent
print(f"20 mails behind 12 reports: {'none waited for a report' if late < 1 else f'one waited {late:.1f} s'}")

runs = [result.get(timeout=60) for result in reports]
print(f"most reports at once over all workers: {at_once(runs)}")
for worker in sorted({run[0] for run in runs}):
    print(f"most reports at once on {worker}: {at_once([run for run in runs if run[0] == worker])}")
