"""How does another runtime say a plan, and what do the arguments say that somebody trains with? A row for each.

What a runtime cannot express is refused. Writers take what is to be exported and return the texts of files; what a
target can express is a row of ``check.targets``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...check.units import CannotExpress
from ...errors import BadInput
from ...plan import Plan, Stage
from ...registry import Late
from .asked import Asked, Imported, Source, parsed_renames, placed
from .options import Options, read_options

__all__ = ["READERS", "WRITERS", "Asked", "CannotExpress", "Imported", "Reader", "Source", "Writer", "notes",
           "parsed_renames", "placed", "read_options"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Writer:
    """A registered writer: ``write`` gives the text.

    ``target`` is the row of ``check.targets`` that it writes for. ``beside`` gives the text of a file that belongs
    beside the first, and how its name ends. ``schedule`` says whether the order of the operations is part of it; the
    others take the split alone and run a schedule of their own.
    """

    write: Callable[[Asked], str]
    target: str
    beside: tuple[str, Callable[[Asked], str]] | None = None
    schedule: bool = False


WRITERS: dict[str, Writer] = {
    "megatron": Writer(Late("files.frameworks.megatron:megatron"), "megatron"),
    "megatron-bridge": Writer(Late("files.frameworks.megatron:megatron_bridge"), "megatron"),
    "torchtitan": Writer(Late("files.frameworks.torchtitan:torchtitan"), "torchtitan"),
    "deepspeed": Writer(Late("files.frameworks.deepspeed:deepspeed"), "deepspeed"),
    "torch-split": Writer(Late("files.frameworks.torch_pipelining:torch_split"), "torch"),
    "torch-csv": Writer(
        Late("files.frameworks.torch_pipelining:torch_csv"),
        "torch",
        beside=(".py", Late("files.frameworks.torch_pipelining:torch_stages")),
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


@dataclass(frozen=True, slots=True)
class Reader:
    """A registered reader, and ``what`` it reads. Its name is that of its row in ``check.targets``."""

    read: Callable[[Source], Imported]
    what: str
    own: tuple[str, ...]  # how options begin of which a file has at least one
    degrees: Mapping[str, str]  # the options that say how many GPUs run each layer together, by a chain's degrees
    by_heads: Callable[[Options], bool] = lambda options: False  # whether ranks of a sequence share it so in attention
    selective: Callable[[Options], bool] = lambda options: False  # whether the cores of attention run again

    def __call__(self, source: Source) -> Imported:
        """Return what a file says; BadInput where none of its options is one that is read."""
        if not any(name.startswith(self.own) for name in source.options.given):
            wanted = ", ".join(f"--{x}.." if x.endswith((".", "-")) else f"--{x}" for x in self.own)
            raise BadInput(f"{source.path}: isn't {self.what}: it has no option such as {wanted}")
        chain = source.chain
        for degree, name in self.degrees.items():
            if (together := source.options.count(name, 1)) != getattr(chain, degree):
                raise BadInput(f"{source.path}: --{name} is {together}, the profile's degree {getattr(chain, degree)}")
        return self.read(source)


READERS: dict[str, Reader] = {
    "megatron": Reader(
        Late("files.frameworks.megatron:read_megatron"),
        "Megatron-LM's arguments, with or without --pipeline-model-parallel-layout",
        ("num-layers", "pipeline-model-parallel-", "micro-batch-size", "global-batch-size"),
        {
            "tensor": "tensor-model-parallel-size",
            "context": "context-parallel-size",
            "experts": "expert-model-parallel-size",
        },
        Late("files.frameworks.megatron:by_heads"),
        Late("files.frameworks.megatron:selective"),
    ),
    "torchtitan": Reader(
        Late("files.frameworks.torchtitan:read_torchtitan"),
        "torchtitan's flags or TOML, with or without module_fqns_per_model_part",
        ("parallelism.",),
        {
            "tensor": "parallelism.tensor-parallel-degree",
            "context": "parallelism.context-parallel-degree",
            "experts": "parallelism.expert-parallel-degree",
        },
    ),
}
