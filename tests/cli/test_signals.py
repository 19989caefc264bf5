"""What signals, and streams that take nothing, do to a command in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from cases.patience import SECONDS, without_progress

from pipeplan import scratch
from pipeplan.files.plans import load_plan

PIPEPLAN = [sys.executable, "-m", "pipeplan"]
PLAN = ["plan", "profiles/gpt-tiny-b8-cpu.json", "--gpus", "2", "--mem", "1GB", "--algorithm", "balance"]


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which $P is the command; its exit code is that of the line's first command."""
    environment = os.environ | {"P": " ".join(PIPEPLAN)}
    line = f"set -o pipefail; {line}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=SECONDS)


FULL = "error: standard output cannot be written: No space left on device\n"
CLOSED = "error: standard output cannot be written: Bad file descriptor\n"


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (f"$P {' '.join(PLAN)} >/dev/full", 2, FULL),
        ("$P --help >/dev/full", 2, FULL),
        ("$P schema plan >&-", 2, CLOSED),
        ("$P check nowhere.json 2>&-", 2, ""),
        ("$P check nowhere.json 2>/dev/full", 2, ""),
        ("$P check - <&-", 2, "error: -: cannot be read: standard input is closed\n"),
    ],
)
def test_streams_that_are_full_closed_or_gone(line, code, told):
    done = shell(line)
    assert (done.returncode, without_progress(done.stderr)) == (code, told)


@pytest.mark.parametrize(("number", "told"), [("SIGINT", "interrupted"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP")])
def test_signals_end_a_command_once_with_their_code_and_leave_nothing(number, told, tmp_path):
    """It reads a pipe when the first comes; the second, while the first is obeyed, changes nothing."""
    pipe, scratch = tmp_path / "pipe", tmp_path / "scratch"
    os.mkfifo(pipe)
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = subprocess.Popen(
        [*PIPEPLAN, "check", str(pipe)], stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    with open(pipe, "w"):  # which waits until the command has opened it
        for _ in range(2):
            command.send_signal(getattr(signal, number))
        _, said = command.communicate(timeout=SECONDS)
    assert command.returncode == 128 + getattr(signal, number)
    assert "Traceback" not in said
    assert told in said or not without_progress(said)  # nothing, if the command was about to end when the second came
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_ended_leaves_its_best_plan(number, tmp_path):
    """It searches on when it has one, and then the signal comes."""
    path = tmp_path / "plan.json"
    words = ["plan", "example:gpt2-small-b4-a100", "--gpus", "8", "--mem", "2GB", "--for", "megatron"]
    words += ["--effort", "high", "-o", str(path)]
    command = subprocess.Popen([*PIPEPLAN, *words], stdout=subprocess.PIPE, start_new_session=True)
    while not path.exists() and command.poll() is None:
        time.sleep(0.05)
    command.send_signal(number)
    told, _ = command.communicate(timeout=SECONDS)
    assert (command.returncode, b"written to" in told) == (0, True)
    load_plan(str(path))  # which checks it


def test_what_is_ignored_stays_ignored(tmp_path):
    """Behind nohup the end of a terminal ends nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = f"trap '' HUP; exec {' '.join(PIPEPLAN)} check {pipe}"
    command = subprocess.Popen(["bash", "-c", line], stderr=subprocess.PIPE, text=True)
    with open(pipe, "w") as file:
        command.send_signal(signal.SIGHUP)
        file.write("{}")
    _, said = command.communicate(timeout=SECONDS)
    assert command.returncode == 2
    assert "missing required field" in said


def test_a_reader_that_has_gone_has_a_code_of_its_own():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PIPEPLAN, "schema", "plan"], stdout=writer, stderr=subprocess.PIPE, timeout=SECONDS)
    os.close(writer)
    assert (done.returncode, without_progress(done.stderr.decode())) == (141, "")


MADE = ("pipeplan-ab_d3fgh", scratch.MARK, 0o700, ("store", "pymp-abcd1234", "0123456789abcdef" * 2 + "-pulp.mps"))


@pytest.mark.parametrize(
    ("name", "mark", "mode", "entries"),
    [
        MADE,
        ("pipeplan-thesis", *MADE[1:]),
        ("pipeplan-ab_d3fgh2", *MADE[1:]),
        (MADE[0], b"", *MADE[2:]),
        (MADE[0], scratch.MARK + b"mine", *MADE[2:]),
        (*MADE[:2], 0o755, MADE[3]),
        (*MADE[:3], ("thesis.tex",)),
    ],
)
def test_only_what_was_made_here_is_swept(name, mark, mode, entries, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / name
    folder.mkdir()
    for entry in entries:
        (folder / entry).touch()
    (folder / scratch.LOCK).write_bytes(mark)
    folder.chmod(mode)
    os.utime(folder / scratch.LOCK, (time.time() - 3600,) * 2)
    (tmp_path / "pipeplan-ij_l4mno").symlink_to(folder)
    scratch._sweep.cache_clear()
    with scratch.scratch_folder():
        assert folder.exists() == ((name, mark, mode, entries) != MADE)


def test_scratch_folders_of_killed_processes_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hold = "from pipeplan.scratch import scratch_folder\nwith scratch_folder() as f: print(f, flush=True); input()"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    folders = [holder.stdout.readline().strip() for holder in holders]
    holders[0].kill()
    holders[0].wait()
    assert all(os.path.isdir(folder) for folder in folders)
    for folder in folders:
        os.utime(os.path.join(folder, scratch.LOCK))  # however long it took to come here
    scratch._sweep.cache_clear()
    with scratch.scratch_folder():
        assert os.path.isdir(folders[0])  # too young to be told from one that is being made
    for folder in folders:
        os.utime(os.path.join(folder, scratch.LOCK), (time.time() - 3600,) * 2)
    scratch._sweep.cache_clear()
    with scratch.scratch_folder() as own:
        assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(folders[1]), own.name])
    holders[1].communicate("\n", timeout=SECONDS)
    assert os.listdir(tmp_path) == []
