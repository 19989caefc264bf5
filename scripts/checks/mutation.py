"""Put small faults into the rooms that decide, one at a time, and say which ones no test notices.

    python scripts/checks/mutation.py [--seed N] [--mutants 300] [--rooms cost,schedule,check,partition,planner]
                                      [--at MODULE:LINE,...] [--jobs 2] [--seconds 600]

A seeded sample of the faults of :mod:`mutants`, which changes only where the source does, is tried in copies of the
checkout. Which tests reach which lines is found out first (by ``pip install coverage``), of those files that import a
room's modules or are beside them, and kept in ``--reached``: what changes later is found out anew. A fault meets the
tests that reach its line (:mod:`mutation_tests`), for ``--seconds`` at most; the first failure ends it, and so does
what hangs. Faults that change nothing stand with the reason in mutation_equivalents.toml and are not tried. ``--at``
tries only the sample's faults in these lines again. The exit code is 1 where less than 95% of the others are noticed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from types import CodeType
from typing import Any

from mutants import Mutant, mutants_of
from mutation_tests import LONG_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, HERE = ROOT / "pipeplan", str(Path(__file__).parent)
ROOMS = ("cost", "schedule", "check", "partition", "planner")
ELSEWHERE = (("runtime",), ("zoo",))  # below tests/: torch, processes, which no model of a plan needs
ENOUGH = 0.95
BEGINNING = """
import os, pathlib, coverage
coverage.process_startup()
def turn():
    if coverage.Coverage.current():
        coverage.Coverage.current().switch_context(pathlib.Path(os.environ["MUTATION_TEST"]).read_text())
turn()
os.register_at_fork(after_in_child=turn)
"""  # of each process while it is found out which tests reach which lines


def tests_of(modules: Sequence[str], rooms: Sequence[str]) -> list[Path]:
    """Return the test files that import some of the modules, first, and the others of their rooms: where these are of
    the runtime's, all that train."""
    dotted = [f"pipeplan.{x.removesuffix('.py').replace('/', '.').removesuffix('.__init__')} import" for x in modules]
    near = {str(Path(x).parent) for x in modules} | {x.split("/")[0] for x in rooms}
    near |= {"runtime/training"} if "runtime" in near else set()
    found, beside = [], []
    for path in sorted((ROOT / "tests").glob("**/test_*.py")):
        folder, text = path.relative_to(ROOT / "tests").parent, path.read_text()
        if folder.parts[:1] in ELSEWHERE and {x.split("/")[0] for x in rooms} <= set(ROOMS):
            continue
        if any(x in text for x in dotted):
            found.append(path)
        elif str(folder) in near:
            beside.append(path)
    return [*found, *beside]


