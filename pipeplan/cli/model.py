"""The models and data that a user names: ``zoo:NAME[,option=value...]`` or ``module:function`` of their own.

The only place that imports what is typed; nothing that a file names is ever imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..errors import BadInput

ZOO = "zoo:"


def named_function(text: str, what: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names, looked up from the working folder too."""
    module, colon, attribute = text.partition(":")
    if not (colon and module and attribute):
        raise BadInput(f"{what}: {text!r} is not of the form module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = import_module(module)
    except ImportError as error:
        raise BadInput(f"{what}: {module} cannot be imported: {error}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise BadInput(f"{what}: module {module} has no function {attribute}")
    return function  # type: ignore[no-any-return]  # callable, as just checked


def named_model(text: str, batch: int) -> tuple[Callable[..., Any], Callable[[int, int], Any] | None]:
    """Return (build, data) of the model that ``text`` names; data is None for a user's own function."""
    if not text.startswith(ZOO):
        return named_function(text, "--model"), None
    from ..zoo import load

    model = load(text.removeprefix(ZOO))
    return model, model.data(batch)
