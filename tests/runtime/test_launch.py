"""Real runs in real processes over gloo, against plain training in one process."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.patience import SECONDS, fails_when_patient
from cases.runtime import (
    BACKWARD_S,
    FORWARD_S,
    chain_of,
    largest_difference,
    plan_of,
    serial,
    simulated_version,
    uncorrected,
    undisturbed,
    zoo_chain,
)

from pipeplan.errors import BadInput, RunFailed
from pipeplan.plan import Stage
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.update.optimizers import parse_choice

TWO_STAGES = [(0, 3, (0,)), (3, 8, (1,))]
SHARED = [(0, 2, (0,)), (2, 5, (1,)), (5, 8, (0,))]  # the first and the last stage on one device
RUNS = {
    "flush, gpt": {"versions": [1, 1], "stages": TWO_STAGES, "weights": "flush", "accumulate": 4, "steps": 4},
    "2bw-uniform, batch norm": {
        "weights": "2bw-uniform", "versions": [2, 2], "name": "small-cnn", "batch": 8,
        "stages": [(0, 2, (0,)), (2, 6, (1,))], "optimizer": "momentum",
    },
    "2bw, three stages, the loss alone": {
        "versions": [2, 2, 1], "stages": [(0, 3, (0,)), (3, 7, (1,)), (7, 8, (2,))], "optimizer": "adam", "lr": 0.002,
    },
    "2bw, checkpointed": {
        "versions": [2, 1], "stages": [Stage(0, 3, (0,), ((1, 2),)), Stage(3, 8, (1,), ((3, 5), (6, 8)))],
        "optimizer": "momentum",
    },
    "flush, batch norm, checkpointed": {
        "versions": [1, 1], "name": "small-cnn", "batch": 8,
        "stages": [Stage(0, 2, (0,), ((0, 2),)), Stage(2, 6, (1,), ((2, 4),))], "weights": "flush", "accumulate": 3,
        "steps": 4,
    },
    "2bw-uniform, two replicas": {
        "weights": "2bw-uniform", "versions": [2, 2], "stages": [(0, 5, (0, 1)), (5, 8, (2,))], "optimizer": "momentum",
    },
    "flush, two stages on one device": {
        "versions": [1, 1, 1], "stages": [(0, 2, (0,)), (2, 5, (1,)), (5, 8, (0,))], "weights": "flush",
        "accumulate": 2, "steps": 4, "optimizer": "adam", "lr": 0.002,
    },
    "2bw, two stages on one device": {"versions": [2, 2, 1], "stages": SHARED, "optimizer": "momentum"},
    "stash, two microbatches per update": {
        "versions": [3, 2, 1], "stages": [(0, 3, (0,)), (3, 6, (1,)), (6, 8, (2,))], "weights": "stash",
        "accumulate": 2, "optimizer": "momentum",
    },
    "stash, two replicas": {
        "versions": [2, 1], "stages": [(0, 5, (0, 1)), (5, 8, (2,))], "weights": "stash", "optimizer": "momentum",
    },
    "stash, two stages on one device": {
        "versions": [3, 2, 1], "stages": SHARED, "weights": "stash", "optimizer": "momentum",
    },
    "stash, batch norm, vertical sync": {
        "versions": [2, 2], "name": "small-cnn", "batch": 8, "stages": [(0, 2, (0,)), (2, 6, (1,))], "weights": "stash",
        "vertical_sync": True, "optimizer": "momentum",
    },
    "stash, three stages, vertical sync": {  # versions: as many as the first stage has in flight
        "versions": [4, 4, 4], "stages": [(0, 3, (0,)), (3, 6, (1,)), (6, 8, (2,))], "weights": "stash",
        "vertical_sync": True, "optimizer": "momentum",
    },
    "one device": {"versions": [1], "stages": [(0, 8, (0,))], "accumulate": 2, "optimizer": "momentum"},
}  # fmt: skip
DEFAULTS = {
    "name": "gpt-tiny", "batch": 2, "weights": "2bw", "accumulate": None, "steps": 6, "optimizer": "sgd", "lr": 0.02,
    "vertical_sync": False,
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_a_run_equals_training_in_one_process(case, tmp_path):
    options = DEFAULTS | RUNS[case]
    name, batch, steps, lr, optimizer = (options[key] for key in ("name", "batch", "steps", "lr", "optimizer"))
    weights, vertical = options["weights"], options["vertical_sync"]
    plan = plan_of(
        zoo_chain(name, batch),
        options["stages"],
        weights=weights,
        accumulate=options["accumulate"],
        optimizer=optimizer,
        vertical_sync=vertical,
    )
    stages = plan.allocation.stages
    saved = tmp_path / "state.pt"
    report = run_plan(plan, ModelSpec(name), uncorrected(steps=steps, lr=lr, seed=1, save=saved))
    interval = report.microbatches // steps
    assert interval == plan.policy.update_interval(max(stage.replicas for stage in stages))
    versions = {"flush": lambda stage, m: m // interval, "2bw-uniform": lambda stage, m: max(m // interval - 1, 0)}
    losses, state = serial(
        name,
        batch,
        steps=steps,
        accumulate=interval,
        optimizer=optimizer,
        lr=lr,
        seed=1,
        version=versions.get(weights) or simulated_version(plan, report.microbatches, vertical),
        cuts=[stage.start for stage in stages[1:]],
    )
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert largest_difference(torch.load(saved), state) <= 1e-6
    assert min(report.step_losses) < report.step_losses[0]
    assert [stage.versions for stage in report.stages] == options["versions"]
    assert [stage.planned_versions for stage in report.stages] == options["versions"]
    assert len(report.times) == len({d for stage in stages for d in stage.devices})
    if "batch norm" not in case:  # where a stage ends in ReLU, its output is kept as well, and planned elsewhere
        assert [a.measured_bytes for a in report.activations] == [a.planned_bytes for a in report.activations]


@pytest.mark.alone
def test_a_pipeline_runs_at_the_period_that_its_operations_allow():
    """Two stages of two pauses each: 60 ms per microbatch when they overlap, 120 ms when they don't."""
    chain = chain_of(runtime_cases.pausing, 4)
    layers = [replace(x, forward_ns=round(FORWARD_S * 1e9), backward_ns=round(BACKWARD_S * 1e9)) for x in chain.layers]
    layers[-1] = replace(layers[-1], forward_ns=10**4, backward_ns=10**4)
    plan = plan_of(replace(chain, layers=tuple(layers)), [(0, 2, (0,)), (2, 5, (1,))], weights="2bw")
    model = ModelSpec("cases.runtime:pausing", "cases.runtime:vectors")

    def measured():
        report = run_plan(plan, model, uncorrected(steps=15, lr=0.01))
        for stage in report.stages:
            assert stage.forward_ns >= 2e9 * FORWARD_S
            assert stage.backward_ns >= 2e9 * BACKWARD_S
        assert 0.8 <= report.measured_period_ns / report.calibrated_period_ns <= 1.25
        assert 0.8 <= report.mean_period_ns / report.calibrated_period_ns <= 1.25
        assert report.measured_period_ns >= 2e9 * (FORWARD_S + BACKWARD_S)
        assert report.samples_per_s == pytest.approx(4e9 / report.measured_period_ns)

    undisturbed(measured)


