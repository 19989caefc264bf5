"""What did the user's own code do wrong, and where? One sentence with file and line, even where it ends the program."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

from ...errors import CodeFailed, PipeplanError

RAISED = (Exception, SystemExit)  # what code that isn't ours may do to us; Ctrl-C is nobody's failure
OURS = str(Path(__file__).parents[2]) + os.sep
INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


IN_WORDS = (  # what torch says, and what that means for who has written the code; {} is what torch says
    (
        "don't yet support saved tensor hooks",
        "torch.func.grad, vjp, jacrev and hessian can't run in a forward here, which counts what is saved for the "
        "backward; use torch.autograd.grad(..., create_graph=True)",
    ),
    (
        r"(same dtype|scalar type|dtypes? match).*(BFloat16|Half)",
        "{}; the code makes tensors of a type of its own, which --dtype doesn't convert: try --dtype autocast-bfloat16",
    ),
    ("Could not guard on data-dependent expression", "it branches on the values of a tensor"),
    (
        "higher order operator doesn't work unless",
        "torch.cond, scan and while_loop need torch.compile; an if or a loop of Python's runs as it is written",
    ),
    ("Could not extract specialized integer from data-dependent", "it takes a number out of a tensor"),
)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Within the context code of the user's runs; CodeFailed, starting with ``what``, says how it failed."""
    try:
        yield
    except RAISED as error:
        raise code_failed(what, error) from error


def code_failed(what: str, error: BaseException) -> PipeplanError:
    """Return what to raise for what code of the user's raised; what is worded for the user already stays as it is."""
    return error if isinstance(error, PipeplanError) else CodeFailed(f"{what}: {said(error)}")


def said(error: BaseException) -> str:
    """Return an exception in one line: its type, its first words, and the line of the user's that it came from."""
    words = str(error).strip().partition("\n")[0]
    if isinstance(error, SystemExit):
        what = f"it ended the program by sys.exit({words})"
    else:
        what = in_words(words) or (f"{type(error).__name__}: {words}" if words else type(error).__name__)
    place = line_of(error)
    return what if place is None else f"{what} ({place})"


def in_words(torchs: str) -> str | None:
    """Return what an error of torch's means for who has written the code; None where nothing better is known."""
    return next((ours.format(torchs) for pattern, ours in IN_WORDS if re.search(pattern, torchs)), None)


def line_of(error: BaseException) -> str | None:
    """Return the innermost file and line of the traceback that is neither ours nor installed: the user's own.

    Where there is none, the innermost of a library that isn't torch.
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = (place for file, line in reversed(lines) if not is_installed(file) and (place := place_of(file, line)))
    others = (place for file, line in reversed(lines) if (place := place_of(file, line)))
    return next(own, None) or next(others, None)


def place_of(file: str, line: int) -> str | None:
    """Return how a line is told, that of a library by its place in it; None if it is ours, Python's or torch's."""
    if file.startswith((OURS, "<")):
        return None
    for folder in _installed():
        if file.startswith(folder + os.sep):
            inside = os.path.relpath(file, folder)
            return None if inside.startswith(f"torch{os.sep}") else f"{inside}:{line}"
    if file.startswith(STANDARD):
        return None
    return f"{os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}:{line}"


def _installed() -> tuple[str, ...]:
    """Return the folders of libraries, and the one where torch lies, which may be another."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (*INSTALLED, str(Path(torch).parents[1])) if torch else INSTALLED


def defined_at(function: Callable[..., Any]) -> str:
    """Return where a function of the user's begins, as errors put it behind its name; empty if nobody knows."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = None if code is None else place_of(code.co_filename, code.co_firstlineno)
    return f" ({place})" if place else ""


def is_installed(file: str) -> bool:
    """Whether a file is Python's or of a library."""
    return file.startswith((*_installed(), *STANDARD))
