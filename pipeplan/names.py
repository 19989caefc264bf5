"""How does a name read that somebody else chose? As text on one line, whatever is in it and however long it is."""

from __future__ import annotations

from collections.abc import Sequence

NAME = 60  # columns of a name in a sentence
SENTENCE = 1000  # columns of a sentence


def shown(text: str, most: int = NAME) -> str:
    """Return ``text`` in at most ``most`` columns: what doesn't print is escaped, and the middle left out where needed.

    Control characters, line ends, what turns the direction of writing, and all else that is invisible stand as in a
    Python literal (``\\x1b``, ``\\n``, ``\\u202e``). Names that begin alike differ at their ends, so two thirds of what
    is left of a long one are its end. What was shown once is shown the same again.
    """
    if len(text) > 2 * most:  # a name of megabytes costs no more than a short one
        text = text[:most] + text[-most:]
    text = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    if len(text) <= most:
        return text
    begin = (most - 1) // 3
    return f"{text[:begin]}…{text[len(text) - (most - 1 - begin) :]}"


def format_devices(devices: Sequence[int], separator: str = ",") -> str:
    """Return devices as ``0-3`` where they are three or more in a row, else as ``0,2``."""
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    return separator.join(map(str, devices))
