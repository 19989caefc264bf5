"""TiMePReSt's analysis against the paper's figures and the corrected closed forms (ALGORITHMS section 8).

The analysis reads the simulated schedule; closed forms stand here alone. Steady-state values, vertical sync on.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from fractions import Fraction
from math import ceil

import pytest
from cases.schedules import staircase as drawn

from pipeplan.errors import BadInput
from pipeplan.schedule.program import Step
from scripts.studies.timeprest.analysis import (
    BackwardTime,
    activations_of_1f1b,
    analyse,
    fewest_microbatches,
    most_workers,
    paper_holds,
    paper_version_difference,
    parse_backward,
    table,
)
from scripts.studies.timeprest.report import cells, letters, staircase

Study = Callable[..., tuple[int, str, str]]


@pytest.fixture
def timeprest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Study:
    """Run the study in this process: its exit code, what it prints, and its errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["timeprest", *arguments])
        with pytest.raises(SystemExit) as caught:
            runpy.run_module("scripts.studies.timeprest", run_name="__main__")
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


ALL = [(workers, count) for workers in range(2, 9) for count in range(2, 9)]


@pytest.mark.parametrize(("workers", "count"), ALL)
def test_unit_time(workers, count):
    """Sequences are the residues of the version difference; as many versions are kept as there are workers at most."""
    found = analyse(workers, count)
    assert found.forward_times[0] == workers + count - 1
    assert found.forward_times[1] == workers + count
    assert found.version_differences == (ceil(Fraction(workers, count + 1)),)
    assert (found.version_difference == 1) == (workers <= count + 1)
    assert found.activations == tuple(count + 2 * (workers - s) for s in range(1, workers + 1))
    v, last = found.version_difference, found.steady.stop
    chains = [tuple(k for k in chain if k <= last) for chain in found.sequences]
    assert chains == [tuple(range(start, last + 1, v)) for start in range(1, v + 1)]
    assert (max(found.live_versions) == workers) if count == 2 else (max(found.live_versions) <= workers)
    assert found.live_versions[0] == v
    assert list(found.live_versions) == [most_alive(found, stage) for stage in range(workers)]


def test_the_papers_formula_is_wrong_at_three_pairs_alone():
    wrong = {}
    for row in table(range(2, 9), range(2, 9), BackwardTime()):
        for found in row:
            if not paper_holds(found):
                pair = found.workers, found.microbatches
                wrong[pair] = found.version_difference, paper_version_difference(*pair)
    assert wrong == {(6, 2): (2, 3), (8, 2): (3, 4), (8, 3): (2, 3)}


@pytest.mark.parametrize(("workers", "count"), ALL[::2])
def test_longer_backwards(workers, count):
    for backward in {2, 3, count, 2 * count}:
        found = analyse(workers, count, Fraction(backward))
        assert found.version_differences == (ceil(Fraction(workers * backward, count + backward)),)
        assert found.activations == tuple(count + (workers - s) * (backward + 1) for s in range(1, workers + 1))
        assert found.forward_times[0] == workers + count - 1
        assert found.forward_times[1] == workers + count - 1 + backward
        assert paper_holds(found) is None
    assert analyse(workers, count, Fraction(2 * count)).version_difference == ceil(Fraction(2 * workers, 3))


def test_realistic_backwards_hold_more_than_1f1b():
    found = analyse(4, 4, Fraction(8))
    assert found.activations == (31, 22, 13, 4)
    assert activations_of_1f1b(4, 4, Fraction(8)) == (16, 12, 8, 4)
    assert analyse(4, 4, Fraction(8), limit=4).activations == (16, 16, 13, 4)


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_1f1b_holds_a_mini_batch_for_each_worker_from_there_on(workers):
    for count, backward in [(2, 1), (4, 8), (3, Fraction(7, 2))]:
        expected = tuple((workers - s) * count for s in range(workers))
        assert activations_of_1f1b(workers, count, Fraction(backward)) == expected


def test_figure_7a():
    found = analyse(4, 2)
    assert [chain[:4] for chain in found.sequences] == [(1, 3, 5, 7), (2, 4, 6, 8)]
    assert found.backward_versions[2:5] == (1, 2, 3)
    assert found.forward_versions[2:5] == ((0, 0), (0, 0), (1, 1))


