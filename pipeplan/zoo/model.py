"""A zoo model: a configuration, and two functions of it that build the network and the data that fits it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..errors import BadInput

Loss = Callable[[Tensor, Tensor], Tensor]
Data = Callable[[int, int], tuple[Any, Tensor]]  # (microbatch index, seed) -> (input, target)
Built = tuple[nn.Module, Any, Loss]
Factory = Callable[[], nn.Module]


Config = TypeVar("Config")  # a frozen dataclass of options: sizes of the network and of its input


@dataclass(frozen=True)
class Model(Generic[Config]):
    """A model that can be called as the model contract says, and whose :meth:`data` fits what the call builds.

    ``network(config, seed)`` gives the layers and the loss; ``batches(config, batch)`` gives the data of microbatches
    of ``batch`` samples. Because both read one configuration, options cannot set the two apart.
    """

    config: Config
    network: Callable[[Config, int], tuple[nn.Module, Loss]]
    batches: Callable[[Config, int], Data]
    brings_data: ClassVar[bool] = True  # and takes a seed, which a user's function needn't

    def __call__(self, batch: int, *, seed: int = 0, **options: Any) -> Built:
        """Return (layers, example_input, loss) for microbatches of ``batch`` samples.

        The composition of ``layers`` is the network. Layer i is initialised from (``seed``, i) alone, so every rank
        gets the same parameters whatever part it keeps. ``options`` replace fields of the configuration. Inside
        ``with torch.device("meta"):`` nothing takes memory.
        """
        model = self.with_options(**options)
        example_input, _ = model.data(batch)(0, seed)
        layers, loss = model.network(model.config, seed)
        return layers, example_input, loss

    def data(self, batch: int, **options: Any) -> Data:
        """Return ``data(index, seed) -> (input, target)`` for microbatches of ``batch`` samples.

        Microbatch ``index`` is a function of the two numbers alone: the first rank takes inputs and the last takes
        targets from it without talking to each other.
        """
        model = self.with_options(**options)
        if batch < 1:
            raise BadInput(f"batch: {batch} is not a positive number of samples")
        return model.batches(model.config, batch)

    def with_options(self, **options: Any) -> Model[Config]:
        """Return the model with some fields of its configuration replaced; BadInput lists the fields that exist."""
        config: Any = self.config
        known = {field.name for field in fields(config)}
        if unknown := sorted(set(options) - known):
            raise BadInput(f"no option is named {unknown[0]!r}; this model has {', '.join(sorted(known))}")
        return replace(self, config=replace(config, **options)) if options else self

    def with_text(self, options: Sequence[str]) -> Model[Config]:
        """Return the model with options written as ``key=value``, each read as the type that the field has now."""
        values: dict[str, Any] = {}
        for option in options:
            key, equals, text = option.partition("=")
            if not equals:
                raise BadInput(f"option {option!r} is not of the form key=value")
            values[key] = _value(key, text, getattr(self.config, key, text))
        return self.with_options(**values)


def _value(key: str, text: str, present: Any) -> Any:
    try:
        match present:
            case bool():
                return {"true": True, "false": False}[text.lower()]
            case int():
                return int(text)
            case float():
                return float(text)
            case _:
                return text
    except (ValueError, KeyError):
        raise BadInput(f"option {key}={text}: expected a value like {str(present).lower()}") from None


def mixed_seed(*parts: int) -> int:
    """Return a seed that depends on all ``parts``, so that (1, 0) and (0, 1) have nothing in common."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def chain(factories: Iterable[tuple[str, Factory]], seed: int) -> nn.Sequential:
    """Call each factory under a random state of its own, made of ``seed`` and its index, and chain what they build.

    The caller's random state is left as it was.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with torch.random.fork_rng(devices=[]):
        for index, (name, factory) in enumerate(factories):
            torch.default_generator.manual_seed(mixed_seed(seed, index))
            layers[name] = factory()
    return nn.Sequential(layers)


def network(
    layers: Callable[[Config], Iterable[tuple[str, Factory]]], loss: Loss, config: Config, seed: int
) -> tuple[nn.Sequential, Loss]:
    """Return the chain of what ``layers`` yields of ``config``, and the ``loss``: as :class:`Model` wants them."""
    return chain(layers(config), seed), loss


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (batch, sequence, vocabulary) and token numbers (batch, sequence)."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (batch, classes) and class numbers (batch,)."""
    return nn.functional.cross_entropy(output, target)
