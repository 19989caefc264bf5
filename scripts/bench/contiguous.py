"""Measure the contiguous partitioner: 1,000 layers on 64 devices, the published profiles, and decoders.

``python scripts/bench/contiguous.py [large|published|segments|decoders]``; the published profiles lie in
``profiles/published``. The tables print, for every profile and option, how many of the 20 instances (2, 4, 6, 8 devices
of 3, 4, 6, 8, 12 GB) have a plan, the geometric mean of period / (work / devices) over those, how many of these
plans are plain data parallelism, and the seconds. ``segments`` and ``decoders`` compare recomputed segments with
recomputation of all or nothing, also by the geometric mean over the lower bound of class ``any``, and count the plans
that are proved optimal. ``decoders`` are GPT-like chains of equal blocks on 8 and 16 devices, from the least memory
that any plan needs (with segments) to four times that.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from pipeplan.check.bounds import any_bound
from pipeplan.files.profiles import read_profile
from pipeplan.integers import smallest
from pipeplan.partition.contiguous.contiguous import feasible, smallest_period
from pipeplan.partition.granularity import merge_articulation
from pipeplan.plan import Allocation
from pipeplan.problem import Chain, Checkpointing, Layer, Platform, Policy, Problem

FOLDER = Path(__file__).parents[2] / "profiles" / "published"
PROFILES = ("vgg16", "resnet50", "densenet121")


def main() -> None:
    """Print what the arguments ask for."""
    which = sys.argv[1:] or ["large", "published", "segments", "decoders"]
    if "large" in which:
        large()
    if "published" in which:
        published()
    if "segments" in which:
        segments()
    if "decoders" in which:
        decoders()


def large() -> None:
    """Print seconds for random chains of 1,000 layers on 64 devices at 12 GB/s."""
    print("1,000 layers x 64 devices             GB   period ms  / ideal  stages  replicas  recomputed  seconds")
    for kind, chain in (("random", random_chain(1000)), ("equal layers", equal_chain(1000))):
        for replicas, checkpointing in ((False, "none"), (True, "none"), (False, "stages"), (True, "stages")):
            for memory in (4, 8, 16, 32, 64):
                problem = Problem(chain, Platform.flat(64, memory * 10**9), Policy(), replicas, checkpointing)
                found, seconds = timed(problem)
                name = f"{kind}{', replicas' if replicas else ''}{', recompute' if checkpointing != 'none' else ''}"
                print(f"{name:35s} {memory:4d} {described(problem, found)} {seconds:8.2f}", flush=True)


def described(problem: Problem, found: Allocation | None) -> str:
    """Return the columns that tell what the plan is like."""
    if found is None:
        return f"{'no plan':>11s} {'':47s}"
    period = found.claimed_period_ns or 0
    recomputed = sum(bool(stage.checkpoint) for stage in found.stages)
    replicas = max(stage.replicas for stage in found.stages)
    columns = f"{period / 1e6:11.3f} {period / ideal(problem):8.3f} {len(found.stages):7d} {replicas:9d}"
    return f"{columns} {recomputed:11d}"


def published() -> None:
    """Print the table over the published profiles."""
    rows: list[tuple[str, bool, Checkpointing]] = [
        ("replicas, recompute", True, "stages"),
        ("recompute", False, "stages"),
        ("replicas", True, "none"),
        ("neither", False, "none"),
    ]
    for title, convert in (
        ("cut where one tensor is live, saved = input", lambda chain: merge_articulation(chain, saved="input")),
        ("cut anywhere, distinct saved tensors", lambda chain: chain),
    ):
        print(f"\n{title:45s} layers  feasible  period / ideal  data-parallel  median s     max s")
        for name in PROFILES:
            chain = convert(read_profile(str(FOLDER / f"{name}.json")))
            for label, replicas, checkpointing in rows:
                ratios, seconds, parallel = [], [], 0
                for devices in (2, 4, 6, 8):
                    for memory in (3, 4, 6, 8, 12):
                        platform = Platform.flat(devices, memory * 10**9)
                        problem = Problem(chain, platform, Policy(), replicas, checkpointing)
                        found, duration = timed(problem)
                        seconds.append(duration)
                        if found is not None and found.claimed_period_ns is not None:
                            ratios.append(found.claimed_period_ns / ideal(problem))
                            parallel += found.data_parallel
                mean = math.exp(statistics.mean(map(math.log, ratios))) if ratios else math.nan
                print(
                    f"{name + ', ' + label:45s} {len(chain):6d} {len(ratios):6d}/20 {mean:15.4f} {parallel:14d} "
                    f"{statistics.median(seconds):9.3f} {max(seconds):9.3f}",
                    flush=True,
                )


def segments() -> None:
    """Print the table of segments against stages over the published profiles, cut where one tensor is live."""
    for title, replicas, bandwidth, free_input in (
        ("replicas, 12 GB/s", True, 12 * 10**9, False),
        ("replicas, 12 GB/s, network's input not counted", True, 12 * 10**9, True),
        ("replicas, 1.25 GB/s", True, 125 * 10**7, False),
        ("replicas, 0.3 GB/s", True, 3 * 10**8, False),
        ("no replicas, 12 GB/s", False, 12 * 10**9, False),
        ("no replicas, 1.25 GB/s", False, 125 * 10**7, False),
        ("no replicas, 0.3 GB/s", False, 3 * 10**8, False),
    ):
        print(f"\n{title:30s} {COLUMNS}")
        for name in PROFILES:
            chain = merge_articulation(read_profile(str(FOLDER / f"{name}.json")), saved="input")
            if free_input:
                chain = replace(chain, input_bytes=0)
            problems = [
                Problem(chain, Platform.flat(devices, memory * 10**9, bandwidth), Policy(), replicas)
                for devices in (2, 4, 6, 8)
                for memory in (3, 4, 6, 8, 12)
            ]
            compare(name, problems)


COLUMNS = (
    "feasible        / ideal          / bound         on the same     data-parallel    proved  seconds, most and sum\n"
    + " " * 31
    + "stages segments stages segments  stages segments  stages segments  stages segments   segm.    stages   segments"
)


def compare(name: str, problems: list[Problem]) -> None:
    """Print one row: all or nothing beside segments."""
    found: dict[Checkpointing, list[tuple[Allocation | None, float]]] = {
        mode: [timed(replace(problem, checkpointing=mode)) for problem in problems] for mode in ("stages", "segments")
    }
    both = [one is not None and two is not None for (one, _), (two, _) in zip(*found.values(), strict=True)]
    cells = [f"{name:30s}"]
    results = [[best for best, _ in rows] for rows in found.values()]
    cells += [f"{sum(best is not None for best in row):4d}/{len(row):d} " for row in results]
    cells += [mean([over(b, ideal(p)) for b, p in zip(row, problems, strict=True)]) for row in results]
    limits = [any_bound(replace(problem, checkpointing="segments")).period_ns for problem in problems]
    cells += [mean([over(b, x) for b, x in zip(row, limits, strict=True)]) for row in results]
    cells += [mean([over(b, ideal(p)) for b, p, x in zip(row, problems, both, strict=True) if x]) for row in results]
    cells += [f"{sum(best is not None and best.data_parallel for best in row):7d} " for row in results]
    proved = sum(best is not None and best.lower_bound_ns == best.claimed_period_ns for best in results[1])
    cells += [f"{proved:8d} "]
    for rows in found.values():
        cells.append(f"{max(x for _, x in rows):6.2f} {sum(x for _, x in rows):5.1f}")
    print(" ".join(cells), flush=True)


def over(best: Allocation | None, reference: float) -> float | None:
    """Return the claimed period over a reference, None without a plan."""
    return None if best is None or best.claimed_period_ns is None else best.claimed_period_ns / reference


def mean(ratios: list[float | None]) -> str:
    """Return the geometric mean of those that are there, as a column."""
    logs = [math.log(x) for x in ratios if x is not None]
    return f"{math.exp(statistics.mean(logs)):7.4f}" if logs else f"{'-':>7s}"


def decoders() -> None:
    """Print for decoders of 12 and 24 blocks what segments gain, by memory."""
    for accumulate in (None, 64):
        for replicas in (True, False):
            for bandwidth in (12 * 10**9, 125 * 10**7):
                title = (
                    f"{'' if replicas else 'no '}replicas, {bandwidth / 1e9:g} GB/s, updates every {accumulate or 'r'}"
                )
                print(f"\n{title:46s} stages / ideal  segments / ideal  / bound  proved  replicas by stage  seconds")
                for blocks, hidden in ((12, 2048), (24, 2560)):
                    for devices in (8, 16):
                        decoder_rows(blocks, hidden, devices, replicas, bandwidth, accumulate)


def decoder_rows(
    blocks: int, hidden: int, devices: int, replicas: bool, bandwidth: int, accumulate: int | None
) -> None:
    """Print a row for each memory of one decoder, mixed precision with Adam."""
    policy = Policy(optimizer="adam", precision="mixed", accumulate=accumulate)
    chain = decoder(blocks, hidden)

    def problem(memory: int, checkpointing: Checkpointing) -> Problem:
        return Problem(chain, Platform.flat(devices, memory, bandwidth), policy, replicas, checkpointing)

    least = smallest(lambda gigabyte: feasible(problem(gigabyte * 10**8, "segments"), 10**15), 1, 2000)
    assert least is not None
    for factor in (1.0, 1.1, 1.25, 1.5, 2.0, 4.0):
        memory = int(least[0] * 10**8 * factor)
        stages, _ = timed(problem(memory, "stages"))
        best, seconds = timed(problem(memory, "segments"))
        limit = any_bound(problem(memory, "segments")).period_ns
        row = f"{f'{blocks} blocks, {devices} devices of {memory / 1e9:.2f} GB':46s}"
        if best is None:
            print(f"{row} no plan", flush=True)
            continue
        unit = ideal(problem(memory, "segments"))
        proved = "yes" if best.lower_bound_ns == best.claimed_period_ns else "no"
        plan = "data-parallel" if best.data_parallel else "-".join(str(x.replicas) for x in best.stages)
        print(
            f"{row} {over(stages, unit) or math.nan:14.4f} {over(best, unit) or math.nan:17.4f} "
            f"{over(best, limit) or math.nan:8.4f} {proved:>7s}  {plan:24s} {seconds:8.2f}",
            flush=True,
        )


def decoder(blocks: int, hidden: int, length: int = 1024, microbatch: int = 2, vocabulary: int = 50257) -> Chain:
    """Return a GPT-like chain from counts of operations and bytes (fp16, 128 columns per head, 5e13 operations/s).

    A block has 12 h^2 parameters, 24 b s h^2 (1 + s / 6h) operations forward, and keeps
    b s h (34 + 5 heads s / h) bytes.
    """
    tokens = microbatch * length

    def layer(name: str, operations: float, parameters: int, output: int, saved: int) -> Layer:
        forward = int(operations / 5e4)
        return Layer(name, forward, 2 * forward, 4 * parameters, output, saved, parameters=parameters)

    stream = 2 * tokens * hidden
    block = layer(
        "block",
        24 * tokens * hidden**2 * (1 + length / (6 * hidden)),
        12 * hidden**2,
        stream,
        tokens * hidden * 34 + 5 * (hidden // 128) * tokens * length,
    )
    embedding = layer("embedding", 5e4 * 10**5, vocabulary * hidden, stream, 8 * tokens)
    head = layer("head", 2 * tokens * hidden * vocabulary, vocabulary * hidden, 4, stream + 6 * tokens * vocabulary)
    return Chain(f"decoder{blocks}", (embedding, *(block,) * blocks, head), 8 * tokens)


def ideal(problem: Problem) -> float:
    """Return the work of a microbatch divided by the number of devices, in ns."""
    sums = problem.chain.sums
    return int(sums.forward_ns[-1] + sums.backward_ns[-1]) / len(problem.platform)


def timed(problem: Problem) -> tuple[Allocation | None, float]:
    """Return the best allocation and the seconds that it took."""
    begin = time.perf_counter()
    found = smallest_period(problem)
    return found, time.perf_counter() - begin


def random_chain(layers: int) -> Chain:
    """Return a chain with times of 0.3 to 9 ms and sizes of 1 to 200 MB, seeded."""
    rng = random.Random(1)
    return Chain(
        "random",
        tuple(
            Layer(
                f"layer{i}",
                forward_ns=rng.randint(10**5, 3 * 10**6),
                backward_ns=rng.randint(2 * 10**5, 6 * 10**6),
                weight_bytes=rng.randint(10**6, 2 * 10**7),
                output_bytes=rng.randint(10**6, 5 * 10**7),
                saved_bytes=rng.randint(10**7, 2 * 10**8),
            )
            for i in range(layers)
        ),
        input_bytes=10**7,
    )


def equal_chain(layers: int) -> Chain:
    """Return a chain of equal layers, where everything ties."""
    return Chain("equal", (Layer("layer", 10**6, 2 * 10**6, 5 * 10**6, 10**7, 5 * 10**7),) * layers, 10**7)


if __name__ == "__main__":
    main()
