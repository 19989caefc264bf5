"""What text is in a file? UTF-8, written atomically; ``-`` is standard input and output."""

from __future__ import annotations

import os
import select
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ..errors import BadInput

MOST_BYTES = 64 * 10**6  # of a file: a profile of the most layers has a third of that
WRITER_S = 10.0  # how long a pipe is waited for that nothing has opened to write


def read_text(path: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file, or of standard input for ``-``.

    BadInput when it cannot be read as UTF-8, is longer than ``most_bytes``, or is a pipe that nothing opens to write.
    """
    try:
        if path == "-":
            if sys.stdin is None:
                raise BadInput("-: cannot be read: standard input is closed")
            text = sys.stdin.read(most_bytes + 1)
        else:
            with open(path, encoding="utf-8", opener=_open) as file:
                text = file.read(most_bytes + 1)
        size = len(text.encode())  # in some locales standard input lets other bytes through as lone surrogates
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"{path}: cannot be read: {reason}") from error
    if size > most_bytes:
        raise BadInput(f"{path}: is longer than {most_bytes / 1e6:g} MB, the most that is read")
    return text.removeprefix("\ufeff")


def _open(path: str, flags: int) -> int:
    """Open a file, and wait no longer than :data:`WRITER_S` for someone to write into a pipe."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    try:
        if stat.S_ISFIFO(os.fstat(handle).st_mode) and not select.select([handle], [], [], WRITER_S)[0]:
            with suppress(BlockingIOError):  # which says that there is a writer, who takes his time
                os.read(handle, 1)
                raise BadInput(f"{path}: cannot be read: nothing has written into this pipe for {WRITER_S:g} s")
        os.set_blocking(handle, True)
    except BaseException:
        os.close(handle)
        raise
    return handle


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
