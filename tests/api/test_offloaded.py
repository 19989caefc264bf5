"""Activations in host memory: what layers take then, and whether plans that look for it are the best of both ways."""

from dataclasses import replace
from random import Random

import pytest
from oracles.partition import contiguous_optimum

import pipeplan as pp
from pipeplan.api.given.problems import problem_of
from pipeplan.api.given.tensor import parts
from pipeplan.check.targets import refuse_chain
from pipeplan.check.units import CannotExpress
from pipeplan.cost.roofline import with_offloaded
from pipeplan.errors import BadInput
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Device, Layer, Platform
from pipeplan.report.searched import tensor_degree

RATE = 10**9  # a byte a ns


def test_all_that_a_layer_saves_is_sent_or_what_it_reads_and_it_runs_again():
    first = Layer("first", 1000, 2000, 8, 300, 900, saves=(-1, 0), working_bytes=50)  # 900 bytes hide in both passes
    second = Layer(
        "second", 1000, 2000, 8, 500, 4000, saves=(0, 1), working_bytes=70
    )  # 4000 don't, 300 that it reads do
    third = Layer("third", 100, 2000, 8, 0, 1500)  # 1400 ns longer, or 400 longer and again in the backward
    found = with_offloaded(Chain("c", (first, second, third), 100, offloaded=RATE)).layers
    assert [(x.forward_ns, x.backward_ns) for x in found] == [(1000, 2000), (1000, 3000), (500, 2100)]
    assert [x.working_bytes for x in found] == [50 + 2 * 900, 70 + 2 * 300 + 4000, 2 * 500 + 1500]
    assert all((x.saved_bytes, x.saves) == (0, ()) for x in found)
    slow = with_offloaded(Chain("c", (first,), 100, offloaded=RATE // 10)).layers[0]
    assert (slow.forward_ns, slow.backward_ns) == (1000, 3000)


def tiny(seed):
    draw = Random(seed)
    return Chain("tiny", tuple(
        Layer(f"l{i}", draw.randint(2, 20) * 1000, draw.randint(4, 40) * 1000, draw.randint(2, 9) * 100,
              draw.randint(1, 6) * 1000, draw.randint(8, 40) * 1000, working_bytes=draw.randint(0, 900))
        for i in range(4)
    ), 3000)  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_plans_are_the_best_of_both_ways(seed):
    draw = Random(seed)
    where = Platform((Device(draw.choice((40, 60, 90)) * 1000),) * 3, Platform.flat(3, 0, 10**10).levels)
    words = {"platform": where, "weights": draw.choice(("flush", "2bw")), "batch": 12, "reserve": None}
    words["checkpointing"] = draw.choice(("none", "stages"))
    asked = {"offload_activations": RATE * draw.choice((1, 3))}
    best = []
    for part in parts(pp.Profile(tiny(seed)), asked):
        problem = problem_of(part, **words)[0]
        least = contiguous_optimum(problem) if not problem.policy.drains else None
        try:
            found = make_plan(problem, "contiguous")
        except pp.Infeasible:
            assert least is None
            continue
        assert least is None or found.plan.allocation.claimed_period_ns == least[0]
        assert all(x.period_ns <= found.evaluation.period_ns for x in found.plan.lower_bounds)
        best.append(found.evaluation.period_ns)
    if not best:
        with pytest.raises(pp.Infeasible):
            pp.plan(tiny(seed), algorithm="contiguous", **words, **asked)
        return
    assert pp.plan(tiny(seed), algorithm="contiguous", **words, **asked).period_ns == min(best)


def test_each_stage_may_keep_its_activations_or_let_them_wait(tmp_path):
    """Two microbatches of the first half don't fit, whose bytes hide beside its passes; the other half's don't."""
    ms, mb = 10**6, 10**6
    layers = [Layer(f"a{i}", ms, ms, 100, 10, mb, working_bytes=0) for i in range(3)]
    layers += [Layer(f"b{i}", 3 * ms // 4, 3 * ms // 4, 100, 10, 6 * mb // 5, working_bytes=0) for i in range(4)]
    chain = Chain("halves", tuple(layers), 10)
    words = {"gpus": 2, "mem": "5.5MB", "bandwidth": "10GB/s", "batch": 16, "weights": "flush", "checkpointing": "none"}
    words["offload_activations"] = "1GB/s"
    alike = pp.plan(chain, **words)
    found = pp.plan(chain, tensor="each", **words)
    assert found.bound_ns <= found.period_ns < alike.period_ns
    assert [(x.stop, x.offloaded) for x in found.plan.allocation.stages] == [(3, True), (7, False)]
    assert set(found.plan.provenance.options["tensor"]) == {"1", "1 offloaded", "each"}
    told = tensor_degree(found.plan)[0]
    assert "1 offloaded" in told
    with pytest.raises(CannotExpress, match="megatron: each stage has activations in a way of its own, and there all"):
        refuse_chain(found.plan.chain, "megatron")
    assert "activations wait in host memory, over 1 GB/s per GPU" in told
    found.save(tmp_path / "plan.json")
    again = pp.read_plan(tmp_path / "plan.json")
    assert (again.plan.chain, again.period_ns) == (found.plan.chain, found.period_ns)
    assert again.plan.allocation.stages == found.plan.allocation.stages


def test_it_makes_plans_fit_that_say_so_and_that_nothing_else_takes(tmp_path):
    chain = replace(tiny(1), layers=tuple(replace(x, saved_bytes=300_000) for x in tiny(1).layers))
    words = {"gpus": 2, "mem": "500KB", "batch": 16, "weights": "flush", "checkpointing": "none", "effort": "quick"}
    with pytest.raises(pp.Infeasible):
        pp.plan(chain, **words)
    found = pp.plan(chain, offload_activations="1GB/s", **words)
    assert found.plan.chain.offloaded == RATE
    assert "activations wait in host memory, over a link of 1 GB/s per GPU" in tensor_degree(found.plan)[0]
    with pytest.raises(CannotExpress, match="megatron: activations wait in host memory, which it does without pipel"):
        refuse_chain(found.plan.chain, "megatron")
    with pytest.raises(CannotExpress, match="activations wait in host memory"):
        found.export("torchtitan")
    plan = tmp_path / "plan.json"
    found.save(plan)
    again = pp.read_plan(plan)
    assert (again.plan.chain, again.period_ns) == (found.plan.chain, found.period_ns)
    with pytest.raises(BadInput, match="recompute: where activations wait in host memory, each layer runs again by"):
        pp.plan(chain, offload_activations="1GB/s", split="2,2", recompute="all", **{**words, "effort": None})
    with pytest.raises(BadInput, match="offload"):
        pp.plan(chain, offload_activations="fast", **words)
