"""What the checks on GPUs share: models and devices, how they profile, plan and run in this process, and judge it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import checked_models
import torch
from checked_models import MODELS, SAMPLES, sample
from torch import Tensor, nn

import pipeplan as pp
from pipeplan import zoo
from pipeplan.api.given.profiles import Profile
from pipeplan.plan import Plan
from pipeplan.runtime.device import moved
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.training.update.optimizers import optimizer_maker

LR = 0.01
ACCUMULATE = 4
STEPS = 6
COMMAND_S = 300  # no command may take longer
LOOSE = 1e-2  # losses and weights may differ by so much, relatively, and by NOISES times what two equal runs differ by
NOISES = 10

FLUSH: Mapping[str, Any] = {"weights": "flush", "checkpointing": "none"}
STRAIGHT = {**FLUSH, "no_replicas": True, "algorithm": "contiguous"}
NEVER = {"weights": "2bw", "no_replicas": True, "algorithm": "contiguous"}
REPLICAS = {"algorithm": "data-parallel", "checkpointing": "none"}

Figures = dict[str, Any]
Data = Callable[[int], tuple[Tensor, Tensor]]


@dataclass
class Outcome:
    """One sentence, and its figures."""

    sentence: str
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A question with what it takes: so many seconds about, and GPUs; ``rehearsed`` are those that need no GPU then."""

    ask: Callable[[Check], Outcome]
    question: str
    seconds: float
    gpus: int = 1
    rehearsed: bool = True


class Skipped(Exception):
    """The part cannot be done here; says why."""


class TooFewGpus(Exception):
    """The part wants more GPUs than there are."""


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
    """What every part knows: where large files go, and on what kind of device."""

    folder: Path
    kind: str
    noise: list[float] = field(default_factory=list)
    serial: dict[tuple[Any, ...], tuple[list[float], dict[str, Tensor]]] = field(default_factory=dict)
    _profiles: dict[tuple[str, str], Profile] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device on which this process itself computes."""
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    @cached_property
    def gpus(self) -> int:
        """The number of GPUs here."""
        return torch.cuda.device_count() if self.kind == "cuda" else 0

    @property
    def steps(self) -> int:
        """The steps of a profile."""
        return 20 if self.kind == "cuda" else 3

    def memory(self, ranks: int) -> str:
        """What each of ``ranks`` may take of a GPU, as ``mem`` wants it."""
        whole = torch.cuda.get_device_properties(0).total_memory if self.kind == "cuda" else 8 * 10**9
        sharing = -(-ranks // self.gpus) if self.gpus else ranks
        return f"{int(0.9 * whole / sharing)}B"

    def profile(self, name: str, dtype: str = "float32") -> Profile:
        """The profile of a model of :data:`.checked_models.MODELS`, measured when first asked for."""
        if (name, dtype) not in self._profiles:
            model, batch = MODELS[name]
            measuring = {"device": self.kind, "steps": self.steps, "dtype": dtype, "seconds": 20.0}
            self._profiles[name, dtype] = pp.profile(f"zoo:{model}", microbatch=batch, **measuring)
            self.clean()
        return self._profiles[name, dtype]

    def plan(self, name: str, ranks: int, planning: Mapping[str, Any], dtype: str = "float32") -> Plan:
        """A plan of a model for ``ranks`` ranks."""
        asked = {"gpus": ranks, "mem": self.memory(ranks), "accumulate": ACCUMULATE} | dict(planning)
        return pp.plan(self.profile(name, dtype), **asked).plan

    def run(self, plan: Plan, data: str, steps: int = STEPS, **running: Any) -> Figures:
        """Run a plan on ``data`` of :mod:`checked_models`, unless named; return what was predicted and measured."""
        module, _, function = data.rpartition(":")
        name = next(name for name, (model, _) in MODELS.items() if plan.chain.name == model)
        model = ModelSpec(MODELS[name][0], f"{module or 'checked_models'}:{function}")
        report = pp.run_plan(plan, model, RunOptions(steps=steps, **{"lr": LR, "device": self.kind} | running))
        assert report is not None, "torchrun starts nothing here"
        return asdict(report)

    def clean(self) -> None:
        """Give the GPU's memory back to those who share it."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def command(self, *words: Any, environment: Mapping[str, str] | None = None) -> str:
        """Run Python with these words and return what it prints; RuntimeError with its message when it fails."""
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env=importing(environment),
        )
        if done.returncode:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def run_words(self, plan: Plan, data: str, steps: int) -> list[Any]:
        """Return what ``python`` is told to run a plan in a process that can be sent signals, or has an environment."""
        file = self.folder / "command.plan.json"
        from pipeplan.files.plans import plan_text

        file.write_text(plan_text(plan))
        model = MODELS[data if data in MODELS else "gpt"][0]
        named = ["--model", model, "--data", f"checked_models:{data}", "--lr", LR, "--device", self.kind]
        return ["-m", "pipeplan", "run", file, *named, "--steps", steps]


