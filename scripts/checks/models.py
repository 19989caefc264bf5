"""Which models of which libraries are profiled, planned and trained as they are? One row for each, against plain torch.

    python scripts/checks/models.py [--only NAME...] [--results FILE.json] [--markdown] [--list]

For each model: its operations and its blocks; the bytes that a whole training step saves by its profile, against those
that autograd's hooks count in plain training; plans for 2 and 4 GPUs; two updates of two microbatches on two processes
by the first plan, against plain training in one (the largest difference of any loss, and of any entry of the state);
whether the state loads strictly into the author's model; and the loss of that state in an evaluation on the same two
processes, against the author's model in ``eval()``. Sizes are tiny, weights random, dropout is off: nothing
is downloaded. Models that draw random numbers are compared with one process, whose layers draw the same. Of
transformers, torchvision and timm what is installed is tried, and what scripts/checks/written has. With --results rows
are added to FILE, and models that stand there are left out, but those --only names, which are tried again; --markdown
prints the table of FILE, and how many of its models are trained as plain torch does, refused, or trained otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import UninitializedParameter

from pipeplan.cost.saved import saved_bytes
from pipeplan.errors import PipeplanError
from pipeplan.partition.granularity import merge_blocks, merge_zero_time
from pipeplan.plan import Plan
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.loaded import LOSS_ROOT
from pipeplan.runtime.model.structure import tensors_in
from pipeplan.runtime.model.trace.exported import loss_in
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from scripts.checks.model_tasks import Task, names, task
from scripts.checks.written.row import BATCH

STEPS, ACCUMULATE, RATE = 2, 2, 0.01
EQUAL = 1e-6  # differences up to here are of the order of sums

# --- trying them ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What came of one model; differences are the largest of any loss, and of any entry of the state."""

    model: str
    operations: int = 0
    blocks: int = 0
    saved_bytes: int = 0
    eager_bytes: int = 0
    plans: str = ""
    loss_difference: float = float("nan")
    state_difference: float = float("nan")
    strict: str = ""
    evaluation: str = ""
    failure: str = ""


def tried(name: str) -> Row:
    """Try one model."""
    row = Row(name)
    try:
        _try(task(name), list(names()).index(name), row)
    except ImportError as error:
        row.failure = f"not installed: {error}"
    except PipeplanError as error:
        row.failure = str(error)
    except Exception as error:
        row.failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return row


