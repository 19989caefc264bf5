"""What options take: numbers within bounds, files that can be written, and one document for standard output."""

from __future__ import annotations

import math
import os
import random
import socket
from pathlib import Path

import click
import pytest
from cases.fuzz.commands import NEEDED, Commands
from cases.fuzz.judge import called
from conftest import Command

from pipeplan.cli import COMMANDS, group
from pipeplan.cli.options import OUTPUT, SHARE, TIME, TIME_ABOVE_0, Number
from pipeplan.cli.showing import refuse_two_documents
from pipeplan.errors import BadInput

CONTEXT = click.Context(group)
OPTIONS = [
    (name, option)
    for name in COMMANDS
    for option in group.get_command(CONTEXT, name).params  # type: ignore[union-attr]  # all are there
    if isinstance(option, click.Option) and not option.is_flag
]
COUNTS = [(name, option) for name, option in OPTIONS if isinstance(option.type, click.types.IntParamType)]
READ = (SHARE, TIME, TIME_ABOVE_0)
REALS = [
    (name, option)
    for name, option in OPTIONS
    if isinstance(option.type, click.types.FloatParamType) or option.type in READ
]
NO_NUMBERS = ("nan", "inf", "-inf", "-1", "1e999", "", "one", "9" * 5000)


@pytest.mark.parametrize(("command", "option"), [*COUNTS, *REALS], ids=lambda x: getattr(x, "name", x))
def test_every_number_is_bounded(command: str, option: click.Option) -> None:
    """Below, and counts above too: nothing runs for a number that nobody means, or breaks far from where it is said."""
    if isinstance(option.type, click.types.IntParamType):
        assert isinstance(option.type, click.IntRange)
        assert option.type.min is not None
        assert option.type.max is not None
    for text in NO_NUMBERS:
        with pytest.raises((click.BadParameter, BadInput)):
            option.type.convert(text, option, CONTEXT)


def test_no_number_is_of_a_type_that_takes_any() -> None:
    assert len(COUNTS) > 40
    assert len(REALS) > 5
    assert all(isinstance(x.type, click.FloatRange) or x.type in READ for _, x in REALS)
    assert isinstance(Number(above=True).convert("1e-300", None, None), float)
    with pytest.raises(click.BadParameter):
        Number(above=True).convert("0", None, None)


FILES = [
    (name, param)
    for name in COMMANDS
    for param in group.get_command(CONTEXT, name).params  # type: ignore[union-attr]  # all are there
    if getattr(param.type, "files", False) and (name, param.name) != ("compare", "platform")  # which it refuses
]
MORE = {"calibrate": ["--gpu", "a100"], "run": ["--dry-run"]}


def naming(commands: Commands, name: str, param: click.Parameter, path: str) -> list[str]:
    """Return a usual command line in which ``param`` is ``path``."""
    rng, words = random.Random(1), [name, *MORE.get(name, ())]
    for other in group.get_command(CONTEXT, name).params:  # type: ignore[union-attr]
        option, needed = other.opts[0], other.opts[0] in NEEDED.get(name, ()) and param.opts[0] != "--platform"
        given = other.required or needed or (name, option) == ("plan", "profile")
        if other is param or (given and option not in words):
            value = path if other is param else commands.usual(rng, other)
            words += [*([option] if isinstance(other, click.Option) else []), *[value] * max(1, other.nargs)]
    return words


