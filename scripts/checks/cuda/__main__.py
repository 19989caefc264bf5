"""Check on a machine with GPUs what tests elsewhere cannot, in the order in which it would break.

    python scripts/checks/cuda FOLDER [--part NAME]... [--seconds N] [--again] [--device cpu]
    python scripts/checks/cuda FOLDER --nodes 2 --node-rank K --master HOST[:PORT]

Each part asks one question and answers it in a sentence, which is printed, and written with its figures to
FOLDER/PART.json; what pipeplan said is in FOLDER/commands.log. A part that was good before is not done again, so that a
broken check goes on where it was. Ranks share a GPU where there are too few, and exchange through the host; parts that
need what isn't here say so. The exit code is 1 if a part failed or time ran out before it.

With --nodes the same is started on every node with its own K; FOLDER is shared. ``--device cpu`` rehearses all on small
models, in minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checking import Check, Outcome, Skipped
from device_parts import DEVICE
from fault_parts import FAULTS
from node_parts import folder_of, nodes_from, parts_of
from run_parts import RUNS, SEVERAL

Part = Callable[[Check], Outcome]


def question(part: Part) -> str:
    """Return what a part asks: the first line of its docstring."""
    code = part.func if isinstance(part, partial) else part
    return (code.__doc__ or "").partition("\n")[0]


def label(check: Check) -> str:
    """Return on what results hold."""
    return f"{torch.cuda.get_device_name() if check.kind == 'cuda' else 'cpu'}, torch {torch.__version__}"


def known(file: Path, here: str) -> dict[str, Any] | None:
    """Return the good result that there is already, None without one."""
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found if found is not None and found["good"] and found["on"] == here else None


def answer(check: Check, name: str, part: Part) -> dict[str, Any]:
    """Do a part and return its result."""
    begin = time.monotonic()
    good, figures, trace = True, {}, None
    try:
        outcome = part(check)
        sentence, figures = outcome.sentence, outcome.figures
    except Skipped as why:
        sentence = f"left out: {why}"
    except Exception as error:
        good, sentence, trace = False, f"{type(error).__name__}: {error}", traceback.format_exc()
    seconds = round(time.monotonic() - begin, 1)
    result = {"part": name, "question": question(part), "good": good, "sentence": sentence, "seconds": seconds}
    return result | {"on": label(check), "figures": figures, "trace": trace}


def written(file: Path, result: dict[str, Any]) -> None:
    """Write a result, whole or not at all."""
    half = file.with_suffix(".tmp")
    half.write_text(json.dumps(result, indent=1, default=str) + "\n")
    half.replace(file)


def main() -> int:
    """Go through the parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--part", action="append", dest="chosen", metavar="NAME", help="those alone that begin so")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further part after that time")
    parser.add_argument("--again", action="store_true", help="do what was good before, too")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--nodes", type=int, metavar="N", help="check N nodes, of which this is one")
    parser.add_argument("--node-rank", type=int, default=0, metavar="K")
    parser.add_argument("--master", default="localhost:29500", metavar="HOST[:PORT]", help="node 0; 16 ports from PORT")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("cuda: torch sees no GPU here; --device cpu rehearses the checks", file=sys.stderr)
        return 1
    check = Check(folder_of(arguments.folder), arguments.device)
    parts: dict[str, Part] = {**DEVICE, **RUNS, **FAULTS, **SEVERAL}
    if arguments.nodes is not None:
        parts = parts_of(nodes_from(arguments.nodes, arguments.node_rank, arguments.master))
    if arguments.chosen:
        parts = {name: part for name, part in parts.items() if name.startswith(tuple(arguments.chosen))}
    before = {} if arguments.again else {name: known(check.folder / f"{name}.json", label(check)) for name in parts}
    begin, failed = time.monotonic(), 0
    for name, part in parts.items():
        result = before.get(name)
        if result is not None:
            print(f"{name} (before): {result['sentence']}", flush=True)
            continue
        if time.monotonic() - begin > arguments.seconds:
            failed += 1
            print(f"{name} NOT DONE: out of time", flush=True)
            continue
        result = answer(check, name, part)
        written(check.folder / f"{name}.json", result)
        failed += not result["good"]
        print(f"{name}{'' if result['good'] else ' FAILED'} ({result['seconds']} s): {result['sentence']}", flush=True)
        if check.kind == "cuda":
            torch.cuda.empty_cache()
    print(f"{len(parts) - failed} of {len(parts)} parts are good", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
