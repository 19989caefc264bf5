"""One rank that runs exported stages, of four layers, on stock torch."""

from __future__ import annotations

import gc
import importlib.util
import json
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

NAMES, WIDTH, BATCH, MICROBATCHES = ["a", "b", "c", "d"], 6, 2, 6


def model():
    """The model and the mini-batch, the same on every rank."""
    torch.manual_seed(0)
    layers = nn.Sequential(OrderedDict((x, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for x in NAMES))
    inputs, targets = torch.randn(MICROBATCHES * BATCH, WIDTH), torch.randn(MICROBATCHES * BATCH, WIDTH)
    return layers, inputs, targets


def held():
    """The bytes of all tensors that there are, but for numbers and what views share."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and x.dim()]
    found += [x.grad for x in found if x.is_leaf and x.grad is not None]
    storages = [x.untyped_storage() for x in found if x.device.type == "cpu"]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def step(path):
    """Run one mini-batch by the exported module in a file."""
    spec = importlib.util.spec_from_file_location("exported", path)
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    layers, inputs, targets = model()
    device, traced = torch.device("cpu"), hasattr(exported, "SPLIT")
    given = (layers, inputs[:BATCH]) if traced else (layers,)
    run = exported.schedule(*given, device, nn.functional.mse_loss)
    mine = exported.RANKS[dist.get_rank()]
    last = max(map(max, exported.RANKS))
    losses: list[torch.Tensor] = []
    arguments = (inputs,) if 0 in mine else ()
    before = held()
    if last in mine:
        run.step(*arguments, target=targets, losses=losses)
    else:
        run.step(*arguments)
    trained = run._stage.submod if traced else layers
    gradients = sum(p.grad.untyped_storage().nbytes() for p in trained.parameters() if p.grad is not None)
    return {
        "held": held() - before - gradients,
        "losses": [loss.item() for loss in losses],
        "gradients": {n: p.grad.flatten().tolist() for n, p in trained.named_parameters() if p.grad is not None},
    }


def main(rank, ranks, store, files, out):
    """Write for each file, a Python module, the losses that the rank saw, the gradients of its stages by the names of
    the model, and the bytes that are held behind the step."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    gc.collect()
    gc.freeze()  # or each look for tensors goes through all of torch
    Path(out).write_text(json.dumps([step(path) for path in files]))
    dist.barrier()
    dist.destroy_process_group()
