"""Where do files go that a process needs for itself? Into a folder that goes with it, or with the next one.

A process that is killed outright leaves its folder behind. Its lock is gone then, and the next process that makes such
a folder removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PREFIX = "pipeplan-"
LOCK = "lock"
YOUNG_S = 60.0  # a younger folder may still be about to be locked


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder in ``TMPDIR`` that is there within the ``with`` alone."""
    _sweep(tempfile.gettempdir())
    name, owner = tempfile.mkdtemp(prefix=PREFIX), os.getpid()
    try:
        with open(Path(name, LOCK), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
    finally:
        if os.getpid() == owner:  # one that is forked from it leaves the with, too, when it forgets about that
            shutil.rmtree(name, ignore_errors=True)


@cache
def _sweep(folder: str) -> None:
    """Remove what killed processes have left in ``folder``, once in a process."""
    for left in Path(folder).glob(f"{PREFIX}*/{LOCK}"):
        try:
            if left.stat().st_uid != os.getuid() or time.time() - left.stat().st_mtime < YOUNG_S:
                continue
            with left.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
        except OSError:  # in use, or another process was quicker
            continue
