"""How is the trained model's state written? Under its names in the whole model, by rank 0, from what all ranks have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ....files.text import replaced
from ...exchange.collective import Specs, Take, handed_over
from ...exchange.transport import Group
from ...model.build.hugging_face import CONFIG, HuggingFace
from ...model.build.spec import ModelSpec, builder_of
from ...model.build.state_file import SAFETENSORS, SafetensorsWriter
from ...model.loaded import LoadedModel


def save_config(path: Path, spec: ModelSpec) -> None:
    """Write the config of a transformers model beside a state with the name by which its library looks for one."""
    build = builder_of(spec) if path.name == f"model{SAFETENSORS}" else None
    if isinstance(build, HuggingFace):
        build.config.architectures = [build.kind.__name__]
        with replaced(str(path.with_name(CONFIG))) as file:
            file.write(build.config.to_json_string().encode())


def save_model(number: int, trained: Mapping[str, Tensor], model: LoadedModel, path: Path, patient: Group) -> None:
    """Write everybody's ``trained`` to ``path``, all ranks of ``patient`` together; what stands in ``model`` more than
    once is there by all of its names.

    To a safetensors file each tensor is written when it comes, so that rank ``number`` 0 never has the whole model;
    for one of torch's all of them are there at once.
    """
    names: dict[str, list[str]] = {}
    for other, first in model.first_names.items():
        names.setdefault(first, [first]).append(other)
    whole: dict[str, Tensor] = {}

    def keeping(_: Specs) -> Take:
        return whole.__setitem__

    def writing(specs: Specs) -> Take:
        every = {name: spec for first, spec in specs.items() for name in names.get(first, [first])}
        writer = SafetensorsWriter(stack.enter_context(replaced(str(path))), every)
        return lambda name, tensor: writer.put(names.get(name, [name]), tensor)

    with ExitStack() as stack:
        handed_over(number, trained, writing if path.suffix == SAFETENSORS else keeping, patient)
    if number == 0 and path.suffix != SAFETENSORS:
        again = {name: whole[first] for name, first in model.first_names.items()}
        state = OrderedDict(again | whole)
        state._metadata = model.versions  # type: ignore[attr-defined]  # as torch keeps it
        with replaced(str(path)) as file:
            torch.save(state, file)
