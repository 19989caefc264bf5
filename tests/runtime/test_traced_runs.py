"""Runs of models that are no lists of layers, in real processes, against plain training of the original module."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from cases import traced as traced_cases
from cases.half import halved_serial
from cases.runtime import chain_cut, chain_of, largest_difference, plan_of, simulated_version, uncorrected
from cases.traced import DATA, serial

import pipeplan as pp
from pipeplan.check.bounds import any_bound
from pipeplan.check.validate import check
from pipeplan.cli import group
from pipeplan.errors import BadInput
from pipeplan.files.plans import load_plan, plan_text
from pipeplan.partition.granularity import merge_articulation, merge_share
from pipeplan.plan import Stage
from pipeplan.problem import Problem
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.model.build.fitting import check_model, fitted
from pipeplan.runtime.model.build.loading import load_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.network import TensorSpec
from pipeplan.runtime.model.pieces import message_spec, packed, unpacked
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.half import HalfOptions


def chain(build):
    return chain_of(build, 4, data=DATA[build])


def position(profile, name):
    return [layer.name for layer in profile.layers].index(name)


def spec_of(build):
    return ModelSpec(f"cases.traced:{build.__name__}", f"cases.traced:{DATA[build].__name__}")


def run(plan, build, tmp_path, *, steps=2, lr=0.1, **options):
    """The report of a run, and the state of the trained model."""
    report = run_plan(plan, spec_of(build), uncorrected(steps=steps, lr=lr, save=tmp_path / "trained.pt", **options))
    return report, torch.load(tmp_path / "trained.pt")


def equal(one, other):
    return max(abs(x - y) for x, y in zip(one, other, strict=True)) < 1e-6


def planned_bytes_are_held(report):
    return [x.measured_bytes for x in report.activations] == [x.planned_bytes for x in report.activations]


def without_statistics(state):
    """Those of batch norm are each replica's own, which has seen its own microbatches alone."""
    return {key: x for key, x in state.items() if "running" not in key and "tracked" not in key}


def of_first_replicas(build):
    """The norm of the first stage, which two replicas have, averages over every other microbatch."""

    def made(batch):
        module, *rest = build(batch)
        calls, kept = count(), {}

        def before(norm, _):
            kept.update({name: x.clone() for name, x in norm._buffers.items()})

        def after(norm, *_):
            norm._buffers.update(kept if next(calls) % 2 else {})

        for norm in (module.one.norm,) if build is traced_cases.residual else ():
            norm.register_forward_pre_hook(before)
            norm.register_forward_hook(after)
        return module, *rest

    return made


CUTS = {traced_cases.residual: ("one.relu", "other.second"), traced_cases.transformer: ("blocks.0.matmul", "again")}
SHAPES = {"contiguous": ((0,), (1,), (2,)), "replicated": ((0, 1), (2,), (3,)), "alternating": ((0,), (1,), (0,))}


def stages_of(profile, cuts, devices):
    bounds = [0, *(position(profile, cut) for cut in cuts), len(profile)]
    return [(bounds[s], bounds[s + 1], own) for s, own in enumerate(devices)]


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (traced_cases.residual, "replicated"), (traced_cases.residual, "alternating"),
        (traced_cases.transformer, "contiguous"),
    ],
)  # fmt: skip
def test_a_traced_model_trains_as_the_module_does(build, shape, tmp_path):
    """Both cuts are crossed by what was made much earlier; the transformer's mask has no gradient."""
    profile = chain(build)
    plan = plan_of(profile, stages_of(profile, CUTS[build], SHAPES[shape]), weights="flush", accumulate=4)
    report, state = run(plan, build, tmp_path)
    plainly = of_first_replicas(build) if shape == "replicated" else build
    losses, expected = serial(plainly, steps=2, accumulate=4, optimizer="sgd", lr=0.1, data=DATA[build])
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6
    if shape == "alternating":  # stages of one rank hold what both read from the data once
        assert all(x.measured_bytes <= x.planned_bytes for x in report.activations)
    else:
        assert planned_bytes_are_held(report)


