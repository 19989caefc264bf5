"""``synthesize``: what it prints, the order that it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases.even_profile import PROFILE
from cases.files import written
from conftest import Command


def test_an_order_of_a_plan_is_written_and_simulates_to_the_same(tmp_path: Path, pipeplan: Command) -> None:
    plan, order = str(tmp_path / "plan.json"), str(tmp_path / "order.csv")
    profile = written(tmp_path, PROFILE, "profile.json")
    asked = ["--gpus", "2", "--mem", "1GB", "--bandwidth", "1GB/s", "--no-replicas", "--algorithm", "balance"]
    assert pipeplan("plan", profile, *asked, "-o", plan)[0] == 0
    code, out, err = pipeplan(
        "synthesize", plan, "--microbatches", "4", "--moves", "50", "--limit", "2", "--json", "-o", order
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["lower_bound_ns"] <= found["makespan_ns"]
    assert found["most_held"] <= 2
    code, out, err = pipeplan("simulate", plan, "--schedule", order, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["makespan_ns"] == found["makespan_ns"]
    code, out, err = pipeplan(
        "simulate", plan, "--schedule", "best", "--schedule", "1f1b", "--microbatches", "2", "--json"
    )
    assert (code, err) == (0, "")
    assert next(run["schedule"] for run in json.loads(out)["schedules"]) == "best"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            ["--gpus", "2", "--times", "1,²", "--microbatches", "3"],
            "'1,²' isn't a list of whole numbers, such as 20,24,16",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(asked: list[str], sentence: str, pipeplan: Command) -> None:
    code, out, err = pipeplan("synthesize", *asked)
    assert (code, out) == (2, "")
    assert sentence in err
