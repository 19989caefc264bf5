"""Which model does a run train, and on what: names as the user typed them, and what they name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from ...errors import BadInput
from ...zoo import load
from ...zoo.model import Model

Data = Callable[[int, int], tuple[Tensor, Tensor]]  # (microbatch index, seed) -> (input, target)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to train and on what, as the user typed it; every rank finds both for itself.

    ``build`` is a name of the zoo (with options: ``gpt-tiny,blocks=8``) or ``module:function`` of the model contract,
    ``data`` is ``module:function`` of the data contract; None stands for the data that belongs to a zoo model.
    """

    build: str
    data: str | None = None


def builder_of(spec: ModelSpec) -> Any:
    """Return the zoo model, or the user's function, that builds the model of ``spec``."""
    return find(spec.build) if ":" in spec.build else load(spec.build)


def data_of(spec: ModelSpec, batch: int) -> Data:
    """Return the data of ``spec`` in microbatches of ``batch`` samples; BadInput when nothing names any."""
    if spec.data is not None:
        return find(spec.data)  # type: ignore[no-any-return]  # callable, as find checks
    build = builder_of(spec)
    if isinstance(build, Model):
        return build.data(batch)
    raise BadInput(f"model {spec.build}: needs data to train on; name a data(index, seed) as module:function")


def find(text: str) -> Any:
    """Import what ``module:function`` names, also from the working directory; BadInput if there is no such function."""
    module_name, _, attribute = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise BadInput(f"{text}: {error}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadInput(f"{text}: module {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise BadInput(f"{text}: is a {type(found).__name__}, which cannot be called")
    return found
