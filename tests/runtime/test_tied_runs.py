"""Weights that stages share: real runs against plain training of the tied model, and what cannot be shared."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.half import halved_serial
from cases.runtime import chain_of, emulated, largest_difference, plan_of, serial, sized_chain, uncorrected, zoo_chain
from torch import nn

from pipeplan import zoo
from pipeplan.check.lateness import plan_delays
from pipeplan.check.validate import violations
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.lowering.instructions import Backward, Forward, ReduceTied, sentence, word
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.model.build.loading import chain_model, load_model, load_weights
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.half import HalfOptions
from pipeplan.runtime.training.update.optimizers import Choice
from pipeplan.runtime.training.update.update import check_ties, separated, ties_of
from pipeplan.runtime.training.weights.versions import borrowers
from pipeplan.schedule.kinds import graph_of

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16,tied=true"  # embedding, two blocks, norm, head, loss
TABLE, HEAD = "embedding.tokens.weight", "head.weight"
APART = [(0, 2, (0,)), (2, 6, (1,))]
TOGETHER = [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (0,))]  # the first and the last stage on one device


@pytest.fixture(scope="module")
def chain():
    found = zoo_chain(GPT, 2)
    assert found.tied == ((0, 4),)
    return found


RUNS = {
    "apart": {"stages": APART, "optimizer": "adam", "lr": 0.002},
    "one between": {"stages": [(0, 1, (0,)), (1, 4, (1,)), (4, 6, (2,))], "optimizer": "momentum"},
    "last replicated": {"stages": [(0, 3, (0,)), (3, 6, (1, 2))], "optimizer": "adam", "lr": 0.002},
    "on two devices": {"stages": [(0, 2, (0, 1)), (2, 4, (2,)), (4, 6, (0, 1))], "optimizer": "momentum"},
    "recomputed": {"stages": [Stage(0, 2, (0,), ((0, 2),)), Stage(2, 6, (1,), ((4, 6),))], "optimizer": "momentum"},
    "bucket by bucket": {"stages": [(0, 3, (0, 1)), (3, 6, (2,))], "optimizer": "adam", "lr": 0.002, "bucket": 700},
    "in the order of messages": {"stages": [(0, 2, (0, 1)), (2, 6, (2, 3))], "optimizer": "momentum", "driven": True},
    "2bw-uniform, apart": {"stages": APART, "optimizer": "adam", "lr": 0.002, "weights": "2bw-uniform"},
    "2bw-uniform, four stages": {
        "stages": [(0, 1, (0,)), (1, 2, (1,)), (2, 4, (2,)), (4, 6, (3,))], "optimizer": "momentum",
        "weights": "2bw-uniform",
    },
    "2bw-uniform, bucket by bucket": {
        "stages": [(0, 3, (0, 1)), (3, 6, (2, 3))], "optimizer": "adam", "lr": 0.002, "bucket": 700,
        "weights": "2bw-uniform", "coarsening": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_training_equals_that_of_the_whole_model(case, chain, tmp_path):
    """Losses and weights as without a pipeline, and all copies bit for bit the same.

    Under 2bw-uniform that is training with gradients of the weights before the newest.
    """
    given = {"lr": 0.05, "coarsening": None, "bucket": None, "driven": False, "weights": "flush", **RUNS[case]}
    delayed = given["weights"] == "2bw-uniform"
    interval = None if delayed else 4
    plan = plan_of(chain, given["stages"], weights=given["weights"], accumulate=interval, optimizer=given["optimizer"])
    interval = plan.policy.update_interval(max(stage.replicas for stage in plan.allocation.stages))
    if given["driven"]:
        plan = under(plan, "message-driven")
    if given["bucket"]:
        plan = replace(plan, policy=replace(plan.policy, offload=True, bucket_parameters=given["bucket"]))
    options = {"steps": 4, "lr": given["lr"], "seed": 2}
    report = run_plan(
        plan,
        ModelSpec(GPT),
        uncorrected(save=tmp_path / "s", checkpoint=tmp_path / "c", coarsening=given["coarsening"], **options),
    )
    version = (lambda _, m: max(m // interval - 1, 0)) if delayed else None
    losses, state = serial(GPT, 2, accumulate=interval, optimizer=given["optimizer"], version=version, **options)
    trained = torch.load(tmp_path / "s")
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert largest_difference(trained, state) <= 1e-5
    assert torch.equal(trained[TABLE], trained[HEAD])
    if delayed and given["bucket"] is None:  # gradients that wait among them, where there are backwards meanwhile
        free = [x.planned_bytes - x.measured_bytes for x in report.states]
        assert (
            free == [0, 4 * chain.layers[4].parameter_count if case == "2bw-uniform, apart" else 0, 0, 0][: len(free)]
        )


def test_copies_apart_train_by_the_versions_that_each_stage_reads(chain, tmp_path):
    """The last stage, whose copy waits for the first one's gradient, reads it later than its own weights are made."""
    plan = plan_of(chain, APART, weights="2bw", accumulate=6, optimizer="momentum")
    first, *_, last = plan_delays(plan, graph_of(plan))
    assert 0 < first.mean < 1
    assert 0 < last.mean < 1
    options = {"steps": 4, "lr": 0.05, "seed": 2}
    report = run_plan(plan, ModelSpec(GPT), uncorrected(save=tmp_path / "s", **options))
    losses, state = emulated(plan, GPT, 2, optimizer="momentum", **options)
    trained = torch.load(tmp_path / "s")
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert largest_difference(trained, state) <= 1e-5
    assert torch.equal(trained[TABLE], trained[HEAD])


