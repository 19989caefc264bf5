"""Train for long with a trace, TensorBoard and checkpoints, and say what grows: memory, descriptors, threads, files.

    python scripts/checks/soak.py [--microbatches 20000]

Two processes train a small network. Every half second the descriptors, threads and private memory of all processes of
the run are counted, and the files that they have in folders for temporary files and shared memory. The median of the
last fifth may be above that of the second fifth by no descriptor, thread or file, and by 3% of the memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

MODEL = """
from torch import nn, randint, randn

def build(batch):
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), randn(batch, 32), nn.functional.cross_entropy

def data(index, seed):
    return randn(4, 32), randint(32, (4,))
"""
PROFILE = "mymodel:build --microbatch 4 --estimate a100 -q -o profile.json"
PLAN = "profile.json --gpus 2 --mem 1GB --algorithm balance --weights 2bw --accumulate 4 -o plan.json"
RUN = "plan.json --model mymodel:build --data mymodel:data --device cpu --trace trace.json"
MAY_GROW = {"memory": 1.03, "descriptors": 1.0, "threads": 1.0, "files": 1.0}


def of_group(group: int) -> list[Path]:
    """Return the folders in /proc of all processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(path)
    return found


def counted(group: int, folder: Path) -> dict[str, float]:
    """Return what the processes of a group have now."""
    found = dict.fromkeys(MAY_GROW, 0.0)
    for path in of_group(group):
        with suppress(OSError, KeyError):  # one that has just ended
            lines = dict(x.split(":", 1) for x in (path / "status").read_text().splitlines())
            found["threads"] += int(lines["Threads"])
            found["descriptors"] += len(os.listdir(path / "fd"))
            found["memory"] += int(lines["RssAnon"].split()[0])
    found["files"] = sum(len(names) for _, _, names in os.walk(folder / "tmp")) + len(os.listdir("/dev/shm"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=20_000)
    steps = parser.parse_args().microbatches // 4
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mymodel.py").write_text(MODEL)
        (folder / "tmp").mkdir()
        line = [sys.executable, "-m", "pipeplan"]
        for words in (f"profile {PROFILE}", f"plan {PLAN}"):
            subprocess.run([*line, *words.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        more = ["--log-dir", "logs"] if find_spec("tensorboard") else []
        print("with a trace, checkpoints" + (" and TensorBoard" if more else "; TensorBoard isn't installed"))
        often = ["--steps", str(steps), "--checkpoint", "kept", "--checkpoint-every", str(steps // 20), *more]
        began = time.monotonic()
        with subprocess.Popen(
            [*line, "run", *RUN.split(), *often, "--keep-checkpoints", "2"],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as run:
            seen = []
            try:
                while run.poll() is None:
                    seen.append(counted(run.pid, folder))
                    time.sleep(0.5)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)
            assert run.stdout is not None
            said = run.stdout.readline().strip()
        print(f"{said or 'no report'}; exit code {run.returncode}, {time.monotonic() - began:.0f} s, {len(seen)} looks")
        wrong = run.returncode
        usual, _ = Counter(x["threads"] for x in seen).most_common(1)[0]  # while ranks train
        training = [x for x in seen if x["threads"] == usual]
        fifth = len(training) // 5
        for what, factor in MAY_GROW.items():
            early, late = (median(x[what] for x in part) for part in (training[fifth : 2 * fifth], training[-fifth:]))
            grew = late > early * factor
            wrong += grew
            print(f"{what}: {early:.0f} in the second fifth, {late:.0f} in the last{', which is more' if grew else ''}")
        time.sleep(2)  # for those that see the others end
        left = [str(x.relative_to(folder)) for x in (folder / "tmp").rglob("*")] + list(map(str, of_group(run.pid)))
        print(f"left behind: {left or 'nothing'}")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
