"""Which schedule is in a CSV file as torch.distributed.pipelining writes and reads them? A row of actions per rank.

And how is a program written so?
"""

from __future__ import annotations

import re

from ..errors import BadInput
from ..names import shown
from ..schedule.deadlock import Action
from ..schedule.program import Program
from ..schedule.written import Written, action_of, order_of_program
from .text import read_csv

OTHERS = re.compile(
    r"[0-9]{1,6}(?:UNSHARD|RESHARD|REDUCE_GRAD)(?:[0-9]{1,6})?"
)  # of sharded weights; they wait for nobody
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_schedule(path: str) -> Written:
    """Return the schedule in torch's compute-only or full CSV; BadInput names the row and the cell that is none.

    Cells that overlap a forward and a backward are taken one after the other.
    """
    rows: list[list[Action]] = []
    for number, cells in enumerate(read_csv(path), 1):
        row: list[Action] = []
        for column, cell in enumerate(cells, 1):
            overlap = OVERLAP.fullmatch(cell.strip())
            for text in overlap[1].split(";") if overlap else [cell]:
                text = text.strip()
                found = action_of(text)
                if found is not None:
                    row.append(found)
                elif text and not OTHERS.fullmatch(text):
                    raise BadInput(
                        f"{path}: row {number}, cell {column}: '{shown(text)}' isn't an action such as 0F0 or 1RECV_F3"
                    )
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    written = Written(tuple(map(tuple, rows)))
    if not written.stages:
        raise BadInput(f"{path}: has no action of a stage")
    return written


def written_schedule(program: Program) -> str:
    """Return a program in torch's compute-only CSV: passes alone, a row for each device of the first pipeline.

    ``0F0,0F1,0B0``, with ``I`` and ``W`` where the backward is split; and ``R``, which torch doesn't know, where
    recomputation comes apart from it.
    """
    return "\n".join(order_of_program(program)) + "\n"
