"""Is a bound on drained plans ever above the soonest, and how near do it and ``plan`` come?

On random tiny instances, of which every contiguous allocation is run under schedules that drain.

    python scripts/checks/drained.py --instances 120
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.drained import drained_instance, soonest

from pipeplan.check.drained_bound import drained_bound
from pipeplan.planner.drained import EFFORTS, DrainedSearch


def main() -> None:
    """Print what is wrong, and the ratios of what was found and of the bound to the soonest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=120)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    bounds, plans = [], []
    for seed in range(options.first, options.first + options.instances):
        problem, count = drained_instance(seed), drained_instance(seed).policy.accumulate or 1
        times = soonest(problem)
        if not times:
            continue
        best = min(times.values())
        bound = drained_bound(problem, best)
        assert bound is not None, "these are small"
        if bound.period_ns > -(-best // count):
            print(f"{seed}: the bound {bound.period_ns} is above the soonest, {best} / {count}")
        bounds.append(best / (bound.period_ns * count))
        search = DrainedSearch(problem, ("flush", "1f1b"), EFFORTS["normal"])
        search.run()
        straight = min((ns for kind, ns in times.items() if kind in ("flush", "1f1b")), default=None)
        if straight is not None and search.best is not None:
            plans.append(search.best.makespan_ns / straight)
        elif straight is not None:
            print(f"{seed}: nothing was found where {straight} is possible")
    print(f"{len(bounds)} instances: soonest / bound {geometric_mean(bounds):.3f} in the geometric mean")
    print(f"{len(plans)} with 1F1B: found / soonest {geometric_mean(plans):.4f}, {max(plans):.3f} at most")


if __name__ == "__main__":
    main()
