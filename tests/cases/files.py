"""A small plan to write, and files with one place edited."""

import copy
import json
from dataclasses import replace
from fractions import Fraction

import pytest

from pipeplan.check.bounds import any_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput
from pipeplan.plan import Allocation, Bound, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

CHAIN = Chain(
    "small",
    tuple(Layer(f"l{i}", 10 + i, 20 + i, 100, 50, saved_bytes=60, optimizer_ns=3) for i in range(4)),
    40,
    microbatch=8,
    device="test",
    source="by hand",
)

POLICY = Policy("2bw", accumulate=4, optimizer="adam")


def small_plan(weights="2bw"):
    """Two stages on three devices of two kinds, the second recomputed and replicated."""
    policy = replace(POLICY, weights=weights)
    platform = Platform((Device(5000), Device(4000, Fraction(3, 2)), Device(4000)), (Level(3, 12 * 10**9, 2),))
    stages = (Stage(0, 2, (0,)), Stage(2, 4, (1, 2), ((2, 4),)))
    pattern = best_one_f_one_b_star(stage_graph(CHAIN, platform, policy, stages))
    bounds = (any_bound(Problem(CHAIN, platform, policy)), Bound("contiguous", True, "stages", pattern.period_ns))
    schedule = Schedule("flush", 4) if weights == "flush" else Schedule()
    bounds = bounds[:1] if weights == "flush" else bounds
    return Plan(CHAIN, platform, policy, Allocation(stages), pattern, bounds, Provenance("hand"), schedule)


def at(document, path):
    for key in path:
        document = document[key]
    return document


def edited(document, path, value):
    """Return a copy of the JSON with the value at ``path`` replaced, removed (``...``) or changed by a function."""
    document = copy.deepcopy(document)
    *parents, last = path
    place = at(document, parents)
    if value is ...:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return document


def written(tmp_path, document, name="file.json"):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def more(value):
    return value + 1


def assert_refused(read, tmp_path, document, edit):
    """``read`` refuses ``document`` with an edit, (path, value, sentence): it names the file and says the sentence."""
    path, value, sentence = edit
    file = written(tmp_path, edited(document, path, value))
    with pytest.raises(BadInput) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence.lower() in str(caught.value).lower()
