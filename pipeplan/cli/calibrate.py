"""``pipeplan calibrate``: which constants of an estimate do a few measured iterations bear?"""

from __future__ import annotations

from typing import Any

import click

from ..api.asked import Common, words
from .options import DEBUG, FILE, JSON, option_of, options
from .showing import new_command, print_json, say_written

WORDS = words(Common)


@new_command(
    "pipeplan calibrate gpt-mb1.json gpt-mb4.json --gpu a100 --measured runs.csv -o mine.json",
    "pipeplan profile zoo:gpt2-xl --microbatch 2 --estimate mine.json -o profile.json",
)
@click.argument("profiles", metavar="PROFILE...", type=FILE, nargs=-1, required=True)
@options("--measured FILE.csv Measured iterations, one in a row.", measured=FILE)
@click.option(
    "--trace", "traces", nargs=2, multiple=True, type=FILE, metavar="PLAN TRACE", help="A run's own times; repeatable."
)
@option_of(WORDS["gpu"], required=True, help="The GPU estimated for (a100, .. or FILE.json).")
@option_of(WORDS["bandwidth"])
@option_of(WORDS["network"], help="Between servers of --per-server GPUs.")
@options("--per-server N {1..4096}  GPUs in a server, where there are several.")
@option_of(WORDS["optimizer"], default="adam", help="Of the runs.")
@option_of(WORDS["precision"], default="mixed", show_default=True, help=None)
@option_of(WORDS["blocking_transfers"])
@options("--hosts-alone  Fit what operations take the host, and leave kernels as they are.")
@options("-o, --output OUT Write the GPU with the constants fitted, for --estimate FILE.")
@JSON
@DEBUG
def command(profiles: tuple[str, ...], output: str | None, as_json: bool, **given: Any) -> None:
    """Fit the constants behind estimated PROFILEs to measured iterations, and say what error they leave.

    A measured PROFILE beside an estimate of the same layers counts layer by layer.

    A row of the CSV file says what ran, and its ms; columns are called like options of plan --split: split,
    data_parallel, on, recompute, schedule (1f1b), batch; barrier (no: none between updates), profile (which of
    several), gb (memory, set beside what is predicted).
    """
    from ..api.calibrating import calibrate
    from ..report.tables.calibrations import print_calibration

    found = calibrate(profiles, **given)
    if output is not None:
        found.save(output)
    if as_json:
        print_json(found.figures())
    elif output != "-":
        print_calibration(found.fit, found.memory)
        say_written(output, then="; pipeplan profile --estimate takes it")
