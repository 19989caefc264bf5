"""The model contract: is what a build function returned well formed, what lies between its layers, and what data do
they train on?"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import BadInput
from .autocast import Autocast, autocasting
from .deferred import mode_of
from .network import Loss, TensorSpec, kind_of
from .places import buffers_kept, resident
from .structure import compact, mapped, placed, places_in, refilling, tensors_in, tensors_of
from .trace.adapted import arguments_of, run_uncompiled
from .user_code import defined_at, user_code

Data = Callable[[int, int], Any]  # (microbatch index, seed) -> what a model trains on, often (input, target)


def boundaries_of(
    layers: Sequence[nn.Module], example_input: Tensor, autocast: Autocast | None = None
) -> list[TensorSpec]:
    """Return the tensors between layers, from one pass in evaluation mode, which leaves no trace in the modules.

    It runs where the example is; a layer that isn't there comes for its part alone. Where layers have tensors without
    values, it runs without any. Operations are cast as ``autocast`` says.
    """
    x, promised = example_input, mode_of(tensors_of(layers))
    if promised is not None:
        with promised:
            x = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    specs = [TensorSpec(tuple(x.shape), x.dtype)]
    training = [(part, part.training) for module in layers for part in module.modules()]
    for module in layers:
        module.eval()
    quietly = torch.no_grad(), torch.random.fork_rng(devices=[]), buffers_kept(layers), run_uncompiled(layers)
    with ExitStack() as stack:
        for context in (promised or nullcontext(), *quietly, autocasting(autocast, x.device)):
            stack.enter_context(context)
        for index, module in enumerate(layers):
            with user_code(f"layers[{index}]: failed on {specs[-1]}"), resident(module, str(x.device), release=True):
                x = module(x)
            if not isinstance(x, Tensor):
                raise BadInput(f"layers[{index}]: returned a {type(x).__name__}; a layer takes and returns one tensor")
            specs.append(TensorSpec(tuple(x.shape), x.dtype))
    for part, mode in training:
        part.training = mode
    return specs


def is_whole(layers: Any) -> bool:
    """Whether ``layers`` is a model as one module, which has to be traced, and not its layers."""
    return isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Samples:
    """What a model trains on, as ``source(index, seed)`` gives it.

    ``entering(index, given)`` makes the network's inputs and the target of that.
    """

    source: Data
    entering: Callable[[int, Any], tuple[tuple[Tensor, ...], Any]]

    def __call__(self, index: int, seed: int) -> tuple[tuple[Tensor, ...], Any]:
        """Return inputs and target of a microbatch."""
        return self.enter(index, self.source(index, seed))

    def enter(self, index: int, given: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return inputs and target of what was ``given`` for a microbatch; none keeps more memory than its own."""
        inputs, target = self.entering(index, given)
        return tuple(map(compact, inputs)), mapped(compact, target)

    def then(self, change: Callable[[Tensor], Tensor]) -> Samples:
        """Return the same with inputs changed."""

        def changed(index: int, given: Any) -> tuple[tuple[Tensor, ...], Any]:
            inputs, target = self.enter(index, given)
            return tuple(map(change, inputs)), target

        return Samples(self.source, changed)


@dataclass(frozen=True)
class Built:
    """What a build function returned: the model, or its ``layers``, an example input and the loss.

    Without ``example`` one comes from the data, without ``loss`` the model returns it.
    """

    layers: Any
    example: Any
    loss: Loss | None


def built_by(build: Callable[..., Any], batch: int, what: str = "build", **options: Any) -> Built:
    """Call ``build(batch)`` and return what it made; BadInput if that isn't what a build function is to return.

    One without parameters is called as it is, and leaves the example to the data. CodeFailed, starting with ``what``,
    when it fails.
    """
    if isinstance(build, FunctionType) and not inspect.signature(build).parameters:
        with user_code(what):
            built = contract(build())
        if built.example is None:
            return built
    _check_takes(build, what, "batch", "the samples of a microbatch")
    with user_code(what):
        result = build(batch, **options)
    return contract(result)


