"""Runs that are interrupted and go on: from checkpoints, on the same plan and on others."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.checkpoints import reworded
from cases.runtime import chain_of, largest_difference, plan_of, serial, uncorrected, zoo_chain

from pipeplan.errors import BadInput, RunFailed
from pipeplan.runtime.engine.asked import job_of
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.agreement import resume_point
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import ABOUT, Peers, newest, remove_older
from pipeplan.runtime.training.update.optimizers import parse_choice

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16"


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


PLANS = {
    "2bw": {"stages": [(0, 2, (0,)), (2, 5, (1,))], "weights": "2bw"},
    "stash": {"stages": [(0, 2, (0,)), (2, 5, (1,))], "weights": "stash"},
    "flush, replicas": {"stages": [(0, 2, (0, 1)), (2, 5, (2,))], "weights": "flush", "accumulate": 3},
}


@pytest.mark.parametrize("case", PLANS)
def test_a_resumed_run_equals_an_uninterrupted_one(case, tmp_path):
    """Bit for bit: weights, momentum, learning rates, dropout and batch statistics, of replicas too."""
    plan = plan_of(chain_of(runtime_cases.dropping, 4), **PLANS[case], optimizer="momentum")
    model = ModelSpec("cases.runtime:dropping", "cases.runtime:vectors")
    options = {
        "lr": 0.05,
        "every": 3,
        "optimizer": parse_choice("SGD,momentum=0.9,nesterov=True", "here"),
        "scheduler": parse_choice("StepLR,step_size=2,gamma=0.5", "here"),
    }
    folder = tmp_path / "c"
    one = run_plan(plan, model, uncorrected(steps=8, checkpoint=folder, save=tmp_path / "one.pt", **options))
    for step in (6, 8):
        shutil.rmtree(folder / f"step-{step:08d}")
    rest = run_plan(
        plan, model, uncorrected(steps=8, checkpoint=folder, save=tmp_path / "two.pt", resume=True, **options)
    )
    assert rest.losses == one.losses[-len(rest.losses) :]
    assert largest_difference(torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")) == 0
    assert names(folder) == ["step-00000003", "step-00000006", "step-00000008"]
    assert (one.steps, rest.steps) == (8, 5)


def test_asynchronous_weights_drain_before_a_checkpoint(tmp_path):
    """After it, the first two mini-batches both use the checkpoint's weights: 2BW begins anew."""
    stages = [(0, 2, (0,)), (2, 6, (1,))]
    plan = plan_of(zoo_chain(GPT, 2), stages, weights="2bw-uniform", optimizer="momentum")
    saved = tmp_path / "state.pt"
    options = {"steps": 8, "lr": 0.02, "seed": 1}
    report = run_plan(plan, ModelSpec(GPT), uncorrected(**options, checkpoint=tmp_path / "c", every=3, save=saved))
    interval = plan.policy.accumulate

    def version(stage, microbatch):
        step = microbatch // interval
        begin = step // 3 * 3
        return begin + max(step - begin - 1, 0)

    losses, state = serial(GPT, 2, accumulate=interval, optimizer="momentum", version=version, **options)
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert largest_difference(torch.load(saved), state) <= 1e-6


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with checkpoints after updates 2 and 4, and the plan that wrote it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plan = healthy_plan()
    run_plan(plan, VECTORS, uncorrected(steps=4, lr=0.01, checkpoint=folder, every=2))
    return folder, plan


VECTORS = ModelSpec("cases.runtime:dropping", "cases.runtime:vectors")


def healthy_plan():
    return plan_of(chain_of(runtime_cases.dropping, 4), [(0, 2, (0,)), (2, 5, (1,))], weights="2bw")


