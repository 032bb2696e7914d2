"""Tables for a terminal: with rich if it is installed and somebody looks, else as plain aligned text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ("render", "show")


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, color: bool = True) -> None:
    """Write a table to standard output.

    What goes into a pipe is plain and never cut to the width of a terminal, so that ``grep`` finds it.
    """
    if sys.stdout.isatty():
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
            for index, name in enumerate(header):
                # What is too wide for the terminal is wrapped in the last column as long as possible.
                table.add_column(name, overflow="fold", no_wrap=index < len(header) - 1)
            for row in rows:
                # As Text, since a name with square brackets would be read as markup.
                table.add_row(*(Text(cell) for cell in row))
            Console(no_color=not color).print(table)
            return
    sys.stdout.write(render(title, header, rows))


def render(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as plain text: columns aligned, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [title]
    for row in ([name.upper() for name in header], *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines) + "\n"
