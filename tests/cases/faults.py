"""Models, data and optimizers that fail on purpose, and processes that are killed in the middle of something.

Ranks import them by name.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from importlib import import_module
from multiprocessing import parent_process
from types import SimpleNamespace

import torch
import torch.distributed as dist
from cases.runtime import backwards, faulty, healthy, vectors, without_limit


def no_way_back(gradient):
    raise ArithmeticError("no way back")


def raise_value_error(x):
    raise ValueError("a bad microbatch")


def kill_process(x):
    os.kill(os.getpid(), 9)


def never_return(x):
    while True:
        time.sleep(3600)


def run_out_of_backward(x):
    return backwards(no_way_back)(x)


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


def fill_disk(size=2**10):
    """Let no file be larger than ``size``."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def without_room(batch):
    """A model too large for the files that its process may write, as on a disk that is full."""
    fill_disk(2**16)
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


def backward_killed(batch):
    return faulty(backwards(kill_process), batch)


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


SAVED = "pipeplan.runtime.training.state.written"


def in_second_file(rank, do):
    """Let ``do`` happen in the middle of the file that ``rank`` writes to its second checkpoint."""
    saved = import_module(SAVED)
    write_file, save, made = saved._write_file, saved._save, [0, 0]

    def counted(*args):
        made[0] += 1
        return write_file(*args)

    def wrapped(value, file):
        def write(data):
            made[1] += made[0] == 2 and dist.get_rank() == rank
            if made[1] == 8:
                do()
            return file.write(data)

        save(value, SimpleNamespace(write=write, flush=file.flush))

    saved._write_file, saved._save = counted, wrapped


IN_FILE = {
    "shard": lambda: kill_process(None),
    "launcher": lambda: os.kill(parent_process().pid, signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "full": fill_disk,
}

NEARBY = "pipeplan.runtime.exchange.nearby:NearbyTransport"
PLACES = {
    "send": (f"{NEARBY}.send", 5),
    "receive": (f"{NEARBY}.post", 6),
    "wait": (f"{NEARBY}.take", 5),
    "isend": ("torch.distributed:isend", 5),  # where threads exchange
    "irecv": ("torch.distributed:irecv", 6),
    "reduce": ("torch.distributed:all_to_all_single", 9),  # each sum has two, the second one in the update
    "gather": ("torch.distributed:all_to_all_single", 10),
    # of the second checkpoint: its folder is there; a rank's file is; run.json is, but empty; everything is there but
    # the name; the name is there; an older one is about to be removed
    "begin": (f"{SAVED}:begin", 2),
    "written": (f"{SAVED}:_write_file", 2),
    "about": ("pipeplan.runtime.training.state.checkpoint:json_text", 2),
    "flushed": ("os:fsync", 7),
    "rename": ("os:replace", 2),
    "remove": ("os:replace", 3),
}


def deadly(place, rank):
    """Return what builds a model whose training is deadly for one rank."""

    def build(batch):
        if place in IN_FILE:
            in_second_file(rank, IN_FILE[place])
        else:
            where, calls = PLACES[place]
            kill_in(where, rank, calls)
        return healthy(batch)

    return build


for _place in (*PLACES, *IN_FILE):
    for _rank in range(4):
        globals()[f"deadly_{_place}_{_rank}"] = deadly(_place, _rank)
