"""Many kinds of small plans, every change of one field of their files, and which of those are right to accept."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cases.chains import random_chain, random_platform
from cases.files import small_plan
from cases.plans import (
    fitted,
    fitted_simulated,
    greedy_pattern,
    quick_bound,
    random_checkpoint,
    random_plan,
    random_policy,
    random_simulated_plan,
)
from oracles.plans import Judged, Unjudged

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput
from pipeplan.files.plans import plan_text, read_plan
from pipeplan.plan import Bound, Plan, Schedule, ScheduleKind, Stage
from pipeplan.planner.grids.grid_search import make_grid_plan
from pipeplan.planner.grids.space import grid_problem
from pipeplan.planner.plan import STATED, make_plan
from pipeplan.planner.what_if.target import make_target_plan
from pipeplan.problem import Chain, Layer, Level, Platform, Policy, Problem
from pipeplan.schedule.synthesis.synthesize import synthesize
from pipeplan.schedule.written import order_of_program

LAYERS = tuple(
    Layer(f"l{i}", 10 + i, 21 + 2 * i, 100, 50, saved_bytes=60, optimizer_ns=3, parameters=25) for i in range(5)
)
CHAIN = Chain("five", LAYERS, 40, microbatch=8, device="test", source="by hand")
GRAPH = replace(
    CHAIN, edges=((0, 1), (0, 2), (1, 3), (2, 3), (3, 4)), layers=(replace(LAYERS[0], saves=(-1,)), *LAYERS[1:])
)
SMALL = 10**4
LOOP, VEE = "0/1/0/1", "0/1/1/0"
PLACED: dict[ScheduleKind, str] = {
    **dict.fromkeys(("breadth-first", "interleaved-zb"), LOOP),
    **dict.fromkeys(("zbv", "v-half", "v-min", "dualpipev"), VEE),
}


def kinds() -> dict[str, Plan]:
    """Return a plan of every kind that is kept or run in its own way."""
    return {kind: make() for kind, make in makers().items()}


def makers() -> dict[str, Callable[[], Plan]]:
    """Return what makes them."""
    flat = Platform.flat(2, SMALL, 10**9, 1)
    servers = Platform((*flat.devices, *flat.devices), (Level(2, 10**10), Level(2, 10**9, 2)), full_duplex=True)

    def planned(policy: Policy, chain: Chain = CHAIN, platform: Platform = flat, **options: Any) -> Callable[[], Plan]:
        kind, limit = options.pop("schedule", None), options.pop("limit", None)
        problem = Problem(chain, platform, policy, options.pop("replicas", False), options.pop("checkpointing", "none"))
        algorithm = options.pop("algorithm", "contiguous")
        return lambda: make_plan(problem, algorithm, effort="quick", schedule=kind, limit=limit).plan

    asked = Problem(CHAIN, replace(servers, full_duplex=False), Policy("flush", optimizer="adam"), True, "segments")
    return {
        "2bw, recomputed replicas of two speeds": small_plan,
        "2bw, several stages on a GPU": partial(_shared, flat),
        "2bw, offload": planned(Policy("2bw", 4, "adam", "mixed", offload=True, bucket_parameters=10)),
        "2bw, segments": planned(Policy("2bw"), platform=Platform.flat(2, 1140, 10**9, 1), checkpointing="segments"),
        "stash": planned(Policy("stash", optimizer="momentum")),
        "stash, vertical sync": planned(Policy("stash", vertical_sync=True)),
        "stash, replicas in servers": planned(
            Policy("stash", 2), platform=servers, replicas=True, algorithm="pipedream"
        ),
        "latest": planned(Policy("latest", 1), schedule="pattern"),
        "flush": planned(Policy("flush", 4, "adam"), algorithm="balance"),
        "flush, tied graph": planned(Policy("flush", 3), replace(GRAPH, tied=((0, 4),)), algorithm="balance"),
        "nf1b": planned(Policy("latest", 2), schedule="nf1b", limit=2, algorithm="balance"),
        "message-driven": planned(Policy("flush", 4), schedule="message-driven", limit=2, algorithm="balance"),
        "zb1p": planned(Policy("flush", 4), schedule="zb1p", algorithm="balance"),
        "zb2p": planned(Policy("flush", 4), schedule="zb2p", algorithm="balance"),
        "gpipe": planned(Policy("flush", 4), schedule="gpipe", algorithm="balance"),
        **{f"{kind}, chunks": partial(_placed, flat, kind, on) for kind, on in PLACED.items()},
        "written": partial(_written, flat),
        "grid": lambda: make_grid_plan(grid_problem(asked, 64, [CHAIN], overlap=True)[0], effort="quick").plan,
        "1f1b, for deepspeed": lambda: make_target_plan(_drained(servers), "deepspeed").plan,
        "interleaved, for torch": lambda: make_target_plan(_drained(flat), "torch", kinds=("interleaved",)).plan,
    }


def _placed(platform: Platform, kind: ScheduleKind, on: str) -> Plan:
    """Return a plan with two stages on each GPU."""
    problem = Problem(CHAIN, platform, Policy("flush", 8))
    return make_plan(problem, STATED, {"split": "1,1,1,2", "on": on}, schedule=kind).plan


def _written(platform: Platform) -> Plan:
    """Return a plan with the order of another under 1F1B."""
    plan = make_plan(Problem(CHAIN, platform, Policy("flush", 2)), "balance", schedule="1f1b").plan
    bounds = tuple(bound for bound in plan.lower_bounds if bound.schedule is None)
    order = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
    return replace(plan, schedule=Schedule("written", 2, order=order), lower_bounds=bounds)


def _drained(platform: Platform) -> Problem:
    return Problem(CHAIN, platform, Policy("flush", 4), checkpointing="segments")


def _shared(platform: Platform) -> Plan:
    """Return a plan whose first GPU has two stages, in the order in which operations found a free place."""
    rng, policy = random.Random(1), Policy("2bw", 9)
    stages = (Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 5, (0,)))
    graph = stage_graph(CHAIN, platform, policy, stages)
    pattern = greedy_pattern(rng, graph, graph.period_floor_ns + 60)
    assert pattern is not None
    plan = fitted(rng, CHAIN, platform, policy, stages, pattern)
    return replace(plan, lower_bounds=(*plan.lower_bounds, Bound("one-special", False, "none", 60)))


Place = tuple[str | int, ...]


def places(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every place of a document with its value, containers too."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


OTHER_WORDS = {
    "weights": ("2bw", "2bw-uniform", "stash", "flush", "latest"),
    "optimizer": ("sgd", "momentum", "adam"),
    "precision": ("fp32", "mixed"),
    "class": ("contiguous", "one-special", "any", "torch", "deepspeed"),
    "checkpointing": ("none", "stages", "segments"),
    "kind": ("pattern", "flush", "nf1b", "message-driven", "1f1b", "interleaved", "F", "B", "SEND_F", "SEND_B"),
}


def changes(path: Place, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, other value) for one place; ``...`` is: left out."""
    if isinstance(path[-1], str):
        yield "left out", ...
    yield "null", None
    match value:
        case bool():
            yield from (("flipped", not value), ("a number", int(value)))
        case int():
            yield from (
                ("+1", value + 1), ("-1", value - 1), ("doubled", 2 * value), ("0", 0), ("negative", -value - 1),
            )  # fmt: skip
            yield from (("huge", 10**18), ("endless", 10**400), ("a half more", value + 0.5), ("text", str(value)))
        case float():
            yield from (("+0.001", value + 0.001), ("negative", -value - 1), ("text", str(value)))
        case str():
            yield from (("longer", value + "x"), ("empty", ""), ("control", f"{value}\x1b"), ("a number", 3))
            for word in OTHER_WORDS.get(str(path[-1]), ()):
                yield word, word
        case list():
            yield from (("empty", []), ("reversed", value[::-1]), ("text", "x"))
            if value:
                yield from (("last left out", value[:-1]), ("first twice", [value[0], *value]))
        case dict():
            yield from (("empty", {}), ("one key more", value | {"x": 1}), ("a list", []))
        case None:
            yield from (("a number", 1), ("a list", []), ("text", "x"))


