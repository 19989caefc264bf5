"""Do the frameworks' own parsers and splitters accept what is exported, with every parameter in exactly one stage?

    python scripts/checks/exports.py [--megatron DIR] [--torchtitan DIR] [--deepspeed DIR] [--gpus 8,2x8]
                                     [--models gpt2-xl,llama3-8b,vision] [--quick]

DIR is a checkout of the framework's source (``accepting`` runs parts of it); without one the framework is skipped, and
the output says so. torch is the installed one.
Plans are those of ``plan --for`` for GPT-2 XL, Llama 3 8B and a traced vision model on 8 and 2 x 8 GPUs, printed with
what the restriction costs; their models are as deep, and narrow. Last, torch trains small ones on four processes of the
CPU, two ranks x two pipelines, and gradients are compared with those of serial training.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.api.given.problems import with_zero
from pipeplan.check.targets import TARGETS
from pipeplan.check.units import CannotExpress
from pipeplan.errors import BadInput, Infeasible
from pipeplan.files.frameworks import WRITERS, Asked, parsed_renames
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.plan import ScheduleKind
from pipeplan.planner.plan import STATED, make_plan
from pipeplan.planner.simulated.other_schedules import own_schedule
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.planner.what_if.target import make_target_plan, unrestricted, with_price
from pipeplan.problem import SHARING, Chain, Device, Level, Platform, Policy, Problem, Zero
from pipeplan.runtime.profiler.estimate import estimate_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.schedule.kinds import KINDS
from pipeplan.zoo import load
from scripts.checks.accepting import ACCEPT, Case, version

DECODER = [r"block(\d+)=layers.\1,embedding=tok_embeddings,head=lm_head,(.*)=\1"]


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(width, width // 4, 1)
        self.middle = nn.Conv2d(width // 4, width // 4, 3, padding=1)
        self.widen = nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions make."""
        return x + self.widen(functional.relu(self.middle(functional.relu(self.narrow(x)))))


class Vision(nn.Module):
    """A residual network that isn't a list of layers, so it is traced."""

    def __init__(self, width: int = 512, depth: int = 24) -> None:
        super().__init__()
        self.tok_embeddings = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.layers = nn.ModuleList(Bottleneck(width) for _ in range(depth))
        self.norm = nn.GroupNorm(8, width)
        self.lm_head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.norm(x).mean((2, 3)))
        return out


def estimated(build: Callable[[int], Any], batch: int, name: str) -> Chain:
    """Return the profile of a model on an H100, estimated."""
    options = MeasureOptions(dtype=torch.bfloat16)
    return estimate_model(build, batch, accelerator("h100"), options, name=name, date="").chain


def vision(batch: int) -> Any:
    """Build the vision model by the model contract."""
    return Vision(), torch.zeros(batch, 3, 224, 224), lambda y, t: functional.cross_entropy(y, t)


def narrow_decoder(depth: int) -> nn.Module:
    """Layers under the names of the zoo's decoders."""
    names = ["embedding", *(f"block{i}" for i in range(depth)), "norm", "head"]
    return nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))


CASES = [
    Case(
        "gpt2-xl",
        lambda: estimated(load("gpt2-xl,tied=false"), 4, "gpt2-xl"),
        lambda: narrow_decoder(48),
        torch.zeros(1, 4),
    ),
    Case(
        "llama3-8b", lambda: estimated(load("llama3-8b"), 1, "llama3-8b"), lambda: narrow_decoder(32), torch.zeros(1, 4)
    ),
    Case("vision", lambda: estimated(vision, 32, "vision"), lambda: Vision(8, 24), torch.zeros(1, 3, 32, 32)),
]


# --- the plans ------------------------------------------------------------------------------------------------------


def platforms(text: str) -> Iterator[tuple[str, Platform]]:
    for part in text.split(","):
        nodes, _, each = part.rpartition("x")
        count, inside = int(nodes or 1) * int(each), Level(int(each), 450 * 10**9)
        levels = (inside, Level(int(nodes), 50 * 10**9)) if nodes else (inside,)
        yield part, Platform((Device(80 * 10**9),) * count, levels)


def check(folders: dict[str, Path | None], gpus: str, models: list[str], quick: bool, zero: Zero) -> bool:
    good = True
    heads = "".join(f" {name:>10}" for name in ("period", "bound", *(() if quick else ("flush", "2bw"))))
    print(f"{'model':10} {'GPUs':5} {'to':12}{heads}  what its own code says")
    for case in (case for case in CASES if case.name in models):
        chain = case.profile()
        for label, platform in platforms(gpus):
            policy = Policy("flush", accumulate=8 * len(platform), optimizer="adam", precision="mixed")
            policy = with_zero(policy, chain, zero)
            problem = Problem(chain, platform, policy, checkpointing="segments")
            free = {} if quick else unrestricted(problem)
            for name, accept in ACCEPT.items():
                folder = folders.get(name, Path())
                row = f"{case.name:10} {label:5} {name:12}"
                try:
                    made = make_target_plan(problem, WRITERS[name].target, effort="quick")
                    made = with_price(made, free)
                    run = simulate_plan(made.plan, None, own_schedule(made.plan)).timeline
                    renames = parsed_renames(DECODER if name == "torchtitan" else [])
                    text = WRITERS[name].write(Asked(made.plan, made.plan.allocation.stages, run, renames))
                except (BadInput, CannotExpress, Infeasible) as error:
                    print(f"{row} refused: {error}")
                    continue
                price = made.plan.provenance.options.get("price", {})
                times = [made.evaluation.period_ns, made.plan.lower_bounds[0].period_ns, *price.values()]
                said = "".join(f" {ns / 1e6:>7.3f} ms" for ns in times)
                if folder is None:
                    print(f"{row}{said}  skipped: no --{name}")
                    continue
                try:
                    with redirect_stdout(StringIO()):  # what frameworks print themselves
                        accepted = accept(folder, text, case)
                    print(f"{row}{said}  {accepted}")
                except AssertionError as error:
                    good = False
                    print(f"{row}{said}  REFUSED: {error}")
    return good


