"""Check the profiler against plain training steps on this CPU: layer times and saved bytes against the whole.

    python scripts/checks/profiler.py [--repeat N] [MODEL BATCH]...

For each model (default: GPT-2 small, ResNet-50 and AWD-LM sizes) plain steps and profiler steps take turns, both in
CPU time of their one thread, which other load disturbs little; the ratios are of the shortest and the median. Saved
bytes are compared with the total of one whole forward under saved-tensor hooks. Also measured: one layer at a time, and
the traced model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeplan import zoo
from pipeplan.cost.saved import saved_bytes
from pipeplan.problem import Chain
from pipeplan.runtime.device import ThreadClock
from pipeplan.runtime.model.network import Network, chain_network
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.runtime.profiler.measure import profile_network
from pipeplan.runtime.profiler.steps import MeasureOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from cases.runtime import Whole, whole_saved_bytes

MODELS = ["gpt2-small,sequence=256", "1", "resnet50,image=224", "2", "awd-lm", "4", "gpt-tiny", "8"]


def whole_step_ns(layers: nn.Sequential, x: torch.Tensor, target: torch.Tensor, loss: Any) -> int:
    layers.zero_grad(set_to_none=False)
    start = time.thread_time_ns()
    loss(layers(x), target).backward()
    return time.thread_time_ns() - start


def check(name: str, batch: int, repeat: int) -> None:
    model = zoo.load(name)
    layers, _, loss = model(batch)
    x, target = model.data(batch)(0, 0)
    layers.train()
    ways: dict[str, tuple[Network, str]] = {
        "all at once": (chain_network(layers, x), "all"),
        "one at a time": (chain_network(layers, x), "one"),
        "traced": (trace_module(Whole(layers), x), "all"),
    }
    whole: list[int] = []
    times: dict[str, list[int]] = {way: [] for way in ways}
    saved: dict[str, int] = {}
    for _ in range(2):
        whole_step_ns(layers, x, target, loss)
    for turn in range(repeat):
        whole.append(whole_step_ns(layers, x, target, loss))
        for way, (network, hold) in ways.items():
            measured, *_ = profile_network(
                network, loss, MeasureOptions(steps=1, warmup=1, hold=hold, clock=ThreadClock()), target=target
            )
            times[way].append(sum(m.layer.forward_ns + m.layer.backward_ns for m in measured))
            if turn == 0 and way != "traced":
                chain = Chain(name, tuple(m.layer for m in measured), x.nbytes)
                saved[way] = int(saved_bytes(chain, 0, len(chain)))
            whole.append(whole_step_ns(layers, x, target, loss))
    expected = whole_saved_bytes(layers, x.clone(), target.clone(), loss)
    step = f"{min(whole) / 1e6:.1f} ms shortest, {statistics.median(whole) / 1e6:.1f} median"
    print(f"{name}, batch {batch}: whole step {step}")
    for way, taken in times.items():
        print(
            f"  layer times, {way:14} {min(taken) / min(whole):6.3f} of the whole (shortest), "
            f"{statistics.median(taken) / statistics.median(whole):6.3f} (medians)"
        )
    print(f"  saved bytes {saved['all at once'] / expected:.4f} of autograd's {expected / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="names of the zoo and batch sizes, in turns")
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, batch in zip(arguments.models[::2], arguments.models[1::2], strict=True):
        check(name, int(batch), arguments.repeat)


if __name__ == "__main__":
    main()
