"""Measure what ``pipeplan run`` promises, on two processes of this machine: each part prints one table.

    python scripts/bench/runtime.py [periods] [cuts] [torch] [chunks] [--model NAME,BATCH]... [--steps N] [--pairs N]

periods: measured period over the prediction with the run's own times, for a balanced, an uneven and a non-contiguous
         plan of each model.
cuts:    every cut of a model into two stages, planned and measured: is the planner's best cut the measured best?
torch:   throughput with 2bw and stash against torch's own pipelining with 1F1B, 8 microbatches per step, same cut and
         model, in pairs that take turns. In the ideal 2bw wins (m + p - 1) / m = 1.125.
chunks:  two stages a process: torch's ScheduleInterleaved1F1B and ScheduleZBVZeroBubble on torch's runtime, and ours on
         the same stages, in pairs that take turns.

Wants a quiet machine with two cores to spare; the load is printed beside the figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from pipeplan import zoo
from pipeplan.check.validate import check
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.planner.simulated.other_schedules import balanced_stages
from pipeplan.problem import Chain, Platform, Policy, Weights
from pipeplan.runtime.engine.asked import run_otherwise
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.measure.report import RunReport
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.schedule.pattern import most_in_flight, starts_of
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

MODELS = ["gpt-tiny,8", "small-cnn,32", "gpt-tiny,blocks=8,4"]
MICROBATCHES = 8
CHUNKS = {  # torch's schedules: processes of the stages, and ours on these
    "Interleaved1F1B": ((0, 1, 0, 1), ("interleaved", "interleaved-zb", "breadth-first")),
    "ZBVZeroBubble": ((0, 1, 1, 0), ("zbv", "v-half", "dualpipev")),
}
LATENCY_NS = 500_000  # of a message between two processes that are both busy


def main() -> None:
    """Run the parts that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="periods, cuts, torch, chunks; all by default")
    parser.add_argument("--model", action="append", dest="models", metavar="NAME,BATCH")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    parts = {"periods": periods, "cuts": cuts, "torch": against_torch, "chunks": beside_chunks}
    for name in arguments.parts or parts:
        for text in arguments.models or MODELS:
            model, _, batch = text.rpartition(",")
            print(f"--- {name}: {model}, batch {batch}; load {os.getloadavg()[0]:.1f}")
            parts[name](model, profiled(model, int(batch)), arguments)


def profiled(name: str, batch: int) -> Chain:
    """Return the measured profile of a zoo model."""
    model = zoo.load(name)
    return measure_model(
        model, batch, MeasureOptions(steps=10, warmup=3), name=name, date="today", data=model.data(batch)
    ).chain


def plan_of(
    chain: Chain,
    stages: list[Stage],
    weights: Weights = "2bw",
    accumulate: int | None = None,
    latency_ns: int = LATENCY_NS,
) -> Plan:
    """Return the plan of given stages, with 1F1B* or the integer program's order.

    With a latency, as real processes have one, the order keeps a microbatch more in flight where a cut would wait.
    """
    count = 1 + max(d for stage in stages for d in stage.devices)
    platform, policy = Platform.flat(count, 10**12, latency_ns=latency_ns), Policy(weights, accumulate)
    timed = replace(policy, weights="flush" if weights == "flush" else "stash", accumulate=accumulate or 1)  # any order
    graph = stage_graph(chain, platform, timed, stages)
    pattern = best_one_f_one_b_star(graph) if graph.contiguous else schedule_ilp(graph).pattern
    assert pattern is not None, "memory is no limit here"
    in_flight = most_in_flight(graph, starts_of(pattern), pattern.period_ns)
    if accumulate is None or (weights == "2bw" and accumulate < in_flight):  # the update's share moves the order
        return plan_of(chain, stages, weights, in_flight, latency_ns)
    schedule = Schedule("flush", accumulate) if weights == "flush" else Schedule()
    plan = Plan(chain, platform, policy, Allocation(tuple(stages)), pattern, (), Provenance("benchmark"), schedule)
    check(plan)
    return plan


def two_stages(chain: Chain) -> Iterator[tuple[int, list[Stage]]]:
    """Yield every cut with its two stages; the loss never stands alone."""
    for cut in range(1, len(chain) - 1):
        yield cut, [Stage(0, cut, (0,)), Stage(cut, len(chain), (1,))]


