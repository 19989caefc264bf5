"""Which stages has the user stated, and why don't they fit? Cuts, devices and recomputation, taken at their word.

They go the way of every other proposal: scheduled, bounded and validated like what a search has found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate, pairwise

from ...check.validate import structure_violations
from ...choices import DRAINED
from ...errors import BadInput
from ...names import SENTENCE, shown
from ...plan import Allocation, Stage
from ...problem import Chain, Platform, Problem
from ...units import format_bytes
from .explain import either, named, possible, round_up, uses_alone
from .incumbent import Incumbent

MOST_SAID = 3  # of what is wrong with stages
Segments = tuple[tuple[int, int], ...]


def stated(
    problem: Problem, split: str, replicas: str | None = None, on: str | None = None, recompute: str = "none"
) -> Iterator[Allocation]:
    """Yield the one allocation that the texts say; BadInput, with the place and the numbers, where they say none.

    ``split``: layers per stage, ``4,4,4,5``, or the layers that begin the later stages by name, ``block4,block8``, or
    by that of the module that they are the first of.
    ``replicas``: GPUs per stage, taken in the platform's order, by default one for each. ``on``: the GPUs of each stage
    instead, ``0,1/2-3/0,1``. ``recompute``: none; all, every stage as one segment; each, every layer as a segment of
    its own; or ranges of layers, ``0-3,8``, each one segment of every stage that it touches.
    """
    chain, platform = problem.chain, problem.platform
    bounds = [0, *_cuts(split, chain), len(chain)]
    if on is None:
        groups = _in_order(replicas, len(bounds) - 1, platform)
    elif replicas is None:
        groups = _groups(on, len(bounds) - 1, platform)
    else:
        raise BadInput("--on sets the GPUs of each stage; leave out --replicas")
    segments = _segments(recompute, chain)
    stages = tuple(
        Stage(start, stop, group, _inside(segments, start, stop))
        for (start, stop), group in zip(pairwise(bounds), groups, strict=True)
    )
    drained = replace(problem.policy, weights=DRAINED)  # which layers may be parted is the policy's rule, not a slip
    found = structure_violations(chain, platform, drained, stages) or _ruled_out(problem, stages)
    if found:
        raise BadInput("; ".join(found[:MOST_SAID]))
    yield Allocation(stages)


def gpus_needed(split: str | None, on: str | None, pipelines: int = 1) -> int:
    """Return the fewest GPUs that have what ``on`` names, or ``pipelines`` of the stages of ``split``."""
    if on is not None:
        return 1 + max(high for part in on.split("/") for _, high in _ranges(part, "--on", on))
    return pipelines * (1 if split is None else len(replicated(split, pipelines).split(",")))


def replicated(split: str, pipelines: int) -> str:
    """Return the GPUs of each stage, as ``replicas`` of :func:`stated` says them, in so many equal pipelines."""
    return ",".join([str(pipelines)] * (split.count(",") + (1 if _counts(split) else 2)))


def why_not_stated(incumbent: Incumbent) -> str | None:
    """Return in one sentence which stated stages lack how much memory with one microbatch in flight, or which rule they
    break; None where neither is so."""
    problem = incumbent.problem
    stages = next(iter(incumbent.seen))
    if incumbent.broken is not None:
        return f"the stated stages cannot run: {incumbent.broken}"
    uses = uses_alone(problem, Allocation(stages))
    lacking = []
    for members, use, where in uses:
        if use.over_bytes > 0:
            what = " and ".join(f"stage {s} ({named(problem, stages[s])})" for s in members)
            lacking.append(
                f"{what} on {where} need{'s' if len(members) == 1 else ''} {format_bytes(use.peak_bytes)} "
                f"(weights {format_bytes(use.weights_bytes)}, activations {format_bytes(use.activation_bytes)}, "
                f"buffers {format_bytes(use.buffer_bytes)}), {format_bytes(use.over_bytes)} more "
                f"than the {format_bytes(use.memory_bytes)} there"
            )
    if not lacking:
        return None
    most = max(use.peak_bytes for _, use, _ in uses) + problem.platform.reserved_bytes
    remedies = [f"from {format_bytes(round_up(most))} per GPU"]
    for other in ("each", "all"):
        segments = _segments(other, problem.chain)
        again = Allocation(tuple(replace(x, checkpoint=_inside(segments, x.start, x.stop)) for x in stages))
        if all(use.over_bytes <= 0 for _, use, _ in uses_alone(problem, again)):
            remedies.append(f"with --recompute {other}")
            break
    if possible(problem) is not None:
        remedies.append("with the stages that pipeplan plan finds without --split")
    return f"even with one microbatch in flight, {'; '.join(lacking)}; feasible {either(remedies)}"


def _cuts(text: str, chain: Chain) -> list[int]:
    """Return where the later stages begin."""
    words = text.split(",")
    if _counts(text):
        counts = list(map(int, words))
        if 0 in counts:
            raise BadInput(f"--split: stage {counts.index(0)} has no layers")
        if sum(counts) != len(chain):
            raise BadInput(f"--split: {shown(text)} are {sum(counts)} layers, the network has {len(chain)}")
        return list(accumulate(counts))[:-1]
    cuts = [_layer(word, chain) for word in words]
    for one, other in pairwise([0, *cuts]):
        if other <= one:
            why = "begins the network" if other == 0 else f"does not come after {_named(chain, one)}"
            raise BadInput(f"--split: {_named(chain, other)} {why}; name what begins the later stages, in order")
    return cuts


def _counts(split: str) -> bool:
    """Whether ``split`` says how many layers stages have, and not with which they begin."""
    return all(re.fullmatch(r"[0-9]{1,8}", word) for word in split.split(","))


def _layer(name: str, chain: Chain) -> int:
    places = [i for i, layer in enumerate(chain.layers) if layer.name == name]
    inside = [i for i, layer in enumerate(chain.layers) if layer.name.startswith((f"{name}.", f"{name}#"))]
    if len(places) == 1:
        return places[0]
    if not places and inside:
        return inside[0]
    if places:
        several = ", ".join(map(str, places[:5])) + (", .." if len(places) > 5 else "")
        raise BadInput(f"--split: layers {several} are all called '{shown(name)}'; give counts of layers instead")
    near = get_close_matches(name[:SENTENCE], [layer.name for layer in chain.layers], 3, 0.5)
    quoted = [f"'{shown(x)}'" for x in near]
    hint = f"; there is {either(quoted)}" if near else ""
    raise BadInput(f"--split: no layer is called '{shown(name)}'{hint}")


def _in_order(text: str | None, stages: int, platform: Platform) -> list[tuple[int, ...]]:
    """Return the devices of stages that take ``text`` replicas each from the platform's, in order."""
    counts = [1] * stages if text is None else [_number(word, "--replicas", text) for word in text.split(",")]
    counts *= stages if len(counts) == 1 else 1
    if len(counts) != stages:
        raise BadInput(f"--replicas: {shown(str(text))} is for {len(counts)} of the stages, --split says {stages}")
    if 0 in counts:
        raise BadInput(f"--replicas: stage {counts.index(0)} has no GPU")
    if sum(counts) > len(platform):
        more = "; --on says which GPUs have several stages, such as --on 0/1/0/1" if text is None else ""
        raise BadInput(
            f"{'--split' if text is None else '--replicas'}: {stages} stages take {sum(counts)} GPUs, the platform has "
            f"{len(platform)}{more}"
        )
    ends = list(accumulate(counts, initial=0))
    return [tuple(range(first, last)) for first, last in pairwise(ends)]


