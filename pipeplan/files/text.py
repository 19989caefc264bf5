"""What text is in a file? UTF-8, written atomically; ``-`` is standard input and output."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EISDIR
from pathlib import Path
from typing import IO

from ..errors import BadInput


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for ``-``; BadInput when it cannot be read as UTF-8."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        text.encode()  # in some locales standard input lets other bytes through as lone surrogates
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"{path}: cannot be read: {reason}") from error
    return text.removeprefix("\ufeff")


def write_text(path: str, text: str) -> None:
    """Write a file as :func:`replaced` does, or standard output for ``-``."""
    if path == "-":
        sys.stdout.write(text)
        return
    with replaced(path) as file:
        file.write(text.encode())


@contextmanager
def replaced(path: str) -> Iterator[IO[bytes]]:
    """Open a file to be written atomically: a reader sees the old one or the new one, and a failure leaves no third.

    Links are followed; what is no regular file, such as a pipe or ``/dev/null``, is written to and not replaced.
    BadInput when it cannot be written.
    """
    target = Path(os.path.realpath(path))
    with _told(path):
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".pipeplan-")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def check_writable(path: str) -> None:
    """Raise BadInput unless a file can be written to ``path``: better before there is something to write than after."""
    if path == "-":
        return
    target = Path(os.path.realpath(path))
    with _told(path):
        if not target.parent.is_dir():
            raise BadInput(f"{path}: cannot be written: there is no folder {target.parent}")
        if target.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        if target.exists() and not target.is_file():
            if not os.access(target, os.W_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
            return
        with tempfile.TemporaryFile(dir=target.parent):  # not all that forbids it can be asked for
            pass


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Turn what the system says against writing to ``path`` into BadInput."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from error
