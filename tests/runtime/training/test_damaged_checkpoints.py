"""Checkpoints that are damaged, or were made to do harm: found before use, named, passed over; nothing is executed."""

import errno
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from cases import runtime as runtime_cases
from cases.checkpoints import resummed, reworded
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of
from torch.optim import lr_scheduler

from pipeplan.errors import BadInput, RunFailed
from pipeplan.runtime.launch import run_plan
from pipeplan.runtime.lowering.lowered_run import Position
from pipeplan.runtime.model.spec import ModelSpec
from pipeplan.runtime.options import RunOptions
from pipeplan.runtime.peers import StorePeers, writing_to
from pipeplan.runtime.training import folder_lock
from pipeplan.runtime.training.checkpoint import ABOUT, Alone, newest, tidy
from pipeplan.runtime.training.optimizers import parse_choice
from pipeplan.runtime.training.saved_state import TrainingState, check_rates, read, write
from pipeplan.runtime.training.stage_optimizer import Rates

MODEL = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
OPTIONS = {"lr": 0.01, "every": 2, "optimizer": parse_choice("SGD,momentum=0.9", "here")}
FILES = [ABOUT, "rank-00000.pt", "rank-00001.pt"]
LAST = "step-00000004"


@pytest.fixture(scope="module")
def plan():
    return plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


@pytest.fixture(scope="module")
def written(plan, tmp_path_factory):
    """A folder with checkpoints after updates 2 and 4 of two ranks."""
    folder = tmp_path_factory.mktemp("written")
    run_plan(plan, MODEL, RunOptions(steps=4, checkpoint=folder, **OPTIONS))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "c"))


@pytest.fixture(scope="module")
def one_rank():
    """This process is the only rank there is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def passed_over(folder):
    """What is said about the newest checkpoint, which isn't taken; the one before it is."""
    heard = []
    found = newest(folder, heard.append)
    assert found.position.step == 2
    assert len(heard) == 1
    assert heard[0].startswith(str(folder / LAST))
    return heard[0].removeprefix(str(folder / LAST)).removeprefix("/")


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(name, folder):
    shutil.rmtree(folder / "step-00000002")
    path = folder / LAST / name
    whole = path.read_bytes()
    for bit in random.Random(name).sample(range(8 * len(whole)), 300):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=rf"no checkpoint is good: .*{LAST}/{name}: "):
            newest(folder)
    path.write_bytes(whole)
    assert newest(folder).position.step == 4