def changed(document: Any, path: Place, value: Any) -> Any:
    """Return the document with another value at one place."""
    document = inner = copy.copy(document)
    for key in path[:-1]:
        inner[key] = inner = copy.copy(inner[key])  # all else is shared
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


def mutations(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, change, document) for every change of a single field that changes anything."""
    for path, value in places(document):
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]
        for name, other in changes(path, value):
            if other is ... or other != value or type(other) is not type(value):
                yield place, name, changed(document, path, other)


def document_of(plan: Plan) -> Any:
    return json.loads(plan_text(plan))


def refusal(document: Any, folder: Path) -> list[str]:
    """Return why a document is no valid plan, a sentence for each reason; empty when it is one."""
    file = folder / "plan.json"
    file.write_text(json.dumps(document))
    try:
        return read_plan(str(file))[1]
    except BadInput as error:
        return [str(error).removeprefix(f"{file}: ")]


SMALL_CHANGES = ("+1", "-1", "doubled", "flipped", "null", "0", *sum(OTHER_WORDS.values(), ()))
ORDERED: tuple[ScheduleKind, ...] = ("1f1b", "gpipe", "written")  # the last: synthesised


def judged_plan(rng: random.Random) -> Plan:
    """Return a plan of a kind that :mod:`oracles.plans` speaks of, as far as the layers' activations are so, too."""
    kind = rng.choice(("pattern", "flush", "message-driven", *ORDERED))
    if kind == "message-driven":
        return random_simulated_plan(rng, kind)
    if kind not in ORDERED:
        drained = kind == "flush"
        return random_plan(rng, weights=("flush",) if drained else ("2bw", "stash", "latest"))
    stages, replicas = rng.randint(1, 3), rng.randint(1, 2)
    chain = random_chain(rng, rng.randint(stages, 6), optimizer=True)
    platform = random_platform(rng, stages * replicas, levels=True, latency=True, speeds=replicas == 1, duplex=True)
    policy = replace(random_policy(rng, ("flush",)), accumulate=replicas * rng.randint(1, 5), vertical_sync=False)
    policy = replace(policy, zero=rng.randint(0, 1))
    cuts = [0, *sorted(rng.sample(range(1, len(chain)), stages - 1)), len(chain)]
    groups = [tuple(range(s * replicas, (s + 1) * replicas)) for s in range(stages)]
    parts = tuple(
        Stage(a, b, on, random_checkpoint(rng, a, b)) for (a, b), on in zip(pairwise(cuts), groups, strict=True)
    )
    count = policy.accumulate or 1
    schedule = Schedule("gpipe" if kind == "1f1b" and replicas > 1 else kind, count)
    if kind == "written":
        graph, split = stage_graph(chain, platform, policy, parts), rng.random() < 0.7
        found = synthesize(graph, count, moves=50, solver=None, split=split).timeline.program
        schedule = replace(schedule, order=order_of_program(found))
    return fitted_simulated(rng, chain, platform, policy, parts, schedule)


