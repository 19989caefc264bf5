"""Models, data and optimizers that fail on purpose, and processes that are killed in the middle of something.

Ranks import them by name.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from importlib import import_module

import torch
import torch.distributed as dist
from cases.runtime import faulty, healthy, vectors, without_limit


class BackwardFault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no way back")


def raise_value_error(x):
    raise ValueError("a bad microbatch")


def kill_process(x):
    os.kill(os.getpid(), 9)


def never_return(x):
    while True:
        time.sleep(3600)


def run_out_of_backward(x):
    return BackwardFault.apply(x)


def shrink(x):
    return x[:1]


def raising(batch):
    return faulty(raise_value_error, batch)


def killed(batch):
    return faulty(kill_process, batch)


def hanging(batch):
    return faulty(never_return, batch)


def backward_raising(batch):
    return faulty(run_out_of_backward, batch)


def shrinking(batch):
    return faulty(shrink, batch)


def without_room(batch):
    """A model too large for the files that its process may write, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return without_limit(batch)


class Tiring(torch.optim.SGD):
    """An optimizer with a fault in its third update."""

    def __init__(self, parameters, lr, killed=False):
        super().__init__(parameters, lr=lr)
        self.made, self.killed = 0, killed

    def step(self, closure=None):
        self.made += 1
        if self.made == 3:
            if self.killed:
                kill_process(None)
            raise ArithmeticError("no third time")
        return super().step(closure)


class BackwardKill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        kill_process(gradient)


def backward_killed(batch):
    return faulty(BackwardKill.apply, batch)


def ending(index, seed):
    if index >= 3:
        raise IndexError(f"there is no microbatch {index}")
    return vectors(index, seed)


def kill_in(place, rank, calls):
    """Let the process of ``rank`` kill itself in its ``calls``-th call of ``place``, once its work is under way."""
    module, _, name = place.rpartition(":")
    owner = import_module(module)
    *owners, name = name.split(".")
    for part in owners:
        owner = getattr(owner, part)
    original, made = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        found = original(*args, **kwargs)
        if dist.is_initialized() and dist.get_rank() == rank:
            made[0] += 1
            if made[0] == calls:
                kill_process(None)
        return found

    setattr(owner, name, wrapped)


class KilledInWait:
    """What a receive returns; to wait for it is deadly."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        kill_process(None)


def wait_deadly(rank, calls):
    original, made = dist.irecv, [0]

    def wrapped(*args, **kwargs):
        made[0] += 1
        work = original(*args, **kwargs)
        return KilledInWait(work) if dist.get_rank() == rank and made[0] == calls else work

    dist.irecv = wrapped


PLACES = {
    "send": ("torch.distributed:isend", 5),
    "receive": ("torch.distributed:irecv", 6),
    "reduce": ("torch.distributed:all_to_all_single", 9),  # each sum has two, the second one in the update
    "gather": ("torch.distributed:all_to_all_single", 10),
    # of the second checkpoint: its folder is there; in the middle of a rank's file; the file is there; run.json is
    # empty; everything is there but the name; the name is there; an older one is about to be removed
    "begin": ("pipeplan.runtime.training.saved_state:begin", 2),
    "shard": ("pipeplan.runtime.training.saved_state:_Summed.write", 100),
    "written": ("pipeplan.runtime.training.saved_state:_write_file", 2),
    "about": ("pipeplan.runtime.training.checkpoint:json_text", 2),
    "flushed": ("os:fsync", 7),
    "rename": ("os:replace", 2),
    "remove": ("os:replace", 3),
}


def deadly(place, rank):
    """Return what builds a model whose training is deadly for one rank."""

    def build(batch):
        if place == "wait":
            wait_deadly(rank, 5)
        else:
            where, calls = PLACES[place]
            kill_in(where, rank, calls)
        return healthy(batch)

    return build


for _place in (*PLACES, "wait"):
    for _rank in range(3):
        globals()[f"deadly_{_place}_{_rank}"] = deadly(_place, _rank)
