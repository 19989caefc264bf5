"""Put small faults into the rooms that decide, one at a time, and say which ones no test notices.

    python scripts/checks/mutation.py [--seed N] [--mutants 300] [--rooms cost,schedule,check,partition,planner]
                                      [--at MODULE:LINE,...] [--jobs 2] [--seconds 300]

A seeded sample of the faults of :mod:`mutants`, which changes only where the source does, is tried in copies of the
checkout. A fault meets the test files that import its module, then those of its room, for ``--seconds`` at most; the
first failure ends it, and so does what hangs. Tests that need torch are left out. Faults that change nothing stand with
the reason in mutation_equivalents.toml and are not tried. ``--at`` tries only the sample's faults in these lines again.
The exit code is 1 where less than 95% of the others are noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cost", "schedule", "check", "partition", "planner")
ELSEWHERE = ("runtime", "zoo")  # below tests/: torch, processes
ENOUGH = 0.95
LONG_S = 60  # without a test's end: it hangs


def tests_of(module: str) -> list[str]:
    """Return the test files that import a module, and then the others of its room, each those beside it first."""
    dotted, room = f"pipeplan.{module.removesuffix('.py').replace('/', '.')}", module.split("/")[0]
    files = [x for x in sorted(ROOT.glob("tests/*/test_*.py")) if x.parent.name not in ELSEWHERE]
    texts = {x: x.read_text() for x in files}
    found = [
        x for x in files if f"{dotted.removesuffix('.__init__')} import" in texts[x] and "importorskip" not in texts[x]
    ]
    others = [x for x in files if x.parent.name == room and x not in found]
    return [str(x.relative_to(ROOT)) for x in (*sorted(found, key=lambda x: x.parent.name != room), *others)]


def noticed(mutant: Mutant, copy: Path, seconds: float, failing: set[str]) -> str:
    """Return what notices a fault in a copy of the checkout; empty where nothing does in so many seconds.

    Tests that fail without it are ``failing``, and notice nothing.
    """
    path = copy / "pipeplan" / mutant.module
    source = path.read_text()
    tests, ends = tests_of(mutant.module), time.monotonic() + seconds
    while True:
        path.write_text(mutant.applied(source))
        try:
            found = _failed(copy, [*tests, *(f"--deselect={x}" for x in failing)], ends)
        finally:
            path.write_text(source)
        test = found.removeprefix("FAILED ").partition(" - ")[0]
        if not found.startswith("FAILED") or test in failing or not _failed(copy, [test], ends):
            return found
        failing.add(test)


def _failed(copy: Path, asked: list[str], ends: float) -> str:
    """Return the line of the first test that fails, or what else went wrong; empty where all pass until the end."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--timeout={LONG_S}"]
    about = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *asked],
            cwd=copy,
            env=about,
            capture_output=True,
            text=True,
            timeout=max(1, ends - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        return ""
    if not done.returncode:
        return ""
    return next((x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))), "a crash or a hang")


def make_copies(folder: Path, count: int) -> list[Path]:
    """Return folders with the checkout as it is now, git's and Python's own files left out."""
    copies = [folder / str(i) for i in range(count)]
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "out", "build")
    for copy in copies:
        copy.mkdir(parents=True)
        for name in ("pipeplan", "tests", "profiles", "scripts", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=left_out)
        for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.md")]:
            shutil.copy2(path, copy / path.name)
    return copies


def equivalents() -> set[tuple[str, str, str, str]]:
    """Return the mutants that change nothing, by module, function and their two lines."""
    path = Path(__file__).with_name("mutation_equivalents.toml")
    listed = tomllib.loads(path.read_text()).get("equivalent", [])
    return {(x["module"], x["inside"], x["before"], x["after"]) for x in listed}


def key(mutant: Mutant) -> tuple[str, str, str, str]:
    return mutant.module, mutant.inside, mutant.before, mutant.after


def drawn(mutant: Mutant, seed: int) -> bytes:
    """Return what orders the sample: no change elsewhere in the package draws other mutants."""
    return hashlib.sha256("\0".join((str(seed), *key(mutant), mutant.new)).encode()).digest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutants", type=int, default=300, help="how many to try")
    parser.add_argument(
        "--rooms", default=",".join(ROOMS), help="folders or modules of pipeplan/, such as cost,planner/drained"
    )
    parser.add_argument("--at", default="", help="lines such as cost/memory.py:12, as survivors are printed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="that a mutant meets tests, at most")
    arguments = parser.parse_args()
    known, package = equivalents(), ROOT / "pipeplan"
    every = [
        mutant
        for path in sorted(package.rglob("*.py"))
        if (module := str(path.relative_to(package))).startswith(tuple(arguments.rooms.split(",")))
        for mutant in mutants_of(path.read_text(), module)
    ]
    every.sort(key=lambda x: drawn(x, arguments.seed))
    valid = (x for x in every if x.compiles((package / x.module).read_text()))
    sample = list(itertools.islice(valid, arguments.mutants))
    places = set(filter(None, arguments.at.removeprefix("pipeplan/").split(",")))
    asked = [x for x in sample if key(x) not in known and (not places or f"{x.module}:{x.line}" in places)]
    touched = {x.module for x in every}
    for stale in sorted(x for x in known - {key(x) for x in every} if x[0] in touched):
        print(f"mutation_equivalents.toml: there is no such mutant in {stale[0]}: {stale[3]}", file=sys.stderr)
    began, survivors = time.monotonic(), list[Mutant]()
    with tempfile.TemporaryDirectory(prefix="pipeplan-mutants-") as folder:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in make_copies(Path(folder), arguments.jobs):
            free.put(copy)

        failing: set[str] = set()

        def attempt(mutant: Mutant) -> str:
            copy = free.get()
            try:
                return noticed(mutant, copy, arguments.seconds, failing)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            for done, (mutant, killer) in enumerate(zip(asked, pool.map(attempt, asked), strict=True), start=1):
                survivors += [] if killer else [mutant]
                told = killer or f"SURVIVES: {mutant.after}"
                print(f"{done}/{len(asked)} {mutant.module}:{mutant.line} {told}", file=sys.stderr)
    print(f"\n{len(every)} faults in {arguments.rooms}, {len(asked)} tried of a sample of {len(sample)}")
    for mutant in sorted(survivors, key=lambda x: (x.module, x.line)):
        print(f"\npipeplan/{mutant.module}:{mutant.line} in {mutant.inside or 'the module'}")
        print(f"  - {mutant.before}\n  + {mutant.after}")
    share = 1 - len(survivors) / max(1, len(asked))
    print(f"\n{len(asked) - len(survivors)} of {len(asked)} noticed, {share:.1%}, {time.monotonic() - began:.0f} s")
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
