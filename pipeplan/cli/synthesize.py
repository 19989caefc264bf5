"""``pipeplan synthesize``: which order of passes is best for given stages, and how far from the best can it be?"""

from __future__ import annotations

import re
import time
from typing import Any

import click

from ..api.asked import Knobs, words
from ..names import shown
from .options import FILE, JSON, option_of, options, time_limit
from .showing import new_command, print_json, refuse_two_documents, say_written, status

STAGES = """
--gpus N {1..10000}         Without PLAN: number of equal GPUs.
--times F,B,W               Without PLAN: whole numbers, of each stage's forward, input gradients and weight gradients.
--transfer N {0..1000000000}
    Without PLAN: between neighbouring GPUs, each way.  [default: 0]
--placement straight|loop|vee
    Stages on GPUs: one each, round and round, or down and up again. Of PLAN: cut anew.  [default: PLAN's own; without
    PLAN vee]
--chunks N {1..10000}       loop: stages per GPU.  [default: 2]
--microbatches N {1..100000}
    To order.  [default: PLAN's mini-batch]
--limit N {1..1000000}      Maximum of activations on a GPU, each of one stage and one microbatch.
--weight-keeps PERCENT      Activations that weight gradients need.  [default: 100%]
--split/--no-split = yes    Weight gradients are passes of their own.
--barrier/--no-barrier = yes
    The least makespan, for GPUs that wait for each other between updates; or the least longest span of one GPU.
--moves N {0..1000000000}   Moves of passes to try.  [default: some seconds' worth]
--seed SEED = 0
"""
WRITTEN = """
-o, --output OUT            Write the order as torch's CSV, which simulate --schedule reads.
--width COLUMNS             Columns.  [default: the terminal's]
"""


def _times(_: click.Context, option: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(re.fullmatch(r" *[0-9]{1,12} *", part) for part in parts):
        raise click.BadParameter(f"'{shown(text, 40)}' isn't a list of whole numbers, such as 20,24,16")
    return [int(part) for part in parts]


@new_command(
    "pipeplan synthesize plan.json --microbatches 16 -o order.csv",
    "pipeplan synthesize --gpus 4 --placement vee --times 20,24,16 --microbatches 12 --limit 5",
)
@click.argument("plan", metavar="[PLAN]", required=False, type=FILE)
@options(STAGES, times={"callback": _times})
@option_of(words(Knobs)["solver"], help="Of linear programs; highs needs highspy.")
@time_limit("Search for so long, such as 60s, if no order is proved best before; or with --moves for no longer.")
@options(WRITTEN)
@JSON
def command(plan: str | None, output: str | None, width: int | None, as_json: bool, **asked: Any) -> None:
    """Find the best order of forwards and backwards for PLAN's stages, or for equal ones, within memory.

    Backwards are split; a batch of microbatches is drained. Prints what the order takes, and a lower bound: no order
    takes less. Ctrl-C ends the search with the best order so far.
    """
    from ..api.synthesizing import synthesize
    from ..report.tables.synthesis import print_synthesis

    refuse_two_documents(as_json, output=output)
    began = time.monotonic()
    ordered = synthesize(plan, status=status(), **asked)
    took_s = time.monotonic() - began
    if output is not None:
        ordered.save(output)
    if as_json:
        print_json({**ordered.figures(), "seconds": round(took_s, 3)})
    elif output != "-":
        print_synthesis(ordered.found, took_s, plain=plan is None, width=width)
        say_written(output)
