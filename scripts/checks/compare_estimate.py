"""Compare estimated with measured profiles on this CPU, layer by layer, for what the roofline is worth.

    python scripts/checks/compare_estimate.py [--layers] [--save cpu.json] [MODEL BATCH]...

The CPU's own entry of the accelerator table is measured on one thread: the peak from products of large matrices, the
bandwidth from copies of tensors far larger than the caches, the launch time from additions of a few numbers. Then each
model is measured and estimated, as its own layers and as a traced DAG. Printed: the total error, what remains of it
layer by layer after scaling by one factor, the regret of plans on 2 and 4 devices (by how much those made on the
estimate take longer than those made on the measured profile, with measured times, each stage on one device), and
saved bytes, estimated over measured. ``published_layers.py`` asks the same of CNNs on a GPU. Times are CPU time of the
one thread: other load disturbs them little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from profiler import Whole
from regret import regrets

from pipeplan import zoo
from pipeplan.cost.saved import saved_bytes
from pipeplan.files.accelerators import Accelerator
from pipeplan.problem import Chain
from pipeplan.report.differences import time_ns
from pipeplan.runtime.clock import ThreadClock
from pipeplan.runtime.profiler.estimate import estimate_model
from pipeplan.runtime.profiler.measure import device_name, measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions

MODELS = ["gpt-tiny", "8", "gpt2-small,sequence=256", "1", "resnet50,image=224", "2", "densenet121,image=128", "2",
          "inception-v3,image=192", "2", "vgg16,image=128", "1", "awd-lm", "4"]  # fmt: skip

RATES = {"convolution": 0.8, "convolution-1x1": 0.8, "convolution-3x3": 0.8}


def shortest_seconds(run: Callable[[], Any], repeat: int = 7) -> float:
    taken = []
    for _ in range(repeat):
        began = time.thread_time()
        run()
        taken.append(time.thread_time() - began)
    return min(taken)


def this_cpu() -> Accelerator:
    size = 2048
    a, b, c = (torch.randn(size, size) for _ in range(3))
    flops = 2 * size**3 / shortest_seconds(lambda: torch.mm(a, b, out=c))
    source, copy = torch.randn(1 << 26), torch.randn(1 << 26)
    bandwidth = 2 * source.nbytes / shortest_seconds(lambda: copy.copy_(source))
    few = torch.ones(8)
    launch = statistics.median(shortest_seconds(lambda: few + few, 50) for _ in range(20))
    return Accelerator(
        name=device_name("cpu", 1),
        memory="16GB",
        bandwidth=f"{bandwidth / 1e9:.2f}GB/s",
        tflops={"float32": round(flops / 1e12, 4)},
        launch=f"{launch * 1e9:.0f}ns",
        rates=RATES,
    )


def compare(name: str, batch: int, cpu: Accelerator, traced: bool, every: bool) -> None:
    model = zoo.load(name)

    def build(size: int) -> Any:
        layers, x, loss = model(size)
        return (Whole(layers) if traced else layers), x, loss

    shared: dict[str, Any] = {"name": name, "date": "", "data": model.data(batch)}
    measured = measure_model(build, batch, MeasureOptions(steps=5, warmup=2, clock=ThreadClock()), **shared).chain
    estimated = estimate_model(build, batch, cpu, **shared).chain
    ours, theirs = ([time_ns(x) for x in chain.layers] for chain in (estimated, measured))
    total = sum(ours) / sum(theirs)
    weighted = sum(abs(a / total - b) for a, b in zip(ours, theirs, strict=True)) / sum(theirs)
    regret = statistics.mean(regrets(estimated, measured, (2, 4)))
    kept = [int(saved_bytes(chain, 0, len(chain))) for chain in (estimated, measured)]
    print(
        f"{name:26} {batch:5} {'DAG' if traced else 'chain':6} {len(measured):6} {sum(theirs) / 1e6:10.1f} "
        f"{sum(ours) / 1e6:10.1f} {total - 1:+8.0%} {weighted:8.0%} {regret:8.1%} "
        f"{kept[0] / kept[1]:8.3f}"
    )
    if every:
        rows(estimated, measured)


def rows(estimated: Chain, measured: Chain) -> None:
    for one, other in zip(estimated.layers, measured.layers, strict=True):
        print(
            f"    {other.name[:40]:40} forward {other.forward_ns / 1e6:9.3f} est {one.forward_ns / 1e6:9.3f}   "
            f"backward {other.backward_ns / 1e6:9.3f} est {one.backward_ns / 1e6:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="names of the zoo and batch sizes, in turns")
    parser.add_argument("--layers", action="store_true", help="print every layer")
    parser.add_argument("--save", metavar="FILE", help="write the CPU's entry, for profile --estimate FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cpu = this_cpu()
    print(f"{cpu.name}: {cpu.tflops['float32'] * 1e3:.1f} Gflop/s, {cpu.bandwidth}, {cpu.launch} per operation")
    if arguments.save:
        with open(arguments.save, "w", encoding="utf-8") as file:
            file.write(json.dumps(msgspec.to_builtins(cpu), indent=1) + "\n")
    heads = f"{'layers':>6} {'measured ms':>10} {'estimated':>9} {'total':>8} {'scaled':>8} {'regret':>8} {'saved':>8}"
    print(f"{'model':26} {'batch':>5} {'as':6} {heads}")
    for name, batch in zip(arguments.models[::2], arguments.models[1::2], strict=True):
        for traced in (False, True):
            compare(name, int(batch), cpu, traced, arguments.layers)


if __name__ == "__main__":
    main()
