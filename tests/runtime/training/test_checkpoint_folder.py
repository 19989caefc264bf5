"""One run at a time writes to a folder of checkpoints, and leaves there nothing but checkpoints."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from cases.patience import SECONDS
from cases.saved_runs import FILES, LAST, MODEL, OPTIONS, appear, hold, one_rank, plan, state_of
from cases.saved_runs import made as folder

from pipeplan.errors import BadInput, RunFailed
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.lowering.lowered_run import Position
from pipeplan.runtime.processes import agreement
from pipeplan.runtime.processes.agreement import one_run, writing_to
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.processes.messages import StorePeers
from pipeplan.runtime.processes.own_processes import context_of
from pipeplan.runtime.training.state import checkpoint
from pipeplan.runtime.training.state.checkpoint import (
    ABOUT,
    FileSum,
    Peers,
    about,
    begin,
    file_of,
    finish,
    folder_of,
    newest,
    plan_of,
    remove_older,
    tidy,
)
from pipeplan.runtime.training.state.written import write


def test_a_second_run_is_refused(folder, plan, tmp_path):
    (folder / ".step-00000006.partial").mkdir()
    with writing_to(folder, Peers()):
        assert not list(folder.glob(".step*")), "what a killed run left makes no room for long"
        with pytest.raises(BadInput, match=rf"another run, process {os.getpid()} on \S+, writes to {folder}$"):
            run_plan(plan, MODEL, RunOptions(steps=6, checkpoint=folder, **OPTIONS))
        with writing_to(tmp_path / "other", Peers()), writing_to(None, Peers()):
            assert newest(folder).position.step == 4  # which anybody may read
    with writing_to(folder, Peers()):
        pass
    assert not list(folder.glob(".*"))


def test_a_killed_run_leaves_no_lock_behind(folder):
    ours, theirs = context_of().Pipe(duplex=False)
    process = context_of().Process(target=hold, args=(folder, theirs), daemon=True)
    process.start()
    assert ours.poll(SECONDS)
    with pytest.raises(BadInput, match=f"another run, process {process.pid} on"), one_run(folder):
        pass
    process.kill()
    process.join()
    assert (folder / agreement.LOCK).exists()
    with one_run(folder):
        pass
    assert not (folder / agreement.LOCK).exists()


def test_of_many_runs_one_at_a_time_has_the_folder(tmp_path):
    """Each removes the file that is locked, and others come at any time."""
    inside, most, done = [], [], []

    def come():
        while len(done) < 300:
            try:
                with one_run(tmp_path):
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
    (tmp_path / agreement.LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(BadInput, match=rf"{tmp_path} cannot be written to: "), one_run(tmp_path):
        pass
    assert not (tmp_path / "target").exists()


def test_file_systems_without_locks_serve_too(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(agreement.fcntl, "flock", refuse)
    with one_run(tmp_path), one_run(tmp_path):
        pass


def test_what_cannot_be_removed_stays(folder, monkeypatch):
    (folder / ".step-00000006.01234567.partial").mkdir()
    monkeypatch.setattr(os, "rmdir", lambda *_, **__: os.close(-1))
    tidy(folder)
    assert len([*folder.glob(".step*")]) == 1


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


def test_all_is_sure_to_survive_a_power_cut_before_it_appears(folder, one_rank, monkeypatch):
    """Files with what is in them, then their folder, then the folder's name."""
    sync, rename, events = os.fsync, os.replace, []

    def synced(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append((re.sub(r"\.\w{8}\.", ".", path.name), path.stat().st_size > 0))
        sync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda one, other: (events.append(Path(other).name), rename(one, other)))
    before = len(os.listdir("/proc/self/fd"))
    write(folder, Position(6, 24), "m", 0, state_of(), None, set())
    files, partial = [("rank-00000.pt", True), ("run.json", True)], ".step-00000006.partial"
    assert events == [*files, (partial, True), "step-00000006", ("c", True)]
    assert len(os.listdir("/proc/self/fd")) == before


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
    with writing_to(folder, Peers()):
        all_ranks(refused)
    assert found[0] == found[1] == found[2]


# --- whole --------------------------------------------------------------------------------------------------------


class Two(Peers):
    """One of two processes, of which the other one finds nothing wrong, and lists what this one would."""

    world = 2

    def __init__(self, rank, listed=None):
        self.rank, self.listed, self.asked = rank, listed, []

    def gathered(self, mine, timeout_s=0.0):
        self.asked.append((mine, timeout_s))
        return [self.listed if mine is None and len(self.asked) == 1 else mine, None]


def test_what_is_written_of_a_checkpoint_is_known_to_the_last_word(folder):
    appear(folder, 6, ranks=1, size=3, plan="the plan")
    text = (folder / "step-00000006" / ABOUT).read_text()
    assert json.loads(text) == {
        "format": "pipeplan-checkpoint/2", "position": {"step": 6, "microbatch": 24}, "model": "healthy", "seed": 7,
        "files": {"rank-00000.pt": {"bytes": 3, "crc32": 1218912131}}, "crc32": 2305897815,
    }  # fmt: skip
    found = about(folder / "step-00000006")
    assert (found.path, found.position, found.model, found.seed) == (
        str(folder / "step-00000006"), Position(6, 24), "healthy", 7
    )  # fmt: skip
    assert newest(folder) == found
    (folder / "step-00000006" / ABOUT).write_text(text.replace(',\n "crc32": 2305897815', ""))
    with pytest.raises(BadInput, match=r"its checksum is 89713557, not 00000000 as when it was written$"):
        about(folder / "step-00000006")
    assert plan_of(str(folder)) == plan_of(str(folder / "step-00000006")) == str(folder / "step-00000006" / "plan.json")
    assert sorted(x.name for x in folder.iterdir()) == ["step-00000002", LAST, "step-00000006"]
    for place in (folder / LAST, folder / "nowhere"):
        with pytest.raises(BadInput, match=f"^checkpoint: {place} has none with the plan of its run$"):
            plan_of(str(place))
    place.touch()
    with pytest.raises(BadInput, match=f"^checkpoint: {place}/x cannot be read: Not a directory$"):
        newest(place / "x")


