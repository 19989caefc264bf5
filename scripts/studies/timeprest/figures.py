"""Redraw Figures 7(a), 7(b), 9(a), 9(b) and 10 of TiMePReSt from the simulated schedule, not by hand.

Usage: python -m scripts.studies.timeprest.figures [-o FOLDER]

Writes one PNG per figure and prints, for each, the version difference and what the paper says about the figure in its
text, checked against the schedule. Figures 9(b) and 10 are one schedule (W = 5, N = 3); 10 is drawn for longer, until
every worker is in its steady state. Exits 1 when a statement turns out otherwise than is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from .analysis import Analysis, analyse
from .staircase import save_staircase

FIGURES = {"7a": (4, 2, 24), "7b": (4, 4, 24), "9a": (3, 3, 24), "9b": (5, 3, 24), "10": (5, 3, 48)}

Statement = tuple[str, Callable[[Analysis], bool]]
SAID: dict[str, list[Statement]] = {
    "7a": [
        ("mini-batches 3, 4, 5 use the updates of 1, 2, 3 backward", lambda a: a.backward_versions[2:5] == (1, 2, 3)),
        ("mini-batch 5 uses the updates of 1 forward", lambda a: set(a.forward_versions[4]) == {1}),
        (
            "two sequences, {1,3,5,7,..} and {2,4,6,..}",
            lambda a: [c[:3] for c in a.sequences] == [(1, 3, 5), (2, 4, 6)],
        ),
        ("after the first backward, one at every third time point", lambda a: every(a, 3)),
    ],
    "7b": [
        ("mini-batches 2 and 3 use the updates of 1 and 2 backward", lambda a: a.backward_versions[1:3] == (1, 2)),
        (
            "C and D of mini-batch 3 start on the weights of 1, A and B don't",
            lambda a: a.forward_versions[2] == (0, 0, 1, 1),
        ),
        ("one sequence", lambda a: len(a.sequences) == 1),
        ("after the first backward, one at every fifth time point", lambda a: every(a, 5)),
    ],
    "9a": [("v = 1, for W <= N + 1", lambda a: a.version_difference == 1)],
    "9b": [("v > 1, for W > N + 1", lambda a: a.version_difference > 1)],
    "10": [
        (
            "each mini-batch's forward takes one time point more than the one before it",
            lambda a: all(later == one + 1 for one, later in pairwise(a.forward_times)),
        )
    ],
}
FALSE_IN_THE_PAPER = {"each mini-batch's forward takes one time point more than the one before it"}


def every(analysis: Analysis, time_points: int) -> bool:
    """Whether each worker's backwards start ``time_points`` apart."""
    program, starts = analysis.timeline.program, analysis.timeline.start_ns
    leaders = starts[program.batch - 1 :: program.batch]
    gaps = {
        later[position] - one[position]
        for one, later in pairwise(leaders)
        for position in range(analysis.workers, 2 * analysis.workers)
    }
    return gaps == {time_points * analysis.unit_ns}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("out/timeprest"), help="folder (default %(default)s)")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    surprises = 0
    for name, (workers, microbatches, time_points) in FIGURES.items():
        analysis = analyse(workers, microbatches)
        path = folder / f"timeprest_figure_{name}.png"
        save_staircase(analysis, str(path), time_points, f"TiMePReSt, Figure {name}")
        print(f"{path}: W = {workers}, N = {microbatches}, v = {analysis.version_difference}")
        for text, holds in SAID[name]:
            true = holds(analysis)
            surprises += true == (text in FALSE_IN_THE_PAPER)
            print(f"  {'holds' if true else 'does not hold'}: {text}")
        if name == "10":
            times = [str(time) for time in analysis.forward_times[:8]]
            print(f"  forwards of mini-batches 1, 2, .. take {', '.join(times)}, .. time points")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