def judged_edit(rng: random.Random, folder: Path) -> tuple[str, list[str]]:
    """Edit a plan in up to two places and return how that ended, and what is wrong with figures that are accepted, or
    that are counted anew where nothing else was refused."""
    document = document_of(judged_plan(rng))
    edits = []
    for _ in range(rng.randint(0, 2)):
        room = rng.choice(("profile", "platform", "policy", "stages", "schedule", "pattern", "devices", "gap"))
        every = [x for x in places(document) if x[0][0] == room]
        if not every:
            continue
        path, value = rng.choice(every)
        small = [x for x in changes(path, value) if x[0] in SMALL_CHANGES]
        name, other = rng.choice(small if small and rng.random() < 0.8 else list(changes(path, value)))
        edits.append(f"{'.'.join(map(str, path))}: {name}")
        document = changed(document, path, other)
    file = folder / "plan.json"
    file.write_text(json.dumps(document))
    try:
        plan, found = read_plan(str(file))
        if all(
            x.startswith(("devices", "gap ", "groups", "delays", "lower_bounds", "profile.digest", "samples"))
            for x in found
        ):
            bound = quick_bound(Problem(plan.chain, plan.platform, plan.policy, True, "segments"))
            anew = replace(plan, lower_bounds=(bound,))
            ended, document = ("counted anew", document_of(anew)) if found else ("accepted", document)
            if found and (again := refusal(document, folder)):
                return ended, [f"{', '.join(edits)}: {again[0]}"]
            return ended, [f"{', '.join(edits)}: {x}" for x in Judged(document).contradictions()]
    except BadInput:
        pass
    except Unjudged:
        return "not judged", []
    except Exception as error:
        return "a traceback", [f"{', '.join(edits)}: {type(error).__name__}: {error}"]
    return "refused", []


