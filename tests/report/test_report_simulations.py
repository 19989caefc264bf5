"""Simulated runs as people see them: comparison, jitter, Gantt charts at 80 and 200 columns, the commands."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest
from cases.plans import straight
from cases.schedules import balanced, vee

from pipeplan.errors import BadInput
from pipeplan.files.plans import plan_text
from pipeplan.files.profiles import profile_text
from pipeplan.planner.simulated.simulation import (
    compare_schedules,
    jittered_ns,
    percentile_95,
    simulate_plan,
    under_jitter,
)
from pipeplan.report.gantt import draw, panels, plan_window, timeline_rows
from pipeplan.schedule.kinds import schedules
from pipeplan.schedule.programs.deciding import message_driven
from pipeplan.schedule.programs.one_f_one_b import one_f_one_b
from pipeplan.schedule.programs.vees import zbv
from pipeplan.schedule.simulate import simulate
from pipeplan.status import Status


@pytest.fixture
def plan_file(pipeplan, tmp_path):
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    chain = straight().chain
    slow = tuple(replace(x, forward_ns=10**6 * x.forward_ns, backward_ns=10**6 * x.backward_ns) for x in chain.layers)
    profile.write_text(profile_text(replace(chain, layers=slow)))
    asked = ["--gpus", "4", "--mem", "16GB", "--no-replicas", "--checkpointing", "none", "--algorithm", "balance"]
    code, _, err = pipeplan("plan", str(profile), *asked, "-o", str(plan))
    assert code == 0, err
    return str(plan)


def test_jitter_has_the_spread_that_was_asked_for_and_is_the_same_for_a_seed():
    program = one_f_one_b(balanced(4, 10**6, 2 * 10**6), 200)
    drawn = jittered_ns(program, 0.05, 3)
    assert drawn == jittered_ns(program, 0.05, 3) != jittered_ns(program, 0.05, 4)
    ratios = [ns / work.duration_ns for row in drawn for ns, work in zip(row, program.operations, strict=True)]
    assert abs(statistics.mean(ratios) - 1) < 0.005
    assert abs(statistics.stdev(ratios) - 0.05) < 0.005
    assert jittered_ns(program, 0, 3) == tuple(
        tuple(work.duration_ns for work in program.operations) for _ in range(200)
    )
    assert min(ns for row in jittered_ns(program, 1.0, 0) for ns in row) == 0


def test_jitter_slows_a_run_and_counts_its_progress():
    run = simulate_plan(straight(), 32, "1f1b")
    status = Status()
    shaken = under_jitter(run, 0.3, range(10), status)
    assert len(shaken.jitter_ns) == 10
    assert status.line == "1f1b, drawn durations: 10 of 10 runs"
    figures = shaken.figures()["jitter"]
    assert figures["runs"] == 10
    assert run.per_microbatch_ns < figures["median_ns"] <= figures["p95_ns"] == max(shaken.jitter_ns)
    still = under_jitter(run, 0, range(3))
    assert set(still.jitter_ns) == {run.per_microbatch_ns}


def test_under_jitter_message_driven_devices_decide_anew():
    program = message_driven(balanced(4, 100, 200, 20), 16)
    timeline = simulate(program)
    other = simulate(timeline.program, jittered_ns(program, 0.5, 1))
    assert [lane.steps for lane in timeline.program.lanes] != [lane.steps for lane in other.program.lanes]


@pytest.mark.parametrize(("values", "expected"), [([5], 5), (range(1, 21), 19), (range(1, 101), 95), ([1, 9], 9)])
def test_percentile(values, expected):
    assert percentile_95(values) == expected


def test_comparison_puts_the_best_that_fits_first():
    runs, refused = compare_schedules(straight(), schedules(), 32)
    assert {run.schedule for run in runs} == set(schedules())
    assert refused == []
    order = [(not run.fits, run.per_microbatch_ns) for run in runs]
    assert order == sorted(order)
    drained = {run.schedule: run for run in runs if run.drained}
    assert set(schedules()) - set(drained) == {"pattern", "pipedream", "nf1b"}
    assert drained["zb2p"].makespan_ns < drained["zb1p"].makespan_ns < drained["1f1b"].makespan_ns


def test_comparison_says_which_schedule_cannot_be():
    runs, refused = compare_schedules(straight(layers=4), ["1f1b", "interleaved"], 8)
    assert [run.schedule for run in runs] == ["1f1b"]
    assert refused[0].schedule == "interleaved"
    assert "it has 4 layers" in refused[0].reason


def test_a_small_run_is_drawn_whole_and_a_long_one_in_readable_pieces():
    short, long = (simulate(one_f_one_b(balanced(4, 10, 20), m)) for m in (4, 100))
    assert panels(short, 200) == [("all of it", 0, short.makespan_ns)]
    assert panels(short, 0) == panels(short, 28) == panels(short, 200)
    assert [title for title, _, _ in panels(short, 27)] == ["fill", "middle", "drain"]
    pieces = panels(long, 74)
    assert [title for title, _, _ in pieces] == ["fill", "middle", "drain"]
    assert (pieces[0][1], pieces[-1][2]) == (0, long.makespan_ns)
    assert {end - start for _, start, end in pieces} == {185}  # 74 columns of which four are a forward of 10 ns


@pytest.mark.parametrize("width", [80, 200])
def test_gantt_lines_are_as_wide_as_the_terminal_and_name_microbatches(width):
    timeline = simulate(one_f_one_b(balanced(4, 10, 20), 100))
    rows = [row for row in timeline_rows(timeline) if row.device is not None]
    title, start, end = panels(timeline, width - 6)[0]
    lines = [line.plain for line in draw(rows, start, end, width)]
    assert title == "fill"
    assert {len(line) for line in lines} == {width}
    assert lines[0].startswith("GPU 0 F0")
    assert lines[3].startswith("GPU 3 ......")
    assert all(f"B{m}" in lines[3] and f"F{m}" in lines[3] for m in range(3))


def test_gantt_scale():
    timeline = simulate(one_f_one_b(balanced(2, 10, 20), 2))
    rows = timeline_rows(timeline)
    assert [line.plain for line in draw(rows, 0, timeline.makespan_ns, 6 + 36)] == [
        "GPU 0 F0==F1==........B0######....B1######",
        "GPU 1 ....F0==B0######F1==B1######........",
    ]


def test_gantt_marks_later_stages_and_weight_gradients():
    graph = balanced(4, 10, 20, weight_part=10, homes=vee(2))
    timeline = simulate(zbv(graph, 4))
    line = draw(timeline_rows(timeline), 0, timeline.makespan_ns, 6 + 72)[0].plain
    assert line.startswith("GPU 0 F0=F1=F2=f0=b0")
    assert all(label in line for label in ("w0", "B1", "W2", "f3"))


def test_plan_window_shows_devices_in_order_then_links():
    window = plan_window(straight())
    assert [row.name for row in window.rows] == [
        *(f"GPU {d}" for d in range(4)),
        "link 0 - 1",
        "link 1 - 2",
        "link 2 - 3",
    ]
    assert (window.start_ns, window.end_ns) == (0, straight().pattern.period_ns)


def test_the_same_seed_prints_the_same(pipeplan, plan_file):
    shaken = ["simulate", plan_file, "--schedule", "1f1b", "--jitter", "10%", "--runs", "4"]
    outputs = [pipeplan(*shaken, "--seed", seed, "--json")[1] for seed in ("1", "1", "2")]
    assert outputs[0] == outputs[1] != outputs[2]


def test_check_proves_the_order_free_of_deadlock(pipeplan, plan_file, monkeypatch):
    assert pipeplan("check", plan_file)[0] == 0
    monkeypatch.setattr("pipeplan.schedule.deadlock.lower", lambda program, starts: _crossed())
    code, out, _ = pipeplan("check", plan_file, "--json")
    assert code == 1
    assert json.loads(out)["violations"][0].startswith("deadlock: rank 0 stands at 0RECV_B0, until rank 1")


def _crossed():
    from pipeplan.schedule.deadlock import Action

    return {0: [Action(0, "RECV_B", 0, 1)], 1: [Action(1, "RECV_F", 0, 0)]}


def test_plans_written_to_files_simulate_as_in_memory(pipeplan, plan_file):
    code, out, _ = pipeplan("simulate", plan_file, "--json")
    assert code == 0
    from pipeplan.files.plans import load_plan

    plan = load_plan(plan_file)
    assert plan_text(plan)
    assert json.loads(out)["makespan_ns"] == simulate_plan(plan).makespan_ns


def test_a_plan_without_pattern_needs_a_named_schedule():
    from pipeplan.planner.simulated.other_schedules import program_of

    bare = replace(straight(), pattern=None)
    with pytest.raises(BadInput, match="the plan has no pattern; name a schedule"):
        program_of(bare, "pattern", 4)
    assert program_of(bare, "gpipe", 4).microbatches == 4


def test_without_a_barrier_a_batch_takes_what_the_busiest_gpu_needs_for_it(plan_file, pipeplan):
    """By hand: 4 equal stages, F and B of a microbatch one slot of three; the first GPU is there for all of 1F1B's run,
    and with zero bubbles every GPU's work ends in a staircase as steep as the one that it began in."""
    words = ("simulate", plan_file, "--microbatches", "8", "--batch", "8")
    several = (*words, "--schedule", "1f1b", "--schedule", "zb2p", "--json")
    with_barrier, without = (json.loads(pipeplan(*several, *more)[1])["schedules"] for more in ((), ("--no-barrier",)))
    for run in with_barrier:
        assert run["per_microbatch_ns"] == run["makespan_ns"] / 8
        assert run["longest_span_ns"] <= run["makespan_ns"]
    for run in without:
        assert run["per_microbatch_ns"] == run["longest_span_ns"] / 8
    by_name = {run["schedule"]: run for run in without}
    assert by_name["1f1b"]["longest_span_ns"] == by_name["1f1b"]["makespan_ns"]
    assert by_name["zb2p"]["longest_span_ns"] < by_name["zb2p"]["makespan_ns"]
    assert max(x["busy_ns"] for x in by_name["zb2p"]["devices"]) <= by_name["zb2p"]["longest_span_ns"]
    out = pipeplan(*words, "--schedule", "zb2p")[1]
    assert f"span     {by_name['zb2p']['longest_span_ns'] / 1e6:.3f} ms of one GPU at most" in out
    compared = pipeplan(*several[:-1], "--no-barrier")[1]
    assert "of the longest span of a GPU" in " ".join(compared.split())
