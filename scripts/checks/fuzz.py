"""Break files and command lines at random, and say which commands don't end as they have to.

    python scripts/checks/fuzz.py [readers] [commands] [--count N] [--seconds N] [--seed S] [--from I] [--jobs 2]
                                  [--keep FOLDER]

readers: broken files of every kind, each with a command that reads it. commands: random options, values and files for
every command. The rules are those of ``tests/cases/fuzz/judge.py``: no traceback, no warning, an exit code that the
README lists, one sentence that names the file, nothing written on failure, what was written is read back; at most 10 s
of CPU and 1 GB of memory. Commands run in forked processes, some hundreds in each; one that dies or never ends is a
fault of the input that it was at.

The same seed and index give the same input (``--from I --count 1`` tries one again); what fails is kept in FOLDER.
The exit code is 1 when something failed.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["COLUMNS"] = "120"
os.environ["OMP_NUM_THREADS"] = "1"

from cases.fuzz.commands import Commands  # noqa: E402  after the path
from cases.fuzz.readers import Readers  # noqa: E402

import pipeplan  # noqa: E402
from pipeplan.planner.what_if import alternatives  # noqa: E402

SOURCES: dict[str, Any] = {"readers": Readers, "commands": Commands}
BATCH = 1000  # inputs in one process
ALLOWED = 3 * 10**9  # bytes that a process may map beyond what it begins with; more is a MemoryError, and so a fault
PATIENCE = 300.0  # seconds without news after which a process is given up
FORKS = multiprocessing.get_context("fork")


@dataclass
class Worker:
    """A process for the inputs from ``at`` to ``stop``, and when it last told where it is."""

    process: Any
    at: int
    stop: int
    heard: float


@dataclass
class Tally:
    """What was tried and found."""

    kinds: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    slowest: tuple[float, int] = (0.0, 0)
    largest: tuple[int, int] = (0, 0)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="|".join(SOURCES), help="default: both")
    parser.add_argument("--count", type=int, help="inputs of each")
    parser.add_argument(
        "--seconds", type=float, help="for each, where that ends before --count; default: 60 without one"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from", dest="first", type=int, default=0, help="index of the first input")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "pipeplan-fuzz")
    options = parser.parse_args()
    if options.seconds is None:
        options.seconds = 60.0 if options.count is None else float("inf")
    options.count = options.count or 10**9
    if unknown := set(options.what) - set(SOURCES):
        parser.error(f"no such inputs: {', '.join(unknown)}")
    options.keep.mkdir(parents=True, exist_ok=True)
    for module in walk_packages(pipeplan.__path__, "pipeplan."):  # once for all processes
        if not module.name.endswith("__main__"):
            import_module(module.name)
    gc.freeze()
    return min(1, sum(_fuzz(what, options) for what in options.what or SOURCES))


def _fuzz(what: str, options: argparse.Namespace) -> bool:
    """Try inputs in processes until time or count is up, print what was found and return whether anything failed."""
    tally = Tally()
    began, at, last = time.monotonic(), options.first, options.first + options.count
    with tempfile.TemporaryDirectory() as folder:
        source = SOURCES[what](Path(folder))
        if what == "readers":
            alternatives.COMPARED = []  # these searches come after what is read, and take most of the time
        running: dict[Connection, Worker] = {}
        while running or (at < last and time.monotonic() - began < options.seconds):
            while len(running) < options.jobs and at < last and time.monotonic() - began < options.seconds:
                running |= _started(source, options.seed, at, min(last, at + BATCH))
                at = min(last, at + BATCH)
            for connection in wait(list(running), timeout=1):
                worker = running[connection]
                try:
                    worker.at, news = connection.recv()
                except EOFError:
                    worker.process.join()
                    del running[connection]
                    if worker.process.exitcode:
                        _report(tally, source, what, options, worker.at, [f"ended with {worker.process.exitcode}"])
                        running |= _started(source, options.seed, worker.at + 1, worker.stop)
                    continue
                worker.heard = time.monotonic()
                if news is not None:
                    _count(tally, worker.at, *news[:3])
                    _report(tally, source, what, options, worker.at, news[3])
            for worker in running.values():
                if time.monotonic() - worker.heard > PATIENCE:
                    worker.process.kill()
    print(
        f"{what}, seed {options.seed}: {tally.kinds.total()} inputs from {options.first} on in "
        f"{time.monotonic() - began:.0f} s ({', '.join(f'{n} {kind}' for kind, n in sorted(tally.kinds.items()))}); "
        f"{tally.failed} failed; slowest {tally.slowest[0]:.1f} s of CPU (input {tally.slowest[1]}), "
        f"most memory {tally.largest[0] / 1e9:.2f} GB (input {tally.largest[1]})"
    )
    return tally.failed > 0


def _started(source: Any, seed: int, start: int, stop: int) -> dict[Connection, Worker]:
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_work, args=(source, seed, start, stop, there), daemon=True)
    process.start()
    there.close()
    return {here: Worker(process, start, stop, time.monotonic())}


def _work(source: Any, seed: int, start: int, stop: int, news: Connection) -> None:
    """Try inputs, in a folder of this process's own; tell of each before and after."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ALLOWED, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source.folder, folder, dirs_exist_ok=True)
        source.folder = Path(folder)
        for index in range(start, stop):
            news.send((index, None))
            began = time.process_time()
            case = source.case(seed, index)
            faults = source.faults(case)
            held = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            news.send((index, (case.kind, time.process_time() - began, held, faults)))


def _count(tally: Tally, index: int, kind: str, seconds: float, held: int) -> None:
    tally.kinds[kind] += 1
    tally.slowest = max(tally.slowest, (seconds, index))
    tally.largest = max(tally.largest, (held, index))


def _report(tally: Tally, source: Any, what: str, options: argparse.Namespace, index: int, faults: list[str]) -> None:
    """Print and keep an input that failed."""
    if not faults:
        return
    tally.failed += 1
    case = source.case(options.seed, index)
    kept = options.keep / f"{what}-{options.seed}-{index}{Path(case.name).suffix}"
    kept.write_bytes(case.data)
    print(f"input {index}: pipeplan {' '.join(case.arguments)[:500]!r} (file or standard input: {kept})")
    for fault in faults:
        print(f"    {fault[:1000]!r}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
