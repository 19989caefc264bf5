"""``pipeplan diff``: how do two profiles of a network differ, and what is a plan from the first worth on the second?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import FILE, JSON, options
from .showing import new_command, print_json, refuse_two_documents

if TYPE_CHECKING:
    from ..planner.what_if.carry import Match
    from ..runtime.measure.trace_file import MeasuredRun

MATCH = """
--plan FILE                 A plan made from A: does it hold for B?
--match name|order|weights = name
    Which layers match: with equal names, in order, or with equal numbers of parameters.
--all (every)               List every layer, not only the 30 that moved most.
--recalibrated OUT          Plan and trace: write the profile scaled to measured times.
"""


@new_command(
    "pipeplan diff measured.json estimated.json --plan plan.json",
    "pipeplan diff plan.json trace.json --recalibrated profile.json",
)
@click.argument("one", metavar="A", type=FILE)
@click.argument("other", metavar="B", type=FILE)
@options(MATCH)
@JSON
def command(
    one: str, other: str, plan: str | None, match: Match, every: bool, recalibrated: str | None, as_json: bool
) -> None:
    """Compare profile B with profile A, layer by layer; exit 1 when the plan doesn't hold for B.

    A layer moved when its share of the time changed: B may be measured on a faster device as a whole.

    Or compare a run with its plan: A is the plan, B the trace that pipeplan run --trace wrote.
    """
    refuse_two_documents(as_json, recalibrated=recalibrated)
    from ..files.profiles import located
    from ..files.text import read_text
    from ..runtime.measure.trace_file import MOST_BYTES, read_measured

    text = read_text(located(other), MOST_BYTES)
    run = read_measured(other, text)
    if run is not None:
        _compare_run(one, other, run, recalibrated, as_json)
        return
    if recalibrated is not None:
        raise click.UsageError(f"--recalibrated goes with a plan and the trace of its run, which {other} is not")
    from ..files.plans import load_plan
    from ..files.profiles import read_profile
    from ..planner.what_if.carry import carried, matched, matching_chain, stages_in
    from ..report.tables.differences import difference_figures, paired_layers, print_carried, print_differences

    after, before = read_profile(other, text), read_profile(one)
    pairs = paired_layers(before, after, match)
    loaded, result = None if plan is None else load_plan(plan), None
    if loaded is not None:
        chain, stages = matching_chain(loaded, before, after), None
        if len(chain) != len(loaded.chain):
            same = matched(loaded.chain, chain, match)
            stages = stages_in(loaded.allocation.stages, loaded.chain, chain, same)
        result = carried(loaded, chain, stages)
    if as_json:
        print_json(difference_figures(before, after, pairs, loaded, result))
    else:
        print_differences(before, after, pairs, every)
        if loaded is not None and result is not None:
            print_carried(loaded, result)
    if result is not None and result.violations:
        raise click.exceptions.Exit(1)


def _compare_run(plan: str, trace: str, run: MeasuredRun, recalibrated: str | None, as_json: bool) -> None:
    from ..files.plans import load_plan
    from ..files.profiles import profile_text
    from ..files.text import write_text
    from ..report.tables.differences import comparison, print_comparison
    from ..runtime.measure import trace_file

    loaded = load_plan(plan)
    trace_file.check_same_plan(loaded, run, trace)
    if recalibrated is not None:
        write_text(recalibrated, profile_text(trace_file.recalibrated(loaded, run, trace)))
    if as_json:
        print_json(comparison(loaded, run))
    elif recalibrated != "-":
        print_comparison(loaded, run)
