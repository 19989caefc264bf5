"""Checks that train: one rank and several, every way of keeping weights and memory, against plain training."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checked_models import BATCH, UNTIL, WARM
from checking import (
    ACCUMULATE,
    FLUSH,
    LOOSE,
    LR,
    NEVER,
    REPLICAS,
    STEPS,
    STRAIGHT,
    Check,
    Figures,
    Outcome,
    Part,
    against_serial,
    apart,
    built,
    figures_of,
    must,
    period_words,
    plainly,
)

import pipeplan as pp
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.training.half import HalfOptions

EXITS = 5  # runs under torchrun that have to end well
Options = Mapping[str, Any]
NOTHING: Options = {}


def exact(check: Check, name: str, ranks: int, planning: Options, running: Options = NOTHING) -> Outcome:
    """Train with a pipeline that drains, and in this process, and compare."""
    plan = check.plan(name, ranks, planning)
    data = running.get("data", name)
    saved = check.folder / "trained.pt"
    report = check.run(plan, data, save=saved, **{key: value for key, value in running.items() if key != "data"})
    training = {"optimizer": planning.get("optimizer", "sgd"), "clip": running.get("clip_norm")}
    words, differences = against_serial(check, name, report["losses"], saved, **training)
    figures = figures_of(report) | differences
    memory = figures["memory_over_planned"]
    more = f"; memory is up to {max(memory):.2f} of the planned" if memory else ""
    return Outcome(f"{words}; {period_words(figures)}{more}; by {report['exchange']}", figures)


def traced(check: Check) -> Outcome:
    """Train a traced module that makes tensors on a device, and reads a buffer twice."""
    names = ("checked_models:whole", "checked_models:vectors")
    measured = pp.profile(names[0], microbatch=BATCH, device=check.kind, steps=4, data=names[1])
    plan = pp.plan(measured, gpus=1, mem=check.memory(1), accumulate=ACCUMULATE, **FLUSH).plan
    saved = check.folder / "whole.pt"
    options = RunOptions(steps=STEPS, lr=LR, device=check.kind, save=saved)  # type: ignore[arg-type]  # cpu or cuda
    report = pp.run_plan(plan, ModelSpec(*names), options)
    assert report is not None
    words, figures = against_serial(check, "whole", report.losses, saved)
    return Outcome(words, figures)


def half(check: Check, weights: str, dtype: str = "bfloat16", scale: float | None = None) -> Outcome:
    """Compare 16-bit training with that in 32 bits; with a ``scale`` whose gradients overflow at first."""
    planning = {"weights": weights, "checkpointing": "none", "no_replicas": True}
    plain, _ = plainly(check, "gpt", STEPS)
    options = HalfOptions(**{"loss_scale": scale} if scale else {})
    report = check.run(check.plan("gpt", 1, {**planning, "precision": "mixed"}, dtype), "gpt", half=options)
    skipped = len(report["skipped"])
    difference = apart(report["losses"][:ACCUMULATE], plain[:ACCUMULATE])
    must(difference < 0.1, f"losses in 16 bits are {difference:.1%} from those in 32")
    must(bool(skipped) == bool(scale), f"{skipped} updates were skipped")
    figures = figures_of(report) | {"from_fp32": difference}
    return Outcome(
        f"losses are {difference:.1e} from those in 32 bits, {skipped} skipped; {period_words(figures)}", figures
    )


def waits(check: Check, weights: str, most: int) -> Outcome:
    """Count how often the host waits for the device, beside what it does in turn."""
    for file in check.folder.glob("waits-*"):
        file.unlink()
    planning = {"weights": weights, "checkpointing": "none", "no_replicas": True, "algorithm": "contiguous"}
    plan = check.plan("gpt", 2, planning | {"precision": "mixed"}, "bfloat16")
    check.run(plan, "watched" if check.gpus > 1 else "one_gpu:watched", UNTIL // ACCUMULATE + 2)  # a staged send waits
    found = {file.name: file.read_text().splitlines() for file in check.folder.glob("waits-*")}
    updates = (UNTIL - WARM) // ACCUMULATE
    counted = Counter(line for lines in found.values() for line in lines)
    worst = max((len(lines) for lines in found.values()), default=0) / updates
    figures = {"per_update": worst, "updates": updates, "ranks": len(found), "where": counted.most_common(20)}
    must(bool(found), "no rank said what it waits for")
    words = f"in {updates} updates of {weights} in 16 bits a rank's host waits {worst:g} times in each"
    must(worst <= most or check.kind == "cpu", f"{words}: {counted.most_common(3)}")
    return Outcome(words, figures)


def offloaded(check: Check) -> Outcome:
    """Train with the optimizer's state on the host."""
    outcome = exact(check, "gpt", 1, {**FLUSH, "offload": True, "optimizer": "adam"}, {"bucket_size": 4_000_000})
    host = sum(x["measured_host_bytes"] for x in outcome.figures["states"])
    return Outcome(f"{outcome.sentence}; {host / 1e9:.2f} GB are on the host", outcome.figures)