ONE, TWO = [(0, 6, (0,))], [(0, 2, (0,)), (2, 6, (0,))]  # stages of one device


@pytest.mark.parametrize(
    ("stages", "weights", "accumulate", "optimizer"),
    [
        (ONE, "flush", 2, "adam"), (TWO, "2bw", 4, "adam"), (TWO, "2bw-uniform", 4, "adam"),
        (TWO, "stash", 1, "momentum"), (TOGETHER, "flush", 2, "momentum"), (TOGETHER, "2bw", None, "momentum"),
        (TOGETHER, "stash", 1, "adam"), (TOGETHER, "stash", 3, "momentum"), (TOGETHER, "latest", 1, "momentum"),
        (TOGETHER, "latest", 2, "adam"),
    ],
)  # fmt: skip
def test_one_storage_on_one_device_trains_bit_for_bit_as_emulated(
    stages, weights, accumulate, optimizer, chain, tmp_path
):
    """One weight, gradient and optimizer state for both layers, under every policy, and no more memory than planned."""
    plan = plan_of(chain, stages, weights=weights, accumulate=accumulate, optimizer=optimizer)
    options = {"steps": 9, "lr": 0.002 if optimizer == "adam" else 0.05, "seed": 2}
    report = run_plan(plan, ModelSpec(GPT), uncorrected(save=tmp_path / "s", **options))
    losses, state = emulated(plan, GPT, 2, optimizer=optimizer, **options)
    assert list(report.losses) == losses
    assert largest_difference(torch.load(tmp_path / "s"), state) == 0
    free = [x.planned_bytes - x.measured_bytes for x in report.states]
    # one microbatch at a time: the second stage's gradient is gone when the first one's is there
    gone = sum(x.weight_bytes for x in chain.layers[2:4]) if (stages, weights) == (TWO, "stash") else 0
    if weights == "2bw":  # a second version is planned, though a stage with one microbatch at a time reads but one
        assert min(free) >= 0
    else:
        assert free == [gone, *[0] * (len(free) - 1)]


@pytest.mark.parametrize(
    ("stages", "copies", "weights"),
    [
        ([(0, 2, (0, 1)), (2, 4, (2,)), (4, 6, (0, 1))], 4, "flush"),
        ([(0, 3, (0,)), (3, 6, (1, 2))], 3, "flush"),
        ([(0, 3, (0, 1)), (3, 6, (2,))], 3, "2bw-uniform"),
    ],
)
def test_every_copy_has_the_same_bits_on_every_rank(stages, copies, weights, tmp_path, monkeypatch):
    """Each copy writes down what it is whenever it runs forward, in the folder from which the ranks were started."""
    monkeypatch.chdir(tmp_path)
    chain = chain_of(runtime_cases.tied_writing, 4)
    for path in tmp_path.glob("copy-*"):
        path.unlink()
    plan = plan_of(chain, stages, weights=weights, accumulate=2 if weights == "flush" else None, optimizer="adam")
    run_plan(plan, ModelSpec("cases.runtime:tied_writing", "cases.runtime:vectors"), uncorrected(steps=5, lr=0.01))
    written = [path.read_text().split() for path in tmp_path.glob("copy-*")]
    assert len(written) == copies
    assert len(set(written[0])) == 5 - (weights == "2bw-uniform")  # the last version but one is the last that is used
    assert all(list(dict.fromkeys(one)) == list(dict.fromkeys(written[0])) for one in written)


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_on_devices_with_several_holders_train_as_one_weight_on_one(replicas, tmp_path):
    """Gradients wait there for those of the first device, while stages behind are at the next mini-batch."""
    model = ModelSpec("cases.runtime:four_tied", "cases.runtime:vectors")
    chain = chain_of(runtime_cases.four_tied, 4)
    one, other = tuple(range(replicas)), tuple(range(replicas, 2 * replicas))
    stages = [(0, 2, one), (2, 4, other), (4, 6, one), (6, 9, other)]
    several = plan_of(chain, stages, weights="2bw-uniform", optimizer="momentum")
    single = plan_of(chain, [(0, 9, (0,))], weights="2bw-uniform", accumulate=several.interval, optimizer="momentum")
    options, losses, states = {"steps": 4, "lr": 0.05}, [], []
    for plan in (several, single):
        report = run_plan(plan, model, uncorrected(save=tmp_path / "s", **options))
        losses.append(report.losses)
        states.append(torch.load(tmp_path / "s"))
        assert all(x.measured_bytes <= x.planned_bytes for x in report.states)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert largest_difference(*states) <= 1e-5
    assert torch.equal(states[0]["0.weight"], states[0]["6.weight"])


