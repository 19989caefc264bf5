"""Start runs while a process of another user sits at every door, silent.

    python scripts/checks/strangers.py [--starts 20]

Every 20 ms it is told on what the run's processes have begun to listen (TCP, and sockets by path or abstract name),
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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NOBODY = 65534
PLAN = "example:gpt-tiny --gpus 2 --mem 1GB --algorithm balance --weights flush --accumulate 2 -o plan.json"
RUN = "plan.json --steps 3 --device cpu --timeout 60s"
SECONDS = 600


def doors(group: int) -> set[tuple[int, Any]]:
    """Return the family and address of everything on which a process of a group listens."""
    theirs, found = set(), set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                theirs |= {os.readlink(x) for x in (path / "fd").iterdir()}
    for name, family, host in (("tcp", socket.AF_INET, "127.0.0.1"), ("tcp6", socket.AF_INET6, "::1")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in theirs:
                found.add((family, (host, int(local.rpartition(":")[2], 16))))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        if len(parts) == 8 and parts[3] == "00010000" and f"socket:[{parts[6]}]" in theirs:
            found.add((socket.AF_UNIX, "\0" + parts[7][1:] if parts[7].startswith("@") else parts[7]))
    return found


def stranger(asked: Any) -> None:
    """Connect to each door that is asked for, and stay; answer with those that let this user in."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    held: list[socket.socket] = []
    for family, address in iter(asked.recv, None):
        with suppress(OSError):
            came = socket.socket(family, socket.SOCK_STREAM)
            came.settimeout(1)
            came.connect(address)
            if len(held) % 2:
                came.send(b"\0\xff?")
            held.append(came)
    asked.send(len(held))


def trained(folder: Path, beside: Any = None) -> tuple[int, list[str], str]:
    """Return the exit code of a run, its losses, and what it says; tell who is ``beside`` it of its doors."""
    line, known = [sys.executable, "-m", "pipeplan", "run", *RUN.split(), "--json"], set[tuple[int, Any]]()
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True) as run,
    ):
        while run.poll() is None:
            for door in doors(run.pid) - known if beside else ():
                known.add(door)
                beside.send(door)
            time.sleep(0.02)
    text = (folder / "said").read_text()
    return run.returncode, re.findall(r'"loss": ([-\d.e]+)', text), text


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
            here, there = multiprocessing.Pipe()
            beside = multiprocessing.Process(target=stranger, args=(there,), daemon=True)
            beside.start()
            code, found, said = trained(folder, here)
            here.send(None)
            came += (inside := here.recv())
            beside.kill()
            beside.join()
            good = code == 0 and found == losses
            failed += not good
            print(f"start {start}: {'trained' if good else f'ended with {code}: {said[-500:]}'}; in at {inside} doors")
    print(f"{starts} starts, {came} doors let a stranger in; {failed} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
