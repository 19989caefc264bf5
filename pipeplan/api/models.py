"""Which model or function does a name name? ``zoo:NAME[,option=value...]``, ``hf:CONFIG`` or ``module:function``.

Only what is typed is imported, never what a file names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import BadInput
from ..zoo import ZOO


def data_to_read(data: Any, batch: int) -> Callable[[int, int], Any]:
    """Return ``data``, or what it names, as data(index, seed); that of a loader gives ``batch`` samples.

    Names are looked up from the working folder too.
    """
    from ..runtime.data.loader import data_from
    from ..runtime.model.build.spec import named_data

    try:
        return named_data(data, batch) if isinstance(data, str) else data_from(data, "data", batch)
    except BadInput as error:
        raise BadInput(f"--data: {error}") from error


def build_named(text: str, batch: int) -> Callable[..., Any]:
    """Return the build function of the model that ``text`` names, in another process too."""
    return named_model(text, batch)[0]


def named_model(text: str, batch: int) -> tuple[Callable[..., Any], Callable[[int, int], Any] | None]:
    """Return (build, data) of the model that ``text`` names; data is None for a user's own function."""
    from ..runtime.model.build.spec import ModelSpec, brings_data, builder_of

    spec = ModelSpec(text)
    if not text.startswith(ZOO) and spec.of_zoo:
        raise BadInput(f"MODEL: {text!r} is not of the form zoo:NAME, hf:CONFIG or module:function")
    try:
        build = builder_of(spec)
    except BadInput as error:
        raise error if text.startswith(ZOO) else BadInput(f"MODEL: {error}") from error
    return build, build.data(batch) if brings_data(build) else None