def test_figure_7b():
    found = analyse(4, 4)
    assert found.forward_versions[2] == (0, 0, 1, 1)
    assert found.backward_versions[1:4] == (1, 2, 3)
    assert len(found.sequences) == 1
    assert [str(line)[9:].rstrip() for line in staircase(found, 9 + 3 * 15)] == drawn("""
        1A 1B 1C 1D 2A 2B 2C 2D 3A 3B b1 3C 3D 4A 4B
        .  1A 1B 1C 1D 2A 2B 2C 2D b1 3A 3B 3C 3D b2
        .  .  1A 1B 1C 1D 2A 2B b1 2C 2D 3A 3B b2 3C
        .  .  .  1A 1B 1C 1D b1 2A 2B 2C 2D b2 3A 3B
    """)


def test_a_staircase_of_long_and_broken_backwards():
    found = analyse(2, 2, Fraction(3, 2))
    assert [str(line)[9:].rstrip() for line in staircase(found, 9 + 3 * 15)] == drawn("""
        1A -- 1B -- 2A -- 2B -- 3A -- b1 -- -- 3B --
        .  .  1A -- 1B -- b1 -- -- 2A -- 2B -- b2 --
    """)


def test_a_forward_takes_a_time_point_more_than_the_one_before_only_while_the_pipeline_fills():
    """The paper says so of every mini-batch."""
    assert analyse(4, 4).forward_times[:6] == (7, 8, 9, 9, 9, 9)


def test_with_longer_backwards_vertical_sync_keeps_more_versions_than_workers():
    found = analyse(4, 4, Fraction(8))
    assert found.live_versions == (3, 4, 6, 8)
    assert [most_alive(found, stage) for stage in range(4)] == [3, 4, 6, 8]


def most_alive(found, stage):
    """Count at every pass the versions that it and later ones use, of those made, and the newest: the slow way."""
    program = found.timeline.program
    steps = program.lanes[stage].steps
    most = made = 0
    for i, step in enumerate(steps):
        needed = {found.version[later] for later in steps[i:]}
        most = max(most, len({version for version in needed if version <= made} | {made}))
        made += program.operations[step.position].kind == "B"
    return most


@pytest.mark.parametrize(("workers", "count", "backward"), [(4, 2, 1), (8, 2, 1), (5, 3, Fraction(3, 2)), (6, 4, 8)])
def test_without_vertical_sync_there_is_one_version_and_one_sequence(workers, count, backward):
    found = analyse(workers, count, Fraction(backward), vertical_sync=False)
    assert found.version_differences == (1,)
    assert found.live_versions == (1,) * workers
    assert len(found.sequences) == 1
    for step in found.timeline.program.lanes[workers - 1].steps:  # the last worker's updates are never late
        version = found.version[step]
        assert version == step.microbatch // count


def test_with_vertical_sync_a_pass_uses_one_version_that_every_worker_has_made():
    found = analyse(5, 3, Fraction(4))
    timeline = found.timeline
    program = timeline.program
    for m in range(program.microbatches):
        versions = [found.version[Step(m if p < 5 else program.leader(m), p)] for p in range(10)]
        assert len(set(versions[:5])) == len(set(versions[5:])) == 1
        for position, version in enumerate(versions):
            if version:
                stage = min(position, 9 - position)
                update = Step(3 * version - 1, timeline.program.position["B", stage])
                assert timeline.end_ns(update) <= timeline.start_ns[m][position]


def test_a_limit_makes_the_version_difference_alternate():
    found = analyse(4, 2, limit=3)
    assert found.version_differences == (1, 2)
    assert found.version_difference == 2
    assert sorted(k for chain in found.sequences for k in chain) == list(range(1, len(found.backward_versions) + 1))
    assert analyse(4, 2, limit=1).version_differences == (1,)


def test_backwards_of_broken_time_points_wait_for_forwards_under_way():
    """A forward is not interrupted, so v can exceed what the closed form says for whole time points."""
    assert analyse(5, 3, Fraction(3, 2)).version_differences == (3,)
    assert ceil(5 * Fraction(3, 2) / (3 + Fraction(3, 2))) == 2
    assert analyse(7, 3, Fraction(5, 2)).version_differences == (4,)


