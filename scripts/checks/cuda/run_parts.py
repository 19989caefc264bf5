"""Checks that train: one rank and several, every way of keeping weights and memory, against plain training."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from checked_models import BATCH, WARM
from checking import (
    ACCUMULATE,
    LOOSE,
    LR,
    TRAINED,
    Check,
    Figures,
    Outcome,
    against_serial,
    apart,
    built,
    figures_of,
    must,
    needed,
    period_words,
    whole,
)

FLUSH = ("--weights", "flush", "--no-checkpointing")
STRAIGHT = (*FLUSH, "--no-replicas", "--algorithm", "contiguous")
NEVER = ("--weights", "2bw", "--no-replicas", "--algorithm", "contiguous")
STEPS = 6


def exact(
    check: Check,
    name: str,
    ranks: int,
    planning: Sequence[Any],
    running: Sequence[Any] = (),
    optimizer: str = "sgd",
    steps: int = STEPS,
) -> Outcome:
    """Train with a pipeline that drains, and in this process, and compare."""
    saved = check.folder / TRAINED
    planning = [*planning, "--optimizer", optimizer]
    report = check.run(name, ranks, steps, planning, [*running, "--save", saved])
    words, differences = against_serial(check, built(check, name), report["losses"], saved, optimizer)
    figures = figures_of(report) | differences
    memory = [x["measured_bytes"] / x["planned_bytes"] for x in report["memory"]]
    figures["memory_over_planned"] = memory
    more = f"; memory is up to {max(memory):.2f} of the planned" if memory else ""
    return Outcome(f"{words}; {period_words(figures)}{more}; by {report['exchange']}", figures)


def traced(check: Check) -> Outcome:
    """Does a traced module train that makes tensors on a device, and reads a buffer twice?"""
    profile, plan, saved = (check.folder / f"whole.{x}" for x in ("profile.json", "plan.json", "pt"))
    names = ["--model", "checked_models:whole", "--data", "checked_models:vectors"]
    here = check.surroundings("gpt-tiny", BATCH)
    measuring = ["--batch", BATCH, "--device", check.kind, "--steps", 4, "--data", "checked_models:vectors"]
    check.command("profile", "checked_models:whole", *measuring, "-q", "-o", profile, environment=here)
    planning = ["--gpus", 1, "--mem", check.memory(1), "--accumulate", ACCUMULATE, *FLUSH]
    check.command("plan", profile, *planning, "-o", plan)
    running = [*names, "--steps", STEPS, "--lr", LR, "--device", check.kind, "--json", "--save", saved]
    report = json.loads(check.command("run", plan, *running, environment=here))
    words, figures = against_serial(check, whole(check), report["losses"], saved)
    return Outcome(words, figures)


def half(check: Check, weights: Sequence[str]) -> Outcome:
    """Does 16-bit training follow that in 32 bits?"""
    planning = ["--weights", *weights, "--no-checkpointing", "--no-replicas"]
    plain = check.run("gpt", 1, STEPS, planning)
    report = check.run("gpt", 1, STEPS, [*planning, "--precision", "mixed"], dtype="bfloat16")
    difference = apart(report["losses"], plain["losses"])
    must(difference < 0.1, f"losses in 16 bits are {difference:.1%} from those in 32")
    figures = figures_of(report) | {"from_fp32": difference, "faster": plain["seconds"] / report["seconds"]}
    return Outcome(f"losses in 16 bits are {difference:.1e} from those in 32; {period_words(figures)}", figures)


def waits(check: Check, weights: str, most: int) -> Outcome:
    """How often does the host wait for a value of the device, beside what it does in turn?"""
    for file in check.folder.glob("waits-*"):
        file.unlink()
    planning = ["--weights", weights, "--no-checkpointing", "--no-replicas", "--algorithm", "contiguous"]
    steps = 12
    until = {"CHECKED_UNTIL": str((steps - 2) * ACCUMULATE)}
    plan = check.plan("gpt", 2, [*planning, "--precision", "mixed"], "bfloat16")
    check.run_plan(plan, "gpt", steps, data="watched", environment=until)
    found = {file.name: file.read_text().splitlines() for file in check.folder.glob("waits-*")}
    updates = (steps - 2) - WARM // ACCUMULATE
    counted = Counter(line for lines in found.values() for line in lines)
    worst = max((len(lines) for lines in found.values()), default=0) / updates
    figures = {"per_update": worst, "updates": updates, "ranks": len(found), "where": counted.most_common(20)}
    must(bool(found), "no rank said what it waits for")
    words = f"in {updates} updates of {weights} in 16 bits a rank's host waits {worst:g} times in each"
    must(worst <= most or check.kind == "cpu", f"{words}: {counted.most_common(3)}")
    return Outcome(words, figures)


def offloaded(check: Check) -> Outcome:
    """Does offloading train as it would without, and with how much host memory?"""
    outcome = exact(check, "gpt", 1, [*FLUSH, "--offload"], ["--bucket-size", 4_000_000], "adam")
    host = sum(x["measured_host_bytes"] for x in outcome.figures["states"])
    return Outcome(f"{outcome.sentence}; {host / 1e9:.2f} GB are on the host", outcome.figures)


def newest(check: Check) -> Outcome:
    """Do newest weights train?"""
    report = check.run("gpt", 2, STEPS, ["--weights", "latest", "--no-checkpointing", "--no-replicas"])
    return _falls(report)


def never_drained(check: Check) -> Outcome:
    """Do two weight versions train, with recomputation where the planner likes it, and in what time?"""
    report = check.run("gpt", 2, 12, [*NEVER, "--checkpointing", "segments"])
    return _falls(report)


def _falls(report: Figures) -> Outcome:
    first, last = (sum(report["losses"][i : i + ACCUMULATE]) for i in (0, len(report["losses"]) - ACCUMULATE))
    must(last < first, f"the loss goes from {first / ACCUMULATE:.3f} to {last / ACCUMULATE:.3f}")
    figures = figures_of(report)
    return Outcome(f"the loss falls to {last / first:.2f} of its begin; {period_words(figures)}", figures)


def evaluation(check: Check) -> Outcome:
    """Is an evaluation's loss that of the model itself?"""
    plan = check.plan("cnn", 1, FLUSH)
    saved = check.folder / TRAINED
    check.run_plan(plan, "cnn", 2, ["--save", saved])
    report = check.run_plan(plan, "cnn", 2, ["--load", saved, "--evaluate"])
    layers, loss, data = built(check, "cnn")
    layers.load_state_dict(torch.load(saved, map_location="cpu"))
    layers.eval()
    with torch.no_grad():
        own = [float(loss(layers(x), y)) for x, y in map(data, range(2 * ACCUMULATE))]
    difference = apart(report["losses"], own)
    must(difference < LOOSE, f"an evaluation's losses are {difference:.1e} from the model's")
    return Outcome(f"an evaluation's losses are the model's but for {difference:.1e}", {"difference": difference})


