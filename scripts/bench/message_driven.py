"""Measure message-driven runs on two processes of this machine beside the simulation with the run's own times.

    python scripts/bench/message_driven.py [--model NAME,BATCH] [--microbatches M] [--steps N] [--pairs N] [--delay MS]

For limits p = 2 and 2p - 1 = 3, without and with a link delay (as long as a forward, unless it is given): the makespan
of a mini-batch as measured and as simulated, the ratio of the two, and what the larger limit gains, of either kind.

Wants a quiet machine with two cores to spare; the load is printed beside the figures.
"""

from __future__ import annotations

import argparse
import os
import statistics

from runtime import best_cut, plan_of, profiled

from pipeplan.plan import Stage
from pipeplan.problem import Chain
from pipeplan.runtime.engine.options import RunOptions
from pipeplan.runtime.lowering.otherwise import under
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

LIMITS = (2, 3)


def main() -> None:
    """Print one line for each delay and limit, and what the larger limit gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-tiny,8", metavar="NAME,BATCH")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each limit, which take turns")
    parser.add_argument("--delay", type=float, metavar="MS", help="of every message; a stage's forward by default")
    arguments = parser.parse_args()
    name, _, batch = arguments.model.rpartition(",")
    chain = profiled(name, int(batch))
    cut = best_cut(chain)
    forward_ms = max(sum(x.forward_ns for x in part) for part in (chain.layers[:cut], chain.layers[cut:])) / 1e6
    delay_ms = forward_ms if arguments.delay is None else arguments.delay
    print(f"{name}, batch {batch}, {arguments.microbatches} microbatches; load {os.getloadavg()[0]:.1f}")
    for delay in (0.0, delay_ms):
        compare(name, chain, cut, delay, arguments)


def compare(name: str, chain: Chain, cut: int, delay_ms: float, arguments: argparse.Namespace) -> None:
    """Print the makespans of both limits with ``delay_ms``; the limits take turns, so that load hits both alike."""
    drained = plan_of(chain, [Stage(0, cut, (0,)), Stage(cut, len(chain), (1,))], "flush", arguments.microbatches)
    measured: dict[int, list[float]] = {limit: [] for limit in LIMITS}
    simulated: dict[int, list[float]] = {limit: [] for limit in LIMITS}
    for _ in range(arguments.pairs):
        for limit in LIMITS:
            plan = under(drained, "message-driven", limit)
            report = run_plan(
                plan, ModelSpec(name), RunOptions(steps=arguments.steps, lr=1e-3, link_delay_s=delay_ms / 1e3)
            )
            assert report is not None, "this is no rank of torchrun"
            for periods, period in ((measured, report.measured_period_ns), (simulated, report.calibrated_period_ns)):
                assert period is not None, "--steps are too few"
                periods[limit].append(period * arguments.microbatches / 1e6)
    for limit in LIMITS:
        ratios = [found / said for found, said in zip(measured[limit], simulated[limit], strict=True)]
        print(
            f"delay {delay_ms:5.1f} ms, limit {limit}: measured {statistics.median(measured[limit]):8.2f} ms, "
            f"simulated {statistics.median(simulated[limit]):8.2f} ms, ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    small, large = LIMITS
    print(
        f"delay {delay_ms:5.1f} ms: limit {small} takes "
        f"{statistics.median(measured[small]) / statistics.median(measured[large]):.3f} times as long as {large}, "
        f"{statistics.median(simulated[small]) / statistics.median(simulated[large]):.3f} times when simulated"
    )


if __name__ == "__main__":
    main()
