"""Fixtures that several test files use."""

from __future__ import annotations

import fcntl
import gc
import io
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
os.environ["COLUMNS"] = "120"  # as wide as no terminal, or one, would happen to be
os.environ["OMP_NUM_THREADS"] = "1"  # of what tests start; torch, where it is loaded here, reads it too
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # this checkout
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in the background or under nohup; inherited by what tests start,
        signal.signal(number, handler)  # which has its defaults again where there is a handler here

gc.set_threshold(10**5, 50, 100)  # as the command has it

preload = forkserver.set_forkserver_preload  # what tests' models import each rank would, for a second
forkserver.set_forkserver_preload = lambda modules: preload([*modules, "tests.cases.preloaded"])

Command = Callable[..., tuple[int, str, str]]
LONG = (  # with which one process of scripts/test each begins, so that none is left with them at the end
    "test_docs.py", "test_softgpu.py", "test_layers_together.py", "test_segments.py",
)  # fmt: skip
OF_OTHER_WEIGHTS = {
    "test_docs.py", "test_explain.py", "test_interval.py", "test_least_late.py", "test_printed.py",
    "test_printed_plans.py", "test_printed_runs.py", "test_refused.py", "test_run_command.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each of the files that take longest in front of an equal share of all tests."""
    rest = iter([item for item in items if item.path.name not in LONG])
    share, order = len(items) // len(LONG), []
    for name in LONG:
        own = [item for item in items if item.path.name == name]
        order += [*own, *islice(rest, max(0, share - len(own)))]
    items[:] = [*order, *rest]


def pytest_collection_finish() -> None:
    """Leave out of all collections of garbage to come what all tests need."""
    import_module("pipeplan.planner.what_if.compare")  # which would keep what plans_alone sets where a test loads it
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch, in files that use it, run on one thread, as the processes of a pipeline do."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` fills, once for all processes that share a session's tests."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            half = own / f"half-{name}"
            half.mkdir()
            make(half)
            half.rename(folder)
    return folder


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ``good`` files, and the ``names`` of each kind of them."""
    from cases.fuzz.good import good_files

    def make(folder: Path) -> None:
        (folder / "files").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeplan.planner.least_late.drained_quickly", lambda *_: None)  # as in plans_alone
            (folder / "names.json").write_text(json.dumps(good_files(folder / "files")))

    return made_once(tmp_path_factory, "good", make)


@pytest.fixture(autouse=True)
def plans_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans say nothing of other weights, for which is searched behind them, mostly for longer than for them: but
    for the tests of what they say."""
    if request.path.name not in OF_OTHER_WEIGHTS:
        monkeypatch.setattr("pipeplan.planner.what_if.alternatives.COMPARED", [])
        monkeypatch.setattr("pipeplan.planner.least_late.drained_quickly", lambda *_: None)


@pytest.fixture
def pipeplan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process: ``pipeplan("plan", ..., stdin="")`` gives (exit code, stdout, stderr)."""
    from pipeplan.cli import main

    monkeypatch.setattr("pipeplan.cli.showing.QUIET_S", math.inf)  # however busy the machine, no line of progress

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeplan", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


@pytest.fixture(scope="session")
def command_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of those commands whose output is kept."""
    pytest.importorskip("torch")
    from cases.printed import files

    own = tmp_path_factory.mktemp("printed")  # a command writes beside them, which others must not see
    return shutil.copytree(made_once(tmp_path_factory, "command-files", files), own, dirs_exist_ok=True)
