"""How do tables look, and how do they fit a terminal? No number is cut and no column broken off: names give way."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..names import shown

LAYER_WIDTH = 36  # columns of a layer's name, at most
LEAST_NAME = 8  # and where there is no room
PIPED_WIDTH = 120  # columns when the output is not a terminal
WIDEST = 10**4


def console(width: int | None = None, stderr: bool = False) -> Console:
    """Return the console for results, or for progress on ``stderr``: as wide as the terminal, or 120 columns in a pipe.

    Text is text: it takes nothing in a string for markup; what is to be bold is a ``Text`` that says so.
    """
    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


class Name:
    """A cell that gives way: ``cut(columns)`` is its text in so many at most, of ``least`` where there is no room."""

    def __init__(self, cut: Callable[[int], str], least: int) -> None:
        self.cut, self.least = cut, least

    @staticmethod
    def of(text: str, widest: int = LAYER_WIDTH) -> Name:
        """Return the cell of a name, whose middle is left out."""
        text = shown(text, widest)
        return Name(lambda columns: shown(text, columns), min(LEAST_NAME, len(text)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self.cut(max(self.least, options.max_width)), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.least, max(self.least, len(self.cut(WIDEST))))


def make_table(
    *columns: str,
    left: Collection[str] = (),
    names: Collection[str] = (),
    space: int | None = None,
    caption: str | None = None,
) -> Table:
    """Return an empty table without lines: numbers to the right, the columns ``left`` to the left.

    The columns ``names`` have :class:`Name` cells. ``space`` is that between columns, None for as rich has it;
    ``caption`` stands below in small.
    """
    padding = (0, 1) if space is None else (0, space, 0, 0)
    table = Table(box=None, pad_edge=False, padding=padding, header_style="bold")
    table.caption, table.caption_style, table.caption_justify = caption, "dim", "left"
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in names)
    return table


def print_fitted(out: Console, table: Table) -> None:
    """Print a table whole: where the terminal is narrower, columns come closer, and then lines run over its edge."""
    if _least_width(out, table) > out.width:
        table.padding = (0, 1, 0, 0)
    console(max(out.width, _least_width(out, table)), out.stderr).print(table)


def _least_width(out: Console, table: Table) -> int:
    return table.__rich_measure__(out, out.options.update(width=WIDEST)).minimum