DAMAGE = {
    "cut": (lambda path: os.truncate(path, 100), "100 bytes, not|JSON is malformed|truncated"),
    "emptied": (lambda path: os.truncate(path, 0), "0 bytes, not|truncated"),
    "zeroed": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "its checksum is|malformed"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\n1"), "bytes, not|malformed"),
    "gone": (lambda path: path.unlink(), "no such file or directory"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is no regular file"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is no regular file"),
    "endless": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "is no regular file"),
    "elsewhere": (lambda path: path.symlink_to(path.rename(path.parents[2] / path.name)), "is no regular file"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_passed_over_and_named(damage, name, folder):
    do, words = DAMAGE[damage]
    do(folder / LAST / name)
    said = passed_over(folder)
    assert said.startswith(f"{name}: ")
    assert any(word in said for word in words.split("|")), said


def test_the_files_of_two_checkpoints_do_not_make_one(folder):
    shutil.copy(folder / "step-00000002" / FILES[1], folder / LAST / FILES[1])
    assert passed_over(folder).startswith("rank-00000.pt: ")


def test_a_checkpoint_elsewhere_is_none(folder, tmp_path):
    (folder / LAST).rename(tmp_path / LAST)
    (folder / LAST).symlink_to(tmp_path / LAST)
    assert passed_over(folder) == ": is no folder"


def test_other_files_are_nobodys_business(folder):
    (folder / LAST / "notes.txt").write_text("the good one")
    (folder / "step-00000005.old").mkdir()
    (folder / "step-best").symlink_to("step-00000002")
    (folder / "step-00000006").write_text("no folder")
    heard = []
    assert newest(folder, heard.append).position.step == 4
    assert heard == [f"{folder}/step-00000006: is no folder"]


def test_no_good_one_is_one_sentence(folder, plan):
    for step in (2, 4):
        (folder / f"step-{step:08d}" / FILES[2]).unlink()
    for step in (6, 8):
        (folder / f"step-{step:08d}").mkdir()
    with pytest.raises(BadInput, match=r"c: no checkpoint is good: .*8/run.json: .*6/run.json: .*4/rank.* and 1 more$"):
        run_plan(plan, MODEL, RunOptions(steps=9, checkpoint=folder, resume=True, **OPTIONS))
    assert newest(folder / "nowhere") is None


def nested(depth):
    return "[" * depth + "]" * depth


ODD = {  # what run.json could say, with a checksum that fits
    "files is a list": ({"files": ["rank-00000.pt"]}, "$.files"),
    "no files": ({"files": {}}, "files: has other names"),
    "a file is missing": ({"files": {FILES[2]: {"bytes": 0, "crc32": 0}}}, "files: has other names"),
    "a file above": ({"files": {"../step-00000002/rank-00000.pt": {"bytes": 0, "crc32": 0}}}, "files: has other names"),
    "a file elsewhere": ({"files": {"/etc/passwd": {"bytes": 0, "crc32": 0}}}, "files: has other names"),
    "a size is negative": ({"files": {FILES[1]: {"bytes": -1, "crc32": 0}}}, "$.files[...].bytes"),
    "a sum is huge": ({"files": {FILES[1]: {"bytes": 1, "crc32": 2**32}}}, "$.files[...].crc32"),
    "step is text": ({"position": {"step": "4", "microbatch": 8}}, "$.position.step"),
    "step is negative": ({"position": {"step": -4, "microbatch": 8}}, "$.position.step"),
    "step is huge": ({"position": {"step": 10**400, "microbatch": 8}}, "$.position.step"),
    "step is another": ({"position": {"step": 5, "microbatch": 8}}, "is of update 5"),
    "step is broken": ({"position": {"step": 4.5, "microbatch": 8}}, "$.position.step"),
    "step is not a number": ({"position": {"step": float("nan"), "microbatch": 8}}, "JSON is malformed"),
    "microbatch is true": ({"position": {"step": 4, "microbatch": True}}, "$.position.microbatch"),
    "microbatch is missing": ({"position": {"step": 4}}, "$.position"),
    "microbatch is huge": ({"position": {"step": 4, "microbatch": 10**16}}, "$.position.microbatch"),
    "position is null": ({"position": None}, "$.position"),
    "model is a number": ({"model": 4}, "$.model"),
    "seed is an object": ({"seed": {}}, "$.seed"),
    "seed is endless": ({"seed": 10**4000}, "seed: has 13288 bits"),
    "more keys": ({"code": "import os"}, "unknown field `code`"),
    "of the version before": (
        {"format": "pipeplan-checkpoint/1"},
        "is of format 'pipeplan-checkpoint/1'; this version",
    ),
    "of no format": ({"format": 1}, "$.format"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_list_of_files_is_damage(case, folder):
    changes, words = ODD[case]
    reworded(folder / LAST, **changes)
    said = passed_over(folder)
    assert said.startswith(f"{ABOUT}: ")
    assert words in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"[]", "expected `object`, got `array`"),
        (b"null", "expected `object`, got `null`"),
        (b'{"format": "\xff\xfe"}', "not UTF-8"),
        (b"\x80\x04\x95", "not UTF-8"),
        (nested(10**6).encode(), "expected `object`, got `array`"),
        (f'{{"a": {nested(10**6)}, "format": ""}}'.encode(), "nested too deeply"),
        (f'{{"format": "pipeplan-checkpoint/2", "files": {nested(10**6)}}}'.encode(), "nested too deeply"),
    ],
)
def test_what_is_no_list_of_files_is_damage(content, words, folder):
    (folder / LAST / ABOUT).write_bytes(content)
    said = passed_over(folder)
    assert said.startswith(f"{ABOUT}: ")
    assert words in said


def test_a_list_of_files_of_any_size_is_not_read(folder):
    os.truncate(folder / LAST / ABOUT, 10**8)
    assert passed_over(folder) == f"{ABOUT}: has 0.10 GB; it is never larger than 16.78 MB"


# --- harm -----------------------------------------------------------------------------------------------------------


