"""Any value for any keyword ends in a result or in one sentence, never in an exception from the depths."""

import inspect
from pathlib import Path

import pytest
from cases.even_profile import PROFILE
from cases.files import written

import pipeplan as pp

NONSENSE = (
    *(
        None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**30, "", "x", "\0", "9" * 400, b"x", [], [1], ["x"], {},
        (),
    ),
    *(("x", 1), {"x": 1}, object(), Path("nowhere"), int, [None], [[1]]),
)  # fmt: skip
GIVEN = {"gpus": 2, "mem": "1GB", "bandwidth": "12GB/s"}
LONG = ("moves", "jobs", "gpus", "time_limit", "microbatches", "seed", "runs")  # of which a huge number is an order
ASKED = ("profile", "plan", *GIVEN)  # which their defaults leave out, where others are told how long they may take
CALLED = ("progress", "on_plan")  # functions of the caller's, whose errors are his


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The public functions and methods, each with arguments that are good."""
    folder = tmp_path_factory.mktemp("nonsense")
    path = written(folder, PROFILE, "profile.json")
    plain = pp.plan(path, **GIVEN, split="4,4", weights="flush", accumulate=2)
    plain.save(folder / "plan.json")
    (folder / "train.sh").write_text("--num-layers 6 --micro-batch-size 4 --global-batch-size 16\n")
    (folder / "runs.csv").write_text("ms,batch\n20,4\n")
    asked = {"profile": path, **GIVEN}
    return {
        "plan": (pp.plan, {**asked, "algorithm": "balance", "weights": "2bw"}),
        "grid": (pp.grid, {**asked, "batch": 16, "microbatches": [4], "effort": "quick"}),
        "estimate": (pp.estimate, {**asked, "batch": 16, "microbatches": [4], "effort": "quick"}),
        "compare": (pp.compare, {**asked, "algorithms": "balance", "weights": "2bw"}),
        "read_plan": (pp.read_plan, {"path": str(folder / "plan.json")}),
        "read_profile": (pp.read_profile, {"path": path}),
        "synthesize": (pp.synthesize, {"plan": plain, "microbatches": 2, "moves": 5}),
        "calibrate": (pp.calibrate, {"profiles": [path], "gpu": "a100", "measured": str(folder / "runs.csv")}),
        "import_plan": (
            pp.import_plan,
            {**asked, "arguments": str(folder / "train.sh"), "framework": "megatron", "effort": "quick"},
        ),
        "simulate": (plain.simulate, {"schedule": "gpipe", "microbatches": 2}),
        "report": (plain.report, {"path": folder / "page.html", "microbatches": 2}),
        "export": (plain.export, {"target": "torch-csv"}),
        "ranks": (plain.ranks, {"steps": 1}),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("plan", "grid", "estimate", "compare", "read_plan", "read_profile", "synthesize", "calibrate", "import_plan"),
        *("simulate", "report", "export", "ranks"),
    ],
)
def test_nonsense_is_refused(name, calls, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    function, good = calls[name]
    taken = inspect.signature(function).parameters
    keywords = {*taken, *good} - {"options", "schedules", "asked"}
    deep = []
    for keyword in sorted(keywords):
        for value in NONSENSE:
            usual = keyword in taken and value is taken[keyword].default and keyword not in ASKED
            if usual or (keyword in LONG and value == 10**30) or (keyword in CALLED and value is int):
                continue
            try:
                function(**{**good, keyword: value})
            except (pp.PipeplanError, TypeError) as error:
                if isinstance(error, TypeError) and "argument" not in str(error):
                    deep.append((keyword, value, repr(error)))
            except Exception as error:
                deep.append((keyword, value, repr(error)))
    assert deep == []
