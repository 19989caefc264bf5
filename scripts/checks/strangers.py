"""Start runs while a process of another user sits at every door, silent.

    python scripts/checks/strangers.py [--starts 20]

The stranger looks every 20 ms for what has begun to listen on this machine (TCP, and sockets by path or abstract name),
connects to it, sends nothing, or a few bytes every second time, and stays. All runs must train, with the losses of one
without a stranger. Needs root, which the stranger gives up for the user nobody, and torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NOBODY = 65534
PLAN = "example:gpt-tiny --gpus 2 --mem 1GB --algorithm balance --weights flush --accumulate 2 -o plan.json"
RUN = "plan.json --steps 3 --device cpu --timeout 60s"
SECONDS = 600


def doors() -> set[tuple[int, Any]]:
    """Return the family and address of everything that listens here."""
    found: set[tuple[int, Any]] = set()
    for name, family, host in (("tcp", socket.AF_INET, "127.0.0.1"), ("tcp6", socket.AF_INET6, "::1")):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A":
                    found.add((family, (host, int(local.rpartition(":")[2], 16))))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        if len(parts) == 8 and parts[3] == "00010000":  # which listens
            found.add((socket.AF_UNIX, parts[7].replace("@", "\0", 1) if parts[7].startswith("@") else parts[7]))
    return found


def stranger(known: set[tuple[int, Any]], told: Any) -> None:
    """Connect to each door that isn't known, and stay; tell of each that let this user in."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    held = []
    for number in count():
        for door in doors() - known:
            known.add(door)
            with suppress(OSError):
                came = socket.socket(door[0], socket.SOCK_STREAM)
                came.settimeout(1)
                came.connect(door[1])
                if number % 2:
                    came.send(b"\0\xff?")
                held.append(came)
                told.send(str(door[1]))
        time.sleep(0.02)


def trained(folder: Path) -> tuple[int, list[str], str]:
    """Return the exit code of a run, its losses, and what it says."""
    line = [sys.executable, "-m", "pipeplan", "run", *RUN.split(), "--json"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, re.findall(r'"loss": ([-\d.e]+)', done.stderr), done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20)
    starts = parser.parse_args().starts
    failed, came = 0, 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "pipeplan", "plan", *PLAN.split()], cwd=folder, check=True, timeout=SECONDS
        )
        _, losses, _ = trained(folder)
        assert losses, "a run alone must train"
        for start in range(starts):
            here, there = multiprocessing.Pipe(duplex=False)
            beside = multiprocessing.Process(target=stranger, args=(doors(), there), daemon=True)
            beside.start()
            code, found, said = trained(folder)
            beside.kill()
            beside.join()
            there.close()
            inside = []
            with suppress(EOFError):
                while here.poll():
                    inside.append(here.recv())
            came += len(inside)
            good = code == 0 and found == losses
            failed += not good
            print(
                f"start {start}: {'trained' if good else f'ended with {code}: {said[-500:]}'}; in at {inside}",
                flush=True,
            )
    print(f"{starts} starts, {came} doors let a stranger in; {failed} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