@pytest.mark.parametrize("weights", ["flush", "2bw-uniform"])
def test_each_weight_is_summed_over_its_own_holders(weights, tmp_path):
    """The third stage has a copy that the first stage, on the same device, doesn't keep for it."""
    model = ModelSpec("cases.runtime:tied_in_the_middle", "cases.runtime:vectors")
    chain = chain_of(runtime_cases.tied_in_the_middle, 4)
    stages, interval = [(0, 1, (0,)), (1, 2, (1,)), (2, 4, (0,))], 2 if weights == "flush" else None
    several = plan_of(chain, stages, weights=weights, accumulate=interval)
    single = plan_of(chain, [(0, 4, (0,))], weights=weights, accumulate=several.interval)
    losses, states = [], []
    for plan in (several, single):
        report = run_plan(plan, model, uncorrected(save=tmp_path / "s", steps=4, lr=0.05))
        losses.append(report.losses)
        states.append(torch.load(tmp_path / "s"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert largest_difference(*states) <= 1e-5
    assert torch.equal(states[0]["1.3.weight"], states[0]["2.weight"])
    unknown = replace(several, chain=replace(chain, shared=None))
    with pytest.raises(
        BadInput, match=r"weight of layer 1 \(.*\) is shared by other layers than in the plan's profile"
    ):
        run_plan(unknown, model, uncorrected(steps=1, lr=0.05))


def test_any_plan_goes_on_where_another_one_stopped(chain, tmp_path):
    """Copies apart, one weight on one device, copies on one device, three apart: weights, momenta, counts, all bits."""
    folder, saved = tmp_path / "c", tmp_path / "s"
    options = {"lr": 0.002, "resume": True, "save": saved, "checkpoint": folder}
    losses, state, three = [], {}, [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,))]
    for turn, stages in enumerate([APART, ONE, TOGETHER, three]):
        plan = plan_of(chain, stages, weights="flush", accumulate=2, optimizer="adam")
        if turn:
            run_plan(plan, ModelSpec(GPT), uncorrected(steps=1, evaluates=True, **options))
            assert largest_difference(torch.load(saved), state) == 0
        losses += run_plan(plan, ModelSpec(GPT), uncorrected(steps=2 * turn + 2, **options)).losses
        state = torch.load(saved)
        assert torch.equal(state[TABLE], state[HEAD])
    expected, trained = serial(GPT, 2, steps=8, accumulate=2, optimizer="adam", lr=0.002)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert largest_difference(state, trained) <= 1e-5


