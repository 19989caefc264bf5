"""Which of the models of models.py does torch.distributed.pipelining split and train? Beside plain torch.

    python scripts/checks/torch_pipeline.py [--only NAME...] [--results FILE.json] [--markdown]

Each model is given to ``pipeline()`` with a split before the middle one of its blocks (the items of its outermost
lists of modules), and trained by ``ScheduleGPipe`` on two processes: two updates of two microbatches, with the data,
the loss and the rate that models.py has; each stage gets those keywords that it reads. A row says what torch says where
it cannot, or the largest difference of any loss and of any entry of the state from plain training in one process. The
loss is the same function, given what torch puts out; of models that return theirs, it is what stands under ``loss``,
or first. With --results rows are added to FILE, and models that stand there are left out; --markdown prints its table.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.utils._pytree import tree_map

from scripts.checks.model_tasks import Task, task
from scripts.checks.models import ACCUMULATE, BATCH, RATE, STEPS, _built, parser_of, plainly, tabulate

LONGEST_S = 300.0  # for one model
EQUAL = 1e-6  # differences up to here are of rounding


@dataclass
class Row:
    """What came of one model; differences are the largest of any loss, and of any entry of the state."""

    model: str
    split: str = ""
    loss_difference: float = float("nan")
    state_difference: float = float("nan")
    failure: str = ""


def tried(name: str) -> Row:
    """Try one model."""
    row = Row(name)
    try:
        found = task(name)
        row.split = middle_block(_built(found)[0])
        losses, state, _ = plainly(found)
    except Exception as error:
        row.failure = f"not tried: {first_line(error)}"
        return row
    with tempfile.TemporaryDirectory() as folder:
        said = by_two(found, row.split, Path(folder))
    failures = [part["failure"] for part in said if "failure" in part]
    failures.sort(key=lambda words: "gloo" in words)  # who has merely lost the other one says less
    if failures or len(said) < 2:
        row.failure = failures[0] if failures else "it hangs, or dies"
        return row
    trained = said[0]["state"] | said[1]["state"]
    row.loss_difference = max(abs(a - b) for a, b in zip(said[1]["losses"], losses, strict=True))
    missing = [key for key in state if key not in trained and state[key].numel()]
    if missing:
        row.failure = f"its state has no {missing[0]}"
        return row
    row.state_difference = max(
        float((trained[k].double() - x.double()).abs().max()) for k, x in state.items() if x.numel()
    )
    return row


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or of the innermost one behind it that says something."""
    found: BaseException | None = error
    while found is not None:
        error = found if str(found) else error
        found = found.__cause__
    words = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {words[0] if words else ''}"[:160]


def middle_block(model: nn.Module) -> str:
    """Return the name of the middle one of the items of the outermost lists, or else of the children."""
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential) and name]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    items = [f"{name}.{child}" for name in outermost for child, _ in model.get_submodule(name).named_children()]
    items = items if len(items) > 1 else [name for name, _ in model.named_children()]
    return items[len(items) // 2]


def by_two(found: Task, split: str, folder: Path) -> list[dict[str, Any]]:
    """Return what two processes say of their stages, in order; of those that hang or die nothing."""
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            os.dup2(os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
            try:
                said = one_stage(found, split, rank, folder)
            except BaseException as error:
                traceback.print_exc()
                said = {"failure": first_line(error)}
            torch.save(said, folder / f"{rank}.pt")
            os._exit(0)
        children.append(child)
    until = time.monotonic() + LONGEST_S
    left = list(children)
    while left and time.monotonic() < until:
        left = [child for child in left if os.waitpid(child, os.WNOHANG)[0] == 0]
        if len(left) == 1:  # the other one may wait for it for ever
            until = min(until, time.monotonic() + 20)
        time.sleep(0.05)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    paths = [folder / f"{rank}.pt" for rank in range(2)]
    return [torch.load(path, weights_only=False) for path in paths if path.exists()]


def one_stage(found: Task, split: str, rank: int, folder: Path) -> dict[str, Any]:
    """Train one of the two stages; return its state, and the losses of the last one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    torch.set_num_threads(1)
    model, loss = _built(found)
    args, kwargs, _ = split_up(found.data(0, 0))
    pipe = pipeline(model, args, kwargs, {split: SplitPoint.BEGINNING})
    if pipe.num_stages != 2:
        raise RuntimeError(f"pipeline() made {pipe.num_stages} stages")
    stage = pipe.build_stage(rank, torch.device("cpu"))

    def compared(output: Any, target: Any) -> Any:
        if loss is not None:
            return loss(output, target)
        found = output["loss"] if isinstance(output, dict) else output
        return found[0] if isinstance(found, tuple | list) else found

    schedule = ScheduleGPipe(stage, ACCUMULATE, loss_fn=compared)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=RATE)
    reads = {node.target for node in stage.submod.graph.nodes if node.op == "placeholder"}
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [split_up(found.data(m, 0)) for m in range(step * ACCUMULATE, (step + 1) * ACCUMULATE)]
        inputs, keywords, target = tree_map(lambda *x: None if x[0] is None else torch.cat(x), *parts)
        target = torch.zeros(BATCH * ACCUMULATE) if target is None else target
        told: list[torch.Tensor] = []
        keywords = {name: value for name, value in keywords.items() if name in reads}
        if rank == 0:
            schedule.step(*inputs, **keywords)
        else:
            schedule.step(**keywords, target=target, losses=told)
        losses += [float(value.detach()) for value in told]
        optimizer.step()
    return {"state": stage.submod.state_dict(), "losses": losses}


def split_up(given: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments, the keywords and the target of a sample."""
    x, target = given if isinstance(given, tuple) else (given, None)
    if hasattr(x, "keys"):
        return (), dict(x), target
    return (x if isinstance(x, tuple) else (x,)), {}, target


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of ``rows``: what comes out, of which models."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        difference = max(float(row["loss_difference"]), float(row["state_difference"]))
        if row["failure"]:
            words = re.sub(r"[|`]", "'", row["failure"].partition(": ")[2] or row["failure"])
            what = f"*{re.sub(r'[0-9]+', 'N', words)}*"
        elif difference > EQUAL:
            what = "trained otherwise"
        else:
            what = "trained as plain torch does"
        name = row["model"].partition(",")[0]
        groups.setdefault(what, []).append(f"{name} ({difference:.0e})" if what == "trained otherwise" else name)
    ordered = sorted(groups.items(), key=lambda group: (group[0].startswith("*"), -len(group[1]), group[0]))
    lines = ["| what comes out | models | which |", "|---|--:|---|"]
    return "\n".join([*lines, *(f"| {what} | {len(models)} | {', '.join(models)} |" for what, models in ordered)])


if __name__ == "__main__":
    tabulate(parser_of(__doc__).parse_args(), tried, markdown)
