"""What does torch have on this machine to train with: a build, a way between processes, GPUs, links between them?"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

NVIDIA = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
PATIENCE_S = 20
TRIED = "2.13"  # of torch, by all tests


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing: ``good`` as it is, ``absent`` but not needed by all, or ``broken``; ``told`` in words, what helps."""

    name: str
    state: Literal["good", "absent", "broken"]
    told: str
    help: str = ""


def untried(torch: str) -> str | None:
    """Return in a sentence that the tests ran with another version of torch, None where they ran with this one."""
    if torch.startswith(f"{TRIED}."):
        return None
    return f"torch {torch} is untried: pipeplan's tests run with {TRIED}"


def findings() -> Iterator[Finding]:
    """Yield what there is, from torch itself down to links."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        if error.name == "torch":
            yield Finding("torch", "absent", "not installed: profile and run need it", "pip install 'pipeplan[torch]'")
        else:
            yield Finding("torch", "broken", f"cannot be imported: {error}", "install it anew")
        return
    cuda = torch.version.cuda
    build = f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'for CPUs alone'}"
    yield Finding("torch", "good", build, untried(torch.__version__) or "")
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            "gloo", "broken", "this torch has none, so that no two processes can talk", "install another build"
        )
    else:
        yield Finding("gloo", "good", "in torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        unseen = unseen_gpus()
        if unseen is not None:
            yield Finding("GPUs", "broken", *unseen)
        else:
            yield Finding("GPUs", "absent", "none: runs and profiles are on CPUs, --estimate needs none")
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}",
            "good",
            f"{properties.name}, {properties.total_memory / 1e9:.1f} GB, compute {properties.major}.{properties.minor}",
        )
    if not dist.is_nccl_available():
        yield Finding("NCCL", "broken", "this torch has none; runs go through host memory", "install another build")
    else:
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it so
        yield Finding("NCCL", "good", ".".join(map(str, numbers)))
    if count > 1:
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        told = f"all {len(pairs)} pairs of GPUs reach each other directly"
        if apart:
            told = f"{len(apart)} of {len(pairs)} pairs go through host memory, such as {apart[0][0]} to {apart[0][1]}"
        yield Finding("links", "good", told)


def unseen_gpus() -> tuple[str, str] | None:
    """Return that the driver has GPUs of which torch sees none, and what helps; None where it has none either."""
    import torch

    driven = _driven()
    if not driven:
        return None
    why = "is a build for CPUs alone" if torch.version.cuda is None else "sees none"
    help_ = "install torch for the driver's CUDA, and look at CUDA_VISIBLE_DEVICES"
    return f"the driver has {len(driven)} ({driven[0]}), torch {why}", help_


def _driven() -> list[str]:
    """Return the GPUs that the driver names, whatever torch sees; nothing without a driver."""
    if shutil.which(NVIDIA[0]) is None:
        return []
    try:
        done = subprocess.run(NVIDIA, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