def test_layers_in_another_order_than_the_models_train_as_the_module_does(tmp_path):
    """The plan has the second branch on the first device, and the first on the second; it is read from its file."""
    build = traced_cases.branches
    profile = chain(build)
    names = [layer.name for layer in profile.layers]
    order = [0, *(names.index(x) for x in ("right", "tanh", "left", "left_norm")), *range(5, len(names))]
    assert order != sorted(order)
    plan = plan_of(profile.reordered(order), [(0, 3, (0,)), (3, len(names), (1,))], weights="flush", accumulate=4)
    model = fitted(load_model(spec_of(build), 4, 0), plan.chain)
    assert [layer.name for layer in model.layers][:5] == ["enter", "right", "tanh", "left", "left_norm"]
    assert [str(x) for x in model.cut(3).specs] == ["float32 (4, 4, 6, 6)"] * 2
    bounded = replace(plan, lower_bounds=(any_bound(Problem(plan.chain, plan.platform, plan.policy)),))
    (tmp_path / "plan.json").write_text(plan_text(bounded))
    report, state = run(load_plan(str(tmp_path / "plan.json")), build, tmp_path)
    losses, expected = serial(build, steps=2, accumulate=4, optimizer="sgd", lr=0.1)
    assert list(report.losses) == losses
    assert largest_difference(state, expected) == 0


def test_several_values_cross_the_cuts_and_some_are_only_passed_on():
    model = load_model(spec_of(traced_cases.transformer), 4, 0)
    middle = model.cut(position(chain(traced_cases.transformer), "blocks.1.mix"))
    assert [str(spec) for spec in middle.specs] == [
        "bool (4, 1, 5, 5)", "float32 (4, 5, 8)", "float32 (4, 5, 8)",
    ]  # fmt: skip
    assert middle.trained == middle.values[1:]
    assert middle.forward == TensorSpec((100 + 2 * 4 * 4 * 5 * 8,), torch.uint8)
    assert middle.backward.nbytes == 2 * 4 * 4 * 5 * 8


def test_weight_versions_are_those_of_the_plan(tmp_path):
    build = traced_cases.residual
    profile = chain(build)
    stages = stages_of(profile, CUTS[build], SHAPES["contiguous"])
    plan = plan_of(profile, stages, weights="2bw", accumulate=3)
    report, state = run(plan, build, tmp_path, steps=6, lr=0.05)
    model = load_model(spec_of(build), 4, 0)
    stage_of = {
        name: s
        for s, (start, stop, _) in enumerate(stages)
        for layer in model.layers[start:stop]
        for name in layer.names.values()
    }
    version = simulated_version(plan, 18)
    how = {"optimizer": "sgd", "lr": 0.05, "version": version, "stage_of": lambda n: stage_of.get(n, 0)}
    losses, expected = serial(build, steps=6, accumulate=3, **how)
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6


def test_segments_of_a_graph_are_recomputed(tmp_path):
    build = traced_cases.residual
    profile = chain(build)
    a, b, c = (position(profile, name) for name in ("one.second", "other.norm", "cat"))
    stages = [Stage(0, b, (0,), ((2, a),)), Stage(b, len(profile), (1,), ((b, b + 2), (b + 3, c)))]
    plan = plan_of(profile, stages, weights="flush", accumulate=4)
    report, state = run(plan, build, tmp_path)
    losses, expected = serial(build, steps=2, accumulate=4, optimizer="sgd", lr=0.1)
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6
    assert planned_bytes_are_held(report)


def test_stages_of_a_graph_share_weights_and_a_checkpoint_goes_on_with_other_cuts(tmp_path):
    """The head's weight is that of an embedding in the first stage, on another device, then on the same, and at last in
    the only stage."""
    build = traced_cases.entwined
    profile = chain(build)
    assert profile.tied
    options = {"lr": 0.1, "checkpoint": tmp_path / "checkpoints", "resume": True}
    losses, expected = serial(build, steps=4, accumulate=3, optimizer="momentum", lr=0.1)
    cuts = ("blocks.0.mix", "head"), ("blocks.0.matmul", "again")
    for turn, devices in enumerate([((0,), (1,), (2,)), ((0,), (1,), (0,))]):
        stages = stages_of(profile, cuts[turn], devices)
        plan = plan_of(profile, stages, weights="flush", accumulate=3, optimizer="momentum")
        report, state = run(plan, build, tmp_path, steps=2 * turn + 2, **options)
        assert equal(report.losses, losses[6 * turn : 6 * turn + 6])
    assert largest_difference(state, expected) < 1e-6
    module, _, _ = build(4)
    module.load_state_dict(state)  # under all its names, tied or unused
    plan = plan_of(profile, [(0, len(profile), (0,))], accumulate=2)
    report, _ = run(plan, build, tmp_path, steps=1, load=tmp_path / "trained.pt")
    x, target = DATA[build](0, 0)
    assert report.losses[0] == pytest.approx(traced_cases.text_loss(module(x), target).item(), abs=1e-6)


