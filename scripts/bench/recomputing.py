"""What is won where recomputation is a pass of its own, which may run before the gradient comes?

    python scripts/bench/recomputing.py [--moves N] [CASE ...]

Each case is a profile with GPUs, memory, network and microbatches, planned for 1F1B with stages that recompute. Prints
what a drained mini-batch takes: under 1F1B as planned, in 1F1B's order with each recomputation right before its
backward, where it doesn't wait for the gradient, and with all passes justified; and in the best order that is found,
with recomputation within backwards and as a pass of its own, with the least that any order takes. ``-``: no room.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pipeplan as pp
from pipeplan.cost.stage_graph import StageGraph
from pipeplan.planner.best_order import OWN, best_order, placed_graph
from pipeplan.schedule.kinds import plan_program
from pipeplan.schedule.program import Program
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.synthesis.justify import justified
from pipeplan.schedule.synthesis.problem import NoRoom, Word, order_problem
from pipeplan.schedule.synthesis.synthesize import proved
from pipeplan.schedule.synthesis.timing import Orders
from pipeplan.schedule.timeline import flush_makespan_ns

CASES: dict[str, dict[str, Any]] = {
    "gpt2-medium, 4 x 3 GB": {"profile": "gpt2-medium-b4-a100", "gpus": 4, "mem": "3GB", "accumulate": 8},
    "gpt2-large, 8 x 3 GB": {"profile": "gpt2-large-b4-a100", "gpus": 8, "mem": "3GB", "accumulate": 16},
    "gpt2-xl, 8 x 6 GB": {"profile": "gpt2-xl-b4-a100", "gpus": 8, "mem": "6GB", "accumulate": 16},
    "resnet101, 4 x 2 GB": {"profile": "resnet101-1000-b8-v100", "gpus": 4, "mem": "2GB", "accumulate": 8},
    "densenet121, 4 x 2 GB": {"profile": "densenet121-1000-b8-v100", "gpus": 4, "mem": "2GB", "accumulate": 8},
}


def row(name: str, case: dict[str, Any], moves: int | None) -> str:
    """Return a case's row of the table, in ms."""
    asked = dict(case)
    profile = f"profiles/{asked.pop('profile')}.json"
    plan = pp.plan(profile, weights="flush", schedule="1f1b", no_replicas=True, **asked).plan
    count = plan.schedule.mini_batch
    graph = placed_graph(plan, OWN, count)
    inside = replace(graph, stages=tuple(replace(x, recompute_ns=0) for x in graph.stages))
    found = [
        flush_makespan_ns(simulate(plan_program(plan, count))),
        *in_order_of_1f1b(graph, plan_program(plan, count)),
    ]
    for one in (inside, graph):
        try:
            best = best_order(one, count, moves=moves, solver=None)
            if one is graph:
                best = proved(best)
            found.append(best.value_ns)
        except NoRoom:
            found.append(None)
            best = None
    bound = "-" if best is None else f"{best.bound_ns / 1e6:.1f} ({best.gap:.1%})"
    apart = f"{len(graph.recomputing)} of {len(graph.stages)}"
    return " | ".join(["|", name, apart, *("-" if x is None else f"{x / 1e6:.1f}" for x in found), bound, "|"])


def in_order_of_1f1b(graph: StageGraph, program: Program) -> tuple[int | None, int | None]:
    """Return the makespans with each recomputation right before its backward, and with all justified; None without
    room."""
    try:
        problem = order_problem(graph, program.microbatches, split=False, apart=graph.recomputing)
    except NoRoom:
        return None, None
    words: list[Word] = [()] * len(problem.on)
    for lane in simulate(program).program.lanes:
        if lane.steps:
            word = problem.with_again([step.position for step in lane.steps])
            words[problem.machines[word[0]]] = word
    orders = Orders(problem, words)
    if not orders.settle() or not all(problem.holds(device, words[device]) for device in problem.devices):
        return None, None
    return orders.value, justified(problem, words)[0]


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    print("| case | stages that recompute | 1f1b | R before B | justified | best without | with | bound |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.cases or CASES:
        print(row(name, CASES[name], args.moves), flush=True)


if __name__ == "__main__":
    main()
