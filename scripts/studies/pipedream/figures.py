"""PipeDream's Figures 15, 16 and 17 from the published profiles: what the optimizer predicts, memory, and bytes sent.

    python -m scripts.studies.pipedream.figures [15] [16] [17]

15: VGG-16 on 16 GPUs (4 x 4 of cluster A), every split into one to three stages of a grid of cuts and replicas: the
    throughput that the recurrence predicts against that of 1F1B-RR with NOAM microbatches in flight, simulated with
    transfers that queue on links. The paper's other axis was measured; this one isn't.
16: the memory of each stage of a straight pipeline on 4 GPUs, weights stashed, beside data parallelism's.
17: bytes sent per sample by data parallelism and by the best other configuration on 4 GPUs at 10 GB/s.

What the paper says of them, and whether it holds, is in docs/research/pipedream.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from pipeplan.check.evaluate import evaluate
from pipeplan.files.profiles import read_profile
from pipeplan.partition.granularity import merge_articulation
from pipeplan.planner.plan import STATED, make_plan
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Chain, Platform, Policy, Problem
from pipeplan.schedule.kinds import graph_of

from .table1 import PROFILES, TABLE, platform_of, scaled

AMPLE = 10**13
BATCHES = {"vgg16": 64, "resnet50": 128, "gnmt": 64, "gnmt_large": 64}  # samples of a microbatch (section 5.1)
ON_FOUR = Platform.flat(4, AMPLE, 10**10)


def network(name: str) -> Chain:
    return scaled(read_profile(str(PROFILES / f"{name}.json")), name)


# --- Figure 15 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """A split of VGG-16 over 16 GPUs; microbatches per second."""

    config: str
    predicted: float
    simulated: float


def splits(layers: int, gpus: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (layers, replicas) of each stage: one stage, two at every third cut, three at every eighth."""
    yield [layers], [gpus]
    shares = (1, 2, 4, 8, 12, 14, 15)
    for cut in range(3, layers, 3):
        for first in shares:
            yield [cut, layers - cut], [first, gpus - first]
    for one in range(8, layers, 8):
        for two in range(one + 8, layers, 8):
            for counts in ([8, 4, 4], [12, 3, 1], [13, 2, 1], [14, 1, 1]):
                yield [one, two - one, layers - two], counts


def figure15() -> list[Partition]:
    """Return the partitions with what is predicted and simulated."""
    chain, platform = network("vgg16"), platform_of(TABLE[0])
    problem = Problem(chain, platform, Policy("stash"))
    found = []
    for counts, replicas in splits(len(chain), len(platform)):
        options = {name: ",".join(map(str, x)) for name, x in (("split", counts), ("replicas", replicas))}
        plan = make_plan(problem, STATED, options).plan
        run = simulate_plan(plan, 240, "pipedream")
        predicted = 1e9 / graph_of(plan).period_floor_ns
        found.append(Partition("-".join(map(str, replicas)), predicted, 1e9 / run.per_microbatch_ns))
    return found


def correlation(pairs: list[tuple[float, float]]) -> float:
    """Return Pearson's."""
    means = [sum(x) / len(pairs) for x in zip(*pairs, strict=True)]
    products = [[(a - means[0]) * (b - means[1]), (a - means[0]) ** 2, (b - means[1]) ** 2] for a, b in pairs]
    mixed, one, other = (sum(x) for x in zip(*products, strict=True))
    return float(mixed / (one * other) ** 0.5)


def print15() -> None:
    found = figure15()
    best, fastest = max(found, key=lambda x: x.predicted), max(found, key=lambda x: x.simulated)
    alone = found[0]
    ratios = sorted(x.simulated / x.predicted for x in found)
    print(
        f"Figure 15: {len(found)} partitions of VGG-16 on 16 GPUs; correlation of predicted and simulated throughput "
        f"{correlation([(x.predicted, x.simulated) for x in found]):.3f}; simulated over predicted {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}"
    )
    for what, x in (("predicted best", best), ("simulated best", fastest), ("data parallelism", alone)):
        print(f"  {what:17} {x.config:9} {x.predicted:6.2f} predicted, {x.simulated:6.2f} simulated microbatches/s")


