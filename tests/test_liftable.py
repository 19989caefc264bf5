"""Features that few need can be lifted out: without a feature's files and its rows the others are as they were."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases.lifted import dangling, lift
from cases.patience import SECONDS

PACKAGE = Path(__file__).parents[1] / "pipeplan"
LIFTED = {  # feature -> its files, and the names of its rows that don't say its files
    "calibrate": "cli/calibrate.py api/calibrating.py planner/calibrate report/tables/calibrations.py "
    "files/measured_runs.py",
    "diff, and plans under other times": "cli/diff.py report/tables/differences.py planner/what_if/carry.py "
    "api/bracket.py api/resuming.py planner/what_if/moves.py",
    "grids, and GPUs that decide as they go": "api/grids.py planner/grids schedule/programs/deciding.py grid estimate "
    "latest",
    "compare and import": "api/comparing.py planner/what_if/compare.py compare import",
    "MadPipe": "partition/madpipe planner/periodic/special.py",
    "walks": "partition/moves planner/periodic/walks.py",
    "bounds on what drains": "check/bounds/drained",
    "zero bubble": "schedule/programs/zero_bubble.py",
    "V-Half and V-Min": "schedule/programs/controlled.py",
    "deepspeed": "files/frameworks/deepspeed.py deepspeed",
    "Megatron-LM": "files/frameworks/megatron.py megatron megatron-bridge",
    "models of images": "zoo/images",
    "memory that processes share": "runtime/exchange/nearby.py",
    "evaluations while training": "runtime/engine/held_out.py",
    "comparison with plain training": "runtime/engine/comparison.py",
    "transformers": "runtime/model/build/hugging_face.py runtime/model/build/tensor_plan.py",
    "orders of their own": "cli/synthesize.py api/synthesizing.py report/tables/synthesis.py schedule/synthesis "
    "planner/what_if/best_order.py BEST",
    "doctor": "cli/doctor.py",
    "plans for frameworks, and what is read of them": "planner/what_if/target.py planner/what_if/towers.py "
    "planner/drained/block_search.py api/comparing.py planner/what_if/compare.py compare import",
    "torchtitan": "files/frameworks/torchtitan.py torchtitan",
    "what other weights take": "planner/what_if/alternatives.py",
    "orders of a DAG's layers": "planner/layer_orders.py",
    "PipeDream": "partition/pipedream",
    "Piper": "partition/piper.py",
    "several chunks in a loop": "schedule/programs/loops.py",
    "stages like a V": "schedule/programs/vees.py schedule/programs/controlled.py",
    "threads, and the order of arrival": "runtime/exchange/threaded.py runtime/engine/arrival_order.py",
}
HALF = list(LIFTED).index("orders of their own")
TESTS = (
    "cost/test_shared_links.py",
    "cost/test_storages.py",
    "partition/test_cuts.py",
    "test_problem.py",
)  # quick ones
CORE = """
import sys
from importlib import import_module
from pathlib import Path
package, tests = Path(sys.argv[1]), sys.argv[2:]
for path in sorted(package.rglob("*.py")):
    name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
    if name.split(".")[1:2] not in (["runtime"], ["zoo"], ["__main__"]) and not name.endswith("figures"):
        import_module(name)
import pipeplan as pp
from pipeplan.cli import COMMANDS, group
for name in COMMANDS:
    assert group.get_command(None, name) is not None
for weights in ("2bw", "flush"):
    found = pp.plan("example:published/alexnet", gpus=2, mem="16GB", weights=weights)
    assert found.samples_per_second > 0 and found.gap >= 0
pp.plan("example:gpt-tiny-b8-cpu", gpus=2, mem="1GB", weights="flush", batch=16).save("plan.json")
import pytest
assert Path(pp.__file__).is_relative_to(package)
sys.exit(pytest.main(["--noconftest", "-qp", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", *tests]))
"""


@pytest.mark.parametrize(("features", "runs"), [(list(LIFTED)[:HALF], True), (list(LIFTED)[HALF:], False)])
def test_features_can_be_lifted_out(features, runs, tmp_path):
    """Each is seen gone where others are there."""
    package = shutil.copytree(PACKAGE, tmp_path / "pipeplan")  # what is compiled already among it
    lift(package, " ".join(LIFTED[x] for x in features).split())
    assert list(dangling(package)) == []
    own = Path(__file__).parent
    called = ["-c", CORE, package, *(own / name for name in TESTS)], ["-m", "pipeplan", "run", "plan.json", "--steps=1"]
    for arguments in called[: 1 + runs]:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
            env={"PYTHONPATH": f"{tmp_path}:{own}", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
