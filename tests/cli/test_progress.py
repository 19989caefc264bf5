"""The line that says what a command is doing: on a terminal, in a pipe, and where nobody reads."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest
from cases.even_profile import PROFILE
from cases.files import written
from cases.patience import SECONDS
from conftest import Command

from pipeplan.cli.showing import EVERY_S, QUIET_S, LiveLine
from pipeplan.status import Status

LINE = re.compile(r"^ *\d+\.\d s  (.*)$", re.MULTILINE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_pipe_a_line_comes_before_two_seconds_are_over() -> None:
    status, stream = Status("exact contiguous", floor_ns=2_000_000), io.StringIO()
    live = LiveLine(status, stream)
    began = live._began
    live.tick(began + QUIET_S - 1e-3)
    assert stream.getvalue() == ""  # what is quick needs no progress
    live.tick(began + EVERY_S + 1e-3)
    (line,) = LINE.findall(stream.getvalue())
    assert line == "exact contiguous: no plan yet, no plan is below 2.000 ms"
    status.phase, status.candidates = "local moves", 42
    status.improved("best so far 3.000 ms, no plan is below 2.000 ms")
    live.tick(began + 1.5 * EVERY_S + 0.1)
    assert len(LINE.findall(stream.getvalue())) == 1
    live.tick(began + 2 * EVERY_S + 0.2)
    status.say(lambda: "microbatch 7 of 9")
    live.tick(began + 3 * EVERY_S + 0.3)
    status.say("")
    live.tick(began + 4 * EVERY_S + 0.4)
    assert LINE.findall(stream.getvalue())[1:] == [
        "local moves, 42 candidates: best so far 3.000 ms, no plan is below 2.000 ms",
        "microbatch 7 of 9, 42 candidates: best so far 3.000 ms, no plan is below 2.000 ms",
    ]
    assert QUIET_S < EVERY_S < 2
    assert live.spent().startswith(f"spent on exact contiguous {EVERY_S:.1f} s, local moves ")
    assert live.spent().endswith("; 42 candidates")


def test_on_a_terminal_one_line_is_redrawn_and_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, out = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", out)
    live = LiveLine(Status("search"))
    began = live._began
    with live:
        for tenths in range(11, 15):
            live.tick(began + tenths / 10 + QUIET_S)
        assert "\n" not in stream.getvalue()
        print("note: beside it", file=sys.stderr)
        assert stream.getvalue().endswith("search\r\x1b[2Knote: beside it\n")
        live.tick(began + 20)
        print("the result")
        live.tick(began + 30)
        assert stream.getvalue().endswith("search\r\x1b[2K")
    assert (out.getvalue(), sys.stdout, sys.stderr) == ("the result\n", out, stream)


def test_a_thread_draws_while_the_search_is_busy_and_ends_with_it() -> None:
    stream = Terminal()
    live = LiveLine(Status("integer program", candidates=3), stream)
    live._began -= 10  # as if it had begun before
    with live:
        while "integer program" not in stream.getvalue():
            time.sleep(0.01)
    assert not live._thread.is_alive()
    assert stream.getvalue().endswith("candidates\n")


def test_a_stream_that_is_gone_stops_nothing() -> None:
    stream = Terminal()
    live = LiveLine(Status("search"), stream)
    stream.close()
    live.tick(time.perf_counter() + 5)
    assert live._over.is_set(), "nobody can be told"
    with live:
        pass


def test_what_a_search_took_is_told_before_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, out, flushed = Terminal(), Terminal(), list[str]()
    monkeypatch.setattr(stream, "flush", lambda: flushed.append(stream.getvalue()))
    monkeypatch.setattr(sys, "stdout", out)
    live = LiveLine(Status("search", candidates=3), stream)
    live._began = live._wrote = live._began - 10
    with live:
        live.tick(live._began + 10)
        print("the result")
        assert flushed[-1] == stream.getvalue()
    assert stream.getvalue().endswith("; 3 candidates\n")
    assert stream.getvalue().count("candidates\n") == 1
    failed = LiveLine(Status("search", candidates=3), stream)
    with failed:
        failed.tick(failed._began + 10)
        failed.__exit__(ValueError, None, None)
    assert stream.getvalue().count("candidates\n") == 1, "what ended badly took nothing"


GPUS = ("--gpus", "2", "--mem", "1GB")
SAID = [  # a command line, and what its lines say among others
    ("plan even.json -o plan.json", ["exact contiguous, 1 candidates: best so far"]),
    ("plan even.json --for torch --batch 64", ["1 candidates: best so far"]),
    ("grid even.json --batch 64", ["search"]),
    ("compare even.json --algorithms contiguous", [r"1 of 2 cases done, \d+ s more at this pace"]),
    ("synthesize --gpus 2 --times 20,24,16 --microbatches 3 --moves 99", ["orders of 3 microbatches"]),
    (
        "simulate plan.json --schedule all --jitter 5%",
        [r"2 of \d+ schedules, pipedream", "gpipe, drawn durations: 3 of 20"],
    ),
    ("simulate plan.json --schedule best --microbatches 3", ["orders of 3 microbatches"]),
    ("report plan.json --schedule all -o all.html", [r"3 of \d+ schedules, "]),
    ("check plan.json --bounds", ["check", "bound of class contiguous"]),
    ("export plan.json --to torch-csv --schedule 1f1b", ["export"]),
    ("diff even.json even.json", ["diff"]),
    ("profile zoo:gpt-tiny,blocks=1 --steps 1 -o p.json", ["building the model", "warming up", "step 1 of 1"]),
    ("profile cases.traced:power_iterated --steps 1 -o p.json", ["tracing", "comparing with plain training"]),
    ("run plan.json --steps 6 --device cpu", ["starting 2 processes", "ending 2 processes", "report"]),
]


@pytest.mark.parametrize(("line", "said"), SAID, ids=[line for line, _ in SAID])
def test_every_long_command_says_what_it_does(
    line: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeplan: Command
) -> None:
    """Two seconds pass, by a clock of the test's own, whenever a status says something new."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PROFILE, "even.json")
    name, *words = line.split()
    if name in ("profile", "run"):
        pytest.importorskip("torch")
    if "plan.json" in words and name != "plan":
        model = ("zoo:gpt-tiny", "--gpu", "a100") if name == "run" else ("even.json",)
        own = ("--no-replicas", "--weights", "stash", "--algorithm", "contiguous", "-o", "plan.json")
        assert pipeplan("plan", *model, *GPUS, *own)[0] == 0
    words += {"plan": GPUS, "grid": GPUS, "compare": ("--gpus", "2", "--mem", "1GB,2GB")}.get(name, ())
    shown: list[LiveLine] = []

    class Watched(Status):
        def __setattr__(self, field: str, value: object) -> None:
            super().__setattr__(field, value)
            for live in shown:
                live.tick(live._wrote + 2)

    def showing(status: Status) -> LiveLine:
        shown.append(LiveLine(status))
        return shown[0]

    monkeypatch.setattr("pipeplan.cli.showing.QUIET_S", QUIET_S)
    monkeypatch.setattr("pipeplan.cli.showing.POLL_S", SECONDS)
    monkeypatch.setattr("pipeplan.cli.Status", Watched)
    monkeypatch.setattr("pipeplan.cli.LiveLine", showing)
    code, out, err = pipeplan(name, *words)
    assert code == 0, err
    if name == "run":
        assert "planned for NVIDIA A100 SXM 80GB (estimated), which this run isn't on" in err
        assert "so planned times aren't its own" in out
    lines = LINE.findall(err)
    for sentence in said:
        assert any(re.search(sentence, line) for line in lines), (sentence, lines)
