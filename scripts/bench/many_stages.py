"""What do the commands take on plans of very many stages? CPU seconds and peak memory of each, start-up included.

    python scripts/bench/many_stages.py [--plans WORDS,..] [--commands WORDS,..] [--limit SECONDS]

Random layers (0.3 to 9 ms), one to a stage, on GPUs with memory to spare: what is measured depends on the numbers of
stages, microbatches and replicas alone. Prints a table in Markdown, one row for each plan; what a command refuses
stands as its exit code. WORDS choose rows and columns by parts of their names.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan.files.profiles import profile_text
from scripts.bench.contiguous import random_chain


@dataclass(frozen=True)
class Taken:
    """What a command printed, its exit code, CPU seconds and peak megabytes."""

    output: bytes
    code: int
    seconds: float
    megabytes: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.megabytes:,.0f} MB" if self.code == 0 else f"exit code {self.code}"


def taken(*arguments: str, limit: float | None = None) -> Taken:
    """Run ``pipeplan`` in a new process, ended after ``limit`` seconds; Linux tells what it took."""
    command = [sys.executable, "-m", "pipeplan", *arguments]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        timer = threading.Timer(limit or threading.TIMEOUT_MAX, process.send_signal, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return Taken(out.read(), process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def each(count: int, value: int = 1) -> str:
    """Return ``count`` times the same number, as options take them."""
    return ",".join([str(value)] * count)


def rounds(devices: int, chunks: int) -> str:
    """Return the devices of stages that are dealt out round and round."""
    return "/".join(str(device) for _ in range(chunks) for device in range(devices))


def stated(stages: int, gpus: int, *options: str) -> list[str]:
    """Return the options of a plan of so many stages of one layer each."""
    return ["--split", each(stages), "--gpus", str(gpus), "--mem", "1TB", *options]


def drained(schedule: str, microbatches: int) -> list[str]:
    """Return the options of a schedule that drains after so many microbatches."""
    return ["--weights", "flush", "--schedule", schedule, "--batch", str(microbatches)]


PLANS = {
    "512 stages, a pattern": (512, stated(512, 512)),
    "1,024 stages, a pattern": (1024, stated(1024, 1024)),
    "128 stages of 8 GPUs, a pattern": (128, stated(128, 1024, "--replicas", each(128, 8))),
    "128 stages, 1F1B, 2,048 microbatches": (128, stated(128, 128, *drained("1f1b", 2048))),
    "512 stages, 1F1B, 1,024 microbatches": (512, stated(512, 512, *drained("1f1b", 1024))),
    "256 GPUs, 2 stages each, interleaved, 512 microbatches": (
        512,
        stated(512, 256, "--on", rounds(256, 2), *drained("interleaved", 512)),
    ),
}
COMMANDS = {
    "`check`": ("check", "PLAN"),
    "`simulate`": ("simulate", "PLAN"),
    "`show`": ("show", "PLAN"),
    "`report`": ("report", "PLAN", "-o", "report.html"),
    "`diff`": ("diff", "PROFILE", "PROFILE", "--plan", "PLAN"),
    "`export --to torch-csv`": ("export", "PLAN", "--to", "torch-csv", "-o", "schedule.csv"),
    "`export --to torch-split`": ("export", "PLAN", "--to", "torch-split"),
    "`export --to deepspeed`": ("export", "PLAN", "--to", "deepspeed"),
    "`export --to megatron`": ("export", "PLAN", "--to", "megatron"),
    "`export --to torchtitan`": ("export", "PLAN", "--to", "torchtitan"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="")
    parser.add_argument("--commands", default="")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each command")
    options = parser.parse_args()
    plans = [name for name in PLANS if any(words in name for words in options.plans.split(","))]
    commands = [name for name in COMMANDS if any(words in name for words in options.commands.split(","))]
    print("| plan | `plan --split` |", " | ".join(commands), "|")
    print("|---" * (len(commands) + 2) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        for name in plans:
            layers, arguments = PLANS[name]
            Path("profile.json").write_text(profile_text(random_chain(layers)))
            print(f"| {name} |", taken("plan", "profile.json", *arguments, "-o", "plan.json"), end=" |", flush=True)
            for command in commands:
                words = [{"PLAN": "plan.json", "PROFILE": "profile.json"}.get(x, x) for x in COMMANDS[command]]
                print("", taken(*words, limit=options.limit), end=" |", flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