def test_the_steady_state_is_steady():
    """Twice as many mini-batches say the same; a limit that is never reached changes nothing."""
    for workers, count, backward in [(8, 2, 1), (4, 4, 8), (5, 3, Fraction(3, 2))]:
        found = analyse(workers, count, Fraction(backward))
        far = analyse(workers, count, Fraction(backward), limit=10 * len(found.backward_versions))
        assert found.version_differences == far.version_differences
        assert found.activations == far.activations
        assert found.live_versions == far.live_versions
        assert {found.forward_times[k] for k in found.steady} == {far.forward_times[k] for k in far.steady}


@pytest.mark.parametrize("count", range(2, 9))
def test_most_workers(count):
    assert most_workers(count, BackwardTime()) == count + 1
    assert most_workers(count, BackwardTime(Fraction(2))) == count // 2 + 1
    assert most_workers(count, BackwardTime(Fraction(2), per_microbatch=True)) == 1


@pytest.mark.parametrize("workers", range(2, 7))
def test_fewest_microbatches(workers):
    assert fewest_microbatches(workers, BackwardTime()) == workers - 1
    assert fewest_microbatches(workers, BackwardTime(Fraction(3))) == 3 * (workers - 1)
    assert fewest_microbatches(workers, BackwardTime(Fraction(2), per_microbatch=True)) is None


@pytest.mark.parametrize(
    ("text", "count", "time"),
    [("1", 4, 1), ("1.5", 4, 1.5), ("7/2", 4, 3.5), ("N", 4, 4), ("2N", 4, 8), ("1/2N", 4, 2)],
)
def test_backward_times(text, count, time):
    assert parse_backward(text, "here").of(count) == time


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "here: '' is not positive"), ("0", "here: '0' is not positive"), ("-1N", "here: '-1N' is not positive"),
        ("two", "here: 'two' isn't a number of time points such as 2, 1.5, 7/3 or 2N"),
        ("1/0", "here: '1/0' isn't a number"), ("inf", "here: 'inf' isn't a number"),
    ],
)  # fmt: skip
def test_bad_backward_times(text, message):
    with pytest.raises(BadInput, match=message):
        parse_backward(text, "here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2), "workers: 0 is not positive"),
        ((2, 0), "microbatches: 0 is not positive"),
        ((2, 2, Fraction(-1, 2)), "backward time: -1/2 is not positive"),
        ((600, 200), "600 workers, 200 microbatches .* need 3840000 forward passes .* at most 300000"),
    ],
)
def test_bad_counts(arguments, message):
    with pytest.raises(BadInput, match=message):
        analyse(*arguments)
    with pytest.raises(BadInput, match="limit: 0 is not positive"):
        analyse(2, 2, limit=0)


def test_one_worker_is_plain_training():
    found = analyse(1, 3)
    assert found.version_differences == (1,)
    assert (found.activations, found.live_versions) == ((3,), (1,))
    assert set(map(len, map(set, found.forward_versions))) == {1}


def test_labels():
    assert [letters(i) for i in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]
    found = analyse(2, 2)
    labels = [(cell.label, cell.kind, cell.version) for cell in cells(found) if cell.worker == 1][:6]
    assert labels == [("1A", "F", 0), ("1B", "F", 0), ("1", "B", 0), ("2A", "F", 0), ("2B", "F", 0), ("2", "B", 1)]


