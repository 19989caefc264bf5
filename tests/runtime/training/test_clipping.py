"""Gradients clipped by their norm over all stages, as torch clips them in one process, however the model is cut."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.blocking import deadlock
from cases.half import exploding, exploding_vectors, halved_serial
from cases.runtime import chain_of, largest_difference, lowered_version, plan_of, serial, uncorrected, zoo_chain

from pipeplan.check.lateness import plan_delays
from pipeplan.check.validate import violations
from pipeplan.cost.stage_graph import stage_graph, updates_end_ns
from pipeplan.errors import BadInput
from pipeplan.runtime.device import CPU
from pipeplan.runtime.engine.asked import clipping
from pipeplan.runtime.lowering.instructions import Receive, Send, word
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.measure.recorder import Recorder
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.half import HalfOptions
from pipeplan.runtime.training.update.factors import Clipping, squares
from pipeplan.schedule.kinds import graph_of

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16,tied=true"  # embedding, two blocks, norm, head, loss
CLIP = 0.3  # below the norms of the first updates


@pytest.fixture(scope="module")
def chain():
    return zoo_chain(GPT, 2)


RUNS = {
    "flush": ([(0, 2, (0,)), (2, 6, (1,))], {}, {"accumulate": 2}),
    "flush, replicas": ([(0, 3, (0, 1)), (3, 6, (2,))], {"zero": 1}, {"accumulate": 4}),
    "2bw": ([(0, 2, (0,)), (2, 6, (1,))], {}, {"weights": "2bw-uniform"}),
    "2bw, replicas in chunks": (
        [(0, 3, (0,)), (3, 6, (1, 2))], {"bucket_parameters": 700, "coarsening": None}, {"weights": "2bw-uniform"},
    ),
    "2bw, replicas that share": ([(0, 3, (0, 1)), (3, 6, (2,))], {"zero": 1}, {"weights": "2bw-uniform"}),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_training_equals_that_with_torchs_own_clipping(case, chain, tmp_path):
    """Of the model as a whole, whose embedding and head are one weight in the first and the last stage."""
    stages, policy, settings = RUNS[case]
    plan = plan_of(chain, stages, optimizer="momentum", **settings)
    plan = replace(plan, policy=replace(plan.policy, **policy))
    interval = plan.interval
    options = {"steps": 6, "lr": 0.05, "seed": 2}
    told, norms = [], []
    report = run_plan(plan, ModelSpec(GPT), uncorrected(clip_norm=CLIP, save=tmp_path / "s", **options), told.append)
    version = (lambda _, m: max(m // interval - 1, 0)) if plan.policy.weights == "2bw-uniform" else None
    given = {"accumulate": interval, "optimizer": "momentum", "version": version, **options}
    losses, state = serial(GPT, 2, clip=CLIP, norms=norms, **given)
    assert report.losses == pytest.approx(losses, abs=1e-5)
    assert report.gradient_norms == pytest.approx(norms, rel=1e-4)
    assert [x.gradient_norm for x in told] == list(report.gradient_norms)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= 1e-5
    assert max(abs(a - b) for a, b in zip(losses, serial(GPT, 2, **given)[0], strict=True)) > 1e-2
    for found in report.states if len(report.states) == 2 else ():  # sums that are under way are not planned
        assert found.measured_bytes <= found.planned_bytes


def test_a_stage_reads_what_is_made_when_the_norm_is_known(tmp_path):
    chain, options = zoo_chain("gpt-tiny", 2), {"steps": 6, "lr": 0.05, "seed": 2}
    plan = clipping(
        plan_of(chain, [(0, 3, (0,)), (3, 8, (1,))], weights="2bw", accumulate=4, optimizer="momentum"), True
    )
    assert all(0 < x.mean < 1 for x in plan_delays(plan, graph_of(plan)))
    report = run_plan(plan, ModelSpec("gpt-tiny"), uncorrected(clip_norm=CLIP, save=tmp_path / "s", **options))
    given = {"version": lowered_version(plan, 6), "cuts": [3], "clip": CLIP, "norms": [], **options}
    losses, state = serial("gpt-tiny", 2, accumulate=4, optimizer="momentum", **given)
    assert report.losses == pytest.approx(losses, abs=1e-5)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= 1e-5


def test_the_loss_scale_is_taken_off_first(tmp_path):
    """In fp16, where two updates are skipped."""
    plan = plan_of(
        chain_of(exploding, 4, dtype=torch.float16), [(0, 2, (0,)), (2, 6, (1,))], accumulate=3, optimizer="adam"
    )
    plan = clipping(replace(plan, policy=replace(plan.policy, precision="mixed")), True)
    options = {"steps": 6, "lr": 0.02}
    half = HalfOptions(loss_scale=2.0**10, window=2)
    model = ModelSpec("cases.half:exploding", "cases.half:exploding_vectors")
    report = run_plan(plan, model, uncorrected(clip_norm=CLIP, half=half, save=tmp_path / "s", **options))
    losses, state, skipped, _ = halved_serial(
        exploding, exploding_vectors, 4, dtype=torch.float16, accumulate=3, optimizer="adam", scale=2.0**10, window=2,
        clip=CLIP, **options,
    )  # fmt: skip
    assert report.skipped == skipped == (2, 5)
    assert [i for i, norm in enumerate(report.gradient_norms, 1) if norm is None] == [2, 5]
    assert report.losses == pytest.approx(losses, abs=1e-3)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= 1e-3


def test_norms_are_torchs():
    gradients = [torch.randn(5, 7), torch.randn(3).double(), torch.full((2, 2), 6e4, dtype=torch.float16)]
    weights = [torch.nn.Parameter(torch.zeros_like(x).double()) for x in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.double()
    assert float(squares([], CPU)) == 0
    found = squares(gradients, CPU)
    assert float(found.sqrt()) == pytest.approx(float(torch.nn.utils.get_total_norm([x.grad for x in weights])))
    ours = Clipping(1.0, None, CPU, Recorder())
    ours.begin(1, gradients)
    assert ours.factor(1) == ours.factor(1) == pytest.approx(1 / (float(found.sqrt()) + 1e-6))
    ours.begin(2, [torch.zeros(2)])
    assert ours.factor(2) == 1


def test_a_plan_knows_what_is_waited_for(chain):
    """Drained: all stages' last backwards, then the sum of a number, then steps; else room for one gradient more."""
    stages = [(0, 2, (0,)), (2, 6, (1,))]
    layers = tuple(replace(layer, optimizer_ns=1000 * (i + 1)) for i, layer in enumerate(chain.layers))
    chain = replace(chain, layers=layers)
    for weights in ("flush", "2bw"):
        plain = plan_of(chain, stages, weights=weights, accumulate=4)
        plan = clipping(plain, True)
        assert violations(plan) == []
        assert clipping(plan, False) == plain
        before, after = (stage_graph(chain, p.platform, p.policy, p.allocation.stages) for p in (plain, plan))
        if weights == "flush":
            steps = 3000 + 4000 + 5000 + 6000
            updates = updates_end_ns(before, [50_000, 10_000])  # of the weight in both stages
            assert after.norm_ns == 2 * plan.platform.paths[-1][1] + 1  # 8 bytes take no whole nanosecond
            assert updates == 50_000 + before.stages[0].update_ns + steps
            assert updates_end_ns(after, [50_000, 10_000]) == updates + after.norm_ns
            assert all(x.update_share_ns == 0 for x in after.stages)
        else:
            more = [b.waiting_bytes - a.waiting_bytes for a, b in zip(before.stages, after.stages, strict=True)]
            tied = 4 * chain.layers[4].parameter_count  # waited before, too
            assert more == [after.stages[0].weight_bytes, after.stages[1].weight_bytes - tied]


