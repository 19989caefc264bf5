"""Which iterations has somebody measured? A CSV file with a row for each: what ran, and its milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ..errors import BadInput
from ..names import shown
from .text import read_csv

MOST_ROWS = 10_000
COLUMNS = {  # of a row, and what they say
    "ms": "an iteration's time",
    "gb": "what the fullest GPU held, in 1e9 bytes",
    "profile": "the profile's file, or its name, where several are given",
    "split": "layers of each stage, or names, as plan --split takes them",
    "data_parallel": "equal pipelines",
    "on": "GPUs of each stage, such as 0/1/0/1",
    "recompute": "recomputed layers, as plan --recompute takes them",
    "schedule": "its name",
    "batch": "samples per update",
    "barrier": "no where no barrier stands between two updates",
}


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A measured iteration in words, by :data:`COLUMNS`; what is empty is not there. ``place`` is where it stands."""

    place: str
    ms: float
    gb: float | None
    said: Mapping[str, str]

    def count(self, column: str) -> int | None:
        """Return the positive number in a column, None where it is empty."""
        text = self.said.get(column)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
            raise BadInput(f"{self.place}: {column}: '{shown(text)}' isn't a positive number")
        return int(text)


def read_rows(path: str) -> list[MeasuredRow]:
    """Return the rows of a CSV file; BadInput names the row and the column that cannot be read."""
    table = [row for row in read_csv(path) if any(cell.strip() for cell in row)]
    heads = [cell.strip() for cell in table[0]] if table else []
    unknown = [name for name in heads if name not in COLUMNS]
    if unknown or "ms" not in heads or len(set(heads)) < len(heads):
        what = f"'{shown(unknown[0])}' isn't a column" if unknown else "column ms is missing, or one is there twice"
        raise BadInput(f"{path}: {what}; the first line names some of {', '.join(COLUMNS)}")
    if not 1 <= len(table) - 1 <= MOST_ROWS:
        raise BadInput(f"{path}: has {len(table) - 1} rows under its heads; 1 to {MOST_ROWS} are read")
    rows = []
    for number, cells in enumerate(table[1:], 1):
        place = f"{path}: row {number}"
        if len(cells) != len(heads):
            raise BadInput(f"{place}: has {len(cells)} cells where the heads are {len(heads)}")
        said = {name: cell.strip() for name, cell in zip(heads, cells, strict=True) if cell.strip()}
        ms = _positive(said.pop("ms", ""), f"{place}: ms")
        gb = said.pop("gb", None)
        rows.append(MeasuredRow(place, ms, None if gb is None else _positive(gb, f"{place}: gb"), said))
    return rows


def _positive(text: str, place: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1e12:
            return float(text)
    raise BadInput(f"{place}: '{shown(text)}' isn't a positive number")
