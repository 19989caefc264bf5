"""Break runs in every way there is, on 2 and on 4 ranks, and judge how each one ends and whether it can be resumed.

    python scripts/checks/faults.py [--launcher own]... [--fault NAME]... [--plan NAME]... [--turns]

A row of the table is a fault, a plan, a launcher and the rank that it happens to. The run must end with exit code 1
and one sentence that names the rank, or, where it may start its ranks again, with exit code 0; no traceback, process,
socket or file in TMPDIR may be left; and a second run must go on from the newest checkpoint to the very losses of an
undisturbed run. ``--turns`` takes about 20 minutes; all rows take hours. Prints a line for each row, and at the
end how many failed, which is the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import current_process
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.check.bounds import any_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import PipeplanError
from pipeplan.files.plans import plan_text
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.runtime.engine.options import RunOptions
from pipeplan.runtime.exchange.nearby.transport import NearbyTransport
from pipeplan.runtime.lowering.otherwise import under
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

STEPS, MORE_STEPS, EVERY, BATCH, WIDTH, LAYERS = 6, 8, 2, 4, 8, 8
TIMEOUT_S = 8.0  # of hangs; what else goes wrong shows at once
LIMIT_S = 240.0  # of one row; a machine may be busy
MARK = "PIPEPLAN_FAULTS"  # in the environment of all that a row starts
ENDED = r"it ended the program by sys\.exit\(0\) \(.*faults\.py:\d+\)"
RAISED = r"ValueError: a fault \(.*faults\.py:\d+\)"


# --- the model, and what happens to it ------------------------------------------------------------------------------


class Fault:
    """What happens to one rank of a run: ``what`` at the ``at``-th time that it comes to ``place``; once per folder."""

    def __init__(self, what: str, place: str, rank: int, at: int, folder: str) -> None:
        self.what, self.place, self.rank, self.at, self.marker = what, place, rank, at, Path(folder) / "happened"
        self.come = 0

    def passes(self, place: str) -> bool:
        """Whether it happens now, as the rank passes ``place``."""
        if place != self.place or self.marker.exists():
            return False
        mine = int(os.environ["RANK"] if "RANK" in os.environ else current_process().name.split()[-1])
        self.come += mine == self.rank
        if mine != self.rank or self.come != self.at:
            return False
        self.marker.touch()
        return True

    def happen(self, value: Any) -> Any:
        """Do it to the rank, or to the ``value`` that is at hand."""
        match self.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                time.sleep(10**6)
            case "exit":
                sys.exit(0)
            case "raise":
                raise ValueError("a fault")
            case "end":
                raise StopIteration
            case "nan":
                return value * float("nan")
            case "shape":
                return value[:1]
        return value

    def at_place(self, place: str, value: Any = None) -> Any:
        """Return ``value``, or what becomes of it."""
        return self.happen(value) if self.passes(place) else value


class Back(torch.autograd.Function):
    """The identity, with a fault in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        """Return the same values."""
        ctx.fault = fault
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the same gradient."""
        return ctx.fault.at_place("backward", gradient), None


class Layer(nn.Linear):
    """A linear layer with a fault when it trains."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        """Return what a linear layer does."""
        if self.fault is None or not self.training:
            return super().forward(x)
        x = Back.apply(x, self.fault)
        return self.fault.at_place("forward", super().forward(x))


def build_with(fault: Fault | None, batch: int) -> tuple[list[nn.Module], Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return the model, by the model contract; ``fault`` is armed."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer(fault) for _ in range(LAYERS)]
    if fault is not None:
        fault.at_place("build")
        for owner, name, place in CALLS:
            wrap(owner, name, place, fault)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = nn.functional.mse_loss(output, target)
        return value if fault is None else fault.at_place("loss", value)

    return layers, torch.zeros(batch, WIDTH), loss


CALLS = (
    (NearbyTransport, "send", "send"),
    (NearbyTransport, "_issue", "receive"),
    (dist, "isend", "send"),  # where threads send
    (dist, "irecv", "receive"),
    (dist, "all_to_all_single", "reduce"),
    (dist, "all_gather", "meeting"),
    (dist, "gather_object", "report"),
    (torch.optim.SGD, "step", "update"),
)


def wrap(owner: Any, name: str, place: str, fault: Fault) -> None:
    """Let ``fault`` pass ``place`` after every call of ``owner.name``."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **keywords: Any) -> Any:
        return fault.at_place(place, original(*args, **keywords))

    setattr(owner, name, wrapped)


