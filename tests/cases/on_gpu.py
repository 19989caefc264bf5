"""Ranks of a run played one by one in this process, each on a GPU that isn't there (:mod:`oracles.gpu`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from cases.runtime import vectors
from oracles.gpu import Event, Gpu, Kernels, Stream, in_stream
from oracles.ranks import Ranks
from torch import nn

from pipeplan.runtime.device import random_state
from pipeplan.runtime.engine import own_stages, phases, preparation, reading
from pipeplan.runtime.engine.job import Job, Launcher
from pipeplan.runtime.exchange import links
from pipeplan.runtime.measure.recorder import CudaRecorder
from pipeplan.runtime.training import held, repeatable, stage
from pipeplan.runtime.training.update import exchanges, factors, offload


def mean_square(output, target):
    return nn.functional.mse_loss(output, target)


def linears(batch):
    torch.manual_seed(1)
    return [nn.Linear(16, 16) for _ in range(8)], torch.zeros(batch, 16), mean_square


def tied(batch):
    layers, x, loss = linears(batch)
    layers[7].weight = layers[0].weight
    layers[4].weight = layers[1].weight
    return layers, x, loss


SLOW_S = 0.5  # longer than a layer takes on a busy machine


def read_slowly(index, seed):
    """Vectors that a disk gives in its own time."""
    time.sleep(SLOW_S)
    return vectors(index, seed)


@contextmanager
def gpu_of(rank: int, world: int) -> Iterator[tuple[Gpu, Ranks]]:
    """Within the context the runtime sees a GPU and the ranks of a run, in its place that of ``rank``."""
    gpu = Gpu(rank)
    ranks = Ranks(gpu, world)
    fakes = {name: getattr(ranks, name) for name in dir(Ranks) if not name.startswith("_")}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple("torch.distributed", **fakes))
        patches.enter_context(mock.patch.dict(os.environ))
        for owner, name, value in (
            (torch.cuda, "Event", lambda enable_timing=False: Event(gpu)),
            (torch.cuda, "Stream", lambda *_, **__: gpu.new_stream()),
            (torch.cuda, "stream", lambda chosen: in_stream(gpu, chosen)),
            (torch.cuda, "current_stream", lambda *_: Stream(gpu, gpu.current)),
            (torch.Tensor, "record_stream", lambda tensor, chosen: gpu.record_stream(tensor, chosen)),
            (links, "new_stream", lambda *_, **__: gpu.new_stream()),
            (offload, "new_stream", lambda *_: gpu.new_stream()),
            (exchanges, "new_stream", lambda *_: gpu.new_stream()),
            *((x, "event_on", lambda _: Stream(gpu, gpu.current).record_event()) for x in (offload, held)),
            (links, "settle", lambda *_: Stream(gpu, gpu.current).synchronize()),
            (links, "on_host", gpu.on_host),
            (stage, "on_host", gpu.on_host),
            (factors, "on_host", gpu.on_host),
            (reading, "moved", gpu.moved),
            (repeatable, "random_state", lambda device: gpu.of_the_host(random_state(device))),
            (phases, "gc", SimpleNamespace(collect=int, freeze=int, set_threshold=lambda *_: None)),
            (preparation, "exchange_of", lambda *_: "nccl"),
            (preparation, "clock_offset", lambda *_: 0),
            (preparation, "recorder_of", lambda _, offset_ns, timeout: CudaRecorder(timeout, offset_ns)),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield gpu, ranks


def played(job: Job) -> list[tuple[Gpu, Ranks]]:
    """Every rank of ``job`` from its meeting to its last update."""
    lowered = job.lowered()
    return [play(job, lowered, rank) for rank in range(len(lowered.devices))]


class Begins(Launcher):
    def __init__(self, at):
        self.at = at


def play(job: Job, lowered, number: int) -> tuple[Gpu, Ranks]:
    """One rank of ``job``."""
    lowered_once = mock.patch.object(Job, "lowered", return_value=lowered)
    with gpu_of(number, len(lowered.devices)) as (gpu, ranks), lowered_once:
        own = lowered.instructions[number]
        launcher = Begins(lambda index: gpu.begin(own[index]))
        rank, ties, masters = preparation.build_model(job, number, launcher)
        with Kernels(gpu):
            meeting = preparation.meet(job, rank, launcher, ties, masters)
            stages = own_stages.OwnStages(job, rank, meeting, ties, masters)
            gpu.waits.clear()  # what is waited for before the run is no matter
            phases.train(own_stages.RankRun(job, rank, launcher, meeting, stages, reading.Reader(job, rank)))
    return gpu, ranks
