"""A plan is built into a stage graph and evaluated once, and the evaluation is handed on to whatever is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from pipeplan.check.evaluate import Evaluation
from pipeplan.cost.stage_graph import StageGraph
from pipeplan.files.plans import plan_text
from pipeplan.files.profiles import profile_text
from pipeplan.planner.grids.grid_search import make_grid_plan
from pipeplan.planner.grids.space import grid_problem
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.report.tables.plan import print_plan


def constructions(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> list[Any]:
    made: list[Any] = []
    build = kind.__init__

    def counted(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", counted)
    return made


def problem(weights: str = "2bw") -> Problem:
    layers = tuple(Layer(f"l{i}", 100 + i, 200, 7, 10, saved_bytes=30) for i in range(8))
    return Problem(Chain("even", layers, 1), Platform.flat(4, 10**6, 10**10), Policy(weights, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "schedule", "algorithm"),
    [
        ("2bw", None, "contiguous"),
        ("stash", None, "pipedream"),
        ("latest", "pattern", "balance"),
        ("flush", "flush", "pipedream"),
        ("flush", "message-driven", "balance"),
    ],
)
def test_the_search_builds_a_split_once_and_the_validator_once_more(
    weights: str, schedule: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The validator trusts no search, so it builds its own; nothing after it does. The exact partitioner claims the
    period of a split by its own graph, and a run that takes what it must under one limit needs no other."""
    graphs, evaluations = constructions(monkeypatch, StageGraph), constructions(monkeypatch, Evaluation)
    found = make_plan(problem(weights), algorithm, schedule=schedule)
    assert evaluations == [found.evaluation]
    assert sum(graph == found.evaluation.graph for graph in graphs) == (3 if algorithm == "contiguous" else 2)
    built = len(graphs)
    plan_text(found.plan, found.evaluation)
    print_plan(found.plan, result=found.evaluation)
    assert "period" in capsys.readouterr().out
    assert len(graphs) == built
    assert len(evaluations) == 1


def test_a_grid_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations = constructions(monkeypatch, Evaluation)
    asked, _ = grid_problem(problem("flush"), 16, [problem().chain])
    assert evaluations == [make_grid_plan(asked).evaluation]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plan", ["--weights", "2bw", "--no-replicas", "--algorithm", "contiguous"]),
        ("grid", ["--data-parallel", "2", "--batch", "16"]),
    ],
)
def test_the_command_writes_and_prints_one_evaluation(
    name: str, options: list[str], tmp_path: Path, pipeplan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(profile_text(problem().chain))
    graphs, evaluations = constructions(monkeypatch, StageGraph), constructions(monkeypatch, Evaluation)
    path = str(tmp_path / "plan.json")
    code, out, _ = pipeplan(name, str(profile), "--gpus", "4", "--mem", "1GB", *options, "-o", path, "--json")
    assert code == 0
    weights = json.loads(out)["policy"]["weights"]  # beside it are figures of other weights, of plans of their own
    (own,) = [result for result in evaluations if result.graph.policy.weights == weights]
    assert out == Path(path).read_text()
    assert json.loads(out)["devices"][0]["peak_bytes"] == own.devices[0].peak_bytes
    built = [graph for graph in graphs if graph.policy == own.graph.policy]
    assert len(built) > 1
    assert built[-1] is own.graph  # the validator's, after which nothing builds one
