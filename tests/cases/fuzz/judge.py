"""Did a command end as every command has to? It runs in this process, and what it did is held against the rules.

No traceback, no warning, an exit code that the README lists, one sentence where something is wrong, nothing written on
failure, what was written can be read back; within :data:`SECONDS` of CPU and :data:`BYTES` of memory.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.cli import main
from pipeplan.errors import PipeplanError
from pipeplan.files.plans import load_plan
from pipeplan.files.profiles import read_profile

SECONDS = 10.0
BYTES = 10**9
CODES = (0, 1, 2)  # 130 and 141 are for those who interrupt or close a pipe
LONGEST_LINE, LONGEST = 2000, 20_000  # characters of an error
Snapshot = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A command, and what is in the file ``name`` and on standard input: of which kind that is, or which command."""

    kind: str
    name: str
    data: bytes
    arguments: tuple[str, ...]


class TooSlow(BaseException):
    """Raised in what takes too long; not an Exception, so that nothing takes it for its own."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended: exit code and output of a command, and what went wrong that has no exit code."""

    code: int | None
    out: str
    err: str
    seconds: float
    grown: int  # bytes of memory beyond the most that this process had held before
    raised: str | None = None
    warned: tuple[str, ...] = ()


def called(arguments: Sequence[str], folder: Path, stdin: bytes = b"") -> Outcome:
    """Run ``pipeplan ARGUMENTS`` in this process, inside ``folder``."""

    def command() -> None:
        sys.argv = ["pipeplan", *arguments]
        main()

    return watched(command, folder, stdin)


def watched(function: Callable[[], Any], folder: Path, stdin: bytes = b"") -> Outcome:
    """Call ``function`` inside ``folder`` with standard streams of its own, and say how it ended."""
    code: int | None = 0
    raised = None
    before, began = _memory(), time.process_time()
    argv, streams = sys.argv, (sys.stdin, sys.stdout, sys.stderr)
    out, err = _stream(b"", "strict"), _stream(b"", "backslashreplace")
    sys.stdin, sys.stdout, sys.stderr = _stream(stdin, "strict"), out, err
    with chdir(folder), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            with _at_most(SECONDS):
                function()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else None
        except TooSlow:
            raised = f"took more than {SECONDS:.0f} s of CPU: {_where(sys.exc_info()[1])}"
        except BaseException as error:
            raised = f"{type(error).__name__}: {str(error)[:300]}: {_where(error)}"
        finally:
            sys.argv, (sys.stdin, sys.stdout, sys.stderr) = argv, streams
    texts = []
    for stream in (out, err):
        with suppress(ValueError, OSError):
            stream.flush()
        texts.append(stream.buffer.getvalue().decode(errors="backslashreplace"))  # type: ignore[attr-defined]
    said = tuple(f"{x.category.__name__}: {x.message} in {x.filename}:{x.lineno}" for x in found)
    return Outcome(code, *texts, time.process_time() - began, max(0, _memory() - before), raised, said)


def _stream(data: bytes, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=errors, newline="\n")


def _memory() -> int:
    """Return the most bytes that this process or one that it waited for has held."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again, should a handler or a destructor have swallowed it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _where(error: BaseException | None) -> str:
    frames = traceback.extract_tb(error.__traceback__ if error is not None else None)[-3:]
    return " > ".join(f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in frames)


def snapshot(*folders: Path) -> Snapshot:
    """Return size and time of everything in ``folders``."""
    return {
        entry.path: (entry.stat().st_size, entry.stat().st_mtime_ns)
        for folder in folders
        for entry in os.scandir(folder)
        if entry.is_file() or entry.is_dir()
    }


def faults(
    outcome: Outcome,
    before: Snapshot,
    after: Snapshot,
    names: Sequence[str] = (),
    outputs: Sequence[str] = (),
    debugged: bool = False,
) -> list[str]:
    """Return which rules were broken; where input is refused, one of the files ``names``, if any, has to be named.

    Only ``outputs`` may be new or changed, and only on success; only who asks for it (``debugged``) gets a traceback.
    """
    found = []
    if outcome.raised is not None:
        found.append(outcome.raised)
    elif outcome.code not in CODES:
        found.append(f"exit code {outcome.code}")
    if "Traceback (most recent call last)" in outcome.out + outcome.err and not debugged:
        found.append("a traceback is printed")
    found += [f"warned: {text}" for text in outcome.warned]
    if outcome.grown > BYTES:
        found.append(f"held {outcome.grown / 1e9:.1f} GB more than before")
    failed = outcome.raised is None and outcome.code not in (0, None)
    found += _of_errors(outcome, names) if failed else []
    changed = [path for path, value in after.items() if before.get(path) != value]
    changed += [path for path in before if path not in after]
    if changed and failed:
        found.append(f"failed, but wrote {sorted(changed)}")
    others = [path for path in changed if Path(path).name not in outputs]
    if others:
        found.append(f"wrote {sorted(others)}, which nobody asked for")
    control = sorted({c for c in outcome.out + outcome.err if unicodedata.category(c) == "Cc" and c not in "\n\t"})
    if control:
        found.append(f"prints control characters {control}")
    return found


def _of_errors(outcome: Outcome, names: Sequence[str]) -> list[str]:
    said = outcome.err or outcome.out
    found = []
    lines = outcome.err.splitlines()
    if not said.strip():
        found.append("failed without a word")
    if outcome.code == 2 and not any(line.lower().startswith("error: ") for line in lines):
        found.append(f"no error is named: {outcome.err[:200]!r}")
    if len(outcome.err) > LONGEST or any(len(line) > LONGEST_LINE for line in lines):
        found.append(f"an error of {len(outcome.err)} characters, {max(map(len, lines))} in one line")
    if outcome.code == 2 and names and not any(name in said for name in names):
        found.append(f"names none of {', '.join(names)}: {said[-300:]!r}")
    return found


def written_faults(outcome: Outcome, arguments: Sequence[str], folder: Path) -> list[str]:
    """Return what is wrong with the JSON that a command printed or wrote: not strict, or refused when read back."""
    if outcome.code != 0 or outcome.raised is not None:
        return []
    found = []
    if "--json" in arguments and outcome.out[:6] not in ("", "Usage:") and (wrong := unreadable(outcome.out)):
        found.append(f"printed no JSON: {wrong}")
    for path in folder.glob("out*.json"):
        text = path.read_text()
        if text[:1] not in ("{", "["):
            continue  # a page or a table under that name
        if wrong := unreadable(text):
            found.append(f"wrote no JSON: {wrong}")
            continue
        try:
            if '"pipeplan-plan/1"' in text[:100]:
                load_plan(str(path))
            elif '"pipeplan-profile/1"' in text[:100]:
                read_profile(str(path))
        except PipeplanError as error:
            found.append(f"wrote what is refused: {error}")
    return found


def unreadable(text: str) -> str | None:
    """Return why ``text`` isn't strict JSON, if it isn't."""
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return f"{error}: {text[:100]!r}"
    return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
