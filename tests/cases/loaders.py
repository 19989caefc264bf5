"""Loaders and datasets as users write them, for microbatches of 4 vectors."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from cases.runtime import chain_of, healthy, plan_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info

from pipeplan.errors import PipeplanError
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

SAMPLE_S = 0.005


class Vectors(Dataset):
    """Samples that all three kinds of random numbers change."""

    def __init__(self, count=22):
        self.count, self.epoch = count, None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = torch.rand(16) + random.random() + float(np.random.rand())
        return drawn + index, drawn

    def set_epoch(self, epoch):
        self.epoch = epoch


class Slow(Vectors):
    """The same, read so slowly that stages wait for them."""

    def __getitem__(self, index):
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


class Numbers(Vectors):
    """Their numbers alone, and the pass in which they are asked for."""

    def __getitem__(self, index):
        return index, self.epoch


class Backwards(Sampler):
    """An order that draws by Python's random numbers, a part at a time."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        for first in range(0, self.count, 2):
            yield from random.sample(range(first, min(first + 2, self.count)), min(2, self.count - first))


class Lines(IterableDataset):
    """A stream that workers share out."""

    def __init__(self, count=22, sized=False):
        self.count = count
        if sized:
            self.__class__ = SizedLines

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, self.count, step):
            yield torch.full((16,), float(index)), torch.rand(16)


class Numbered(Lines):
    """The same without chance."""

    def __iter__(self):
        return ((x, -x) for x, _ in super().__iter__())


class SizedLines(Lines):
    def __len__(self):
        return self.count


class Failing(Vectors):
    def __getitem__(self, index):
        if index == 13:
            raise ValueError(f"sample 13 is torn for {' '.join(map(str, children(os.getppid())))}")
        return super().__getitem__(index)


def children(pid):
    """The processes that another one has started, on Linux."""
    listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(map(int, " ".join(listed).split()))


def shuffled(batch):
    return DataLoader(Slow(), batch, shuffle=True, num_workers=2)


def here(batch):
    return DataLoader(Vectors(), batch, shuffle=True)


def spawned(batch):
    return DataLoader(Vectors(1000), batch, shuffle=True, num_workers=1, multiprocessing_context="spawn")


def killing(whom):
    """Run, and end the run or its only rank once all are at work; print what is told."""
    plan = plan_of(chain_of(healthy, 4), [(0, 6, (0,))], accumulate=2)
    model = ModelSpec("cases.runtime:healthy", f"{__name__}:spawned")
    server = multiprocessing.forkserver._forkserver

    def killed(step):
        if step.step != 2:
            return
        if whom == "run":
            raise PipeplanError("the run is stopped")
        os.kill(children(server._forkserver_pid)[0], signal.SIGKILL)

    try:
        run_plan(plan, model, RunOptions(steps=10**6, lr=1e-12), killed)
    except PipeplanError as error:
        print(error)


def lines(batch):
    return DataLoader(Numbered(), batch, num_workers=2)


def lines_of_one(batch):
    return DataLoader(Numbered(), batch, num_workers=1)


def _begin(worker):
    assert isinstance(get_worker_info().dataset, Failing)


def failing():
    return DataLoader(Failing(), 4, num_workers=2, worker_init_fn=_begin)


def shared_out(batch):
    return DataLoader(Vectors(), batch, sampler=DistributedSampler(Vectors(), num_replicas=2, rank=0))


def by_chance(batch):
    """Data that nothing fixes: every process has its own."""
    return DataLoader([(torch.rand(16) + os.getpid() % 1000, torch.zeros(16))] * 22, batch)


few = DataLoader(Vectors(3), 4)
eight = DataLoader(Vectors(), 8)


def a_pair(batch):
    return torch.zeros(batch, 16), torch.zeros(batch, 16)