def _groups(text: str, stages: int, platform: Platform) -> list[tuple[int, ...]]:
    """Return the devices of each stage that ``text`` names."""
    groups = []
    for s, part in enumerate(text.split("/")):
        ranges = _ranges(part, "--on", text)
        beyond = max(last for _, last in ranges)
        if beyond >= len(platform):
            raise BadInput(f"--on: stage {s} uses GPU {beyond}; the platform has GPUs 0 to {len(platform) - 1}")
        groups.append(tuple(device for first, last in ranges for device in range(first, last + 1)))
    if len(groups) != stages:
        raise BadInput(
            f"--on: {shown(text)} names GPUs for {len(groups)} of the stages, --split says {stages}; / separates them"
        )
    return groups


def _segments(text: str, chain: Chain) -> Segments:
    """Return the half-open ranges of layers that are recomputed, whatever the cuts."""
    if text == "none":
        return ()
    if text == "all":
        return ((0, len(chain)),)
    if text == "each":
        return tuple((i, i + 1) for i in range(len(chain)))
    ranges = _ranges(text, "--recompute", text)
    for _, last in ranges:
        if last >= len(chain):
            raise BadInput(f"--recompute: layer {last} doesn't exist; the network has 0 to {len(chain) - 1}")
    for (_, last), (first, _) in pairwise(ranges):
        if first <= last:
            raise BadInput(f"--recompute: in {shown(text)} layer {first} comes after {last}; give the ranges in order")
    return tuple((first, last + 1) for first, last in ranges)


def _inside(segments: Segments, start: int, stop: int) -> Segments:
    """Return the segments' parts in ``layers[start:stop]``."""
    return tuple((max(a, start), min(b, stop)) for a, b in segments if a < stop and b > start)


def _ruled_out(problem: Problem, stages: Sequence[Stage]) -> list[str]:
    """Return what the stages use that the problem's other options rule out."""
    found = []
    for s, stage in enumerate(stages):
        if stage.replicas > 1 and not problem.replicas:
            more = "; --schedule pattern has replicas with newest weights" if problem.policy.rules.reads_newest else ""
            want = problem.chain.one_of_each or f"--no-replicas, and nf1b, want one for each stage{more}"
            found.append(f"stage {s} has {stage.replicas} GPUs; {want}")
        whole = stage.checkpoint in ((), ((stage.start, stage.stop),))
        if stage.checkpoint and (problem.checkpointing == "none" or (problem.checkpointing == "stages" and not whole)):
            found.append(f"stage {s} recomputes layers as --checkpointing {problem.checkpointing} does not allow")
    return found


def _ranges(part: str, place: str, text: str) -> list[tuple[int, int]]:
    """Return both ends of each of the ranges in ``part`` of ``text``."""
    return [_range(word, place, text) for word in part.split(",")]


def _range(word: str, place: str, text: str) -> tuple[int, int]:
    """Return both ends of ``3`` or ``0-3``, which are in it."""
    first, dash, last = word.partition("-")
    low = _number(first, place, text)
    high = _number(last, place, text) if dash else low
    if high < low:
        raise BadInput(f"{place}: '{shown(word)}' isn't a range such as 0-3")
    return low, high


def _number(word: str, place: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,8}", word):
        raise BadInput(f"{place}: '{shown(word)}' in {shown(text)} isn't a number")
    return int(word)


def _named(chain: Chain, layer: int) -> str:
    return f"'{shown(chain.layers[layer].name)}' (layer {layer})"
