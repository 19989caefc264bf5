"""Which layers of two profiles of a network are the same, and where does the one have the cuts of the other?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, Literal

from ...errors import BadInput
from ...names import shown
from ...plan import Stage
from ...problem import Chain, Layer

Match = Literal["name", "order", "weights"]
Pairs = list[tuple[int | None, int | None]]


def matched(one: Chain, other: Chain, by: Match = "name") -> Pairs:
    """Return the indices of the same layers in two profiles, in order; None beside a layer that only one has.

    ``name``: what has the same name. ``weights``: what has as many parameters, where a layer has any. Between two such
    pairs layers belong together by place where there are as many in both. ``order``: the first with the first and so
    on; BadInput where one has more layers.
    """
    if by == "order":
        if len(one) != len(other):
            raise BadInput(f"--match order: A has {len(one)} layers, B has {len(other)}; match them by name or weights")
        return [(i, i) for i in range(len(one))]
    if by == "name":
        return _between(_alike(one, other, lambda layer: layer.name, lambda layer: True), len(one), len(other))
    found = _alike(one, other, lambda layer: layer.parameter_count, lambda layer: layer.parameter_count > 0)
    return _between(found, len(one), len(other))


def _alike(
    one: Chain, other: Chain, key: Callable[[Layer], Any], counts: Callable[[Layer], bool]
) -> list[tuple[int, int]]:
    """Return pairs, in order, of layers with an equal ``key``, among those that ``counts``."""
    places = [[i for i, layer in enumerate(chain.layers) if counts(layer)] for chain in (one, other)]
    keys = [[key(chain.layers[i]) for i in where] for chain, where in zip((one, other), places, strict=True)]
    blocks = SequenceMatcher(a=keys[0], b=keys[1], autojunk=False).get_matching_blocks()
    return [(places[0][x.a + k], places[1][x.b + k]) for x in blocks for k in range(x.size)]


def _between(found: list[tuple[int, int]], length: int, other_length: int) -> Pairs:
    """Return all layers: the pairs ``found``, and between two of them those by place where there are as many."""
    pairs: Pairs = []
    i = j = 0
    for i_end, j_end in [*found, (length, other_length)]:
        together = i_end - i if i_end - i == j_end - j else 0
        pairs += [(i + k, j + k) for k in range(together)]
        pairs += [(k, None) for k in range(i + together, i_end)]
        pairs += [(None, k) for k in range(j + together, j_end)]
        pairs += [(i_end, j_end)] if i_end < length else []
        i, j = i_end + 1, j_end + 1
    return pairs


def stages_in(stages: Sequence[Stage], chain: Chain, other: Chain, pairs: Pairs) -> tuple[Stage, ...]:
    """Return ``stages`` of ``chain`` with the same cuts and recomputed segments in ``other``.

    Between the layers around a cut that both have, ``other`` is cut where fewest bytes cross, first of all there.
    BadInput where a stage would have no layers.
    """
    same = [(i, j) for i, j in pairs if i is not None and j is not None]

    def moved(cut: int) -> int:
        if cut in (0, len(chain)):
            return 0 if cut == 0 else len(other)
        first = max((j for i, j in same if i < cut), default=-1) + 1
        last = min((j for i, j in same if i >= cut), default=len(other))
        return min(range(first, last + 1), key=lambda place: other.cut_bytes[place])

    found = []
    for s, stage in enumerate(stages):
        start, stop = moved(stage.start), moved(stage.stop)
        if start >= stop:
            raise BadInput(
                f"B has none of the layers of stage {s}, {shown(chain.layers[stage.start].name)} to "
                f"{shown(chain.layers[stage.stop - 1].name)}; match them another way"
            )
        segments = ((moved(first), moved(last)) for first, last in stage.checkpoint)
        kept = tuple((first, last) for first, last in segments if first < last)
        found.append(replace(stage, start=start, stop=stop, checkpoint=kept))
    return tuple(found)
