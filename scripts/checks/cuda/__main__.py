"""Ask a machine with GPUs what tests elsewhere cannot tell, in the order of what is learnt per second.

    python scripts/checks/cuda WORK [--results FILE] [--known FILE] [--seconds N] [--part NAME]... [--device cpu]
    python scripts/checks/cuda WORK --nodes 2 --node-rank K --master HOST[:PORT]

Each part asks one question and answers it in a sentence with figures. All answers are in one file, --results (by
default WORK/results.json), which is whole after every part; bring it home, and give it back with --known on the next
machine: what was good there is not done again. Plans and other large files are in WORK and can be thrown away.
Parts are good, failed, left out for want of something that this machine could have, open where they want more GPUs, or
not reached within --seconds. The exit code is 0 if all are good or open, 1 if one failed, 3 if some were left out or
not reached. With two GPUs or more the parts over NCCL come first.

With --nodes the same is started on every node with its own K; WORK is shared. --device cpu rehearses all on small
models, and so does --small on GPUs in software: python tests/softgpu/build.py 1 python scripts/checks/cuda WORK
--small.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    """Read the command line, and ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", help="a folder for plans and other large files")
    parser.add_argument("--results", metavar="FILE", help="where the answers are written")
    parser.add_argument("--known", metavar="FILE", help="answers of before")
    parser.add_argument("--part", action="append", dest="chosen", metavar="NAME", help="those alone that begin so")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="be through by then")
    parser.add_argument("--again", action="store_true", help="ask what was good before, too")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small models on GPUs, too: those may be in software")
    parser.add_argument("--nodes", type=int, metavar="N", help="check N nodes, of which this is one")
    parser.add_argument("--node-rank", type=int, default=0, metavar="K")
    parser.add_argument("--master", default="localhost:29500", metavar="HOST[:PORT]", help="node 0; 16 ports from PORT")
    arguments = parser.parse_args()
    folder = Path(arguments.work).resolve()
    os.environ |= {"CHECKED_FOLDER": str(folder), "CHECKED_DEVICE": arguments.device}
    os.environ |= {"CHECKED_SMALL": "1"} if arguments.small else {}  # both before models are chosen by them
    sys.path.append(str(Path(__file__).resolve().parents[3]))  # pipeplan, where it isn't installed
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("cuda: torch sees no GPU here; --device cpu rehearses the checks", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    from asking import ask

    return ask(arguments, folder)


if __name__ == "__main__":
    sys.exit(main())
