"""Checks of runs that fail: one sentence, the right rank, the exit code, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from checking import LR, Check, Outcome, importing, must, needed
from run_parts import STRAIGHT

TIMEOUT_S = 20  # of runs that hang
LIMIT_S = 240  # in which a run that fails must have ended
RANKS = 2


def started(check: Check, name: str, data: str, steps: int, *running: str) -> subprocess.Popen[str]:
    """Start a run in a process group of its own."""
    model, batch = check.models[name]
    plan = check.plan(name, RANKS, STRAIGHT)
    words = ["run", plan, "--model", model, "--data", f"checked_models:{data}", "--steps", steps, "--lr", LR]
    return subprocess.Popen(
        [sys.executable, "-m", "pipeplan", *map(str, [*words, "--device", check.kind, *running])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=importing(check.surroundings(model, batch)),
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, float]:
    """Return exit code, what it said, and how long that took; no process of its group may be left."""
    begin = time.monotonic()
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
        raise AssertionError(f"still there after {LIMIT_S} s: {said[-500:]}") from None
    seconds = time.monotonic() - begin
    time.sleep(0.5)
    must(not list(left(process.pid)), "processes are left")
    return process.returncode, said, seconds


def left(group: int) -> Iterator[str]:
    """Yield the numbers of processes of a group that run."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its) == group and state != "Z":
                yield stat.parent.name


def fault(check: Check, data: str, words: str, name: str = "gpt", running: Sequence[str] = ()) -> Outcome:
    """Does a run with bad data end with one sentence that has ``words``?"""
    code, said, seconds = ended(started(check, name, data, 1000, *running))
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    plain = f"exit code {code} after {seconds:.0f} s: {' '.join(lines)}"
    must(code == 1 and len(lines) == 1 and words in lines[0] and "Traceback" not in said, f"{plain} | {said[-800:]}")
    return Outcome(plain, {"exit_code": code, "seconds": seconds, "said": said[-2000:]})


def interrupted(check: Check) -> Outcome:
    """Does Ctrl-C end a run at once?"""
    flag = Path(check.folder, "under-way")
    flag.unlink(missing_ok=True)
    process = started(check, "gpt", "telling", 100_000)
    until = time.monotonic() + LIMIT_S
    while not flag.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    code, said, seconds = ended(process)
    must(code == 130 and "Traceback" not in said, f"exit code {code}: {said[-800:]}")
    return Outcome(f"Ctrl-C ends a run within {seconds:.1f} s with exit code 130", {"seconds": seconds})


def out_of_memory(check: Check) -> Outcome:
    """Does a GPU that is full end a run with one sentence?"""
    needed(check.kind == "cuda", "there is no GPU")
    return fault(check, "hungry", "memory")


FAULTS: dict[str, Callable[[Check], Outcome]] = {
    "fault_killed": partial(fault, data="dying", words="SIGKILL"),
    "fault_raised": partial(fault, data="raising", words="shard-0009 is missing"),
    "fault_infinite": partial(fault, data="infinite", words="the loss is nan", name="cnn"),
    "fault_hang": partial(fault, data="stalling", words="rank 0", running=("--timeout", f"{TIMEOUT_S}s")),
    "fault_memory": out_of_memory,
    "fault_interrupt": interrupted,
}
