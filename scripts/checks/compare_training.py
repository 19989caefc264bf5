"""Train one task with every way of keeping weights, and compare loss, time and memory: what does TiMePReSt bring?

    python scripts/checks/compare_training.py [digits] [text] [--gpus N] [--epochs N] [--lr LR] [--seeds N] [-o FOLDER]

digits: a small network like VGG on scikit-learn's handwritten digits. text: gpt-tiny on Python's language reference.

All systems cut the model at the same layers, train on the same mini-batches in the same order, and update once for
each; PipeDream (weight stashing) pipelines whole mini-batches, as its paper does, the others microbatches. An epoch's
time is the measured period in steady state times its microbatches; its loss is the mean over its mini-batches as they
were trained. Memory of a stage is what its process measured: the peak of the activations, and its weight versions, one
gradient and the optimizer's state, which are counted. Prints a table for each task, and what became of the three claims
of the paper: faster epochs than PipeDream, 40-50% less memory, more epochs needed. With -o the curves and the figures.

Wants a quiet machine with a core for each process; the load is printed beside the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import training_tasks
from torch import Tensor

from pipeplan.plan import Plan
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Platform, Policy, Problem, Weights
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.measure.report import RunReport
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.zoo.model import Model, token_loss

MINI_BATCH = 32
MICROBATCHES = 4


@dataclass(frozen=True)
class System:
    """A way of keeping weights; ``whole`` pipelines mini-batches undivided, ``alone`` uses one GPU."""

    name: str
    weights: Weights
    vertical_sync: bool = False
    whole: bool = False
    alone: bool = False


SYSTEMS = (
    System("SGD on one GPU", "flush", alone=True),
    System("flush (1F1B)", "flush"),
    System("2BW", "2bw"),
    System("PipeDream", "stash", whole=True),
    System("PipeDream, vertical sync", "stash", vertical_sync=True, whole=True),
    System("TiMePReSt", "latest"),
    System("TiMePReSt, vertical sync", "latest", vertical_sync=True),
)


@dataclass(frozen=True)
class Task:
    """A model with its data; ``mini_batches`` of an epoch, and how well it does on samples that it never saw."""

    model: Model[Any]
    mini_batches: int
    lr: float
    measure: str
    unseen: Callable[[], tuple[Tensor, Tensor]]
    judge: Callable[[Tensor, Tensor], Tensor]

    def on_unseen(self, trained: Path) -> float:
        """Return the measure of the model whose state is in the file ``trained``."""
        layers, _, _ = self.model(MINI_BATCH)
        layers.load_state_dict(torch.load(trained, weights_only=True))
        layers.eval()
        inputs, targets = self.unseen()
        with torch.no_grad():
            return float(self.judge(layers(inputs), targets))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of right classes."""
    return (output.argmax(1) == target).float().mean()


TASKS = {
    "digits": Task(
        training_tasks.digits,
        training_tasks.training_digits() // MINI_BATCH,
        0.005,
        "accuracy on unseen digits",
        training_tasks.unseen_digits,
        accuracy,
    ),
    "text": Task(training_tasks.text, 32, 0.01, "loss on unseen text", training_tasks.unseen_text, token_loss),
}


@dataclass(frozen=True)
class Outcome:
    """What one system made of a task: medians over the seeds. Bytes are of the stages in order."""

    system: str
    losses: tuple[float, ...]
    epoch_s: float
    unseen: float
    versions: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    planned_activation_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    planned_state_bytes: tuple[int, ...]

    @property
    def stage_bytes(self) -> list[int]:
        """Activations, weights, gradient and optimizer state of each stage, as measured."""
        return [a + w for a, w in zip(self.activation_bytes, self.state_bytes, strict=True)]

    @property
    def planned_bytes(self) -> list[int]:
        """The same as planned."""
        return [a + w for a, w in zip(self.planned_activation_bytes, self.planned_state_bytes, strict=True)]

    def epochs_to(self, loss: float) -> int | None:
        """Return after how many epochs the training loss was at most ``loss``, None if it never was."""
        return next((epoch for epoch, value in enumerate(self.losses, 1) if value <= loss), None)


