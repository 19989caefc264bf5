"""What the checks on GPUs share: where they write, on which devices and models, how they run pipeplan and judge it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import checked_models
import torch
from checked_models import SAMPLES, sample
from torch import Tensor, nn

from pipeplan import zoo
from pipeplan.runtime.device import moved
from pipeplan.runtime.training.optimizers import optimizer_maker

LR = 0.01
ACCUMULATE = 4
PART_S = 300  # no command may take longer
LARGE = {"cnn": ("resnet50", 32), "gpt": ("gpt2-small,tied=false", 4), "tied": ("gpt2-small,tied=true", 4)}
SMALL = {"cnn": ("small-cnn", 4), "gpt": ("gpt-tiny", 4), "tied": ("gpt-tiny,tied=true", 4)}
LOOSE = 1e-2  # losses and weights may differ by so much, relatively, and by NOISES times what two equal runs differ by
NOISES = 10
TRAINED = "trained.pt"

Figures = dict[str, Any]
Data = Callable[[int], tuple[Tensor, Tensor]]


@dataclass
class Outcome:
    """One sentence, and its figures."""

    sentence: str
    figures: Figures = field(default_factory=dict)


class Skipped(Exception):
    """The part cannot be done here; says why."""


def needed(holds: bool, why: str) -> None:
    """Skip the part unless ``holds``."""
    if not holds:
        raise Skipped(why)


def must(holds: bool, sentence: str) -> None:
    """Let the part fail unless ``holds``."""
    if not holds:
        raise AssertionError(sentence)


@dataclass(frozen=True)
class Check:
    """What every part knows: where to write, and on what kind of device."""

    folder: Path
    kind: str

    @property
    def models(self) -> dict[str, tuple[str, int]]:
        """The zoo models, with their microbatches."""
        return LARGE if self.kind == "cuda" else SMALL

    @property
    def device(self) -> torch.device:
        """The device on which this process itself computes."""
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    @cached_property
    def gpus(self) -> int:
        """The number of GPUs here."""
        return torch.cuda.device_count() if self.kind == "cuda" else 0

    def memory(self, ranks: int) -> str:
        """What each of ``ranks`` may take of a GPU, as ``--mem`` wants it."""
        whole = torch.cuda.get_device_properties(0).total_memory if self.kind == "cuda" else 8 * 10**9
        sharing = -(-ranks // self.gpus) if self.gpus else ranks
        return f"{int(0.9 * whole / sharing)}B"

    def profile(self, name: str, dtype: str = "float32") -> Path:
        """The profile of a model, measured when first asked for."""
        model, batch = self.models[name]
        path = self.folder / f"{name}.{dtype}.profile.json"
        if not path.exists():
            steps = 20 if self.kind == "cuda" else 4
            measuring = ["--batch", batch, "--device", self.kind, "--steps", steps, "--dtype", dtype]
            self.command("profile", f"zoo:{model}", *measuring, "-q", "-o", path)
        return path

    def plan(self, name: str, ranks: int, planning: Sequence[Any], dtype: str = "float32") -> Path:
        """A plan of a model for ``ranks`` ranks."""
        path = self.folder / f"{name}.plan.json"
        fixed = ["--gpus", ranks, "--mem", self.memory(ranks), "--accumulate", ACCUMULATE]
        self.command("plan", self.profile(name, dtype), *fixed, *planning, "-o", path)
        return path

    def run(
        self,
        name: str,
        ranks: int,
        steps: int,
        planning: Sequence[Any],
        running: Sequence[Any] = (),
        *,
        data: str = "data",
        dtype: str = "float32",
        environment: Mapping[str, str] | None = None,
    ) -> Figures:
        """Plan a model for ``ranks`` ranks and run it; return what was predicted and measured."""
        plan = self.plan(name, ranks, planning, dtype)
        return self.run_plan(plan, name, steps, running, data=data, environment=environment)

    def run_plan(
        self,
        plan: Path,
        name: str,
        steps: int,
        running: Sequence[Any] = (),
        *,
        data: str = "data",
        environment: Mapping[str, str] | None = None,
    ) -> Figures:
        """Run a plan of a zoo model."""
        model, batch = self.models[name]
        words = [
            "--model",
            model,
            "--data",
            f"checked_models:{data}",
            "--steps",
            steps,
            "--lr",
            LR,
            "--device",
            self.kind,
        ]
        text = self.command(
            "run", plan, *words, "--json", *running, environment=self.surroundings(model, batch, environment)
        )
        report: Figures = json.loads(text)
        return report

    def surroundings(self, model: str, batch: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What ranks find in the environment."""
        checked = {"MODEL": model, "BATCH": str(batch), "FOLDER": str(self.folder), "DEVICE": self.kind}
        return {f"CHECKED_{key}": value for key, value in checked.items()} | dict(more or {})

    def command(self, *words: Any, environment: Mapping[str, str] | None = None) -> str:
        """Run pipeplan with these words and return what it prints; RuntimeError with its message when it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "pipeplan", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=PART_S,
            env=importing(environment),
        )
        with (self.folder / "commands.log").open("a") as log:
            log.write(f"pipeplan {' '.join(map(str, words))}\n{done.stderr}[{done.returncode}]\n")
        if done.returncode:
            raise RuntimeError(f"pipeplan {words[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout


def importing(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which Python finds these files and pipeplan."""
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict(environment or {})


