"""How does torch's own pipeline runtime run a drained schedule? The one file that uses its private names.

Torch runs one mini-batch from a list of forwards and backwards for each rank, or of the parts of these, and places the
communication itself; it knows no weight versions, replicas or recomputation, and counts nothing. Weights are updated
between its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from ...errors import BadInput, RunFailed
from ..device import group_timeout
from ..exchange.transport import PeerLost
from ..lowering.lowered_run import LoweredRun
from ..measure.recorder import Times
from ..model.loaded import LoadedModel
from ..model.network import TARGET, LayerCode, TensorSpec, kind_of, own_loss
from ..training.rank import Rank
from .executor import MiniBatchEnd
from .own_stages import RankRun


def refuse_for_torch(lowered: LoweredRun) -> None:
    """Raise BadInput with one sentence for what torch's runtime doesn't do."""
    stages = lowered.plan.allocation.stages
    if not lowered.drains:
        raise BadInput(f"plan: torch's engine drains before every update; weights are {lowered.plan.policy.weights!r}")
    if lowered.by_arrival:
        raise BadInput("plan: torch's engine runs a fixed order; message-driven devices decide as messages come")
    precision = lowered.plan.policy.precision
    if precision != "fp32":
        raise BadInput(f"plan: torch's engine runs in fp32; the precision is {precision}")
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


def execute_on_torch(run: RankRun, end: MiniBatchEnd) -> Times:
    """Run all mini-batches of a rank and return when updates were made; losses go to the last stage's runner."""
    rank, links, updates = run.rank, run.meeting.links, run.stages.updates
    lowered, model, runners = rank.lowered, rank.model, run.stages.runners
    if links.exchange == "staged":
        raise BadInput("run: torch's engine wants a GPU for each rank; ours can share them")
    interval = lowered.interval
    group = dist.new_group(None, group_timeout(links.timeout, "nccl"), "nccl") if links.exchange == "nccl" else None
    last = len(lowered.plan.allocation.stages) - 1
    stages = []
    for s in runners:
        code = _StageCode(rank, s, s == 0)
        stages.append(
            PipelineStage(
                code,
                s,
                last + 1,
                links.device,
                input_args=tuple(_example(model.specs[v], s > 0, links.device) for v in code.reads),
                output_args=tuple(_example(model.specs[v], True, links.device) for v in code.makes),
                group=group,
            )
        )
    runtime = _PipelineScheduleRuntime(stages, interval, loss_fn=partial(_loss, model.layers[-1].codes[-1]))  # type: ignore[no-untyped-call]  # torch has no types there
    runtime._prepare_schedule_with_comms(_actions(lowered), format="compute_only")
    for step in range(lowered.first.step, lowered.first.step + lowered.steps):
        begin = lowered.at(step).microbatch
        inputs: list[Tensor] = []
        more: dict[str, Any] = {}
        targets: Tensor | None = None
        losses: list[Tensor] = []
        if any(runner.reads for runner in runners.values()):
            samples = [run.reader.take(m) for m in range(begin, begin + interval)]
            for s in runners:
                for v, (place, _) in model.read_by(rank.stage(s)).items():
                    tensors = torch.cat([found[place] for found, _ in samples])
                    if s == 0:
                        inputs.append(tensors)
                    else:  # torch gives to all stages what has a name
                        more[f"v{v}"] = tensors
            if last in runners:
                targets = torch.cat([_target(y, model.loss is own_loss) for _, y in samples])
        try:
            runtime.step(*inputs, target=targets, losses=losses, return_outputs=False, **more)
        except RuntimeError as error:
            lost = "onnection" in str(error) or "imed out" in str(error)
            raise (PeerLost if lost else RunFailed)(f"torch's engine in update {step + 1}: {error}") from error
        if last in runners:
            runners[last].losses.update({begin + k: loss.item() for k, loss in enumerate(losses)})
        for runner in runners.values():
            runner.gradients.detach(step)
        if lowered.plan.policy.clip:
            run.stages.measure(step + 1)
        for s, runner in runners.items():
            updates[s].update(step + 1)
            runner.versions.install(step + 1)
            end.updated(s, step + 1)
    return run.meeting.recorder.settle()


class _StageCode(nn.Module):
    """The layers of stage ``s`` but the loss as one module: from the values that come in to those that go out."""

    def __init__(self, rank: Rank, s: int, first: bool) -> None:
        super().__init__()
        model, stage = rank.model, rank.stage(s)
        self._codes = [
            code for layer in rank.layers(s) for code in layer.codes if TARGET not in code.reads and not code.of_data
        ]
        self.parts = nn.ModuleList(code.module for code in self._codes)
        of_data = tuple(model.read_by(stage))
        self.reads, self._named = (of_data, ()) if first else (model.cut(stage.start).values, of_data)
        behind = model.layers[-1].codes[-1].reads[:-1] if stage.stop == len(model.layers) else ()
        self.makes = behind or model.cut(stage.stop).values

    def forward(self, *tensors: Tensor, **more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers; what is only passed on is a view."""
        values = dict(zip(self.reads, tensors, strict=True)) | {v: more[f"v{v}"] for v in self._named}
        for code in self._codes:
            values.update(zip(code.makes, code.run(code.module, *[values[v] for v in code.reads]), strict=True))
        passed_on = {v: x.view_as(x) for v, x in zip(self.reads, tensors, strict=True)}
        found = tuple((values | passed_on)[v].contiguous() for v in self.makes)
        return found[0] if len(found) == 1 else found


def refuse_crossing(model: LoadedModel, cuts: Sequence[int]) -> None:
    """Raise BadInput unless all that crosses one of ``cuts`` has a gradient, as torch's engine sends one back."""
    for position in cuts:
        cut = model.cut(position)
        if cut.trained != cut.values:
            spec = next(spec for value, spec in zip(cut.values, cut.specs, strict=True) if value not in cut.trained)
            raise BadInput(
                f"plan: {spec} crosses the cut before layer {position} without a gradient, which torch's engine would "
                "wait for; leave out --engine torch, or cut elsewhere"
            )


def _loss(code: LayerCode, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    values = output if isinstance(output, tuple) else (output,)
    (found,) = code.run(code.module, *values, target)
    return found


def _target(target: Any, unread: bool) -> Tensor:
    if unread:
        return torch.zeros(1)  # without a target torch computes no loss
    if not isinstance(target, Tensor):
        raise BadInput(f"data: its target is {kind_of(target)}; torch's engine takes a tensor")
    return target


def _example(spec: TensorSpec, gradient: bool, device: torch.device) -> Tensor:
    gradient = gradient and spec.dtype.is_floating_point
    return torch.zeros(spec.shape, dtype=spec.dtype, requires_grad=gradient, device=device)


def _actions(lowered: LoweredRun) -> dict[int, list[_Action | None]]:
    """Return one mini-batch as torch writes it: every rank's forwards and backwards in the plan's order."""
    whole = _ComputationType.BACKWARD_INPUT if lowered.program.split else _ComputationType.FULL_BACKWARD
    kinds = {"F": _ComputationType.FORWARD, "B": whole, "W": _ComputationType.BACKWARD_WEIGHT}
    actions: dict[int, list[_Action | None]] = {}
    for lane in lowered.program.lanes:
        if lane.device is not None:
            works = [(lowered.program.operations[step.position], step.microbatch) for step in lane.steps]
            actions[lowered.devices.index(lane.device)] = [
                _Action(work.stage, kinds[work.kind], microbatch) for work, microbatch in works
            ]
    return actions
