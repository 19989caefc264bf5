"""Put small faults into the rooms that decide, one at a time, and say which ones no test notices.

    python scripts/checks/mutation.py [--seed N] [--mutants 300] [--rooms cost,schedule,check,partition,planner]
                                      [--at MODULE:LINE,...] [--jobs 2] [--seconds 60]

A seeded sample of the faults of :mod:`mutants`, which changes only where the source does, is tried in copies of the
checkout, each in a forked process that has the libraries loaded already. Which tests run which lines is measured
first, in a copy with marks in every block (kept in the folder for temporary files until package or test changes). A
fault meets the tests that run its lines, those beside its room first, the fastest first, together at most
``--seconds`` of their usual time; the first failure ends it, a hang counts as one. Tests that need torch are left out.
Faults that change nothing stand with the reason in mutation_equivalents.toml and are not tried. ``--at`` tries only
the sample's faults in these lines again. The exit code is 1 where less than 95% of the others are noticed.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec  # noqa: F401
import networkx  # noqa: F401
import numpy  # noqa: F401
import pulp  # noqa: F401
import pytest
import rich.console  # noqa: F401
from mutants import Mutant, marked, mutants_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cost", "schedule", "check", "partition", "planner")
ELSEWHERE = ("runtime", "zoo", "test_docs.py", "test_layers.py")  # below tests/: torch, processes, the source itself
ENOUGH = 0.95
FEW = 8  # tests that a mutant meets however long they take
FORKS = multiprocessing.get_context("fork")
Answer = dict[str, Any]
Work = Callable[[Path, "Deadline"], Answer]


@dataclass
class Deadline:
    """When the parent gives a process up; the process moves it on before each test."""

    at: Any = field(default_factory=lambda: FORKS.Value("d", 0.0))

    def within(self, seconds: float) -> None:
        self.at.value = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return bool(time.monotonic() > self.at.value)


@dataclass
class Running:
    """A forked process at work in one of the copies."""

    task: Any
    copy: Path
    deadline: Deadline
    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def answer(self) -> Answer | None:
        """Return what the process says; {} where it died or was given up; None while it works."""
        if self.pipe.poll():
            with suppress(EOFError):
                return dict(self.pipe.recv())
            return {}
        return {} if self.deadline.passed or not self.process.is_alive() else None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def in_forks(tasks: Iterable[tuple[Any, Work]], copies: Sequence[Path]) -> Iterator[tuple[Any, Answer]]:
    """Yield each task with its answer as it comes, one process per copy at a time."""
    waiting, free, running = list(tasks)[::-1], list(copies), list[Running]()
    try:
        while waiting or running:
            while waiting and free:
                running.append(start(*waiting.pop(), free.pop()))
            wait([x.pipe for x in running], timeout=0.5)
            for x in list(running):
                if (answer := x.answer()) is not None:
                    x.end()
                    running.remove(x)
                    free.append(x.copy)
                    yield x.task, answer
    finally:
        for x in running:
            x.end()


def start(task: Any, work: Work, copy: Path) -> Running:
    mine, its = FORKS.Pipe(duplex=False)
    deadline = Deadline()
    deadline.within(120)
    process = FORKS.Process(target=_in_a_session, args=(work, copy, deadline, its))
    process.start()
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(process.pid or 0, process.pid or 0)
    its.close()
    return Running(task, copy, deadline, process, mine)


def _in_a_session(work: Work, copy: Path, deadline: Deadline, pipe: Connection) -> None:
    with suppress(PermissionError):
        os.setpgid(0, 0)
    quiet = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(copy)
    sys.path[:] = [str(copy), *(x for x in sys.path[1:] if x)]
    os.environ.update(PYTHONPATH=str(copy), OMP_NUM_THREADS="1")
    pipe.send(work(copy, deadline))


# --- which tests run which lines ---------------------------------------------------------------------------------


@dataclass(eq=False)  # pytest keeps plugins in sets
class Recorder:
    """A pytest plugin: seconds and marks of every test that passes; marks of shared fixtures go to the whole file."""

    hits: set[str]
    deadline: Deadline
    tests: dict[str, tuple[float, list[str]]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def pytest_collection_finish(self) -> None:
        self.shared |= self.hits
        self.caches = [
            x
            for module in list(sys.modules.values())
            if str(ROOT) not in (found := getattr(module, "__file__", None) or "") and "pipeplan-mutants" in found
            for x in vars(module).values()
            if isinstance(x, functools._lru_cache_wrapper)
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        for cached in self.caches:  # what a test before has computed would not be seen to be run
            cached.cache_clear()
        self.hits.clear()
        self.deadline.within(600)
        began = time.perf_counter()
        result = yield
        self.tests[item.nodeid] = (time.perf_counter() - began, sorted(self.hits))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        before = set(self.hits)
        result = yield
        if fixturedef.scope != "function":
            self.shared |= self.hits - before
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)


def record(file: str) -> Work:
    """Return the work that runs one test file and answers with its tests' seconds and marks."""

    def work(_: Path, deadline: Deadline) -> Answer:
        hits: set[str] = vars(builtins).setdefault("__hits__", set())
        recorder = Recorder(hits, deadline)
        run_pytest([file], recorder)
        tests = {
            name: (seconds, sorted({*marks, *recorder.shared}))
            for name, (seconds, marks) in recorder.tests.items()
            if name not in recorder.failed
        }
        return {"tests": tests, "failed": sorted(recorder.failed)}

    return work


