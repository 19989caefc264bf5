"""Reading and writing whole files, whatever happens meanwhile."""

import io
import os
import re
import resource
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from pipeplan.api import comparing
from pipeplan.errors import BadInput
from pipeplan.files import forms, profile_rules
from pipeplan.files.machines import platforms
from pipeplan.files.text import MOST_BYTES, WRITER_S, check_writable, read_csv, read_text, replaced, write_text
from pipeplan.runtime.measure import trace_file
from pipeplan.schedule import kinds


def test_what_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"nowhere.json: cannot be read: No such file"):
        read_text(str(tmp_path / "nowhere.json"))
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_text(str(tmp_path))
    (tmp_path / "latin").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(BadInput, match="cannot be read: it is not UTF-8 text"):
        read_text(str(tmp_path / "latin"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xe9"), encoding="utf-8", errors="surrogateescape"))
    with pytest.raises(BadInput, match="-: cannot be read: it is not UTF-8 text"):
        read_text("-")
    monkeypatch.setattr(sys, "stdin", io.StringIO("plain"))
    assert read_text("-") == "plain"


def test_what_is_longer_than_allowed_is_refused_and_what_is_as_long_is_read(tmp_path, monkeypatch):
    path = tmp_path / "long"
    path.write_text("x" * 100)
    assert read_text(str(path), 100) == "x" * 100
    for place, text in ((str(path), None), ("-", "x" * 100)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(BadInput, match=r"is longer than 9\.9e-05 MB, the most that is read"):
            read_text(place, 99)
    path.write_text("a,b\n" + "x" * 140_000)
    with pytest.raises(BadInput, match=r"long: line 2: field larger than field limit"):
        list(read_csv(str(path)))
    os.truncate(path, MOST_BYTES + 1)
    for read in (read_text, lambda name: list(read_csv(name))):
        with pytest.raises(BadInput, match="is longer than 64 MB"):
            read(str(path))


LIMITS = {  # row of docs/reference/limits.md -> what the program has
    "a file or standard input": f"{MOST_BYTES // 10**6} MB",
    "the trace of a run": f"{trace_file.MOST_BYTES // 10**6} MB",
    "a pipe that nothing writes into": f"waited for {WRITER_S:.0f} s",
    "layers of a profile": f"{profile_rules.MOST_LAYERS:,}",
    "edges of a profile": f"{profile_rules.MOST_EDGES:,}",
    "layers of a profile with edges": f"{profile_rules.MOST_LAYERS_WITH_EDGES:,}",
    "a name, or where": f"{forms.MOST_LETTERS:,} characters",
    "devices of a": f"{platforms.MOST_DEVICES:,}",
    "cases of": f"{comparing.MOST_CASES:,}",
    "steps of one simulated run": f"{kinds.MOST_STEPS:,}",
}


def test_the_page_has_the_limits_that_there_are():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text()
    rows = re.findall(r"^\| (.*?) \| ([^|]*) \|$", page.partition("## Sizes")[2].partition("\n## ")[0], re.MULTILINE)
    assert len(rows) == len(LIMITS) + 1
    for (what, most), (row, value) in zip(rows[1:], LIMITS.items(), strict=True):
        assert what.startswith(row)
        assert most == value


def test_a_pipe_that_nobody_writes_into_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeplan.files.text.WRITER_S", 0.01)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match="nothing has written into this pipe"):
        read_text(str(pipe))
    with pytest.raises(OSError, match="No such device"):  # as nobody reads it
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def test_a_pipe_is_read_until_its_writer_closes_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write():
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"in ")
            time.sleep(0.2)
            file.write(b"parts")

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(str(pipe)) == "in parts"
    writer.join()


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_writing_replaces_the_whole_file(tmp_path, monkeypatch):
    target, sizes = tmp_path / "plan.json", []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    write_text(str(target), "old text that is longer")
    write_text(str(target), "new")
    assert sizes == [23, 3], "all of it is there before it is synced"
    assert target.read_text() == "new"
    assert entries(tmp_path) == ["plan.json"]
    mask = os.umask(0o026)
    try:
        write_text(str(target), "again")
    finally:
        assert os.umask(mask) == 0o026, "as it was"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_writing_to_standard_output(capsys):
    write_text("-", "text\n")
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_whole_and_nothing_behind(step, error, tmp_path, monkeypatch):
    target = tmp_path / "plan.json"
    target.write_text("old")

    def fail(*args, **kwargs):
        for path in tmp_path.glob(".pipeplan-*"):
            if step == "chmod":  # and somebody has tidied up
                path.unlink()
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(BadInput if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write_text(str(target), "new")
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert str(caught.value) == f"{target}: cannot be written: No space left on device"
    assert target.read_text() == "old"
    assert entries(tmp_path) == ["plan.json"]


def test_what_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"plan.json: cannot be written: No such file"):
        write_text(str(tmp_path / "no" / "plan.json"), "text")
    with pytest.raises(BadInput, match="cannot be written: Is a directory"):
        write_text(str(tmp_path), "text")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot be written: Not a directory"):
        write_text(str(tmp_path / "file" / "plan.json"), "text")

    def refuse(**kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(BadInput, match="cannot be written: Permission denied"):
        write_text(str(tmp_path / "plan.json"), "text")
    assert entries(tmp_path) == ["file"]


def test_links_are_followed_and_pipes_are_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    real = tmp_path / "folder" / "real.json"
    real.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(real)
    write_text(str(link), "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(str(pipe), "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert entries(tmp_path) == ["folder", "link.json", "pipe"]


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path):
    """A write that fails in the middle, of any file that is written atomically."""
    target = tmp_path / "state.pt"
    target.write_text("old")

    def write():
        with replaced(str(target)) as file:
            for _ in range(100):
                file.write(b"x" * 2**12)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
        with pytest.raises(BadInput, match=r"state.pt: cannot be written: File too large"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert target.read_text() == "old"
    assert entries(tmp_path) == ["state.pt"]


def test_a_library_that_words_the_systems_refusal_otherwise_changes_nothing(tmp_path):
    def write(error):
        with replaced(str(tmp_path / "state.pt")):
            try:
                raise error
            except type(error):
                raise RuntimeError("unexpected pos 704") from None

    with pytest.raises(BadInput, match="cannot be written: No space left"):
        write(OSError(28, "No space left on device"))
    with pytest.raises(RuntimeError, match="unexpected pos"):
        write(ValueError("of its own"))
    assert entries(tmp_path) == []


def test_what_can_be_written_is_known_before(tmp_path):
    """Neither an answer leaves anything, nor is what is there touched."""
    old = tmp_path / "old"
    old.write_text("old")
    os.mkfifo(tmp_path / "pipe")
    for path in ("-", "/dev/null", tmp_path / "new", old, tmp_path / "pipe"):
        check_writable(str(path))
    for path, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "new", f"there is no folder {tmp_path / 'none'}"),
        (old / "new", f"there is no folder {old}"),
        (tmp_path / ("x" * 300), "File name too long"),
        ("/proc/new", "No such file or directory"),
    ):
        with pytest.raises(BadInput, match=f"cannot be written: {words}"):
            check_writable(str(path))
    with (
        mock.patch("os.access", lambda path, mode: mode != os.W_OK),
        pytest.raises(BadInput, match="Permission denied"),
    ):
        check_writable("/dev/null")
    assert old.read_text() == "old"
    assert entries(tmp_path) == ["old", "pipe"]