# --- Figure 16 --------------------------------------------------------------------------------------------------------


def figure16(name: str) -> tuple[list[float], float]:
    """Return GB of each of four stages under 1F1B with stashed weights, and of each GPU under data parallelism."""
    problem = Problem(network(name), ON_FOUR, Policy("stash"), checkpointing="none")
    straight = make_plan(problem, "pipedream", {"straight": True}).plan
    run = simulate_plan(straight, 96, "pipedream")
    stages = [row["peak_bytes"] / 1e9 for row in run.figures()["devices"]]
    alone = evaluate(make_plan(problem, "data-parallel").plan).devices[0].peak_bytes / 1e9
    return stages, alone


def print16() -> None:
    print("Figure 16: GB of each of four straight stages, and of data parallelism")
    for name in ("vgg16", "gnmt", "gnmt_large"):
        stages, alone = figure16(name)
        sizes = " ".join(f"{x:6.2f}" for x in stages)
        print(
            f"  {name:11} {sizes}; data parallelism {alone:6.2f}; the fullest stage {max(stages) / alone:.2f} of that"
        )


# --- Figure 17 --------------------------------------------------------------------------------------------------------


STRAIGHT = ((1, 1, 1, 1),)
SHAPES = (*STRAIGHT, (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2), (3, 1), (1, 3))


def figure17(name: str, shapes: Sequence[Sequence[int]]) -> tuple[float, float, str]:
    """Return MB sent per sample by data parallelism on four GPUs and by the best of ``shapes``, and that.

    The best by the recurrence, cut where one tensor is live. Data parallelism sends 2(r - 1) W for r microbatches; a
    cut its tensor there and back for each one.
    """
    chain, gpus, rate = merge_articulation(network(name)), 4, 10
    weights, cuts = [int(x) for x in chain.sums.weight_bytes], chain.cut_bytes
    work = [int(x) for x in chain.sums.forward_ns + chain.sums.backward_ns]

    def stage(start: int, stop: int, replicas: int) -> float:
        sync = 2 * (replicas - 1) / replicas * (weights[stop] - weights[start]) / rate
        return max(work[stop] - work[start], sync) / replicas

    def period(bounds: Sequence[int], replicas: Sequence[int]) -> float:
        stages = [stage(a, b, r) for (a, b), r in zip(pairwise(bounds), replicas, strict=True)]
        return max(*stages, *(2 * cuts[cut] / rate for cut in bounds[1:-1]))

    every = (
        ((0, *inner, len(chain)), replicas)
        for replicas in shapes
        for inner in combinations(range(1, len(chain)), len(replicas) - 1)
    )
    bounds, replicas = min(every, key=lambda x: period(*x))
    sent = sum(2 * cuts[cut] for cut in bounds[1:-1]) + sum(
        2 * (r - 1) / r * (weights[b] - weights[a]) for (a, b), r in zip(pairwise(bounds), replicas, strict=True)
    )
    batch = BATCHES[name] * 1e6
    return 2 * (gpus - 1) / gpus * weights[-1] / batch, sent / batch, "-".join(map(str, replicas))


def print17() -> None:
    print("Figure 17: MB sent per sample on four GPUs")
    for name in ("gnmt", "gnmt_large", "vgg16", "resnet50"):
        for shapes in (SHAPES, STRAIGHT):
            parallel, other, config = figure17(name, shapes)
            print(
                f"  {name:11} data parallelism {parallel:6.2f}, {config:8} {other:6.2f}: {other / parallel:.2f} of it"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", help="15, 16, 17; all by default")
    arguments = parser.parse_args()
    for number, figure in {"15": print15, "16": print16, "17": print17}.items():
        if number in (arguments.figures or [number]):
            figure()


if __name__ == "__main__":
    main()
