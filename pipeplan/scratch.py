"""Where do files go that a process needs for itself? Into a folder that goes with it, or with the next one.

A process that is killed outright leaves its folder behind. Its lock is gone then, and the next process that makes such
a folder removes it: by its exact name, with a lock that says whose it is, for this user alone, and with nothing in it
that is not ours. Whatever else is called so is somebody's.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PREFIX = "pipeplan-"
LOCK = "lock"
MARK = b"pipeplan made this folder for itself, and removes it\n"  # in the lock
NAME = re.compile(r"pipeplan-[a-z0-9_]{8}")
ENTRY = re.compile(r"lock|store|pymp-[a-z0-9_]{8}|[0-9a-f]{32}-pulp\.(?:mps|lp|sol|mst)")  # ranks', theirs, solvers'
YOUNG_S = 60.0  # a younger folder may still be about to be locked


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder in ``TMPDIR`` that is there within the ``with`` alone."""
    _sweep(tempfile.gettempdir())
    name, owner = tempfile.mkdtemp(prefix=PREFIX), os.getpid()
    try:
        with open(Path(name, LOCK), "wb", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(MARK)
            yield Path(name)
    finally:
        if os.getpid() == owner:  # one that is forked from it leaves the with, too, when it forgets about that
            shutil.rmtree(name, ignore_errors=True)


@cache
def _sweep(folder: str) -> None:
    """Remove what killed processes have left in ``folder``, once in a process."""
    for left in Path(folder).glob(f"{PREFIX}*/{LOCK}"):
        try:
            if not _is_ours(left) or time.time() - left.stat().st_mtime < YOUNG_S:
                continue
            with left.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read(2 * len(MARK)) == MARK and all(map(ENTRY.fullmatch, os.listdir(left.parent))):
                    shutil.rmtree(left.parent, ignore_errors=True)
        except OSError:  # in use, or another process was quicker
            continue


def _is_ours(lock: Path) -> bool:
    """Whether a lock is in a folder as this user's processes make it; it is not opened before."""
    folder, file = os.lstat(lock.parent), os.lstat(lock)
    private = stat.S_ISDIR(folder.st_mode) and stat.S_IMODE(folder.st_mode) == stat.S_IRWXU
    own = {folder.st_uid, file.st_uid} == {os.getuid()}
    return private and own and stat.S_ISREG(file.st_mode) and NAME.fullmatch(lock.parent.name) is not None