# --- torch trains ---------------------------------------------------------------------------------------------------

WORKER = """
import importlib.util, json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch import nn
rank, path, store, out, pipelines = int(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2 * pipelines)
spec = importlib.util.spec_from_file_location("exported", path)
exported = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exported)
torch.manual_seed(0)
layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)))
x, y = torch.randn(16, 6), torch.randn(16, 6)
mesh = init_device_mesh("cpu", (2, pipelines), mesh_dim_names=("pp", "dp"))
each = 16 // pipelines
share = slice(each * mesh.get_local_rank("dp"), each * (mesh.get_local_rank("dp") + 1))
run = exported.schedule(layers, torch.device("cpu"), nn.functional.mse_loss, mesh)
mine = exported.RANKS[mesh.get_local_rank("pp")]
kwargs = {"target": y[share]} if max(map(max, exported.RANKS)) in mine else {}
run.step(*([x[share]] if 0 in mine else []), **kwargs)
found = {n: p.grad.flatten().tolist() for n, p in layers.named_parameters() if p.grad is not None}
json.dump(found, open(f"{out}/{rank}.json", "w"))
dist.destroy_process_group()
"""


def train(kind: ScheduleKind) -> bool:
    """Train one mini-batch on two ranks x two pipelines, where backwards are split x one, and compare gradients with
    serial training."""
    import json

    from pipeplan.problem import Layer

    layers = tuple(Layer(f"l{i}", 10**6, 2 * 10**6, 100, 50, saved_bytes=60) for i in range(6))
    pipelines = 1 if KINDS[kind].splits else 2
    platform = Platform.flat(2 * pipelines, 10**9)
    problem = Problem(Chain("small", layers, 50), platform, Policy("flush", accumulate=8), checkpointing="none")
    own = ["0,1", "2,3"] if pipelines > 1 else ["0", "1"]
    groups = "/".join({"1f1b": own, "zbv": [*own, *reversed(own)]}.get(kind, own * 2))
    stated = {"split": "3,3" if kind == "1f1b" else "2,1,2,1", "on": groups}
    plan = make_plan(problem, STATED, stated, schedule=kind).plan
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/schedule.csv"
        run = simulate_plan(plan, None, own_schedule(plan)).timeline
        asked = Asked(plan, plan.allocation.stages, run, (), path)
        writer = WRITERS["torch-csv"]
        assert writer.beside is not None
        Path(path).write_text(writer.write(asked))
        Path(path).with_suffix(".py").write_text(writer.beside[1](asked))
        Path(f"{folder}/worker.py").write_text(WORKER)
        started = [
            subprocess.Popen(
                [
                    *(sys.executable, f"{folder}/worker.py", str(rank), f"{folder}/schedule.py", f"{folder}/store"),
                    *(folder, str(pipelines)),
                ]
            )
            for rank in range(2 * pipelines)
        ]
        codes = [x.wait(300) for x in started]
        if any(codes):
            print(f"torch, {kind}: ranks ended with {codes}")
            return False
        found: dict[str, list[float]] = {}
        for rank in range(2 * pipelines):
            found |= json.loads(Path(f"{folder}/{rank}.json").read_text())
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)))
    x, y = torch.randn(16, 6), torch.randn(16, 6)
    functional.mse_loss(model(x), y).backward()
    worst = max(
        (torch.tensor(found[name]) - p.grad.flatten()).abs().max().item() if p.grad is not None else 0.0
        for name, p in model.named_parameters()
    )
    print(f"torch, {kind}, 2 ranks x {pipelines} pipelines: gradients differ from serial ones by {worst:.1e} at most")
    return worst < 1e-6


def main() -> None:
    """Check what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("megatron", "torchtitan", "deepspeed"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"a checkout of {name}'s source")
    parser.add_argument("--gpus", default="8,2x8", help="GPUs, or nodes x GPUs")
    parser.add_argument("--models", default=",".join(case.name for case in CASES))
    parser.add_argument("--quick", action="store_true", help="without the prices")
    parser.add_argument("--zero", type=int, choices=SHARING, default=0, help="what replicas share")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch about itself
    folders: dict[str, Path | None] = {"megatron": given.megatron, "torchtitan": given.torchtitan}
    folders |= {"deepspeed": given.deepspeed}
    for name, folder in folders.items():
        print(f"{name}: {'skipped, no source given' if folder is None else version(folder)}")
    print(f"torch: {torch.__version__}\n")
    good = check(folders, given.gpus, given.models.split(","), given.quick, given.zero)
    print()
    good &= min(list(map(train, TARGETS["torch"].kinds)))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