def test_updates_come_as_late_as_they_may_where_nothing_drains(chain):
    plan = clipping(plan_of(chain, [(0, 2, (0,)), (2, 6, (1,))], weights="2bw", accumulate=2), True)
    lowered = lower_run(plan, 6)
    assert deadlock(lowered) == []
    for rank, instructions in enumerate(lowered.instructions):
        words = [word(x) for x in instructions if not isinstance(x, Send | Receive)]
        for version in range(1, 6):
            places = [words.index(f"{rank}G{version}"), words.index(f"N{version}"), words.index(f"{rank}U{version}")]
            assert places == sorted(places)
            following = words[places[2] + 1]
            assert following.endswith(f"v{version}") or words.index(f"{rank}G{version + 1}") == places[2] + 2
    short, long = (list(lower_run(plan, steps).instructions[0].kinds()) for steps in (1000, 2000))
    assert len(short) == len(long)  # what repeats itself is there once


def test_stages_that_update_each_for_itself_are_refused(chain):
    for weights in ("stash", "latest"):
        plan = plan_of(chain, [(0, 6, (0,))], weights=weights, accumulate=1)
        with pytest.raises(
            BadInput, match=rf"clip norm: the norm .* with weights {weights} each stage updates as soon"
        ):
            run_plan(plan, ModelSpec(GPT), uncorrected(steps=1, lr=0.1, clip_norm=1.0))
        (found,) = violations(replace(plan, policy=replace(plan.policy, clip=True)))
        assert found.startswith("the norm of all gradients is known once every stage has its own")
