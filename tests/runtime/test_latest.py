"""Whole runs of nF1B with the newest weights, in real processes, against a sequential emulation by formulas."""

import json
from dataclasses import replace
from shutil import rmtree

import pytest

torch = pytest.importorskip("torch")

from cases import faults
from cases import runtime as runtime_cases
from cases.newest_models import MODELS, exploding, image_layers, images, normed, sequences
from cases.runtime import chain_of, largest_difference, plan_of, uncorrected
from click.testing import CliRunner
from oracles.chrome_trace import shown
from oracles.newest_weights import Emulation, add, mean_square, own_weights
from torch import nn

from pipeplan import zoo
from pipeplan.check.bounds import any_bound
from pipeplan.check.validate import check
from pipeplan.cli import group
from pipeplan.errors import BadInput, RunFailed
from pipeplan.files.plans import plan_text
from pipeplan.files.profiles import read_profile
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.runtime.lowering.dry_run import program_lines
from pipeplan.runtime.lowering.instructions import Backward, Forward, Update, sentence
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import newest
from pipeplan.schedule.program import Step
from pipeplan.schedule.weight_versions import kept_by_stages, used, weight_policy

STEPS, LR = 20, 0.05


# --- plans -----------------------------------------------------------------------------------------------------------


def nf1b_plan(chain, stages, batch, *, limit=None, vertical_sync=False, optimizer="momentum"):
    made = tuple(x if isinstance(x, Stage) else Stage(*x, (index,)) for index, x in enumerate(stages))
    policy = Policy("latest", accumulate=batch, optimizer=optimizer, vertical_sync=vertical_sync)
    platform = Platform.flat(len(made), 10**12)
    schedule = Schedule("nf1b", batch, limit or len(made))
    plan = Plan(chain, platform, policy, Allocation(made), None, (), Provenance("by hand"), schedule)
    check(plan)
    return plan


def spec(name):
    return ModelSpec(f"cases.newest_models:{name}", f"cases.newest_models:{name.removesuffix('s')}_data")


TWO, THREE = [(0, 4), (4, 9)], [(0, 2), (2, 5), (5, 9)]
RUNS = {
    "two stages": ("sequences", TWO, 2, None, False),
    "three stages": ("sequences", THREE, 2, None, False),
    "three stages, vertical sync": ("sequences", THREE, 2, None, True),
    "two stages, vertical sync, many in flight": ("images", TWO, 3, 5, True),
    "three stages, one microbatch": ("images", THREE, 1, None, False),
    "three stages, four microbatches": ("images", [(0, 2), (2, 6), (6, 9)], 4, 4, False),
    "one stage": ("images", [(0, 9)], 3, None, False),
}


def emulated(plan, name, script, lr=LR, seed=0):
    """Train by formulas, one mini-batch after the other, with the versions of ``script``; return (losses, weights)."""
    _, make, data = MODELS[name]
    modules = make()
    parts = [modules[s.start : min(s.stop, len(modules))] for s in plan.allocation.stages]
    stages = [Emulation(part) for part in parts]
    history = [[own_weights(part)] for part in parts]
    speed = [[[torch.zeros_like(w) for w in own] for own in weights[0]] for weights in history]
    forward, backward = {}, {}
    for x in (x for rank in script.instructions for x in rank):
        if isinstance(x, Forward):
            forward[x.stage, x.microbatch] = x.version
        elif isinstance(x, Backward):
            backward |= {(x.stage, m): x.version for m in range(x.microbatch - x.covers + 1, x.microbatch + 1)}
    losses = []
    for k in range(script.steps):
        found = [[[torch.zeros_like(w) for w in own] for own in weights[0]] for weights in history]
        for m in range(k * script.interval, (k + 1) * script.interval):
            x, target = data(m, seed)
            kept = []
            for s, stage in enumerate(stages):
                x, stored = stage.forward(x, history[s][forward[s, m]])
                kept.append(stored)
            value, gradient = mean_square(x, target)
            losses.append(float(value))
            gradient = gradient / script.interval
            for s in reversed(range(len(stages))):
                gradient, own = stages[s].backward(gradient, kept[s], history[s][backward[s, m]])
                for total, more in zip(found[s], own, strict=True):
                    add(total, more)
        for s, weights in enumerate(history):
            rate = 0.9 if plan.policy.optimizer == "momentum" else 0.0
            speed[s] = [
                [rate * v + g for v, g in zip(vs, gs, strict=True)] for vs, gs in zip(speed[s], found[s], strict=True)
            ]
            weights.append(
                [
                    [w - lr * v for w, v in zip(ws, vs, strict=True)]
                    for ws, vs in zip(weights[-1], speed[s], strict=True)
                ]
            )
    return losses, [w for weights in history for own in weights[-1] for w in own]


