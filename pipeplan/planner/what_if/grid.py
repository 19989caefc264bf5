"""Which validated plan answers a question about a batch on a number of GPUs: that of the grid that is done first."""

from __future__ import annotations

from typing import Any

from ...check.bounds import any_bound
from ...check.validate import check
from ...errors import BadInput, Infeasible
from ...plan import Allocation, Plan, Provenance, Schedule, Stage
from ...version import __version__
from ..grids.grid_search import search_grids
from ..grids.space import GridProblem, GridRow, Outcome, configs
from ..periodic.explain import why_no_grid_fits, why_not_asked
from ..periodic.incumbent import Settings
from ..plan import Planned

ALGORITHM = "grid"


def make_grid_plan(asked: GridProblem, settings: Settings | None = None, effort: str = "normal") -> Planned:
    """Return the validated plan of the best grid found; Infeasible, explained, if no grid fits.

    ``provenance.options`` holds the table of grids: the best figure of each, or what rules it out, and the bound.
    """
    if not any(True for _ in configs(asked)):
        raise BadInput(why_not_asked(asked))
    outcome = search_grids(asked, settings or Settings(), effort)
    if outcome.best is None:
        raise Infeasible(why_no_grid_fits(outcome))
    found = outcome.best
    problem = asked.of(found.config)
    plan = Plan(
        chain=problem.chain,
        platform=problem.platform,
        policy=problem.policy,
        allocation=Allocation(found.stages),
        pattern=None,
        lower_bounds=(any_bound(problem),),
        provenance=Provenance(
            ALGORITHM, _options(asked, outcome, effort), solver_status=outcome.stopped, version=__version__
        ),
        schedule=Schedule("message-driven", problem.policy.accumulate, found.limit),
    )
    return Planned(plan, check(plan))


def segment_length(stages: tuple[Stage, ...]) -> int | None:
    """Return ac, the layers of the longest recomputed segment; None when nothing is recomputed."""
    return max((stop - start for stage in stages for start, stop in stage.checkpoint), default=None)


def _options(asked: GridProblem, outcome: Outcome, effort: str) -> dict[str, Any]:
    assert outcome.best is not None
    return {
        "batch": asked.batch,
        "microbatches": list(asked.sizes),
        "data_parallel": asked.pipelines or "auto",
        "limit": asked.limit,
        "effort": effort,
        "grid": _figures(GridRow(outcome.best.config.stages, outcome.best.config.pipelines, outcome.best, None)),
        "bound_ns": outcome.bound_ns,
        "grids": [_figures(row) for row in outcome.rows],
    }


def _figures(row: GridRow) -> dict[str, Any]:
    figures: dict[str, Any] = {"inter": row.stages, "data": row.pipelines}
    if row.found is not None:
        found = row.found
        figures |= {
            "batch_ns": found.batch_ns,
            "simulated": "in full" if found.exact else "one pipeline",
            "microbatch": found.config.microbatch,
            "offload": found.config.offload,
            "placement": found.config.placement,
            "limit": found.limit,
            "ac": segment_length(found.stages),
        }
    if row.bound_ns is not None:
        figures["bound_ns"] = row.bound_ns
    if row.reason is not None:
        figures["reason"] = row.reason
    return figures
