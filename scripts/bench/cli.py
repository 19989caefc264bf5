"""Wall times of the command line, start-up included: medians of fresh processes, beside a bare Python start.

Usage: python scripts/bench/cli.py [PROFILE]   (default: PipeDream's resnet50)
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "profiles" / "published" / "resnet50.json"
RUNS = 15


def median_seconds(command: list[str]) -> float:
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    profile = sys.argv[1] if len(sys.argv) > 1 else str(PUBLISHED)
    pipeplan = [sys.executable, "-m", "pipeplan"]
    rows = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "pipeplan --help": [*pipeplan, "--help"],
        "pipeplan plan --algorithm contiguous, 8 GPUs": [
            *pipeplan, "plan", profile, "--algorithm", "contiguous", "--gpus", "8", "--mem", "16GB",
        ],
    }  # fmt: skip
    print(f"{Path(profile).name}, medians of {RUNS} fresh processes")
    for name, command in rows.items():
        print(f"{name:50s} {median_seconds(command):6.3f} s")


if __name__ == "__main__":
    main()