def contract(result: Any) -> Built:
    """Return what a build function returned, in its parts; BadInput if it isn't well formed."""
    if isinstance(result, nn.Module):
        result = (result, None)
    if not (isinstance(result, tuple) and len(result) in (2, 3)):
        raise BadInput(f"build: expected (layers, example_input, loss), got {kind_of(result)}")
    layers, example_input = result[:2]
    loss = result[2] if len(result) == 3 else None
    if loss is None and not is_whole(layers):
        raise BadInput(
            "build: gave no loss; that is for a model as one module which returns its loss. Of layers return "
            "(layers, example_input, loss)"
        )
    if loss is not None and not callable(loss):
        raise BadInput(f"build: loss is {kind_of(loss)}, which cannot be called")
    alone = isinstance(example_input, tuple) and len(example_input) == 1 and isinstance(example_input[0], Mapping)
    return Built(layers, example_input[0] if alone else example_input, loss)


def sample_of(given: Any, loss: Loss | None, inputs: int | None = None) -> tuple[Any, Any]:
    """Return input and target of what data gave: a pair, or for a model that returns its ``loss`` the input alone.

    That may be a pair, too, where it has the ``inputs`` tensors of the example and its first part hasn't.
    """
    pair = isinstance(given, tuple | list) and len(given) == 2
    if pair and not (loss is None and len(tensors_in(given)) == inputs != len(tensors_in(given[0]))):
        return given[0], given[1]
    if loss is None:
        return given, None
    raise BadInput(f"data: expected (input, target), got {kind_of(given)}")


def example_of(built: Built, data: Callable[[int, int], Any] | None) -> tuple[Any, Any]:
    """Return the example input and its target (None: to be made up), of the data where there are any."""
    if data is not None:
        _check_takes(data, "data", "index, seed", "the number of a microbatch and a seed")
        with user_code("data"):
            given = data(0, 0)
        if built.example is None:
            return sample_of(given, built.loss, _both(built.layers, given))
        wanted = places_in(built.example)
        x, target = sample_of(given, built.loss, len(wanted))
        tensors = placed(x, wanted)
        return (refilling(built.example)(tensors) if len(tensors) == len(wanted) else x), target
    if built.example is None:
        raise BadInput(
            "build: returned a model and no example input; return (model, example_input), or name a data(index, seed) "
            "by --data"
        )
    return built.example, None


def _both(module: Any, given: Any) -> int | None:
    """Return how many tensors a pair has of which a ``module`` takes both parts; None for any other."""
    if isinstance(given, tuple | list) and len(given) == 2 and not isinstance(given[0], Mapping):
        with suppress(AttributeError, TypeError):
            return len(tensors_in(given)) if len(arguments_of(module, given)[0]) == 2 else None
    return None


def _check_takes(function: Callable[..., Any], what: str, arguments: str, meaning: str) -> None:
    """Raise BadInput, with its place, when ``function`` can't be called with as many arguments."""
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except ValueError:  # nobody knows what it takes
        return
    except TypeError:
        name = getattr(function, "__name__", what)
        raise BadInput(
            f"{what}: {name}{inspect.signature(function)}{defined_at(function)} is called as "
            f"{name}({arguments}), with {meaning}"
        ) from None


# --- data that know their microbatches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The microbatches that somebody reads: of those from ``first`` to before ``last`` the ones that he ``wants``.

    A pass has ``epoch`` microbatches; None: as many as the data have.
    """

    seed: int
    first: int
    last: int
    epoch: int | None = None
    wants: Callable[[int], bool] = lambda _: True


class Read(NamedTuple):
    """A microbatch as the user's loader gives it, and the ns that its reading took; or, in words, how it failed."""

    microbatch: int
    ns: int
    given: Any
    failure: str | None = None


class Batches(ABC):
    """Data, called ``name``, that say which microbatches there are, and may be read ahead: of a loader or a dataset."""

    name: str

    @property
    @abstractmethod
    def batches(self) -> int | None:
        """Whole microbatches of a pass, None where nobody knows. BadInput where there are none."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """Processes that read; 0: it is read where and when it is needed."""

    @property
    @abstractmethod
    def shares(self) -> int | None:
        """The workers that share what can only be read one after the other, so that their number decides who gives
        which microbatch; None for data whose microbatches are the same with any number."""

    @abstractmethod
    def read(self, span: Span, by_workers: bool = False) -> Iterator[Read]:
        """Yield what ``span`` wants, read ahead by the workers, or when it is asked for in this process, whose random
        numbers are left alone."""