@pytest.mark.parametrize("case", RUNS)
def test_a_run_equals_its_sequential_emulation(case, tmp_path):
    name, stages, batch, limit, vertical_sync = RUNS[case]
    plan = nf1b_plan(chain_of(MODELS[name][0], 4), stages, batch, limit=limit, vertical_sync=vertical_sync)
    script = lower_run(plan, STEPS)
    losses, weights = emulated(plan, name, script)
    report = run_plan(plan, spec(name), uncorrected(steps=STEPS, lr=LR, save=tmp_path / "state.pt"))
    exact = name == "images"  # in double precision
    assert report.losses == pytest.approx(losses, rel=0, abs=1e-10 if exact else 1e-5)
    state = torch.load(tmp_path / "state.pt")
    keys = nn.Sequential(*MODELS[name][1]())
    trained = [state[key] for key, _ in keys.named_parameters()]
    for found, expected in zip(trained, weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 if exact else 1e-5)
    timeline = script.timeline
    kept = kept_by_stages(timeline, weight_policy(plan.policy), script.interval)
    assert [x.versions for x in report.stages] == [x.planned_versions for x in report.stages] == kept
    assert kept == [1] * len(stages) or (vertical_sync and max(kept) > 1)
    for held in report.activations:
        assert held.measured_bytes == held.planned_bytes
    assert report.planned_period_ns > 0
    assert report.calibrated_period_ns > 0
    assert report.measured_period_ns > 0
    assert all(x.forward_ns > 0 and x.backward_ns > 0 for x in report.stages)


@pytest.mark.parametrize(
    ("devices", "vertical_sync"),
    [
        (((0,), (1,), (2,)), False),
        (((0,), (1,), (2,)), True),
        (((0,), (1,), (0,)), False),
        (((0,), (1, 2), (3,)), False),
    ],
)
def test_newest_weights_in_a_periodic_pattern_too(devices, vertical_sync, tmp_path):
    """1F1B with a backward for each microbatch: those of one mini-batch may be taken at several versions.

    Stages may have replicas, or share a device, which nF1B doesn't.
    """
    plan = plan_of(
        chain_of(images, 4),
        [(*cut, own) for cut, own in zip(THREE, devices, strict=True)],
        weights="latest",
        accumulate=2,
        optimizer="momentum",
        vertical_sync=vertical_sync,
    )
    script = lower_run(plan, 6)
    losses, weights = emulated(plan, "images", script)
    report = run_plan(plan, spec("images"), uncorrected(steps=6, lr=LR, save=tmp_path / "state.pt"))
    assert report.losses == pytest.approx(losses, rel=0, abs=1e-10)
    state = torch.load(tmp_path / "state.pt")
    for key, expected in zip([k for k, _ in nn.Sequential(*image_layers()).named_parameters()], weights, strict=True):
        torch.testing.assert_close(state[key], expected, rtol=0, atol=1e-10)
    assert [x.versions for x in report.stages] == [x.planned_versions for x in report.stages]
    assert max(x.versions for x in report.stages) == 1 + vertical_sync


