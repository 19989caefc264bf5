"""Which stages x equal pipelines are done first with a batch? One call for a profile, one for a model that is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Unpack

from ..choices import DRAINED
from ..errors import BadInput
from ..partition.granularity import merging
from ..planner.periodic.incumbent import Settings
from ..planner.plan import Planned
from ..problem import MICROBATCHES_PER_DEVICE
from ..status import Status
from ..units import gpu_counts, parse_time
from .asked import Asked, Common, Grids, Parts, defaults, part_of
from .given.problems import ANY, deadline_of, on_groups, problem_of
from .given.profiles import Profile, is_name
from .given.tensor import OfDegree, Worth, best_degree, parts
from .given.variants import DEGREES
from .questions import Given, given_profiles, timed
from .result import PlanResult

GRID_DEFAULTS: Grids = defaults(Grids)


def grid(
    profile: Given,
    *,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    **asked: Unpack[Grids],
) -> PlanResult:
    """Return the plan of the stages x equal ``pipelines`` (None: any) that are done first with ``batch`` samples.

    ``microbatches`` are the sizes to choose from, by default those that are profiled: of ``profile`` and of further
    ``profiles`` of the same network; a model by its name is estimated at each size. ``layer_overhead`` is the part of a
    layer's pass that doesn't shrink with the microbatch. What is ``asked`` is as in :func:`.planning.plan`, but
    that weights are ``flush``, with an update for each batch, and replicas are the pipelines.
    """
    from ..files.profile_rules import check_chain
    from ..planner.grids.grid_search import make_grid_plan
    from ..planner.grids.space import grid_problem

    said: Grids = {**GRID_DEFAULTS, **asked}
    deadline, batch, microbatches = deadline_of(said["time_limit"]), said["batch"], said["microbatches"]
    if not isinstance(batch, int):
        raise BadInput("a grid is planned for a batch; say its samples with --batch")
    words: Asked = part_of(Common, said)
    words["batch"], words["weights"] = ANY, DRAINED
    merged = merging(said["granularity"], said["blocks"])
    status = status or Status()
    sizes = sorted(set(microbatches)) if microbatches and is_name(profile) else [None]
    given, words, deadline = given_profiles(profile, words, sizes, status, deadline, part_of(Parts, said))
    given += [other for x in said["profiles"] for other in given_profiles(x, words, [None], status, deadline)[0]]
    began = time.perf_counter()

    def of_part(part: Profile) -> OfDegree:
        return OfDegree(*problem_of(part, **words, deadline=deadline))

    def planned(part: OfDegree, _: int | None) -> Planned:
        problem = part.problem
        own = {name: getattr(problem.chain, name) for name in DEGREES}
        others = [parts(x, own, problem.chain.selective)[0].chain for x in given[1:]]
        others_on = [merged(on_groups(x, problem.platform.whole or problem.platform)[0]) for x in others]
        question, more = grid_problem(
            problem,
            batch,
            [problem.chain, *others_on],
            microbatches and [x * problem.chain.several for x in microbatches],
            pipelines=said["pipelines"],
            fixed_ns=parse_time(said["layer_overhead"], "--layer-overhead"),
            offload=said["offload"],
            overlap=said["overlap"],
            limit=said["limit"],
        )
        part.assumptions.extend(more)
        for size in question.sizes:
            check_chain(question.profiles.at(size), f"{profile} at microbatches of {size}")
        return make_grid_plan(question, Settings(progress=progress, status=status), said["effort"] or "normal")

    def of(found: Planned) -> int:
        return int(found.plan.provenance.options["grid"]["batch_ns"])

    worth = Worth("batch_ns", of, lambda _: 0, lambda found: int(found.plan.provenance.options["bound_ns"]), whole=True)
    found, degree = best_degree(parts(given[0], said), of_part, planned, worth, deadline, status)
    return timed(found, degree.assumptions, began)


def estimate(
    profile: Given,
    *,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    **asked: Unpack[Grids],
) -> PlanResult:
    """Return the fastest :func:`grid` of a model that is named, in mixed precision with Adam where nobody says."""
    said: Grids = {"optimizer": "adam", "precision": "mixed", "microbatches": (1,), **asked}
    if said.get("batch") is None:
        gpus = said.get("gpus") or 1
        count = prod(gpus if isinstance(gpus, tuple) else gpu_counts(str(gpus)))
        said["batch"] = MICROBATCHES_PER_DEVICE * count * max(said["microbatches"] or (1,))
    return grid(profile, progress=progress, status=status, **said)
