"""Who may write to a folder of checkpoints? One run at a time, as long as a process of it lives.

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
    """Make ``folder``, and let no other run write to it meanwhile; BadInput when that fails, or one does.

    On a file system without locks nothing is kept out.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"checkpoint: {folder} cannot be made: {error.strerror}") from error
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
        here = False  # whether the open file still has this name
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
        with suppress(OSError):
            here = os.path.samestat(os.fstat(handle), os.lstat(path))
        if here:
            with suppress(OSError):  # who has it is no more than a help
                os.truncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return handle
        os.close(handle)  # its owner has just removed it
