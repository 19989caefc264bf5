"""How is the model of a run built, on every rank alike? From a list of layers, or a module that is traced.

A rank makes the weights of its own stages alone: the whole model is promised to it (:mod:`..deferred`), and its part is
what it would have of the whole model with that seed, to the last bit.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ....errors import BadInput, PipeplanError
from ....registry import Late
from ...device import CPU
from ..autocast import Autocast
from ..contract import Data, Samples, boundaries_of, built_by, example_of, is_whole, sample_of
from ..deferred import SMALL, Deferred, NotDeferred, parameter_like
from ..loaded import LOSS_ROOT, LoadedModel, ModelLayer, with_loss_root, with_shards
from ..network import Loss, chain_network, kind_of, loss_layer, trained_loss
from ..structure import modules_in, substitute, tensors_in, tensors_of
from ..user_code import said
from .spec import ModelSpec, brings_data, builder_of, data_of

traced_model = Late("runtime.model.trace.traced:traced_model")
read_state = Late("runtime.model.build.state_file:read_state")


def load_model(
    spec: ModelSpec,
    batch: int,
    seed: int,
    device: torch.device = CPU,
    promised: Deferred | None = None,
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
    autocast: Autocast | None = None,
) -> LoadedModel:
    """Find and build the model of ``spec`` for microbatches of ``batch`` samples; BadInput says what is wrong with it.

    ``seed`` is given to a zoo model, and set before any other is built, so that all ranks build the same one. The
    layers stay where they are built; the pass that sizes what lies between them visits ``device``, layer by layer.
    Large tensors are ``promised``, if that is given; then a folder's weights are left for :func:`load_weights`.
    What has to be traced is traced in ``training``, or else in evaluation, and as if converted to ``dtype``. Layers run
    under ``autocast``.
    """
    build = builder_of(spec)
    data = data_of(spec, batch)
    apart = promised is not None and promised.puts_off and brings_data(build)
    source: Path | None = getattr(build, "weights", None) if apart else None
    torch.manual_seed(seed)
    with nullcontext() if promised is None else promised:
        make = build if source is None else replace(build, weights=None)
        built = built_by(make, batch, spec.build, **({"seed": seed} if brings_data(build) else {}))
    if promised is not None:
        modules = modules_in((built.layers, built.loss))
        promised.adopt(modules)
        promised.settle([*tensors_of(modules), *tensors_in(built.example)])
    example = built.example if built.example is not None else example_of(built, data)[0]
    if is_whole(built.layers):
        model: LoadedModel = traced_model(built.layers, example, built.loss, data, device, training, dtype, autocast)
        model = with_shards(model)
        return model if source is None else _from(source, model, build.dtype)
    assert built.loss is not None, "the contract wants one of layers"
    return with_shards(chain_model(built.layers, example, built.loss, data, device, autocast))


def _from(source: Path, model: LoadedModel, dtype: torch.dtype | None) -> LoadedModel:
    """Return ``model`` with the folder whose files have its state, in ``dtype``; NotDeferred if only its author's own
    way makes that of them."""
    try:
        state = _matched(model, source)
    except BadInput as error:
        raise NotDeferred(str(error)) from error
    types = {x.dtype for x in state.values() if isinstance(x, Tensor) and x.is_floating_point()}
    if types - {dtype}:
        raise NotDeferred(f"{source}: has other types of weights than its config says")
    return replace(model, source=source)


def chain_model(
    layers: Any,
    example_input: Any,
    loss: Loss,
    data: Data,
    device: torch.device = CPU,
    autocast: Autocast | None = None,
) -> LoadedModel:
    """Return a list of layers, or an ``nn.Sequential``, as a model; BadInput if it is malformed."""
    network = chain_network(layers, example_input, autocast)
    for code in network.layers:
        code.module.train()
    keys = list(layers._modules) if isinstance(layers, nn.Sequential) else list(map(str, range(len(layers))))
    roots = tuple((f"{key}.", code.module) for key, code in zip(keys, network.layers, strict=True))
    boundaries = boundaries_of([code.module for code in network.layers], network.inputs[0].to(device), autocast)
    own = [
        ModelLayer(code.name, code.module, (code,), {name: f"{prefix}{name}" for name in _entries(code.module)})
        for (prefix, _), code in zip(roots, network.layers, strict=True)
    ]
    last, trained, names = loss_layer(network, loss), trained_loss(loss), {}
    if trained is not None:
        roots = with_loss_root(roots, trained)
        names = {name: f"{LOSS_ROOT}{name}" for name in _entries(trained)}
    return LoadedModel(
        chain=True,
        inputs=1,
        layers=(*own, ModelLayer(last.name, last.module, (last,), names)),
        specs=dict(enumerate(boundaries)),
        trained=frozenset(i for i, spec in enumerate(boundaries) if spec.differentiable),
        loss=loss,
        data=Samples(data, partial(_entering, loss)),
        roots=roots,
        first_names=_first_names(roots),
        notes=network.notes,
    )


def _entering(loss: Loss, index: int, given: Any) -> tuple[tuple[Tensor, ...], Any]:
    x, target = sample_of(given, loss)
    return (x,), target


def _entries(module: nn.Module) -> set[str]:
    """Return the names of the state of ``module``, and of weights that are no part of it."""
    return {*module.state_dict(), *(name for name, _ in module.named_parameters(remove_duplicate=False))}


def _first_names(roots: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    first: dict[nn.Parameter, str] = {}
    others: dict[str, str] = {}
    for prefix, module in roots:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, f"{prefix}{name}") != f"{prefix}{name}":
                others[f"{prefix}{name}"] = first[parameter]
    return others


def load_weights(model: LoadedModel, path: str | Path) -> None:
    """Give ``model`` the state in a file, an index of files, or a folder (:mod:`.state_file`), by its names.

    What ``model`` has no values of is passed over. BadInput names the first tensor that is missing, too many, of
    another shape, or, of those that are one weight in the model, unlike the other.
    """
    state = _matched(model, path)
    with_values = {f"{prefix}{name}" for prefix, name, x in _states(model) if not isinstance(x, FakeTensor)}
    for name, other in model.first_names.items():
        if name in with_values and not torch.equal(state[name], state[other]):
            raise BadInput(f"{path}: {other!r} and {name!r} differ, and are one weight in the model")
    versions = getattr(state, "_metadata", None) or versions_of(model)  # a file without them has the model's own
    for prefix, module in model.roots:
        try:
            own = module.state_dict()
            given = OrderedDict((name, state[f"{prefix}{name}"]) for name in own)
            paths = own._metadata  # type: ignore[attr-defined]  # as torch keeps it
            known = {path: versions.get(f"{prefix}{path}".rstrip("."), {}) for path in paths}
            given._metadata = known  # type: ignore[attr-defined]
            module.load_state_dict(given)
        except Exception as error:  # whatever a module's own way to load raises
            raise BadInput(f"{path}: cannot be loaded: {str(error).partition(chr(10))[0]}") from error


def versions_of(model: LoadedModel) -> dict[str, dict[str, Any]]:
    """Return the versions of the modules' states by their paths, as torch keeps them beside a state (``_metadata``)."""
    return {
        f"{prefix}{path}".rstrip("."): dict(version)
        for prefix, module in model.roots
        for path, version in module.state_dict()._metadata.items()  # type: ignore[attr-defined]  # as torch keeps it
    }