@pytest.mark.parametrize("damage", ["truncated", "file gone", "list gone", "list truncated", "partial"])
def test_what_is_not_complete_is_ignored(damage, written, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(written[0], folder)
    last = folder / "step-00000004"
    data = last / "rank-00001.pt"
    match damage:
        case "truncated":
            data.write_bytes(data.read_bytes()[:-1])
        case "file gone":
            data.unlink()
        case "list gone":
            (last / ABOUT).unlink()
        case "list truncated":
            (last / ABOUT).write_text((last / ABOUT).read_text()[:40])
        case "partial":
            last.rename(folder / ".step-00000004.partial")
    found = newest(str(folder))
    assert found is not None
    assert found.position.step == 2
    assert found.position.microbatch == 2 * written[1].policy.accumulate


def test_a_run_goes_on_from_the_last_complete_one(written, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(written[0], folder)
    lost = folder / "step-00000004" / "rank-00000.pt"
    lost.unlink()
    heard = []
    report = run_plan(
        written[1], VECTORS, uncorrected(steps=5, lr=0.01, checkpoint=folder, resume=True), None, heard.append
    )
    assert report.steps == 3
    assert heard == [f"damaged, and passed over: {lost}: no such file or directory"]
    assert newest(str(folder)).position.step == 5


def test_a_run_that_goes_on_with_other_batches_says_so(written):
    """As after a lost node, when a plan is made anew for fewer GPUs."""
    heard = []
    for accumulate in (written[1].policy.accumulate, 5):
        options = uncorrected(steps=5, lr=0.01, checkpoint=written[0], resume=True)
        plan = replace(written[1], policy=replace(written[1].policy, accumulate=accumulate))
        assert resume_point(job_of(plan, VECTORS, options), heard.append, Peers()) is not None
    assert heard == [
        f"the first 4 updates of this training had {written[1].policy.accumulate} microbatches each, those of this "
        "plan have 5: the rate may want to change with that; --accumulate plans for another number"
    ]


def test_only_the_newest_checkpoints_are_kept(written, tmp_path):
    """Nothing goes that is not complete, or that has more updates and so is of another run."""
    folder = tmp_path / "c"
    for step in (1, 2, 3, 4, 9):
        shutil.copytree(written[0] / "step-00000004", folder / f"step-{step:08d}")
        reworded(folder / f"step-{step:08d}", position={"step": step, "microbatch": step})
    (folder / "step-00000001" / ABOUT).unlink()
    remove_older(folder, 4, 2, {2, 3, 4})
    assert names(folder) == ["step-00000001", "step-00000003", "step-00000004", "step-00000009"]


def test_what_is_not_known_to_be_good_replaces_nothing(written, tmp_path):
    """A checkpoint that may be damaged is no reason to remove an older one, but goes with it."""
    folder = tmp_path / "c"
    for step in (1, 2, 3, 4):
        shutil.copytree(written[0] / "step-00000004", folder / f"step-{step:08d}")
        reworded(folder / f"step-{step:08d}", position={"step": step, "microbatch": step})
    remove_older(folder, 4, 2, {2, 4})
    assert names(folder) == ["step-00000002", "step-00000003", "step-00000004"]
    remove_older(folder, 4, 1, {2, 4})
    assert names(folder) == ["step-00000004"]


def test_a_run_keeps_as_many_checkpoints_as_it_is_told(tmp_path):
    folder, plan = tmp_path / "c", healthy_plan()
    run_plan(plan, VECTORS, uncorrected(steps=5, lr=0.01, checkpoint=folder, every=1, keep=2))
    assert names(folder) == ["step-00000004", "step-00000005"]
    for options, words in [
        ({"checkpoint": folder, "keep": 0}, "keep: 0 is not"),
        ({"keep": 1}, "no folder is named"),
        ({"link_delay_s": float("nan")}, "link delay: nan must be 0 seconds or more"),
    ]:
        with pytest.raises(BadInput, match=words):
            run_plan(plan, VECTORS, uncorrected(steps=9, lr=0.01, **options))


def test_no_checkpoint_is_none(tmp_path):
    assert newest(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 4}, "the checkpoint has 4 updates already, and the run is to end after 4"),
        ({"steps": 9, "seed": 1}, "was made with seed 0, which gave its data; this run has 1"),
    ],
)
def test_checkpoints_that_do_not_fit_are_bad_input(options, words, written):
    with pytest.raises(BadInput, match=words):
        run_plan(written[1], VECTORS, uncorrected(lr=0.01, checkpoint=written[0], resume=True, **options))


def test_a_checkpoint_of_another_model_is_bad_input(written, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(written[0], folder)
    plan = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")
    model = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
    with pytest.raises(BadInput, match=r"step-00000004: .* is not there; the model's has shape"):
        run_plan(plan, model, uncorrected(steps=9, lr=0.01, checkpoint=folder, resume=True))
    reworded(folder / "step-00000004", model="other")
    with pytest.raises(BadInput, match="is of model other; the plan is for test"):
        run_plan(plan, model, uncorrected(steps=9, lr=0.01, checkpoint=folder, resume=True))


def test_resuming_needs_a_folder(written):
    with pytest.raises(BadInput, match="no folder is named to resume from"):
        run_plan(written[1], VECTORS, uncorrected(steps=9, lr=0.01, resume=True))


@pytest.mark.parametrize("fault", ["raising", "killed"])
def test_a_run_that_fails_begins_again_from_its_newest_checkpoint(fault, tmp_path):
    """The fault comes at every process's fifth microbatch: each attempt gets two updates of two further."""
    plan = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")
    assert plan.policy.accumulate == 2
    model = ModelSpec(f"cases.faults:{fault}", "cases.runtime:vectors")
    options = {"steps": 6, "lr": 0.01, "every": 2}
    with pytest.raises(RunFailed, match="microbatch 8 on stage 1"):
        run_plan(plan, model, uncorrected(checkpoint=tmp_path / "one", max_restarts=1, **options))
    report = run_plan(plan, model, uncorrected(checkpoint=tmp_path / "two", max_restarts=2, **options))
    assert report.steps == 2
    assert newest(str(tmp_path / "two")).position.step == 6


def test_a_full_disk_ends_the_run_and_leaves_nothing_that_looks_complete(tmp_path):
    plan = plan_of(chain_of(runtime_cases.without_limit, 4), [(0, 1, (0,)), (1, 3, (1,))], weights="2bw")
    model = ModelSpec("cases.faults:without_room", "cases.runtime:vectors")
    with pytest.raises(
        RunFailed, match=r"rank \d failed in the evaluation or checkpoint after update 2: .*be written .* are free"
    ):
        run_plan(plan, model, uncorrected(steps=4, lr=0.01, checkpoint=tmp_path / "c", every=2))
    assert names(tmp_path / "c") == []


@pytest.mark.parametrize("build", ["versioned", "versioned_whole"])
def test_a_saved_state_has_the_versions_of_its_modules(build, tmp_path):
    make, model = getattr(runtime_cases, build), ModelSpec(f"cases.runtime:{build}", "cases.runtime:vectors")
    plan = plan_of(chain_of(make, 4), [(0, 1, (0,)), (1, len(chain_of(make, 4)), (1,))])
    path = tmp_path / "x.pt"
    run_plan(plan, model, uncorrected(steps=1, lr=0.01, save=path))
    layers = make(4)[0]
    whole = torch.nn.Sequential(*layers) if isinstance(layers, list) else layers
    whole.load_state_dict(torch.load(path, weights_only=True))
    run_plan(plan, model, uncorrected(steps=1, lr=0.01, load=path))
