"""Check on a machine with a GPU what tests elsewhere cannot: profiles, runs, memory and exactness on the device.

    python scripts/checks/gpu.py FOLDER [--seconds 450] [--part NAME]... [--device cpu]

Each part writes its figures to FOLDER/results.json as soon as it has them; one that fails leaves its error there, and
the exit code is 1. Parts that don't begin within the time are listed as skipped. With one GPU two ranks share it and
exchange through the host; with more, NCCL is used. ``--device cpu`` rehearses all of it on small models.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan import zoo
from pipeplan.runtime.device import moved, random_state, settle, with_random_state
from pipeplan.runtime.profiler.clock import clock_of
from pipeplan.runtime.training.optimizers import optimizer_maker

LR = 0.01
ACCUMULATE = 4
SAMPLES = 8  # microbatches that are made; more of them repeat these, so that making data isn't what is measured
ON_GPU = {"resnet50": ("resnet50", 32), "gpt2-small": ("gpt2-small,tied=false", 4)}
ON_CPU = {"resnet50": ("small-cnn", 4), "gpt2-small": ("gpt-tiny", 4)}
PART_S = 150  # no part may take longer

Figures = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """What every part knows: where to write, on what kind of device, and the models with their microbatches."""

    folder: Path
    kind: str
    models: dict[str, tuple[str, int]]

    @property
    def device(self) -> torch.device:
        """The device on which this process itself computes."""
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    def memory(self, shared_by: int) -> str:
        """What each of ``shared_by`` ranks may take of a GPU, as ``--mem`` wants it."""
        whole = torch.cuda.get_device_properties(0).total_memory if self.kind == "cuda" else 8 * 10**9
        alone = self.kind == "cuda" and torch.cuda.device_count() >= shared_by
        return f"{int(0.9 * whole / (1 if alone else shared_by))}B"

    def profile(self, name: str) -> Path:
        """The profile of a model, measured when first asked for."""
        model, batch = self.models[name]
        path = self.folder / f"{name}.profile.json"
        if not path.exists():
            command("profile", f"zoo:{model}", "--batch", batch, "--device", self.kind, "--steps", 20, "-q", "-o", path)
        return path

    def run(self, name: str, gpus: int, steps: int, planning: list[Any], running: list[Any]) -> Figures:
        """Plan a model for ``gpus`` ranks and run it; return what was predicted and measured."""
        model, _ = self.models[name]
        plan = self.folder / f"{name}.plan.json"
        fixed = ["--gpus", gpus, "--mem", self.memory(gpus), "--accumulate", ACCUMULATE]
        command("plan", self.profile(name), *fixed, *planning, "-o", plan)
        options = ["--model", model, "--data", f"gpu:{name.partition('-')[0]}_{self.kind}", "--steps", steps]
        text = command("run", plan, *options, "--lr", LR, "--device", self.kind, "--json", *running)
        report: Figures = json.loads(text)
        keep = ("hardware", "exchange", "seconds", "losses", "memory", "activations", "stages", "transfers")
        return {key: value for key, value in report.items() if key in keep or "period" in key or "samples" in key}


def command(*words: Any) -> str:
    """Run pipeplan with these words and return what it prints; RuntimeError with its message when it fails."""
    here = str(Path(__file__).resolve().parent)
    paths = [here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PART_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    if done.returncode:
        raise RuntimeError(f"pipeplan {words[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


@cache
def sample(model: str, batch: int, index: int) -> tuple[Tensor, Tensor]:
    """Return a microbatch, made once."""
    return zoo.load(model).data(batch)(index, 0)


def cycled(models: dict[str, tuple[str, int]], name: str, index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return microbatch ``index`` of endless repetitions of the first ones."""
    return sample(*models[name], index % SAMPLES)


# data(index, seed) as --data wants it, for either kind of device
resnet50_cuda, resnet50_cpu = partial(cycled, ON_GPU, "resnet50"), partial(cycled, ON_CPU, "resnet50")
gpt2_cuda, gpt2_cpu = partial(cycled, ON_GPU, "gpt2-small"), partial(cycled, ON_CPU, "gpt2-small")


def build(check: Check, name: str) -> tuple[nn.Module, Any, Callable[[int], tuple[Tensor, Tensor]]]:
    """Return a model on the device in training mode, its loss and its data there."""
    model, batch = check.models[name]
    layers, _, loss = zoo.load(model)(batch, seed=0)

    def data(index: int) -> tuple[Tensor, Tensor]:
        x, y = sample(model, batch, index % SAMPLES)
        return moved(x, check.device), moved(y, check.device)

    return layers.train().to(check.device), loss, data


