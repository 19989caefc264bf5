"""What text is in a file? UTF-8, written atomically; ``-`` is standard input and output."""

from __future__ import annotations

import csv
import io
import os
import select
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EISDIR
from pathlib import Path
from typing import IO

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
    except (OSError, ValueError) as error:  # of a name with a NUL, too
        plain = "it is not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
        reason = error.strerror if isinstance(error, OSError) else plain
        raise BadInput(f"{path}: cannot be read: {reason}") from error
    if size > most_bytes:
        raise BadInput(f"{path}: is longer than {most_bytes / 1e6:g} MB, the most that is read")
    return text.removeprefix("\ufeff")


def read_csv(path: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a CSV file; BadInput as of :func:`read_text`, and for no CSV."""
    reader = csv.reader(io.StringIO(read_text(path)))
    try:
        yield from reader
    except csv.Error as error:
        raise BadInput(f"{path}: line {reader.line_num}: {error}") from None


def regular(path: Path) -> os.stat_result:
    """Return what is known of a file that is to be read at any place; BadInput for a pipe, a device, a folder.

    They would never end, or hold up who opens them.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{path}: cannot be read: isn't a regular file")
    return found


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
    """Write a file as :func:`replaced` does, or standard output for ``-``."""
    if path == "-":
        sys.stdout.write(text)
        return
    with replaced(path) as file:
        file.write(text.encode())


@contextmanager
def replaced(path: str) -> Iterator[IO[bytes]]:
    """Open a file to be written atomically: a reader sees the old one or the new one, and a failure leaves no third.

    Links are followed; what isn't a regular file, such as a pipe or ``/dev/null``, is written to and not replaced.
    BadInput when it cannot be written.
    """
    with _told(path):
        target = Path(os.path.realpath(path))
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
    with _told(path):
        target = Path(os.path.realpath(path))
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
    except (OSError, RuntimeError, ValueError) as error:
        said = error.__context__ if isinstance(error, RuntimeError) else error  # torch says it in words of its own
        if not isinstance(said, OSError) and "embedded null" not in str(said):
            raise
        raise BadInput(f"{path}: cannot be written: {getattr(said, 'strerror', None) or said}") from error
