"""Runs on GPUs in software (softgpu) beside the same on CPUs: a process that makes them, on demand.

Ranks are forked from a server that has the device; where the tests' own process had it, all their torch would see it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import torch
from cases import half, on_gpu, runtime
from cases.agents import one_node
from cases.runtime import Waved, chain_of, largest_difference, mean_square, plan_of, uncorrected
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipeplan.check.bounds import any_bound
from pipeplan.choices import OPTIMIZERS
from pipeplan.cost.roofline import with_offloaded
from pipeplan.errors import PipeplanError, RunFailed
from pipeplan.files.plans import plan_text
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Problem
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.engine.job import HeldOutOptions
from pipeplan.runtime.model.autocast import Autocast
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.processes.own_processes import context_of
from pipeplan.runtime.training.half import HalfOptions
from pipeplan.runtime.training.update.optimizers import Choice

# --- models and data ---


def mixture(batch):
    """Layers of many kinds: random numbers, an embedding of weights, attention, convolution.

    Not for Adam: the bias of attention's keys has no gradient but what rounding leaves, and GPUs round otherwise.
    """
    torch.manual_seed(6)
    attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layers = [
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), nn.LayerNorm(16), Waved(), attention,
        nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Unflatten(1, (2, 8)), nn.Conv1d(2, 2, 3, padding=1),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 16)),
    ]  # fmt: skip
    return layers, torch.zeros(batch, 16), mean_square


def noted(index, seed):
    """Vectors; on a GPU in software it is noted when they are asked for."""
    if "softgpu.torch_cuda" in sys.modules:
        sys.modules["softgpu.torch_cuda"].note(f"microbatch {index}")
    return runtime.vectors(index, seed)


def loader(batch):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(64, 16, generator=generator), torch.randn(64, 16, generator=generator))
    return DataLoader(data, batch, num_workers=1)


def classes(batch):
    torch.manual_seed(2)
    return [*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 8)], torch.zeros(batch, 16), nn.CrossEntropyLoss()


def aborting(batch):
    """The same; at a label of no class torch ends the process, as it does at times whose GPU has failed."""

    def loss(out, target):
        if target.is_cuda and (target == 100).any():
            os.abort()
        return nn.functional.cross_entropy(out, target)

    return *classes(batch)[:2], loss


def mislabelled(index, seed):
    """A label of microbatch 5 is that of no class."""
    x, _ = runtime.vectors(index, seed)
    return x, torch.full((4,), 100 if index == 5 else index % 8)


MODELS = {
    "linears": on_gpu.linears, "tied": on_gpu.tied, "mixture": mixture, "dropping": runtime.dropping,
    "exploding": half.exploding, "classes": classes, "aborting": aborting,
}  # fmt: skip


# --- modes ---


@dataclass(frozen=True)
class Mode:
    """What is run, and on how many GPUs (None: one for each rank). A checkpoint is resumed from if ``resumes``.

    With ``agent`` torchrun starts the ranks on GPUs.
    """

    plan: Plan
    model: str
    data: str = "cases.soft_runs:noted"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    gpus: int | None = None
    resumes: bool = False
    agent: bool = False

    def spec(self, data: str) -> ModelSpec:
        return ModelSpec(f"{MODELS[self.model].__module__}:{MODELS[self.model].__name__}", data)

    @property
    def ranks(self) -> int:
        return 1 + max(d for stage in self.plan.allocation.stages for d in stage.devices)


@cache
def profile(name, dtype=None, split=False, autocast=None):
    return chain_of(MODELS[name], 4, dtype=dtype, split=split, autocast=autocast)


def planned(name, stages, *, kind=None, dtype=None, split=False, autocast=None, policy=None, link=0, **asked):
    chain = profile(name, dtype, split, autocast)
    plan = plan_of(with_offloaded(replace(chain, offloaded=link)) if link else chain, stages, **asked)
    plan = replace(plan, policy=replace(plan.policy, **(policy or {})))
    return plan if kind is None else under(plan, kind)


TWO = [(0, 4, (0,)), (4, 9, (1,))]
REPLICAS = [(0, 4, (0, 1)), (4, 9, (2, 3))]
BACK = [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (1,)), (6, 9, (0,))]
ROUND = [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (0,)), (6, 9, (1,))]
FP16 = HalfOptions("fp16", 2.0**10)

MODES: dict[str, Callable[[], Mode]] = {
    "1f1b, clipped, from a loader, resumed": lambda: Mode(
        planned("dropping", [(0, 3, (0,)), (3, 5, (1,))], kind="1f1b", accumulate=4, optimizer="adam"), "dropping",
        "cases.soft_runs:loader", {"clip_norm": 0.1}, resumes=True,
    ),
    "2bw, replicas, in chunks": lambda: Mode(
        planned("linears", REPLICAS, weights="2bw", optimizer="momentum"), "linears",
        options={"bucket_size": 100, "coarsening": 1},
    ),
    "stash, recomputed": lambda: Mode(
        planned("dropping", [Stage(0, 3, (0,), ((0, 3),)), Stage(3, 5, (1,))], weights="stash"), "dropping"
    ),
    "1f1b, evaluated while it trains": lambda: Mode(
        planned("linears", TWO, kind="1f1b", accumulate=4), "linears",
        options={"held_out": HeldOutOptions("cases.runtime:vectors", 1, 2)},
    ),
    "tied, four ranks": lambda: Mode(
        planned("tied", [(0, 2, (0, 1)), (2, 5, (2,)), (5, 9, (3,))], weights="2bw"), "tied"
    ),
    "ZeRO-1, clipped": lambda: Mode(
        planned("linears", REPLICAS, accumulate=4, optimizer="adam", policy={"zero": 1}), "linears",
        options={"clip_norm": 0.1, "bucket_size": 100}, resumes=True,
    ),
    "offloaded": lambda: Mode(
        planned("linears", TWO, accumulate=4, optimizer="adam", policy={"offload": True, "bucket_parameters": 200}),
        "linears", resumes=True,
    ),
    "bf16, offloaded with its activations, never drained": lambda: Mode(
        planned("linears", TWO, dtype=torch.bfloat16, weights="2bw", optimizer="momentum", link=10**6,
                policy={"precision": "mixed", "offload": True, "bucket_parameters": 100}), "linears",
    ),
    "fp16, overflowing": lambda: Mode(
        planned("exploding", [(0, 3, (0,)), (3, 6, (1,))], dtype=torch.float16, accumulate=4,
                policy={"precision": "mixed"}), "exploding", "cases.half:exploding_vectors", {"half": FP16},
    ),
    "autocast": lambda: Mode(
        planned("linears", TWO, autocast=Autocast(torch.bfloat16), accumulate=4, policy={"precision": "autocast"}),
        "linears",
    ),
    "a shared GPU": lambda: Mode(planned("mixture", TWO, accumulate=4), "mixture", gpus=1),
    "1f1b, under torchrun": lambda: Mode(
        planned("linears", TWO, kind="1f1b", accumulate=4), "linears", agent=True
    ),
    "interleaved": lambda: Mode(planned("linears", ROUND, kind="interleaved", accumulate=4), "linears"),
    "zb1p": lambda: Mode(
        planned("linears", [(0, 3, (0,)), (3, 6, (1,)), (6, 9, (2,))], kind="zb1p", split=True, accumulate=4), "linears"
    ),
    "zbv": lambda: Mode(planned("linears", BACK, kind="zbv", split=True, accumulate=4), "linears"),
}  # fmt: skip

FAULTS: dict[str, Callable[[], Mode]] = {
    f"a label of no class, {weights}, {model}": lambda weights=weights, model=model: Mode(
        planned(model, [(0, 2, (0,)), (2, 5, (1,))], weights=weights, accumulate=4), model,
        "cases.soft_runs:mislabelled",
    )
    for weights, model in (("flush", "classes"), ("2bw", "classes"), ("2bw", "aborting"))
}  # fmt: skip


# --- the process that makes them ---


def trained(mode, device, folder, **more):
    """Train by a mode, on CPUs with the fused steps that GPUs have; return its state."""
    spec = mode.spec(mode.data)
    row = OPTIMIZERS[mode.plan.policy.optimizer]
    fused = {"optimizer": Choice(row.kinds[0], (*row.options, ("fused", True)))} if device == "cpu" else {}
    asked = {"steps": mode.steps, "lr": 0.05, "save": folder / "saved.pt"}
    if mode.agent and device == "cuda":
        problem = Problem(mode.plan.chain, mode.plan.platform, mode.plan.policy)
        (folder / "plan.json").write_text(plan_text(replace(mode.plan, lower_bounds=(any_bound(problem),))))
        run = ["run", folder / "plan.json", "--model", spec.build, "--data", spec.data, "--device", device]
        flags = [word for name, value in asked.items() for word in (f"--{name}", value)]
        node = one_node(folder, mode.ranks, [*map(str, run + flags)])
        if node.codes() != [0] * mode.ranks:
            raise RunFailed(f"torchrun's ranks ended with {node.codes()}: {node.said()}")
    else:
        more = {"timeout_s": 100.0, **fused, **mode.options, **more}
        run_plan(mode.plan, spec, uncorrected(device=device, **asked, **more))
    return torch.load(folder / "saved.pt")


@cache
def on_cpus(name):
    if name == "1f1b, under torchrun":
        return on_cpus("1f1b, evaluated while it trains")  # whose plan it has
    with TemporaryDirectory() as folder:
        return trained(MODES[name](), "cpu", Path(folder))


def on_gpus(name, left, knobs):
    """Train on GPUs in software, and compare with CPUs; ``left`` is the folder where ranks leave what they did."""
    mode, expected = (MODES | FAULTS)[name](), {} if name in FAULTS else on_cpus(name)
    for path in left.iterdir():
        path.unlink()
    (left / "knobs").write_text(json.dumps({"devices": mode.gpus or mode.ranks, **knobs}))
    found: dict[str, Any] = {"differences": {}}
    with TemporaryDirectory() as text:
        folder = Path(text)
        try:
            if mode.resumes and "planted" not in knobs:
                half_way = {"checkpoint": folder / "c", "resume": True}
                trained(replace(mode, steps=mode.steps - 1), "cuda", folder, **half_way)
                (folder / "c").rename(folder / "gpu")
                for device in ("cpu", "cuda"):
                    subprocess.run(["cp", "-r", folder / "gpu", folder / device], check=True)
                    state = trained(mode, device, folder, checkpoint=folder / device, resume=True)
                    found["differences"][f"resumed on {device}"] = largest_difference(expected, state)
            else:
                found["differences"]["at the end"] = largest_difference(expected, trained(mode, "cuda", folder))
        except PipeplanError as error:
            found["error"] = str(error)
    if any(math.isnan(x) for x in found["differences"].values()):
        found["error"] = "NaN"
    races = (left / "races").read_text().splitlines() if (left / "races").exists() else []
    found["ranks"] = [json.loads(path.read_text()) for path in left.glob("*.json")]
    early = sum(map(too_early, found["ranks"])) if name == "zb1p" else 0
    receives = [f"{early} receives begin too early"] if early else []
    found["told"] = [*races, *filter(None, [found.pop("error", "")]), *receives]
    return found


def too_early(rank):
    """How many receives don't stand behind the pass of the message two before: a send may have two entries."""
    count = 0
    passes = []  # how many kernels the stream of passes had been given at a message
    for what, behind in rank["exchanges"]:
        if what == "recv":
            count += len(passes) > 2 and behind < passes[-3]
        elif what in ("send", "wait"):
            passes.append(behind)
    return count


def alone(code, left, knobs):
    """Carry out Python in a process of its own; return its exit code and what it prints."""
    (left / "knobs").write_text(json.dumps(knobs))
    with NamedTemporaryFile("r") as said:
        process = context_of().Process(target=_alone, args=(code, said.name))
        process.start()
        process.join()
        return {"code": process.exitcode, "printed": said.read()}


def _alone(code, path):
    said = os.open(path, os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    exec(code, {})


def main():
    """Carry out what comes line by line: a mode's name or Python, and knobs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    context_of()
    forkserver.set_forkserver_preload([*forkserver._forkserver._preload_modules, "cases.soft_runs"])  # once for all
    forkserver.ensure_running()
    left = Path(os.environ["SOFTGPU_FOLDER"])
    for line in sys.stdin:
        what, knobs = json.loads(line)
        answer = (on_gpus if what in MODES | FAULTS else alone)(what, left, knobs)
        print(json.dumps(answer), file=answers, flush=True)


class Soft:
    """The tests' end of that process."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-c", "from cases.soft_runs import main; main()"]
        self.process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, what: str, **knobs: Any) -> dict[str, Any]:
        """Train by a mode; return differences from CPUs, what was told, and what each rank has done. Or run Python."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([what, knobs]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.communicate()
