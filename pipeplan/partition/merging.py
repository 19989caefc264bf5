"""Which layers does a user want merged: what do ``--granularity`` and ``--blocks`` say?"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from ..errors import BadInput
from ..problem import Chain

AUTO = "auto"  # blocks where there are lists of like ones, else nothing


def merging(text: str = AUTO, blocks: str | None = None) -> Callable[[Chain], Chain]:
    """Return the function on chains that ``--granularity``, or ``--blocks``, names."""

    def same(chain: Chain) -> Chain:
        return chain

    if text == "node" and blocks is None:
        return same
    from .granularity import like_blocks, merge_articulation, merge_blocks, merge_share

    if text == AUTO and blocks is None:

        def where_alike(chain: Chain) -> Chain:
            merged = merge_blocks(chain.in_own_order()) if like_blocks(chain) else chain
            return merged if len(merged) < len(chain) else chain

        return where_alike
    if text == "block" or (blocks is not None and text in (AUTO, "node")):
        lists = [name for name in (blocks or "").split(",") if name]
        return lambda chain: merge_blocks(chain.in_own_order(), lists)
    if blocks is not None:
        raise BadInput(f"--blocks means --granularity block, not {text[:40]}")
    if text == "articulation":
        return lambda chain: merge_articulation(chain.in_own_order())
    match = re.fullmatch(r"([0-9]{1,60}(?:\.[0-9]{1,60})?)%", text)
    if match is None or not 0 < Fraction(match[1]) < 100:
        raise BadInput(f"--granularity: {text[:40]!r} is not auto, node, block, articulation or a share such as 1%")
    share = Fraction(match[1]) / 100
    return lambda chain: merge_share(chain.in_own_order(), share)
