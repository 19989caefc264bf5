"""Run every schedule with every feature of training, on real processes, beside a plain loop that shares no code.

    python scripts/checks/training_matrix.py [--schedules NAME ...] [--features NAME ...] [--pairs]

Features: recompute, replicas, zero (ZeRO-1), tied, clip, fp16, bf16, loader (a DataLoader with a worker), resume
(begun on another plan). Each schedule runs alone and with each feature; ``--pairs`` adds every two together. Prints for
each run the largest difference of losses and of weights to the plain loop (0 where gradients are added in the order of
microbatches) and activations measured over allowed. What isn't run is said with its reason. Exit code 1 where a run
differs by more, fails, or holds more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from cases.training_matrix import FEATURES, SCHEDULES, Case, difference, planned, tolerance  # noqa: E402

from pipeplan.errors import PipeplanError  # noqa: E402


def main() -> None:
    """Run what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--features", nargs="+", default=FEATURES, choices=FEATURES)
    parser.add_argument("--pairs", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as ranks have, which add in the same order then
    sets = [(), *((x,) for x in arguments.features)]
    sets += list(combinations(arguments.features, 2)) if arguments.pairs else []
    cases = [Case(schedule, frozenset(some)) for schedule in arguments.schedules for some in sets]
    runs, exact, close, bad, left = 0, 0, 0.0, 0, 0
    for case in cases:
        name = f"{case.schedule:16}{'+'.join(sorted(case.features)) or 'alone':20}"
        if (why := case.refused()) is not None:
            print(f"{name} not run: {why}", flush=True)
            left += 1
            continue
        runs += 1
        try:
            allowed = tolerance(case, planned(case))
            with tempfile.TemporaryDirectory() as folder:
                loss, weight, full = difference(case, Path(folder))
        except PipeplanError as error:
            print(f"{name} FAILED: {error}", flush=True)
            bad += 1
            continue
        wrong = max(loss, weight) > allowed or full > 1
        bad += wrong
        exact += loss == weight == 0
        close = max(close, loss, weight)
        print(f"{name} loss {loss:.1e} weights {weight:.1e} full {full:.3f}{' WRONG' if wrong else ''}", flush=True)
    print(f"{runs} runs, {exact} equal to the last bit, others within {close:.1e}, {bad} wrong; {left} not run")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