def _states(model: LoadedModel) -> Iterator[tuple[str, str, Any]]:
    for prefix, module in model.roots:
        yield from ((prefix, name, x) for name, x in module.state_dict().items())


def _matched(model: LoadedModel, path: str | Path) -> dict[str, Any]:
    """Return the state in ``path`` with all names of ``model`` and no others; BadInput if it is another model's."""
    state: dict[str, Any] = read_state(path)
    wanted = {f"{prefix}{name}": x for prefix, name, x in _states(model)}
    first = {name: model.first_names.get(name, name) for name in wanted}
    there = {first.get(name, name): name for name in reversed(list(state))}  # files may leave out what is there already
    for name in wanted:
        if name not in state and first[name] not in there:
            raise BadInput(f"{path}: has no {name!r}, which the model has")
    extra = next((name for name in state if name not in wanted), None)
    if extra is not None:
        raise BadInput(f"{path}: has {extra!r}, which the model doesn't have")
    state |= {name: state[there[first[name]]] for name in wanted.keys() - state.keys()}
    for name, x in wanted.items():
        found = state[name]
        if name in model.shards and isinstance(found, Tensor):
            found = state[name] = model.shards[name].own_of(found)
        if isinstance(x, Tensor) and (not isinstance(found, Tensor) or found.shape != x.shape):
            shape = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else kind_of(found)
            raise BadInput(f"{path}: {name!r} has {shape}; the model's has shape {tuple(x.shape)}")
    return state


# --- the part of a rank ----------------------------------------------------------------------------------------------


class OwnPart:
    """Builds the model of ``spec`` on one rank, as :func:`load_model` does, with its ``options``; of large tensors
    :meth:`filled` makes those of its own part. ``small`` bytes is what isn't large."""

    def __init__(
        self, spec: ModelSpec, batch: int, seed: int, device: torch.device = CPU, small: int = SMALL, **options: Any
    ) -> None:
        self._load: Callable[[Deferred], LoadedModel] = partial(load_model, spec, batch, seed, device, **options)
        self._name, self._promised = spec.build, Deferred(small)

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
        entries = [(x.names, x.module.state_dict(keep_vars=True)) for x in model.layers if x.module in own]
        known = [(names[k], x) for names, state in entries for k, x in state.items() if k in names]
        known += unused.items()
        state = {id(x) for _, x in known} if given else set()
        blank = [x for x in mine if promised.is_blank(x) and id(x) not in state]
        if blank:
            raise BadInput(f"model: {_without_values(blank[0], known)}")
        value = promised.values([x for x in mine if id(x) not in state], [x for x in mine if id(x) in state])

        @cache  # which keeps x, so that no other is taken for it
        def filling(x: Tensor) -> Tensor:
            found = value(x)
            return x if found is x else parameter_like(x, found)

        substitute([*own, *(root for _, root in model.roots)], filling)
        return replace(model, unused=dict(model.unused) | {name: filling(x) for name, x in unused.items()})


def _without_values(blank: Tensor, known: Iterable[tuple[str, Tensor]]) -> str:
    name = next((name for name, x in known if x is blank), None)
    if name is None:
        return f"a tensor of shape {tuple(blank.shape)} is on meta, without values, and in no file, as it is no state"
    return f"{name} is on meta, without values; name a file that has them by --load"
