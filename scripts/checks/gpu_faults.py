"""Leave out, one after the other, what orders a GPU's work, and see whether runs on GPUs in software tell.

    python scripts/checks/gpu_faults.py [--all] [NAME]...

Without --all these are the faults of PLANTS below, each in the mode of running that shows it. With --all they are all
small faults (mutants.py) in the runtime's lines about streams, events and devices, each tried in one mode after the
other until one tells; that takes hours. Only faults whose names begin by NAME are tried. The exit code is 1 if one
survives: it changes nothing, or there is no mode yet that shows it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases.soft_runs import MODES, Soft  # noqa: E402
from softgpu.build import environment  # noqa: E402

from scripts.checks.mutants import mutants_of  # noqa: E402

RUNTIME = ROOT / "pipeplan" / "runtime"
ABOUT_DEVICES = re.compile(r"stream|event|cuda|synchronize|\bpin|non_blocking|on_host")
WITHIN = 1e-7  # of every weight: how far GPUs in software may be from CPUs


@dataclass(frozen=True)
class Plant:
    """A fault: ``instead`` of what is ``there`` in a file of the runtime; which ``mode`` shows it, and what is told."""

    file: str
    there: str
    mode: str
    told: str
    instead: str = "pass"

    def text(self) -> str:
        """Return the file's text with the fault in it."""
        text = (RUNTIME / self.file).read_text()
        assert text.count(self.there) == 1, f"{self.file} has another line than {self.there}"
        return text.replace(self.there, self.instead)


LOADED, CHUNKS = "1f1b, clipped, from a loader, resumed", "2bw, replicas, in chunks"
PLANTS = {
    "a message isn't waited for": Plant(
        "exchange/links.py", "work.wait()\n        self._messages", "zb1p", "may still write",
        "pass\n        self._messages",
    ),
    "a message is received where passes may still be": Plant(
        "exchange/links.py", "self._stream.wait_event(free)", "zb1p", "may still"
    ),
    "receives begin at once": Plant(
        "exchange/links.py", "self._stream.wait_event(self._messages[0])", "zb1p", "begin too early"
    ),
    "a staged send isn't waited for": Plant(
        "exchange/links.py", "torch.cuda.current_stream(self._device).synchronize()", "a shared GPU",
        "SIGSEGV|Bad address|pinned memory",
    ),
    "a loader's copies aren't waited for": Plant(
        "engine/reading.py", "stream.wait_event(ready.there)", LOADED, "may still write"
    ),
    "a loader's tensors aren't recorded": Plant(
        "engine/reading.py", "tensor.record_stream(stream)", LOADED, "is given back"
    ),
    "copies of offloaded state aren't waited for": Plant(
        "training/update/offload.py", "stream.wait_event(event)", "offloaded", "may still"
    ),
    "a sum isn't behind its gradients": Plant(
        "training/update/exchanges.py", "self._stream.wait_stream(torch.cuda.current_stream(self._device))", CHUNKS,
        "may still write",
    ),
    "steps don't wait for their sum": Plant(
        "training/update/exchanges.py", "self._there[index].wait()", CHUNKS, "may still"
    ),
    "dropout draws what it likes on GPUs": Plant(
        "training/repeatable.py", "torch.cuda.manual_seed_all(key)", "stash, recomputed", "differ"
    ),
}  # fmt: skip


def told(soft: Soft, mode: str, file: str, text: str, late_us: int = 0) -> str:
    """Return what a run in a mode tells when a file of the runtime has another text; nothing if it is as ever."""
    module = f"pipeplan.runtime.{file.removesuffix('.py').replace('/', '.')}"
    found = soft.run(mode, delay_us=late_us, planted={module: text})
    apart = [f"weights differ by {x:g}" for x in found["differences"].values() if not x <= WITHIN]
    return "; ".join([*found["told"], *apart])


def small_faults() -> Iterator[tuple[str, str, str]]:
    """Yield all small faults in lines about streams, events and devices: a name, the file, its text."""
    for path in sorted(RUNTIME.rglob("*.py")):
        source, file = path.read_text(), str(path.relative_to(RUNTIME))
        for mutant in mutants_of(source, file) if "cuda" in source or "_stream" in source else ():
            if ABOUT_DEVICES.search(mutant.before) and mutant.inside and mutant.compiles(source):
                yield f"{file}:{mutant.line} {mutant.after}", file, mutant.applied(source)


def main() -> int:
    """Read the command line, and plant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="all small faults in lines about devices")
    arguments = parser.parse_args()
    if arguments.all:
        faults = [(*fault, list(MODES)) for fault in small_faults()]
    else:
        faults = [(name, plant.file, plant.text(), [plant.mode]) for name, plant in PLANTS.items()]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        soft = Soft(Path(folder), environment(2, Path(folder)))
        for name, file, text, modes in faults:
            if arguments.names and not name.startswith(tuple(arguments.names)):
                continue
            tellings = ((mode, told(soft, mode, file, text)) for mode in modes)
            mode, what = next((x for x in tellings if x[1]), ("", ""))
            survived += not mode
            print(f"killed   {name}\n         in {mode}: {what[:200]}" if mode else f"SURVIVED {name}", flush=True)
        soft.close()
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
