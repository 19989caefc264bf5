"""Measure how much host memory each rank of a run takes that trains a model of a billion parameters on two processes.

    python scripts/bench/own_part.py [--model NAME] [--sequence N] [--microbatches N] [--save]

The profile is estimated, so nothing but the run itself takes memory. A rank's share is what the plan says that it
keeps: weights, gradients, activations and buffers of its stages. Its peak is the operating system's (VmHWM), less what
a process has that has built nothing. The default takes about 9 GB of memory in all. With --save the trained model is
written to a safetensors file, and read back by name.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path

from pipeplan import zoo
from pipeplan.check.evaluate import Evaluation, evaluate
from pipeplan.check.validate import check
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Platform, Policy
from pipeplan.runtime.engine.options import RunOptions
from pipeplan.runtime.measure.report import RunReport
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.build.state_file import read_state
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.estimate import estimate_model
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.units import format_bytes

MODEL = "gpt2-xl,blocks=28,tied=false"
LOOK_S = 0.05
WITHIN = 1.2


def main() -> None:
    """Run the model and print a line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    name = f"{arguments.model},sequence={arguments.sequence}"
    plan = halves(name, arguments.microbatches)
    parameters = sum(layer.parameter_count for layer in plan.chain.layers)
    print(f"{name}: {parameters / 1e9:.2f} billion parameters, {format_bytes(4 * parameters)} of weights")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "trained.safetensors") if arguments.save else None
        watch = Watch()
        watch.start()
        started = time.monotonic()
        report = run_plan(plan, ModelSpec(name), RunOptions(steps=1, lr=0.01, device="cpu", save=saved))
        watch.end.set()
        watch.join()
        assert report is not None, "rank 0 is here"
        print(
            f"1 update in {time.monotonic() - started:.0f} s with all that comes before; loss {report.losses[-1]:.3f}"
        )
        show(plan, evaluate(plan), watch, report)
        if saved is not None:
            state = read_state(saved)
            print(f"{format_bytes(saved.stat().st_size)} written, {len(state)} tensors")


def halves(name: str, microbatches: int) -> Plan:
    """Return a plan of two stages with about as many bytes of weights each, drained after so many microbatches."""
    chain = estimate_model(zoo.load(name), 1, accelerator("H100"), name=name, date="").chain
    sizes = [layer.weight_bytes for layer in chain.layers]
    cut = min(range(1, len(sizes)), key=lambda i: abs(2 * sum(sizes[:i]) - sum(sizes)))
    stages = (Stage(0, cut, (0,)), Stage(cut, len(sizes), (1,)))
    platform, policy = Platform.flat(2, 10**12), Policy("flush", accumulate=microbatches, optimizer="sgd")
    pattern = best_one_f_one_b_star(stage_graph(chain, platform, policy, stages))
    schedule = Schedule("flush", microbatches)
    plan = Plan(chain, platform, policy, Allocation(stages), pattern, (), Provenance("by hand"), schedule)
    check(plan)
    return plan


class Watch(threading.Thread):
    """Looks at the memory of rank processes: ``first`` and ``peak`` have bytes by rank's name."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.end = threading.Event()
        self.first: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._pids: dict[str, int] = {}

    def run(self) -> None:
        """Look until the end."""
        while not self.end.wait(LOOK_S):
            if len(self._pids) < 2:
                ranks = [x for x in list(multiprocessing.process._children) if "rank" in x.name]  # type: ignore[attr-defined]
                self._pids = {x.name: x.pid for x in ranks if x.pid}
            for name, pid in self._pids.items():
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:  # it has ended
                    continue
                sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}
                if "VmHWM:" in sizes:
                    self.first.setdefault(name, sizes["VmRSS:"])
                    self.peak[name] = max(self.peak.get(name, 0), sizes["VmHWM:"])


def show(plan: Plan, planned: Evaluation, watch: Watch, report: RunReport) -> None:
    """Print each rank's peak beside its share; the exit status says whether all are within a fifth."""
    good = True
    for rank, use in enumerate(planned.devices):
        name = f"pipeplan rank {rank}"
        empty, peak = watch.first[name], watch.peak[name]
        ratio = (peak - empty) / use.peak_bytes
        good = good and ratio <= WITHIN
        layers = plan.allocation.stages[rank]
        print(
            f"rank {rank}: layers {layers.start}-{layers.stop - 1}, share {format_bytes(use.peak_bytes)}; "
            f"peak {format_bytes(peak)}, less {format_bytes(empty)} at the start: {ratio:.3f} x its share"
        )
    for note in report.notes:
        print(note)
    if not good:
        raise SystemExit(f"a rank took more than {WITHIN} times its share")


if __name__ == "__main__":
    main()