FAULTS = {
    "raising": "rank {rank} failed in the forward of microbatch 4 on stage {rank}: ValueError: a bad microbatch",
    "backward_raising": "rank {rank} failed in the backward of microbatch 4 on stage {rank}: "
    "ArithmeticError: no way back",
    "backward_killed": "rank {rank} died in the backward of microbatch 4 on stage {rank}: killed by SIGKILL",
    "killed": "rank {rank} died in the forward of microbatch 4 on stage {rank}: killed by SIGKILL",
}


def faulty_plan(cut=None):
    """Two stages, or without a cut one."""
    chain = chain_of(runtime_cases.healthy, 4)
    return plan_of(chain, [(0, 6, (0,))] if cut is None else [(0, cut, (0,)), (cut, 6, (1,))], weights="2bw")


@pytest.mark.parametrize(
    ("fault", "rank"),
    [("raising", 0), ("raising", 1), ("backward_raising", 1), ("backward_killed", 0), ("killed", 0), ("killed", 1)],
)
def test_a_failing_rank_ends_the_run_and_is_named(fault, rank):
    """The fault is in layer 3; no rank waits for its timeout."""
    model = ModelSpec(f"cases.faults:{fault}", "cases.runtime:vectors")
    with pytest.raises(RunFailed) as caught:
        run_plan(faulty_plan(cut=4 if rank == 0 else 3), model, uncorrected(steps=20, lr=0.01, timeout_s=10 * SECONDS))
    assert str(caught.value).startswith(FAULTS[fault].format(rank=rank))
    if fault == "raising":  # the rank's own traceback leads to the line
        assert "in raise_value_error" in caught.value.__notes__[0]