def best_cut(chain: Chain) -> int:
    """Return the cut of the shortest planned period."""
    return min((plan_of(chain, stages).pattern.period_ns, cut) for cut, stages in two_stages(chain))[1]  # type: ignore[union-attr]  # plan_of makes one


def trained(name: str, plan: Plan, steps: int) -> RunReport:
    """Run ``plan`` and return its report."""
    report = run_plan(plan, ModelSpec(name), RunOptions(steps=steps, lr=1e-3))
    assert report is not None, "this is no rank of torchrun"
    return report


def on_torch(name: str, plan: Plan, steps: int, schedule: str) -> float:
    """Train the stages of ``plan`` under one of torch's schedules, on its own runtime; return ns per microbatch."""
    with tempfile.TemporaryDirectory() as folder:
        given = f"file://{folder}/meet", name, plan, steps, schedule, Path(folder, "period")
        torch.multiprocessing.spawn(_torchs_rank, given, nprocs=len(plan.platform))  # type: ignore[attr-defined, no-untyped-call]  # torch has no types there
        return float(Path(folder, "period").read_text())


def _torchs_rank(rank: int, store: str, name: str, plan: Plan, steps: int, schedule: str, out: Path) -> None:
    """Play one rank; the median of the steps but for the first few goes to ``out``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=len(plan.platform))
    model, own = zoo.load(name), []
    layers, example, loss = model(plan.chain.microbatch)
    for s, stage in enumerate(plan.allocation.stages):
        here = nn.Sequential(*list(layers)[stage.start : stage.stop])  # the loss, the last of the chain, is no module
        takes, example = example, here(example).detach().requires_grad_()
        if stage.devices == (rank,):
            args = takes, example
            own.append(pipelining.PipelineStage(here, s, len(plan.allocation.stages), torch.device("cpu"), *args))
    kind: Any = getattr(pipelining, f"Schedule{schedule}")
    runtime = kind(own if len(own) > 1 else own[0], MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD([p for stage in own for p in stage.submod.parameters()], lr=1e-3)
    data, took, last = model.data(plan.chain.microbatch), [], len(plan.allocation.stages) - 1
    for step in range(steps):
        samples = [data(m, 0) for m in range(step * MICROBATCHES, (step + 1) * MICROBATCHES)]
        inputs, targets = (torch.cat(x) for x in zip(*samples, strict=True))
        first = any(stage.stage_index == 0 for stage in own)
        ends = {"target": targets} if any(stage.stage_index == last for stage in own) else {}
        begin = time.perf_counter_ns()
        runtime.step(*([inputs] if first else []), **ends)
        optimizer.step()
        optimizer.zero_grad()
        took.append((time.perf_counter_ns() - begin) / MICROBATCHES)
    if rank == 0:
        out.write_text(str(statistics.median(took[min(5, steps // 2) :])))
    dist.barrier()
    dist.destroy_process_group()


def periods(name: str, chain: Chain, arguments: argparse.Namespace) -> None:
    """Print measured periods over predicted ones."""
    cut, last = best_cut(chain), len(chain)
    uneven = cut + 1 if cut + 1 < last - 1 else cut - 1
    third = max(1, cut // 2)
    layouts = {
        "balanced": [Stage(0, cut, (0,)), Stage(cut, last, (1,))],
        "uneven": [Stage(0, uneven, (0,)), Stage(uneven, last, (1,))],
        "non-contiguous": [Stage(0, third, (0,)), Stage(third, last - 2, (1,)), Stage(last - 2, last, (0,))],
    }
    for kind, stages in layouts.items():
        ratios, planned = [], []
        for _ in range(arguments.pairs):
            report = trained(name, plan_of(chain, stages), arguments.steps)
            if report.measured_period_ns and report.calibrated_period_ns:
                ratios.append(report.measured_period_ns / report.calibrated_period_ns)
                planned.append(report.measured_period_ns / report.planned_period_ns)
        print(
            f"{kind:15} measured / calibrated {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}); measured / planned {statistics.median(planned):.3f}"
        )


def cuts(name: str, chain: Chain, arguments: argparse.Namespace) -> None:
    """Print planned and measured periods of every cut; rounds take turns, so that load hits all cuts alike."""
    plans = {cut: plan_of(chain, stages) for cut, stages in two_stages(chain)}
    measured: dict[int, list[float]] = {cut: [] for cut in plans}
    for _ in range(arguments.pairs):
        for cut, plan in plans.items():
            period = trained(name, plan, arguments.steps).measured_period_ns
            assert period is not None, "--steps are too few for a steady state"
            measured[cut].append(period)
    medians = {cut: statistics.median(values) for cut, values in measured.items()}
    for cut, plan in plans.items():
        assert plan.pattern is not None
        print(f"cut {cut}: planned {plan.pattern.period_ns / 1e6:8.3f} ms, measured {medians[cut] / 1e6:8.3f} ms")
    chosen, fastest = best_cut(chain), min(medians, key=lambda cut: medians[cut])
    print(f"planner's cut {chosen} is {medians[chosen] / medians[fastest]:.3f} x the fastest, {fastest}")


def against_torch(name: str, chain: Chain, arguments: argparse.Namespace) -> None:
    """Print throughputs over that of torch's runtime; the three take turns in every round."""
    cut = best_cut(chain)
    stages = [Stage(0, cut, (0,)), Stage(cut, len(chain), (1,))]
    plans = {
        "2bw": plan_of(chain, stages, "2bw", MICROBATCHES),
        "stash": plan_of(chain, stages, "stash", 1),
        "own flush": plan_of(chain, stages, "flush", MICROBATCHES),
    }
    classic = plan_of(chain, stages, "flush", MICROBATCHES, 0)  # 1F1B as torch's Schedule1F1B orders it
    ratios: dict[str, list[float]] = {kind: [] for kind in plans}
    for _ in range(arguments.pairs):
        torchs = on_torch(name, classic, arguments.steps, "1F1B")
        for kind, plan in plans.items():
            steps = arguments.steps * (MICROBATCHES if kind == "stash" else 1)
            period = trained(name, plan, steps).measured_period_ns
            assert period is not None, "--steps are too few for a steady state"
            ratios[kind].append(torchs / period)
    for kind, values in ratios.items():
        print(
            f"{kind:10} {statistics.median(values):.3f} x torch's throughput ({min(values):.3f} to {max(values):.3f})"
        )