@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize(("stages", "batch", "limit"), [(TWO, 2, 2), (THREE, 4, 3), (THREE, 1, 6), (THREE, 2, 9)])
def test_versions_are_those_of_the_simulated_schedule(stages, batch, limit, vertical_sync):
    plan = nf1b_plan(chain_of(images, 4), stages, batch, limit=limit, vertical_sync=vertical_sync)
    script = lower_run(plan, 12)
    passes = used(script.timeline, weight_policy(plan.policy), batch)
    expected = {use.step: use.version for uses in passes for use in uses}
    seen = set()
    for rank in script.instructions:
        made = 0
        for x in rank:
            if isinstance(x, Forward | Backward):
                kind = "F" if isinstance(x, Forward) else "B"
                assert x.version == expected[Step(x.microbatch, script.graph.position[kind, x.stage])]
                assert x.version <= made
                assert vertical_sync or x.version == made
                seen.add(made - x.version)
            elif isinstance(x, Update):
                made += 1
        assert made == 12
    assert seen == {0} or (vertical_sync and max(seen) >= 1)


def test_one_backward_of_several_microbatches_is_told_as_such():
    script = lower_run(nf1b_plan(chain_of(images, 4), TWO, 2), 3)
    lines = program_lines(script)
    assert "1F0v0" in lines[1]
    assert "1B0-1v0 1f3<0 1b0-1>0 1U1" in lines[1]  # the stage before waits for the gradient, nobody for the update
    assert "0b2-3<1" in lines[0]
    backward = next(x for x in script.instructions[0] if isinstance(x, Backward))
    assert sentence(backward) == "the backward of microbatches 0 to 1 on stage 0"


@pytest.mark.parametrize(
    ("name", "stages"),  # in 32 and in 64 bits
    [
        ("sequences", [(0, 9)]),
        ("sequences", THREE),  # not TWO: without a pipeline the gradient at its cut isn't contiguous, as messages are
        ("images", TWO),
    ],
)
def test_one_mini_batch_at_a_time_is_plain_training_to_the_bit(name, stages, tmp_path):
    """Nothing is newer than anything then: torch's SGD on the mean of three losses, with one backward for all."""
    model, _, _ = MODELS[name]
    plan = nf1b_plan(chain_of(model, 4), stages, 3, limit=1, optimizer="sgd")
    report = run_plan(plan, spec(name), uncorrected(steps=5, lr=LR, save=tmp_path / "state.pt"))
    losses, state = plain(name, steps=5, batch=3)
    assert report.losses == tuple(losses)
    found = torch.load(tmp_path / "state.pt")
    assert found.keys() == state.keys()
    assert [key for key in state if not torch.equal(found[key], state[key])] == []


def plain(name, steps, batch):
    """Losses and state of training without a pipeline."""
    _, layers, data = MODELS[name]
    model = nn.Sequential(*layers()).train()
    stepper = torch.optim.SGD(model.parameters(), lr=LR)
    before, losses = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for k in range(steps):
        stepper.zero_grad()
        pairs = [data(m, 0) for m in range(batch * k, batch * (k + 1))]
        found = [nn.functional.mse_loss(model(x), target) for x, target in pairs]
        torch.stack(found).mean().backward()
        stepper.step()
        losses += [loss.item() for loss in found]
    torch.set_num_threads(before)
    return losses, model.state_dict()


