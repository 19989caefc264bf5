"""Which model and data does a user name? ``zoo:NAME[,option=value...]`` or ``module:function`` of their own.

Only what is typed is imported, never what a file names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import BadInput

ZOO = "zoo:"


def named_function(text: str, what: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names, looked up from the working folder too."""
    module, colon, attribute = text.partition(":")
    if not (colon and module and attribute):
        raise BadInput(f"{what}: {text!r} is not of the form module:function")
    from ..runtime.model.spec import find

    try:
        return find(text)  # type: ignore[no-any-return]  # it makes sure that it can be called
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from error


def named_model(text: str, batch: int) -> tuple[Callable[..., Any], Callable[[int, int], Any] | None]:
    """Return (build, data) of the model that ``text`` names; data is None for a user's own function."""
    if not text.startswith(ZOO):
        return named_function(text, "--model"), None
    from ..zoo import load

    model = load(text.removeprefix(ZOO))
    return model, model.data(batch)
