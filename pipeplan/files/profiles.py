"""Which chain is in a profile? This project's JSON is read and written, PipeDream's ``graph.txt`` read too.

``example:resnet50`` is one that comes with the program, wherever a profile is taken.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ..errors import BadInput
from ..names import shown
from ..problem import Chain, Exchange, Layer, SharedWeights, Variant, WeightNeeds
from .forms import Count, Positive, converted, form, json_text, read_json
from .profile_rules import MOST_DEGREE, MOST_EDGES, MOST_LAYERS, check_chain, check_variants
from .text import read_text

PREFIX = "example:"
FOLDER = Path(__file__).parents[1] / "profiles"
FIRST = ("format", "name", "microbatch", "dtype", "device", "source", "input_bytes", "layers")
OPTIONAL = tuple(field.name for field in fields(Chain) if field.name not in (*FIRST, "either"))
Degree = Annotated[int, msgspec.Meta(ge=1, le=MOST_DEGREE)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=1000)]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=MOST_DEGREE)]
NeedsFile = form(WeightNeeds)
ExchangeFile = form(
    Exchange, brief=True, count=Positive, hidden=Count, bytes=Count, ranks=Ranks, apart=Degree, beside_ns=Count
)
LayerFile = form(
    Layer,
    brief=True,
    weight_needs=NeedsFile | None,
    matrix_state=tuple[Count, Count] | None,
    exchanges=Annotated[tuple[ExchangeFile, ...], msgspec.Meta(max_length=64)],  # type: ignore[valid-type]  # a form
)
LayersFile = Annotated[tuple[LayerFile, ...], msgspec.Meta(max_length=MOST_LAYERS)]  # type: ignore[valid-type]  # a form
VariantFile = form(
    Variant, brief=True, tensor=Degree, experts=Degree, context=Degree, offloaded=Count, layers=LayersFile
)
SharedFile = form(SharedWeights, brief=True)
ProfileFile = form(
    Chain,
    (*FIRST, *OPTIONAL),
    optional=OPTIONAL,
    brief=True,
    format=Literal["pipeplan-profile/1"],
    microbatch=Positive,
    within=tuple[Factor, Factor] | None,
    beside=Positive,
    in_flight=Positive,
    layers=LayersFile,
    tensor=Degree,
    experts=Degree,
    context=Degree,
    offloaded=Count,
    imbalance=Annotated[float, msgspec.Meta(ge=1, le=MOST_DEGREE)],
    variants=Annotated[tuple[VariantFile, ...], msgspec.Meta(max_length=64)],  # type: ignore[valid-type]  # a form
    head_groups=Positive | None,
    edges=Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MOST_EDGES)] | None,
    inputs=Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_LAYERS)] | None,
    shared=tuple[SharedFile, ...] | None,  # type: ignore[valid-type]  # a form
    order=Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_LAYERS)] | None,
)


def read_profile(path: str, text: str | None = None) -> Chain:
    """Return the chain in a profile, ``text`` if it was read: in this project's form, PipeDream's or Piper's.

    ``path`` is a file, ``-`` for standard input, or ``example:NAME`` for one that comes with the program.
    """
    text = read_text(located(path)) if text is None else text
    if not text.strip():
        raise BadInput(f"{path}: is empty; a profile is JSON or a graph.txt")
    if text.lstrip()[0] == "{" and '"TMPCs"' in text:
        from .piper_json import read_piper

        return read_piper(text, Path(path).name.split(".")[0], path)
    if text.lstrip()[0] in "{[":
        return chain_of(read_json(text, ProfileFile, path), path)
    from .graph_txt import read_graph_text  # networkx takes longer to load than most plans to find

    return read_graph_text(text, Path(path).name.split(".")[0], path)


def chain_of(form: Any, place: str) -> Chain:
    """Return the chain of a :data:`ProfileFile`, its values checked; errors start with ``place``."""
    chain = converted(form, Chain)
    if chain.edges is not None:
        chain = replace(chain, edges=tuple(sorted(set(chain.edges))))
    check_chain(chain, place)
    check_variants(chain, place)
    return chain


def profile_keys(chain: Chain) -> dict[str, Any]:
    """Return what a file says of a chain, by key."""
    own = (field.name for field in fields(chain) if field.name in ProfileFile.__struct_fields__)
    return {"format": "pipeplan-profile/1"} | {name: getattr(chain, name) for name in own}


def profile_text(chain: Chain) -> str:
    """Return the JSON of a chain."""
    return json_text(_profile_form(chain))


def digest(chain: Chain) -> str:
    """Return the SHA-256 of a chain's compact JSON, in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(_profile_form(chain))).hexdigest()


def _profile_form(chain: Chain) -> Any:
    return converted(profile_keys(chain), ProfileFile)


def examples() -> list[str]:
    """Return the names of all, without the prefix; those published with PipeDream are ``published/NAME``."""
    files = FOLDER.glob("**/*.json")
    return sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in files)


def located(path: str) -> str:
    """Return where the profile ``path`` is: of ``example:NAME`` the file that comes with the program, else ``path``.

    NAME is a whole name, or its begin up to a dash: resnet50 is resnet50-1000-b8-v100. BadInput unless it is one.
    """
    if not path.startswith(PREFIX):
        return path
    name, known = path.removeprefix(PREFIX), examples()
    found = [x for x in known if x == name] or [x for x in known if x.startswith(f"{name}-")]
    if len(found) != 1:
        which = f"is one of {', '.join(found)}" if found else f"is not one of {', '.join(known)}"
        raise BadInput(f"{shown(path)}: {which}")
    return str(FOLDER / f"{found[0]}.json")
