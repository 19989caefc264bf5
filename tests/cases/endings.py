"""Models that end their process, stop it, or write down where it listens. Ranks import them by name."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from cases.faults import kill_in
from cases.runtime import faulty, healthy


def leave(x):
    sys.exit(0)


def leaving(batch):
    """A model whose layer 3 ends the program in its fifth training pass, with the exit code of success."""
    return faulty(leave, batch)


def leaving_at_once(batch):
    sys.exit(0)


def stop(x):
    os.kill(os.getpid(), signal.SIGSTOP)
    return x


def stopping(batch):
    """A model whose layer 3 stops its process in its fifth training pass; every rank writes where it listens first."""
    build = dist.barrier

    def barrier(*arguments, **keywords):
        Path(f"listens-{dist.get_rank()}").write_text("\n".join(own_listeners()))
        return build(*arguments, **keywords)

    dist.barrier = barrier
    return faulty(stop, batch)


def own_listeners():
    """The addresses at which this process listens, in hexadecimal as the system writes them."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            mine |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(f"/proc/self/fd/{entry}")))
        except OSError:
            continue
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return sorted(row[1] for row in rows if row[3] == "0A" and row[9] in mine)


def killed_in_a_send(batch):
    """A healthy model whose rank 3 dies in the third update's first gradient; by messages, each is two sends."""
    kill_in("torch.distributed:isend", 3, 10)
    return healthy(batch)


def nan_from(index, seed):
    """Microbatches of vectors, the sixth of which has no numbers."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    x, target = torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)
    return x, target * float("nan") if index == 5 else target
