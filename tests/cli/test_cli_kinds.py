"""Every command on plans without a pattern: nF1B and message-driven."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.even_profile import PROFILE
from cases.files import written
from conftest import Command

from pipeplan.files.plans import load_plan
from pipeplan.report.tables.plan import print_plan

OPTIONS = {
    "nf1b": ["--weights", "latest", "--accumulate", "2"],
    "message-driven": ["--schedule", "message-driven", "--accumulate", "8"],
}

MADE: dict[str, bytes] = {}  # plans, by their kinds


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, PROFILE, "profile.json")


@pytest.fixture(params=OPTIONS)
def planned(request: pytest.FixtureRequest, tmp_path: Path, profile: str, pipeplan: Command) -> tuple[str, str]:
    path = tmp_path / "plan.json"
    if request.param in MADE:
        path.write_bytes(MADE[request.param])
    else:
        asked = ("--gpus", "4", "--mem", "1GB", "--no-replicas", *OPTIONS[request.param])
        assert pipeplan("plan", profile, *asked, "-o", str(path))[0] == 0
        MADE[request.param] = path.read_bytes()
    return request.param, str(path)


def test_plan_says_the_kind_and_its_limit(profile: str, pipeplan: Command) -> None:
    common = ("plan", profile, "--gpus", "4", "--mem", "1GB", "--no-replicas")
    code, out, _ = pipeplan(*common, *OPTIONS["nf1b"])
    assert code == 0
    assert "one backward for a mini-batch of 2 microbatches, at most" in out
    assert "weights     latest: one version" in out
    assert "update      every 2 microbatches" in out
    code, out, _ = pipeplan(*common, *OPTIONS["nf1b"], "--vertical-sync", "--limit", "3")
    assert "at most 3 mini-batches inside" in out
    assert "vertical sync" in out
    code, out, _ = pipeplan(*common, *OPTIONS["message-driven"], "--limit", "5")
    assert "message-driven, microbatches in a pipeline: 5 at most" in out
    assert "weights     flush: one version" in out, "as the schedule drains"
    assert "8 microbatches, drained" in out


def test_every_reader_shows_it(planned: tuple[str, str], tmp_path: Path, pipeplan: Command) -> None:
    kind, path = planned
    code, out, _ = pipeplan("check", path)
    assert (code, out[:6]) == (0, "valid:")
    code, out, _ = pipeplan("show", path)
    assert code == 0
    assert kind in out
    assert "GPU 3" in out
    code, out, _ = pipeplan("show", path, "--json")
    window = json.loads(out)
    assert window["start_ns"] == 0
    assert {op["kind"] for row in window["rows"] for op in row["operations"]} >= {"F", "B"}
    code, _, err = pipeplan("show", path, "-o", str(tmp_path / "plan.svg"))
    assert (code, err) == (0, "")
    code, _, _ = pipeplan("report", path, "-o", str(tmp_path / "plan.html"))
    page = (tmp_path / "plan.html").read_text()
    assert code == 0
    assert f"microbatches, {kind}</h2>" in page


def test_simulate_runs_its_own_schedule_and_compares_others(planned: tuple[str, str], pipeplan: Command) -> None:
    kind, path = planned
    code, out, _ = pipeplan("simulate", path)
    assert code == 0
    assert f"microbatches, {kind};" in out
    assert "predicted peak" in out
    code, out, _ = pipeplan("simulate", path, "--json")
    figures: dict[str, Any] = json.loads(out)
    assert figures["schedule"] == kind
    assert all(row["peak_bytes"] == row["predicted_peak_bytes"] for row in figures["devices"])
    code, out, _ = pipeplan("simulate", path, "--schedule", "all")
    assert code == 0
    assert f"pattern: not possible: the plan has no pattern; name a schedule such as {kind}, its own" in out
    code, out, _ = pipeplan("simulate", path, "--schedule", "pattern")
    assert code == 2


def test_nf1b_on_any_plan_reports_period_peaks_and_versions(tmp_path: Path, profile: str, pipeplan: Command) -> None:
    path = str(tmp_path / "pattern.json")
    pipeplan("plan", profile, "--gpus", "4", "--mem", "1GB", "--no-replicas", "-o", path)
    code, out, _ = pipeplan("simulate", path, "--schedule", "nf1b", "--batch", "12")
    assert code == 0
    assert "period " in out
    assert re.search(r"versions by stage: 1, 1, 1, 1; with vertical sync \d, \d, \d, \d", out)
    code, out, _ = pipeplan("simulate", path, "--schedule", "nf1b", "--batch", "12", "--json")
    figures = json.loads(out)
    assert figures["microbatches"] % 3 == 0
    assert figures["nf1b"]["versions"] == [1, 1, 1, 1]
    assert figures["nf1b"]["versions_with_vertical_sync"][0] >= 1
    assert figures["nf1b"]["settled"]
    assert figures["per_microbatch_ns"] == figures["nf1b"]["steady_period_ns"]


def test_export_refuses_what_torch_cannot_express(planned: tuple[str, str], pipeplan: Command) -> None:
    kind, path = planned
    code, out, err = pipeplan("export", path, "--to", "torch-csv")
    if kind == "nf1b":
        assert code == 1
        assert "keeps weights latest" in err
    else:
        assert (code, err) == (0, "")
        assert out.startswith("0F0,")


def test_diff_simulates_it_with_other_costs(
    planned: tuple[str, str], tmp_path: Path, profile: str, pipeplan: Command
) -> None:
    slower = dict(PROFILE, layers=[dict(x, forward_ns=2 * x["forward_ns"]) for x in PROFILE["layers"]])
    other = tmp_path / "slower.json"
    other.write_text(json.dumps(slower))
    code, out, _ = pipeplan("diff", profile, str(other), "--plan", planned[1], "--json")
    assert code == 0
    before, after = json.loads(out)["plan"]["period_ns"]
    assert after > before
    heavier = dict(PROFILE, layers=[dict(x, weight_bytes=10**9) for x in PROFILE["layers"]])
    other.write_text(json.dumps(heavier))
    code, out, _ = pipeplan("diff", profile, str(other), "--plan", planned[1])
    assert code == 1
    assert "but has 1 GB" in " ".join(out.split())


def test_contradicting_options_are_one_sentence(profile: str, pipeplan: Command) -> None:
    common = ("plan", profile, "--gpus", "2", "--mem", "1GB")
    for options, sentence in (
        (["--weights", "stash", "--schedule", "nf1b"], "nf1b doesn't go with weights stash"),
        (["--limit", "3"], "a pattern schedule has a fixed order"),
        (["--vertical-sync"], "--vertical-sync goes with --weights stash and --weights latest"),
    ):
        code, _, err = pipeplan(*common, *options)
        assert code == 2
        assert sentence in err


@pytest.mark.parametrize(("status", "said"), [("interrupted", True), ("time limit", True), ("optimal", False)])
def test_a_search_that_ended_early_says_so(
    planned: tuple[str, str], capsys: pytest.CaptureFixture[str], status: str, said: bool
) -> None:
    plan = load_plan(planned[1])
    print_plan(replace(plan, provenance=replace(plan.provenance, solver_status=status)))
    assert (f"the search ended early: {status}" in capsys.readouterr().out) == said
