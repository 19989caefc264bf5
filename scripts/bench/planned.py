"""Does a run take as long as was planned? Models are profiled, planned and run on processes of this machine's CPU.

    python scripts/bench/planned.py [--model NAME,BATCH]... [--processes N]... [--rounds N] [--steps N]

Each round measures a profile beside as many processes as the run will have, plans with it as ``scripts/demo`` does, and
runs the plan. Prints of every round the planned period, the one predicted with the run's own times and the measured
one, then medians of the measured over both. Wants a quiet machine with a core for each process.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import pipeplan as pp
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.measure.report import RunReport
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

MODELS = ["zoo:gpt-tiny,blocks=8,8"]
MACHINE: dict[str, Any] = {
    "mem": "1GB",
    "bandwidth": "3GB/s",
    "latency": "500us",
    "overhead": "120us",
}  # as the demo says it
MEASURED_STEPS = 30


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", dest="models", metavar="NAME,BATCH")
    parser.add_argument("--processes", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    for text in arguments.models or MODELS:
        for processes in arguments.processes or [2]:
            name, _, batch = text.rpartition(",")
            print(f"--- {name}, batch {batch}, on {processes} processes; load {os.getloadavg()[0]:.1f}", flush=True)
            compared(name, int(batch), processes, arguments)


def compared(name: str, batch: int, processes: int, arguments: argparse.Namespace) -> None:
    """Profile, plan and run a model in rounds; print what came of each, and medians."""
    planned, predicted = [], []
    for _ in range(arguments.rounds):
        profile = pp.profile(name, microbatch=batch, beside=processes, steps=MEASURED_STEPS)
        found = pp.plan(profile, gpus=processes, algorithm="contiguous", no_replicas=True, **MACHINE)
        report = run_plan(found.plan, ModelSpec(name), RunOptions(steps=arguments.steps, lr=0.1))
        assert report is not None, "this is no rank of torchrun"
        assert report.measured_period_ns, "--steps are too few for a steady state"
        assert report.calibrated_period_ns, "this engine tells of passes"
        planned.append(report.measured_period_ns / report.planned_period_ns)
        predicted.append(report.measured_period_ns / report.calibrated_period_ns)
        print(
            f"planned {report.planned_period_ns / 1e6:8.3f} ms, with its own times "
            f"{report.calibrated_period_ns / 1e6:8.3f} ms, measured {report.measured_period_ns / 1e6:8.3f} ms: "
            f"{100 * planned[-1] - 100:+.1f}% and {100 * predicted[-1] - 100:+.1f}%; {_passes(report)}",
            flush=True,
        )
    for what, ratios in {"planned": planned, "predicted with its own times": predicted}.items():
        print(f"measured / {what}: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _passes(report: RunReport) -> str:
    """Return measured over planned passes by stage, and what else a microbatch takes there in ms."""
    return ", ".join(
        f"stage {x.stage} F {x.forward_ns / x.planned_forward_ns:.2f} B {x.backward_ns / x.planned_backward_ns:.2f} "
        f"reads {x.data_ns / 1e6:.2f} exchanges {x.exchange_ns / 1e6:.2f}"
        for x in report.stages
    )


if __name__ == "__main__":
    main()
