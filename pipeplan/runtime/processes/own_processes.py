"""What holds for rank processes that pipeplan starts itself? Nobody else's code or messages get in; a stop is seen."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import SemLock
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path
from typing import Any, Final, NoReturn

from ...scratch import PREFIX, scratch_folder

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S: Final = 1.0
LONGEST_SOCKET: Final = 104  # characters of its path, on the least generous system
SAFE_PATH: Final = "PYTHONSAFEPATH"
OURS: Final = "pipeplan"  # the variable's value where we have set it
INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LEAVING: Final = threading.RLock()


def context_of() -> Any:
    """Return the context in which ranks are started: forked from a server that has imported what takes seconds.

    The server makes no CUDA context, which wouldn't survive a fork: each rank makes its own.
    """
    _swept_if_killed()
    _tracked()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preloaded"])
    return context


@cache
def _swept_if_killed() -> None:
    """Let multiprocessing keep its sockets, for as long as this process is there, in a folder that others sweep.

    Unless it has one of its own already, or there is no room for more in the path of a socket.
    """
    room = len(tempfile.gettempdir()) + len(f"/{PREFIX}12345678/pymp-12345678/listener-12345678") < LONGEST_SOCKET
    if multiprocessing.current_process()._config.get("tempdir") is not None or not room:  # type: ignore[attr-defined]
        return
    held = ExitStack()
    folder, usual = held.enter_context(scratch_folder()), tempfile.tempdir
    Finalize(None, held.close, exitpriority=-1000)  # behind its own, which removes what is inside
    tempfile.tempdir = str(folder)
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = usual


@cache
def _tracked() -> None:
    """Start multiprocessing's tracker of semaphores so that a terminal's end, which reaches it too, doesn't end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold the signals that end a run back, from this thread and for ever from what is started meanwhile: none is lost
    half-started.

    Ctrl-C and a terminal's end reach all of its processes, and those that import torch would tell of it. The mask is
    what they inherit; another thread of this process may still take a signal, whose handler then only notes it.
    """
    noted: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: noted.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for held in noted[:1]:
            signal.raise_signal(held)


def semaphores() -> list[Any]:
    """Return what gives back each of the semaphores that this process has made."""
    found = list(util._finalizer_registry.values())  # type: ignore[attr-defined]  # no public way to these alone
    return [x for x in found if getattr(x, "_callback", None) is SemLock._cleanup]  # type: ignore[attr-defined]


def leave(code: int) -> NoReturn:
    """End this process at once: exchanges that never end would hold up an orderly exit for ever.

    Python would tell of semaphores that libraries have made for processes of theirs (tqdm does), so they go first: all
    of them, whichever thread comes second.
    """
    _LEAVING.acquire()  # for ever; a signal's handler may come by again
    for give_back in semaphores():
        give_back()
    os._exit(code)


def settle_in() -> None:
    """Make this process, which pipeplan has started, listen to this machine alone, and what it starts itself usual."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]
    listen_here()


def follow_parent(ends: Connection | None = None) -> None:
    """End this process when the one that started it has gone, or closes the other end of ``ends``."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it has been started by one"
    wait([parent.sentinel, *([] if ends is None else [ends])])
    leave(1)


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
    return _state(pid) == "T"


def has_gone(pid: int) -> bool:
    """Whether a process has ended, if only its parent knows yet; False where the system doesn't tell."""
    return os.path.exists("/proc/self/stat") and _state(pid) in ("", "X", "Z")


def _state(pid: int | None) -> str:
    """Return the letter that Linux has for what a process does; nothing if there is none, or no such system."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