def test_a_rank_that_hangs_is_named_when_the_others_wait_in_vain():
    model = ModelSpec("cases.faults:hanging", "cases.runtime:vectors")

    def run(timeout_s):
        run_plan(faulty_plan(cut=3), model, uncorrected(steps=20, lr=0.01, timeout_s=timeout_s))

    words = "rank 1 doesn't answer in the forward of microbatch 4 on stage 1: rank 0 lost"
    fails_when_patient(run, RunFailed, words)


def test_a_rank_that_hangs_alone_is_named_as_well():
    """Where nobody waits for it the launcher does."""
    model = ModelSpec("cases.faults:hanging", "cases.runtime:vectors")

    def run(timeout_s):
        run_plan(faulty_plan(), model, uncorrected(steps=20, lr=0.01, timeout_s=timeout_s))

    fails_when_patient(run, RunFailed, "rank 0 doesn't answer in the forward of microbatch 4 on stage 0: nothing has")


def test_a_microbatch_of_another_shape_fails_before_it_is_sent():
    model = ModelSpec("cases.faults:shrinking", "cases.runtime:vectors")
    with pytest.raises(RunFailed, match=r"rank 0 failed .*stage 0 puts out float32 \(1, 16\) for microbatch 4"):
        run_plan(faulty_plan(cut=4), model, uncorrected(steps=20, lr=0.01))


def test_a_wrong_model_is_bad_input():
    with pytest.raises(BadInput, match="model: has 6 layers; the plan's profile test has 6, and should have 7"):
        run_plan(faulty_plan(cut=3), ModelSpec("gpt-tiny,blocks=3"), uncorrected(steps=1, lr=0.01))
    with pytest.raises(BadInput, match="no model is named 'nothing'"):
        run_plan(faulty_plan(cut=3), ModelSpec("nothing"), uncorrected(steps=1, lr=0.01))


def test_a_missing_folder_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="there is no folder"):
        run_plan(
            faulty_plan(cut=3), ModelSpec("gpt-tiny"), uncorrected(steps=1, lr=0.01, save=tmp_path / "no" / "state.pt")
        )


def test_a_loss_that_is_no_number_ends_the_run():
    model = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
    with pytest.raises(
        RunFailed, match=r"^rank 1 failed in the forward of microbatch \d+ on stage 1: the loss is (nan|inf)"
    ):
        run_plan(faulty_plan(cut=3), model, uncorrected(steps=20, lr=1e30))


