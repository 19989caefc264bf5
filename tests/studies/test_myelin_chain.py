"""The chain of a GPT agrees with the closed formulas of ``transformer``."""

from dataclasses import replace

import pytest

from pipeplan.plan import Stage
from pipeplan.planner.grids.pipelines import batch_time
from pipeplan.problem import Platform, Problem
from pipeplan.zoo.text.sizes import TRANSFORMERS
from scripts.studies.myelin.formulas import MIXED, Grid, batch_flops, stage_memories
from scripts.studies.myelin.unprofiled import transformer_chain

MODEL = TRANSFORMERS["myelin-12b"]


def test_flops_parameters_and_the_fixed_part():
    chain = transformer_chain(MODEL, 4, 1e15)
    total = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    assert total == pytest.approx(batch_flops(MODEL, 4, recompute=False) / 1e6, rel=1e-6)
    assert int(chain.sums.parameters[-1]) == MODEL.parameters + MODEL.table_parameters  # the tied table twice
    assert chain.tied == ((0, 49),)
    slower = transformer_chain(MODEL, 4, 1e15, fixed_ns=1000, optimizer_ns=0.5)
    assert int(slower.sums.forward_ns[-1]) - int(chain.sums.forward_ns[-1]) == 50 * 1000
    assert int(slower.sums.optimizer_ns[-1]) == pytest.approx(0.5 * (MODEL.parameters + MODEL.table_parameters))


def test_memory_is_that_of_the_formulas():
    """Section VI's 12B network on 6 x 8 with microbatches of 8 and ac = 4, offloaded.

    The formulas count the stage's output among what it keeps; the chain doesn't, since the next stage has it. And on
    the last stage they add the logits to the inside of a segment; by then the head's backward has freed them.
    """
    chain = transformer_chain(MODEL, 8, 1e15)
    grid = Grid(6, 8, 8, 512, 4)
    policy = replace(MIXED, offload=True, accumulate=64)
    cuts = [0, 9, 17, 25, 33, 41, 50]
    stages = []
    for s in range(6):
        blocks = range(cuts[s] + (s == 0), cuts[s + 1] - (s == 5), 4)
        stages.append(Stage(cuts[s], cuts[s + 1], (s,), tuple((first, first + 4) for first in blocks)))
    platform = Platform.flat(6, 10**12)
    run = batch_time(Problem(chain, platform, policy, checkpointing="segments"), stages, 8, 6)
    output = 2 * 8 * 512 * 4512
    for s, formula in enumerate(stage_memories(MODEL, grid, policy)):
        found = run.over_bytes[s] + 10**12
        freed = 4 * 8 * 512 * (4512 + 51200) if s == 5 else 0
        assert formula.total_bytes - found == pytest.approx(run.in_flight[s] * output + freed, abs=0.01 * found)
