"""The line that says what a search is doing: on a terminal, in a pipe, and where nobody reads."""

from __future__ import annotations

import io
import time

from pipeplan.cli.progress import ALIVE_S, NEWS_S, PATIENT_S, LiveLine
from pipeplan.planner.incumbent import Status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_pipe_lines_come_with_news_and_seldom_without() -> None:
    status, stream = Status("exact contiguous", floor_ns=2_000_000), io.StringIO()
    live = LiveLine(status, stream)
    began = live._began
    live.tick(began + PATIENT_S / 2)
    assert stream.getvalue() == ""  # what is quick needs no progress
    live.tick(began + PATIENT_S)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(" s  exact contiguous: no plan yet, no plan is below 2.000 ms")
    live.tick(began + PATIENT_S + 1)
    status.phase, status.candidates = "local moves", 42
    live.best("best so far 3.000 ms, no plan is below 2.000 ms")
    live.tick(began + PATIENT_S + NEWS_S / 2)
    assert len(stream.getvalue().splitlines()) == 1
    live.tick(began + PATIENT_S + 1 + NEWS_S)
    live.tick(began + PATIENT_S + 2 + NEWS_S)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("local moves, 42 candidates: best so far 3.000 ms, no plan is below 2.000 ms")
    live.tick(began + PATIENT_S + 3 + NEWS_S + ALIVE_S)
    assert len(stream.getvalue().splitlines()) == 3
    assert live.spent().startswith(f"spent on exact contiguous {PATIENT_S + 1:.1f} s, local moves ")
    assert live.spent().endswith("; 42 candidates")


def test_on_a_terminal_one_line_is_redrawn() -> None:
    stream = Terminal()
    live = LiveLine(Status(), stream)
    began = live._began
    for tenths in range(11, 15):
        live.tick(began + tenths / 10)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().count("\r") == 4


def test_a_thread_draws_while_the_search_is_busy_and_ends_with_it() -> None:
    stream = Terminal()
    live = LiveLine(Status("integer program"), stream)
    live._began -= 10  # as if it had begun before
    with live:
        while "integer program" not in stream.getvalue():
            time.sleep(0.01)
    assert not live._thread.is_alive()
    assert stream.getvalue().endswith("candidates\n")


def test_a_stream_that_is_gone_stops_nothing() -> None:
    stream = Terminal()
    live = LiveLine(Status(), stream)
    stream.close()
    live.tick(time.perf_counter() + 5)
    with live:
        pass
