"""What holds for rank processes that pipeplan starts itself? Nobody else's code or messages get in; a stop is seen."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SAFE_PATH: Final = "PYTHONSAFEPATH"
OURS: Final = "pipeplan"  # the variable's value where we have set it
INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@contextmanager
def our_imports_alone() -> Iterator[None]:
    """Let Python processes that are started within the context look into the working folder only if this one does.

    Those that import what is to be forked would otherwise look there first: a ``torch.py`` that lies about would run.
    """
    if sys.path[:1] in ([""], [os.getcwd()]) or SAFE_PATH in os.environ:
        yield
        return
    os.environ[SAFE_PATH] = OURS
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]


def settle_in() -> None:
    """Make this process, which pipeplan has started, listen to this machine alone, and what it starts itself usual."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]
    listen_here()


def listen_here() -> None:
    """Let what connects ranks listen at the loopback, where the user named no interface: not at the host's address."""
    for _, name in socket.if_nameindex():
        if re.fullmatch(r"lo\d*", name):
            for variable in INTERFACES:
                os.environ.setdefault(variable, name)
            return


def is_here(address: str) -> bool:
    """Whether ``address`` names this machine and no other can reach it."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(address, None)}
    except OSError:
        return False
    return bool(found) and all(x == "::1" or x.startswith(("127.", "::ffff:127.")) for x in found)


def is_stopped(pid: int | None) -> bool:
    """Whether a process has been stopped (SIGSTOP) and not continued; False where the system doesn't tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
