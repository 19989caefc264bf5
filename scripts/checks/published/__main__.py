"""Predict published iterations of GPTs and print how far off that is, by source; no row is judged by a fit to itself.

    python scripts/checks/published [--rows FILE.csv] [--source NAME] [--each] [--ranges]

``runs.csv`` has what was published: sizes of a GPT, samples of a microbatch, equal pipelines x stages, samples per
update, the schedule, blocks of each stage where they aren't equal, ms of an iteration and GB of the fullest GPU. From

- ``vtrain``: vTrain (Bang et al. 2024), validation data on 2 to 8 A100 80GB under NVSwitch: Megatron-DeepSpeed in fp16,
  every block recomputed, attention not fused, dropout 0.1;
- ``zero-bubble``: Zero Bubble Pipeline Parallelism (Qi et al. 2024), Table 4: A100 80GB, 8 in a server, RoCE between
  servers; attention not fused, dropout; zero-bubble runs have no barrier between updates;
- ``vocabulary``: Balancing Pipeline Parallelism with Vocabulary Parallelism (Yeung et al. 2024), artifact: 8 A100 80GB,
  fused attention, no dropout, --fp16 without fp32 gradients.

``tensor.csv`` has iterations with tensor parallelism, on A100 80GB, 8 in a server, every block recomputed, 51,200
words: ``sc21`` (Narayanan et al. 2021, Table 1; ``sc21-zero3``: Table 2, DeepSpeed's ZeRO-3), ``korthikanti`` (2022,
Table 5; ``korthikanti-selective``: with the core of attention again, nothing else, and sequence parallelism), and of
vTrain all rows on 64 to 512 GPUs whose groups stay in a server (``vtrain-servers``), and every twelfth on one server
(``vtrain-server``).

``slices.csv`` has iterations of a few blocks of Llama 3 70B and 405B and of DeepSeek-V2 and V3 on 8 B200s, and the GiB
of the fullest, as SimuMax's authors measured them with Megatron-LM and its distributed optimizer (MooreThreads/SimuMax,
summary of b200).

``layouts`` are published ones of whole clusters, costed, and what is found on their GPUs (``layouts.py``; 4 minutes).

``h200`` are one GPU's operations and networks (``h200.py``; with timm and transformers, some minutes).

Printed, as means of |predicted / measured - 1|: with the constants that every estimate has; by two-fold cross
validation, or of few rows with each row left out; with constants fitted to the other width only; the regret of the
microbatch, and of the schedule, chosen by prediction; and the error of the memory.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from h200 import judge_kernels, judge_networks
from layouts import judge_layouts
from ranges import judge_ranges

import pipeplan as pp
from pipeplan import zoo
from pipeplan.cost.roofline import Constants
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.planner.calibrate.calibration import Fit, calibrate
from pipeplan.planner.calibrate.costed import Configuration, Costed, Run, critical_passes
from pipeplan.problem import Chain, Device, Level, Platform, Policy
from pipeplan.runtime.profiler.estimate import estimate_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.runtime.training.update.optimizers import optimizer_maker, parse_choice

SETTINGS = {  # source -> options of the zoo's GPT
    "vtrain": "dropout=0.1,attention=unfused,loss=fp32,tied=true",
    "zero-bubble": "dropout=0.1,attention=unfused,loss=same,tied=false",
    "vocabulary": "attention=fused,loss=fp32,tied=false",
}
SERVER, INSIDE, ACROSS = 8, 300 * 10**9, 25 * 10**9  # GPUs of a server, bytes/s of its links, and between servers
TENSOR, SLICES, H200, LAYOUTS = "tensor", "slices", "h200", "layouts"
ENGINE, ON_ENGINE = "megatron", ("vtrain", "vtrain-server")  # whose rows wait for their host
MEGATRON = 18  # bytes per parameter: fp16 weights, fp32 gradients, weights and two moments (Megatron-LM's optimizer)
HALF = 16  # likewise with fp16 gradients: their fp32 copies are there in the step alone, when no activations are
HELD = {"zero-bubble": MEGATRON, "vocabulary": HALF}
Row = dict[str, str]


def size(row: Row, name: str) -> int:
    return int(row[name])


@cache
def profile(source: str, hidden: int, heads: int, sequence: int, vocabulary: int, blocks: int, batch: int) -> Chain:
    model = zoo.load(
        f"gpt2-small,blocks={blocks},hidden={hidden},heads={heads},sequence={sequence},positions={sequence},"
        f"vocabulary={vocabulary},{SETTINGS[source]}"
    )
    options = MeasureOptions(
        dtype=torch.float16,
        optimizer=optimizer_maker(parse_choice("Adam,foreach=True", ""), 0.0),
        split_backward=source == "zero-bubble",
    )
    about: dict[str, Any] = {"name": source, "date": "", "data": model.data(batch)}
    return estimate_model(model, batch, accelerator("a100"), options, **about).chain


def run_of(row: Row) -> Run:
    names = "hidden", "heads", "sequence", "vocabulary", "blocks", "microbatch"
    source, blocks, stages = row["source"], size(row, "blocks"), size(row, "stages")
    gpus = stages * size(row, "pipelines")
    servers = [Level(SERVER, INSIDE), Level(gpus // SERVER, ACROSS)] if gpus > SERVER else [Level(gpus, INSIDE)]
    megatron = source != "vtrain"  # whose transfers the GPUs wait for
    platform = Platform((Device(80 * 10**9),) * gpus, tuple(servers), blocking=megatron)
    split, on = layers_of(row, blocks, stages)
    configuration = Configuration(
        split,
        size(row, "pipelines"),
        on,
        "none" if megatron else ",".join(f"{i}-{i}" for i in range(1, blocks + 1)),
        row["schedule"],
        size(row, "batch"),
        barrier=not row["schedule"].startswith("zb"),
    )
    policy = Policy("flush", optimizer="adam", precision="mixed", bytes_per_parameter=HELD.get(source))
    chain = profile(source, *(size(row, name) for name in names))
    return Run(
        " ".join(row[x] for x in (*names, "schedule")), chain, platform, policy, configuration, 1e6 * float(row["ms"])
    )


def layers_of(row: Row, blocks: int, stages: int) -> tuple[str, str | None]:
    """Return the layers of each stage, with the embedding in the first and norm, head and loss in the last."""
    on = None
    if row["counts"]:
        counts = list(map(int, row["counts"].split("-")))
    elif row["source"] == "zero-bubble" and row["schedule"] == "interleaved":
        counts = [0, *[1] * blocks, 0]  # a chunk each, as large as the embedding's and the head's
        on = "/".join(str(i % stages) for i in range(len(counts)))
    elif row["source"] == "zero-bubble":
        each = (blocks + 2) // stages
        counts = [each - 1, *[each] * (stages - 2), each - 1]
    else:
        counts = [blocks // stages] * stages
    counts[0] += 1
    counts[-1] += 3
    return ",".join(map(str, counts)), on


def tensor_run(row: Row) -> Run:
    """Return the run of a row of ``tensor.csv``: equal pipelines of groups that run each layer together."""
    blocks, stages, tensor = size(row, "blocks"), size(row, "stages"), size(row, "tensor")
    chunks, pipelines, again = size(row, "chunks"), size(row, "pipelines"), row["source"].endswith("selective")
    model = zoo.load(
        f"gpt2-small,blocks={blocks},hidden={row['hidden']},heads={row['heads']},sequence={row['sequence']},"
        f"positions={row['sequence']},vocabulary=51200,tensor={tensor},dropout=0.1,loss=fp32,tied=true,"
        + ("attention=again,sequence_parallel=true" if again else "attention=unfused")
    )
    options = MeasureOptions(dtype=torch.float16, optimizer=optimizer_maker("adam", 0.0, as_on_gpus=True))
    batch = size(row, "microbatch")
    about: dict[str, Any] = {"name": row["source"], "date": "", "data": model.data(batch)}
    part = replace(estimate_model(model, batch, accelerator("a100"), options, **about).chain, tensor=tensor)
    gpus = tensor * stages * pipelines
    levels = [Level(SERVER, INSIDE), Level(gpus // SERVER, ACROSS)] if gpus > SERVER else [Level(gpus, INSIDE)]
    whole = Platform((Device(80 * 10**9),) * gpus, tuple(levels))
    counts = [blocks // (stages * chunks)] * (stages * chunks)
    counts[0] += 1  # the embedding
    counts[-1] += 3  # norm, head and loss
    groups = [",".join(str(s * pipelines + r) for r in range(pipelines)) for s in range(stages)]
    configuration = Configuration(
        ",".join(map(str, counts)),
        pipelines,
        "/".join(groups * chunks) if chunks > 1 else None,
        "none" if again else ",".join(f"{i}-{i}" for i in range(1, blocks + 1)),
        "interleaved" if chunks > 1 else "1f1b",
        size(row, "batch"),
    )
    policy = Policy("flush", optimizer="adam", precision="mixed", bytes_per_parameter=MEGATRON)
    if zero := size(row, "zero"):
        block = max(layer.parameter_count for layer in part.layers)
        policy = replace(policy, zero=zero, shared_bytes_per_parameter=MEGATRON, bucket_parameters=block)
    about_run = " ".join(row.values()), part, whole.grouped(tensor), policy, configuration
    return Run(*about_run, 1e6 * float(row["ms"]))


class Source:
    """The rows of one source: its runs, and predictions of them that are made once for each set of constants."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.runs = [run_of(row) for row in rows]
        self.measured = np.array([x.measured_ns for x in self.runs])

    def predicted(self, constants: Constants, which: Sequence[int] | None = None) -> np.ndarray:
        chosen = range(len(self.runs)) if which is None else which
        return np.array([costed(self.runs[i], constants).iteration_ns for i in chosen], dtype=float)

    def error(self, predicted: np.ndarray, which: Sequence[int] | None = None) -> float:
        measured = self.measured if which is None else self.measured[list(which)]
        return float(np.mean(np.abs(predicted / measured - 1)))

    def fit(self, which: Sequence[int], start: Constants) -> Fit:
        """Return what ``pipeplan calibrate`` makes of some of the rows."""
        return calibrate([self.runs[i] for i in which], start).chosen

    def parts(self, key: Callable[[Row], Hashable]) -> list[list[int]]:
        found: dict[Hashable, list[int]] = defaultdict(list)
        for i, row in enumerate(self.rows):
            found[key(row)].append(i)
        return list(found.values())

    def held_out(self, parts: Sequence[Sequence[int]], start: Constants) -> np.ndarray:
        """Return each part predicted by constants fitted to the others."""
        found = np.zeros(len(self.runs))
        for part in parts:
            others = [i for i in range(len(self.runs)) if i not in set(part)]
            found[list(part)] = self.predicted(self.fit(others, start).constants, part)
        return found

    def regret(self, predicted: np.ndarray, key: Callable[[Row], Hashable]) -> tuple[float, int, int]:
        """Return by how much the run chosen by prediction takes longer than the best, of those equal by ``key``; how
        often it is the best; and among how many groups of several."""
        groups = [part for part in self.parts(key) if len(part) > 1]
        taken = [self.measured[min(g, key=lambda i: predicted[i])] / min(self.measured[g]) - 1 for g in groups]
        return float(np.mean(taken)), sum(x == 0 for x in taken), len(groups)


