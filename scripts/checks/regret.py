"""How much longer does a plan take that was made on an estimate than one made on the measured profile?"""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.carry import carried
from pipeplan.problem import Chain, Platform, Problem

GPUS = (2, 4, 8)
MEMORY, BANDWIDTH = 1 << 50, 12 * 10**9  # bytes, so that time alone counts; bytes/s, of PCIe 3 x16


def regrets(estimated: Chain, measured: Chain, gpus: Sequence[int] = GPUS) -> list[float]:
    """Return for each number of GPUs by how much the period of the plan made on ``estimated`` is above that of the plan
    made on ``measured``, both with measured costs; contiguous stages on one GPU each."""
    found = []
    for count in gpus:
        problems = [
            Problem(chain, Platform.flat(count, MEMORY, BANDWIDTH), replicas=False) for chain in (estimated, measured)
        ]
        guess, best = (make_plan(problem, "contiguous").plan for problem in problems)
        period = carried(guess, measured).period_ns
        assert period is not None
        assert best.pattern is not None
        found.append(period / best.pattern.period_ns - 1)
    return found