def _try(found: Task, number: int, row: Row) -> None:
    options = MeasureOptions(steps=1, warmup=1)
    profile = measure_model(found.build, BATCH, options, name=row.model, date="-", data=found.data).chain
    row.operations = len(profile)
    row.saved_bytes = int(saved_bytes(profile, 0, len(profile)))
    row.eager_bytes = eager_bytes(found)
    chain = merge_zero_time(merge_blocks(profile))
    row.blocks = len(chain)
    plans = {}
    for gpus in (2, 4):
        platform = Platform.flat(gpus, 10**12, 10**11)
        problem = Problem(chain, platform, Policy("flush", ACCUMULATE), replicas=False)
        plans[gpus] = make_plan(problem, "contiguous").plan
    row.plans = " ".join(f"{gpus}: {len(plan.allocation.stages)}" for gpus, plan in plans.items())
    losses, state, model = plainly(found)
    if found.draws:
        losses, state = alone(chain, number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trained.pt")
        spec = ModelSpec(f"scripts.checks.model_tasks:build_{number}", f"scripts.checks.model_tasks:data_{number}")
        report = run_plan(plans[2], spec, RunOptions(steps=STEPS, lr=RATE, save=path))
        trained = torch.load(path)
        own = model.state_dict().keys()
        model.load_state_dict({k: x for k, x in trained.items() if k in own or not k.startswith(LOSS_ROOT)})
        row.strict = "yes"
        row.evaluation = "" if found.draws else evaluated(found, model, plans[2], spec, path)
    row.loss_difference, row.state_difference = differences(report.losses, losses, trained, state)


def differences(
    losses: Sequence[float], plain: Sequence[float], state: dict[str, Any], plain_state: dict[str, Any]
) -> tuple[float, float]:
    """Return the largest difference of any loss, and of any entry of the state, from those of plain training."""
    apart = (
        float((state[k] - x).abs().max()) if x.is_floating_point() or x.is_complex() else float((state[k] != x).any())
        for k, x in plain_state.items()
        if isinstance(x, Tensor) and x.numel()
    )
    return max(abs(a - b) for a, b in zip(losses, plain, strict=True)), max(apart)


def alone(chain: Any, number: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one process; return the losses and the state."""
    problem = Problem(chain, Platform.flat(1, 10**12, 10**11), Policy("flush", ACCUMULATE), replicas=False)
    plan = make_plan(problem, "contiguous").plan
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trained.pt")
        spec = ModelSpec(f"scripts.checks.model_tasks:build_{number}", f"scripts.checks.model_tasks:data_{number}")
        report = run_plan(plan, spec, RunOptions(steps=STEPS, lr=RATE, save=path))
        return list(report.losses), torch.load(path)


def evaluated(found: Task, model: nn.Module, plan: Plan, spec: ModelSpec, path: Path) -> str:
    """Return the relative difference of the mean loss of the state in ``path`` from that of ``model``, or why not."""
    try:
        report = run_plan(plan, spec, RunOptions(steps=STEPS, lr=RATE, evaluates=True, load=path))
    except PipeplanError as error:
        return str(error)
    _, loss = _built(found)
    if isinstance(loss, nn.Module):
        own = {k.removeprefix(LOSS_ROOT): x for k, x in torch.load(path).items() if k.startswith(LOSS_ROOT)}
        loss.load_state_dict(own, strict=bool(own))
    model.eval()
    with torch.no_grad():
        plain = [float(_loss(model, loss, found.data(m, 0))) for m in range(STEPS * ACCUMULATE)]
    there, here = sum(report.losses) / len(report.losses), sum(plain) / len(plain)
    return f"{abs(there - here) / abs(here):.0e}"


def _loss(model: nn.Module, loss: Any, given: Any) -> Tensor:
    x, target = given if isinstance(given, tuple) else (given, None)
    keywords = dict(x) if hasattr(x, "keys") else {}
    with torch.compiler.set_stance("force_eager"):  # which takes minutes less
        output = model(*(() if keywords else x if isinstance(x, tuple) else (x,)), **keywords)
    return loss_in(model, output) if loss is None else loss(output, target)


def _built(found: Task) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    built = found.build(BATCH)
    model, loss = built[0], built[2] if len(built) == 3 else None
    for part in model.modules():
        if getattr(getattr(part, "config", None), "use_cache", None) is True:
            part.config.use_cache = False
    if any(isinstance(x, UninitializedParameter) for x in model.parameters()):
        with torch.no_grad():
            model.eval()(built[1])
    return model.train(), loss


def eager_bytes(found: Task) -> int:
    """Return what plain training saves, parameters and buffers aside, each storage once."""
    model, loss = _built(found)
    own = [*loss.parameters()] if isinstance(loss, nn.Module) else []
    permanent = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), *own)}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    given = found.data(0, 0)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = _loss(model, loss, given)
    assert value.requires_grad
    assert tensors_in(given)
    return sum(x.nbytes() for key, x in storages.items() if key not in permanent)


def plainly(
    found: Task, steps: int = STEPS, accumulate: int = ACCUMULATE
) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """Train in one process; return the losses, the state, and a model as it was built."""
    model, loss = _built(found)
    own = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    optimizer = torch.optim.SGD([*model.parameters(), *own], lr=RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for m in range(step * accumulate, (step + 1) * accumulate):
            value = _loss(model, loss, found.data(m, 0))
            losses.append(float(value.detach()))
            (value / accumulate).backward()
        optimizer.step()
    state = model.state_dict()
    return losses, state, _built(found)[0]


# --- the table ------------------------------------------------------------------------------------------------------


def _equal(row: dict[str, Any]) -> bool:
    return row["loss_difference"] <= EQUAL and row["state_difference"] <= EQUAL


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of ``rows``."""
    differing = [row for row in rows if not row["failure"] and not _equal(row)]
    refused = sum(bool(row["failure"]) for row in rows)
    lines = [
        f"{len(rows)} models: {len(rows) - refused - len(differing)} trained as plain torch does, {refused} refused, "
        f"{len(differing)} trained otherwise.",
        "",
        "| model | operations | blocks | saved MB | of eager's | stages on 2 and 4 | loss | state | strict "
        "| evaluation |",
        "|---|--:|--:|--:|--:|---|--:|--:|---|---|",
    ]
    for row in rows:
        if row["failure"]:
            lines.append(f"| {row['model']} | {row['failure']} | | | | | | | | |")
            continue
        share = int(row["saved_bytes"]) / int(row["eager_bytes"])
        stages = " and ".join(row["plans"].split()[1::2])
        lines.append(
            f"| {row['model']} | {row['operations']} | {row['blocks']} | {int(row['saved_bytes']) / 1e6:.3f} | "
            f"{share:.3f} | {stages} | {float(row['loss_difference']):.0e} | "
            f"{float(row['state_difference']):.0e} | {row['strict']} | {row['evaluation']} |"
        )
    return "\n".join(lines)


def parser_of(words: str | None) -> argparse.ArgumentParser:
    """Return what reads the arguments of :func:`tabulate`."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="models whose names have one of these")
    parser.add_argument("--results", type=Path, metavar="FILE.json")
    parser.add_argument("--markdown", action="store_true")
    return parser


def tabulate(
    given: argparse.Namespace,
    tried: Callable[[str], Any],
    table: Callable[[list[dict[str, Any]]], str],
    names: Callable[[], Iterable[str]] = names,
    over: Callable[..., Iterable[Any]] = map,
) -> None:
    """Print, and add to --results, the rows that ``tried`` makes of the models asked for; or the file's ``table``.

    ``over`` calls it with each of them, as ``map`` does.
    """
    there = given.results is not None and given.results.exists()
    done: dict[str, dict[str, Any]] = (
        {row["model"]: row for row in json.loads(given.results.read_text())} if there else {}
    )
    if given.markdown:
        print(table([done[name] for name in names() if name in done]))
        return
    torch.set_num_threads(1)
    asked = [name for name in names() if (any(part in name for part in given.only) if given.only else name not in done)]
    for name, row in zip(asked, over(tried, asked), strict=True):
        print(row, flush=True)
        if given.results is not None:
            done[name] = asdict(row)
            scratch = given.results.with_suffix(".new")
            scratch.write_text(json.dumps(list(done.values()), indent=1))
            scratch.replace(given.results)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list:
        print("\n".join(names()))
        return
    given.results = given.results and given.results.absolute()
    os.chdir(Path(__file__).parents[2])
    tabulate(given, tried, markdown)


if __name__ == "__main__":
    main()