@cache
def costed(run: Run, constants: Constants) -> Costed:
    return run.costed(constants)


def peak_bytes(run: Run, constants: Constants) -> int:
    """Return what the fullest GPU holds at most.

    Zero Bubble's scheduler gives ZB-2p as many forwards ahead on every GPU as 2p activations allow (section 3.1 there),
    needed or not; those of pipeplan are as many as shorten the iteration.
    """
    found = costed(run, constants)
    if run.configuration.schedule != "zb2p":
        return found.peak_bytes
    program = found.timeline.program
    stages = program.graph.stages
    held = (2 * len(stages) * stage.saved_bytes + program.buffer_bytes(s) for s, stage in enumerate(stages))
    return max(x + program.graph.weights_bytes(s, 1) for s, x in enumerate(held))


def without(*names: str) -> Callable[[Row], Hashable]:
    left_out = {*names, "ms", "gb"}
    return lambda row: tuple(value for name, value in row.items() if name not in left_out)


def halves(count: int) -> list[list[int]]:
    order = np.random.default_rng(0).permutation(count).tolist()
    return [order[::2], order[1::2]]


def said(label: str, value: float, more: str = "") -> None:
    print(f"  {label:66} {value:7.1%}{more}")


def fitted(fit: Fit) -> str:
    found = fit.constants
    host = f"host {found.forward_host_ns / 1e3:.0f} and {found.backward_host_ns / 1e3:.0f} us"
    return f"   {', '.join(fit.freedom.names)}: {found.compute_share:.2f}, {found.bandwidth_share:.2f}, {host}"


