"""Does a run take as long as was planned? Models are profiled, planned and run on processes of this machine's CPU.

    python scripts/bench/planned.py [--model NAME,BATCH]... [--processes N]... [--rounds N] [--steps N] [--every]

Each round measures a profile beside as many processes as the run will have, plans with it as ``scripts/demo`` does,
runs the plan, and profiles again. Prints of every round the planned period, the one predicted with the run's own times,
the measured one and what it is told to be, then medians of the measured over both, and how many rounds were as planned,
or within 5% of the plan. Wants a quiet machine with a core for each process. Five rounds of the four models take about
five minutes: ``python scripts/bench/planned.py --rounds 5 --every``.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipeplan as pp
from pipeplan.api.bracket import period_now
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.measure.report import PROMISE, RunReport
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

MODELS = ["zoo:gpt-tiny,blocks=8,8"]
EVERY = [
    *MODELS,
    "zoo:small-cnn,32",
    "zoo:awd-lm,hidden=256,embedding=128,sequence=32,vocabulary=2000,8",
    "planned:mixer,8",
]
MACHINE: dict[str, Any] = {
    "mem": "1GB",
    "bandwidth": "3GB/s",
    "latency": "500us",
    "overhead": "120us",
}  # as the demo says it
MEASURED_STEPS = 30


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", dest="models", metavar="NAME,BATCH")
    parser.add_argument("--every", action="store_true", help="four kinds of models: GPT, convolutions, LSTM, MLP-mixer")
    parser.add_argument("--processes", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    for text in arguments.models or (EVERY if arguments.every else MODELS):
        for processes in arguments.processes or [2]:
            name, _, batch = text.rpartition(",")
            print(f"--- {name}, batch {batch}, on {processes} processes; load {os.getloadavg()[0]:.1f}", flush=True)
            compared(name, int(batch), processes, arguments)


class Mixed(nn.Module):
    """A block of an MLP-mixer: it mixes patches, then channels (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)) for size in (patches, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlps[0](self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        added: torch.Tensor = x + self.mlps[1](self.norms[1](x))
        return added


def mixer(batch: int) -> tuple[nn.Sequential, torch.Tensor, Any]:
    """Return eight blocks on 64 patches of 128 channels."""
    blocks = (Mixed(64, 128) for _ in range(8))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 128, 10)), torch.randn(batch, 64, 128), cross_entropy


def pictures(index: int, seed: int, batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return made-up patches and classes."""
    draws = torch.Generator().manual_seed(2**20 * seed + index)
    return torch.randn(batch, 64, 128, generator=draws), torch.randint(10, (batch,), generator=draws)


def compared(name: str, batch: int, processes: int, arguments: argparse.Namespace) -> None:
    """Profile, plan and run a model in rounds; print what came of each, and medians."""
    planned, predicted, told = [], [], Counter[str | None]()
    model = ModelSpec(name, None if name.startswith("zoo:") else "planned:pictures")
    for _ in range(arguments.rounds):
        profile = pp.profile(name, microbatch=batch, data=model.data, beside=processes, steps=MEASURED_STEPS)
        found = pp.plan(profile, gpus=processes, algorithm="contiguous", no_replicas=True, **MACHINE)
        report = run_plan(found.plan, model, RunOptions(steps=arguments.steps, lr=0.01))
        assert report is not None, "this is no rank of torchrun"
        report = replace(report, bracket=(1.0, period_now(found.plan, model)))
        told[report.verdict] += 1
        assert report.measured_period_ns, "--steps are too few for a steady state"
        assert report.calibrated_period_ns, "this engine tells of passes"
        planned.append(report.measured_period_ns / report.planned_period_ns)
        predicted.append(report.measured_period_ns / report.calibrated_period_ns)
        print(
            f"planned {report.planned_period_ns / 1e6:8.3f} ms, with its own times "
            f"{report.calibrated_period_ns / 1e6:8.3f} ms, measured {report.measured_period_ns / 1e6:8.3f} ms: "
            f"{100 * planned[-1] - 100:+.1f}% and {100 * predicted[-1] - 100:+.1f}%, {report.verdict}; "
            f"{_passes(report)}",
            flush=True,
        )
    for what, ratios in {"planned": planned, "predicted with its own times": predicted}.items():
        print(f"measured / {what}: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    near = sum(abs(ratio - 1) <= PROMISE for ratio in planned)
    print(f"{', '.join(f'{verdict} {count}' for verdict, count in told.items())}; within 5% of the plan {near}")


def _passes(report: RunReport) -> str:
    """Return measured over planned passes by stage, and what else a microbatch takes there in ms."""
    return ", ".join(
        f"stage {x.stage} F {x.forward_ns / x.planned_forward_ns:.2f} B {x.backward_ns / x.planned_backward_ns:.2f} "
        f"reads {x.data_ns / 1e6:.2f} exchanges {x.exchange_ns / 1e6:.2f}"
        for x in report.stages
    )


if __name__ == "__main__":
    main()
