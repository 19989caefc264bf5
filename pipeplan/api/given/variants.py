"""Which variants does the profile of a named model have? Its layers as one of several ranks has them, by degree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from ...errors import BadInput
from ...files.profile_rules import MOST_DEGREE
from ...names import shown
from ...problem import Chain, Variant
from ...zoo import running_again

DEGREES = {
    "tensor": (2, 4, 8),
    "experts": (4, 8, 16, 32, 64),
    "context": (2, 4, 8, 16),
}  # those above 1 where any may be
OPTIONS = {"tensor": "tensor", "experts": "expert_ranks", "context": "context"}  # of models, for these


def with_variants(
    chain: Chain,
    model: str,
    build: Any,
    ways: Mapping[str, tuple[int, ...] | None],
    sequence_parallel: bool,
    selective: bool,
    made: Callable[[str, str, int], Chain],
) -> Chain:
    """Return the ``chain`` of a named model, which ``build`` builds, with variants of the degrees that ``ways`` has by
    :data:`DEGREES`, None: any, those of sequences both ways that there are, and ``selective`` ones of each, each
    ``made`` by a name, options behind it, and the tensor degree."""
    variants, other = [], (False, True) if selective else (False,)
    for *of, again, by_heads in product(*(ways[x] or (1, *DEGREES[x]) for x in DEGREES), other, (False, True)):
        own = dict(zip(DEGREES, of, strict=True))
        if (max(of) == 1 and not again) or (by_heads and own["context"] == 1):
            continue
        along = sequence_parallel and own["tensor"] > 1
        named = running_again(model) or model if again else model
        options = "".join(f",{OPTIONS[x]}={n}" for x, n in own.items() if n > 1)
        options += ",sequence_parallel=true" * along + ",by_heads=true" * by_heads
        try:
            layers = made(named, options, own["tensor"]).layers
        except BadInput as error:
            if None in ways.values() or by_heads:
                continue
            missing = next((x for x in reversed(DEGREES) if own[x] > 1), "tensor")
            if "no option is named" in str(error):
                which = "mixtures" if missing == "experts" else "GPT and Llama"
                raise BadInput(
                    f"--{missing}: {shown(model)} is not written by parts; zoo models of {which}, and hf:, are"
                ) from None
            raise
        if [x.name for x in layers] != [x.name for x in chain.layers]:
            raise BadInput(f"--tensor {max(of)}: a rank's layers are others than the model's; say --granularity block")
        variants.append(
            Variant(own["tensor"], along, layers, bool(again), own["experts"], own["context"], bool(by_heads))
        )
    uneven = float(getattr(getattr(build, "config", None), "imbalance", 1.0))
    more: dict[str, Any] = {"variants": tuple(variants), "head_groups": _head_groups(build), "imbalance": uneven}
    return replace(chain, **more)


def _head_groups(build: Any) -> int | None:
    """Return how many heads of keys and values a named model has, by its configuration; None where nothing says it."""
    config = getattr(build, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    names = "groups", "heads", "num_key_value_heads", "num_attention_heads"
    return next((getattr(config, x) for x in names if getattr(config, x, None)), None)


def degrees(said: str | int, option: str = "--tensor") -> tuple[int, ...] | None:
    """Return the degrees that ``"1,2,4"`` says, None for ``"any"``; BadInput for what is neither."""
    if said == "any":
        return None
    parts = str(said).split(",")
    if not all(x.isascii() and x.isdigit() and 1 <= int(x[:5]) <= MOST_DEGREE for x in parts):
        raise BadInput(f"{option}: '{shown(str(said), 40)}' is neither degrees such as 1,2,4,8 nor any")
    return tuple(sorted(set(map(int, parts))))