def reached(modules: Iterable[str], files: Sequence[Path], kept: Path, folder: Path) -> dict[str, Any]:
    """Return which tests reach which lines of the package, of those ``files`` anew that changed since it was ``kept``;
    of all if one of ``modules`` wasn't there then."""
    known = json.loads(kept.read_text()) if kept.exists() else {"sums": {}, "sources": {}, "took": {}, "lines": {}}
    sums = {str(x.relative_to(ROOT)): hashlib.sha256(x.read_bytes()).hexdigest() for x in files}
    begun = known["sources"].keys() >= set(modules)
    changed = {x for x in sums if not begun or known["sums"].get(x) != sums[x]}
    sources = {str(x.relative_to(PACKAGE)): x.read_text() for x in PACKAGE.rglob("*.py")}
    lines = {x: _moved(known["lines"].get(x, {}), known["sources"].get(x, ""), sources[x]) for x in sources}
    for at in lines.values():
        for line, tests in at.items():
            named = [known["tests"][x] for x in tests]
            at[line] = [x for x in named if x.partition("::")[0] not in changed]
    took = {x: s for x, s in known["took"].items() if x.partition("::")[0] not in changed}
    if changed:
        about = {**os.environ, "MUTATION_TEST": str(folder / "test"), "COVERAGE_PROCESS_START": str(folder / "rc")}
        about["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), HERE, os.environ.get("PYTHONPATH")]))
        (folder / "rc").write_text(
            f"[run]\nparallel = true\ndata_file = {folder}/found\nsource = {PACKAGE}\npatch = _exit\n"
        )
        (folder / "sitecustomize.py").write_text(BEGINNING)
        (folder / "test").write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "mutation_tests"]
        subprocess.run([*command, *sorted(changed)], cwd=ROOT, env=about, check=False)
        import coverage

        found = coverage.Coverage(config_file=str(folder / "rc"))
        found.combine([str(folder)])
        for module in sources:
            for line, tests in found.get_data().contexts_by_lineno(str(PACKAGE / module)).items():
                lines[module].setdefault(str(line), []).extend(tests)
        took |= json.loads((folder / "took.json").read_text())
    numbers = {x: i for i, x in enumerate(sorted({x for at in lines.values() for tests in at.values() for x in tests}))}
    numbered = {name: {x: [numbers[y] for y in tests] for x, tests in at.items()} for name, at in lines.items()}
    known = {"sums": known["sums"] | sums, "sources": sources, "took": took}
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({**known, "lines": numbered, "tests": list(numbers)}))
    return {**known, "lines": lines}


def _moved(lines: dict[str, list[Any]], old: str, new: str) -> dict[str, list[Any]]:
    """Return what is known of lines, where these are now; what was changed has that of the line before it."""
    found: dict[str, list[Any]] = {}
    for _, start, stop, begin, end in SequenceMatcher(None, old.splitlines(), new.splitlines(), False).get_opcodes():
        for line in range(begin, end):
            was = start + line - begin if start + line - begin < stop else max(0, start - 1)
            if str(was + 1) in lines:
                found[str(line + 1)] = lines[str(was + 1)]
    return found


