"""What does no plan take less than? Easier problems: devices differ by a factor, layers take the least of variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

from ..problem import Chain, Device, Problem

_LEAST = ("forward_ns", "backward_ns", "waited_ns", "optimizer_ns")  # that no device takes less than the fastest
_PICKED = ("forward_ns", "backward_ns", "optimizer_ns", "weight_bytes", "output_bytes")


def relative(problem: Problem) -> Problem:
    """Return a relaxation in which devices differ by a factor alone: nothing takes longer than in ``problem``.

    Where devices have profiles of their own, each layer takes what the fastest takes, and a device is as fast as where
    it comes nearest to that. Where layers have variants they take what they take of all GPUs together, at least.
    """
    platform = problem.platform
    if problem.chain.variants:
        return replace(problem, chain=by_gpu(problem.chain))
    if platform.devices[0].times is None:
        return problem
    best = platform.best_device
    chain = problem.chain.timed(best.times)
    assert best.times is not None

    def factor(device: Device) -> Fraction:
        assert device.times is not None
        assert best.times is not None
        columns = ((getattr(best.times, name), getattr(device.times, name)) for name in _LEAST)
        pairs = (pair for column in columns for pair in zip(*column, strict=True))
        return device.speed * max((Fraction(least, time) for least, time in pairs if least), default=Fraction(1))

    speeds = {x: factor(x) for x in dict.fromkeys(platform.devices)}
    devices = tuple(Device(x.memory_bytes, speeds[x]) for x in platform.devices)
    return replace(problem, chain=chain, platform=replace(platform, devices=devices))


def extreme(chain: Chain, pick: Callable[[Iterable[int]], int]) -> Chain:
    """Return the network whose layers take and send what ``pick`` (least, or most) picks of all its choices."""
    if not chain.variants:
        return chain
    layers = []
    for own in zip(*(x.layers for x in chain.choices), strict=True):
        picked = {name: pick(getattr(x, name) for x in own) for name in _PICKED}
        later, weights = pick(x.weight_part_ns for x in own), pick(x.parameter_count for x in own)
        layers.append(replace(own[0], **picked, backward_weight_ns=later, parameters=weights))
    return replace(chain, layers=tuple(layers), variants=())


def by_gpu(chain: Chain) -> Chain:
    """The network whose layers take what all GPUs of a group take together, each in the variant with the least."""
    layers = []
    for own in zip(*(x.layers for x in chain.choices), strict=True):
        of = [(x.tensor * (y.forward_ns + y.backward_ns), x.tensor, y) for x, y in zip(chain.choices, own, strict=True)]
        _, width, least = min(of, key=lambda one: one[0])
        step = min(x.tensor * y.optimizer_ns for x, y in zip(chain.choices, own, strict=True))
        times = {"forward_ns": width * least.forward_ns, "backward_ns": width * least.backward_ns}
        layers.append(replace(least, **times, backward_weight_ns=None, optimizer_ns=step))
    return replace(chain, layers=tuple(layers), variants=())