def falls(check: Check, planning: Options, steps: int = STEPS) -> Outcome:
    """Train with weights of several versions, whose losses have to fall."""
    report = check.run(check.plan("gpt", 2, planning), "gpt", steps)
    first, last = (sum(report["losses"][i : i + ACCUMULATE]) for i in (0, len(report["losses"]) - ACCUMULATE))
    must(last < first, f"the loss goes from {first / ACCUMULATE:.3f} to {last / ACCUMULATE:.3f}")
    figures = figures_of(report)
    return Outcome(f"the loss falls to {last / first:.2f} of its begin; {period_words(figures)}", figures)


def evaluation(check: Check) -> Outcome:
    """Compare an evaluation's loss with that of the model itself."""
    plan, saved = check.plan("cnn", 1, FLUSH), check.folder / "trained.pt"
    check.run(plan, "cnn", 2, save=saved)
    report = check.run(plan, "cnn", 2, load=saved, evaluates=True)
    layers, loss, data = built(check, "cnn")
    layers.load_state_dict(torch.load(saved, map_location="cpu"))
    layers.eval()
    with torch.no_grad():
        own = [float(loss(layers(x), y)) for x, y in map(data, range(2 * ACCUMULATE))]
    difference = apart(report["losses"], own)
    must(difference < LOOSE, f"an evaluation's losses are {difference:.1e} from the model's")
    return Outcome(f"an evaluation's losses are the model's but for {difference:.1e}", {"difference": difference})


def checkpoints(check: Check, ranks: int, planning: Options) -> Outcome:
    """Break off, resume, and compare with training without a break; once the rest runs on the CPU."""
    plan = check.plan("tiny", ranks, {"optimizer": "adam"} | dict(planning))
    with tempfile.TemporaryDirectory(dir=check.folder) as place:
        unbroken = check.run(plan, "tiny", 6)["losses"]
        first = check.run(plan, "tiny", 3, checkpoint=Path(place))["losses"]
        on_cpu = check.run(plan, "tiny", 4, checkpoint=Path(place), resume=True, device="cpu")["losses"]
        rest = check.run(plan, "tiny", 6, checkpoint=Path(place), resume=True)["losses"]
    error = apart(first + on_cpu + rest, unbroken)
    must(error < LOOSE, f"after two breaks losses differ by {error:.1e}")
    return Outcome(
        f"after two breaks, and an update on the CPU, losses are the same but for {error:.1e}", {"off": error}
    )


def exits(check: Check) -> Outcome:
    """Run under torchrun, saving the model, again and again: every run has to end with 0."""
    plan = check.plan("gpt", 2, STRAIGHT)
    words = check.run_words(plan, "gpt", 1)[1:]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    rounds = EXITS if check.kind == "cuda" else 2
    for _ in range(rounds):
        check.command(*torchrun, *words, "--save", check.folder / "exits.pt")
    return Outcome(f"{rounds} runs under torchrun ended with 0")


def channels(check: Check) -> Outcome:
    """Measure the period by the processors that NCCL may take."""
    words = check.run_words(check.plan("gpt", min(check.gpus, 8), NEVER), "gpt", 40)
    figures: Figures = {}
    for name, value in [
        *(("NCCL_MAX_CTAS", str(n)) for n in (1, 2, 4, 8, 32)),
        *(("NCCL_LAUNCH_ORDER_IMPLICIT", x) for x in "01"),
    ]:
        found = json.loads(check.command(*words, "--json", environment={name: value}))
        figures[f"{name}={value}"] = found["measured_period_ns"]
    best = min(figures, key=lambda key: figures[key] or float("inf"))
    return Outcome(f"the period is shortest with {best}: {(figures[best] or 0) / 1e6:.2f} ms", figures)


