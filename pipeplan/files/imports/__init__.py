"""Which stages, schedule and batch do the arguments say that somebody trains with? A reader for each target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import BadInput
from .imported import Imported, Source
from .megatron import megatron
from .shell import read_options
from .torchtitan import torchtitan

__all__ = ["READERS", "Imported", "Reader", "Source", "read_options"]


@dataclass(frozen=True, slots=True)
class Reader:
    """A registered reader, and ``what`` it reads. Its name is that of its row in ``check.targets``."""

    read: Callable[[Source], Imported]
    what: str
    own: tuple[str, ...]  # how options begin of which a file has at least one
    tensor: str = ""  # the option that says how many GPUs run each layer together

    def __call__(self, source: Source) -> Imported:
        """Return what a file says; BadInput where none of its options is one that is read."""
        if not any(name.startswith(self.own) for name in source.options.given):
            wanted = ", ".join(f"--{x}.." if x.endswith((".", "-")) else f"--{x}" for x in self.own)
            raise BadInput(f"{source.path}: isn't {self.what}: it has no option such as {wanted}")
        together = source.options.count(self.tensor, 1)
        if together != source.chain.tensor:
            raise BadInput(f"{source.path}: --{self.tensor} is {together}, the profile's degree {source.chain.tensor}")
        return self.read(source)


READERS: dict[str, Reader] = {
    "megatron": Reader(
        megatron,
        "Megatron-LM's arguments, with or without --pipeline-model-parallel-layout",
        ("num-layers", "pipeline-model-parallel-", "micro-batch-size", "global-batch-size"),
        "tensor-model-parallel-size",
    ),
    "torchtitan": Reader(
        torchtitan,
        "torchtitan's flags or TOML, with or without module_fqns_per_model_part",
        ("parallelism.",),
        "parallelism.tensor-parallel-degree",
    ),
}
