"""Features that few need can be lifted out: without a feature's files and its rows the others are as they were."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases.patience import SECONDS

PACKAGE = Path(__file__).parents[1] / "pipeplan"
COMMANDS = "cli/__init__.py"
LIFTED = {  # feature -> its files, and the files and the rows that name it
    "calibrate": (
        "cli/calibrate.py api/calibrating.py planner/calibrate report/tables/calibrations.py files/measured_runs.py",
        f"{COMMANDS} __init__.py",
        r' +("calibrate": |from .api.calibrating ).*\n',
    ),
    "diff": ("cli/diff.py report/tables/differences.py", COMMANDS, r'    "diff": .*\n'),
    "synthesize": (
        "cli/synthesize.py api/synthesizing.py report/tables/synthesis.py",
        f"{COMMANDS} __init__.py",
        r' +("synthesize": |from .api.synthesizing ).*\n',
    ),
    "doctor": ("cli/doctor.py", COMMANDS, r'    "doctor": .*\n'),
    "what other papers and programs publish": (
        "partition/piper.py partition/madpipe/paper.py",
        "partition/__init__.py choices.py",
        r'    "(?:piper|madpipe-paper)": Algorithm\(\n(?:        .*\n)+    \),\n|, "(?:piper|madpipe-paper)"',
    ),
    "models of images": ("zoo/images", "zoo/__init__.py", r'    "[\w-]+": "images\.\w+",\n'),
}
CORE = """
import sys
from importlib import import_module
from pathlib import Path
package = Path(sys.argv[1])
for path in sorted(package.rglob("*.py")):
    name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
    if name.split(".")[1:2] not in (["runtime"], ["zoo"], ["__main__"]) and not name.endswith("figures"):
        import_module(name)
import pipeplan as pp
from pipeplan.cli import COMMANDS, group
for name in COMMANDS:
    assert group.get_command(None, name) is not None
found = pp.plan("example:published/alexnet", gpus=2, mem="16GB", weights="2bw", algorithm="contiguous")
assert found.samples_per_second > 0 and found.gap >= 0
assert Path(pp.__file__).is_relative_to(package)
"""


@pytest.mark.parametrize(
    "features",
    [("calibrate", "diff", "models of images"), ("synthesize", "doctor", "what other papers and programs publish")],
)
def test_features_can_be_lifted_out(features, tmp_path):
    """Each is seen gone where others are there."""
    package = shutil.copytree(PACKAGE, tmp_path / "pipeplan")  # what is compiled already among it
    for files, rows_in, rows in (LIFTED[x] for x in features):
        for file in files.split():
            gone = package / file
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        for name in rows_in.split():
            without, count = re.subn(rows, "", (package / name).read_text())
            assert count
            (package / name).write_text(without)
    assert list(dangling(package)) == []
    done = subprocess.run(
        [sys.executable, "-c", CORE, str(package)], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def dangling(package):
    """What modules of a package import of it that isn't there."""
    modules = {path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")}
    there = {parts[:-1] if parts[-1] == "__init__" else parts for parts in modules}
    for parts in modules:
        text = package.joinpath(*parts).with_suffix(".py").read_text()
        for dots, name in re.findall(r"^ *from (\.+)([\w.]*) import ", text, re.MULTILINE):
            base = (*parts[: len(parts) - len(dots)], *filter(None, name.split(".")))
            if base not in there:
                yield ".".join(parts), ".".join(base)
