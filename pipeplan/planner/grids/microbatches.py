"""What does a network cost at other microbatch sizes? As profiled, between two profiles, or scaled from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil

from ...cost.saved import for_weights, storages
from ...errors import BadInput
from ...problem import Chain, Layer
from ...problem.fields import Scale, scaled

_FIXED = ("name", "weight_bytes", "parameter_count")


@dataclass(frozen=True)
class Profiles:
    """Profiles of one network by microbatch size; ``fixed_ns`` is the part of a layer's pass that no size changes."""

    measured: Mapping[int, Chain]
    fixed_ns: int = 0

    def at(self, microbatch: int) -> Chain:
        """Return the network at microbatches of ``microbatch`` samples (>= 1).

        A profiled size is taken as it is. With one profile, activations and boundary bytes are proportional to the
        size, and a pass of a layer that took t takes fixed + (t - fixed) * size / profiled size. With several, every
        number lies on the line through the two nearest profiles, but never below what is proportional to the nearest
        when the size shrinks, nor above it when the size grows. Weights and optimizer steps don't depend on it.
        """
        if microbatch not in self._known:
            self._known[microbatch] = self._made(microbatch)
        return self._known[microbatch]

    @cached_property
    def _known(self) -> dict[int, Chain]:
        return dict(self.measured)

    def _made(self, microbatch: int) -> Chain:
        near = sorted(self.measured, key=lambda size: (abs(size - microbatch), size))
        base = self.measured[near[0]]
        other = self.measured[near[1]] if len(near) > 1 else None
        layers = tuple(
            _at(
                microbatch,
                self.fixed_ns,
                base.microbatch,
                layer,
                *(() if other is None else (other.microbatch, other.layers[i])),
            )
            for i, layer in enumerate(base.layers)
        )
        size = ceil(Fraction(base.input_bytes * microbatch, base.microbatch))
        if other is None:
            reading = _in_proportion(base.reading_ns, base.microbatch, microbatch, self.fixed_ns)
        else:
            reading = _on_the_line(base.reading_ns, base.microbatch, other.reading_ns, other.microbatch, microbatch)
        if not base.reads_beside:
            reading = min(reading, layers[0].forward_ns, layers[-1].forward_ns)
        return _saving_enough(replace(base, layers=layers, input_bytes=size, microbatch=microbatch, reading_ns=reading))

    def assumption(self, microbatches: Sequence[int]) -> str | None:
        """Return in words how sizes that were not profiled got their numbers; None when all were profiled."""
        made = [size for size in microbatches if size not in self.measured]
        if not made:
            return None
        sizes = ", ".join(map(str, made))
        if len(self.measured) > 1:
            return f"microbatches of {sizes}: times and sizes on the line through the two nearest profiles"
        (known,) = self.measured
        fixed = f" beyond a fixed {self.fixed_ns / 1000:g} us of each pass of a layer" if self.fixed_ns else ""
        return f"microbatches of {sizes}: times{fixed} and sizes proportional to those of the profile at {known}"


def profiles(chains: Sequence[Chain], fixed_ns: int = 0) -> Profiles:
    """Return the profiles of one network; BadInput says where two differ in more than the microbatch size."""
    first = chains[0]
    measured: dict[int, Chain] = {}
    for chain in chains:
        if chain.microbatch in measured:
            raise BadInput(f"two profiles are for microbatches of {chain.microbatch}")
        if len(chain) != len(first):
            raise BadInput(
                f"the profiles are of different networks: {len(first)} layers at microbatches of {first.microbatch}, "
                f"{len(chain)} at {chain.microbatch}"
            )
        if (chain.edges, chain.tied, chain.shared) != (first.edges, first.tied, first.shared):
            raise BadInput("the profiles are of different networks: their edges or tied layers differ")
        for i, (one, two) in enumerate(zip(first.layers, chain.layers, strict=True)):
            for name in _FIXED:
                if getattr(one, name) != getattr(two, name):
                    raise BadInput(
                        f"the profiles are of different networks: layers[{i}] has {name} {getattr(one, name)!r} at "
                        f"microbatches of {first.microbatch}, {getattr(two, name)!r} at {chain.microbatch}"
                    )
        measured[chain.microbatch] = chain
    return Profiles(measured, fixed_ns)


def _in_proportion(value: int, size: int, wanted: int, most_fixed: int) -> int:
    fixed = min(value, most_fixed)
    return fixed + ceil(Fraction((value - fixed) * wanted, size))


def _on_the_line(value: int, size: int, far: int, far_size: int, wanted: int) -> int:
    proportional = Fraction(value * wanted, size)
    low, high = min(proportional, Fraction(value)), max(proportional, Fraction(value))
    return ceil(min(high, max(low, value + Fraction(far - value, far_size - size) * (wanted - size))))


def _at(wanted: int, fixed_ns: int, size: int, layer: Layer, far_size: int = 0, other: Layer | None = None) -> Layer:
    """Return ``layer`` at ``wanted`` instead of ``size`` samples, by itself or on the line through the ``other``."""

    def number(scale: Scale, value: int, *far: int) -> int:
        if far:
            return _on_the_line(value, size, far[0], far_size, wanted)
        return _in_proportion(value, size, wanted, fixed_ns if scale == "time" else 0)

    found: Layer = scaled(layer, number, *(() if other is None else (other,)))
    part = found.backward_weight_ns  # it and the whole are rounded on their own
    return found if part is None else replace(found, backward_weight_ns=min(part, found.backward_ns))


def _saving_enough(chain: Chain) -> Chain:
    """Return ``chain`` with layers that save no less than the tensors they name: all were rounded on their own."""
    layers = [
        layer if private >= 0 else replace(layer, saved_bytes=(layer.saved_bytes or 0) - private)
        for layer, private in zip(chain.layers, storages(chain).facts.private, strict=True)
    ]
    weights = for_weights(chain)
    for i, private in enumerate(() if weights is None else storages(weights).facts.private):
        needs = layers[i].weight_needs
        if private < 0 and needs is not None:
            layers[i] = replace(layers[i], weight_needs=replace(needs, saved_bytes=needs.saved_bytes - private))
    return replace(chain, layers=tuple(layers))
