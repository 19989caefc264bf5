"""Every schedule with every feature, and a plain loop to hold the runs against. Ranks import the model by its name.

``trained`` shares no code with the package: it says for itself which weights a microbatch sees, in which order
gradients are added, what 16 bits mean, and what clipping is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cases.runtime import chain_of, plan_of, uncorrected
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pipeplan.check.validate import check
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.planner.simulated.other_schedules import balanced_stages
from pipeplan.problem import Platform, Policy
from pipeplan.runtime.model.autocast import Autocast
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.schedule.kinds import KINDS, plan_program

BATCH, COUNT, STEPS, LR, CLIP, SCALE = 4, 4, 4, 0.01, 0.05, 2.0**10
PERIODIC = ("2bw-uniform", "stash")  # patterns that never drain
DRAINED = tuple(name for name, row in KINDS.items() if row.drains and row.build is not None and not row.written)
SCHEDULES = (*PERIODIC, "flush", "message-driven", *(x for x in DRAINED if x not in ("flush", "message-driven")))
FEATURES = ("recompute", "replicas", "zero", "tied", "clip", "fp16", "bf16", "autocast", "loader", "resume")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A run: a schedule with some features."""

    schedule: str
    features: frozenset[str]

    def refused(self) -> str | None:
        """Why there is no such run; None if there is one."""
        has = self.features
        if {"fp16", "bf16"} <= has:
            return "one type of 16 bits at a time"
        if "autocast" in has and not has & HALF.keys():
            return "autocast is to a type of 16 bits"
        if self.schedule in PERIODIC and "fp16" in has:
            return "weights that don't drain cannot skip an update"
        if self.schedule == "stash" and has & {"clip", "tied"}:
            return "each stage updates by itself"
        if self.schedule == "stash" and has & {"replicas", "zero"}:
            return "which versions are seen would follow from times"
        return None

    @property
    def copies(self) -> int:
        """Replicas of every stage."""
        return 2 if self.features & {"replicas", "zero"} else 1


def model(tied: bool = False) -> list[nn.Module]:
    torch.manual_seed(7)
    layers: list[nn.Module] = [
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 24), nn.LayerNorm(24),
        nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 16),
    ]  # fmt: skip
    if tied:
        layers[-1].weight = layers[0].weight  # type: ignore[assignment]
    return layers


def error(output, target):
    return nn.functional.mse_loss(output.float(), target.float())


def plain(batch):
    return model(), torch.zeros(batch, 16), error


def sharing(batch):
    return model(tied=True), torch.zeros(batch, 16), error


class Pairs(Dataset):
    def __len__(self):
        return BATCH * COUNT * STEPS

    def __getitem__(self, index):
        found = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=found), torch.randn(16, generator=found)


