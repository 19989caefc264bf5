"""What one rank does from start to end: build its stages, agree with the others, walk its instructions, report."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan import Plan
from .account import Account
from .collective import agree, barrier, gathered, replica_groups, share_from, sum_over, transfer_times
from .executor import RankWork, execute
from .instructions import Edge, version_uses
from .measure import RankMeasurement, RunReport, make_report
from .model import LoadedModel, ModelSpec, TensorSpec, check_model, load_model
from .prepare import Script, prepare
from .stage import StageModule
from .transport import GlooTransport, exchanging
from .versions import Versions, optimizer_maker


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told; ``save`` is the file to which rank 0 writes the trained model's state."""

    plan: Plan
    model: ModelSpec
    steps: int
    lr: float
    seed: int
    timeout_s: float
    threads: int
    save: str | None


def _unheard(index: int) -> None:
    pass


def run_rank(
    job: Job, rank: int, open_store: Callable[[], Any], progress: Callable[[int], None] = _unheard
) -> RunReport | None:
    """Play ``rank`` in the run of ``job``; return the report on rank 0, None elsewhere.

    ``open_store`` opens the store at which the ranks meet. It is called when the model is built, so that what is wrong
    with a model shows before anybody waits. ``progress`` hears the index of each instruction.
    """
    torch.set_num_threads(job.threads)
    script = prepare(job.plan, job.steps)
    stages = job.plan.allocation.stages
    model = load_model(job.model, job.plan.chain.microbatch, job.seed)
    check_model(model, job.plan.chain, [stage.start for stage in stages[1:]])
    with exchanging("the meeting of the ranks"):
        dist.init_process_group(
            "gloo",
            store=open_store(),
            rank=rank,
            world_size=len(script.devices),
            timeout=timedelta(seconds=job.timeout_s),
        )
    agree(rank, model.boundaries)
    groups = replica_groups(script)
    for s in script.stages_of(rank):
        if s in groups:
            share_from(script.ranks_of(s)[0], groups[s], _tensors(script, s, model))
    specs = _edge_specs(script, model)
    account = Account()
    runners = {s: _stage_module(script, job, rank, s, model, account) for s in script.stages_of(rank)}
    transfer_ns = transfer_times(script, rank, specs)
    work = RankWork(
        stages=runners,
        last=len(stages) - 1,
        transport=GlooTransport(script.instructions[rank], specs, len(stages)),
        data=lambda microbatch: model.data(microbatch, job.seed),
        reduce=lambda s, tensors: sum_over(groups[s], tensors),
        progress=progress,
        accounted=script.filled,
    )
    torch.manual_seed(job.seed + 1 + rank)
    gc.collect()
    gc.freeze()  # nothing made so far will be garbage, so collections during the run stay short
    barrier()
    times = execute(script.instructions[rank], work)
    measurements = gathered(
        rank,
        RankMeasurement(
            rank=rank,
            times=tuple(times),
            losses={m: loss for runner in runners.values() for m, loss in runner.losses.items()},
            peak_activation_bytes=account.peak_bytes,
            transfer_ns=transfer_ns,
            versions={s: runner.versions.most for s, runner in runners.items()},
        ),
    )
    if job.save is not None:
        for runner in runners.values():
            runner.versions.install_newest()
        states = gathered(rank, _state(script, rank, model))
        if states is not None:
            _write(Path(job.save), {key: value for state in states for key, value in state.items()})
    dist.destroy_process_group()
    return make_report(script, measurements) if measurements is not None else None


def _own_layers(script: Script, s: int, model: LoadedModel) -> range:
    """Return the indices of the model's layers in stage ``s``; the profile's last layer, the loss, is none of them."""
    stage = script.plan.allocation.stages[s]
    return range(stage.start, min(stage.stop, len(model.layers)))


def _tensors(script: Script, s: int, model: LoadedModel) -> list[Tensor]:
    modules = [model.layers[i][1] for i in _own_layers(script, s, model)]
    return [tensor.data for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _stage_module(script: Script, job: Job, rank: int, s: int, model: LoadedModel, account: Account) -> StageModule:
    stage = script.plan.allocation.stages[s]
    modules = [model.layers[i][1] for i in _own_layers(script, s, model)]
    versions = Versions(
        modules,
        version_uses(script.instructions[rank], s),
        optimizer_maker(script.plan.policy.optimizer, job.lr),
    )
    has_loss = stage.stop == len(script.plan.chain)
    return StageModule(
        index=s,
        start=stage.start,
        stop=stage.stop,
        layers=modules,
        loss=model.loss if has_loss else None,
        checkpoint=stage.checkpoint,
        versions=versions,
        account=account,
        divisor=script.interval,
        boundaries=(model.boundaries[stage.start], None if has_loss else model.boundaries[stage.stop]),
    )


def _edge_specs(script: Script, model: LoadedModel) -> dict[Edge, TensorSpec]:
    specs: dict[Edge, TensorSpec] = {}
    for s, stage in enumerate(script.plan.allocation.stages[:-1]):
        specs["F", s] = specs["B", s + 1] = model.boundaries[stage.stop]
    return specs


def _state(script: Script, rank: int, model: LoadedModel) -> dict[str, Tensor]:
    """Return the state of the layers whose first replica this rank is, named as in the whole ``nn.Sequential``."""
    state: dict[str, Tensor] = {}
    for s in script.stages_of(rank):
        if script.ranks_of(s)[0] == rank:
            for i in _own_layers(script, s, model):
                module = model.layers[i][1]
                state |= {f"{model.keys[i]}.{key}": value for key, value in module.state_dict().items()}
    return state


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write ``state`` to ``path`` at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(dict(state), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
