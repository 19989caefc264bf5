"""Run a model under every drained schedule that plans can have, on real processes, beside training in one process.

    python scripts/checks/schedule_runs.py [--ranks N ...] [--schedules NAME ...] [--model NAME,BATCH] [--steps N]
        [--variants NAME ...]

Prints for each schedule on each number of ranks: the largest difference between its losses and those of plain training
(0 where they are equal to the last bit, as they must be where gradients are added in the microbatches' order), peak
activation bytes measured over those that it may hold, and the measured period over that of the simulated program with
the run's own times. Beside plain models there are such whose first and last layers share weights (tied), whose stages
are recomputed (then each order also runs with recomputations as early as they can be), whose stages have two replicas
each (on twice as many ranks), and those in mixed precision. The last line of each number of ranks writes the order of
one schedule to a file and runs it from there. Exit code 1 where a loss differs or a rank holds more than planned.
Periods want a quiet machine with a core for each rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from cases.half import halved_serial  # noqa: E402  # found through the path above
from cases.runtime import serial  # noqa: E402

from pipeplan import zoo  # noqa: E402
from pipeplan.check.validate import check  # noqa: E402
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage  # noqa: E402
from pipeplan.planner.other_schedules import balanced_stages  # noqa: E402
from pipeplan.problem import Chain, Platform, Policy  # noqa: E402
from pipeplan.runtime.launch import run_plan  # noqa: E402
from pipeplan.runtime.model.spec import ModelSpec  # noqa: E402
from pipeplan.runtime.options import RunOptions, run_otherwise  # noqa: E402
from pipeplan.runtime.profiler.measure import measure_model  # noqa: E402
from pipeplan.runtime.profiler.steps import MeasureOptions  # noqa: E402
from pipeplan.schedule.kinds import KINDS, graph_of, plan_program  # noqa: E402
from pipeplan.schedule.synthesis.recomputing import recomputed_early  # noqa: E402
from pipeplan.schedule.written_program import order_of_program  # noqa: E402

MODEL = "gpt-tiny,blocks=8,2"
LR, SEED, OPTIMIZER = 0.05, 2, "momentum"
VARIANTS = ("plain", "tied", "recomputed", "replicated", "mixed")
CLOSE, HALF_CLOSE = 1e-5, 1e-3  # where gradients are added in another order, and that in 16 bits
ORDERED = [name for name, row in KINDS.items() if row.drains and row.simulated is not None and not row.written]


def main() -> None:
    """Run what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=ORDERED, choices=ORDERED)
    parser.add_argument("--variants", nargs="+", default=["plain"], choices=VARIANTS)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    name, _, batch = arguments.model.rpartition(",")
    good = True
    for variant in arguments.variants:
        own = f"{name},tied=true" if variant == "tied" else name
        chain = profiled(own, int(batch), variant)
        for ranks in arguments.ranks:
            count = 3 * ranks * (2 if variant == "replicated" else 1)
            losses = plain_losses(own, int(batch), variant, arguments.steps, count)
            print(f"--- {variant}, {ranks} ranks, {count} microbatches; load {os.getloadavg()[0]:.1f}")
            for kind in arguments.schedules:
                plan = planned(chain, kind, ranks, count, variant)
                good &= ran(own, kind, plan, arguments.steps, losses)
                if variant == "recomputed":
                    good &= ran(own, f"{kind}, early", early(plan, count), arguments.steps, losses)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "order.csv")
                rows = (row.partition(": ")[2] for row in plan_program(plan, count).text().splitlines())
                path.write_text("".join(f"{row.replace(' ', ',')}\n" for row in rows))
                if variant != "replicated":
                    again = run_otherwise(plan, False, str(path), None)
                    good &= ran(own, f"{arguments.schedules[-1]}, from a file", again, arguments.steps, losses)
    sys.exit(not good)


def profiled(name: str, batch: int, variant: str) -> Chain:
    """Return the measured profile of a zoo model, with what its weights' gradients need."""
    dtype = torch.bfloat16 if variant == "mixed" else None
    model, options = zoo.load(name), MeasureOptions(steps=5, warmup=2, split_backward=True, dtype=dtype)
    return measure_model(model, batch, options, name=name, date="today", data=model.data(batch)).chain