def run_pytest(arguments: list[str], plugin: object, *options: str) -> int:
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--timeout=0")
    return int(pytest.main([*arguments, *quiet, *options], plugins=[plugin]))


def recorded(copies: list[Path], rooms: Sequence[str]) -> dict[str, tuple[float, frozenset[str]]]:
    """Return seconds and marks of every test that passes and runs one of the rooms; measures what is not kept yet."""
    kept_in = Path(tempfile.gettempdir()) / "pipeplan-mutation-tests.json"
    kept = json.loads(kept_in.read_text()) if kept_in.exists() else {}
    around = [*ROOT.glob("pipeplan/**/*.py"), *(ROOT / "tests").glob("*/[!t]*.py"), ROOT / "tests/conftest.py"]
    package = digest(sorted(around))
    files = {
        str(path.relative_to(ROOT)): package + digest([path])
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        if path.relative_to(ROOT / "tests").parts[0] not in ELSEWHERE and "importorskip" not in path.read_text()
    }
    missing = [file for file, key in files.items() if kept.get(file, {}).get("key") != key]
    if missing:
        for copy in copies:
            for path in package_files(copy, rooms):
                path.write_text(marked(path.read_text(), str(path.relative_to(copy / "pipeplan"))))
        for file, answer in in_forks(((file, record(file)) for file in missing), copies):
            kept[file] = {"key": files[file], "tests": answer.get("tests", {})}
            seconds = sum(s for s, _ in kept[file]["tests"].values())
            failed = answer.get("failed", ["(the whole file)"])
            print(f"{file}: {len(kept[file]['tests'])} tests, {seconds:.1f} s", *failed, file=sys.stderr)
            kept_in.write_text(json.dumps(kept))
        for copy in copies:
            for path in package_files(copy, rooms):
                shutil.copy2(ROOT / path.relative_to(copy), path)
    return {
        name: (seconds, frozenset(marks)) for file in files for name, (seconds, marks) in kept[file]["tests"].items()
    }


def package_files(root: Path, rooms: Sequence[str]) -> list[Path]:
    return [x for room in rooms for x in sorted((root / "pipeplan" / room).rglob("*.py")) if x.stat().st_size > 200]


def digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


# --- trying a mutant ---------------------------------------------------------------------------------------------


