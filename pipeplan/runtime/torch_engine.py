"""How does torch's own pipeline runtime run a drained schedule? The one file that uses its private names.

Torch runs one mini-batch from a list of forwards and backwards for each rank and places the communication itself; it
knows no weight versions, replicas or recomputation, and counts nothing. Weights are updated between its steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from ..errors import BadInput, RunFailed
from .device import group_timeout
from .exchange.links import Links
from .exchange.transport import PeerLost
from .executor import RankWork
from .lowering.lowered_run import LoweredRun
from .measure.recorder import Times
from .model.network import TensorSpec
from .training.rank import Rank


def refuse_for_torch(lowered: LoweredRun) -> None:
    """Raise BadInput with one sentence for what torch's runtime doesn't do."""
    stages = lowered.plan.allocation.stages
    if not lowered.drains:
        raise BadInput(f"plan: torch's engine drains before every update; weights are {lowered.plan.policy.weights!r}")
    if lowered.by_arrival:
        raise BadInput("plan: torch's engine runs a fixed order; message-driven devices decide as messages come")
    if lowered.plan.policy.precision == "mixed":
        raise BadInput("plan: torch's engine runs in fp32; the precision is mixed")
    if lowered.evaluates:
        raise BadInput("run: torch's engine trains; evaluate with our own")
    if lowered.graph.tied:
        names = " and ".join(map(str, lowered.graph.tied[0]))
        raise BadInput(f"plan: stages {names} share weights, whose gradients torch's engine doesn't sum")
    for s, stage in enumerate(stages):
        if stage.replicas > 1:
            raise BadInput(f"plan: stage {s} has {stage.replicas} replicas; torch's engine runs every stage once")
        if stage.checkpoint:
            raise BadInput(f"plan: stage {s} recomputes layers; torch's engine keeps all activations")
    if stages[-1].start == len(lowered.plan.chain) - 1:
        raise BadInput("plan: the last stage is the loss alone, which torch's engine cannot run")


def execute_on_torch(rank: Rank, work: RankWork, links: Links) -> Times:
    """Run all mini-batches of ``rank`` and return when updates were made; losses go to the last stage's runner."""
    if links.exchange == "staged":
        raise BadInput("run: torch's engine wants a GPU for each rank; ours can share them")
    lowered, model, runners = rank.lowered, rank.model, work.stages
    interval = lowered.interval
    group = dist.new_group(None, group_timeout(links.timeout, "nccl"), "nccl") if links.exchange == "nccl" else None
    last = len(lowered.plan.allocation.stages) - 1
    stages = []
    for s in runners:
        stage = rank.stage(s)
        out = model.boundaries[min(stage.stop, len(model.layers) - 1)]
        stages.append(
            PipelineStage(
                nn.Sequential(*rank.modules(s)),
                s,
                last + 1,
                links.device,
                input_args=(_example(model.boundaries[stage.start], s > 0, links.device),),
                output_args=(_example(out, True, links.device),),
                group=group,
            )
        )
    runtime = _PipelineScheduleRuntime(stages, interval, loss_fn=model.loss)  # type: ignore[no-untyped-call]  # torch has no types there
    runtime._prepare_schedule_with_comms(_actions(lowered), format="compute_only")
    for step in range(lowered.first.step, lowered.first.step + lowered.steps):
        begin = lowered.at(step).microbatch
        inputs: tuple[Tensor, ...] = ()
        targets: Tensor | None = None
        losses: list[Tensor] = []
        if 0 in runners or last in runners:
            samples = [work.data(m) for m in range(begin, begin + interval)]
            if 0 in runners:
                inputs = (torch.cat([x for x, _ in samples]),)
            if last in runners:
                targets = torch.cat([y for _, y in samples])
        try:
            runtime.step(*inputs, target=targets, losses=losses, return_outputs=False)
        except RuntimeError as error:
            lost = "onnection" in str(error) or "imed out" in str(error)
            raise (PeerLost if lost else RunFailed)(f"torch's engine in update {step + 1}: {error}") from error
        if last in runners:
            runners[last].losses.update({begin + k: loss.item() for k, loss in enumerate(losses)})
        for runner in runners.values():
            runner.versions.detach_gradient(step)
        if lowered.plan.policy.clip:
            work.norm(step + 1)
        for s, runner in runners.items():
            work.updates[s].update(step + 1)
            runner.versions.install(step + 1)
            work.updated(s, step + 1)
    return work.recorder.settle()


def _example(spec: TensorSpec, gradient: bool, device: torch.device) -> Tensor:
    gradient = gradient and spec.dtype.is_floating_point
    return torch.zeros(spec.shape, dtype=spec.dtype, requires_grad=gradient, device=device)


def _actions(lowered: LoweredRun) -> dict[int, list[_Action | None]]:
    """Return one mini-batch as torch writes it: every rank's forwards and backwards in the plan's order."""
    kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
    actions: dict[int, list[_Action | None]] = {}
    for lane in lowered.program.lanes:
        if lane.device is not None:
            works = [(lowered.program.operations[step.position], step.microbatch) for step in lane.steps]
            actions[lowered.devices.index(lane.device)] = [
                _Action(work.stage, kinds[work.kind], microbatch) for work, microbatch in works
            ]
    return actions
