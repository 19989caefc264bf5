"""How short are V schedules within their memory? Longest span of a device and bubble, by limit in chunk activations.

``python scripts/bench/vees.py`` takes some ten seconds. Equal stages, transfers take no time.
"""

from __future__ import annotations

from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.program import Program
from pipeplan.schedule.programs.controlled import v_half, v_half_holds, v_min, v_min_holds
from pipeplan.schedule.programs.v_limit import v_limit
from pipeplan.schedule.programs.zbv import zbv
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import longest_span_ns

SIZES = [(4, 12, (1, 1, 1)), (4, 12, (20, 24, 16)), (6, 18, (1, 1, 1)), (6, 18, (20, 24, 16))]


def equal(devices: int, parts: tuple[int, int, int]) -> StageGraph:
    """Return equal stages, two on each device like a V, whose passes (F, input part, W) take so long."""
    forward, back, weight = parts
    layer = Layer("l", forward, back + weight, 0, 0, saved_bytes=1, backward_weight_ns=weight)
    homes = [*range(devices), *reversed(range(devices))]
    stages = [Stage(i, i + 1, (home,)) for i, home in enumerate(homes)]
    chain = Chain("equal", (layer,) * len(stages), 0)
    return stage_graph(chain, Platform.flat(devices, 10**9, 10**9), Policy("flush"), stages)


def row(name: str, limit: int, program: Program, work: int) -> str:
    """Return a schedule's row of the table."""
    span = longest_span_ns(simulate(program))
    return f"| {name} | {limit} | {span} | {1 - work / span:.2%} |"


def main() -> None:
    """Print one table for each size."""
    for devices, microbatches, parts in SIZES:
        graph = equal(devices, parts)
        work = 2 * microbatches * sum(parts)
        print(f"\n{devices} GPUs, {microbatches} microbatches, (F, B, W) = {parts}\n")
        print("| schedule | limit | longest span | bubble |\n|---|---|---|---|")
        known = (("v-min", v_min, v_min_holds), ("v-half", v_half, v_half_holds), ("zbv", zbv, lambda p: 2 * p))
        for name, build, holds in known:
            print(row(name, holds(devices), build(graph, microbatches), work))
        for limit in range(v_min_holds(devices), 2 * devices + 1):
            print(row("v-limit", limit, v_limit(graph, microbatches, limit), work))


if __name__ == "__main__":
    main()
