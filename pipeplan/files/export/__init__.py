"""How does another runtime say this plan? What one of those that people already use can't express is refused.

Every writer takes what is to be exported and returns the texts of files; what a target can express is a row of
``check.targets``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...check.targets import CannotExpress
from ...plan import Plan, Stage
from .asked import Asked
from .deepspeed import deepspeed
from .megatron import megatron, megatron_bridge
from .torch_pipelining import torch_csv, torch_split, torch_stages
from .torchtitan import torchtitan

__all__ = ["WRITERS", "Asked", "CannotExpress", "Writer", "notes"]


@dataclass(frozen=True, slots=True)
class Writer:
    """A registered writer: ``write`` gives the text, ``what`` it is and where the runtime reads it.

    ``target`` is the row of ``check.targets`` that it writes for. ``beside`` gives the text of a file that belongs
    beside the first, and how its name ends. ``schedule`` says whether the order of the operations is part of it; the
    others take the split alone and run a schedule of their own.
    """

    write: Callable[[Asked], str]
    what: str
    target: str
    beside: tuple[str, Callable[[Asked], str]] | None = None
    schedule: bool = False


WRITERS: dict[str, Writer] = {
    "megatron": Writer(megatron, "--pipeline-model-parallel-layout and what goes with it for Megatron-LM", "megatron"),
    "megatron-bridge": Writer(megatron_bridge, "the same as Python for Megatron-Bridge", "megatron"),
    "torchtitan": Writer(
        torchtitan, "module_fqns_per_model_part and what goes with it as torchtitan's flags", "torchtitan"
    ),
    "deepspeed": Writer(deepspeed, "a PipelineModule with the plan's stages for DeepSpeed, as Python", "deepspeed"),
    "torch-split": Writer(torch_split, "split_spec and schedule for torch.distributed.pipelining, as Python", "torch"),
    "torch-csv": Writer(
        torch_csv,
        "schedule CSV for torch.distributed.pipelining's _PipelineScheduleRuntime, and the split beside it",
        "torch",
        beside=(".py", torch_stages),
        schedule=True,
    ),
}


def notes(plan: Plan, name: str, stages: Sequence[Stage]) -> list[str]:
    """Return what a user should know beside the exported text: what the target will do in its own way."""
    found = []
    if not WRITERS[name].schedule and not plan.policy.drains:
        found.append(
            f"{name} drains the pipeline before every update; the plan's weights {plan.policy.weights} and its "
            f"period hold only where they are kept so (plan with --for {WRITERS[name].target})"
        )
    if tuple(stages) != plan.allocation.stages:
        found.append(f"the schedule needs {len(stages)} stages of its own; they are exported, not the plan's")
    order = [device for group in dict.fromkeys(stage.devices for stage in stages) for device in group]
    if order != list(range(len(order))):
        found.append(f"rank i is GPU {', '.join(map(str, order))} of the platform, for i from 0 on")
    elif len(order) < len(plan.platform):
        found.append(
            f"{len(order)} ranks; {len(plan.platform) - len(order)} of the {len(plan.platform)} GPUs have none"
        )
    return found
