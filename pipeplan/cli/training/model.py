"""Which model does a run train? Only what is typed is imported, never what a file names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import BadInput

if TYPE_CHECKING:
    from ...runtime.model.build.spec import ModelSpec


def trained_model(typed: str | None, data: str | None, plan: str, named: str) -> ModelSpec:
    """Return which model a run trains: the ``typed`` one, or the zoo's that the profile in the file ``plan`` is named.

    BadInput where that name could be one of code.
    """
    from ...runtime.model.build.spec import ModelSpec

    spec = ModelSpec(named if typed is None else typed, data)
    if typed is None and not spec.of_zoo:
        raise BadInput(f"{plan}: its profile is named {named!r}; code runs only when it is typed: name it with --model")
    return spec
