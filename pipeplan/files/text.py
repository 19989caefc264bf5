"""What text is in a file? UTF-8, written atomically; ``-`` is standard input and output."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

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
    """Write a file atomically (a reader sees the old one or the new one), or standard output for ``-``.

    Links are followed; what is no regular file, such as a pipe or ``/dev/null``, is written to and not replaced.
    """
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