def data_with(fault: Fault | None, index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return microbatch ``index``, by the data contract."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    pair = torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)
    if fault is None:
        return pair
    return fault.at_place("data", pair[0]), pair[1]


def build(batch: int) -> Any:
    """Return the model without a fault."""
    return build_with(None, batch)


def data(index: int, seed: int) -> Any:
    """Return a microbatch without a fault."""
    return data_with(None, index, seed)


@cache
def _fault(text: str) -> Fault:
    what, place, rank, at, folder = bytes.fromhex(text).decode().split(",", 4)
    return Fault(what, place, int(rank), int(at), folder)


def __getattr__(name: str) -> Any:
    """Return the function that is named after a fault, as all that a rank is told of its model is a name."""
    kind, _, text = name.partition("_of_")
    if kind == "build" and text:
        return lambda batch: build_with(_fault(text), batch)
    if kind == "data" and text:
        return lambda index, seed: data_with(_fault(text), index, seed)
    raise AttributeError(name)


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One fault of the table: what happens where, at the how manieth time, and what the sentence then says.

    ``{rank}`` in ``words`` is the rank; ``own`` are those of pipeplan's own launcher where they differ. ``whom`` says
    which ranks come there: any, the last one, the ends, or the replicas of a stage.
    """

    what: str
    place: str
    at: int
    words: str
    own: str | None = None
    whom: str = "any"


UNTOLD = r"torchrun: rank {rank}: Signal 9|rank {rank} died without a word, torchrun says how"
SILENT = rf"({UNTOLD}|rank {{rank}} doesn't answer: rank \d+ lost another rank)"
TOGETHER = r"(rank \d+ doesn't answer; )*" + SILENT  # any that wait for all may be what is not heard of
DIED = r"rank {rank} died .*: killed by SIGKILL"
STOPPED = r"rank {rank} (has been stopped for|is stopped) "
HUNG = r"(rank \d+ doesn't answer[^;:]*; )*rank {rank} doesn't answer in "
ROWS = (
    Row("kill", "build", 1, SILENT, r"rank {rank} died before its first operation: killed by SIGKILL"),
    Row("kill", "meeting", 1, TOGETHER, r"rank {rank} died before its first operation: killed by SIGKILL"),
    *(Row("kill", place, 14, SILENT, DIED) for place in ("forward", "backward")),
    Row("kill", "update", 4, TOGETHER, DIED),
    *(Row("kill", place, 8, SILENT, DIED) for place in ("send", "receive")),
    Row("kill", "data", 6, SILENT, DIED, "ends"),
    Row("kill", "loss", 6, SILENT, DIED, "last"),
    Row("kill", "reduce", 7, SILENT, DIED, "replicas"),
    Row("kill", "reduce", 8, SILENT, DIED, "replicas"),
    Row("kill", "report", 1, TOGETHER, DIED),
    Row("stop", "build", 1, SILENT, STOPPED),
    Row("stop", "forward", 14, SILENT, STOPPED),
    Row("stop", "reduce", 7, SILENT, STOPPED, "replicas"),
    Row("hang", "forward", 14, SILENT, HUNG),
    Row("hang", "backward", 14, SILENT, HUNG),
    Row("hang", "data", 6, SILENT, HUNG, "ends"),
    *(
        Row(what, "build", 1, rf"rank {{rank}} failed: .*{words}")
        for what, words in (("exit", ENDED), ("raise", RAISED))
    ),
    *(
        Row(what, place, 14, rf"rank {{rank}} failed in the {place} of microbatch \d+ on stage \d+: {words}")
        for place in ("forward", "backward")
        for what, words in (("exit", ENDED), ("raise", RAISED))
    ),
    *(
        Row(what, place, 6, rf"rank {{rank}} failed in the forward of microbatch \d+ on stage \d+: {words}", None, whom)
        for place, whom in (("data", "ends"), ("loss", "last"))
        for what, words in (("exit", ENDED), ("raise", RAISED))
    ),
    Row("raise", "update", 4, rf"rank {{rank}} failed in update \d+ of stage \d+: {RAISED}"),
    Row("end", "data", 6, r"rank {rank} failed in the forward of .*: StopIteration \(.*faults.py:\d+\)", None, "ends"),
    Row("nan", "forward", 14, r"rank {last} failed in the forward of microbatch \d+ on stage \d+: the loss is nan"),
    Row("nan", "loss", 6, r"rank {rank} failed in the forward of .*: the loss is nan", None, "last"),
    Row("shape", "forward", 14, r"rank {rank} failed in the forward of microbatch \d+ on stage \d+: ", None, "first"),
    Row("shape", "data", 6, r"rank {rank} failed in the forward of microbatch \d+ on stage \d+: ", None, "first"),
)


def plans() -> dict[str, Plan]:
    """Return the plans by name: pipelines and a grid on 2 and 4 ranks, in a pattern's order and by messages."""
    steps = MeasureOptions(steps=1, warmup=0)
    chain = measure_model(build, BATCH, steps, name="faults", date="today", data=data).chain
    layers = [replace(x, forward_ns=10**6, backward_ns=2 * 10**6, optimizer_ns=0) for x in chain.layers]
    chain = replace(chain, layers=tuple(layers))
    shapes: dict[str, tuple[Any, tuple[tuple[int, int, tuple[int, ...]], ...]]] = {
        "2, 2bw": ("2bw", ((0, 4, (0,)), (4, 9, (1,)))),
        "4, stash": ("stash", ((0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,)), (6, 9, (3,)))),
        "4, replicas": ("flush", ((0, 4, (0, 1)), (4, 9, (2, 3)))),
        "2, messages": ("flush", ((0, 4, (0,)), (4, 9, (1,)))),
        "4, grid": ("flush", ((0, 4, (0, 1)), (4, 9, (2, 3)))),
    }
    made = {}
    for name, (weights, cuts) in shapes.items():
        stages = tuple(Stage(*cut) for cut in cuts)
        platform = Platform.flat(len({d for stage in stages for d in stage.devices}), 10**12)
        policy = Policy(weights=weights, accumulate=4)
        pattern = best_one_f_one_b_star(stage_graph(chain, platform, replace(policy, weights="flush"), stages))
        schedule = Schedule("flush", 4) if weights == "flush" else Schedule()
        plan = Plan(chain, platform, policy, Allocation(stages), pattern, (), Provenance("by hand"), schedule)
        if name in ("2, messages", "4, grid"):
            plan = under(plan, "message-driven")
        made[name] = replace(plan, lower_bounds=(any_bound(Problem(chain, platform, policy)),))
    return made


