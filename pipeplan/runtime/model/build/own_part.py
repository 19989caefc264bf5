"""How does a rank come to the weights of its own stages alone? The whole model is promised to it, and its part is made.

What it gets is what it would have of the whole model with that seed, to the last bit (:mod:`.deferred`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ....errors import BadInput, PipeplanError
from ...device import CPU
from ..autocast import Autocast
from ..deferred import SMALL, Deferred, NotDeferred, parameter
from ..loaded import LoadedModel
from ..structure import substitute, tensors_of
from ..user_code import said
from .loading import load_model
from .spec import ModelSpec


class OwnPart:
    """Builds the model of ``spec`` on one rank, as :func:`load_model` does; of large tensors :meth:`filled` makes those
    of its own part. ``small`` bytes is what isn't large."""

    def __init__(
        self,
        spec: ModelSpec,
        batch: int,
        seed: int,
        device: torch.device = CPU,
        small: int = SMALL,
        training: bool = True,
        dtype: torch.dtype | None = None,
        autocast: Autocast | None = None,
    ) -> None:
        self._load: Callable[[Deferred], LoadedModel] = lambda promised: load_model(
            spec, batch, seed, device, promised, training=training, dtype=dtype, autocast=autocast
        )
        self._name = spec.build
        self._promised = Deferred(small)

    def load(self) -> LoadedModel:
        """Return the model with large tensors promised; whole, with a note, where it cannot be built so."""
        try:
            return self._load(self._promised)
        except Exception as error:
            if not self._promised.promises and not isinstance(error, NotDeferred):
                raise  # as it does without promises
            why = str(error) if isinstance(error, PipeplanError | NotDeferred) else said(error)
        return self._whole(why)

    def _whole(self, why: str) -> LoadedModel:
        self._promised.settle()
        self._promised = Deferred(sys.maxsize)
        model = self._load(self._promised)
        note = f"{self._name} is built whole on every rank, which takes host memory for all of it: {why}"
        return replace(model, notes=(*model.notes, note))

    def filled(
        self,
        model: LoadedModel,
        own: Callable[[LoadedModel], Sequence[nn.Module]],
        fit: Callable[[LoadedModel], LoadedModel],
        given: bool = False,
    ) -> LoadedModel:
        """Return ``model``, which is what ``fit`` made of that of :meth:`load`, with values in its modules ``own``.

        With ``given`` all of its state will come from a file, so there need only be room for it. BadInput for what has
        no values then.
        """
        try:
            return self._filled(model, own(model), given)
        except NotDeferred as error:
            why = str(error)
        model = fit(self._whole(why))
        return self._filled(model, own(model), given)

    def _filled(self, model: LoadedModel, own: Sequence[nn.Module], given: bool) -> LoadedModel:
        promised, self._promised = self._promised, Deferred(sys.maxsize)
        if not promised.promises:
            return model
        unused = model.unused if model.layers[0].module in own else {}  # which goes with the first layer
        mine = [*tensors_of(own), *unused.values()]
        if any(isinstance(x, FakeTensor) and not promised.holds(x) for x in mine):
            raise NotDeferred("its trace makes constants of values that only a whole model has")
        known = [*_state_of(model, own), *unused.items()]
        state = {id(x) for _, x in known} if given else set()
        blank = [x for x in mine if promised.is_blank(x) and id(x) not in state]
        if blank:
            raise BadInput(f"model: {_without_values(blank[0], known)}")
        value = promised.values([x for x in mine if id(x) not in state], [x for x in mine if id(x) in state])
        made: dict[int, Tensor] = {}

        def filling(x: Tensor) -> Tensor:
            if id(x) not in made:
                found = value(x)
                made[id(x)] = x if found is x else parameter(x, found)
                kept.append(x)
            return made[id(x)]

        kept: list[Tensor] = []  # so that no other gets the number of one
        substitute([*own, *(root for _, root in model.roots)], filling)
        return replace(model, unused=dict(model.unused) | {name: filling(x) for name, x in unused.items()})


def _state_of(model: LoadedModel, own: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield what of the modules ``own`` is in the model's state, with its name there."""
    mine = set(map(id, own))
    for layer in model.layers:
        if id(layer.module) in mine:
            entries = layer.module.state_dict(keep_vars=True).items()
            yield from ((layer.names[key], x) for key, x in entries if key in layer.names and isinstance(x, Tensor))


def _without_values(blank: Tensor, known: Iterable[tuple[str, Tensor]]) -> str:
    name = next((name for name, x in known if x is blank), None)
    if name is None:
        return f"a tensor of shape {tuple(blank.shape)} is on meta, without values, and in no file, as it is no state"
    return f"{name} is on meta, without values; name a file that has them by --load"