def test_several_inputs_outputs_and_targets_by_threads(tmp_path):
    """The first stage only passes one input on; what arrives decides the order, and messages are late."""
    build = traced_cases.two_inputs
    profile = chain(build)
    plan = plan_of(profile, [(0, 3, (0,)), (3, 9, (1,)), (9, len(profile), (2,))], weights="flush", accumulate=4)
    report, state = run(under(plan, "message-driven", 3), build, tmp_path, link_delay_s=0.001)
    losses, expected = serial(build, steps=2, accumulate=4, optimizer="sgd", lr=0.1)
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6


def uneven(profile):
    """The profile with times that leave several layers in each share."""
    return replace(profile, layers=tuple(replace(x, forward_ns=10**6 + i) for i, x in enumerate(profile.layers)))


def test_merged_layers_are_found_again(tmp_path):
    build = traced_cases.residual
    profile = merge_share(uneven(chain(build)), 0.1)
    assert 3 < len(profile) < len(chain(build))
    fit(load_model(spec_of(build), 4, 0), profile)
    profile = merge_articulation(chain(build))
    assert 3 < len(profile) < len(chain(build))
    half = len(profile) // 2
    plan = plan_of(profile, [(0, half, (0,)), (half, len(profile), (1,))], weights="flush", accumulate=2)
    report, state = run(plan, build, tmp_path, steps=2)
    losses, expected = serial(build, steps=2, accumulate=2, optimizer="sgd", lr=0.1)
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6
    assert planned_bytes_are_held(report)


def test_messages_keep_types_and_share_no_memory():
    tensors = [
        torch.tensor(2.5), torch.tensor([[True, False]]), torch.arange(3), torch.randn(4, 2).t(), torch.ones(0, 3),
        torch.arange(6.0)[::2],
    ]  # fmt: skip
    specs = [TensorSpec(tuple(x.shape), x.dtype) for x in tensors]
    message = packed(tensors)
    assert TensorSpec(tuple(message.shape), message.dtype) == message_spec(specs)
    found = unpacked(message, specs)
    for one, other in zip(found, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.untyped_storage().nbytes() == one.nbytes
    assert packed(tensors[3:4]) is tensors[3]
    assert unpacked(tensors[3], specs[3:4])[0] is tensors[3]
    assert chain_cut(3, specs[2]).backward == specs[2]


def fit(model, profile):
    """Raise what a run does for a model that isn't the profile's."""
    model = fitted(model, profile)
    check_model(model, profile)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("other_residual", r"model: layer 9 \(other.first\) has 740 bytes of parameters; the plan's profile says 592"),
        ("reconnected", r"model: layer 16 \(cat\) reads layers 8, 15; the plan's profile says layers 0, 15"),
        ("transformer", "model: has 'eq' where the plan's profile test has layer 0, 'enter'"),
    ],
)
def test_every_difference_from_the_profile_is_named(build, words):
    model = load_model(ModelSpec(f"cases.traced:{build}", "cases.traced:images"), 4, 0)
    with pytest.raises(BadInput, match=words):
        fit(model, chain(traced_cases.residual))


def test_more_differences_from_the_profile():
    profile = chain(traced_cases.residual)
    model = load_model(spec_of(traced_cases.residual), 4, 0)
    shorter = replace(profile, layers=profile.layers[:-1], edges=tuple(x for x in profile.edges if 19 not in x))
    for wrong, words in (
        (shorter, "has 'leave' where .* has layer 18, 'leave'"),
        (replace(profile, input_bytes=5), "example input has 576 bytes; the plan's profile says 5"),
        (
            replace(profile, layers=(replace(profile.layers[0], output_bytes=9), *profile.layers[1:])),
            "puts out 2304 bytes",
        ),
    ):
        with pytest.raises(BadInput, match=words):
            fit(model, wrong)


def test_a_list_of_layers_is_no_graph():
    plan = plan_of(chain(traced_cases.residual), [(0, 9, (0,)), (9, 20, (1,))], accumulate=2)
    with pytest.raises(BadInput, match="is a chain of 5 layers; the plan's profile test is a graph"):
        run_plan(plan, ModelSpec("cases.runtime:healthy", "cases.runtime:vectors"), uncorrected(steps=1, lr=0.1))


