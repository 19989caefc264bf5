"""How do splits compare that torch's proposal for automatic partitioning makes, and ours, on the same costs?

    python scripts/checks/auto_partition.py FILE [--profiles a.json,b.json] [--ranks 4,8] [--microbatches 32]

FILE is ``torch/distributed/pipelining/_partition.py`` of pytorch/pytorch's pull request 179212, which imports the
installed torch. It balances the compute of stages alone and then moves layers as its own simulation says. Both splits
are of whole blocks, one pipeline, nothing recomputed, in memory without end, and both are judged by pipeplan's
simulator, with transfers and the optimizer's step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from exports import loaded

from pipeplan.check.evaluate import evaluate_simulated
from pipeplan.check.targets import GRIDS, Shape
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.files.profiles import read_profile
from pipeplan.plan import Schedule, ScheduleKind, Stage
from pipeplan.planner.drained.block_search import BlockSearch
from pipeplan.planner.drained.search import EFFORTS
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.problem import Platform, Policy, Problem

NAMES: dict[ScheduleKind, str] = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
BANDWIDTH = 12 * 10**9
PROFILES = "profiles/gpt2-xl-b4-a100.json,profiles/gpt2-small-b4-a100.json"


def proposed(module: ModuleType, search: BlockSearch, shape: Shape, kind: ScheduleKind, count: int) -> tuple[int, ...]:
    """Return the split that the proposal makes, as indices of cuts."""
    chain, cuts = search.problem.chain, search.cuts
    sums = chain.sums
    forward = [int(sums.forward_ns[b] - sums.forward_ns[a]) for a, b in pairwise(cuts)]
    backward = [int(sums.backward_ns[b] - sums.backward_ns[a]) for a, b in pairwise(cuts)]
    starts = module.auto_partition(
        forward,
        backward,
        shape.ranks,
        count,
        schedule_type=NAMES[kind],
        communication_volume=[int(chain.cut_bytes[cut]) for cut in cuts[1:-1]],
        network_bandwidth=BANDWIDTH / 10**9,  # bytes a nanosecond, as times are in those
        virtual_stages_per_rank=shape.chunks,
    )
    return (*starts, len(cuts) - 1)


def time_ns(search: BlockSearch, shape: Shape, kind: ScheduleKind, split: tuple[int, ...], count: int) -> int:
    """Return what a mini-batch takes."""
    problem = search.problem
    stages = tuple(
        Stage(search.cuts[i], search.cuts[j], group)
        for (i, j), group in zip(pairwise(split), shape.groups(), strict=True)
    )
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    result = evaluate_simulated(graph, Schedule(kind, count), problem.platform, problem.deadline)
    assert result.makespan_ns is not None
    return result.makespan_ns


def main() -> None:
    """Print a row for each profile, number of ranks and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--profiles", default=PROFILES)
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--microbatches", type=int, default=32)
    given = parser.parse_args()
    module = loaded(given.file, "partition_of_torch")
    print(f"{'profile':36} {'ranks':>5}  {'schedule':12} {'torch':>12} {'pipeplan':>12} {'bound':>12}  shorter by")
    for path in given.profiles.split(","):
        chain = replace(read_profile(path), tied=(), shared=None)
        for ranks in map(int, given.ranks.split(",")):
            for kind, chunks in (("1f1b", 1), ("interleaved", 2)):
                shape, count = Shape(ranks, 1, chunks), given.microbatches
                platform, policy = Platform.flat(ranks, 10**15, BANDWIDTH), Policy("flush", accumulate=count)
                problem = Problem(chain, platform, policy, replicas=False, checkpointing="none")
                search = BlockSearch(problem, "pipeplan", GRIDS, (kind,), Settings())  # type: ignore[arg-type]  # a kind
                search.configs = [config for config in search.configs if config.shape == shape]
                if not search.configs:
                    continue
                search.run(EFFORTS["normal"].block_steps)
                assert search.best is not None
                theirs = time_ns(search, shape, kind, proposed(module, search, shape, kind, count), count)  # type: ignore[arg-type]
                ours = search.best.makespan_ns
                row = [f"{ns / count / 1e6:9.3f} ms" for ns in (theirs, ours, search.bound_ns())]
                print(f"{Path(path).stem:36} {ranks:>5}  {kind:12} {' '.join(row)}  {1 - ours / theirs:.1%}")


if __name__ == "__main__":
    main()