def microbatch(index, seed):
    pairs = [Pairs()[BATCH * index + i] for i in range(BATCH)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def loader(batch):
    return DataLoader(Pairs(), batch, num_workers=1)


# --- the plain loop --------------------------------------------------------------------------------------------------


def trained(case: Case) -> tuple[list[float], dict[str, Any]]:
    """Train in one process; return the loss of every microbatch, and the state in full precision."""
    net = nn.Sequential(*model("tied" in case.features))
    masters = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    half = next((HALF[x] for x in case.features if x in HALF), None)
    cast = "autocast" in case.features
    if half is not None and not cast:
        net.to(half)
    weights = list(net.parameters())
    optimizer = torch.optim.Adam(masters, LR)
    scale = SCALE if half is torch.float16 else 1.0
    size, copies = (1 if case.schedule == "stash" else COUNT), case.copies
    history, losses = [[m.detach().clone() for m in masters]], []
    begun = COUNT * STEPS // size // 2 if "resume" in case.features else 0  # where a plan that drains ended
    split = sum(len(list(layer.parameters())) for layer in list(net)[:4])  # weights of the first of two stages
    for update in range(COUNT * STEPS // size):
        sums: list[list[torch.Tensor | None]] = [[None] * len(weights) for _ in range(copies)]
        found: dict[int, float] = {}
        for m in range(update * size, (update + 1) * size):
            for index, weight in enumerate(weights):
                behind = {"2bw-uniform": 1, "stash": int(index < split)}.get(case.schedule, 0)
                seen = update if update < begun else max(update - behind, begun)
                weight.data.copy_(history[seen][index])
            x, target = microbatch(m, 0)
            with torch.autocast("cpu", half, enabled=cast):
                loss = error(net(x.to(weights[0].dtype)), target)
            found[m] = float(loss.detach())
            gradients = torch.autograd.grad(loss, weights, torch.tensor(scale / size))
            mine = sums[m % size % copies if case.schedule not in PERIODIC else m % copies]
            for index, gradient in enumerate(gradients):
                mine[index] = gradient if mine[index] is None else mine[index] + gradient
        losses += [found[m] for m in sorted(found)]
        for index, master in enumerate(masters):
            total = sums[0][index]
            for others in sums[1:]:
                total = total + others[index]
            master.grad = total.float() / scale
        if "clip" in case.features:
            nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        history.append([m.detach().clone() for m in masters])
    return losses, dict(zip((name for name, _ in net.named_parameters()), masters, strict=True))


# --- the run ---------------------------------------------------------------------------------------------------------


def planned(case: Case, ranks: int = 2) -> Plan:
    """Return the plan of a case on ``ranks`` groups of GPUs."""
    has, copies = case.features, case.copies
    half = next((HALF[x] for x in has if x in HALF), None)
    precision = "autocast" if "autocast" in has else "mixed" if half else "fp32"
    number = {"autocast": Autocast(half)} if "autocast" in has else {"dtype": half}
    chain = chain_of(sharing if "tied" in has else plain, BATCH, split=case.schedule not in PERIODIC, **number)
    groups = [tuple(range(copies * rank, copies * (rank + 1))) for rank in range(ranks)]
    end = len(chain)

    def stages(found):
        return [replace(x, checkpoint=((x.start, x.stop),)) for x in found] if "recompute" in has else list(found)

    two = stages([Stage(0, 4, groups[0]), Stage(4, end, groups[-1])])
    if case.schedule in PERIODIC:
        plan = plan_of(chain, two, weights=case.schedule, accumulate=1 if case.schedule == "stash" else COUNT)
    elif case.schedule == "flush":
        plan = plan_of(chain, two, accumulate=COUNT)
    else:
        row = KINDS[case.schedule]
        homes = row.homes(ranks, 2) if row.homes else range(ranks)
        base = Plan(
            chain, Platform.flat(ranks * copies, 10**12), Policy("flush", COUNT),
            Allocation((Stage(0, end, (0,)),)), None, (), Provenance("by hand"), Schedule(),
        )  # fmt: skip
        made = stages(balanced_stages(base, [groups[home] for home in homes], case.schedule))
        limit = None if row.limit is None else ranks + 1
        plan = replace(base, allocation=Allocation(tuple(made)), schedule=Schedule(case.schedule, COUNT, limit))
    policy = replace(
        plan.policy, optimizer="adam", zero=int("zero" in has), precision=precision,
        clip="clip" in has,
    )  # fmt: skip
    plan = replace(plan, policy=replace(policy, clip=False))
    check(plan)
    return plan


def ran(case: Case, folder: Path) -> tuple[list[float], dict[str, Any], float]:
    """Return what a run of the case gives: losses, state, and how full it was of what it may hold of activations."""
    plan, has = planned(case), case.features
    build = "sharing" if "tied" in has else "plain"
    spec = ModelSpec(f"{__name__}:{build}", f"{__name__}:{'loader' if 'loader' in has else 'microbatch'}")
    updates = COUNT * STEPS // plan.interval
    half = next((x for x in has if x in HALF), None)
    options = uncorrected(steps=updates, lr=LR, save=folder / "x.pt", clip_norm=CLIP if "clip" in has else None)
    if half == "fp16":
        options = replace(options, half=replace(options.half, loss_scale=SCALE))
    before: list[float] = []
    if "resume" in has:
        options = replace(options, checkpoint=folder / "c")
        end = len(plan.chain)
        alone = plan_of(plan.chain, [(0, end, (0,))], accumulate=plan.interval)
        policy = replace(alone.policy, optimizer="adam", precision=plan.policy.precision)
        first = run_plan(replace(alone, policy=policy), spec, replace(options, steps=updates // 2, save=None))
        before, options = list(first.losses), replace(options, resume=True)
    report = run_plan(plan, spec, options)
    full = max(x.measured_bytes / max(1, x.allowed_bytes) for x in report.activations)
    state = torch.load(folder / "x.pt", weights_only=True)
    return [*before, *report.losses], state, full


def tolerance(case: Case, plan: Plan) -> float:
    """Return what may lie between both: nothing where gradients are added in the order of microbatches."""
    began_otherwise = "resume" in case.features and case.copies > 1  # one process did, with other sums
    if case.features & {"tied", "clip"} or not _in_order(plan) or began_otherwise:
        return 2e-2 if case.features & HALF.keys() else 2e-6
    return 0.0


def _in_order(plan: Plan) -> bool:
    """Whether every replica of a stage adds its gradients up in the order of microbatches, by the program."""
    if plan.pattern is not None:
        return True
    if KINDS[plan.schedule.kind].by_arrival:
        return False
    program = plan_program(plan, plan.schedule.mini_batch)
    for lane in program.lanes:
        for s in range(len(plan.allocation.stages)):
            added = [x.microbatch for x in lane.steps if x.position == program.release[s]]
            if added != sorted(added):
                return False
    return True


def difference(case: Case, folder: Path) -> tuple[float, float, float]:
    """Return how far a run is from the plain loop in losses, and in weights, and how full it was."""
    losses, state = trained(case)
    mine, ours, full = ran(case, folder)
    assert len(mine) == len(losses)
    apart = max(abs(a - b) for a, b in zip(mine, losses, strict=True))
    return apart, max(float((ours[name] - x.detach()).abs().max()) for name, x in state.items()), full