def test_the_command_prints_versions_sequences_and_memory(timeprest):
    code, out, err = timeprest("--workers", "8", "--microbatches", "3")
    assert (code, err) == (0, "")
    assert "version difference  2: mini-batch k takes its gradient at the weights that k-2 made" in out
    assert "the paper's formula says 3" in out
    assert "microbatches of mini-batch k start on k-6 (A, B), k-5 (C)" in out
    assert "{1,3,5,7,9,11,..} {2,4,6,8,10,12,..}" in out
    assert "f1 = 10, f2 = 11, in the steady state 15 time points" in out
    assert "with 3 microbatches: up to 4 workers; with 8 workers: from 7 microbatches on" in out
    rows = [list(map(int, line.split())) for line in out.splitlines() if line.replace(" ", "").isdecimal()]
    assert [row[1] for row in rows] == [17, 15, 13, 11, 9, 7, 5, 3]
    assert [row[2] for row in rows] == [24, 21, 18, 15, 12, 9, 6, 3]
    assert [row[4] for row in rows] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_the_command_without_vertical_sync_and_with_a_limit(timeprest):
    code, out, _ = timeprest("--workers", "4", "--microbatches", "2", "--no-vertical-sync")
    assert code == 0
    assert "version difference  1:" in out
    assert "paper's formula" not in out
    code, out, _ = timeprest("--workers", "4", "--microbatches", "30", "--backward-time", "1.37")
    assert code == 0
    assert "worker 1 1A" not in out  # too many columns for one time point
    assert "f1 = 33, f2 = 34.37" in out
    assert "start on k-2 (A to I), k-1 (J to AD)" in out
    code, out, _ = timeprest("--workers", "4", "--microbatches", "2", "--limit", "3")
    assert code == 0
    assert "version difference  1 or 2: mini-batch k takes its gradient at the weights that k-1 or k-2 made" in out


def test_the_table(timeprest):
    code, out, err = timeprest("--table")
    assert (code, err) == (0, "")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "W N=2 N=3 N=4 N=5 N=6 N=7 N=8" in rows
    assert "6 2 (3) 2 2 1 1 1 1" in rows
    assert "8 3 (4) 2 (3) 2 2 2 1 1" in rows
    assert out.endswith("the paper's formula differs at (6,2), (8,2), (8,3)\n")
    code, out, _ = timeprest("--table", "--workers", "2,4-5", "--microbatches", "3", "--backward-time", "2N")
    assert code == 0
    assert [line.split() for line in out.splitlines()][1:] == [["W", "N=3"], ["2", "2"], ["4", "3"], ["5", "4"]]


def test_json(timeprest):
    code, out, _ = timeprest("--workers", "4", "--microbatches", "4", "--backward-time", "2N", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["backward_time_points"] == 8
    assert data["version_difference"] == 3
    assert data["paper_version_difference"] is None
    assert [stage["activations"] for stage in data["stages"]] == [31, 22, 13, 4]
    assert [stage["activations_1f1b"] for stage in data["stages"]] == [16, 12, 8, 4]
    assert (data["most_workers_at_1"], data["fewest_microbatches_at_1"]) == (1, None)
    code, out, _ = timeprest("--table", "--workers", "6", "--microbatches", "2-3", "--json")
    assert code == 0
    found = [
        (row["version_difference"], row["paper_version_difference"], row["paper_holds"]) for row in json.loads(out)
    ]
    assert found == [(2, 3, False), (2, 2, True)]


def test_the_picture_names_every_pass_and_its_weights(timeprest, tmp_path):
    path = tmp_path / "schedule.svg"
    arguments = ("--workers", "4", "--microbatches", "4", "--time-points", "13", "-o", str(path))
    code, out, _ = timeprest(*arguments)
    assert code == 0
    assert out.endswith(f"written to {path}\n")
    text = path.read_text()
    for word in ("worker 1", "worker 4", "3D", "w1", "backward"):
        assert f">{word}</text>" in text
    assert ">4A</text>" not in text
    timeprest(*arguments)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--workers 4", "say --workers and --microbatches, or --table"),
        ("--workers 2-3 --microbatches 2", "--workers: '2-3' is more than one count; say --table"),
        ("--workers 4 --microbatches x", "--microbatches: 'x' is neither a count nor a range such as 2-8"),
        ("--workers 0 --microbatches 2", "--workers: '0' is neither a count nor a range such as 2-8"),
        ("--workers 2 --microbatches 2 --backward-time 0", "--backward-time: '0' is not positive"),
        ("--workers 2 --microbatches 2 --limit 0", "0 is not in the range"),
        ("--workers 999 --microbatches 99", "999 workers, 99 microbatches and a backward of 1 time points need"),
        ("--workers 2 --microbatches 2 -o run.gif", "run.gif: a picture is one of .svg, .png, .pdf"),
        ("--table -o run.png", "-o draws one schedule; --table has many"),
    ],
)
def test_bad_input_is_one_sentence(timeprest, arguments, sentence):
    code, out, err = timeprest(*arguments.split())
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
