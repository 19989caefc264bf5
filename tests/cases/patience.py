"""How long tests wait for what takes moments: minutes, so that a busy machine is told from one that waits in vain."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

SECONDS = 600  # pytest's own limit (pyproject.toml) is larger


def without_progress(text: str) -> str:
    """Return what a command wrote to standard error but the lines that say it lives, which depend on the load."""
    return re.sub(r"^(?: *[\d.]+ s  |spent on ).*\n", "", text, flags=re.MULTILINE)


def fails_when_patient(run: Callable[[float], object], error: type[Exception], match: str) -> None:
    """``run(timeout_s)`` raises ``error`` with a message that begins with ``match``, at the latest with a long timeout.

    What hangs hangs for ever, but on a busy machine a short timeout may end before the run comes to it.
    """
    for timeout_s in (2, 20, SECONDS // 4):
        with pytest.raises(error) as caught:
            run(timeout_s)
        if re.match(match, str(caught.value)):
            return
    raise AssertionError(str(caught.value))