def test_an_evaluation_runs_forward_alone_in_evaluation_mode(tmp_path):
    chain = chain_of(runtime_cases.dropping, 4)
    model = ModelSpec("cases.runtime:dropping", "cases.runtime:vectors")
    plan = plan_of(chain, [(0, 2, (0, 1)), (2, 5, (2,))], weights="2bw")
    saved, again = tmp_path / "state.pt", tmp_path / "again.pt"
    run_plan(plan, model, uncorrected(steps=3, lr=0.05, save=saved))
    report = run_plan(plan, model, uncorrected(steps=2, lr=0.05, load=saved, evaluates=True, save=again))
    layers, _, loss = runtime_cases.dropping(4)
    net = torch.nn.Sequential(*layers).eval()
    net.load_state_dict(torch.load(saved))
    expected = []
    for m in range(report.microbatches):
        x, target = runtime_cases.vectors(m, 0)
        expected.append(loss(net(x), target).item())
    assert report.losses == pytest.approx(expected, abs=1e-6)
    assert report.microbatches == 2 * plan.policy.accumulate
    assert largest_difference(torch.load(saved), torch.load(again)) == 0


def test_epochs_repeat_the_data_with_the_next_seed_and_every_update_is_heard():
    """Replicas needn't divide the epoch: microbatches go round them across its end."""
    plan = plan_of(zoo_chain("gpt-tiny", 2), [(0, 3, (0, 1)), (3, 8, (2,))], weights="flush", accumulate=3)
    heard = []
    report = run_plan(
        plan, ModelSpec("gpt-tiny"), uncorrected(steps=4, lr=1e-12, seed=5, epoch=3), listener=heard.append
    )
    layers, loss, data = runtime_cases.built("gpt-tiny", 2, 5)
    samples = [data(m % 3, 5 + m // 3) for m in range(12)]
    assert report.losses == pytest.approx([loss(layers(x), y).item() for x, y in samples], abs=1e-5)
    assert [step.step for step in heard] == [1, 2, 3, 4]
    assert [step.loss for step in heard] == pytest.approx(report.step_losses)
    assert heard[0].period_ns is None
    assert all(step.period_ns > 0 and step.samples_per_s > 0 for step in heard[1:])


@pytest.mark.parametrize("damage", ["text", "another", "more"])
def test_weights_that_do_not_fit_are_bad_input(damage, tmp_path):
    path = tmp_path / "state.pt"
    state = torch.nn.Sequential(*runtime_cases.healthy(4)[0]).state_dict()
    match damage:
        case "text":
            path.write_text("no weights")
        case "another":
            torch.save({"0.weight": torch.zeros(2)}, path)
        case "more":
            torch.save(state | {"9.weight": torch.zeros(2)}, path)
    words = {
        "text": "cannot be loaded",
        "another": "has no '0.bias'",
        "more": "has '9.weight', which the model doesn't have",
    }
    model = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
    with pytest.raises(BadInput, match=words[damage]):
        run_plan(faulty_plan(cut=3), model, uncorrected(steps=1, lr=0.01, load=path))


@pytest.mark.parametrize(
    ("options", "words"),
    [("killed=False", "failed in update 3 of stage {}: ArithmeticError: no third time"),
     ("killed=True", "died in update 3 of stage {}: killed by SIGKILL")],
)  # fmt: skip
def test_a_failing_update_is_named(options, words):
    """Both stages' optimizers fail, nearly at once: whichever is first is the root cause, and stage s is on rank s."""
    model = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
    optimizer = parse_choice(f"cases.faults:Tiring,{options}", "here")
    either = "|".join(f"rank {s} {words.format(s)}" for s in (0, 1))
    with pytest.raises(RunFailed, match=either):
        run_plan(faulty_plan(cut=3), model, uncorrected(steps=20, lr=0.01, optimizer=optimizer))


def test_missing_data_is_named():
    model = ModelSpec("cases.runtime:healthy", "cases.faults:ending")
    with pytest.raises(RunFailed, match=r"failed in the forward of microbatch 3 on stage \d: IndexError: there is no"):
        run_plan(faulty_plan(cut=3), model, uncorrected(steps=20, lr=0.01))
