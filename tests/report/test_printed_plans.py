"""What is told of plans and of measured models that no command here makes? Beside what is kept in ``printed/``."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.printed import check_printed, without_ends

from pipeplan.files.plans import load_plan
from pipeplan.files.profiles import read_profile
from pipeplan.plan import Allocation, Alternative, Plan
from pipeplan.problem import Variant
from pipeplan.report.page.html import chart_html
from pipeplan.report.tables.measurements import print_measurements
from pipeplan.report.tables.plan import print_plan
from pipeplan.report.tables.searches import print_grids

pytest.importorskip("torch")
from pipeplan.runtime.profiler.measure import LayerMeasurement, MeasuredModel

CHANGES = (("flush", 8, 11 * 10**6), ("2bw", 4, 12 * 10**6), ("stash", 4, None), ("latest", 8, 9 * 10**6))


def plans(folder: Path) -> str:
    """Return what plans print of themselves: lines that none before has."""
    names = ("plan", "zb", "loop", "replicas", "segments", "shifts", "parallel", "driven", "one")
    loaded = (load_plan(str(folder / f"{x}.json")) for x in names)
    plan, zb, loop, replicas, segments, shifts, parallel, driven, one = loaded

    def found(plan: Plan, fields: dict[str, Any] | None = None, **options: Any) -> Plan:
        provenance = replace(plan.provenance, options=plan.provenance.options | options, **(fields or {}))
        return replace(plan, provenance=provenance)

    def of(plan: Plan, **fields: Any) -> Plan:
        return replace(plan, chain=replace(plan.chain, **fields))

    cores = tuple(Variant(1, False, plan.chain.layers, selective=x) for x in (False, True))
    one_of, two_of = plan.allocation.stages
    ms, others = 10**6, [Alternative(w, n, ns) for w, n, ns in CHANGES]
    large = replace(plan.platform.devices[0], memory_bytes=2 * 10**9)
    period, loops = 10_312_500, replace(zb.lower_bounds[0], schedule="interleaved", period_ns=1)
    cases = {
        "plan": plan,
        "solver": found(plan, {"solver_status": "interrupted", "claimed_period_ns": 9 * ms, "algorithm": "madpipe"}),
        "limit": found(driven, {"solver_status": "time limit"}),
        "alternatives": found(plan, {"alternatives": tuple(others)}),
        "estimated": of(found(plan, {"alternatives": tuple(others)}, pipeline_ns=11 * ms), within=(0.8, 1.3)),
        "zero": found(plan, zero={"0": 11 * ms, "1": None, "3": 0}),
        "unpipelined": found(plan, unpipelined_ns=9 * ms),
        "pipelined": found(plan, unpipelined_ns=11 * ms),
        "orders": found(plan, layer_order={"orders": 3}),
        "one order": found(plan, layer_order={"orders": 1}),
        "another": of(plan, order=(1, 0, 2, 3, 4)),
        "tensor": found(
            of(plan, tensor=2, sequence_parallel=True, within=(0.9, 1.2)),
            tensor={
                "1": {"period_ns": 11 * ms, "bound_ns": 9 * ms},
                "2": {"period_ns": period},
                "4": {},
                "8": {"bound_ns": 1},
            },
        ),
        "others alone": found(plan, tensor={"2": {"period_ns": period, "bound_ns": 5}, "4": {}}),
        "no bounds": found(plan, tensor={"1": {"period_ns": period}, "2": {"period_ns": period}}),
        "grid alone": found(of(plan, within=(0.9, 1.2)), grid={"batch_ns": 100, "microbatch": 8}),
        "grids alone": found(of(plan, within=(0.9, 1.2)), grids=[{"batch_ns": 9}]),
        "no bound": found(plan, tensor={"1": {"period_ns": period}, "2": {"bound_ns": 0}}),
        "experts": of(plan, experts=2, imbalance=1.5, context=2, selective=True, tensor=2, offloaded=10**9),
        "no cores again": of(plan, variants=cores),
        "cores again": of(
            replace(plan, allocation=Allocation((replace(one_of, selective=((0, 2),)), two_of))), variants=cores
        ),
        "one GPU": of(one, tied=((0, 4),)),
        "tied": of(shifts, tied=((0, 2),)),
        "small": of(plan, microbatch=1),
        "two memories": replace(
            found(plan, {"algorithm": "auto"}),
            platform=replace(plan.platform, devices=(large, plan.platform.devices[0])),
        ),
        "even": of(plan, experts=2, context=2, by_heads=True),
        "near": of(
            found(plan, zero={"1": period + 9 * 10**4}, unpipelined_ns=period + 10**5, pipeline_ns=period + 2 * 10**5),
            within=(0.9, 1.2),
        ),
        "grids": found(
            of(plan, within=(0.9, 1.2)),
            grid={"batch_ns": 100, "microbatch": 8},
            grids=[{"inter": 1, "data": 2, "microbatch": 8, "batch_ns": 104}, {"inter": 2, "data": 1, "microbatch": 4}],
        ),
        "resumed": found(
            plan,
            resumed={
                "held_bytes": 10**7,
                "coming_bytes": 10**6,
                "best_period_ns": 10 * ms,
                "best_coming_bytes": 2 * ms,
            },
        ),
        "no best": found(plan, resumed={"held_bytes": 10**7, "best_coming_bytes": 2 * ms}),
        "came": found(replicas, resumed={"held_bytes": 10**7}),
        "zb": zb,
        "for": found(zb, **{"for": "torch", "price": {"any": 9 * ms, "1f1b": 10**8}, "binds": "memory"}),
        "interleaved": found(replace(zb, lower_bounds=(*zb.lower_bounds, loops)), **{"for": "torch"}),
        "half an order": found(zb, order={"bound_ns": 1}),
        "order": found(zb, order={"bound_ns": 10**7, "value_ns": 11 * ms}),
        "proved": found(zb, order={"bound_ns": 10**7, "value_ns": 10**7}),
        "policy": replace(
            zb,
            policy=replace(
                zb.policy, zero=2, offload=True, clip=True, bytes_per_parameter=18, shared_bytes_per_parameter=12
            ),
        ),
        "platform": replace(
            plan, platform=replace(plan.platform, blocking=True, overhead_ns=500, reserved_bytes=10**6)
        ),
        "reading": of(plan, reading_ns=30 * ms, device="a GPU"),
        "shifts": shifts,
        "parallel": found(parallel, pipeline_ns=None),
        "beside": of(found(parallel, pipeline_ns=13 * ms), within=(0.9, 1.2)),
        "loop": loop,
        "replicas": replicas,
        "segments": segments,
    }
    parts, seen = [], set[str]()
    for name, each in cases.items():
        with redirect_stdout(io.StringIO()) as told:
            print_plan(each, ("layers are made up",) if name == "plan" else (), verbose=name == "plan")
        lines = [x.rstrip() for x in told.getvalue().splitlines()]
        parts += [f"$ {name}", *(x for x in lines if x not in seen)]
        seen.update(lines)
    grid = {
        "inter": 2, "data": 1, "microbatch": 8, "ac": 1, "offload": True, "placement": "pipeline", "limit": 2,
        "batch_ns": 110 * ms, "simulated": "one pipeline",
    }  # fmt: skip
    others = [{"inter": 4, "data": 1, "reason": "too small"}, grid | {"inter": 1, "simulated": "in full"}, grid]
    with redirect_stdout(io.StringIO()) as told:
        print_grids(found(replicas, grid=grid, batch=16, bound_ns=99 * ms, microbatches=[8], grids=others))
        frame = chart_html(loop)
        print(frame[:16], frame.count("pattern"), frame[-50:])
    lines = [x.rstrip() for x in told.getvalue().splitlines()]
    parts += ["$ grids", *(x for x in lines if x not in seen)]
    called = ("model.embed.tokens", "model.h.0.attention.core", "model.h.1.mlp(gelu)", "model.norm..scale", "0.head")
    layers = [replace(x, name=name) for x, name in zip(plan.chain.layers, called, strict=True)]
    dotted = of(plan, layers=tuple(layers))
    for width in (40, *range(64, 92), *range(109, 115), 130, 150):
        with redirect_stdout(io.StringIO()) as told:
            print_plan(dotted, width=width)
        rows = [x.rstrip() for x in told.getvalue().splitlines() if re.match(r"\d +\d-", x)]
        parts += [f"$ {width}", *rows]
    return "\n".join(parts) + "\n"


def measured(folder: Path) -> str:
    """Return what is told of models that were measured, or estimated, and of profiles in which layers were merged."""
    chain = read_profile(str(folder / "a.json"))
    half = replace(chain.layers[1], forward_ns=chain.layers[1].forward_ns // 2, backward_ns=0)
    parts = (chain.layers[0], half, replace(half, backward_ns=chain.layers[1].backward_ns), *chain.layers[2:])
    steady = tuple(LayerMeasurement(x, 5, 10**5 * i, 2 * 10**4) for i, x in enumerate(parts))
    whole = tuple(LayerMeasurement(x, 5, 0, 10**6 * (i % 2)) for i, x in enumerate(chain.layers))
    tied = ((0, 2), (1, 3))
    text = ""
    for found, told in (
        (steady, replace(chain, device="some CPU, 1 thread", beside=3, reading_ns=10**6, tied=tied)),
        (whole, replace(chain, device="a GPU", beside=2, reading_ns=10**6, tied=tied[:1])),
        (steady[:2] + steady[3:], replace(chain, within=(0.5, 2.0))),
    ):
        with redirect_stderr(io.StringIO()) as err:
            print_measurements(MeasuredModel(chain, found, False, (), (1, 2) if told.within else ()), told)
        text += err.getvalue()
    return without_ends(text)


def test_what_is_told_of_measured_layers_is_what_is_kept(command_files: Path) -> None:
    check_printed(measured(command_files), "measured")


def test_what_plans_say_is_what_is_kept(command_files: Path) -> None:
    check_printed(plans(command_files), "plans")
