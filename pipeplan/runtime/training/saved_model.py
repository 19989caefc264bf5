"""How is the trained model's state written? Under its names in the whole model, by rank 0, from what all ranks have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ...files.text import replaced
from ..exchange.collective import Specs, Take, handed_over
from ..model.state_file import SAFETENSORS, SafetensorsWriter


def save_model(number: int, trained: Mapping[str, Tensor], first_names: Mapping[str, str], path: Path) -> None:
    """Write everybody's ``trained`` to ``path``, all ranks together; ``first_names`` are also there by other names.

    To a safetensors file each tensor is written when it comes, so that rank ``number`` 0 never has the whole model;
    for one of torch's all of them are there at once.
    """
    names: dict[str, list[str]] = {}
    for other, first in first_names.items():
        names.setdefault(first, [first]).append(other)
    whole: dict[str, Tensor] = {}

    def keeping(_: Specs) -> Take:
        return whole.__setitem__

    def writing(specs: Specs) -> Take:
        every = {name: spec for first, spec in specs.items() for name in names.get(first, [first])}
        writer = SafetensorsWriter(stack.enter_context(replaced(str(path))), every)
        return lambda name, tensor: writer.put(names.get(name, [name]), tensor)

    with ExitStack() as stack:
        handed_over(number, trained, writing if path.suffix == SAFETENSORS else keeping)
    if number == 0 and path.suffix != SAFETENSORS:
        again = {name: whole[first] for name, first in first_names.items()}
        with replaced(str(path)) as file:
            torch.save(again | whole, file)