@dataclass(eq=False)  # pytest keeps plugins in sets
class Chosen:
    """A pytest plugin: these tests alone, in this order; the deadline moves on with each."""

    seconds: dict[str, float]
    deadline: Deadline
    failed: str = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {name: i for i, name in enumerate(self.seconds)}
        items[:] = sorted((x for x in items if x.nodeid in place), key=lambda x: place[x.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.deadline.within(30 + 10 * self.seconds[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid


def chosen_tests(
    mutant: Mutant, tests: dict[str, tuple[float, frozenset[str]]], limit_s: float
) -> tuple[list[dict[str, float]], bool]:
    """Return the tests to try, beside the room and elsewhere, fastest first, and whether the limit left some out.

    What stands outside functions, such as constants, meets every test that runs anything of the module.
    """
    beside = f"tests/{mutant.module.split('/')[0]}/"
    mark, any_mark = f"{mutant.module}:{mutant.block}", f"{mutant.module}:"
    able = [
        (not name.startswith(beside), seconds, name)
        for name, (seconds, marks) in tests.items()
        if (mark in marks if mutant.block is not None else any(x.startswith(any_mark) for x in marks))
    ]
    groups: list[dict[str, float]] = [{}, {}]
    spent = 0.0
    for far, seconds, name in sorted(able):
        if spent + seconds <= limit_s or sum(map(len, groups)) < FEW:
            spent += seconds
            groups[far][name] = seconds
    return [x for x in groups if x], len(able) > sum(map(len, groups))


def attempt(mutant: Mutant, groups: list[dict[str, float]]) -> Work:
    """Return the work that puts the fault into the copy's module and answers with the test that notices it."""

    def work(copy: Path, deadline: Deadline) -> Answer:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        last = copy / "faulty.txt"  # the module of the mutant before, whose process may have been killed
        if last.exists():
            shutil.copy2(ROOT / last.read_text(), copy / last.read_text())
        last.write_text(f"pipeplan/{mutant.module}")
        (copy / last.read_text()).write_text(mutant.applied((ROOT / last.read_text()).read_text()))
        for seconds in groups:
            plugin = Chosen(seconds, deadline)
            code = run_pytest(sorted({name.split("::")[0] for name in seconds}), plugin, "-x")
            if code:
                return {"noticed": plugin.failed or "tests can't be collected"}
        return {"noticed": ""}

    return work


def collect(copy: Path, _: Deadline) -> Answer:
    """Compile the tests once, so that later processes find them compiled."""
    return {"code": run_pytest(["tests", "--collect-only"], object(), *(f"--ignore=tests/{x}" for x in ELSEWHERE))}


def make_copies(folder: Path, count: int) -> list[Path]:
    """Return folders with the checkout as it is now, git's and Python's own files left out."""
    copies = [folder / str(i) for i in range(count)]
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "out", "build")
    for copy in copies:
        copy.mkdir(parents=True)
        for name in ("pipeplan", "tests", "profiles", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=left_out)
        for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.md")]:
            shutil.copy2(path, copy / path.name)
    return copies


# --- the command -------------------------------------------------------------------------------------------------


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Return the reasons why mutants change nothing, by module, function and their two lines."""
    path = Path(__file__).with_name("mutation_equivalents.toml")
    listed = tomllib.loads(path.read_text()).get("equivalent", [])
    return {(x["module"], x["inside"], x["before"], x["after"]): x["reason"] for x in listed}


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
    parser.add_argument(
        "--seconds", type=float, default=60, help="usual time of the tests that a mutant meets, at most"
    )
    arguments = parser.parse_args()
    rooms = arguments.rooms.split(",")
    known = equivalents()
    every = [
        mutant
        for path in package_files(ROOT, ROOMS)
        if any(str(path.relative_to(ROOT / "pipeplan")).startswith(room) for room in rooms)
        for mutant in mutants_of(path.read_text(), str(path.relative_to(ROOT / "pipeplan")))
    ]
    every.sort(key=lambda x: drawn(x, arguments.seed))
    valid = (x for x in every if x.compiles((ROOT / "pipeplan" / x.module).read_text()))
    sample = list(itertools.islice(valid, arguments.mutants))
    places = set(filter(None, arguments.at.removeprefix("pipeplan/").split(",")))
    asked = [x for x in sample if key(x) not in known and (not places or f"{x.module}:{x.line}" in places)]
    touched = {x.module for x in every}
    for stale in sorted(x for x in known.keys() - {key(x) for x in every} if x[0] in touched):
        print(f"mutation_equivalents.toml: there is no such mutant in {stale[0]}: {stale[3]}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="pipeplan-mutants-") as folder:
        copies = make_copies(Path(folder), arguments.jobs)
        tests = recorded(copies, ROOMS)
        for copy in copies:
            list(in_forks([("collect", collect)], [copy]))
        began = time.monotonic()
        survivors = try_all(asked, tests, copies, arguments.seconds)
    print(f"\n{len(every)} faults in {arguments.rooms}, {len(asked)} tried of a sample of {len(sample)}")
    for mutant, why in sorted(survivors, key=lambda x: (x[0].module, x[0].line)):
        print(f"\npipeplan/{mutant.module}:{mutant.line} in {mutant.inside or 'the module'} ({why})")
        print(f"  - {mutant.before}\n  + {mutant.after}")
    share = 1 - len(survivors) / max(1, len(asked))
    print(f"\n{len(asked) - len(survivors)} of {len(asked)} noticed, {share:.1%}, {time.monotonic() - began:.0f} s")
    return int(share < ENOUGH)


def try_all(
    asked: list[Mutant], tests: dict[str, tuple[float, frozenset[str]]], copies: list[Path], limit_s: float
) -> list[tuple[Mutant, str]]:
    """Return the mutants that no test notices, each with the number of tests that it met."""
    chosen = {mutant: chosen_tests(mutant, tests, limit_s) for mutant in asked}
    survivors = [(x, "no test runs it") for x in asked if not chosen[x][0]]
    tasks = [(x, attempt(x, chosen[x][0])) for x in asked if chosen[x][0]]
    for done, (mutant, answer) in enumerate(in_forks(tasks, copies), start=1):
        killer = answer.get("noticed", "a hang or a crash")
        if not killer:
            count = sum(map(len, chosen[mutant][0]))
            survivors.append((mutant, f"{count} tests{', the limit left out more' if chosen[mutant][1] else ''}"))
        print(
            f"{done}/{len(tasks)} {mutant.module}:{mutant.line} {killer or 'SURVIVES: ' + mutant.after}",
            file=sys.stderr,
        )
    return survivors


if __name__ == "__main__":
    sys.exit(main())
