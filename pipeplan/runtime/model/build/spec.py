"""Which model does a run train, and on what: names as the user typed them, and what they name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from ....errors import BadInput
from ....registry import Late
from ....zoo import CORES, HUGGING_FACE, ZOO, load, running_again
from ..contract import Data
from ..user_code import said, user_code

TENSOR_PLAN = ",tensor_plan="  # behind the name of a user's function, and before the plan's
hugging_face = Late("runtime.model.build.hugging_face:named")
group_of, exchange_by = Late("zoo.text.rank_part:Group"), Late("zoo.text.exchanges:exchange_by")
part_by = Late("runtime.model.build.tensor_plan:part_by")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to train and on what, as the user typed it; every rank finds both for itself.

    ``build`` is a name of the zoo (with options: ``gpt-tiny,blocks=8``, or ``zoo:gpt-tiny``) or ``module:function`` of
    the model contract, or ``hf:CONFIG`` of a transformers model; ``data`` is ``module:function`` of the data contract.
    None stands for the data that belongs to a zoo model, or that fits a transformers one. Where ``ranks`` run each
    layer together it is the part of that at ``place``.
    """

    build: str
    data: str | None = None
    ranks: int = 1
    place: int | None = None

    @property
    def whole(self) -> ModelSpec:
        """All of it."""
        return replace(self, ranks=1, place=None)

    @property
    def selective(self) -> ModelSpec:
        """The same whose backwards run the cores of attention again; BadInput for what has none of its own."""
        again = running_again(self.build) if self.of_zoo or self.build.startswith(HUGGING_FACE) else None
        if again is None:
            ways = " or ".join(f"{name} with {how}" for name, how in zip(("a zoo's GPT", "hf:"), CORES, strict=True))
            raise BadInput(f"model {self.build}: the plan recomputes attention's core, which run does of {ways} alone")
        return replace(self, build=again)

    def exchanges_by(self, does: Callable[[Tensor, str], Tensor]) -> None:
        """Let parts that are built in this process exchange by what ``does`` returns for a tensor and a kind."""
        exchange_by(does)

    @property
    def of_zoo(self) -> bool:
        """Whether ``build`` can name nothing but a model of the zoo, so that it may come from a file."""
        return self.build.startswith(ZOO) or ":" not in self.build

    def check(self) -> None:
        """Raise BadInput for what can be seen to be missing or malformed without running code of the user's."""
        if self.of_zoo or self.build.startswith(HUGGING_FACE):
            builder_of(self)
        else:
            for text in self.build.split(TENSOR_PLAN):
                _parts(text)
            if self.data is None:
                raise BadInput(
                    f"model {self.build}: needs data to train on; name a data(index, seed) as module:function"
                )
        if self.data is not None:
            _parts(self.data)


def builder_of(spec: ModelSpec) -> Any:
    """Return the zoo model, the transformers model, or the user's function, that builds the model of ``spec``."""
    if spec.build.startswith(HUGGING_FACE):
        return hugging_face(spec.build.removeprefix(HUGGING_FACE), group_of(spec.ranks, place=spec.place))
    if not spec.of_zoo:
        return _parted(spec)
    build = load(spec.build.removeprefix(ZOO))
    if spec.place is None:
        return build
    if not hasattr(build.config, "part"):
        raise BadInput(f"model {spec.build}: cannot be split by run")
    return build.with_options(tensor=spec.ranks, part=spec.place)


def _parted(spec: ModelSpec) -> Callable[..., Any]:
    """Return the user's function, or one that builds the part of a rank as the user's tensor plan has it."""
    said, _, ranks = spec.build.partition(",tensor=")
    name, _, plan = said.partition(TENSOR_PLAN)
    build: Callable[..., Any] = find(name)
    group = group_of(int(ranks or 1) if spec.place is None else spec.ranks, place=spec.place)
    if group.ranks == 1:
        return build
    if not plan:
        raise BadInput(f"model {name}: --tensor-plan must name the matrices to split")

    @wraps(build)
    def part(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        part_by(built[0] if isinstance(built, tuple) else built, find(plan)(), plan, group)
        return built

    return part


def brings_data(build: Any) -> bool:
    """Whether what builds a model is no function of the user's, so that it takes a seed and has data that fit."""
    return getattr(type(build), "brings_data", False) is True


def data_of(spec: ModelSpec, batch: int) -> Data:
    """Return the data of ``spec`` in microbatches of ``batch`` samples; BadInput when nothing names any."""
    if spec.data is not None:
        return named_data(spec.data, batch)
    spec.check()
    build = builder_of(spec)
    assert brings_data(build), "any other model needs data of its own"
    return build.data(batch)  # type: ignore[no-any-return]  # as the zoo's and transformers' models do


def named_data(text: str, batch: int) -> Data:
    """Return what the user's ``text`` names: data(index, seed), or a loader of microbatches of ``batch`` samples."""
    from ...data.loader import data_from, is_data

    return data_from(find(text, is_data), text, batch)


def find(text: str, serves: Callable[[Any], bool] = callable) -> Any:
    """Import what ``module:function`` names, from the working folder first; BadInput if there is no such function.

    What can't be called is refused unless it ``serves``.

    CodeFailed when the module cannot be imported for what is in it.
    """
    module_name, attribute = _parts(text)
    with user_code(text), _working_folder_first():
        try:
            found = module = import_module(module_name)
        except ImportError as error:
            raise BadInput(f"{text}: {said(error)}") from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise BadInput(f"{text}: module {module.__name__} has no {attribute!r}")
            found = getattr(found, part)
    if not (callable(found) or serves(found)):
        raise BadInput(f"{text}: is a {type(found).__name__}, which cannot be called")
    return found


def _parts(text: str) -> tuple[str, str]:
    module, _, attribute = text.partition(":")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise BadInput(
            f"{text}: {module!r} is a file; name what Python imports, from the working folder: "
            f"{dotted}:{attribute or 'function'}"
        )
    if not (module and attribute):
        raise BadInput(f"{text!r} is not of the form module:function")
    return module, attribute


@contextmanager
def _working_folder_first() -> Iterator[None]:
    """Import from the working folder first within the context, and from then on last: there it shadows no library."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # what was imported may have changed the path
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
