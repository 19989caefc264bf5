"""Which stages, schedule and batch do the arguments say that somebody trains with? A reader for each target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


READERS: dict[str, Reader] = {
    "megatron": Reader(megatron, "Megatron-LM's arguments, with or without --pipeline-model-parallel-layout"),
    "torchtitan": Reader(torchtitan, "torchtitan's flags, with or without module_fqns_per_model_part"),
}