class Planted:
    """Whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def state_with(planted):
    return {"model": {"0.weight": planted}, "optimizer": {}, "random": None, "rates": None, "scale": None}


PLANTS = {
    "a pickle": lambda path, planted: path.write_bytes(pickle.dumps(planted)),
    "in a file of torch's": lambda path, planted: torch.save(state_with(planted), path),
    "in an old file of torch's": lambda path, planted: torch.save(
        state_with(planted), path, _use_new_zipfile_serialization=False
    ),
    "in the rates": lambda path, planted: torch.save(state_with(None) | {"rates": (planted, planted)}, path),
    "in the optimizer's state": lambda path, planted: torch.save(
        state_with(None) | {"optimizer": {"0.weight": planted}}, path
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", FILES)
def test_nothing_that_is_planted_is_executed(plant, name, folder, tmp_path, one_rank):
    """Whether the checksums fit or not. The plant does work where it isn't guarded against."""
    mark = tmp_path / "planted"
    path = folder / LAST / name
    PLANTS[plant](path, Planted(mark))
    (folder / LAST / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    assert passed_over(folder).startswith(f"{name}: ")
    if name != ABOUT:
        resummed(folder / LAST)
        with pytest.raises(BadInput, match=rf"^{path}: cannot be read: "):
            read(newest(folder), {"0.weight": torch.zeros(16, 16)}, {"0.weight"})
    assert not mark.exists()
    torch.load(path, weights_only=False) if plant != "a pickle" else pickle.loads(path.read_bytes())
    assert mark.exists()


def test_a_run_that_goes_on_from_a_hostile_folder_executes_nothing(folder, plan, tmp_path):
    mark = tmp_path / "planted"
    for name in FILES[1:]:
        PLANTS["in the rates"](folder / LAST / name, Planted(mark))
    resummed(folder / LAST)
    with pytest.raises(BadInput, match=rf"^{folder / LAST}/rank-0000\d.pt: cannot be read: UnpicklingError: .*open"):
        run_plan(plan, MODEL, RunOptions(steps=6, checkpoint=folder, resume=True, **OPTIONS))
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"model": []},
        state_with(3),
        state_with(None) | {"more": 1},
        state_with(torch.zeros(3)) | {"optimizer": [1]},
        state_with(torch.empty(16, 16, device="meta")),
        state_with(torch.zeros(16, 16, dtype=torch.complex64).to_sparse()),
        state_with(torch.zeros(16, 16)) | {"optimizer": {"0.weight": torch.zeros(1).expand(10**12)}},
    ],
    ids=str,
)
def test_states_of_other_kinds_are_bad_input(content, folder, one_rank):
    torch.save(content, folder / LAST / FILES[1])
    torch.save(state_with(None) | {"model": {}}, folder / LAST / FILES[2])
    resummed(folder / LAST)
    with pytest.raises(BadInput, match=rf"^{folder / LAST}"):
        read(newest(folder), {"0.weight": torch.zeros(16, 16)}, {"0.weight"})


@pytest.mark.parametrize("content", [{"rates": ([], None)}, {"rates": (3, 4)}, {"random": torch.zeros(3)}], ids=str)
def test_what_does_not_fit_the_run_is_bad_input(content, folder, plan):
    for name in FILES[1:]:
        path = folder / LAST / name
        torch.save(torch.load(path) | content, path)
    resummed(folder / LAST)
    with pytest.raises(BadInput, match=rf"^{folder / LAST}"):
        run_plan(plan, MODEL, RunOptions(steps=6, checkpoint=folder, resume=True, **OPTIONS))


# --- what a state may hold ------------------------------------------------------------------------------------------


def state_of(rates=None, **model):
    return TrainingState(model, {}, torch.get_rng_state(), rates)