# --- plain training --------------------------------------------------------------------------------------------------


def built(check: Check, name: str) -> tuple[nn.Module, Any, Data]:
    """Return a zoo model on the device in training mode, its loss and its data there."""
    model, batch = check.models[name]
    layers, _, loss = zoo.load(model)(batch, seed=0)

    def data(index: int) -> tuple[Tensor, Tensor]:
        x, y = sample(model, batch, index % SAMPLES)
        return moved(x, check.device), moved(y, check.device)

    return layers.train().to(check.device), loss, data


def whole(check: Check) -> tuple[nn.Module, Any, Data]:
    """Return the model that is traced, as :func:`built` does."""
    module, _, loss = checked_models.whole(checked_models.BATCH)

    def data(index: int) -> tuple[Tensor, Tensor]:
        x, y = checked_models.vectors(index, 0)
        return x.to(check.device), y.to(check.device)

    return module.train().to(check.device), loss, data


def serial(
    model: tuple[nn.Module, Any, Data], steps: int, optimizer: str = "sgd"
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in this process, mini-batch by mini-batch; return losses and state."""
    torch.manual_seed(1)
    layers, loss, data = model
    stepper = optimizer_maker(optimizer, LR)(list(layers.parameters()))
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


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference of losses."""
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(one, other, strict=True))


def weights_apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of weights over the largest weight; statistics of batches aside."""
    keys = [k for k in other if other[k].is_floating_point() and "running_" not in k]
    scale = max(float(other[k].abs().max()) for k in keys)
    return max(float((one[k] - other[k]).abs().max()) for k in keys) / scale


def against_serial(
    check: Check, model: tuple[nn.Module, Any, Data], found: Sequence[float], saved: Path, optimizer: str = "sgd"
) -> tuple[str, Figures]:
    """Compare a run's losses and trained weights with plain training on the same device; in words, and in figures."""
    losses, state = serial(model, len(found) // ACCUMULATE, optimizer)
    noise = check.folder / "noise.json"
    floor = json.loads(noise.read_text())["figures"]["worst"] if noise.exists() else 0.0
    loss_error = apart(found, losses)
    weight_error = weights_apart(torch.load(saved, map_location="cpu"), state)
    figures = {"largest_relative_loss_error": loss_error, "largest_weight_error_over_largest_weight": weight_error}
    words = f"losses are plain training's but for {loss_error:.1e}, weights but for {weight_error:.1e}"
    must(max(loss_error, weight_error) <= max(LOOSE, NOISES * floor), f"{words}, which is too much")
    return words, figures


# --- reports ---------------------------------------------------------------------------------------------------------


def figures_of(report: Figures) -> Figures:
    """Return of a report what is worth keeping, with the ratios that matter."""
    keep = ("hardware", "exchange", "seconds", "memory", "activations", "states", "transfers")
    figures = {key: value for key, value in report.items() if key in keep or "period" in key or "samples" in key}
    measured = report["measured_period_ns"]
    for against in ("planned", "calibrated"):
        if measured and report[f"{against}_period_ns"]:
            figures[f"measured_over_{against}"] = measured / report[f"{against}_period_ns"]
    figures["losses"] = [report["losses"][0], report["losses"][-1]]
    return figures


def period_words(figures: Figures) -> str:
    """Return how the period came out, in words."""
    ratios = [f"{figures[f'measured_over_{x}']:.2f} of the {x} one" for x in ("planned", "calibrated")
              if f"measured_over_{x}" in figures]  # fmt: skip
    return f"the period is {' and '.join(ratios)}" if ratios else "the run was too short for a period"