def importing(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which Python finds these files and pipeplan."""
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict(environment or {})


# --- plain training --------------------------------------------------------------------------------------------------


def built(check: Check, name: str) -> tuple[nn.Module, Any, Data]:
    """Return a zoo model on the device in training mode, its loss and its data there."""
    model, batch = MODELS[name]
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
    model: tuple[nn.Module, Any, Data], steps: int, optimizer: str = "sgd", clip: float | None = None
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
        if clip is not None:
            nn.utils.clip_grad_norm_(layers.parameters(), clip)
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


def plainly(check: Check, name: str, steps: int, **training: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and state of a model that was trained in this process, once for all parts."""
    key = (name, steps, *sorted(({"optimizer": "sgd", "clip": None} | training).items()))
    if key not in check.serial:
        check.serial[key] = serial(whole(check) if name == "whole" else built(check, name), steps, **training)
    return check.serial[key]


def against_serial(
    check: Check, name: str, found: Sequence[float], saved: Path, **training: Any
) -> tuple[str, Figures]:
    """Compare a run's losses and trained weights with plain training on the same device; in words, and in figures."""
    losses, state = plainly(check, name, len(found) // ACCUMULATE, **training)
    loss_error = apart(found, losses)
    weight_error = weights_apart(torch.load(saved, map_location="cpu"), state)
    figures = {"largest_relative_loss_error": loss_error, "largest_weight_error_over_largest_weight": weight_error}
    words = f"losses are plain training's but for {loss_error:.1e}, weights but for {weight_error:.1e}"
    must(max(loss_error, weight_error) <= max([LOOSE, *(NOISES * x for x in check.noise)]), f"{words}: too much")
    return words, figures


# --- reports ---------------------------------------------------------------------------------------------------------


def figures_of(report: Figures) -> Figures:
    """Return of a report what is worth keeping, with the ratios that matter."""
    keep = ("hardware", "exchange", "sums", "seconds", "memory", "activations", "states", "transfers")
    figures = {key: value for key, value in report.items() if key in keep or "period" in key or "samples" in key}
    measured = report["measured_period_ns"]
    for against in ("planned", "calibrated"):
        if measured and report[f"{against}_period_ns"]:
            figures[f"measured_over_{against}"] = measured / report[f"{against}_period_ns"]
    figures["losses"] = [report["losses"][0], report["losses"][-1]]
    figures["memory_over_planned"] = [x["measured_bytes"] / x["planned_bytes"] for x in report["memory"]]
    return figures


def period_words(figures: Figures) -> str:
    """Return how the period came out, in words."""
    ratios = [f"{figures[f'measured_over_{x}']:.2f} of the {x} one" for x in ("planned", "calibrated")
              if f"measured_over_{x}" in figures]  # fmt: skip
    return f"the period is {' and '.join(ratios)}" if ratios else "the run was too short for a period"