def victims(row: Row, plan: Plan) -> list[int]:
    """Return the ranks that the fault can happen to."""
    stages = [stage.devices for stage in plan.allocation.stages]
    ranks = [d for devices in stages for d in devices]
    replicated = [d for devices in stages if len(devices) > 1 for d in devices]
    found = {
        "any": [ranks[0], ranks[-1]],
        "last": list(stages[-1][:1]),
        "first": list(stages[0][:1]),
        "ends": [ranks[0], ranks[-1]],
        "replicas": replicated[:1] + replicated[-1:],
    }[row.whom]
    return sorted(set(found))


# --- a row, judged --------------------------------------------------------------------------------------------------


def options(folder: Path, steps: int = STEPS, **more: Any) -> RunOptions:
    """Return what is asked of every run."""
    return RunOptions(steps=steps, lr=0.01, checkpoint=folder, every=EVERY, timeout_s=TIMEOUT_S, device="cpu", **more)


def spec(text: str | None) -> ModelSpec:
    """Return the model with the fault of that text."""
    end = "" if text is None else f"_of_{text}"
    return ModelSpec(f"faults:build{end}", f"faults:data{end}")


def by_own_launcher(plan: Plan, text: str, folder: Path, restarts: int = 0) -> tuple[int, str]:
    """Run ``plan`` with a fault by pipeplan's own launcher; return exit code and sentence."""
    try:
        run_plan(plan, spec(text), options(folder, max_restarts=restarts))
    except PipeplanError as error:
        return error.exit_code, str(error)
    return 0, ""


