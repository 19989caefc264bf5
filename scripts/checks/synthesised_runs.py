"""Run synthesised orders beside known schedules on four processes, whose passes take their time but no processor.

    python scripts/checks/synthesised_runs.py [--microbatches N] [--steps N] [--limits K ...]

Eight layers take 20, 24 and 16 ms for forward, input gradients and weight gradients, two of them on each GPU: 1F1B has
neighbours there, the others layers d and 7 - d. Prints for each order, the fastest by the simulator first, what a
microbatch takes as predicted, as predicted from the times that the run had, and as measured. Exit code 1 where the
measured ones come in another order than those from the runs' times: two may change places within 3% of each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402  # found through the path above
from cases.runtime import chain_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from pipeplan.api.plans.synthesizing import synthesized  # noqa: E402
from pipeplan.check.validate import check  # noqa: E402
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage  # noqa: E402
from pipeplan.planner.what_if.best_order import OWN, Found  # noqa: E402
from pipeplan.planner.what_if.ordered import in_order  # noqa: E402
from pipeplan.problem import Chain, Platform, Policy  # noqa: E402
from pipeplan.runtime.engine.options import RunOptions  # noqa: E402
from pipeplan.runtime.model.build.spec import ModelSpec  # noqa: E402
from pipeplan.runtime.processes.launch import run_plan  # noqa: E402
from pipeplan.schedule.kinds import graph_of, vee  # noqa: E402

GPUS, TIMES_MS = 4, (20, 24, 16)
CLOSE = 0.03


class Pause(torch.autograd.Function):
    """What takes its time forwards, and backwards until the gradient of its input is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same after a while."""
        time.sleep(TIMES_MS[0] / 1e3)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the same after a while."""
        time.sleep(TIMES_MS[1] / 1e3)
        return gradient


class PauseWeight(torch.autograd.Function):
    """What takes its time where a weight's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return the same at once."""
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the same after a while."""
        time.sleep(TIMES_MS[2] / 1e3)
        return gradient


class Paused(nn.Module):
    """A linear layer that takes its time but no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        if not self.training:
            return x @ self.weight
        return Pause.apply(x @ PauseWeight.apply(self.weight))


def paused(batch: int) -> tuple[list[nn.Module], Tensor, Any]:
    """Return the model: layers, an input and the loss."""
    return [Paused() for _ in range(2 * GPUS)], torch.zeros(batch, 16), nn.functional.mse_loss


def planned(chain: Chain, kind: str, homes: list[int], count: int) -> Plan:
    """Return the plan of a kind of schedule with equal stages."""
    each = 2 * GPUS // len(homes)
    ends = [each * (i + 1) for i in range(len(homes) - 1)] + [len(chain)]
    stages = tuple(Stage(a, b, (home,)) for a, b, home in zip([0, *ends], ends, homes, strict=False))
    policy = Policy("flush", count)
    schedule = Schedule(kind, count)  # type: ignore[arg-type]  # one of the kinds
    platform = Platform.flat(GPUS, 10**12)
    plan = Plan(chain, platform, policy, Allocation(stages), None, (), Provenance("by hand"), schedule)
    check(plan)
    return plan


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limits", type=int, nargs="+", default=[5, 6, 8])
    asked = parser.parse_args()
    forward, backward, weight = (1_000_000 * x for x in TIMES_MS)
    chain = chain_of(paused, 4)
    layers = [
        replace(x, forward_ns=forward, backward_ns=backward + weight, backward_weight_ns=weight) for x in chain.layers
    ]
    layers[-1] = replace(layers[-1], forward_ns=10**4, backward_ns=10**4, backward_weight_ns=0)  # the loss
    chain, count = replace(chain, layers=tuple(layers)), asked.microbatches
    plans = {"1f1b": planned(chain, "1f1b", list(range(GPUS)), count)}
    for kind in ("v-min", "v-half", "zbv"):
        plans[kind] = planned(chain, kind, vee(GPUS, 2), count)
    for limit in asked.limits:
        order = synthesized(graph_of(plans["zbv"]), count, limit=limit)
        plans[f"synthesised, {limit}"] = in_order(plans["zbv"], Found(OWN, order))
    predicted = {name: check(plan).period_ns for name, plan in plans.items()}
    measured: dict[str, int] = {}
    calibrated: dict[str, int] = {}
    for name in sorted(plans, key=lambda name: predicted[name]):
        report = run_plan(
            plans[name],
            ModelSpec("synthesised_runs:paused", "cases.runtime:vectors"),
            RunOptions(steps=asked.steps, lr=0.01),
        )
        assert report is not None, "this is no rank of torchrun"
        measured[name] = report.measured_period_ns or 0
        own = calibrated[name] = report.calibrated_period_ns or 0
        print(
            f"{name:16} predicted {predicted[name] / 1e6:6.1f} ms, from its own times {own / 1e6:6.1f} ms; "
            f"measured {measured[name] / 1e6:6.1f} ms",
            flush=True,
        )
    wrong = [
        (one, other)
        for one, other in combinations(measured, 2)
        if (measured[one] - measured[other]) * (calibrated[one] - calibrated[other]) < 0
        and abs(calibrated[other] / calibrated[one] - 1) > CLOSE
    ]
    for one, other in wrong:
        print(f"{one} and {other} were to come in the other order")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
