"""Myelin's Figures 5 and 6: a batch of the 12B network by G_inter, and what the memory optimization gains.

    python -m scripts.studies.myelin.memory

48 V100s, batches of 2048, microbatches of 1 (section V-B). Two ways to predict the pipeline phase from one number, the
34.05 s that G_inter = 6 took, which fixes what a layer takes:

formula:   all stages once and the slowest for every further microbatch, no messages (``unprofiled.predicted_time``).
simulated: the message-driven schedule with limit G_inter, messages of half precision at 50 GB/s inside a server of six
           GPUs and 12.5 GB/s between servers (section VI).

Figure 6 adds the all-reduce, at the bandwidth that its 0.62 s with G_inter = 24 says, and the optimizer, which takes
1/2.5 of the all-reduce with G_inter = 6 (section V-C) and in proportion to a GPU's parameters elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pipeplan.plan import Stage
from pipeplan.planner.grids.pipelines import batch_time
from pipeplan.problem import Device, Level, Platform, Policy, Problem
from pipeplan.zoo.text.sizes import TRANSFORMERS

from .formulas import Grid, stage_layers
from .unprofiled import predicted_time, transformer_chain

MODEL, GPUS, BATCH, SERVER = TRANSFORMERS["myelin-12b"], 48, 2048, 6
DEPTHS = (6, 12, 24, 48)
MEASURED = {6: 34.05, 24: 46.08}  # seconds of the pipeline phase (section V-B)
ALL_REDUCE = {24: 0.62, 6: 4.32}
BANDWIDTH = round(2 * 12e9 / 24 / ALL_REDUCE[24])  # bytes/s
OPTIMIZER = ALL_REDUCE[6] / 2.5
GAIN_BY_DEPTH, GAIN = 0.22, 0.13  # of G_inter 6 over 24 (Figure 5), of the memory optimization (Figure 6)


def grid(inter: int) -> Grid:
    return Grid(inter, GPUS // inter, 1, BATCH, 1)


def formula(inter: int, efficiency: float = 1.0) -> float:
    return predicted_time(MODEL, grid(inter), 125e12, efficiency, BANDWIDTH).pipeline


def simulated(inter: int, rate: float) -> float:
    """Return seconds of the pipeline phase at ``rate`` flop/s, every layer recomputed by itself, memory ample."""
    chain, data = transformer_chain(MODEL, 1, rate), GPUS // inter
    chain = replace(
        chain, layers=tuple(replace(x, weight_bytes=0, parameters=0) for x in chain.layers), tied=(), shared=None
    )
    servers = Platform((Device(10**15),) * GPUS, (Level(SERVER, 50 * 10**9), Level(GPUS // SERVER, 125 * 10**8)))
    problem = Problem(chain, servers, Policy("flush", BATCH // data, precision="mixed"))
    ends = [1 + sum(stage_layers(MODEL.layers, inter)[:s]) for s in range(1, inter)]
    stages = [
        Stage(start, stop, tuple(range(s, GPUS, inter)), tuple((i, i + 1) for i in range(start, stop) if is_block(i)))
        for s, (start, stop) in enumerate(pairwise([0, *ends, len(chain)]))
    ]
    return batch_time(problem, stages, BATCH // data, inter, whole=False).batch_ns / 1e9


def is_block(layer: int) -> bool:
    return 0 < layer <= MODEL.layers


def calibrated() -> float:
    """Return the flop/s at which six simulated stages take what was measured."""
    low, high = 10**12, 125 * 10**12
    while high - low > 10**8:
        rate = (low + high) // 2
        low, high = (rate, high) if simulated(6, rate) > MEASURED[6] else (low, rate)
    return high


def main() -> None:
    efficiency, rate = formula(6) / MEASURED[6], calibrated()
    predictions = {
        "formula": {depth: formula(depth, efficiency) for depth in DEPTHS},
        "simulated": {depth: simulated(depth, rate) for depth in DEPTHS},
    }
    print("Figure 5: seconds of the pipeline phase")
    print("G_inter  measured  formula  simulated")
    for depth in DEPTHS:
        measured = f"{MEASURED[depth]:.2f}" if depth in MEASURED else "-"
        print(f"{depth:7}  {measured:>8}  {predictions['formula'][depth]:7.2f}  {predictions['simulated'][depth]:9.2f}")
    every = {"measured": MEASURED, **predictions}
    for name, found in every.items():
        print(f"  6 instead of 24, {name}: {1 - found[6] / found[24]:.1%} less (published: {GAIN_BY_DEPTH:.0%} faster)")
    print("Figure 6: seconds of a batch without the memory optimization (G_inter 24) and with it (6)")
    rest = {24: ALL_REDUCE[24] + OPTIMIZER / 4, 6: ALL_REDUCE[6] + OPTIMIZER}
    for name, found in every.items():
        without, with_it = (found[depth] + rest[depth] for depth in (24, 6))
        print(f"  {name:9} {without:6.2f} {with_it:6.2f}: {1 - with_it / without:.1%} less (published: {GAIN:.0%})")


if __name__ == "__main__":
    main()