def by_torchrun(plan: Plan, text: str, folder: Path, restarts: int = 0) -> tuple[int, str]:
    """Run ``plan`` with a fault under torchrun; return exit code and the sentences of the ranks, if they are one."""
    file = folder.parent / "plan.json"
    file.write_text(plan_text(plan))
    model = spec(text)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={len(plan.platform)}", f"--max-restarts={restarts}",
        "-m", "pipeplan", "run", str(file), "--model", model.build,
        "--data", str(model.data), "--steps", str(STEPS), "--lr", "0.01", "--checkpoint", str(folder),
        "--checkpoint-every", str(EVERY), "--timeout", f"{TIMEOUT_S:g}s", "--device", "cpu",
        *(["--resume"] if restarts else []),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as done:
        try:
            _, words = done.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            return -1, f"took longer than {LIMIT_S:g} s"
    lines = words.splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    root = re.search(r"Root Cause.*?rank +: (\d+) .*?traceback : (Signal [^\n]*)", words, re.DOTALL)
    if not said and root is not None:  # torchrun ends the others as soon as one has died, before they can say anything
        said = [f"torchrun: rank {root[1]}: {root[2]}"]
    ours = [line for line in lines if "/pipeplan/" in line and line.lstrip().startswith("File ")]
    return done.returncode, " AND ".join(dict.fromkeys([*said, *ours]))


@dataclass(frozen=True)
class Launch:
    """How a run is started; one that ``restarts`` itself has to end well, and is tried with ``faults`` alone."""

    run: Callable[[Plan, str, Path], tuple[int, str]]
    restarts: bool = False

    @property
    def rows(self) -> list[Row]:
        """The rows to try with it."""
        return [row for row in ROWS if not self.restarts or (row.what, row.place) in RESTARTED]


RESTARTED = {("kill", "meeting"), ("kill", "forward"), ("kill", "update"), ("hang", "backward"), ("raise", "forward")}
LAUNCHERS = {
    "own": Launch(by_own_launcher),
    "torchrun": Launch(by_torchrun),
    "own, again": Launch(partial(by_own_launcher, restarts=1), True),
    "torchrun, again": Launch(partial(by_torchrun, restarts=1), True),
}


def ranks_left() -> list[str]:
    """Return the processes of this check that are ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"{MARK}={os.environ[MARK]}".encode() in (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        server = "forkserver" in command and state[1] == str(os.getpid())
        if mine and state[0] != "Z" and int(entry.name) != os.getpid() and not server and "tracker" not in command:
            found.append(f"{entry.name} {command[:60]}")
    return found


def left_over() -> set[str]:
    """Return what is in TMPDIR, but for what torchrun and torch's compiler put there and leave."""
    return {x for x in os.listdir(tempfile.gettempdir()) if not x.startswith(("torchelastic_", "torchinductor_"))}