# What a sentence calls the place where a plan is wrong.
PLACE = re.compile(
    r"\$|\bfield\b|profile|platform|polic|stage|schedule|delays|pattern|period|device|link|bound|gap|layers?|operation|weights|accumulates"
)

# Reading compares every figure in the file with what stages, starts and settings give. So whatever is accepted beside
# an edited figure leaves period, memory and gap as the file says them; the reasons say why nothing else matters.
ACCEPTED: dict[str, tuple[str, str]] = {
    r"provenance\.(algorithm|version|solver|solver_status)": (
        r"longer|empty|control|text",
        "where a plan is from is its own account, from which nothing follows; it is shown as text",
    ),
    r"provenance\.seconds": (r"\+0.001", "how long planning took is its own account"),
    r"provenance\.claimed_period_ns": (
        r"null|\+1|-1|doubled|huge|a number",
        "what an algorithm hoped for before scheduling is called claimed and judges nothing",
    ),
    r"provenance\.alternatives(\..*|\[.*)?": (
        r".*",
        "what other weights and intervals take is the planner's own account",
    ),
    r"provenance\.options(\..*|\[.*)?": (r".*", "options and the table of other grids are the planner's own account"),
    r"pattern\.operations\[\d+\]\.start_ns": (
        r"\+1|-1",
        "a start is a decision: within its slack, the order, the period and every peak are the same",
    ),
    r"lower_bounds\[\d+\]\.schedule": (
        r"null",
        "for any schedule, which most bounds are; of a target's class it is then a claim about all its schedules",
    ),
    r"stages\[\d+\]\.checkpoint": (r"a list|empty|null", "no segments, said in the other way"),
    r"stages\[\d+\]\.devices": (
        r"reversed",
        "replicas are alike; the rule who gets which microbatch is the list's order",
    ),
    r"profile\.edges": (r"reversed|first twice", "edges are a set"),
    r"platform\.levels\[\d+\]\.latency": (r"left out|null|longer", "no message of the plan crosses that level"),
    r"platform\.devices\[\d+\]\.speed": (
        r"left out|null|\+0.001",
        "replicas take as long as the slowest of them, which is another",
    ),
    r"policy\.weights": (r"2bw(-uniform)?|stash|latest", "the stages hold as many versions under either policy"),
    r"policy\.precision": (r"fp32|mixed", "its numbers take as many bytes in all, counted anew"),
    r"policy\.offload": (r"flipped", "there is no state to offload, or all of it is in one bucket"),
    r"policy\.vertical_sync": (r"flipped", "the stages keep as many versions either way"),
    r"policy\.bucket_parameters": (
        r"\+1|-1|doubled",
        "nothing is offloaded, or all parameters are in one bucket either way",
    ),
    r"policy\.coarsening": (
        r"a number|\+1|-1|doubled|null",
        "null is the default; sums of so few parameters are one chunk",
    ),
    r"policy\.zero": (r"\+1", "no stage has replicas that could share, or they have nothing to share"),
    r"policy\.accumulate": (
        r"\+1|-1|doubled",
        "an update's share of a pass rounds to the same, and as many are in flight",
    ),
    r"lower_bounds": (
        r"first twice|reversed|last left out",
        "each bound is judged by itself; the gap is to the first of class any",
    ),
    r"lower_bounds\[\d+\]\.period_ns": (
        r"-1|\+1|doubled",
        "a bound of a narrower class is called a claim, and none is above the period; class any is refused here",
    ),
    r"lower_bounds\[\d+\]\.class": (
        r"contiguous|one-special|torch|any",
        "the plan is in that class; class any is derived anew, and the others are called claims",
    ),
    r"lower_bounds\[\d+\]\.any_interval": (
        r"flipped",
        "a bound of any interval is one of this, and the other way round where the costs of updates round away",
    ),
    r"lower_bounds\[\d+\]\.(checkpointing|replicas)": (
        r"none|stages|segments|flipped",
        "the plan is in that class, whose bound is derived anew or called a claim",
    ),
}


def reason_of(place: str, change: str) -> str | None:
    """Return why a change may be accepted, None where nothing says so."""
    for pattern, (names, reason) in ACCEPTED.items():
        if re.fullmatch(pattern, place) and re.fullmatch(names, change):
            return reason
    return None
