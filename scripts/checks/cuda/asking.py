"""How are the parts asked, one after the other, within the time that there is?"""

from __future__ import annotations

import argparse
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checking import Check, Part, Skipped, TooFewGpus
from constant_parts import CONSTANTS
from device_parts import DEVICE
from fault_parts import FAULTS
from memory_parts import MEMORY
from node_parts import nodes_from, parts_of
from overlap_parts import OVERLAP
from results import LEFT_OUT, NOT_REACHED, OPEN, Results, State, label
from run_parts import RUNS, SEVERAL
from semantics_parts import SEMANTICS

HOPE = 3  # times quicker than it is thought to be, a part may be
PATIENCE = {"cuda": 3, "cpu": 40}  # times what a part is thought to take; a rehearsal shares its machine
FIRST = ("hardware", "nccl", "randomness")


class Late(Exception):
    """A part took longer than it may."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Late in this thread when the context takes longer."""

    def late(*_: Any) -> None:
        raise Late(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def done(check: Check, results: Results, name: str, part: Part, seconds: float) -> None:
    """Do a part and write its answer down."""
    begin = time.monotonic()
    state: State = "good"
    figures: dict[str, Any] = {}
    trace = None
    try:
        if part.gpus > check.gpus and not (check.kind == "cpu" and part.rehearsed):
            raise TooFewGpus(f"it takes {part.gpus} GPU{'s' * (part.gpus > 1)}, and there are {check.gpus}")
        with within(seconds):
            outcome = part.ask(check)
        sentence, figures = outcome.sentence, outcome.figures
    except TooFewGpus as why:
        state, sentence = OPEN, str(why)
    except Skipped as why:
        state, sentence = LEFT_OUT, str(why)
    except Exception as error:
        state, sentence, trace = "failed", f"{type(error).__name__}: {error}", traceback.format_exc()
    took = round(time.monotonic() - begin, 1)
    results.put(name, state, sentence, question=part.question, seconds=took, figures=figures, trace=trace)
    print(f"{name}{'' if state == 'good' else f' {state.upper()}'} ({took} s): {sentence}", flush=True)
    check.clean()


def ordered(check: Check) -> Mapping[str, Part]:
    """Return the parts in the order in which they are asked."""
    whole = {**DEVICE, **CONSTANTS, **MEMORY, **SEMANTICS, **RUNS, **FAULTS, **OVERLAP, **SEVERAL}
    several = [name for name, part in whole.items() if part.gpus > 1] if check.gpus > 1 else []
    return {name: whole[name] for name in dict.fromkeys([*FIRST, *several, *whole])}


def ask(arguments: argparse.Namespace, folder: Path) -> int:
    """Go through the parts and return the exit code."""
    begin = time.monotonic()
    check = Check(folder, arguments.device)
    if check.kind == "cpu":
        torch.set_num_threads(1)  # as ranks do: a rehearsal shares its machine
    results = Results(Path(arguments.results or folder / "results.json"), label(check.kind, check.gpus))
    for known in (results.file, arguments.known and Path(arguments.known)):
        if known and known.exists():
            results.take_over(known)
    parts, patience = ordered(check), PATIENCE[check.kind]
    if arguments.nodes is not None:
        parts = parts_of(nodes_from(arguments.nodes, arguments.node_rank, arguments.master))
    if arguments.chosen:
        parts = {name: part for name, part in parts.items() if name.startswith(tuple(arguments.chosen))}
    for name, part in parts.items():
        left = arguments.seconds - (time.monotonic() - begin)
        if results.has_good(name) and not arguments.again:
            print(f"{name} (before): {results.parts[name]['sentence']}", flush=True)
        elif left < part.seconds / HOPE:
            results.put(name, NOT_REACHED, f"{left:.0f} s were left, it takes {part.seconds}", question=part.question)
        else:
            done(check, results, name, part, min(left, patience * part.seconds))
    counts = ", ".join(f"{n} {state}" for state, n in results.summary().items())
    print(f"{counts}, in {time.monotonic() - begin:.0f} s: {results.on}; {results.file}")
    return results.exit_code(parts)
