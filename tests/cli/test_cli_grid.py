"""``pipeplan grid``: what it prints and writes, and one sentence for every bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases.files import written
from conftest import Command

LAYER = {"forward_ns": 10**6, "backward_ns": 2 * 10**6, "weight_bytes": 10**8, "output_bytes": 10**6}
PLATFORM = ["--gpus", "4", "--mem", "2GB", "--bandwidth", "12GB/s"]
GRID = [*PLATFORM, "--data-parallel", "auto", "--batch", "16"]


def profile_at(size: int, time: int = 1) -> dict[str, Any]:
    layers = [
        {**LAYER, "name": f"l{i}", "forward_ns": time * 10**6, "output_bytes": size * 10**6, "optimizer_ns": 10**6}
        for i in range(4)
    ]
    return {
        "format": "pipeplan-profile/1",
        "name": "even",
        "microbatch": size,
        "dtype": "float32",
        "device": "made up",
        "source": "a test",
        "input_bytes": size * 10**6,
        "layers": layers,
    }


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return written(tmp_path, profile_at(1), "p1.json")


@pytest.fixture
def second(tmp_path: Path) -> str:
    return written(tmp_path, profile_at(2), "p2.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Missing option '--batch'"),
        (["--batch", "16", "--weights", "2bw"], "No such option"),
        (["--batch", "16", "--accumulate", "2"], "No such option"),
        (["--batch", "16", "--no-replicas"], "No such option"),
        (["--data-parallel", "many", "--batch", "16"], "'many' is not a valid"),
        (["--batch", "16", "--microbatch", "x"], "--microbatch: 'x' is neither"),
        (["--batch", "16", "--layer-overhead", "3"], "--layer-overhead"),
        (["--batch", "1000000000"], "steps; up to"),
    ],
)
def test_grid_takes_a_batch_and_nothing_that_contradicts_it(
    profile: str, pipeplan: Command, options: list[str], message: str
) -> None:
    code, out, err = pipeplan("grid", profile, *PLATFORM, *options)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_microbatches_longer_than_a_profile_may_say_are_refused(tmp_path: Path, pipeplan: Command) -> None:
    long = written(tmp_path, profile_at(1, 10**8), "long.json")
    code, _, err = pipeplan("grid", long, *PLATFORM, "--batch", "16", "--microbatch", "8")
    assert code == 2
    assert "long.json at microbatches of 8: $.layers[1].forward_ns: the layers up to here sum up to" in err


def test_the_plan_is_written_and_checked(profile: str, tmp_path: Path, pipeplan: Command) -> None:
    path = str(tmp_path / "plan.json")
    assert pipeplan("grid", profile, *GRID, "-o", path)[0] == 0
    code, out, _ = pipeplan("check", path)
    assert code == 0, out
    form = json.loads(Path(path).read_text())
    assert form["schedule"]["kind"] == "message-driven"
    assert form["policy"]["accumulate"] == form["schedule"]["microbatches"] == 16


def test_json_has_the_table_of_grids(profile: str, pipeplan: Command) -> None:
    code, out, _ = pipeplan("grid", profile, *GRID[:3], "200MB", *GRID[4:], "--json")
    assert code == 1, out
    code, out, _ = pipeplan("grid", profile, *GRID[:3], "500MB", *GRID[4:], "--json")
    assert code == 0
    options = json.loads(out)["provenance"]["options"]
    rows = {(row["inter"], row["data"]): row for row in options["grids"]}
    assert set(rows) == {(1, 4), (2, 2), (4, 1)}
    assert "too much" in rows[1, 4]["reason"]
    assert "batch_ns" not in rows[1, 4]
    assert options["grid"]["batch_ns"] == min(row.get("batch_ns", 10**12) for row in rows.values())
    assert options["bound_ns"] <= options["grid"]["batch_ns"]


def test_one_number_of_pipelines_and_an_early_end_are_said(profile: str, pipeplan: Command) -> None:
    code, out, err = pipeplan("grid", profile, *PLATFORM, "--data-parallel", "2", "--batch", "16")
    assert (code, err) == (0, "")
    assert out.startswith("grid 2 x 2, ")
    assert "1 x 4" not in out
    assert "ended early" not in out
    code, out, err = pipeplan("grid", profile, *PLATFORM, "--data-parallel", "3", "--batch", "15")
    assert (code, err) == (0, "")
    assert "1 of the 4 GPUs stay unused: no grid of all of them is faster" in out
    code, out, err = pipeplan("grid", profile, *GRID, "--time-limit", "1ns")
    assert (code, err) == (0, "")
    assert out.startswith("grid 1 x 4, ")  # needs no search
    assert "the search ended early: time limit" in out
    code, out, err = pipeplan("grid", profile, *GRID, "--mem", "1MB", "--time-limit", "1ns")
    assert (code, out) == (1, "")
    assert "the time limit ended the search before it found a grid that fits" in err


def test_several_profiles_give_the_sizes(profile: str, second: str, pipeplan: Command) -> None:
    code, out, err = pipeplan("grid", profile, *GRID, "--microbatch-profile", second, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["provenance"]["options"]["microbatches"] == [1, 2]
    assert plan["policy"]["accumulate"] == 8  # at size 2 a pass takes as long as at size 1
    assert plan["profile"]["microbatch"] == 2


def test_overlap_offload_and_overhead_are_said(profile: str, pipeplan: Command) -> None:
    code, out, _ = pipeplan(
        "grid", profile, *GRID, "--overlap", "--offload", "--optimizer", "adam", "--microbatch", "1,2",
        "--layer-overhead", "100us",
    )  # fmt: skip
    assert code == 0
    assert ", offload, " in out.splitlines()[0]
    out = " ".join(out.split())
    assert "the optimizer steps meanwhile" in out
    assert "beyond a fixed 100 us of each pass of a layer" in out
    assert "moving optimizer state between host and GPU takes no time of its own" in out
    assert "steps overlap with sums of 4 buckets" in out


def test_pipelines_that_share_the_optimizers_state_need_less_memory(profile: str, pipeplan: Command) -> None:
    """Of 1.6 GB on each GPU Adam's state is half, of which a quarter is left."""
    tight = ["--gpus", "4", "--mem", "1.1GB", "--no-offload", "--optimizer", "adam", "--checkpointing", "none"]
    given = ["--batch", "16", "--data-parallel", "4", *tight]
    code, _, err = pipeplan("grid", profile, *given)
    assert code == 1
    assert "1 x 4: stage 0" in err
    code, out, _ = pipeplan("grid", profile, *given, "--zero", "1")
    assert code == 0
    assert out.startswith("grid 1 x 4")
    assert "adam in fp32, state shared by replicas" in out
    code, out, _ = pipeplan("grid", profile, *given, "--zero", "1", "--bytes-per-parameter", "8+8")
    assert code == 0
    assert "8 + 8 bytes a parameter, state shared by replicas" in " ".join(out.split())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--zero", "1", "--no-replicas"], "--zero 1 and --no-replicas contradict each other: there is nobody to"),
        (["--zero", "1", "--bytes-per-parameter", "18"], "--zero 1: say how many of the 18 --bytes-per-parameter are"),
        (["--bytes-per-parameter", "6+12+2"], "'6+12+2' isn't a number from 1 to 1000 such as 18, nor two, of which"),
        (["--microbatch", "1,2"], "is not a valid integer range"),
        (["--microbatch", "2"], "--microbatch: the profile's microbatches have 1 samples, not 2"),
        (["--weights", "flush", "--accumulate", "100000000"], "--accumulate, --limit: on 4 stages a mini-batch of"),
        (["--weights", "latest", "--limit", "1000000"], "1000000 admitted at once, would take"),
    ],
)
def test_what_contradicts_is_refused(profile: str, pipeplan: Command, extra: list[str], message: str) -> None:
    code, out, err = pipeplan("plan", profile, *PLATFORM, *extra)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