def judge(name: str, source: Source) -> None:
    start = accelerator("a100").constants()
    print(f"{name}: {len(source.runs)} rows")
    usual = source.predicted(start)
    said("time, the usual constants", source.error(usual))
    if name == "vtrain":
        named = source.predicted(accelerator("a100").constants(ENGINE))
        said(f"time, --engine {ENGINE}", source.error(named))
        folds = source.held_out(halves(len(source.runs)), start)
        said("time, fitted on one half and judged on the other", source.error(folds))
        for part, what in zip(source.parts(lambda row: row["hidden"]), _names(source, "hidden"), strict=True):
            rest = [i for i in range(len(source.runs)) if i not in set(part)]
            fit = source.fit(rest, start)
            error = source.error(source.predicted(fit.constants, part), part)
            said(f"time, hidden {what}, fitted on the other width", error, fitted(fit))
        ways = {"usual constants": usual, f"--engine {ENGINE}": named, "the other half's constants": folds}
        for label, found in ways.items():
            regret, best, groups = source.regret(found, without("microbatch"))
            said(f"regret of the microbatch, {label}", regret, f"   best in {best} of {groups}")
        return
    chosen = calibrate([], start, [critical_passes(run, start) for run in source.runs]).chosen
    said("time, fitted on all rows but one", chosen.left_out or 0.0, fitted(chosen))
    if name == "zero-bubble":
        regret, best, groups = source.regret(usual, without("schedule"))
        said("regret of the schedule, usual constants", regret, f"   best in {best} of {groups}")
        right = sum(_ordered(source.measured[g], usual[g]) for g in source.parts(without("schedule")))
        said("pairs of schedules in the right order, usual constants", right / 36)
    gb = np.array([float(row["gb"]) * 1e9 for row in source.rows])
    peaks = np.array([peak_bytes(run, start) for run in source.runs])
    said(f"memory, {HELD[name]} bytes per parameter as Megatron-LM has them", float(np.mean(np.abs(peaks / gb - 1))))


