"""Disturb runs in every phase of a checkpoint's writing, and damage what they wrote: does training go on as if not?

    python scripts/checks/checkpoint_faults.py [--layouts NAME ...] [--launchers own torchrun] [--rows WORD ...]

Two ranks with weights 2bw, and four on a grid of pipelines x data parallelism, in a fixed order and in that of arrival;
started by pipeplan itself and by torchrun. Every row is a fault. A process is killed, or stopped, or its disk is full,
while the second checkpoint is written; or the newest checkpoint is damaged afterwards. Each run must end by itself, the
resumed one must have the losses of an undisturbed one to the last bit, and nothing may be left over: no process, no
file that is half written, no temporary folder of pipeplan's. Prints a line for each row; exit code 1 if any fails.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases.checkpoints import resummed, reworded  # noqa: E402  # found through the path above
from cases.runtime import chain_of, healthy, plan_of  # noqa: E402

from pipeplan.check.bounds import any_bound  # noqa: E402
from pipeplan.errors import PipeplanError  # noqa: E402
from pipeplan.files.plans import plan_text  # noqa: E402
from pipeplan.plan import Plan  # noqa: E402
from pipeplan.problem import Problem  # noqa: E402
from pipeplan.runtime.engine.asked import run_otherwise  # noqa: E402
from pipeplan.runtime.engine.job import RunOptions  # noqa: E402
from pipeplan.runtime.model.build.spec import ModelSpec  # noqa: E402
from pipeplan.runtime.processes.launch import run_plan  # noqa: E402
from pipeplan.runtime.training.update.optimizers import parse_choice  # noqa: E402

STEPS, EVERY, OPTIMIZER = 6, 2, "SGD,momentum=0.9"
LIMIT_S, GOING_S = 600, 60  # for a run to end, and for its processes to go then
GRID = {"stages": [(0, 3, (0, 1)), (3, 6, (2, 3))], "weights": "flush", "accumulate": 4}
LAYOUTS = {  # name: (plan, arguments)
    "2 ranks, 2bw": ({"stages": [(0, 3, (0,)), (3, 6, (1,))], "weights": "2bw"}, []),
    "4 ranks, grid": (GRID, []),
    "4 ranks, by messages": (GRID, ["--schedule", "message-driven", "--limit", "2"]),
}
LAST = "step-00000004"


class Failed(Exception):
    """A row that is not as it must be."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run: its exit code, its losses if it ended well, and what it said."""

    code: int
    losses: list[float]
    said: str


@dataclass(frozen=True)
class Setting:
    """A layout and who starts it, with the losses of an undisturbed run, and its first two checkpoints in a folder."""

    plan: Plan
    arguments: list[str]
    torchrun: bool
    work: Path
    losses: list[float]
    written: Path

    @property
    def ranks(self) -> int:
        return sum(len(stage.devices) for stage in self.plan.allocation.stages)

    def run(self, folder: Path, model: str, steps: int = STEPS, **more: Any) -> Outcome:
        """Train until ``steps``, and see that no process is left."""
        if self.torchrun or "launcher" in model:
            return self._by_command(folder, model, steps, **more)
        said: list[str] = []
        options = RunOptions(
            steps=steps, lr=0.01, optimizer=parse_choice(OPTIMIZER, ""), checkpoint=folder, every=EVERY, **more
        )
        plan = run_otherwise(
            self.plan, False, "message-driven" if self.arguments else None, 2 if self.arguments else None
        )
        try:
            report = run_plan(plan, ModelSpec(model, "cases.runtime:vectors"), options, None, said.append)
            assert report is not None
            outcome = Outcome(0, list(report.losses), "\n".join(said))
        except PipeplanError as error:
            outcome = Outcome(error.exit_code, [], f"{error}")
        _wait_until_gone(lambda: _children(forkserver._forkserver._forkserver_pid))  # type: ignore[attr-defined]
        return outcome

    def _by_command(self, folder: Path, model: str, steps: int, **more: Any) -> Outcome:
        plan, temporary = self.work / "plan.json", self.work / "tmp"
        bound = any_bound(Problem(self.plan.chain, self.plan.platform, self.plan.policy))
        plan.write_text(plan_text(replace(self.plan, lower_bounds=(bound,))))
        temporary.mkdir(exist_ok=True)
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command = [sys.executable, *(start if self.torchrun else []), "-m", "pipeplan", "run", str(plan)]
        command += ["--model", model, "--data", "cases.runtime:vectors", "--steps", str(steps), "--lr", "0.01"]
        command += ["--optimizer", OPTIMIZER, "--checkpoint", str(folder), "--checkpoint-every", str(EVERY), "--json"]
        command += self.arguments + ["--resume"] * more.get("resume", False)
        command += ["--keep-checkpoints", str(more["keep"])] if "keep" in more else []
        command += ["--timeout", f"{more['timeout_s']}s"] if "timeout_s" in more else []
        environment = dict(os.environ) | {"TMPDIR": str(temporary), "PIPEPLAN_FAULTS": str(temporary)}
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
        _wait_until_gone(lambda: _marked(f"PIPEPLAN_FAULTS={temporary}"))
        losses = json.loads(done.stdout)["losses"] if not done.returncode else []
        return Outcome(done.returncode, losses, done.stderr)