def plain_losses(name: str, batch: int, variant: str, steps: int, count: int) -> list[float]:
    """Return the losses of training in one process."""
    if variant == "mixed":
        model = zoo.load(name)
        losses, *_ = halved_serial(
            lambda batch: model(batch, seed=SEED), lambda m, _: model.data(batch)(m, SEED), batch,
            dtype=torch.bfloat16, steps=steps, accumulate=count, optimizer=OPTIMIZER, lr=LR, scale=1.0, window=2000,
        )  # fmt: skip
        return list(losses)
    replicas = 2 if variant == "replicated" else 1
    losses, _ = serial(
        name, batch, steps=steps, accumulate=count, optimizer=OPTIMIZER, lr=LR, seed=SEED, replicas=replicas
    )
    return list(losses)


def planned(chain: Chain, kind: str, ranks: int, count: int, variant: str) -> Plan:
    """Return the plan of a kind on ``ranks`` GPUs, or twice as many, with balanced stages where the kind has them."""
    row = KINDS[kind]  # type: ignore[index]  # one of the keys
    assert row.simulated is not None
    homes = row.simulated.homes(ranks, 2) if row.simulated.homes else range(ranks)
    twice = variant == "replicated"
    devices = [(2 * home, 2 * home + 1) if twice else (home,) for home in homes]
    policy = Policy("flush", count, OPTIMIZER)  # type: ignore[arg-type]  # one of the optimizers
    whole = Allocation((Stage(0, len(chain), (0,)),))
    platform = Platform.flat(ranks * (1 + twice), 10**12)
    plan = Plan(chain, platform, policy, whole, None, (), Provenance("by hand"), Schedule())
    stages = balanced_stages(plan, devices, kind)
    if variant == "recomputed":
        stages = tuple(replace(x, checkpoint=((x.start, x.stop),)) for x in stages)
    if variant == "mixed":
        plan = replace(plan, policy=replace(policy, precision="mixed"))
    limit = None if row.limit is None else ranks + 1
    plan = replace(plan, allocation=Allocation(stages), schedule=Schedule(kind, count, limit))  # type: ignore[arg-type]
    check(plan)
    return plan


def early(plan: Plan, count: int) -> Plan:
    """Return a plan in its own order with recomputations as early as they can be."""
    program = recomputed_early(graph_of(plan), plan_program(plan, count), count)
    assert program is not None, "memory is large"
    found = replace(plan, schedule=Schedule("written", count, order=order_of_program(program)))
    check(found)
    return found


def ran(name: str, what: str, plan: Plan, steps: int, losses: list[float]) -> bool:
    """Run a plan, print how it went, and return whether that was as it must be."""
    report = run_plan(plan, ModelSpec(name), RunOptions(steps=steps, lr=LR, seed=SEED))
    assert report is not None, "this is no rank of torchrun"
    difference = max(abs(mine - theirs) for mine, theirs in zip(report.losses, losses, strict=True))
    held = [x.measured_bytes / x.allowed_bytes for x in report.activations]
    period = "-"
    if report.measured_period_ns and report.calibrated_period_ns:
        period = f"{report.measured_period_ns / report.calibrated_period_ns:.3f}"
    print(
        f"{what:30} loss {difference:.1e}  activations {min(held):.4f} to {max(held):.4f}  "
        f"period {period} of {(report.calibrated_period_ns or 0) / 1e6:.2f} ms",
        flush=True,
    )
    close = HALF_CLOSE if plan.policy.precision == "mixed" else CLOSE
    return difference <= (0 if _adds_in_order(plan) else close) and max(held) <= 1


def _adds_in_order(plan: Plan) -> bool:
    """Whether every replica of a stage adds its gradients up in the order of microbatches, by the program."""
    program = plan_program(plan, plan.schedule.mini_batch)
    for lane in program.lanes:
        for s in range(len(plan.allocation.stages)):
            added = [x.microbatch for x in lane.steps if x.position == program.release[s]]
            if added != sorted(added):
                return False
    return True


if __name__ == "__main__":
    main()
