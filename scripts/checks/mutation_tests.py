"""Which tests reach which lines, and which of them fail with a fault there? A plugin of pytest for :mod:`mutation`.

With ``MUTATION_TEST`` each test says in that file that it is its turn, for coverage in all processes. With
``MUTATION_FAULTS``, a file of faults, the tests that reach one run in a fork of this process, in which functions have
it, as the file has for whatever they start. What runs on import needs a process of its own.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

RECORD, FAULTS = os.environ.get("MUTATION_TEST"), os.environ.get("MUTATION_FAULTS")
LONG_S = 120  # without a test's end: it hangs
ABSENT, PASSED = 3, b"passed"
took: dict[str, float] = {}
failing, passing = set[str](), set[str]()  # tests without a fault, as far as that was asked
telling: list[int] = []  # where a fork says what fails


def pytest_collection_finish() -> None:
    """Import all of the package, so that a test imports nothing for others."""
    import pipeplan

    for found in pkgutil.walk_packages(pipeplan.__path__, "pipeplan."):
        if "__main__" not in found.name:
            with suppress(ImportError):
                importlib.import_module(found.name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say whose turn it is, and how long it took unless it fails."""
    if RECORD:
        import coverage

        Path(RECORD).write_text(item.nodeid)
        coverage.Coverage.current().switch_context(item.nodeid)
        took[item.nodeid] = -time.monotonic()
    yield
    if item.nodeid in took:
        took[item.nodeid] += time.monotonic()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Leave out what fails without faults; with one, a failure is all that is asked for."""
    if report.failed and telling:
        os.write(telling[0], report.nodeid.encode())
        os._exit(1)
    if report.failed or report.skipped:
        took.pop(report.nodeid, None)


def pytest_sessionfinish() -> None:
    """Keep how long each test took."""
    if RECORD:
        Path(RECORD).with_name("took.json").write_text(json.dumps(took))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Try each fault, and write a line for each: its number and what notices it."""
    if not FAULTS or session.testsfailed:
        return None
    items, out = {x.nodeid: x for x in session.items}, int(os.environ["MUTATION_OUT"])
    for fault in json.loads(Path(FAULTS).read_text()):
        told = _noticed(fault, items)
        os.write(out, f"{json.dumps([fault['number'], told])}\n".encode())
    return True


def _noticed(fault: dict[str, Any], items: dict[str, pytest.Item]) -> str:
    """Return what notices a fault; empty where nothing does. Tests that fail without it don't count."""
    path, ends = Path.cwd() / "pipeplan" / fault["module"], time.monotonic() + fault["seconds"]
    source, times = path.read_text(), path.stat()

    while tests := [x for x in fault["tests"] if x in items and x not in failing]:
        path.write_text(fault["source"])
        try:
            near = [items[x] for x in fault["tests"][: fault["near"]] if x in tests]
            found = _forked(near, path, ends) if near else None
            if found is None or (fault["imported"] and not found):
                found = _alone(tests, ends)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what is compiled of it still holds
        if found not in tests or found in passing or not _forked([items[found]], None, ends + LONG_S):
            passing.add(found)
            return found
        failing.add(found)
    return ""


def _forked(items: Sequence[pytest.Item], path: Path | None, ends: float) -> str | None:
    """Return the first test that fails in a fork of this process with the code of ``path``; empty where all pass.

    None if no function that there is already has other code by that.
    """
    _functions()
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setsid()
            if path is not None and not _put_in(path):
                os._exit(ABSENT)
            telling.append(write)
            for item, after in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            os.write(write, PASSED)
            os._exit(0)
        finally:
            os._exit(2)
    os.close(write)
    told = os.read(read, 10**4) if select.select([read], [], [], max(1, ends - time.monotonic()))[0] else PASSED
    os.close(read)
    if told:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what tests have left
    _swept()
    if not told:
        return None if code == ABSENT else f"a crash, {code}"
    return "" if told == PASSED else told.decode()


def _put_in(path: Path) -> bool:
    """Give the functions of a module the code that its file has now; whether any of them has changed by that."""
    codes = defaultdict(list)

    def walk(code: CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                codes[inner.co_qualname].append(inner)
                walk(inner)

    walk(compile(path.read_text(), str(path), "exec", dont_inherit=True))
    changed, defaults = False, _defaults(path.read_text())
    for name, same in _functions()[str(path)].items():
        olds = sorted({x.__code__ for x in same}, key=lambda x: x.co_firstlineno)
        if len(olds) == len(codes[name]):
            for function in same:
                new = codes[name][olds.index(function.__code__)]
                if len(new.co_freevars) == len(function.__code__.co_freevars):
                    changed |= new != function.__code__
                    function.__code__ = new
        if len(olds) == 1 and name in defaults:
            for function in same:
                was = function.__defaults__ or (), function.__kwdefaults__ or {}
                changed |= was != defaults[name]
                function.__defaults__, function.__kwdefaults__ = defaults[name]
    return changed


def _defaults(source: str) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the defaults of functions by their qualified names, as far as they are constants."""
    found = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef):
                with suppress(ValueError):
                    named = zip(inner.args.kwonlyargs, inner.args.kw_defaults, strict=True)
                    found[f"{prefix}{inner.name}"] = (
                        tuple(map(ast.literal_eval, inner.args.defaults)),
                        {arg.arg: ast.literal_eval(value) for arg, value in named if value is not None},
                    )
                walk(inner, f"{prefix}{inner.name}.<locals>.")
            else:
                walk(inner, f"{prefix}{inner.name}." if isinstance(inner, ast.ClassDef) else prefix)

    walk(ast.parse(source), "")
    return found


@cache
def _functions() -> dict[str, dict[str, list[FunctionType]]]:
    """Return the functions that there are, by file and qualified name."""
    found: dict[str, dict[str, list[FunctionType]]] = defaultdict(lambda: defaultdict(list))
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is FunctionType:
            found[each.__code__.co_filename][each.__code__.co_qualname].append(each)
    gc.collect()
    gc.freeze()
    return found


def _alone(tests: Sequence[str], ends: float) -> str:
    """Return the first test that fails in a process of its own, or what else does."""
    about = {x: y for x, y in os.environ.items() if not x.startswith("MUTATION")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--timeout={LONG_S}"]
    try:
        done = subprocess.run(
            [*command, *tests], env=about, capture_output=True, text=True, timeout=max(1, ends - time.monotonic())
        )
    except subprocess.TimeoutExpired:
        return ""
    finally:
        _swept()
    lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))] or ["a crash"]
    return lines[0].removeprefix("FAILED ").partition(" - ")[0] if done.returncode else ""


def _swept() -> None:
    """Take away the files of tests that were ended."""
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)