def _wait_until_gone(processes: Callable[[], list[int]]) -> None:
    until = time.monotonic() + GOING_S
    while left := processes():
        if time.monotonic() > until:
            raise Failed(f"processes {left} are left")
        time.sleep(0.05)


def _children(parent: int) -> list[int]:
    """Return the processes that ``parent`` has started and that still run."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid for pid in found if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]


def _marked(mark: str) -> list[int]:
    """Return the processes that run and have ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def prepare(name: str, torchrun: bool, work: Path) -> Setting:
    shape, arguments = LAYOUTS[name]
    work.mkdir(parents=True)
    setting = Setting(plan_of(chain_of(healthy, 4), **shape), arguments, torchrun, work, [], work / "written")
    setting.run(setting.written, "cases.runtime:healthy", 4)
    whole = setting.run(work / "whole", "cases.runtime:healthy")
    return replace(setting, losses=whole.losses)


def resumes(setting: Setting, folder: Path, *steps: int) -> Outcome:
    """Go on; see that it was from one of ``steps``, as undisturbed training does, and that the folder is clean."""
    done = setting.run(folder, "cases.runtime:healthy", resume=True, keep=1)
    if done.code:
        raise Failed(f"exit code {done.code}: {done.said[-600:]}")
    losses = done.losses
    each = len(setting.losses) // STEPS
    kept = STEPS - len(losses) // each
    if kept not in steps:
        raise Failed(f"went on from update {kept} instead of {steps}")
    if losses != setting.losses[kept * each :]:
        raise Failed(f"losses {losses} instead of {setting.losses[kept * each :]}")
    if list(folder.glob(".*")) or not (folder / f"step-{STEPS:08d}").is_dir():
        raise Failed(f"left: {sorted(path.name for path in folder.iterdir())}")
    return done


# --- a run is disturbed ---------------------------------------------------------------------------------------------


def disturbed(setting: Setting, place: str, rank: int, *steps: int) -> str:
    """Let ``place`` happen to ``rank`` while the second checkpoint is written, and go on."""
    folder = setting.work / "c"
    shutil.rmtree(folder, ignore_errors=True)
    more = {"timeout_s": 10} if place == "stopped" else {}
    model = f"cases.faults:deadly_{place}_{rank}"
    begin = time.monotonic()
    done = setting.run(folder, model, keep=1, **more)
    seconds = time.monotonic() - begin
    if not done.code:
        raise Failed("the disturbed run ended well")
    if place != "launcher" and not setting.torchrun and done.code != 1:
        raise Failed(f"exit code {done.code}: {done.said[-600:]}")
    survives = not setting.torchrun and place != "launcher"
    if (survives or place.startswith("full")) and list(folder.glob(".*")):
        raise Failed(f"left by a run whose launcher lives: {sorted(path.name for path in folder.iterdir())}")
    resumes(setting, folder, *steps)
    return f"ended after {seconds:.0f} s, resumed"


def kills(ranks: int) -> dict[str, Callable[[Setting], str]]:
    rows: dict[str, Callable[[Setting], str]] = {}

    def add(words: str, place: str, rank: int, *steps: int) -> None:
        rows[f"{words}, rank {rank}"] = lambda setting: disturbed(setting, place, rank, *steps)

    add("killed before a file", "begin", 0, 2)
    for rank in range(ranks):
        add("killed in the middle of its file", "shard", rank, 2)
    for rank in (0, ranks - 1):
        add("killed after its file", "written", rank, 2)
    add("killed inside run.json's writing", "about", 0, 2)
    add("killed before the name", "flushed", 0, 2)
    add("killed after the name", "rename", 0, 4)
    add("killed inside the removal of the older one", "remove", 0, 4)
    add("launcher killed in the middle of a file", "launcher", ranks - 1, 2, 4)  # they may be through by then
    for rank in (0, ranks - 1):
        add("stopped in the middle of its file", "stopped", rank, 2)
        add("disk full in the middle of its file", "full", rank, 2)
    return rows


