"""What becomes of a model that is only profiled and planned, by default or for another framework? A cell for each.

    python scripts/checks/first_contact.py [--only NAME...] [--results FILE.json] [--markdown] [--jobs N]
                                           [--megatron DIR] [--torchtitan DIR] [--deepspeed DIR]

Sixty of the models of models.py, evenly chosen, and three ordinary ones of a user's own are profiled; then ``plan`` for
two GPUs, without further options and ``--for`` each framework, and two updates of the plan on two processes. There are
three good outcomes:

trained: as plain torch trains it. Of weights that are late by design these are the losses and the state of the first
update, which reads the first weights. Plain training of replicas has buffers and a sum of gradients for each, and what
draws random numbers is compared with one process.
accepted: the framework's own code takes the export, too. torch's is installed, others are asked where DIR is a
checkout; a model of torchtitan has names of its own, for which --rename stands here, and is only ``exported``.
never: refused in one sentence before anything is searched; or by torch itself, which doesn't take the model whole.

Anything else is ``FAILED``. Seconds are those from the start of a run to the end of its first update, the longest of a
model's runs. With --results rows are added to FILE, and models that stand there are left out; --markdown prints its
table.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Generator, Tensor, nn
from torch.distributed.pipelining import pipeline
from torch.nn import functional

from pipeplan.api.planning import plan
from pipeplan.api.plans import exported
from pipeplan.check.targets import TARGETS
from pipeplan.check.units import CannotExpress
from pipeplan.errors import PipeplanError
from pipeplan.plan import Plan
from pipeplan.problem import Chain
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from scripts.checks.accepting import ACCEPT, Case
from scripts.checks.model_tasks import Task, of_row
from scripts.checks.model_tasks import names as listed
from scripts.checks.model_tasks import task as listed_task
from scripts.checks.models import BATCH, EQUAL, RATE, STEPS, _built, _loss, differences, parser_of, tabulate
from scripts.checks.torch_pipeline import first_line, split_up
from scripts.checks.written.row import Row as Written
from scripts.checks.written.row import normal, numbers

MODELS = 60  # of those of models.py
SEARCH_S = 10
LONGEST = 64  # microbatches of an update that nobody asked to be longer
WRITERS = {name: name for name in TARGETS} | {"torch": "torch-split"}
RENAME = [r"(?:.*[.])?([A-Za-z_]\w*[.]\d+)=\1", r"(?:.*[.])?([A-Za-z_]\w*)=\1"]  # as a port to torchtitan has them


# --- ordinary models of a user's own --------------------------------------------------------------------------------


class TwoLosses(nn.Module):
    """Tokens and numbers in, by name; classes and a value out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(50, 16), nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(4))
        self.classes, self.value = nn.Linear(16, 5), nn.Linear(16, 1)

    def forward(self, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens) + self.numbers(features)[:, None]
        for block in self.blocks:
            x = block(x)
        return {"classes": self.classes(x.mean(1)), "value": self.value(x[:, 0])[:, 0]}


def _both(out: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(out["classes"], target["classes"]) + 0.5 * functional.mse_loss(
        out["value"], target["value"]
    )


def _inputs(g: Generator) -> Any:
    given = {"tokens": numbers(g, BATCH, 8, below=50), "features": normal(g, BATCH, 6)}
    return given, {"classes": numbers(g, BATCH, below=5), "value": normal(g, BATCH)}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=97, n_positions=32))


def _labelled(g: Generator) -> Any:
    tokens = numbers(g, BATCH, 16, below=97)
    return {"input_ids": tokens, "labels": tokens}


def _resnet18() -> nn.Module:
    import timm

    return timm.create_model("resnet18", pretrained=False, num_classes=10)


OWN = {
    "own: GPT-2 of transformers": Written(_gpt2, _labelled),
    "own: ResNet-18 of timm": Written(
        _resnet18, lambda g: (normal(g, BATCH, 3, 64, 64), numbers(g, BATCH, below=10)), functional.cross_entropy
    ),
    "own: a dict in, two losses": Written(TwoLosses, _inputs, _both),
}


