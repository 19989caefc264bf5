"""What is won where recomputation is a pass of its own, which may run before the gradient comes?

    python scripts/bench/recomputing.py [--moves N] [CASE ...]

Each case is a profile with GPUs, memory and microbatches, planned for 1F1B, some of whose stages recompute. Prints
what a drained mini-batch takes in ms: under 1F1B as planned; in 1F1B's order with recomputations as early as they can
be, of as many stages as there is room for; and in the best order that is found, with recomputation within backwards
and as a pass of its own, with the least that any order takes. ``-``: no room.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pipeplan as pp
from pipeplan.planner.what_if.best_order import OWN, best_order, placed_graph
from pipeplan.schedule.kinds import plan_program
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.synthesis.problem import NoRoom
from pipeplan.schedule.synthesis.recomputing import recomputed_early
from pipeplan.schedule.synthesis.synthesize import proved
from pipeplan.schedule.timeline import flush_makespan_ns

CASES: dict[str, dict[str, Any]] = {
    "gpt2-medium, 4 x 3 GB": {"profile": "gpt2-medium-b4-a100", "gpus": 4, "mem": "3GB", "accumulate": 8},
    "gpt2-large, 8 x 3 GB": {"profile": "gpt2-large-b4-a100", "gpus": 8, "mem": "3GB", "accumulate": 16},
    "gpt2-xl, 8 x 6 GB": {"profile": "gpt2-xl-b4-a100", "gpus": 8, "mem": "6GB", "accumulate": 16},
    "inception-v3, 4 x 4 GB": {"profile": "inception-v3-1000-b8-v100", "gpus": 4, "mem": "4GB", "accumulate": 8},
}


def row(name: str, case: dict[str, Any], moves: int | None) -> str:
    """Return a case's row of the table, in ms."""
    asked = dict(case)
    profile = f"profiles/{asked.pop('profile')}.json"
    plan = pp.plan(profile, weights="flush", schedule="1f1b", no_replicas=True, **asked).plan
    count = plan.schedule.mini_batch
    graph, program = placed_graph(plan, OWN, count), plan_program(plan, count)
    early = recomputed_early(graph, program, count)
    inside = replace(graph, stages=tuple(replace(x, recompute_ns=0) for x in graph.stages))
    cells = [f"{len(graph.recomputing)} of {len(graph.stages)}", _ms(flush_makespan_ns(simulate(program)))]
    cells.append("-" if early is None else f"{_ms(flush_makespan_ns(simulate(early)))} ({len(early.apart)})")
    try:
        without = best_order(inside, count, moves=moves, solver=None)
        found = proved(best_order(graph, count, moves=moves, solver=None))
        cells += [_ms(without.value_ns), _ms(found.value_ns), f"{_ms(found.bound_ns)} ({found.gap:.1%})"]
    except NoRoom:
        cells += ["-"] * 3
    return f"| {name} | {' | '.join(cells)} |"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}"


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    print("| case | stages that recompute | 1f1b | with R early, of so many | best without R | with R | bound |")
    print("|---|---|---|---|---|---|---|")
    for name in args.cases or CASES:
        print(row(name, CASES[name], args.moves), flush=True)


if __name__ == "__main__":
    main()