def test_statistics_that_are_written_twice_stay_in_one_layer():
    assert [x.name for x in chain(traced_cases.shared_norm).layers] == ["one", "batch_norm..batch_norm", "loss"]


def test_what_crosses_a_cut_lies_in_memory_as_it_did(tmp_path):
    """A kernel that wants another order would keep copies that nobody has planned."""
    build = traced_cases.attending
    profile = chain(build)
    cut, end = position(profile, "scaled_dot_product_attention"), len(profile)
    plan = plan_of(profile, [(0, cut, (0,)), (cut, end, (1,))], weights="flush", accumulate=2)
    assert {spec.order for spec in load_model(spec_of(build), 4, 0).cut(cut).specs} == {(0, 2, 1, 3)}
    report, state = run(plan, build, tmp_path, steps=2)
    losses, expected = serial(build, steps=2, accumulate=2, optimizer="sgd", lr=0.1)
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6
    assert planned_bytes_are_held(report)


@pytest.mark.parametrize("again", [False, True])
def test_a_model_that_returns_its_loss_and_has_a_state_that_forwards_change(again, tmp_path):
    """Several microbatches are in flight, each with its own averages; types are the author's."""
    build = traced_cases.averaging
    profile = chain(build)
    cut, end = position(profile, "last"), len(profile)
    first = Stage(0, cut, (0,), ((2, cut),) if again else ())
    plan = plan_of(profile, [first, (cut, end, (1,))], weights="flush", accumulate=4)
    report, state = run(plan, build, tmp_path)
    losses, expected = serial(build, steps=2, accumulate=4, optimizer="sgd", lr=0.1)
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6
    assert state["average"].abs().sum() > 0
    assert state["calls"] == state["norm.num_batches_tracked"] == 8
    assert planned_bytes_are_held(report) or again  # what buffers were is held beside what is planned
    assert "recomputes by itself" in report.notes[0]
    build(4)[0].load_state_dict(state)


def test_replicas_that_would_train_by_other_buffers_each_are_refused(tmp_path):
    unaware = replace(chain(traced_cases.averaging), changed="")  # as of an estimate
    cut, end = position(unaware, "last"), len(unaware)
    plan = plan_of(unaware, [(0, cut, (0, 1)), (cut, end, (2,))], weights="flush", accumulate=4)
    with pytest.raises(BadInput, match=r"Averaging trains by its buffer calls, .* plan with --no-replicas"):
        run(plan, traced_cases.averaging, tmp_path)


def test_what_trains_by_buffers_that_forwards_change_is_planned_without_replicas(tmp_path):
    build = traced_cases.power_iterated
    profile = chain(build)
    assert profile.changed == "enter.weight_u"
    assert not chain(traced_cases.shared_norm).changed, "running statistics train nothing"
    asked = {"gpus": 2, "mem": "1GB", "bandwidth": "12GB/s", "weights": "flush", "accumulate": 4}
    assert pp.plan(replace(profile, changed=""), **asked).plan.allocation.data_parallel
    found = pp.plan(profile, **asked)
    assert all(stage.replicas == 1 for stage in found.plan.allocation.stages)
    report, state = run(found.plan, build, tmp_path, steps=2)
    losses, expected = serial(build, steps=2, accumulate=4, optimizer="sgd", lr=0.1)
    assert equal(report.losses, losses)
    assert largest_difference(state, expected) < 1e-6


def test_what_is_written_through_views_and_a_tensor_that_stands_twice_in_the_example(tmp_path):
    """Layers were made that trained five of six weights never, and that read labels for tokens."""
    build = traced_cases.recurrent
    profile = chain(build)
    plan = plan_of(profile, stages_of(profile, ("head",), ((0,), (1,))), weights="flush", accumulate=2)
    report, state = run(plan, build, tmp_path, steps=10)
    losses, expected = serial(build, steps=10, accumulate=2, optimizer="sgd", lr=0.1)
    assert list(report.losses) == losses
    assert largest_difference(state, expected) == 0
    assert losses[-1] < losses[0] - 0.3
    assert report.compared.startswith("the first microbatch trains as in plain torch")
    silent = run(plan, build, tmp_path, steps=1, compares=False)[0]
    assert (silent.losses, silent.compared) == (report.losses[:2], "")