def test_one_mini_batch_at_a_time_is_synchronous_training_in_mixed_precision_too(tmp_path):
    """Nothing is newer than anything then; weights of 16 bits, their masters and what is offloaded work the same."""
    model = zoo.load("gpt-tiny")
    chain = chain_of(model, 2, data=model.data(2), dtype=torch.bfloat16)
    plans = {
        "nf1b": nf1b_plan(chain, [(0, 4), (4, 8)], 1, limit=1, optimizer="adam"),
        "flush": plan_of(chain, [(0, 4, (0,)), (4, 8, (1,))], weights="flush", accumulate=1, optimizer="adam"),
    }
    states = []
    for kind, plan in plans.items():
        policy = replace(plan.policy, precision="mixed", offload=True, bucket_parameters=5000)
        report = run_plan(
            replace(plan, policy=policy),
            ModelSpec("gpt-tiny"),
            uncorrected(steps=4, lr=0.002, save=tmp_path / f"{kind}.pt"),
        )
        assert [x.measured_bytes for x in report.activations] == [x.planned_bytes for x in report.activations]
        states.append(torch.load(tmp_path / f"{kind}.pt"))
    assert largest_difference(*states) == 0
    assert largest_difference(states[0], {key: torch.zeros_like(x) for key, x in states[0].items()}) > 0


def test_activations_and_versions_are_ordered_as_predicted():
    """The same model and cuts under nF1B, with weight stashing and with two versions."""
    chain = chain_of(sequences, 4)
    stages = [(start, stop, (s,)) for s, (start, stop) in enumerate(THREE)]
    plans = {
        "latest": nf1b_plan(chain, THREE, 4),
        "stash": plan_of(chain, stages, weights="stash", optimizer="momentum"),
        "2bw": plan_of(chain, stages, weights="2bw", optimizer="momentum"),
    }
    planned, measured, versions = {}, {}, {}
    for weights, plan in plans.items():
        report = run_plan(plan, spec("sequences"), uncorrected(steps=6, lr=0.01))
        planned[weights] = [x.planned_bytes for x in report.activations]
        measured[weights] = [x.measured_bytes for x in report.activations]
        versions[weights] = [x.versions for x in report.stages]
    assert measured == planned
    for s in range(3):
        assert sorted(plans, key=lambda w: measured[w][s]) == sorted(plans, key=lambda w: planned[w][s])
        assert measured["latest"][s] > measured["stash"][s]  # a mini-batch waits for its backward as a whole
    assert versions["latest"] == [1, 1, 1]
    assert versions["2bw"] == [2, 2, 1]
    assert versions["stash"] == [3, 2, 1]


@pytest.mark.alone
def test_a_run_takes_the_period_that_its_operations_allow():
    """Two stages of two pauses each, mini-batches of two microbatches: 60 ms per microbatch when the stages overlap."""
    chain = chain_of(runtime_cases.pausing, 4)
    forward_ns, backward_ns = round(runtime_cases.FORWARD_S * 1e9), round(runtime_cases.BACKWARD_S * 1e9)
    layers = [replace(x, forward_ns=forward_ns, backward_ns=backward_ns) for x in chain.layers]
    layers[-1] = replace(layers[-1], forward_ns=10**4, backward_ns=10**4)
    plan = nf1b_plan(replace(chain, layers=tuple(layers)), [(0, 2), (2, 5)], 2)

    def measured():
        report = run_plan(
            plan, ModelSpec("cases.runtime:pausing", "cases.runtime:vectors"), uncorrected(steps=12, lr=0.01)
        )
        for stage in report.stages:
            assert stage.forward_ns >= 2 * forward_ns
            assert 2 * backward_ns <= stage.backward_ns < 4 * backward_ns  # of one microbatch, not of two
        assert 0.8 <= report.measured_period_ns / report.calibrated_period_ns <= 1.25
        assert report.measured_period_ns >= report.planned_period_ns >= 2 * (forward_ns + backward_ns)

    runtime_cases.undisturbed(measured)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def state_after(plan, name, folder, steps, **options):
    target = folder / f"{steps}-{'-'.join(options)}.pt"
    run_plan(plan, spec(name), uncorrected(steps=steps, lr=LR, save=target, **options))
    return torch.load(target)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    """Both drain after every third update. The second goes on from the checkpoint before the first's last one."""
    plan, folder = nf1b_plan(chain_of(sequences, 4), THREE, 2), tmp_path / "c"
    whole = state_after(plan, "sequences", tmp_path, 9, checkpoint=folder, every=3)
    rmtree(folder / "step-00000009")
    assert newest(str(folder)).position.step == 6
    resumed = state_after(plan, "sequences", tmp_path, 9, checkpoint=folder, every=3, resume=True)
    assert largest_difference(whole, resumed) == 0
    straight = state_after(plan, "sequences", tmp_path, 9)
    assert largest_difference(whole, straight) > 0  # a drain gives the next mini-batches newer weights