def main() -> None:
    """Compare the systems on the tasks that are asked for, or on all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="digits, text; all by default")
    parser.add_argument("--gpus", type=int, default=2, help="stages, each a process")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, help="learning rate instead of the task's own")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path, help="folder for curves (PNG) and figures (JSON)")
    arguments = parser.parse_args()
    for name in arguments.tasks or TASKS:
        task = TASKS[name]
        print(f"--- {name}: {arguments.gpus} stages, mini-batches of {MINI_BATCH}; load {os.getloadavg()[0]:.1f}")
        profiles = {
            parts: measure_model(
                task.model,
                MINI_BATCH // parts,
                MeasureOptions(steps=5, warmup=2),
                name=name,
                date="today",
                data=task.model.data(MINI_BATCH // parts),
            ).chain
            for parts in (1, MICROBATCHES)
        }
        outcomes = [outcome(name, task, system, profiles, arguments) for system in SYSTEMS]
        print_table(task, outcomes)
        print_claims(outcomes)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write(arguments.out / name, name, outcomes)


def outcome(
    name: str, task: Task, system: System, profiles: dict[int, Chain], arguments: argparse.Namespace
) -> Outcome:
    """Train ``task`` as ``system`` does, once for each seed."""
    parts = 1 if system.whole else MICROBATCHES
    plan = plan_of(profiles[parts], system, 1 if system.alone else arguments.gpus, parts)
    reports, unseen = [], []
    with tempfile.TemporaryDirectory() as folder:
        trained = Path(folder) / "trained.pt"
        for seed in range(arguments.seeds):
            report = run_plan(
                plan,
                ModelSpec(f"training_tasks:{name}"),
                RunOptions(
                    steps=arguments.epochs * task.mini_batches,
                    epoch=task.mini_batches * parts,
                    lr=arguments.lr or task.lr,
                    seed=1000 * seed,
                    save=trained,
                ),
            )
            assert report is not None, "this is no rank of torchrun"
            reports.append(report)
            unseen.append(task.on_unseen(trained))
    epochs = [epoch_losses(report, task.mini_batches) for report in reports]
    periods = [report.measured_period_ns for report in reports if report.measured_period_ns is not None]
    return Outcome(
        system=system.name,
        losses=tuple(median(values) for values in zip(*epochs, strict=True)),
        epoch_s=median(periods) * task.mini_batches * parts / 1e9,
        unseen=median(unseen),
        versions=tuple(stage.versions for stage in reports[0].stages),
        activation_bytes=tuple(x.measured_bytes for x in reports[0].activations),
        planned_activation_bytes=tuple(x.planned_bytes for x in reports[0].activations),
        state_bytes=tuple(x.measured_bytes for x in reports[0].states),
        planned_state_bytes=tuple(x.planned_bytes for x in reports[0].states),
    )


def plan_of(chain: Chain, system: System, gpus: int, parts: int) -> Plan:
    """Return the system's plan, cut where the stages are most equal."""
    policy = Policy(system.weights, parts, optimizer="momentum", vertical_sync=system.vertical_sync)
    problem = Problem(chain, Platform.flat(gpus, 10**12), policy, replicas=False, checkpointing="none")
    return make_plan(problem, "balance").plan


def epoch_losses(report: RunReport, mini_batches: int) -> list[float]:
    """Return the mean training loss of each epoch."""
    losses = report.step_losses
    return [fmean(losses[i : i + mini_batches]) for i in range(0, len(losses), mini_batches)]


def print_table(task: Task, outcomes: list[Outcome]) -> None:
    """Print one row for each system."""
    target = outcomes[0].losses[-1]
    print(
        f"loss of an epoch, time of an epoch, epochs to the last loss of the first row ({target:.4f}), {task.measure},"
    )
    print("weight versions, and MB of each stage measured (planned)")
    for x in outcomes:
        bytes_of = ", ".join(
            f"{a / 1e6:.2f} ({b / 1e6:.2f})" for a, b in zip(x.stage_bytes, x.planned_bytes, strict=True)
        )
        first, last = x.losses[0], x.losses[-1]
        print(
            f"{x.system:26} {first:.4f} -> {last:.4f}  {x.epoch_s:6.3f} s  {x.epochs_to(target) or '-':>3}  "
            f"{x.unseen:.4f}  {'+'.join(map(str, x.versions)):5} {bytes_of}"
        )


def print_claims(outcomes: list[Outcome]) -> None:
    """Print the paper's three claims beside what was measured."""
    by_name = {x.system: x for x in outcomes}
    base, ours = by_name["PipeDream"], by_name["TiMePReSt"]
    saved = [1 - a / b for a, b in zip(ours.stage_bytes, base.stage_bytes, strict=True)]
    ratio = base.epoch_s / ours.epoch_s
    print(f"faster epochs than PipeDream: {'yes' if ratio > 1 else 'no'}, {ratio:.2f} x its speed")
    print(
        f"40-50% less memory: {'yes' if min(saved) >= 0.4 else 'no'}, "
        + ", ".join(f"{share:+.0%} in stage {s}" for s, share in enumerate(-x for x in saved))
    )
    target = base.losses[-1]
    mine = ours.epochs_to(target)
    needs = f"{mine}" if mine is not None else f"more than {len(ours.losses)}"
    more = mine is None or mine > (base.epochs_to(target) or 0)
    print(
        f"more epochs needed: {'yes' if more else 'no'}, {needs} to the loss {target:.4f} "
        f"that PipeDream has after {base.epochs_to(target)}"
    )


def write(path: Path, name: str, outcomes: list[Outcome]) -> None:
    """Write the figures as JSON and the loss against epochs and time as PNG."""
    path.with_suffix(".json").write_text(json.dumps([asdict(x) for x in outcomes], indent=1) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_epoch, by_time) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for x in outcomes:
        epochs = range(1, len(x.losses) + 1)
        by_epoch.plot(epochs, x.losses, label=x.system)
        by_time.plot([epoch * x.epoch_s for epoch in epochs], x.losses, label=x.system)
    by_epoch.set(xlabel="epoch", ylabel="training loss", yscale="log", title=name)
    by_time.set(xlabel="seconds")
    by_time.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