def blocking(check: Check) -> Outcome:
    """Let everything block, replicas' updates too."""
    plan = check.plan("gpt", min(max(check.gpus, 2), 4), {"weights": "2bw", "checkpointing": "none"})
    text = check.command(*check.run_words(plan, "gpt", 3), "--json", environment={"CUDA_LAUNCH_BLOCKING": "1"})
    return Outcome(f"a run with everything blocking comes through in {json.loads(text)['seconds']:.0f} s")


def drift(check: Check) -> Outcome:
    """Keep the ranks' time lines together in a long run."""
    report = check.run(check.plan("gpt", 2, NEVER), "gpt", 3000)
    figures = figures_of(report)
    return Outcome(f"{report['seconds']:.0f} s long: {period_words(figures)}", figures)


def _exact(question: str, seconds: float, *what: Any) -> Part:
    return Part(lambda check: exact(check, *what), question, seconds)


CLIPPED = ({**STRAIGHT, "clipped": True}, {"clip_norm": 1.0})
ZERO = {"zero": 1, "algorithm": "data-parallel", "weights": "flush", "checkpointing": "none"}
LATEST = {"weights": "latest", "checkpointing": "none", "no_replicas": True}
RUNS = {
    "one_rank_cnn": _exact("Is ResNet-50 trained as plainly?", 20, "cnn", 1, FLUSH),
    "one_rank_gpt": _exact("Is GPT-2 trained as plainly?", 20, "gpt", 1, FLUSH),
    "traced": Part(traced, "Is a traced module trained as plainly?", 15),
    "two_ranks_gpt": _exact("Are two ranks on one GPU?", 20, "gpt", 2, STRAIGHT),
    "four_ranks": _exact("Are four?", 25, "gpt", 4, STRAIGHT),
    "bf16_flush": Part(lambda check: half(check, "flush"), "Does bfloat16 follow 32 bits?", 25),
    "fp16_overflow": Part(
        lambda check: half(check, "flush", "float16", 2.0**40), "Are updates that overflow skipped in float16?", 25
    ),
    "waits_2bw": Part(lambda check: waits(check, "2bw", 0), "Does the host wait in passes?", 25),
    "waits_flush": Part(lambda check: waits(check, "flush", 1), "Does it where the pipeline drains?", 25),
    "clipped": _exact("Are gradients clipped by the norm of all stages?", 20, "gpt", 2, *CLIPPED),
    "zero": Part(lambda check: checkpoints(check, 2, ZERO), "Does ZeRO-1 come back from a checkpoint?", 45),
    "offload": Part(offloaded, "Does offloading train as it would without?", 25),
    "zero_bubble": _exact("Are split backwards exact?", 20, "gpt", 2, {**STRAIGHT, "schedule": "zb1p"}),
    "loader": _exact("Does a loader with workers give the same?", 20, "gpt", 2, STRAIGHT, {"data": "loader"}),
    "tied": _exact("Are shared weights?", 20, "tied", 2, STRAIGHT),
    "recomputed": _exact("Is recomputation exact?", 20, "gpt", 1, {"weights": "flush", "checkpointing": "stages"}),
    "message_driven": _exact("Are messages in any order?", 20, "gpt", 2, {**STRAIGHT, "schedule": "message-driven"}),
    "latest": Part(lambda check: falls(check, LATEST), "Do newest weights train?", 20),
    "never_drained": Part(
        lambda check: falls(check, {**NEVER, "checkpointing": "segments"}, 12),
        "Do two versions, with recomputation?",
        20,
    ),
    "bf16_2bw": Part(lambda check: half(check, "2bw"), "Does bfloat16 under 2bw?", 25),
    "two_ranks_cnn": _exact("Is ResNet-50 on two ranks?", 20, "cnn", 2, STRAIGHT),
    "replicas": _exact("Are replicas' sums?", 20, "gpt", 2, {**REPLICAS, "weights": "flush"}),
    "evaluation": Part(evaluation, "Is an evaluation's loss the model's?", 25),
    "checkpoints": Part(lambda check: checkpoints(check, 1, FLUSH), "Does Adam's state come back, and on a CPU?", 35),
    "exits": Part(exits, "Do runs under torchrun end with 0?", 90),
}
SEVERAL = {
    "blocking": Part(blocking, "Does a run come through in which everything blocks?", 30, 2, rehearsed=False),
    "channels": Part(channels, "How does the period depend on NCCL's processors?", 90, 2, rehearsed=False),
    "drift": Part(drift, "Do time lines stay together in a long run?", 60, 2, rehearsed=False),
}
