"""One run at a time writes to a folder of checkpoints, and leaves there nothing but checkpoints."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from cases.patience import SECONDS
from cases.saved_runs import FILES, LAST, MODEL, OPTIONS, folder, one_rank, plan, state_of, written

from pipeplan.errors import BadInput, RunFailed
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.lowering.lowered_run import Position
from pipeplan.runtime.processes.agreement import writing_to
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.processes.messages import StorePeers
from pipeplan.runtime.training.state import lock
from pipeplan.runtime.training.state.checkpoint import ABOUT, Peers, newest, tidy
from pipeplan.runtime.training.state.lock import one_run
from pipeplan.runtime.training.state.written import write


def test_a_second_run_is_refused(folder, plan, tmp_path):
    with writing_to(folder, Peers()):
        with pytest.raises(BadInput, match=rf"another run, process {os.getpid()} on \S+, writes to {folder}$"):
            run_plan(plan, MODEL, RunOptions(steps=6, checkpoint=folder, **OPTIONS))
        with writing_to(tmp_path / "other", Peers()), writing_to(None, Peers()):
            assert newest(folder).position.step == 4  # which anybody may read
    with writing_to(folder, Peers()):
        pass
    assert not list(folder.glob(".*"))


def test_a_killed_run_leaves_no_lock_behind(folder):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pipeplan.runtime.training.state.lock import one_run\n"
        "with one_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(10**6)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=f"another run, process {process.pid} on"), one_run(folder):
            pass
        process.kill()
    assert (folder / lock.LOCK).exists()
    with one_run(folder):
        pass
    assert not (folder / lock.LOCK).exists()


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
    (tmp_path / lock.LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(BadInput, match=rf"{tmp_path} cannot be written to: "), one_run(tmp_path):
        pass
    assert not (tmp_path / "target").exists()


def test_file_systems_without_locks_serve_too(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with one_run(tmp_path), one_run(tmp_path):
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
    with writing_to(folder, Peers()):
        all_ranks(refused)
    assert found[0] == found[1] == found[2]