def judge_tensor(each: bool) -> None:
    with open(Path(__file__).with_name("tensor.csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for name in dict.fromkeys(row["source"] for row in rows):
        constants = accelerator("a100").constants(ENGINE if name in ON_ENGINE else None)
        runs = [tensor_run(row) for row in rows if row["source"] == name]
        errors = np.array([costed(run, constants).iteration_ns / run.measured_ns - 1 for run in runs])
        size = np.abs(errors)
        print(f"{name}: {len(runs)} rows")
        label = f"time, --engine {ENGINE}" if name in ON_ENGINE else "time, the usual constants"
        said(label, float(size.mean()), f"   bias {errors.mean():+.1%}, worst {size.max():.1%}")
        for run, error in zip(runs, errors, strict=True) if each else ():
            print(f"    {run.name:60} {1 + error:.3f}")


def judge_slices(each: bool) -> None:
    with open(Path(__file__).with_name("slices.csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times, memory = [], []
    for row in rows:
        blocks, stages, tensor = size(row, "blocks"), size(row, "stages"), size(row, "tensor")
        experts, groups = size(row, "experts"), size(row, "pipelines") // size(row, "experts")
        sizes = ",".join(f"{x}={row[x]}" for x in ("blocks", "hidden", "heads", "groups", "feed_forward", "sequence"))
        counts = [blocks // stages + 1, *[blocks // stages] * (stages - 1)]  # with the embedding
        found = pp.plan(
            pp.profile(
                f"zoo:{row['model']},{sizes}",
                gpu="b200",
                microbatch=1,
                dtype="bfloat16",
                optimizer="adam",
                granularity="node",
                **({"tensor": tensor, "sequence_parallel": True} if tensor > 1 else {}),
                **({"experts": experts} if experts > 1 else {}),
            ),
            gpus=8,
            gpu="b200",
            tensor=tensor,
            experts=experts,
            batch=size(row, "batch"),
            weights="flush",
            zero=1,
            precision="mixed",
            optimizer="adam",
            bytes_per_parameter="6+12",
            schedule="1f1b",
            split=",".join(map(str, [*counts[:-1], counts[-1] + 3])),  # norm, head and loss
            replicas=",".join([str(groups)] * stages),
            recompute="none",
        )
        times.append(found.evaluation.makespan_ns / (1e6 * float(row["ms"])) - 1)
        memory.append(max(use.peak_bytes for use in found.evaluation.devices) / (2**30 * float(row["gib"])) - 1)
        if each:
            print(f"    {' '.join(row.values()):60} {1 + times[-1]:.3f} {1 + memory[-1]:.3f}")
    for what, which in (("dense", True), ("mixtures", False)):
        chosen = [i for i, row in enumerate(rows) if (row["experts"] == "1") == which]
        print(f"slices, {what}: {len(chosen)} rows")
        for label, of in (("time, a B200's constants", times), ("memory, 6 bytes per parameter and 12 shared", memory)):
            errors = np.array(of)[chosen]
            sizes = np.abs(errors)
            said(label, float(sizes.mean()), f"   bias {errors.mean():+.1%}, worst {sizes.max():.1%}")


def _ordered(measured: np.ndarray, predicted: np.ndarray) -> int:
    pairs = [(i, j) for i in range(len(measured)) for j in range(i)]
    return sum((measured[i] < measured[j]) == (predicted[i] < predicted[j]) for i, j in pairs)


def _names(source: Source, column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in source.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=str(Path(__file__).with_name("runs.csv")), help="other rows of these sources")
    parser.add_argument("--source", choices=[*SETTINGS, TENSOR, SLICES, H200, LAYOUTS], help="only these rows")
    parser.add_argument("--network", action="append", default=[], help="of an H200 only this, again for more")
    parser.add_argument("--ranges", action="store_true", help="only which rows are within the ranges of estimates")
    parser.add_argument("--each", action="store_true", help="print every row with the usual constants")
    arguments = parser.parse_args()
    if arguments.ranges:
        judge_ranges()
        return
    if arguments.source == LAYOUTS:
        judge_layouts()
        return
    if arguments.source == H200:
        judge_kernels()
        judge_networks(arguments.network)
        return
    with open(arguments.rows, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if arguments.source in (None, TENSOR):
        judge_tensor(arguments.each)
    if arguments.source in (None, SLICES):
        judge_slices(arguments.each)
    for name in SETTINGS:
        of_source = [row for row in rows if row["source"] == name]
        if not of_source or arguments.source not in (None, name):
            continue
        source = Source(of_source)
        judge(name, source)
        if arguments.each:
            predicted = source.predicted(accelerator("a100").constants())
            for run, ratio in zip(source.runs, predicted / source.measured, strict=True):
                print(f"    {run.name:60} {ratio:.3f}")


if __name__ == "__main__":
    main()
