"""The table: both runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from .figures import Figures
from .plan import SLOTS, WORKERS

__all__ = ("table",)


def table(plain: Figures, capacity: Figures) -> str:
    """Plain text, for any terminal."""
    both = (plain, capacity)
    rows = [
        ("", "plain Celery", "celery_capacity", "perfect queue"),
        _seconds("all waves, makespan", both, "makespan"),
        ("  against the perfect queue", *(f"{run.ratio:.2f} ×" for run in both), "1.00 ×"),
        _seconds("short tasks wait, p50", both, "p50"),
        _seconds("short tasks wait, p95", both, "p95"),
        _seconds("short tasks wait, longest", both, "longest"),
        ("most held by one worker", *(f"{max(run.most_held.values())} of {SLOTS}" for run in both), ""),
        *((f"tasks of {worker}", *(str(run.ran[worker]) for run in both), "") for worker in WORKERS),
        ("pinned on the right node", *(f"{run.pinned_right} of {run.pinned}" for run in both), ""),
        ("run exactly once", *(f"{run.tasks} of {run.tasks}" for run in both), ""),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.append(
        "The perfect queue is first come, first served, costs nothing itself, never idles a slot while a task waits, and\n"
        "knows no pins.  With pins a task may wait for its node; and since pinned ones are fetched first, long tasks may\n"
        "begin earlier than in order of arrival, and a wave end earlier than the perfect queue's.  Plain Celery has no\n"
        "pins: what ran on the right node did so by chance."
    )
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        f"{cell:{'<' if n == 0 else '>'}{width}}" for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join((first, *rest)).rstrip()


def _seconds(title: str, both: tuple[Figures, Figures], name: str) -> tuple[str, str, str, str]:
    plain, capacity = (f"{getattr(run, name):.2f} s" for run in both)
    # With the durations of each run; they are the same but for noise.
    ideals = {f"{getattr(run, f'perfect_{name}'):.2f} s": None for run in both}
    return (title, plain, capacity, " / ".join(ideals))
