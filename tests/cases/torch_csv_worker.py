"""One rank that runs an exported schedule on stock torch: ``torch_csv_worker.py RANK RANKS STORE CSVS STAGES OUT``.

CSVS lists schedules, STAGES the stages of this rank, both with commas; the model has one linear layer per stage. For
each schedule, OUT gets the losses that the rank saw and the gradients of its stages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

STAGES, WIDTH, BATCH, MICROBATCHES = 4, 6, 2, 6


def model():
    """The stages and the mini-batch, the same on every rank."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]
    inputs, targets = torch.randn(MICROBATCHES * BATCH, WIDTH), torch.randn(MICROBATCHES * BATCH, WIDTH)
    return stages, inputs, targets


def step(schedule, mine):
    """Run one mini-batch by the schedule in a file."""
    layers, inputs, targets = model()
    device, data, inner = torch.device("cpu"), torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(layers[s], s, STAGES, device, input_args=(inner if s else data,), output_args=(inner,))
        for s in mine
    ]
    run = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    run._load_csv(schedule, format="compute_only")
    losses: list[torch.Tensor] = []
    arguments = (inputs,) if 0 in mine else ()
    if STAGES - 1 in mine:
        run.step(*arguments, target=targets, losses=losses)
    else:
        run.step(*arguments)
    return {
        "losses": [loss.item() for loss in losses],
        "gradients": {s: [p.grad.flatten().tolist() for p in layers[s].parameters()] for s in mine},
    }


def main(rank, ranks, store, schedules, mine, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    Path(out).write_text(json.dumps([step(schedule, mine) for schedule in schedules]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    number, count, where, csvs, held, target = sys.argv[1:]
    main(int(number), int(count), where, csvs.split(","), [int(s) for s in held.split(",")], target)