def serial(check: Check, name: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train in this process, mini-batch by mini-batch; return losses and state."""
    torch.manual_seed(1)
    layers, loss, data = build(check, name)
    stepper = optimizer_maker("sgd", LR)(list(layers.parameters()))
    losses = []
    for step in range(steps):
        layers.zero_grad()
        for m in range(step * ACCUMULATE, (step + 1) * ACCUMULATE):
            x, target = data(m)
            value = loss(layers(x), target)
            losses.append(value.detach())
            (value / ACCUMULATE).backward()
        stepper.step()
    return [float(x) for x in losses], {k: v.cpu() for k, v in layers.state_dict().items()}


def against_serial(check: Check, name: str, found: list[float], saved: Path) -> Figures:
    """Compare a run's losses and trained weights with plain training on the same device."""
    losses, state = serial(check, name, len(found) // ACCUMULATE)
    trained = torch.load(saved, map_location="cpu")
    weights = [k for k in state if state[k].is_floating_point() and "running_" not in k]
    scale = max(float(state[k].abs().max()) for k in weights)
    furthest = max(float((state[k] - trained[k]).abs().max()) for k in weights) / scale
    loss_error = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, losses, strict=True))
    figures = {"largest_relative_loss_error": loss_error, "largest_weight_error_over_largest_weight": furthest}
    if loss_error > 1e-2 or furthest > 1e-2:
        raise RuntimeError(f"the run isn't plain training: {figures}")
    return figures


# --- parts -----------------------------------------------------------------------------------------------------------


def hardware(check: Check) -> Figures:
    """What this machine is."""
    figures: Figures = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    if check.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        figures |= {
            "gpus": torch.cuda.device_count(),
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]  # torch has no type there
        }
    return figures


def profiling(check: Check, name: str) -> Figures:
    """Are layer times those of whole steps, and saved bytes those that a whole forward keeps?"""
    chain = json.loads(check.profile(name).read_text())
    layers, loss, data = build(check, name)
    stepper = optimizer_maker("sgd", 0.0)(list(layers.parameters()))
    clock = clock_of(check.device)
    x, target = data(0)
    times, kept = [], None
    for _ in range(12):
        layers.zero_grad(set_to_none=True)
        settle(check.device)
        before = torch.cuda.memory_allocated() if check.kind == "cuda" else None
        start = clock.mark()
        value = loss(layers(x), target)
        if before is not None:
            kept = torch.cuda.memory_allocated() - before
        value.backward()
        end = clock.mark()
        stepper.step()
        clock.settle()
        times.append(clock.between(start, end))
    whole = statistics.median(times[4:])
    parts = sum(layer["forward_ns"] + layer["backward_ns"] for layer in chain["layers"])
    saved = sum(layer.get("saved_bytes") or 0 for layer in chain["layers"])
    return {
        "device": chain["device"],
        "whole_step_ns": whole,
        "layers_over_whole": parts / whole,
        "saved_bytes": saved,
        "forward_keeps_bytes": kept,
        "saved_over_kept": None if not kept else saved / kept,
    }


def one_rank(check: Check, name: str) -> Figures:
    """Is the period of one rank the predicted one, its memory too, and the training plain training?"""
    saved = check.folder / "trained.pt"
    figures = check.run(name, 1, 12, ["--weights", "flush", "--no-checkpointing"], ["--save", saved])
    return ratios(figures) | against_serial(check, name, figures["losses"], saved)


def two_ranks(check: Check, name: str) -> Figures:
    """Two ranks, drained: the training of one process? On one GPU they take turns, so the period is no check there."""
    saved = check.folder / "trained.pt"
    planning = ["--weights", "flush", "--no-checkpointing", "--no-replicas", "--algorithm", "contiguous"]
    figures = check.run(name, 2, 12, planning, ["--save", saved])
    return ratios(figures) | against_serial(check, name, figures["losses"], saved)


def never_drained(check: Check, name: str) -> Figures:
    """Two ranks with two weight versions, and recomputation where the planner likes it."""
    planning = ["--weights", "2bw", "--no-replicas", "--algorithm", "contiguous", "--checkpointing", "segments"]
    figures = check.run(name, 2, 12, planning, [])
    losses = figures["losses"]
    if not losses[-1] < losses[0] * 1.5:
        raise RuntimeError(f"the loss goes from {losses[0]} to {losses[-1]}")
    return ratios(figures)


def replicas(check: Check, name: str) -> Figures:
    """One stage on two ranks: gradients are summed between them."""
    saved = check.folder / "trained.pt"
    planning = ["--weights", "flush", "--no-checkpointing", "--algorithm", "data-parallel"]
    figures = check.run(name, 2, 6, planning, ["--save", saved])
    return ratios(figures) | against_serial(check, name, figures["losses"], saved)