def checkpoints(check: Check) -> Outcome:
    """Does Adam's state go to a checkpoint and back: the same losses as without a break?"""
    plan = check.plan("gpt", 1, [*FLUSH, "--optimizer", "adam"])
    with tempfile.TemporaryDirectory(dir=check.folder) as place:
        unbroken = check.run_plan(plan, "gpt", 6)["losses"]
        folder = ["--checkpoint", place]
        first = check.run_plan(plan, "gpt", 3, folder)["losses"]
        rest = check.run_plan(plan, "gpt", 6, [*folder, "--resume"])["losses"]
    error = apart(first + rest, unbroken)
    must(error < LOOSE, f"after a break losses differ by {error:.1e}")
    return Outcome(f"after a break losses are the same but for {error:.1e}", {"difference": error})


def channels(check: Check) -> Outcome:
    """How do passes and the period depend on the processors that NCCL may take?"""
    needed(check.gpus > 1, "there are fewer than two GPUs")
    plan = check.plan("gpt", min(check.gpus, 8), NEVER)
    figures: Figures = {}
    for name, value in [
        *(("NCCL_MAX_CTAS", str(n)) for n in (1, 2, 4, 8, 32)),
        *(("NCCL_LAUNCH_ORDER_IMPLICIT", x) for x in "01"),
    ]:
        found = figures_of(check.run_plan(plan, "gpt", 40, environment={name: value}))
        figures[f"{name}={value}"] = found["measured_period_ns"]
    best = min(figures, key=lambda key: figures[key] or float("inf"))
    return Outcome(f"the period is shortest with {best}: {(figures[best] or 0) / 1e6:.2f} ms", figures)


def blocking(check: Check) -> Outcome:
    """Does a run come through in which everything blocks, replicas' updates too?"""
    needed(check.kind == "cuda", "a CPU blocks anyway")
    plan = check.plan("gpt", min(max(check.gpus, 2), 4), ["--weights", "2bw", "--no-checkpointing"])
    report = check.run_plan(plan, "gpt", 3, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    return Outcome(f"a run with everything blocking comes through in {report['seconds']:.0f} s", figures_of(report))


def drift(check: Check) -> Outcome:
    """Do the ranks' time lines stay together in a long run?"""
    needed(check.gpus > 1, "there are fewer than two GPUs")
    plan, trace = check.plan("gpt", 2, NEVER), check.folder / "drift.trace.json"
    report = check.run_plan(plan, "gpt", 3000, ["--trace", trace])
    figures = figures_of(report)
    return Outcome(f"{report['seconds']:.0f} s long: {period_words(figures)}", figures)


RUNS: dict[str, Callable[[Check], Outcome]] = {
    "one_rank_cnn": partial(exact, name="cnn", ranks=1, planning=FLUSH),
    "one_rank_gpt": partial(exact, name="gpt", ranks=1, planning=FLUSH),
    "traced": traced,
    "tied": partial(exact, name="tied", ranks=2, planning=STRAIGHT),
    "bf16_flush": partial(half, weights=["flush"]),
    "bf16_2bw": partial(half, weights=["2bw"]),
    "waits_2bw": partial(waits, weights="2bw", most=0),
    "waits_flush": partial(waits, weights="flush", most=1),
    "offload": offloaded,
    "latest": newest,
    "recomputed": partial(exact, name="gpt", ranks=1, planning=["--weights", "flush", "--checkpointing", "stages"]),
    "evaluation": evaluation,
    "two_ranks_cnn": partial(exact, name="cnn", ranks=2, planning=STRAIGHT),
    "two_ranks_gpt": partial(exact, name="gpt", ranks=2, planning=STRAIGHT),
    "replicas": partial(exact, name="gpt", ranks=2, planning=[*FLUSH, "--algorithm", "data-parallel"]),
    "never_drained": never_drained,
    "message_driven": partial(exact, name="gpt", ranks=2, planning=STRAIGHT, running=("--schedule", "message-driven")),
    "checkpoints": checkpoints,
}
SEVERAL: dict[str, Callable[[Check], Outcome]] = {"blocking": blocking, "channels": channels, "drift": drift}