@cache
def names() -> list[str]:
    """Return what the models are called."""
    every = list(listed())
    return [*OWN, *(every[i * len(every) // MODELS] for i in range(MODELS))]


def task(name: str) -> Task:
    """Return the model called ``name``; ImportError where its library isn't installed."""
    return of_row(OWN[name]) if name in OWN else listed_task(name)


def __getattr__(name: str) -> Any:
    """Return ``build_KEY`` or ``data_KEY`` of a model, as ranks look them up."""
    kind, _, key = name.partition("_")
    if kind in ("build", "data") and key.isdigit():
        return getattr(task(names()[int(key)]), kind)
    raise AttributeError(name)


# --- trying them ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What became of one model at each door."""

    model: str
    plan: str = ""
    torch: str = ""
    torchtitan: str = ""
    megatron: str = ""
    deepspeed: str = ""
    seconds: float = 0.0  # to the end of the first update


class Trial:
    """One model, profiled; plans that are the same are run once."""

    def __init__(self, name: str, folders: dict[str, Path | None]) -> None:
        self.name, self.folders, self.row = name, folders, Row(name)
        self.task = task(name)
        options = MeasureOptions(steps=1, warmup=1)
        self.chain: Chain = measure_model(
            self.task.build, BATCH, options, name=name, date="-", data=self.task.data
        ).chain
        self._trained: dict[Any, str] = {}

    def through(self, door: str) -> str:
        """Return what becomes of the model behind ``plan``, or ``plan --for`` a framework."""
        for_ = None if door == "plan" else door
        try:
            made = plan(self.chain, gpus=2, mem="16GB", for_=for_, time_limit=f"{SEARCH_S}s").plan
        except CannotExpress as error:  # none of which a search raises
            return f"never: {error}"
        accepted = "" if for_ is None else self.accepted(made, for_)
        key = made.allocation, made.schedule, made.policy.weights, made.policy.accumulate
        if key not in self._trained:
            self._trained[key] = self.trained(made)
        return f"{self._trained[key]}{accepted}"

    def accepted(self, made: Plan, name: str) -> str:
        """Return what the framework's own code says of the export."""
        rename = RENAME if name == "torchtitan" else []
        text = exported(made, WRITERS[name], rename=rename).text
        folder = Path() if name == "torch" else self.folders.get(name)
        if folder is None or name == "torchtitan":  # whose models are its own
            return ", exported"
        if name == "torch":
            refused = self.whole()
            if refused:
                return f", but torch takes no part of it: {refused}"
        case = Case(self.name, lambda: self.chain, lambda: _built(self.task)[0], self.task.data(0, 0))
        with redirect_stdout(StringIO()):
            ACCEPT[WRITERS[name]](folder, text, case)
        return ", accepted"

    def whole(self) -> str:
        """Return what torch's pipelining says where it doesn't even take the model in one piece."""
        model, (given, keywords, _) = _built(self.task)[0], split_up(self.task.data(0, 0))
        try:
            pipeline(model, given, keywords)
        except Exception as error:
            return first_line(error)
        return ""

    def plainly(self, made: Plan, steps: int, count: int) -> tuple[list[float], dict[str, Any]]:
        """Train plainly, or what draws on one process; return the losses and the state."""
        if self.task.draws:
            alone = plan(self.chain, gpus=1, mem="16GB", weights="flush", accumulate=count).plan
            return self.run(alone, steps)[:2]
        replicas = {stage.replicas for stage in made.allocation.stages}
        return replicated(self.task, steps, count, max(replicas) if len(made.allocation.stages) == 1 else 1)

    def run(self, made: Plan, steps: int) -> tuple[list[float], dict[str, Any], float]:
        """Return the losses, the state and the seconds of a run on a process for each GPU."""
        number = names().index(self.name)
        spec = ModelSpec(*(f"scripts.checks.first_contact:{kind}_{number}" for kind in ("build", "data")))
        with tempfile.TemporaryDirectory() as folder:
            path, began = Path(folder, "trained.pt"), time.perf_counter()
            report = run_plan(made, spec, RunOptions(steps=steps, lr=RATE, save=path))
            return list(report.losses), torch.load(path), time.perf_counter() - began

    def trained(self, made: Plan) -> str:
        """Run two updates on two processes, and compare them with plain training."""
        count = made.interval
        if count > LONGEST:
            return f"FAILED: an update is {count} microbatches"
        late = "" if made.policy.drains else f", later ones {made.policy.weights}"
        for steps in (1, STEPS) if late else (STEPS,):
            own, state, passed = self.run(made, steps)
            if steps == 1 or not late:
                losses, plain = self.plainly(made, steps, count)
                if len(made.allocation.stages) > 1 and any(stage.replicas > 1 for stage in made.allocation.stages):
                    known = dict(_built(self.task)[0].named_parameters())  # each counts its own in buffers
                    plain = {name: x for name, x in plain.items() if name in known}
                found = differences(own, losses, state, plain)
                if max(found) > EQUAL:
                    return f"FAILED: trained otherwise, losses by {found[0]:.0e}, state by {found[1]:.0e}"
            self.row.seconds = max(self.row.seconds, round(passed / steps, 1))
        return f"trained{late}"


def replicated(found: Task, steps: int, count: int, replicas: int) -> tuple[list[float], dict[str, Any]]:
    """Train as :func:`plainly`, microbatches dealt out to ``replicas`` with buffers and sums of gradients of their own;
    return the losses and the first one's state."""
    models = [_built(found) for _ in range(replicas)]
    for model, _ in models[1:]:
        for name, parameter in models[0][0].named_parameters(remove_duplicate=False):
            owner, _, last = name.rpartition(".")
            part = model.get_submodule(owner)
            if last in part._parameters:
                part._parameters[last] = parameter
    model, loss = models[0]
    own = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    weights = [*model.parameters(), *own]
    optimizer, losses = torch.optim.SGD(weights, lr=RATE), [0.0] * (steps * count)
    for step in range(steps):
        sums: list[list[Tensor | None]] = []
        for r, (replica, _) in enumerate(models):
            optimizer.zero_grad()
            for m in range(step * count, (step + 1) * count):
                if m % replicas == r:
                    value = _loss(replica, loss, found.data(m, 0))
                    losses[m] = float(value.detach())
                    (value / count).backward()
            sums.append([x.grad for x in weights])
        for weight, parts in zip(weights, zip(*sums, strict=True), strict=True):
            given = [part for part in parts if part is not None]
            weight.grad = sum(given[1:], given[0]) if given else None
        optimizer.step()
    return losses, model.state_dict()


def tried(name: str, folders: dict[str, Path | None]) -> Row:
    """Try one model at every door."""
    doors = ("plan", *TARGETS)
    try:
        trial = Trial(name, folders)
    except ImportError as error:
        return Row(name, **dict.fromkeys(doors, f"never: not installed: {error}"))
    except PipeplanError as error:
        return Row(name, **dict.fromkeys(doors, f"never: {error}"))
    for door in doors:
        try:
            found = trial.through(door)
        except Exception as error:
            found = f"FAILED: {first_line(error)}"
        setattr(trial.row, door, found)
    return trial.row


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of ``rows``: what becomes of how many, and which fail."""
    doors = ("plan", *TARGETS)
    kinds = sorted({_kind(row[door]) for row in rows for door in doors}, key=lambda x: (x.startswith("F"), x))
    longest = max(row["seconds"] for row in rows)
    lines = [
        f"{len(rows)} models; the first update was over within {longest:.0f} s of every run.",
        "",
        f"| what becomes of it | {' | '.join('plan' if x == 'plan' else f'--for {x}' for x in doors)} |",
        f"|---|{'--:|' * len(doors)}",
    ]
    for kind in kinds:
        lines.append(f"| {kind} | {' | '.join(str(sum(_kind(row[x]) == kind for row in rows)) for x in doors)} |")
    failed = [(row["model"], x, row[x]) for row in rows for x in doors if row[x].startswith("FAILED")]
    return "\n".join([*lines, "", *(f"- {model}, {door}: {said}" for model, door, said in failed)])


def _kind(said: str) -> str:
    """Return an outcome without names and numbers."""
    if not said.startswith("never"):
        return said.partition(":")[0]
    if "not installed" in said:
        return "never: its library isn't installed"
    whys = {"no list of layers": "no list of layers", "megatron: ": "no decoder"}
    return f"never: {next((why for sign, why in whys.items() if sign in said), 'its profile refuses it')}"


def main() -> None:
    parser = parser_of(__doc__)
    for name in ("megatron", "torchtitan", "deepspeed"):
        parser.add_argument(
            f"--{name}", type=lambda x: Path(x).absolute(), metavar="DIR", help="a checkout of its source"
        )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time, each in its process")
    given = parser.parse_args()
    given.results = given.results and given.results.absolute()
    os.chdir(Path(__file__).parents[2])
    folders: dict[str, Path | None] = {name: getattr(given, name) for name in ("megatron", "torchtitan", "deepspeed")}
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)}  # as ranks compute: sums are then the same
    with ProcessPoolExecutor(given.jobs, get_context("spawn"), max_tasks_per_child=1, **alone) as pool:
        tabulate(given, partial(tried, folders=folders), markdown, names, pool.map)


if __name__ == "__main__":
    main()