def beside_chunks(name: str, chain: Chain, arguments: argparse.Namespace) -> None:
    """Print throughputs with two stages a process over that of torch's schedules on its own runtime."""
    for torchs, (homes, kinds) in CHUNKS.items():
        plan = _chunked(chain, homes)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "order.csv")
            path.write_text(_order_of(torchs))
            theirs = run_otherwise(plan, False, str(path), None)
        plans = {kind: run_otherwise(plan, False, kind, None) for kind in kinds}
        plans["its own order"] = theirs
        ratios: dict[str, list[float]] = {kind: [] for kind in plans}
        for _ in range(arguments.pairs):
            before = on_torch(name, theirs, arguments.steps, torchs)
            for kind, mine in plans.items():
                period = trained(name, mine, arguments.steps).measured_period_ns
                assert period is not None, "--steps are too few for a steady state"
                ratios[kind].append(before / period)
        for kind, values in ratios.items():
            median = statistics.median(values)
            print(f"{kind:14} {median:.3f} x torch's {torchs} ({min(values):.3f} to {max(values):.3f})")


def _chunked(chain: Chain, homes: tuple[int, ...]) -> Plan:
    """Return a drained plan of balanced stages on the processes ``homes``."""
    policy, whole = Policy("flush", MICROBATCHES), Allocation((Stage(0, len(chain), (0,)),))
    plan = Plan(
        chain, Platform.flat(2, 10**12, latency_ns=LATENCY_NS), policy, whole, None, (), Provenance("benchmark")
    )
    stages = balanced_stages(plan, [(home,) for home in homes], "chunks")
    return replace(plan, allocation=Allocation(stages), schedule=Schedule("gpipe", MICROBATCHES))


def _order_of(torchs: str) -> str:
    """Return the CSV of one of torch's schedules for two processes with two stages each."""
    rows = get_schedule_ops(torchs, 2, MICROBATCHES, num_stages_per_rank=2)
    return "".join(",".join(str(action) for action in row if action is not None) + "\n" for row in rows)


if __name__ == "__main__":
    main()
