"""Shared test material: the published profiles, and small random instances that provoke ties and corner cases.

Random sizes and times are small integers on links of about 1 byte per ns, so that equal sums, zero-byte cuts and
exactly filled periods are common. Every generator takes a ``random.Random``: same seed, same instance.
"""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

from pipeplan.cost.saved import saved_bytes
from pipeplan.files.profiles import read_profile
from pipeplan.problem import Chain, Checkpointing, Device, Layer, Level, Platform, Policy, Problem, Weights

PUBLISHED = ["alexnet", "densenet121", "gnmt", "resnet50", "vgg16"]
PUBLISHED_FOLDER = Path(__file__).parents[2] / "profiles" / "published"


@cache
def published(name: str) -> Chain:
    """Return a profile published with PipeDream, a DAG."""
    return read_profile(str(PUBLISHED_FOLDER / f"{name}.json"))


def random_chain(
    rng: random.Random,
    layers: int,
    *,
    edges: bool = False,
    saved: bool = False,
    optimizer: bool = False,
    zero_times: bool = False,
    tied: bool = False,
    largest: int = 9,
) -> Chain:
    """Return a chain of ``layers`` layers with times and sizes up to ``largest``.

    Weights and outputs are sometimes zero; times only with ``zero_times`` (the total stays positive). ``edges`` makes
    it a DAG with skip connections, ``saved`` gives some layers explicit saved bytes, of which most say what they are
    (:func:`saying_what_is_saved`), ``optimizer`` optimizer times.
    """

    def size(zero_chance: float) -> int:
        return 0 if rng.random() < zero_chance else rng.randint(1, largest)

    def time() -> int:
        return 0 if zero_times and rng.random() < 0.3 else rng.randint(1, largest)

    made = [
        Layer(
            name=f"layer{i}",
            forward_ns=time(),
            backward_ns=time() + (1 if i == 0 else 0),
            weight_bytes=size(0.3),
            output_bytes=size(0.15),
            saved_bytes=rng.randint(0, 2 * largest) if saved and rng.random() < 0.6 else None,
            optimizer_ns=size(0.5) if optimizer else 0,
        )
        for i in range(layers)
    ]
    pairs: set[tuple[int, int]] = set()
    for j in range(1, layers):
        chance = rng.random()
        if chance < 0.8:
            pairs.add((j - 1, j))
        if chance > 0.6:
            pairs |= {(rng.randrange(j), j) for _ in range(rng.randint(1, 2))}
    chain = Chain(
        name=f"random{layers}",
        layers=tuple(made),
        input_bytes=size(0.2),
        edges=tuple(sorted(pairs)) if edges else None,
        tied=((0, layers - 1),) if tied and layers > 1 else (),
    )
    return saying_what_is_saved(rng, chain) if saved else chain


def uneven_chain(rng: random.Random, layers: int, least_forward: int = 1, least_backward: int = 1) -> Chain:
    """Return a chain of layers that take up to 30 ns forward and 60 ns backward, and save more than they pass on."""
    made = (
        [rng.randint(*span) for span in ((least_forward, 30), (least_backward, 60), (0, 9), (1, 9), (5, 40))]
        for _ in range(layers)
    )
    return Chain("made", tuple(Layer(f"layer{i}", *figures) for i, figures in enumerate(made)), 3)


def saying_what_is_saved(rng: random.Random, chain: Chain) -> Chain:
    """Return ``chain`` with layers that save inputs and their own outputs, and outputs that are views or parts of more.

    Layers without explicit saved bytes save what they read, as before, and some with such bytes don't say what they
    are.
    """
    reads: list[list[int]] = [[] for _ in chain.layers]
    for tensor, readers in enumerate(chain.readers):
        for reader in readers:
            reads[reader].append(tensor - 1)
    layers = []
    for i, layer in enumerate(chain.layers):
        chance = rng.random()
        if chance < 0.15:
            layer = replace(layer, view_of=rng.choice(reads[i]))
        elif chance < 0.25:
            layer = replace(layer, storage_bytes=layer.output_bytes + rng.randint(-1, 9))
            layer = replace(layer, storage_bytes=max(0, layer.storage_bytes or 0))
        if layer.saved_bytes is not None and rng.random() < 0.8:
            saves = {x for x in reads[i] if rng.random() < 0.6} | ({i} if rng.random() < 0.5 else set())
            roots = {layer.view_of if x == i and layer.view_of is not None else x for x in saves}
            own = layer.output_bytes if layer.storage_bytes is None else layer.storage_bytes
            alone = sum(own if x == i else chain.tensor_bytes[x + 1] for x in roots)
            private = rng.choice((0, layer.saved_bytes))
            layer = replace(layer, saves=tuple(sorted(saves)), saved_bytes=alone + private)
        layers.append(layer)
    return replace(chain, layers=tuple(layers))


def random_platform(
    rng: random.Random,
    devices: int,
    *,
    memory: tuple[int, int] = (10**6, 10**6),
    levels: bool = False,
    latency: bool = False,
    speeds: bool = False,
    duplex: bool = False,
) -> Platform:
    """Return ``devices`` devices with memory drawn from the range ``memory`` (inclusive) for each device.

    ``levels`` sometimes joins them by two levels, the upper one slower; ``latency``, ``speeds`` and ``duplex``
    allow latencies, unequal speeds (halves and thirds too) and full-duplex links.
    """

    def level(count: int, bandwidths: tuple[int, ...]) -> Level:
        return Level(count, rng.choice(bandwidths), rng.choice((0, 1, 3)) if latency else 0)

    below = [d for d in range(2, devices) if devices % d == 0]
    if levels and below and rng.random() < 0.8:
        first = rng.choice(below)
        joined = (level(first, (10**9, 3 * 10**9)), level(devices // first, (3 * 10**8, 5 * 10**8, 10**9)))
    else:
        joined = (level(devices, (5 * 10**8, 10**9, 3 * 10**9)),)
    choices = (Fraction(1, 2), Fraction(2, 3), Fraction(1), Fraction(1), Fraction(2)) if speeds else (Fraction(1),)
    return Platform(
        devices=tuple(Device(rng.randint(*memory), rng.choice(choices)) for _ in range(devices)),
        levels=joined,
        full_duplex=duplex and rng.random() < 0.5,
    )


def random_problem(
    rng: random.Random,
    layers: int,
    devices: int,
    *,
    weights: tuple[Weights, ...] = ("2bw",),
    checkpointing: Checkpointing = "stages",
    replicas: bool = True,
    edges: bool = False,
    saved: bool = False,
    optimizer: bool = False,
    levels: bool = False,
    latency: bool = False,
    speeds: bool = False,
    duplex: bool = False,
) -> Problem:
    """Return an instance whose memory sometimes binds: from half of what an even split needs to plenty."""
    chain = random_chain(rng, layers, edges=edges, saved=saved, optimizer=optimizer)
    weight_bytes = int(chain.sums.weight_bytes[-1])
    even = (3 * weight_bytes + int(saved_bytes(chain, 0, layers))) // devices + max(chain.cut_bytes)
    low = max(1, int(even * rng.choice((0.5, 1.0, 1.5, 2.5, 4.0))))
    platform = random_platform(
        rng, devices, memory=(low, low * 5 // 4), levels=levels, latency=latency, speeds=speeds, duplex=duplex
    )
    return Problem(chain, platform, Policy(weights=rng.choice(weights)), replicas, checkpointing)
