"""What does training a transformer take, in figures and on a page of text? Memory by class, flops, days."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import sqrt
from typing import Any

from rich.table import Table
from rich.text import Text

from ..cost.time_model import ring_all_reduce_ns
from ..problem import Policy
from ..report.looks import console, make_table, print_fitted
from ..report.tables import NARROW
from ..units import format_bandwidth, format_bytes
from ..zoo.sizes import Transformer
from .transformer import (
    Grid,
    Memory,
    batch_flops,
    even_share,
    held_layers,
    lightest_checkpoint,
    paper_checkpoint,
    printed_activation_bytes,
    printed_held_layers,
    remedies,
    share_seconds,
    stage_layers,
    stage_memories,
    training_days,
)

CLASSES = ("weights", "gradient", "optimizer", "bucket", "activation", "buffer", "total", "host")


@dataclass(frozen=True)
class Question:
    """What is to be estimated: network, grid and policy; memory and peak flop/s of a GPU (None: not said)."""

    name: str
    model: Transformer
    grid: Grid
    policy: Policy
    memory_bytes: int | None
    bandwidth: int
    peak: float | None
    share: float
    tokens: int


def estimate_figures(question: Question) -> dict[str, Any]:
    """Return the figures of ``estimate --json``: sizes in bytes, times in ns, seconds and days as their names say."""
    model, grid, policy = question.model, question.grid, question.policy
    share, stages = even_share(model, grid, policy), stage_memories(model, grid, policy)
    layers, limit = stage_layers(model.layers, grid.inter), question.memory_bytes
    peak_bytes = max(memory.total_bytes for memory in stages)
    fits = None if limit is None else peak_bytes <= limit
    figures: dict[str, Any] = {
        "model": {"name": question.name, **asdict(model), "parameters": model.parameters},
        "grid": {
            "gpus": grid.gpus,
            "inter": grid.inter,
            "data": grid.data,
            "microbatch": grid.microbatch,
            "batch": grid.batch,
            "microbatches": grid.microbatches,
            "limit": grid.pipeline_limit,
        },
        "checkpointing": _checkpointing(model, grid),
        "memory": {
            "offload": policy.offload,
            "zero": policy.zero,
            "limit_bytes": limit,
            "fits": fits,
            "peak_bytes": peak_bytes,
            "all_gpus_bytes": grid.data * sum(memory.total_bytes for memory in stages),
            "even_share": _memory(share, limit),
            "even_share_all_gpus_bytes": grid.gpus * share.total_bytes,
            "stages": [{"layers": n, **_memory(memory, limit)} for n, memory in zip(layers, stages, strict=True)],
            "remedies": remedies(model, grid, policy, limit) if limit is not None and not fits else [],
        },
        "time": {
            "flops_per_batch": batch_flops(model, grid.batch, grid.checkpoint is not None),
            "all_reduce_bytes": share.gradient_bytes,
            "all_reduce_ns": ring_all_reduce_ns(share.gradient_bytes, grid.data, question.bandwidth),
            "bandwidth_bytes_per_second": question.bandwidth,
            "tokens": question.tokens,
            "batches": question.tokens / (grid.batch * model.sequence),
        },
    }
    if question.peak is not None:
        seconds = share_seconds(model, grid, question.peak, question.share)
        figures["time"] |= {
            "peak_flops": question.peak,
            "share": question.share,
            "batch_seconds": seconds,
            "days": training_days(model, grid, question.tokens, seconds),
        }
    return figures


def _checkpointing(model: Transformer, grid: Grid) -> dict[str, Any]:
    ac = grid.checkpoint
    return {
        "ac": ac,
        "paper_ac": paper_checkpoint(model.layers, grid.inter),
        "lightest_ac": lightest_checkpoint(model, grid),
        "held_layers": None if ac is None else float(held_layers(model.layers, grid.inter, ac)),
        "best_ac": sqrt(model.layers),
        "printed_held_layers": None if ac is None else float(printed_held_layers(model.layers, grid.inter, ac)),
        "printed_best_ac": sqrt(model.layers / grid.inter),
        "printed_activation_bytes": printed_activation_bytes(model, grid),
    }


def _memory(memory: Memory, limit: int | None) -> dict[str, Any]:
    sizes = {f"{name}_bytes": getattr(memory, f"{name}_bytes") for name in CLASSES}
    return sizes | {"fits": None if limit is None else memory.total_bytes <= limit}


def print_estimate(question: Question, figures: dict[str, Any], assumptions: Sequence[str] = ()) -> None:
    """Print the figures: network, grid, memory by class, whether it fits, flops, all-reduce, days."""
    out = console()
    model, grid, policy = question.model, question.grid, question.policy
    out.print(
        Text.assemble(
            (question.name, "bold"),
            f": {model.parameters / 1e9:.3f}e9 parameters; {model.layers} layers of hidden size {model.hidden}, "
            f"{model.heads} heads, sequence {model.sequence}, vocabulary {model.vocabulary}",
        )
    )
    out.print(
        f"on {_count(grid.gpus, 'GPU')} = {_count(grid.inter, 'stage')} x {_count(grid.data, 'pipeline')}; a batch of "
        f"{grid.batch} is {_count(grid.microbatches, 'microbatch')} of {grid.microbatch} for each pipeline, at most "
        f"{grid.pipeline_limit} at once"
    )
    for assumption in assumptions:
        out.print(f"assumed: {assumption}")
    out.print()
    state = f"state on the host, {policy.bucket_parameters:,} parameters at a time" if policy.offload else "no offload"
    shared = f", state shared by {_count(grid.data, 'pipeline')}" if policy.zero else ""
    out.print(f"memory      mixed precision, Adam, {state}{shared}; {_recomputed(grid)}")
    print_fitted(out, _table(question, figures["memory"], out.width))
    out.print(
        Text("GB on one GPU; even share: Myelin's rule; stages: with embedding, head, logits and messages", "dim")
    )
    out.print()
    for sentence in _verdict(question, figures["memory"]):
        out.print(sentence)
    for sentence in _formulas(figures["checkpointing"], figures["memory"]):
        out.print(sentence)
    out.print()
    for sentence in _times(question, figures["time"]):
        out.print(sentence)


def _recomputed(grid: Grid) -> str:
    if grid.checkpoint is None:
        return "nothing recomputed"
    return f"a checkpoint every {_count(grid.checkpoint, 'layer')}"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _table(question: Question, memory: dict[str, Any], width: int) -> Table:
    narrow = width < NARROW
    names = ("layers", "weights", "gra-dients", "opti-mizer", "bucket", "acti-vations", "buffers", "sum", "host")
    broken = (name.replace("-", "-\n" if narrow else "") for name in names)
    table = make_table("stage", *broken, left=("stage",), space=1 if narrow else 2)
    layers = question.model.layers / question.grid.inter
    table.add_row(
        "even share", f"{layers:g}" if layers.is_integer() else f"{layers:.1f}", *_cells(memory["even_share"])
    )
    for _, run in groupby(enumerate(memory["stages"]), key=lambda pair: pair[1]):
        numbers = list(run)
        (first, row), (last, _) = numbers[0], numbers[-1]
        table.add_row(str(first) if first == last else f"{first}-{last}", str(row["layers"]), *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row[f'{name}_bytes'] / 1e9:.2f}" for name in CLASSES]
    cells[CLASSES.index("total")] += "!" if row["fits"] is False else ""
    return cells


def _verdict(question: Question, memory: dict[str, Any]) -> list[str | Text]:
    total = f"all GPUs together {format_bytes(memory['all_gpus_bytes'])}"
    if question.memory_bytes is None:
        return [f"largest     {format_bytes(memory['peak_bytes'])} on one GPU, {total}"]
    size = format_bytes(question.memory_bytes)
    if memory["fits"]:
        peak = format_bytes(memory["peak_bytes"])
        return [Text.assemble("fits        ", (peak, "bold"), f" of {size} at most, {total}")]
    over = [stage for stage, row in enumerate(memory["stages"]) if not row["fits"]]
    largest = max(over, key=lambda stage: int(memory["stages"][stage]["total_bytes"]))
    rule = "fits" if memory["even_share"]["fits"] else "does not fit"
    return [
        Text.assemble(
            ("too large", "bold"),
            f"   {len(over)} of {_count(len(memory['stages']), 'stage')} for {size}; stage {largest} "
            f"needs {format_bytes(memory['peak_bytes'])}, an even share {rule}; {total}",
        ),
        f"feasible    with {', or '.join(memory['remedies'])}",
    ]


def _formulas(checkpointing: dict[str, Any], memory: dict[str, Any]) -> list[str]:
    ac, lightest, rule = (checkpointing[name] for name in ("ac", "lightest_ac", "paper_ac"))
    if ac is None:
        return [f"ac          none; {rule} is Myelin's rule, {lightest} takes the least memory"]
    inside = "" if lightest == ac else f", {lightest} takes the least memory"
    return [
        f"ac          {ac}; {rule} is Myelin's rule, nearest to sqrt(N) = {checkpointing['best_ac']:.2f}{inside}",
        f"formula     {checkpointing['held_layers']:g} layers' activations held, "
        f"{format_bytes(memory['even_share']['activation_bytes'])}; as misprinted "
        f"{checkpointing['printed_held_layers']:g}, {format_bytes(checkpointing['printed_activation_bytes'])}, "
        f"least at sqrt(N/G_inter) = {checkpointing['printed_best_ac']:.2f}",
    ]


def _times(question: Question, time: dict[str, Any]) -> list[str | Text]:
    lines: list[str | Text] = [f"flops       {time['flops_per_batch']:.4g} per batch"]
    if question.grid.data > 1:
        lines.append(
            f"all-reduce  {format_bytes(time['all_reduce_bytes'])} of gradients over {question.grid.data} GPUs at "
            f"{format_bandwidth(question.bandwidth)}: {time['all_reduce_ns'] / 1e9:.2f} s"
        )
    if question.peak is not None:
        tokens = f"{question.tokens / 1e9:g}e9" if question.tokens >= 10**9 else f"{question.tokens:,}"
        lines += [
            f"batch       {time['batch_seconds']:.2f} s at {100 * question.share:g}% of "
            f"{question.peak / 1e12:g} Tflop/s",
            Text.assemble(
                "training    ",
                (f"{time['days']:.1f} days", "bold"),
                f" for {tokens} tokens, {time['batches']:.0f} batches",
            ),
        ]
    return lines
