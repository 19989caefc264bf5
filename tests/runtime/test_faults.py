"""Processes killed in every kind of operation: the run ends, the operation is named, and training goes on."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from multiprocessing import forkserver

from cases import runtime as runtime_cases
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of

from pipeplan.errors import RunFailed
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import newest

SAVED = r"the evaluation or checkpoint after update 4"
KILLED = {  # (operation, rank): what died in what, and the newest complete checkpoint
    ("send", 0): (r"stage 0's send of the activations of microbatch 4 to rank 1", 2),
    ("send", 1): (r"stage 1's send of the gradient of microbatch 4 to rank 0", 2),
    ("receive", 0): (r"stage 0's receive of the gradient of microbatch 5 from rank 1", 2),
    ("receive", 1): (r"stage 1's receive of the activations of microbatch 5 from rank 0", 2),
    ("wait", 0): (r"the backward of microbatch 4 on stage 0", 2),
    ("wait", 1): (r"the forward of microbatch 4 on stage 1", 2),
    ("begin", 0): (SAVED, 2),
    ("shard", 0): (SAVED, 2),
    ("shard", 1): (SAVED, 2),
    ("written", 1): (SAVED, 2),
    ("about", 0): (SAVED, 2),
    ("flushed", 0): (SAVED, 2),
    ("rename", 0): (SAVED, 4),
    ("remove", 0): (SAVED, 4),
}
MODEL = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
OPTIONS = {"steps": 6, "lr": 0.01, "every": 2, "keep": 1}


@pytest.fixture(scope="module")
def plan():
    return plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


@pytest.fixture(scope="module")
def whole(plan, tmp_path_factory):
    """An uninterrupted run."""
    return run_plan(plan, MODEL, RunOptions(checkpoint=tmp_path_factory.mktemp("whole"), **OPTIONS))


def ranks_left():
    """The processes that the fork server has started and that still run."""
    server = forkserver._forkserver._forkserver_pid
    found = [
        int(pid) for task in Path(f"/proc/{server}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return [pid for pid in found if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks for processes in /proc")
@pytest.mark.parametrize(("place", "rank"), KILLED)
def test_a_process_killed_anywhere_ends_the_run_which_can_be_resumed(place, rank, plan, whole, tmp_path):
    """No rank waits for its timeout, none is left, and the resumed run is what an uninterrupted one would have been."""
    words, kept = KILLED[place, rank]
    model = ModelSpec(f"cases.faults:deadly_{place}_{rank}", "cases.runtime:vectors")
    with pytest.raises(RunFailed, match=rf"^rank {rank} died in {words}: killed by SIGKILL"):
        run_plan(plan, model, RunOptions(timeout_s=10 * SECONDS, checkpoint=tmp_path, **OPTIONS))
    assert ranks_left() == []
    assert not list(tmp_path.glob(".*"))  # of the checkpoint that was being written
    assert newest(str(tmp_path)).position.step == kept
    rest = run_plan(plan, MODEL, RunOptions(checkpoint=tmp_path, resume=True, **OPTIONS))
    assert rest.losses == whole.losses[kept * plan.policy.accumulate :]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


@pytest.mark.parametrize(
    ("place", "rank", "weights", "words"),
    [
        ("reduce", 1, "flush", "the gradient sum over the replicas of stage 0 for update 5"),
        ("gather", 1, "flush", "update 5 of stage 0"),
        ("gather", 1, "2bw", r".*\bstage 0\b.*"),  # whatever goes on beside the sum
    ],
)
def test_a_replica_killed_in_a_sum_of_gradients_is_named(place, rank, weights, words, tmp_path):
    stages = [(0, 3, (0, 1)), (3, 6, (2,))]
    plan = plan_of(
        chain_of(runtime_cases.healthy, 4), stages, weights=weights, accumulate=2 if weights == "flush" else 4
    )
    model = ModelSpec(f"cases.faults:deadly_{place}_{rank}", "cases.runtime:vectors")
    with pytest.raises(RunFailed, match=rf"^rank {rank} died in {words}: killed by SIGKILL"):
        run_plan(plan, model, RunOptions(timeout_s=10 * SECONDS, checkpoint=tmp_path, **OPTIONS))
    assert newest(str(tmp_path)).position.step == 4
    assert run_plan(plan, MODEL, RunOptions(checkpoint=tmp_path, resume=True, **OPTIONS)).steps == 2


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A plan of replicas that work by messages, and an uninterrupted run."""
    plan = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0, 1)), (3, 6, (2, 3))], weights="flush", accumulate=4)
    plan = under(plan, "message-driven", 2)
    return plan, run_plan(plan, MODEL, RunOptions(checkpoint=tmp_path_factory.mktemp("grid"), **OPTIONS))


@pytest.mark.parametrize("place", ["shard", "full"])
def test_a_grid_that_works_by_messages_goes_on_after_a_fault_in_a_checkpoint(place, grid, tmp_path):
    """A rank that holds nothing of the model but a copy is killed while it writes, or has no room to."""
    plan, whole = grid
    folder, model = tmp_path / "c", ModelSpec(f"cases.faults:deadly_{place}_3", "cases.runtime:vectors")
    words = (
        "rank 3 died" if place == "shard" else r"rank \d failed in .* cannot be written by rank 3 .*: OSError: File too"
    )
    with pytest.raises(RunFailed, match=rf"^{words}"):
        run_plan(plan, model, RunOptions(timeout_s=10 * SECONDS, checkpoint=folder, **OPTIONS))
    assert ranks_left() == []
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    rest = run_plan(plan, MODEL, RunOptions(checkpoint=folder, resume=True, **OPTIONS))
    assert rest.losses == whole.losses[2 * 4 :]
