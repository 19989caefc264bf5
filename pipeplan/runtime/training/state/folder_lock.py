"""Who may write checkpoints to a folder? One run at a time, as long as a process of it lives.

The lock is the kernel's, on a file in the folder, so a run that is killed leaves none behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ....errors import BadInput

LOCK: Final = ".lock"


@contextmanager
def one_run(folder: Path) -> Iterator[None]:
    """Let no other run write to ``folder`` meanwhile; BadInput when one does.

    On a file system without locks nothing is kept out.
    """
    path = folder / LOCK
    try:
        handle = _locked(path)
    except OSError as error:
        raise BadInput(f"checkpoint: {folder} cannot be written to: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked: whoever opened it before sees that it has gone
        os.close(handle)


def _locked(path: Path) -> int:
    """Return the handle of the file ``path`` with its lock; BadInput when another process has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = re.match(rb"process \d{1,9} on [\w.-]{1,64}\n", os.pread(handle, 100, 0))
            os.close(handle)
            who = f", {owner[0].decode().strip()}," if owner else ""
            raise BadInput(f"checkpoint: another run{who} writes to {path.parent}") from None
        except OSError:  # no locks here
            return handle
        if _is_at(handle, path):
            with suppress(OSError):  # who has it is no more than a help
                os.truncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return handle
        os.close(handle)  # its owner has just removed it


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file ``handle`` still has the name ``path``."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False