# --- a checkpoint is damaged ----------------------------------------------------------------------------------------


class Planted:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": _flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "emptied": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "a link": lambda path: path.symlink_to(path.rename(path.parents[2] / path.name)),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Planted(path.parents[2] / "planted"))),
}


def damaged(setting: Setting, name: str, do: Callable[[Path], object]) -> str:
    """Damage a file of the newest checkpoint; see that it is named, and that training goes on from the one before."""
    folder = setting.work / "c"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(setting.written, folder)
    path = folder / LAST / name
    (setting.work / name).unlink(missing_ok=True)
    do(path)
    done = resumes(setting, folder, 2)
    said = [line for line in done.said.splitlines() if f"{path}: " in line]
    if len(said) != 1:
        raise Failed(f"said {said} of {path}")
    if (setting.work / "planted").exists():
        raise Failed("what was planted was executed")
    return said[0].rpartition("/")[2]


def refused(setting: Setting, words: str, do: Callable[[Path], object]) -> str:
    """Change the folder so that there is nothing to go on from; see that one sentence says so."""
    folder = setting.work / "c"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(setting.written, folder)
    do(folder)
    done = setting.run(folder, "cases.runtime:healthy", resume=True)
    said = [line for line in done.said.splitlines() if words in line]
    if done.code != (1 if setting.torchrun else 2) or not said:
        raise Failed(f"exit code {done.code}: {done.said[-600:]}")
    if (setting.work / "planted").exists():
        raise Failed("what was planted was executed")
    return said[0][:90]


def extra(setting: Setting) -> str:
    folder = setting.work / "c"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(setting.written, folder)
    (folder / LAST / ".metadata").write_bytes(pickle.dumps(Planted(setting.work / "planted")))
    (folder / LAST / "more.pt").write_bytes(b"x")
    resumes(setting, folder, 4)
    if (setting.work / "planted").exists():
        raise Failed("what was planted was executed")
    return "resumed from it"


def _plant_fitting(folder: Path) -> None:
    for path in (folder / LAST).glob("rank-*"):
        torch.save(torch.load(path) | {"rates": Planted(folder.parent / "planted")}, path)
    resummed(folder / LAST)


def _damage_all(folder: Path) -> None:
    for path in folder.glob("*/rank-00001.pt"):
        _flip(path)


def damages() -> dict[str, Callable[[Setting], str]]:
    rows: dict[str, Callable[[Setting], str]] = {}
    for words, do in DAMAGE.items():
        for name in ("run.json", "rank-00000.pt", "rank-00001.pt"):
            rows[f"{words}: {name}"] = lambda setting, do=do, name=name: damaged(setting, name, do)  # type: ignore[misc]
    above = {"../step-00000002/rank-00000.pt": {"bytes": 1, "crc32": 1}}
    rows["names a file elsewhere: run.json"] = lambda setting: damaged(
        setting, "run.json", lambda path: reworded(path.parent, files=above)
    )
    rows["extra files"] = extra
    rows["planted, with checksums that fit"] = lambda setting: refused(setting, "UnpicklingError", _plant_fitting)
    rows["all are damaged"] = lambda setting: refused(setting, "no checkpoint is good", _damage_all)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--launchers", nargs="*", choices=["own", "torchrun"], default=["own", "torchrun"])
    parser.add_argument("--rows", nargs="*", default=[""], help="those that have one of these words")
    given = parser.parse_args()
    failures = count = 0
    with tempfile.TemporaryDirectory() as work:
        for launcher in given.launchers:
            for layout in given.layouts:
                setting = prepare(layout, launcher == "torchrun", Path(work, launcher, layout.replace(" ", "-")))
                for words, row in {**kills(setting.ranks), **damages()}.items():
                    if not any(word in words for word in given.rows) or (setting.torchrun and "launcher" in words):
                        continue  # without torchrun's agent its ranks go on
                    count += 1
                    try:
                        said = row(setting)
                    except (Failed, subprocess.TimeoutExpired) as error:
                        failures += 1
                        said = f"FAILED: {error}"
                    print(f"{launcher:8}  {layout:20}  {words:55}  {said}", flush=True)
    print(f"{count} rows, {failures} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
