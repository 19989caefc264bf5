"""Do sums over replicas hide behind passes, as plans count them? Runs over links of a known rate, beside their plans.

    python scripts/checks/sums.py [--steps N] [--share X] [--policies NAME ...]

Four processes train a model whose layers take 40 ms forward and 80 ms backward without a processor, its first stage on
two of them. Links are as slow as makes that stage's sums take a share of the period (half of it); the plan knows that.
For each way to keep weights: the planned period, the measured one over it and over that from the run's own times, how
long a sum takes, and how much of it was hidden. The second line of 2bw has no room for a second gradient, so it waits
for its sums. Exit code 1 where sums that need not be waited for make a period more than 5% longer than planned.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from cases.runtime import chain_of  # noqa: E402  # found through the path above
from torch import nn  # noqa: E402

from pipeplan.check.evaluate import evaluate  # noqa: E402
from pipeplan.check.validate import check  # noqa: E402
from pipeplan.cost.stage_graph import stage_graph  # noqa: E402
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage  # noqa: E402
from pipeplan.problem import Chain, Device, Level, Platform, Policy  # noqa: E402
from pipeplan.runtime.engine.options import RunOptions  # noqa: E402
from pipeplan.runtime.model.build.spec import ModelSpec  # noqa: E402
from pipeplan.runtime.processes.launch import run_plan  # noqa: E402
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star  # noqa: E402

FORWARD_S, BACKWARD_S = 0.04, 0.08  # of a layer
MOST = 1.05
INTERVAL = 12  # microbatches of an update
PERIOD_S = FORWARD_S + BACKWARD_S
STAGES = (Stage(0, 2, (0, 1)), Stage(2, 3, (2,)), Stage(3, 5, (3,)))
MODEL = ModelSpec("sums:pausing", "cases.runtime:vectors")
POLICIES = {
    "2bw": Policy("2bw", INTERVAL),
    "2bw, no room": Policy("2bw", INTERVAL),
    "2bw, ZeRO": Policy("2bw", INTERVAL, "adam", zero=1),
    "2bw, clipped": Policy("2bw", INTERVAL, clip=True),
    "stash": Policy("stash", INTERVAL),
    "flush": Policy("flush", INTERVAL),
}
HIDES = ("2bw",)


class Pause(torch.autograd.Function):
    """Waits in both passes."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        time.sleep(FORWARD_S)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def,override]
        time.sleep(BACKWARD_S)
        return gradient


class Pausing(nn.Module):
    """A linear layer that takes its time but no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it makes of ``x``."""
        found: torch.Tensor = Pause.apply(self.linear(x)) if self.training else self.linear(x)
        return found


def pausing(batch: int) -> tuple[list[nn.Module], torch.Tensor, object]:
    """Return the model."""
    return [Pausing() for _ in range(4)], torch.zeros(batch, 16), nn.functional.mse_loss


def main() -> None:
    """Run what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.5, help="of the period that the sums' load is")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    arguments = parser.parse_args()
    chain, good = profiled(), True
    gradient = int(sum(chain.layers[i].weight_bytes for i in range(2)))
    rate = round(gradient / (INTERVAL * PERIOD_S * arguments.share))
    print(f"links of {rate} bytes/s; load {os.getloadavg()[0]:.1f}")
    for name in arguments.policies:
        good &= ran(name, planned(chain, rate, name), rate, arguments.steps)
    sys.exit(not good)


def profiled() -> Chain:
    """Return the model's profile with the times that it takes by what it is."""
    chain = chain_of(pausing, 4)
    layers = [replace(x, forward_ns=round(FORWARD_S * 1e9), backward_ns=round(BACKWARD_S * 1e9)) for x in chain.layers]
    layers[-1] = replace(layers[-1], forward_ns=10**4, backward_ns=10**4)
    return replace(chain, layers=tuple(layers))


def planned(chain: Chain, rate: int, name: str) -> Plan:
    """Return the plan, on links of ``rate`` that carry both directions at once."""
    policy = POLICIES[name]
    platform = Platform(tuple(Device(10**12, Fraction(1)) for _ in range(4)), (Level(4, rate),), full_duplex=True)
    graph = stage_graph(chain, platform, policy, STAGES)
    pattern = best_one_f_one_b_star(graph)
    assert pattern is not None
    schedule = Schedule("flush", INTERVAL) if policy.weights == "flush" else Schedule()
    plan = Plan(chain, platform, policy, Allocation(STAGES), pattern, (), Provenance("by hand"), schedule)
    if name == "2bw, no room":
        most = max(x.peak_bytes for x in evaluate(plan).devices)
        devices = tuple(Device(most, Fraction(1)) for _ in range(4))
        plan = replace(plan, platform=replace(platform, devices=devices))
    check(plan)
    return plan


def ran(name: str, plan: Plan, rate: int, steps: int) -> bool:
    """Run a plan, print how it went, and return whether it took as long as planned, if it should."""
    clip = 1.0 if plan.policy.clip else None
    report = run_plan(plan, MODEL, RunOptions(steps=steps, lr=0.01, link_rate=rate, clip_norm=clip))
    assert report is not None, "this is no rank of torchrun"
    assert report.measured_period_ns is not None
    ratio = report.measured_period_ns / report.planned_period_ns
    found = report.stages[0]
    assert report.calibrated_period_ns is not None
    print(
        f"{name:14} {report.planned_period_ns / 1e6:7.2f} ms planned, measured {ratio:.3f} times that, "
        f"{report.measured_period_ns / report.calibrated_period_ns:.3f} times its own times'; a sum takes "
        f"{found.sum_ns / 1e6:6.1f} ms, {1 - found.sum_wait_ns / found.sum_ns:.0%} hidden",
        flush=True,
    )
    return ratio <= MOST or name not in HIDES


if __name__ == "__main__":
    main()