def open_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD = {
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": open_socket,
    "unreadable": lambda path: path.symlink_to("/proc/self/mem"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, good: Path) -> Commands:
    return Commands(tmp_path_factory.mktemp("files"), good)


@pytest.mark.parametrize(("name", "param"), FILES, ids=lambda x: getattr(x, "name", x))
def test_what_is_no_file_is_one_sentence_wherever_a_file_is_named(name, param, commands, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeplan.files.text.WRITER_S", 0.01)
    monkeypatch.setattr("pipeplan.files.text.read_text.__defaults__", (10**5,))
    monkeypatch.setattr("pipeplan.runtime.measure.trace_file.MOST_BYTES", 10**5)
    monkeypatch.setattr("pipeplan.cli.showing.QUIET_S", math.inf)
    for what, make in ODD.items():
        path = tmp_path / f"{what}.csv"
        make(path)
        outcome = called(naming(commands, name, param, str(path)), commands.folder, b"")
        assert (outcome.code, outcome.raised, outcome.err.count("\n")) == (2, None, 1), (what, outcome)
        assert what in outcome.err, (what, outcome)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "p.json", "--gpus", "2", "--mem", "1GB", "--granularity", "9" * 5000 + "%"),
        ("compare", "p.json", "--gpus", "9" * 5000, "--mem", "1GB"),
        ("run", "p.json", "--coarsening", "9" * 5000),
        ("run", "p.json", "--timeout", "0"),
        ("run", "p.json", "--timeout", "0ns"),
        ("run", "p.json", "--timeout", "-5s"),
        ("run", "p.json", "--seed", "4294967296"),
        ("run", "p.json", "--lr", "nan"),
        ("run", "p.json", "--loss-scale", "nan"),
        ("run", "p.json", "--loss-scale", "0"),
    ],
)
def test_numbers_in_texts_are_bounded_too(arguments: tuple[str, ...], pipeplan: Command) -> None:
    code, out, err = pipeplan(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert "p.json" not in err.splitlines()[-1]  # which isn't there: it was not looked for


@pytest.mark.parametrize(
    ("arguments", "sentence"), [(("simulate", "p.json", "--runs", "20"), "--runs goes with --jitter")]
)
def test_what_would_mean_nothing_is_refused(arguments: tuple[str, ...], sentence: str, pipeplan: Command) -> None:
    code, out, err = pipeplan(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err


def test_every_file_that_is_written_is_looked_at_first(tmp_path: Path, pipeplan: Command) -> None:
    """Before profiles and plans are read, so before anything is searched, simulated or trained."""
    names = {"-o", "--trace", "--csv", "--recalibrated"}
    written = [
        (name, option)
        for name, option in OPTIONS
        if names & set(option.opts) and not (name in ("report", "calibrate") and "--trace" in option.opts)  # they read
    ]
    assert len(written) > 10
    assert all(option.type is OUTPUT for _, option in written)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for target, words in (
        (tmp_path / "none" / "x.json", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path / "file" / "x.json", "there is no folder"),
        (tmp_path / "folder", "Is a directory"),
        (Path("/proc/x.json"), "No such file or directory"),
    ):
        for name, option in written:
            with pytest.raises(BadInput, match=f"cannot be written: {words}"):
                option.type.convert(str(target), option, CONTEXT)
            assert name in COMMANDS
    code, out, err = pipeplan("plan", "nowhere.json", "--gpus", "2", "--mem", "1GB", "-o", str(tmp_path / "none" / "x"))
    assert (code, out) == (2, "")
    assert err == f"error: {tmp_path}/none/x: cannot be written: there is no folder {tmp_path}/none\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "p.json", "--trace", "-", "--json"),
        ("simulate", "p.json", "--trace", "-", "--json"),
        ("compare", "p.json", "--csv", "-", "--json"),
        ("diff", "p.json", "t.json", "--recalibrated", "-", "--json"),
    ],
)
def test_standard_output_takes_one_document(arguments: tuple[str, ...], pipeplan: Command) -> None:
    code, out, err = pipeplan(*arguments)
    assert (code, out) == (2, "")
    assert f"{arguments[-3]} - and --json would both go to standard output" in err
    refuse_two_documents(False, trace="-", csv=None)


@pytest.mark.parametrize(
    ("profile", "reserved"), [("vgg16-224-b32-v100", "16 GB less 2 GB reserved"), ("gpt-tiny-b8-cpu", "16 GB,")]
)
def test_what_is_reserved_by_itself_is_for_gpus_alone(profile: str, reserved: str, pipeplan: Command) -> None:
    path = str(Path(__file__).parents[2] / "profiles" / f"{profile}.json")
    limits = ("--gpus", "2", "--mem", "16GB", "--reserve", "auto", "--algorithm", "balance")
    code, out, _ = pipeplan("plan", path, *limits)
    assert code == 0
    assert f"GPUs of {reserved}" in out