def test_each_process_sums_its_share_and_waits_for_the_slowest(folder, monkeypatch):
    first = Two(0)
    assert newest(folder, None, first).position.step == 4
    assert first.asked == [(f"step-00000002 {LAST}", 0.0), (None, 0.0), (None, 1000 / (2 * 10**7))]
    (folder / LAST / FILES[2]).write_bytes(bytes(500))
    assert newest(folder, None, Two(0)).position.step == 4
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "crc_of", lambda *_: os.read(-1, 1))
        with pytest.raises(BadInput, match=f"{LAST}/{FILES[1]}: cannot be read: Bad file descriptor"):
            newest(folder)
    second = Two(1, LAST)
    sums = "rank-00001.pt: its checksum is 0283b97a, not 9dd11c8f as when it was written"
    with pytest.raises(BadInput, match=rf"^{folder}: no checkpoint is good: {folder}/{LAST}/{sums}$"):
        newest(folder, None, second)
    heard, told = [], []
    assert newest(folder, heard.append, None, lambda path: told.append(path.name)).position.step == 2
    assert len(heard) == 1
    assert sorted(told) == ["rank-00000.pt"] * (told.count("rank-00000.pt")) + ["rank-00001.pt"]
    with pytest.raises(BadInput, match=f"{folder}/{LAST}/rank-0.*; {folder}/step-00000002/rank-00000.pt: no$"):
        newest(folder, None, None, lambda path: f"{path}: no")
    for step in (99_999_999, 100_000_000):
        (folder / folder_of(step)).mkdir()
    with pytest.raises(
        BadInput,
        match=r"good: .*100000000/run.json: .*; .*-99999999/run.json: .*; .*4/rank-0000..pt: [^;]*; and 1 more$",
    ):
        newest(folder, None, None, lambda path: f"{path}: no")


def test_a_file_that_is_not_there_as_it_was_written_lets_nothing_appear(folder):
    partial = begin(folder, 6)
    (partial / file_of(0)).write_bytes(b"abc")
    place = Position(6, 24)
    with pytest.raises(RunFailed, match=f"^{partial}/rank-00000.pt: has 3 bytes, not 2,000 as written$"):
        finish(partial, place, "m", 0, [FileSum(2000, 0)])
    gone = (
        f"the file of rank 1 isn't there, so it has another folder: {partial}/rank-00001.pt: no such file or directory"
    )
    with pytest.raises(RunFailed, match=f"^{gone}$"):
        finish(partial, place, "m", 0, [FileSum(3, 0), FileSum(3, 0)])
    assert newest(folder).position.step == 4
    again = begin(folder, 6)
    assert sorted(x.name for x in folder.iterdir()) == [again.name, "step-00000002", LAST]
    finish(again, place, "m", 2**64 - 1, [])
    with pytest.raises(BadInput, match=r"files: has other names than those of ranks, from rank-00000\.pt on"):
        about(folder / "step-00000006")
    appear(folder, 6, seed=2**64 - 1)
    assert newest(folder).seed == 2**64 - 1
    assert begin(folder / "gone" / "meanwhile", 6).is_dir()


@pytest.mark.parametrize(
    ("step", "keep", "good", "left"),
    [
        (4, 1, {2, 4}, [4, 6]), (4, 2, {2, 4}, [2, 4, 6]), (6, 1, {6}, [6]), (6, 1, {2}, [2, 4, 6]),
        (6, 2, {4, 6}, [4, 6]), (6, 2, {2, 6}, [2, 4, 6]), (6, 1, {4, 6}, [6]),
    ],
)  # fmt: skip
def test_the_newest_good_ones_are_kept_and_those_of_more_updates(step, keep, good, left, folder):
    appear(folder, 6)
    for broken in (1, 3, 5):
        (folder / folder_of(broken)).mkdir()  # which aren't whole
    remove_older(folder, step, keep, good)
    assert sorted(x.name for x in folder.iterdir()) == [*map(folder_of, sorted([1, 3, 5, *left]))]


def test_who_has_a_folder_is_said_and_what_can_be_none(tmp_path):
    with one_run(tmp_path):
        who = f"process {os.getpid()} on {socket.gethostname()}"
        assert (tmp_path / agreement.LOCK).read_text() == f"{who}\n"
        with (
            pytest.raises(BadInput, match=f"^checkpoint: another run, {who}, writes to {tmp_path}$"),
            one_run(tmp_path),
        ):
            pass
        (tmp_path / agreement.LOCK).write_text("whoever" * 50)
        with pytest.raises(BadInput, match=f"^checkpoint: another run writes to {tmp_path}$"), one_run(tmp_path):
            pass
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BadInput, match=f"^checkpoint: {file} cannot be made: File exists$"), one_run(file):
        pass
    (tmp_path / agreement.LOCK).mkdir()
    with (
        pytest.raises(BadInput, match=f"^checkpoint: {tmp_path} cannot be written to: Is a directory$"),
        one_run(tmp_path),
    ):
        pass
