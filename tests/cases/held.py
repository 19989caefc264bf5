"""How much memory a process takes that measures layers, and does nothing else."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeplan.runtime.model.network import chain_network
from pipeplan.runtime.processes.own_processes import context_of
from pipeplan.runtime.profiler.measure import profile_network
from pipeplan.runtime.profiler.steps import MeasureOptions

from .patience import SECONDS

M_MMAP_THRESHOLD = -3  # of malloc.h
LAYERS, ROWS, WIDTH = 12, 1024, 4096
SAVED_BYTES = ROWS * WIDTH * 4 * 2  # by each layer


def peak_bytes(hold: str) -> int:
    """Return the most that it holds as it measures :data:`LAYERS` layers, held as ``hold`` says."""
    context = context_of()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(hold, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(SECONDS), "it hangs"
        return int(ours.recv())
    finally:
        process.kill()
        process.join()


def _measure(hold: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # what is freed leaves the process, whatever was freed before
    layers = [nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)) for _ in range(LAYERS)]
    network = chain_network(layers, torch.randn(ROWS, 8))
    profile_network(network, lambda y, t: y.square().mean(), MeasureOptions(1, 1, hold=hold))
    pipe.send(1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]))  # type: ignore[index]