def asked_of(mutant: Mutant, known: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return what a worker needs of a fault: the text with it, and the tests that reach it, quick files first."""
    lines, source = known["lines"][mutant.module], (PACKAGE / mutant.module).read_text()
    starts = _line_starts(compile(source, mutant.module, "exec"))
    line = max((x for x in starts if x <= mutant.line), default=1)
    tests = set(lines.get(str(line), []))
    imported = mutant.block is None or "" in tests
    if imported:  # of a default, what calls the function comes first
        tests = {x for at in _called_with(source, mutant.line) for x in lines.get(str(at), [])}
    near = _quick_first(tests, known["took"], order)
    rest = {x for every in lines.values() for x in every} - tests if imported else set()
    asked = {"tests": near + _quick_first(rest, known["took"], order), "near": len(near), "imported": imported}
    return {"module": mutant.module, "source": mutant.applied(source), **asked}


def _called_with(source: str, line: int) -> range:
    """Return the lines of the function whose parameters stand in a line; none where these are none."""
    found = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    heads = [x for x in found if x.lineno <= line < x.body[0].lineno or line == x.lineno == x.body[0].lineno]
    return range(heads[-1].body[0].lineno, (heads[-1].end_lineno or line) + 1) if heads else range(0)


def _quick_first(tests: set[str], took: dict[str, float], files: Iterable[str]) -> list[str]:
    """Return the tests that ``took`` knows and that are in some files, those of quick files first."""
    each = dict.fromkeys(files, 0.0)
    tests = {x for x in tests & took.keys() if x.partition("::")[0] in each}
    for test in tests:
        each[test.partition("::")[0]] += took[test]
    place = {test: i for i, test in enumerate(took)}
    return sorted(tests, key=lambda x: (each[x.partition("::")[0]], x.partition("::")[0], place[x]))


def _line_starts(code: CodeType) -> set[int]:
    return {x for *_, x in code.co_lines() if x}.union(
        *(_line_starts(x) for x in code.co_consts if isinstance(x, CodeType))
    )


def make_copies(folder: Path, count: int) -> list[Path]:
    """Return folders with the checkout as it is now, git's and Python's own files left out."""
    copies = [folder / str(i) for i in range(count)]
    left_out = shutil.ignore_patterns(".*", "*.egg-info")
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
    parser.add_argument(
        "--tests", default="", help="test files to choose from, if not all that import a room's modules"
    )
    parser.add_argument("--reached", type=Path, default=ROOT / "out" / "reached.json", help="what is known of lines")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="that a mutant meets tests, at most")
    arguments = parser.parse_args()
    known = equivalents()
    every = [
        mutant
        for path in sorted(PACKAGE.rglob("*.py"))
        if (module := str(path.relative_to(PACKAGE))).startswith(tuple(arguments.rooms.split(",")))
        for mutant in mutants_of(path.read_text(), module)
    ]
    every.sort(key=lambda x: drawn(x, arguments.seed))
    valid = (x for x in every if x.compiles((PACKAGE / x.module).read_text()))
    sample = list(itertools.islice(valid, arguments.mutants))
    places = set(filter(None, arguments.at.removeprefix("pipeplan/").split(",")))
    asked = [x for x in sample if key(x) not in known and (not places or f"{x.module}:{x.line}" in places)]
    touched = {x.module for x in every}
    for stale in sorted(x for x in known - {key(x) for x in every} if x[0] in touched):
        print(f"mutation_equivalents.toml: there is no such mutant in {stale[0]}: {stale[3]}", file=sys.stderr)
    began, survivors = time.monotonic(), list[Mutant]()
    rooms = arguments.rooms.split(",")
    files = [ROOT / x for x in arguments.tests.split()] or tests_of(sorted(touched), rooms)
    with tempfile.TemporaryDirectory(prefix="pipeplan-mutants-") as name:
        folder = Path(name)
        known_lines = reached(sorted(touched), files, arguments.reached, folder)
        order = [str(x.relative_to(ROOT)) for x in files]
        faults = [
            {**asked_of(x, known_lines, order), "number": i, "seconds": arguments.seconds} for i, x in enumerate(asked)
        ]
        chosen = sorted({y.partition("::")[0] for x in faults for y in x["tests"]})
        read, write = os.pipe()
        workers = []
        for copy in make_copies(folder, arguments.jobs):
            (copy / "faults.json").write_text(json.dumps(faults[int(copy.name) :: arguments.jobs]))
            about = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), HERE)), "TMPDIR": f"{copy}/t"}
            about |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            about |= {"MUTATION_FAULTS": f"{copy}/faults.json", "MUTATION_OUT": str(write)}
            (copy / "t").mkdir()
            command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"--timeout={LONG_S}", "-p", "mutation_tests"]
            command += ["-p", "no:cacheprovider", *chosen]
            workers.append(subprocess.Popen(command, cwd=copy, env=about, stdout=subprocess.DEVNULL, pass_fds=[write]))
        os.close(write)
        done = 0
        with os.fdopen(read) as lines:
            for done, line in enumerate(lines, start=1):
                number, killer = json.loads(line)
                mutant = asked[number]
                survivors += [] if killer else [mutant]
                told = killer or f"SURVIVES {len(faults[number]['tests'])} tests: {mutant.after}"
                print(f"{done}/{len(asked)} {mutant.module}:{mutant.line} {told}", file=sys.stderr)
        if any(x.wait() for x in workers) or done < len(asked):
            return 2
    print(f"\n{len(every)} faults in {arguments.rooms}, {len(asked)} tried of a sample of {len(sample)}")
    for mutant in sorted(survivors, key=lambda x: (x.module, x.line)):
        print(f"\npipeplan/{mutant.module}:{mutant.line} in {mutant.inside or 'the module'}")
        print(f"  - {mutant.before}\n  + {mutant.after}")
    share = 1 - len(survivors) / max(1, len(asked))
    print(f"\n{len(asked) - len(survivors)} of {len(asked)} noticed, {share:.1%}, {time.monotonic() - began:.0f} s")
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
