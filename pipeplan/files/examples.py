"""Which profiles come with the program? ``example:resnet50`` wherever a profile is taken."""

from __future__ import annotations

from pathlib import Path

from ..errors import BadInput
from ..names import shown

PREFIX = "example:"
FOLDER = Path(__file__).parents[1] / "profiles"


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
