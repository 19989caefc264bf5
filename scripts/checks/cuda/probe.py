"""What is this machine, asked by the standard library alone? One JSON object: run it first on a machine that is bare.

    python3 scripts/checks/cuda/probe.py [--results FILE]

It says which packages are missing and must be carried along, what the driver and the clocks are, whether processes can
share memory and descriptors as runs do, how much host memory can be locked, and what limits there are.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "networkx", "click", "rich", "msgspec")  # to profile, to plan contiguous stages, to run
HELPFUL = ("transformers", "pulp", "highspy", "safetensors", "cuda-bindings", "nvidia-nccl-cu13", "triton", "pytest")
LOCKED_BYTES = 2**30


def packages() -> dict[str, Any]:
    """Return the versions of what is installed, and what has to be carried along."""
    found: dict[str, str | None] = {}
    for name in (*NEEDED, *HELPFUL):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {
        "versions": found,
        "carry": [name for name in NEEDED if name not in found],
        "would_help": [name for name in HELPFUL if name not in found],
    }


def gpus() -> dict[str, Any]:
    """Return what nvidia-smi says of the GPUs, their clocks and their links."""
    fields = "name,uuid,memory.total,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,mig.mode.current"
    listed = said("nvidia-smi", f"--query-gpu={fields}", "--format=csv")
    return {"listed": listed, "links": said("nvidia-smi", "topo", "-m"), "mps": shutil.which("nvidia-cuda-mps-control")}


def said(*words: str) -> str | None:
    """Return what a command prints, None where there is no such command."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    return None


def kernel() -> dict[str, Any]:
    """Return which system this is; gVisor has no counters of the hardware and no memory checker."""
    version = Path("/proc/version").read_text() if os.path.exists("/proc/version") else ""
    firecracker = "fc-" in platform.release() or "firecracker" in version.lower()
    sandboxed = platform.release().startswith("4.4.0") or "gvisor" in version.lower()
    return {
        "release": platform.release(),
        "runtime": "gVisor" if sandboxed else "Firecracker" if firecracker else "unknown",
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.exists("/dev/shm") else None,
        "disk_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
    }


def limits() -> dict[str, Any]:
    """Return the limits of this process that runs meet."""
    names = {"open_files": "NOFILE", "processes": "NPROC", "locked_bytes": "MEMLOCK", "core_bytes": "CORE"}
    return {key: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for key, name in names.items()}


def sharing() -> dict[str, Any]:
    """Return whether processes can hand each other memory without a name, and meet at a socket without a file."""
    made = os.memfd_create("probe")
    os.truncate(made, 4096)
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        socket.send_fds(one, [b"x"], [made])
        _, received, _, _ = socket.recv_fds(other, 1, 1)
    same = os.fstat(received[0]).st_ino == os.fstat(made).st_ino
    for descriptor in (made, *received):
        os.close(descriptor)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0probe-{os.getpid()}")
    return {"descriptors_travel": same, "abstract_sockets": True}


def locking() -> dict[str, Any]:
    """Return how long CUDA takes to lock a GiB of host memory, by its own library, and its word if it doesn't."""
    names = [*glob.glob(f"{sys.prefix}/lib/python3*/site-packages/nvidia/*/lib/libcudart.so*"), "libcudart.so"]
    for name in names:
        with suppress(OSError):
            cuda = ctypes.CDLL(name)
            break
    else:
        return {"locked": False, "why": "no libcudart is found"}
    room = (ctypes.c_char * LOCKED_BYTES)()
    start = time.monotonic()
    code = cuda.cudaHostRegister(ctypes.byref(room), ctypes.c_size_t(LOCKED_BYTES), 0)
    seconds = time.monotonic() - start
    if code == 0:
        cuda.cudaHostUnregister(ctypes.byref(room))
    return {"locked": code == 0, "code": code, "seconds_per_gib": seconds}


def names() -> dict[str, Any]:
    """Return what this host's own name stands for, by which other nodes would look for it."""
    return {
        "host": socket.gethostname(),
        "addresses": sorted({x[4][0] for x in socket.getaddrinfo(socket.gethostname(), None)}),
    }


QUESTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "packages": packages, "gpus": gpus, "kernel": kernel, "limits": limits, "sharing": sharing, "locking": locking,
    "names": names,
}  # fmt: skip


def probed() -> dict[str, Any]:
    """Return all answers; a question that cannot be answered has the reason instead."""
    found: dict[str, Any] = {"python": platform.python_version(), "time": time.time()}
    for name, question in QUESTIONS.items():
        try:
            found[name] = question()
        except Exception as error:  # whatever is missing here, the other answers count
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", metavar="FILE", help="write the JSON there as well")
    text = json.dumps(probed(), indent=1)
    where = parser.parse_args().results
    if where:
        Path(where).write_text(text + "\n")
    print(text)
