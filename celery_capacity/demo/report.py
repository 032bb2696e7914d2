"""The table: both runs side by side."""

from __future__ import annotations

from .figures import Figures
from .plan import SLOTS, WORKERS

__all__ = ("table",)

_HEADER = ("", "plain Celery", "celery_capacity", "perfect queue")


def table(plain: Figures, capacity: Figures) -> str:
    """Plain text, for any terminal."""
    both = (plain, capacity)
    rows = [
        _HEADER,
        (
            "all waves (makespan)",
            *(f"{run.makespan:.2f} s" for run in both),
            _ideal("{:.2f} s", *(run.perfect_makespan for run in both)),
        ),
        ("  of the perfect queue", *(f"{run.ratio:.2f} ×" for run in both), "1.00 ×"),
        ("short tasks wait, p50", *(f"{run.p50:.2f} s" for run in both), _ideal("{:.2f} s", *(r.perfect_p50 for r in both))),
        ("short tasks wait, p95", *(f"{run.p95:.2f} s" for run in both), _ideal("{:.2f} s", *(r.perfect_p95 for r in both))),
        ("most held by one worker", *(f"{max(run.most_held.values())} of {SLOTS}" for run in both), ""),
        *(
            (f"  tasks of {worker}", *(str(run.ran[worker]) for run in both), "")
            for worker in WORKERS
        ),
        ("pinned on the right node", f"{plain.pinned_right} of {plain.pinned} (no pins)", f"{capacity.pinned_right} of {capacity.pinned}", ""),
        ("run exactly once", *(f"{run.tasks} of {run.tasks}" for run in both), ""),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _ideal(form: str, plain: float, capacity: float) -> str:
    """One figure if the durations of both runs make the same one."""
    first, second = form.format(plain), form.format(capacity)
    return first if first == second else f"{first} / {second}"
