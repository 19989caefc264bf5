"""Chrome traces: microseconds, threads, counters, and arrows from send to receive."""

from __future__ import annotations

import json
from itertools import pairwise

from cases.plans import straight
from cases.schedules import balanced

from pipeplan.planner.simulation import simulate_plan
from pipeplan.problem import Platform
from pipeplan.report.chrome_trace import trace_events, trace_text
from pipeplan.schedule.memory import lane_use
from pipeplan.schedule.one_f_one_b import one_f_one_b
from pipeplan.schedule.program import Step
from pipeplan.schedule.registry import schedules
from pipeplan.schedule.simulate import simulate


def by_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_slices_are_the_steps_in_microseconds():
    timeline = simulate(one_f_one_b(balanced(3, 1500, 3000, 500), 4))
    slices = by_phase(trace_events(timeline, Platform.flat(3, 10**9)), "X")
    program = timeline.program
    assert len(slices) == sum(len(lane.steps) for lane in program.lanes) == 4 * len(program.operations)
    first = next(event for event in slices if event["name"] == "1F0")
    assert (first["ts"], first["dur"], first["tid"]) == (2.0, 1.5, 1)
    for event in slices:
        work = next(x for x in program.operations if x.kind == event["cat"] and x.stage == event["args"]["stage"])
        step = Step(event["args"]["microbatch"], program.operations.index(work))
        assert (event["ts"] * 1000, event["dur"] * 1000) == (timeline.begin_ns(step), timeline.length_ns(step))


def test_slices_of_a_thread_never_overlap_and_threads_have_names():
    timeline = simulate_plan(straight(), 16, "zbv").timeline
    events = trace_events(timeline, straight().platform)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in by_phase(events, "M") if e["name"] == "thread_name"}
    assert named[1, 3] == "GPU 3"
    assert sum(name.startswith("link") for name in named.values()) == 3
    for thread in named:
        slices = sorted((e["ts"], e["dur"]) for e in by_phase(events, "X") if (e["pid"], e["tid"]) == thread)
        assert slices
        assert all(a + length <= b + 1e-9 for (a, length), (b, _) in pairwise(slices))


def test_arrows_go_from_the_sender_through_the_link_to_the_receiver():
    timeline = simulate(one_f_one_b(balanced(3, 1500, 3000, 500), 4))
    events = trace_events(timeline, Platform.flat(3, 10**9))
    flows = {e["id"]: {} for e in by_phase(events, "s")}
    for phase in "stf":
        for event in by_phase(events, phase):
            flows[event["id"]][phase] = event
    assert len(flows) == 4 * 4  # two cuts, both ways, four microbatches
    slices = by_phase(events, "X")

    def inside(event):
        """The slice that the arrow's end is bound to."""
        return next(
            x["name"]
            for x in slices
            if (x["pid"], x["tid"]) == (event["pid"], event["tid"]) and x["ts"] <= event["ts"] < x["ts"] + x["dur"]
        )

    assert {name: [inside(flow[phase]) for phase in "stf"] for name, flow in flows.items() if name.endswith("2")} == {
        "0SEND_F2": ["0F2", "0SEND_F2", "1F2"],
        "1SEND_F2": ["1F2", "1SEND_F2", "2F2"],
        "2SEND_B2": ["2B2", "2SEND_B2", "1B2"],
        "1SEND_B2": ["1B2", "1SEND_B2", "0B2"],
    }
    assert all(flow["f"]["bp"] == "e" for flow in flows.values())


def test_memory_counters_add_up_to_the_device():
    run = simulate_plan(straight(), 16)
    counters = by_phase(trace_events(run.timeline, straight().platform), "C")
    mine = [event for event in counters if event["name"].startswith("GPU 1 ")]
    assert max(e["args"]["activations"] for e in mine) * 1e6 == lane_use(run.timeline, 1).activation_bytes
    assert all(round(sum(e["args"].values()) * 1e6) == 10**9 for e in mine)
    assert mine[-1]["args"]["activations"] == 0


def test_every_schedule_gives_json_that_reads_back():
    for name in schedules():
        text = trace_text(simulate_plan(straight(), 8, name).timeline, straight().platform)
        assert len(json.loads(text)["traceEvents"]) > 100


def test_the_command_writes_a_trace(pipeplan, tmp_path):
    from pipeplan.files.profiles import profile_text

    profile, plan, trace = tmp_path / "p.json", tmp_path / "plan.json", tmp_path / "trace.json"
    profile.write_text(profile_text(straight().chain))
    pipeplan("plan", str(profile), "--gpus", "4", "--mem", "16GB", "--algorithm", "balance", "-o", str(plan))
    code, _, err = pipeplan("simulate", str(plan), "--schedule", "1f1b", "--trace", str(trace))
    assert code == 0, err
    assert json.loads(trace.read_text())["displayTimeUnit"] == "ms"
