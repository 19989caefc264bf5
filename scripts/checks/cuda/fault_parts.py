"""Checks of runs that fail: one sentence, the right rank, the exit code, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from checking import STRAIGHT, Check, Outcome, Part, importing, must, needed

from pipeplan.errors import PipeplanError

TIMEOUT_S = 20.0  # of runs that hang
LIMIT_S = 240  # in which a run that fails must have ended


def fault(check: Check, data: str, words: str, name: str = "gpt", running: Mapping[str, Any] | None = None) -> Outcome:
    """Run on bad data, which has to end in one sentence that has ``words``."""
    begin = time.monotonic()
    try:
        check.run(check.plan(name, 2, STRAIGHT), data, 1000, **running or {})
    except PipeplanError as error:
        seconds, said = time.monotonic() - begin, str(error)
        must(words in said and "\n" not in said, said)
        left = [x for x in children(os.getpid()) if "rank" in x]
        must(not left, f"processes are left: {left}")
        return Outcome(f"after {seconds:.0f} s: {said}", {"seconds": seconds, "said": said})
    raise AssertionError("the run ended well")


def children(parent: int) -> Iterator[str]:
    """Yield the names of the processes that a process has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            before, _, rest = stat.read_text().rpartition(")")
            state, its, *_ = rest.split()
            if int(its) == parent and state != "Z":
                yield before


def device_assert(check: Check) -> Outcome:
    """Have a label out of range: the GPU tells of it late, and the rank whose GPU it is has to be named."""
    needed(check.kind == "cuda", "a CPU tells at once")
    outcome = fault(check, "out_of_range", "rank 1")
    must("lost" not in outcome.sentence and "doesn't answer" not in outcome.sentence, outcome.sentence)
    return outcome


def out_of_memory(check: Check) -> Outcome:
    """Fill a GPU."""
    needed(check.kind == "cuda", "there is no GPU")
    return fault(check, "hungry", "memory")


def interrupted(check: Check) -> Outcome:
    """Send Ctrl-C to a command that runs."""
    flag = check.folder / "under-way"
    flag.unlink(missing_ok=True)
    words = check.run_words(check.plan("gpt", 2, STRAIGHT), "telling", 100_000)
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=importing(),
        start_new_session=True,
    )
    until = time.monotonic() + LIMIT_S
    while not flag.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - begin
    must(process.returncode == 130 and "Traceback" not in said, f"exit code {process.returncode}: {said[-800:]}")
    return Outcome(f"Ctrl-C ends a run within {seconds:.1f} s with exit code 130", {"seconds": seconds})


def sanitized(check: Check) -> Outcome:
    """Watch every access to memory of two updates by CUDA's own checker."""
    from shutil import which

    needed(check.kind == "cuda" and which("compute-sanitizer") is not None, "there is no compute-sanitizer")
    words = check.run_words(check.plan("cnn", 1, STRAIGHT), "cnn", 2)
    done = subprocess.run(
        ["compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9", sys.executable, *map(str, words)],
        capture_output=True, text=True, timeout=LIMIT_S, env=importing(),
    )  # fmt: skip
    found = [line for line in (done.stdout + done.stderr).splitlines() if "=========" in line]
    must(done.returncode == 0, f"exit code {done.returncode}: {found[:5] or done.stderr[-800:]}")
    return Outcome(f"compute-sanitizer finds nothing: {found[-1] if found else ''}")


FAULTS = {
    "fault_assert": Part(device_assert, "Is a GPU's own fault told of its own rank?", 25),
    "fault_killed": Part(lambda check: fault(check, "dying", "SIGKILL"), "Is a killed rank told of?", 20),
    "fault_raised": Part(
        lambda check: fault(check, "raising", "shard-0009 is missing"), "Is what data raise told of?", 20
    ),
    "fault_infinite": Part(
        lambda check: fault(check, "infinite", "the loss is nan", "cnn"), "Is a loss that isn't a number told of?", 20
    ),
    "fault_memory": Part(out_of_memory, "Is a full GPU told of?", 25),
    "fault_hang": Part(
        lambda check: fault(check, "stalling", "rank 0", running={"timeout_s": TIMEOUT_S}), "Does a hang end?", 60
    ),
    "fault_interrupt": Part(interrupted, "Does Ctrl-C end a run at once?", 30),
    "sanitized": Part(sanitized, "Is no memory used wrongly?", 90),
}