def test_a_2bw_run_goes_on_with_other_cuts_as_a_drained_one_does(chain, tmp_path):
    """What delayed weights leave behind in a checkpoint, when it has drained, is one version of every copy."""
    options = {"lr": 0.002, "save": tmp_path / "s", "checkpoint": tmp_path / "c"}
    first = plan_of(chain, APART, weights="2bw-uniform", accumulate=4, optimizer="adam")
    begun = run_plan(first, ModelSpec(GPT), uncorrected(steps=3, **options)).losses
    second = plan_of(chain, [(0, 3, (0, 1)), (3, 6, (2,))], weights="2bw-uniform", accumulate=4, optimizer="adam")
    rest = run_plan(second, ModelSpec(GPT), uncorrected(steps=6, resume=True, **options)).losses
    versions = [0, 0, 1, 3, 3, 4]  # the pipeline is empty where the checkpoint is
    losses, state = serial(
        GPT, 2, steps=6, accumulate=4, optimizer="adam", lr=0.002, version=lambda _, m: versions[m // 4]
    )
    assert begun + rest == pytest.approx(losses, abs=1e-6)
    trained = torch.load(tmp_path / "s")
    assert largest_difference(trained, state) <= 1e-5
    assert torch.equal(trained[TABLE], trained[HEAD])


def test_a_run_on_the_same_plan_goes_on_bit_for_bit(chain, tmp_path):
    plan = plan_of(chain, [(0, 3, (0,)), (3, 6, (1, 2))], weights="flush", accumulate=2, optimizer="adam")
    options = {"lr": 0.005, "save": tmp_path / "s"}
    whole = run_plan(plan, ModelSpec(GPT), uncorrected(steps=4, **options))
    state = torch.load(tmp_path / "s")
    first = run_plan(plan, ModelSpec(GPT), uncorrected(steps=2, checkpoint=tmp_path / "c", **options))
    rest = run_plan(plan, ModelSpec(GPT), uncorrected(steps=4, checkpoint=tmp_path / "c", resume=True, **options))
    assert first.losses + rest.losses == whole.losses
    assert largest_difference(torch.load(tmp_path / "s"), state) == 0


@pytest.mark.parametrize(
    ("stages", "dtype", "scale", "steps"),
    [
        (APART, torch.bfloat16, 1.0, 5),
        (TOGETHER, torch.bfloat16, 1.0, 5),
        (APART, torch.float16, 2.0**24, 6),  # the first updates overflow and are skipped by all stages
    ],
)
def test_mixed_precision_adds_up_sixteen_bits_and_keeps_copies_equal(stages, dtype, scale, steps, tmp_path):
    model = zoo.load(GPT)
    plan = plan_of(
        chain_of(model, 2, data=model.data(2), dtype=dtype), stages, weights="flush", accumulate=2, optimizer="adam"
    )
    offload = stages is TOGETHER
    plan = replace(plan, policy=replace(plan.policy, precision="mixed", offload=offload, bucket_parameters=700))
    options = {"steps": steps, "lr": 0.002}
    half = HalfOptions(loss_scale=scale, window=4)
    report = run_plan(plan, ModelSpec(GPT), uncorrected(save=tmp_path / "s", half=half, **options))
    losses, state, skipped, last = halved_serial(
        lambda batch: model(batch, seed=0), model.data(2), 2, dtype=dtype, accumulate=2, optimizer="adam", scale=scale,
        window=4, **options,
    )  # fmt: skip
    trained = torch.load(tmp_path / "s")
    assert torch.equal(trained[TABLE], trained[HEAD])
    assert report.skipped == skipped
    assert report.loss_scale == last
    assert bool(skipped) == (dtype == torch.float16)
    assert report.losses == pytest.approx(losses, abs=0.02)
    assert largest_difference(trained, {**state, HEAD: state[TABLE]}) <= 0.02


def test_delayed_gradients_of_sixteen_bits_are_added_up_and_keep_copies_equal(tmp_path):
    model = zoo.load(GPT)
    plan = plan_of(
        chain_of(model, 2, data=model.data(2), dtype=torch.bfloat16),
        [(0, 3, (0, 1)), (3, 6, (2,))],
        weights="2bw-uniform",
        optimizer="adam",
    )
    plan = replace(plan, policy=replace(plan.policy, precision="mixed"))
    options = {"steps": 5, "lr": 0.002}
    report = run_plan(plan, ModelSpec(GPT), uncorrected(save=tmp_path / "s", half=HalfOptions(), **options))
    trained, interval = torch.load(tmp_path / "s"), lower_run(plan, 1).interval
    losses, state = serial(
        GPT, 2, accumulate=interval, optimizer="adam", version=lambda _, m: max(m // interval - 1, 0), **options
    )
    assert torch.equal(trained[TABLE], trained[HEAD])
    assert report.losses == pytest.approx(losses, abs=0.05)
    assert largest_difference(trained, state) <= 0.02


def test_sums_stand_behind_all_passes_and_before_the_updates_of_who_holds_a_copy(chain):
    plan = plan_of(chain, [(0, 2, (0, 1)), (2, 3, (2,)), (3, 6, (3,))], weights="flush", accumulate=2)
    script = lower_run(plan, 2)
    assert script.tied == ((0, 2),)
    for rank, instructions in enumerate(script.instructions):
        words = [word(x) for x in instructions]
        for version in (1, 2):
            place = f"0+2R{version}"
            if rank == 2:
                assert place not in words
                continue
            at = words.index(place)
            passes = [i for i, x in enumerate(instructions) if isinstance(x, Forward | Backward)]
            assert max(i for i in passes if script.minibatch(instructions[i]) == version - 1) < at
            after = ["0R{}", "0U{}"] if rank < 2 else ["2U{}"]
            assert words[at + 1 : at + 1 + len(after)] == [x.format(version) for x in after]
    assert sentence(ReduceTied((0, 2), 1)) == "the gradient sum of what stages 0 and 2 share for update 1"


def test_undrained_sums_stand_before_the_last_update_that_they_are_for(chain):
    """That of the first stage, in one order on all ranks; the last stage is in the next mini-batch by then."""
    plan = plan_of(chain, [(0, 1, (0,)), (1, 3, (1,)), (3, 4, (2,)), (4, 6, (3, 4))], weights="2bw")
    script = lower_run(plan, 4)
    lists = [[word(x) for x in instructions] for instructions in script.instructions]
    assert not any("R" in word for words in lists[1:3] for word in words)
    for version in (1, 2, 3):
        assert lists[0][lists[0].index(f"0+3R{version}") + 1] == f"0U{version}"
        for words in lists[3:]:
            made, summed = words.index(f"3U{version}"), words.index(f"0+3R{version}")
            assert made < summed < words.index(f"3U{version + 1}")
            behind = [x for x in script.instructions[3][made:summed] if isinstance(x, Backward)]
            assert all(x.microbatch >= version * script.interval for x in behind)
    assert behind
    assert [script.waits(s) for s in range(4)] == [False, False, False, True]


def test_an_optimizer_that_cannot_step_weights_apart_is_refused(chain):
    plan = plan_of(chain, APART, weights="2bw")
    with pytest.raises(BadInput, match=r"Adafactor isn't known .*, as --weights 2bw where stages share some needs"):
        run_plan(plan, ModelSpec(GPT), uncorrected(steps=1, lr=0.1, optimizer=Choice("Adafactor")))


@pytest.mark.parametrize("weights", ["stash", "latest"])
def test_updates_at_different_times_refuse_copies_on_several_devices(weights, chain):
    loose = plan_of(replace(chain, tied=(), shared=None), APART, weights=weights, accumulate=3)
    plan = replace(loose, chain=chain)
    with pytest.raises(BadInput, match=r"are in stages 0 and 1 on different GPUs; only --weights 2bw and"):
        lower_run(plan, 1)
    assert violations(plan), "nor is it a valid plan"


def test_model_and_profile_must_share_the_same(chain):
    other = GPT.replace("tied=true", "tied=false")
    untied = replace(plan_of(replace(chain, tied=(), shared=None), APART, weights="flush", accumulate=2))
    with pytest.raises(BadInput, match=r"layers 0 \(embedding\) and 4 \(head\) share weights, .* test doesn't say"):
        run_plan(untied, ModelSpec(GPT), uncorrected(steps=1, lr=0.1))
    plan = plan_of(chain, APART, weights="flush", accumulate=2)
    with pytest.raises(BadInput, match=r"layers 0 \(embedding\) and 4 \(head\) share no weights; .* test says"):
        run_plan(plan, ModelSpec(other), uncorrected(steps=1, lr=0.1))


def test_a_file_has_one_value_for_a_weight_that_layers_share(tmp_path):
    model = load_model(ModelSpec(GPT), 2, 0)
    assert model.first_names == {HEAD: TABLE}
    layers, _, _ = zoo.load(GPT)(2, seed=1)
    path = tmp_path / "state.pt"
    torch.save(layers.state_dict(), path)
    load_weights(model, str(path))
    assert torch.equal(model.layers[4].module.weight, layers.embedding.tokens.weight)
    untied, _, _ = zoo.load(GPT.replace("tied=true", "tied=false"))(2, seed=1)
    torch.save(untied.state_dict(), path)
    with pytest.raises(BadInput, match=f"'{TABLE}' and '{HEAD}' differ, and are one weight in the model"):
        load_weights(model, str(path))


def loaded(layers):
    named = [(f"l{i}", layer) for i, layer in enumerate(layers)]
    return chain_model(named, torch.zeros(4, 16), runtime_cases.mean_square, runtime_cases.vectors)


def profile_of(layers, tied):
    found = sized_chain(layers, torch.zeros(4, 16), runtime_cases.mean_square, torch.zeros(4, 16))
    return replace(found, tied=tied, layers=tuple(replace(x, forward_ns=1, backward_ns=1) for x in found.layers))


def linears(count):
    return [nn.Linear(16, 16) for _ in range(count)]


def test_any_pairs_that_connect_the_same_layers_will_do():
    layers = linears(5)
    layers[2].weight = layers[4].weight = layers[0].weight
    layers[3].bias = layers[1].bias
    for tied in (((0, 2), (2, 4), (1, 3)), ((0, 4), (2, 4), (1, 3)), ((0, 2), (0, 4), (1, 3))):
        check_ties(loaded(layers), profile_of(layers, tied), [1, 2, 3])
    with pytest.raises(BadInput, match=r"layers 2 \(l2\) and 4 \(l4\) share weights, which"):
        check_ties(loaded(layers), profile_of(layers, ((0, 2), (1, 3))), [1])
    with pytest.raises(BadInput, match=r"layers 0 \(l0\) and 1 \(l1\) share no weights"):
        check_ties(loaded(layers), profile_of(layers, ((0, 1), (0, 2), (2, 4), (1, 3))), [1])


def test_only_whole_parameters_can_be_copied_to_other_stages():
    norm = nn.BatchNorm1d(16)
    layers = [norm, nn.Linear(16, 16), norm]
    chain = profile_of(layers, ((0, 2),))
    check_ties(loaded(layers), chain, [])
    with pytest.raises(BadInput, match=r"layers 0 \(l0\) and 2 \(l2\) share a buffer; copies in stages 0 and 1 would"):
        check_ties(loaded(layers), chain, [1])
    layers = linears(2)
    layers[1].weight = nn.Parameter(layers[0].weight.detach())
    check_ties(loaded(layers), profile_of(layers, ((0, 1),)), [])
    with pytest.raises(BadInput, match="share memory, but not one parameter; copies in stages 0 and 1"):
        check_ties(loaded(layers), profile_of(layers, ((0, 1),)), [1])


def test_stages_of_one_rank_have_modules_of_their_own_with_the_same_weights():
    layers = linears(4)
    layers[1].weight = layers[2].weight = layers[3].weight = layers[0].weight
    layers[2].bias.requires_grad_(False)
    layers[3].bias = layers[2].bias
    model = loaded(layers)
    chain = profile_of(layers, ((0, 1), (1, 2), (2, 3)))
    plan = plan_of(chain, [(0, 2, (0,)), (2, 5, (0,))], weights="flush", accumulate=1)
    script = lower_run(plan, 1)
    ties = ties_of(script, model)
    assert ties == []
    assert borrowers({0: layers[:2], 1: layers[2:]}) == {0: {1}, 1: set()}
    apart = [layer.module for layer in separated(script, 0, model).layers]
    assert apart[:4] == layers, "they share weights and no module"
    several = lower_run(plan_of(chain, [(0, 2, (0,)), (2, 5, (1,))], weights="flush", accumulate=1), 1)
    places = [tie.places for tie in ties_of(several, model)]
    assert places == [{0: (0, "weight"), 1: (2, "weight")}], "frozen ones need no sums"
    twice = loaded([layers[0], layers[1], layers[0], layers[3]])
    apart = [layer.module for layer in separated(script, 0, twice).layers]
    assert apart[2] is not apart[0]
    assert apart[2].weight is apart[3].weight is apart[0].weight
    assert apart[2].bias is apart[0].bias


def test_copies_begin_equal_whatever_each_rank_has_built(tmp_path, monkeypatch):
    """Ranks whose models differ take the weights of the first stage's first replica."""
    monkeypatch.chdir(tmp_path)
    chain = chain_of(runtime_cases.tied_writing, 4)
    for path in tmp_path.glob("copy-*"):
        path.unlink()
    plan = plan_of(chain, [(0, 3, (0,)), (3, 6, (1,))], weights="flush", accumulate=2, optimizer="momentum")
    run_plan(plan, ModelSpec("cases.runtime:tied_anyhow", "cases.runtime:vectors"), uncorrected(steps=3, lr=0.01))
    one, other = [list(dict.fromkeys(path.read_text().split())) for path in tmp_path.glob("copy-*")]
    assert len(one) == 3
    assert one == other