def test_data_must_be_like_the_example():
    model = load_model(ModelSpec("cases.traced:two_inputs", "cases.traced:vectors"), 4, 0)
    with pytest.raises(BadInput, match="microbatch 0 has 1 input tensors; the example input has 2"):
        model.data(0, 0)


def test_mixed_precision_runs_the_trace_of_the_module_in_16_bits(tmp_path):
    """With masters in 32 bits; a part of it that computes in 32 bits whatever comes still does."""
    build = traced_cases.widening
    profile = chain_of(build, 4, data=DATA[build], dtype=torch.bfloat16)
    plan = plan_of(profile, stages_of(profile, ("block.norm",), ((0,), (1,))), accumulate=2, optimizer="adam")
    plan = replace(plan, policy=replace(plan.policy, precision="mixed"))
    check(plan)
    report, state = run(plan, build, tmp_path, steps=4, lr=0.02, half=HalfOptions(loss_scale=4.0))
    losses, expected, skipped, _ = halved_serial(
        build, DATA[build], 4, dtype=torch.bfloat16, steps=4, accumulate=2, optimizer="adam", lr=0.02, scale=4.0,
        window=0,
    )  # fmt: skip
    assert report.losses == tuple(losses)
    assert largest_difference(state, expected) == 0
    assert skipped == report.skipped == ()
    assert state["enter.weight"].dtype == torch.float32
    assert planned_bytes_are_held(report)
    report = run_plan(plan, spec_of(build), uncorrected(steps=1, lr=0.1, evaluates=True, load=tmp_path / "trained.pt"))
    module, _, loss = build(4)
    module.load_state_dict(state)
    module.eval().bfloat16()
    pairs = [traced_cases.images(m, 0) for m in range(2)]
    assert equal(report.losses, [float(loss(module(x.bfloat16()).float(), target)) for x, target in pairs])


def test_evaluation_runs_the_stages_as_the_module_does_then(tmp_path):
    """Without dropout, with the statistics of training, and with operations that training doesn't have."""
    profile = chain(traced_cases.noisy)
    first, *others = stages_of(profile, ("block.norm", "drop"), SHAPES["alternating"])
    stages = [Stage(*first, ((1, 2),)), *others]
    plan = plan_of(profile, stages, weights="flush", accumulate=2)
    _, state = run(plan, traced_cases.noisy, tmp_path, steps=2, checkpoint=tmp_path / "c")
    module, _, loss = traced_cases.noisy(4)
    module.load_state_dict(state)
    module.eval()
    for first, given in ((0, {"load": tmp_path / "trained.pt"}), (4, {"checkpoint": tmp_path / "c", "resume": True})):
        options = uncorrected(steps=2, lr=0.1, evaluates=True, **given)
        report = run_plan(plan, spec_of(traced_cases.noisy), options)
        pairs = [traced_cases.images(m, 0) for m in range(first, first + 4)]
        expected = [float(loss(module(x), target)) for x, target in pairs]
        assert equal(report.losses, expected)


def test_from_the_profile_to_the_trained_model(tmp_path, monkeypatch):
    """As a user types it, from the folder that the model is in."""
    monkeypatch.chdir(Path(__file__).parents[1])
    profile, plan, trained = tmp_path / "profile.json", tmp_path / "plan.json", tmp_path / "trained.pt"
    model = ["--data", "cases.traced:images"]
    measured = ["--microbatch", 4, "--steps", 1, "--granularity", "1%", "-o", profile]
    for arguments in (
        ["profile", "cases.traced:residual", *model, *measured],
        ["plan", profile, "--gpus", 2, "--mem", "1GB", "--weights", "flush", "--accumulate", 4, "-o", plan],
        ["run", plan, "--model", "cases.traced:residual", *model, "--steps", 2, "--save", trained, "--json"],
    ):
        done = CliRunner().invoke(group, list(map(str, arguments)), catch_exceptions=False)
        assert done.exit_code == 0, done.output
    losses, expected = serial(traced_cases.residual, steps=2, accumulate=4, optimizer="sgd", lr=0.1)
    assert equal(json.loads(done.stdout)["losses"], losses)
    found = torch.load(trained)
    assert found.keys() == expected.keys()
    assert largest_difference(without_statistics(found), without_statistics(expected)) < 1e-6  # the plan may replicate
    module, _, _ = traced_cases.residual(4)
    module.load_state_dict(found)
    failed = CliRunner().invoke(group, ["run", str(plan), "--model", "cases.traced:other_residual", *model])
    assert isinstance(failed.exception, BadInput)