def message_driven(check: Check, name: str) -> Figures:
    """Passes in the order in which messages come, which threads receive."""
    saved = check.folder / "trained.pt"
    planning = ["--weights", "flush", "--no-checkpointing", "--no-replicas", "--algorithm", "contiguous"]
    figures = check.run(name, 2, 6, [*planning, "--schedule", "message-driven"], ["--save", saved])
    return ratios(figures) | against_serial(check, name, figures["losses"], saved)


def checkpoints(check: Check, name: str) -> Figures:
    """Adam's state goes to a checkpoint and back: the same losses as without a break."""
    planning = ["--weights", "flush", "--no-checkpointing", "--optimizer", "adam"]
    with tempfile.TemporaryDirectory() as place:
        whole = check.run(name, 1, 6, planning, [])["losses"]
        folder = ["--checkpoint", place]
        first = check.run(name, 1, 3, planning, folder)["losses"]
        rest = check.run(name, 1, 6, planning, [*folder, "--resume"])["losses"]
    error = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(whole, first + rest, strict=True))
    if error > 1e-2:
        raise RuntimeError(f"after a break losses differ by {error:.2%}")
    return {"largest_relative_loss_error": error, "resumed_losses": len(rest)}


def randomness(check: Check) -> Figures:
    """Dropout that is run again drops the same."""
    drop = nn.Dropout(0.5).to(check.device)
    x = torch.ones(10_000, device=check.device)
    state = random_state(check.device)
    first, after = drop(x), drop(x)
    with with_random_state(state, check.device):
        again = drop(x)
    if not torch.equal(first, again) or torch.equal(after, again):
        raise RuntimeError("dropout run again drops something else")
    torch.manual_seed(5)
    one = drop(x)
    torch.manual_seed(5)
    with with_random_state(state, check.device):
        drop(x)
    if not torch.equal(one, drop(x)):
        raise RuntimeError("running again moves the random numbers that follow")
    return {"equal": True}


def nccl_alone(check: Check) -> Figures:
    """NCCL connects and sums in a group of one rank beside gloo, as runs use it."""
    if check.kind != "cuda":
        return {"skipped": "there is no GPU"}
    with tempfile.TemporaryDirectory() as place:
        store = dist.FileStore(f"{place}/store", 1)  # type: ignore[attr-defined]  # not exported for type checkers
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            group = dist.new_group([0], backend="nccl")
            x = torch.ones(1000, device=check.device)
            dist.all_reduce(x, group=group)
            dist.barrier()
            settle(check.device)
            return {"sum": float(x.sum())}
        finally:
            dist.destroy_process_group()


def ratios(figures: Figures) -> Figures:
    """Add the ratios that matter, and keep of the losses the first and the last."""
    measured = figures["measured_period_ns"]
    for against in ("planned", "calibrated"):
        predicted = figures[f"{against}_period_ns"]
        if measured and predicted:
            figures[f"measured_over_{against}"] = measured / predicted
    for memory in figures["memory"]:
        memory["measured_over_planned"] = memory["measured_bytes"] / memory["planned_bytes"]
    return {**figures, "losses": [figures["losses"][0], figures["losses"][-1]]}


def parts_of(check: Check) -> dict[str, Callable[[], Figures]]:
    """Return all parts in order of importance."""
    parts: dict[str, Callable[[], Figures]] = {
        "hardware": partial(hardware, check),
        "randomness": partial(randomness, check),
        "nccl": partial(nccl_alone, check),
    }
    for part in (profiling, one_rank, two_ranks):
        for name in check.models:
            parts[f"{part.__name__}:{name}"] = partial(part, check, name)
    gpt = "gpt2-small"
    for part in (replicas, never_drained, checkpoints, message_driven):
        parts[f"{part.__name__}:{gpt}"] = partial(part, check, gpt)
    return parts


def main() -> int:
    """Run the parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--part", action="append", dest="chosen", metavar="NAME", help="these alone, such as one_rank")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu: torch sees no GPU here; --device cpu rehearses the checks", file=sys.stderr)
        return 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder.resolve()
    check = Check(folder, arguments.device, ON_GPU if arguments.device == "cuda" else ON_CPU)
    began, results, good = time.monotonic(), dict[str, Figures](), True
    for name, part in parts_of(check).items():
        if arguments.chosen and name.partition(":")[0] not in arguments.chosen:
            continue
        start = time.monotonic()
        if start - began > arguments.seconds - 20:
            results[name] = {"skipped": "out of time"}
            continue
        try:
            results[name] = part()
        except Exception as error:
            good = False
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        if check.kind == "cuda":
            torch.cuda.empty_cache()
        results[name]["part_s"] = round(time.monotonic() - start, 1)
        print(name, results[name].get("error", "good"), f"{results[name]['part_s']} s", flush=True)
        written = folder / ".results.json"
        written.write_text(json.dumps(results, indent=1) + "\n")
        written.replace(folder / "results.json")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