SCHEDULES = {
    "LambdaLR": {"lr_lambda": lambda step: np.float64(0.9) ** step},
    "MultiplicativeLR": {"lr_lambda": lambda step: np.float32(0.9)},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_goes_on(name, tmp_path, one_rank):
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return (
            Rates([], lambda _: optimizer, None),
            optimizer,
            getattr(lr_scheduler, name)(optimizer, **SCHEDULES[name]),
        )

    def rates(steps, schedule):
        found = []
        for _ in range(steps):
            schedule.optimizer.step()
            schedule.step()
            found.append(schedule.get_last_lr())
        return found

    _, optimizer, schedule = made()
    rates(2, schedule)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    check_rates(groups, schedule.state_dict())
    write(tmp_path, Position(2, 4), "test", 0, state_of((groups, schedule.state_dict())), None, set())
    found = read(newest(tmp_path), {}, set())
    _, other, again = made()
    other.param_groups[0].update(found.rates[0][0])
    again.load_state_dict(found.rates[1])
    assert rates(4, again) == rates(4, schedule)


@pytest.mark.parametrize(
    "value", [np.zeros(3), Planted("x"), lambda: 0, os.getcwd], ids=["array", "object", "lambda", "f"]
)
def test_a_state_that_could_not_be_loaded_safely_is_refused_at_the_start(value, tmp_path, one_rank):
    with pytest.raises(BadInput, match=r"^checkpoint: the optimizer's or the schedule's state has more than"):
        check_rates([{"lr": 0.1}], {"mine": value})
    with pytest.raises(RunFailed, match=r"step-00000002 cannot be written by rank 0 .* has more than tensors"):
        write(tmp_path, Position(2, 4), "test", 0, state_of(([], value)), None, set())
    assert newest(tmp_path) is None


def test_tensors_are_written_without_what_lies_beside_them(tmp_path, one_rank):
    large = torch.randn(10**6)
    shared = large[:9]
    weights = {"a": shared.view(3, 3), "b": shared, "c": torch.tensor(1.5), "d": torch.nn.Parameter(torch.zeros(0, 2))}
    write(tmp_path, Position(1, 1), "test", 0, state_of(**weights), None, set())
    assert newest(tmp_path).files["rank-00000.pt"].bytes < 10**4
    found = {name: torch.empty_like(x, requires_grad=False) for name, x in weights.items()}
    read(newest(tmp_path), found, set())
    assert all(torch.equal(found[name], x) for name, x in weights.items())


# --- the folder -----------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused(folder, plan, tmp_path):
    with writing_to(folder, Alone()):
        with pytest.raises(BadInput, match=rf"another run, process {os.getpid()} on \S+, writes to {folder}$"):
            run_plan(plan, MODEL, RunOptions(steps=6, checkpoint=folder, **OPTIONS))
        with writing_to(tmp_path / "other", Alone()), writing_to(None, Alone()):
            assert newest(folder).position.step == 4  # which anybody may read
    with writing_to(folder, Alone()):
        pass
    assert not list(folder.glob(".*"))


def test_a_killed_run_leaves_no_lock_behind(folder):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pipeplan.runtime.training.folder_lock import one_run\n"
        "with one_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(10**6)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=f"another run, process {process.pid} on"), folder_lock.one_run(folder):
            pass
        process.kill()
    assert (folder / folder_lock.LOCK).exists()
    with folder_lock.one_run(folder):
        pass
    assert not (folder / folder_lock.LOCK).exists()


def test_of_many_runs_one_at_a_time_has_the_folder(tmp_path):
    """Each removes the file that is locked, and others come at any time."""
    inside, most, done = [], [], []

    def come():
        while len(done) < 300:
            try:
                with folder_lock.one_run(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
                    done.append(1)
            except BadInput:
                pass

    threads = [threading.Thread(target=come) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert set(most) == {1}
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_something_else_is_bad_input(tmp_path):
    (tmp_path / folder_lock.LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(BadInput, match=rf"{tmp_path} cannot be written to: "), folder_lock.one_run(tmp_path):
        pass
    assert not (tmp_path / "target").exists()


def test_file_systems_without_locks_serve_too(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    with folder_lock.one_run(tmp_path), folder_lock.one_run(tmp_path):
        pass


def test_what_killed_runs_left_is_removed(folder):
    """But for a good checkpoint that was to be replaced."""
    left = [".step-00000006.01234567.partial", ".step-00000002.01234567.removed", ".step-00000006.partial"]
    for name in left:
        shutil.copytree(folder / LAST, folder / name)
    (folder / ".step-00000004.01234567.replaced").symlink_to("/")
    (folder / LAST).rename(folder / ".step-00000004.76543210.replaced")
    (folder / ".step-00000002.01234567.replaced").mkdir()
    (folder / ".mine").mkdir()
    tidy(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".mine", "step-00000002", LAST]


def test_a_checkpoint_replaces_one_of_as_many_updates(folder, one_rank):
    shutil.rmtree(folder / "step-00000002")
    (folder / "step-00000002").symlink_to("/")
    good = set()
    for step in (2, 4):
        write(folder, Position(step, step), "new", 0, state_of(), 1, good)
    assert newest(folder).model == "new"
    assert good == {2, 4}
    assert [path.name for path in folder.iterdir()] == [LAST]


def test_a_full_disk_is_one_sentence(folder, one_rank, monkeypatch):
    """Wherever it is found to be full; the checkpoints before are as they were."""
    opened, refused = Path.open, []

    def full(path, *arguments, **options):
        if path.name in refused:
            return opened(Path("/dev/full"), *arguments, **options)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    for name in (ABOUT, FILES[1]):
        refused.append(name)
        with pytest.raises(
            RunFailed, match=r"-00000006 cannot be written by rank 0 \(.* are free there\): OSError: No space"
        ):
            write(folder, Position(6, 6), "test", 0, state_of(a=torch.zeros(10**5)), 1, {4})
        refused.clear()
        tidy(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", LAST]
        assert newest(folder).position.step == 4


def test_processes_of_torchrun_look_for_a_checkpoint_together(folder):
    """Each reads the files of its share; what one finds damaged all pass over."""
    path = folder / LAST / FILES[2]
    path.write_bytes(path.read_bytes()[::-1])
    store, found, heard = dist.HashStore(), {}, []

    def look(rank):
        peers = StorePeers(store, rank, 3, SECONDS)
        with writing_to(folder, peers):
            found[rank] = newest(folder, lambda words: heard.append((rank, words)), peers)

    def refused(rank):
        with (
            pytest.raises(BadInput, match="another run") as caught,
            writing_to(folder, StorePeers(store2, rank, 3, SECONDS)),
        ):
            pass
        found[rank] = str(caught.value)

    def all_ranks(work):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)

    all_ranks(look)
    assert [found[rank].position.step for rank in range(3)] == [2, 2, 2]
    assert [rank for rank, _ in heard] == [0]
    store2 = dist.HashStore()
    with writing_to(folder, Alone()):
        all_ranks(refused)
    assert found[0] == found[1] == found[2]