def judged(row: Row, plan: Plan, launcher: str, rank: int, whole: list[float], folder: Path) -> Iterator[str]:
    """Run a row and yield what is wrong with how it ended."""
    before = left_over()
    text = f"{row.what},{row.place},{rank},{row.at},{folder}".encode().hex()
    began = time.monotonic()
    start = LAUNCHERS[launcher]
    code, said = start.run(plan, text, folder / "checkpoints")
    seconds = time.monotonic() - began
    words = row.own if launcher == "own" and row.own is not None else row.words
    last = plan.allocation.stages[-1].devices
    words = words.replace("{rank}", str(rank)).replace("{last}", f"({'|'.join(map(str, last))})")
    if not (folder / "happened").exists():
        yield "the fault did not happen"
    if code != (0 if start.restarts else 1):
        yield f"exit code {code}"
    if not start.restarts and (not re.match(words, said) or "\n" in said or " AND " in said):
        yield f"said {said!r}"
    if left := ranks_left():
        yield f"left processes {left}"
    if more := left_over() - before:
        yield f"left in TMPDIR {sorted(more)}"
    if row.what in ("stop", "hang") and launcher == "own" and seconds > TIMEOUT_S + 30:
        yield f"took {seconds:.0f} s"
    report = run_plan(plan, spec(None), options(folder / "checkpoints", MORE_STEPS, resume=True))
    assert report is not None
    if list(report.losses) != whole[len(whole) - len(report.losses) :]:
        yield "other losses after it was resumed"


def _in_turn(turn: int, row: Row, made: dict[str, Plan]) -> Plan:
    """Return the plan for a row when each has but one, of those that it can happen to."""
    able = [plan for plan in made.values() if victims(row, plan)]
    return able[turn % len(able)]


def main() -> int:
    """Run the table, or the part of it that is asked for; return how many rows failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", action="append", choices=list(LAUNCHERS))
    parser.add_argument("--fault", action="append", help="such as kill or kill/send")
    parser.add_argument("--plan", action="append")
    parser.add_argument("--one-rank", action="store_true", help="of those that a fault can happen to, the last alone")
    parser.add_argument("--turns", action="store_true", help="each fault once by each launcher, on the plans in turn")
    asked = parser.parse_args()
    made = plans()
    failed = rows = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as home:
        temporary = Path(home) / "tmp"
        temporary.mkdir()
        get_temp_dir()  # multiprocessing's own, which is there until the end
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        os.environ[MARK] = str(os.getpid())
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        sys.path.insert(0, here)
        for name, plan in made.items():
            if asked.plan and name not in asked.plan:
                continue
            undisturbed = run_plan(plan, spec(None), options(Path(home) / "whole", MORE_STEPS))
            shutil.rmtree(Path(home) / "whole")
            assert undisturbed is not None
            for launcher, (turn, row) in (
                (name, x) for name in asked.launcher or LAUNCHERS for x in enumerate(LAUNCHERS[name].rows)
            ):
                label = f"{row.what}/{row.place}"
                if asked.turns and plan is not _in_turn(turn, row, made):
                    continue
                if asked.fault and not {label, row.what} & set(asked.fault):
                    continue
                for rank in victims(row, plan)[-1 if asked.one_rank or asked.turns else 0 :]:
                    folder = Path(home) / "row"
                    (folder / "checkpoints").mkdir(parents=True)
                    start = time.monotonic()
                    wrong = list(judged(row, plan, launcher, rank, list(undisturbed.losses), folder))
                    shutil.rmtree(folder)
                    rows, failed = rows + 1, failed + bool(wrong)
                    verdict = "; ".join(wrong) or "ok"
                    seconds = time.monotonic() - start
                    print(f"{name:12} {launcher:15} {label:16} rank {rank}  {seconds:5.1f} s  {verdict}", flush=True)
    print(json.dumps({"rows": rows, "failed": failed, "seconds": round(time.monotonic() - began)}))
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