def test_a_run_goes_on_under_other_plans(tmp_path):
    """With other cuts, and under 2bw."""
    chain = chain_of(sequences, 4)
    cut = nf1b_plan(chain, [(0, 5), (5, 9)], 4, limit=3, vertical_sync=True)
    plans = (
        nf1b_plan(chain, THREE, 2),
        cut,
        plan_of(chain, [(0, 5, (0,)), (5, 9, (1,))], weights="2bw", optimizer="momentum"),
    )
    before = {}
    for turn, plan in enumerate(plans):
        options = {"checkpoint": tmp_path / "steps", "resume": True}
        state = state_after(plan, "sequences", tmp_path, 4 + 3 * turn, **options)
        assert newest(str(tmp_path / "steps")).position.step == 4 + 3 * turn
        assert not turn or largest_difference(before, state) > 0
        assert all(bool(x.isfinite().all()) for x in state.values())
        before = state


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A plan file, and the words that say what it trains."""
    plan = nf1b_plan(chain_of(sequences, 4), TWO, 2, vertical_sync=True)
    bound = any_bound(Problem(plan.chain, plan.platform, plan.policy))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(plan_text(replace(plan, lower_bounds=(bound,))))
    return path, "--model", "cases.newest_models:sequences", "--data", "cases.newest_models:sequence_data"


def command(*arguments):
    done = CliRunner().invoke(group, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_every_epoch_ends_in_a_checkpoint(written, tmp_path):
    """Three epochs of three updates; the second run begins again after the second epoch."""
    states = []
    for epochs in ([3], [2, 3]):
        folder, state = tmp_path / f"after-{len(epochs)}", tmp_path / f"{len(epochs)}.pt"
        for count in epochs:
            command(
                "run", *written, "--epochs", count, "--epoch-length", 7, "--checkpoint", folder, "--resume",
                "--save", state,
            )  # fmt: skip
        assert sorted(path.name for path in folder.iterdir()) == [f"step-{3 * k:08d}" for k in (1, 2, 3)]
        states.append(torch.load(state))
    assert largest_difference(*states) == 0


def test_a_run_is_compared_with_its_plan(written, tmp_path):
    trace, profile = tmp_path / "trace.json", tmp_path / "profile.json"
    done = command("run", *written, "--steps", 30, "--trace", trace, "--json")
    figures = json.loads(done.stdout)
    assert [json.loads(line)["step"] for line in done.stderr.splitlines()] == list(range(1, 31))
    assert figures["measured_period_ns"] > 0
    assert max(stage["versions"] for stage in figures["stages"]) == 2
    seen = shown(trace.read_text())
    backwards = [name for _, _, name in seen.slices["GPU 0 (rank 0)"] if name.startswith("0B")]
    assert backwards == [f"0B{m}" for m in range(1, 60, 2)]
    assert all(arrow == ["1B1", "1SEND_B1", "0B1"] for arrow in seen.arrows if arrow[0] == "1B1")
    compared = json.loads(command("diff", written[0], trace, "--recalibrated", profile, "--json").stdout)
    rows = {(row["kind"], row["stage"]): row["measured_ns"] for row in compared["operations"]}
    assert rows["B", 1] == figures["stages"][1]["backward_ns"]
    assert sum(layer.backward_ns for layer in read_profile(str(profile)).layers[4:]) == rows["B", 1]
    text = command("run", *written, "--steps", 4).stdout
    assert "weight versions kept, by stage: 2, 2 measured, 2, 2 predicted" in text
    assert "1B0-1v0" in command("run", *written, "--steps", 2, "--dry-run").stdout


# --- what goes wrong -------------------------------------------------------------------------------------------------


def vectors_plan(model, **options):
    chain = chain_of(model, 4)
    return nf1b_plan(chain, [(0, 1), (1, len(chain))], 2, **options)


def test_a_layer_that_keeps_copies_of_its_weights_is_refused_by_name():
    plan = vectors_plan(normed)
    with pytest.raises(BadInput, match=r"model: layer 1 \(.*\) keeps a copy of its weights, float32 \(16, 1\)"):
        run_plan(plan, ModelSpec("cases.newest_models:normed", "cases.runtime:vectors"), uncorrected(steps=2, lr=LR))


def test_it_runs_where_the_plan_recomputes_it():
    plan = vectors_plan(normed)
    stages = (plan.allocation.stages[0], replace(plan.allocation.stages[1], checkpoint=((1, 2),)))
    plan = replace(plan, allocation=Allocation(stages))
    report = run_plan(
        plan, ModelSpec("cases.newest_models:normed", "cases.runtime:vectors"), uncorrected(steps=8, lr=LR)
    )
    assert [x.measured_bytes for x in report.activations] == [x.planned_bytes for x in report.activations]


def test_a_loss_that_is_no_number_is_named():
    plan = vectors_plan(exploding)
    words = r"rank 1 failed in the forward of microbatch (\d+) on stage 1: the loss is nan for microbatch \1;"
    with pytest.raises(RunFailed, match=words):
        run_plan(plan, ModelSpec("cases.newest_models:exploding", "cases.runtime:vectors"), uncorrected(steps=9, lr=LR))


def test_data_of_another_shape_is_named():
    plan = nf1b_plan(chain_of(images, 4), TWO, 2)
    with pytest.raises(RunFailed, match=r"rank 0 failed .* stage 0 gets float32 \(4, 5, 6\) for microbatch 0"):
        run_plan(
            plan,
            ModelSpec("cases.newest_models:images", "cases.newest_models:sequence_data"),
            uncorrected(steps=2, lr=LR),
        )


def test_a_traced_model_trains_as_its_layers_do(tmp_path):
    """Whose training is what formulas say; here its graph's stages have newer weights in backwards than in forwards."""
    found = []
    for build, cut in (("waved", 2), ("waved_whole", 6)):
        chain = chain_of(getattr(runtime_cases, build), 4, data=runtime_cases.vectors)
        timed = (0, 1, cut, cut + 1, len(chain) - 1)  # so that both plans have the same order
        untimed = {"forward_ns": 0, "backward_ns": 0}
        layers = (x if i in timed else replace(x, **untimed) for i, x in enumerate(chain.layers))
        chain = replace(chain, layers=tuple(layers))
        plan = nf1b_plan(chain, [Stage(0, cut, (0,)), Stage(cut, len(chain), (1,))], 2)
        model = ModelSpec(f"cases.runtime:{build}", "cases.runtime:vectors")
        report = run_plan(plan, model, uncorrected(steps=6, lr=LR, save=tmp_path / "s"))
        found.append((report.losses, torch.load(tmp_path / "s")))
        assert [x.measured_bytes for x in report.activations] == [x.planned_bytes for x in report.activations]
    (losses, state), (same, again) = found
    assert same == pytest.approx(losses, abs=1e-6)
    assert largest_difference({f"layers.{name}": x for name, x in state.items()}, again) < 1e-6


def test_a_failing_backward_names_all_its_microbatches():
    chain = chain_of(faults.backward_raising, 4)
    plan = nf1b_plan(chain, [(0, 3), (3, len(chain))], 3)
    with pytest.raises(RunFailed, match=r"in the backward of microbatches 3 to 5 on stage 1: ArithmeticError: no way"):
        run_plan(plan, ModelSpec("cases.faults:backward_raising", "cases.runtime:vectors"), uncorrected(steps=9, lr=LR))
