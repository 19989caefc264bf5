"""``pipeplan estimate``: what memory and time does training a large transformer take, from its sizes alone?"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

import click

from ..choices import DEFAULT_BANDWIDTH
from ..errors import BadInput
from ..names import shown
from ..units import format_bandwidth, parse_bandwidth, parse_bytes
from . import completed
from .grouped import GroupedCommand
from .options import JSON, Gpus, Number, Share

if TYPE_CHECKING:
    from ..papers.transformer import Grid
    from ..problem import Zero
    from ..zoo.sizes import Transformer

COUNT = click.IntRange(1, 10**6)
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")
MOST_GPUS = 10**6  # formulas take no time for each
MOST_TOKENS = 10**18
LEAST_SHARE = 1e-4


@click.command(cls=GroupedCommand)
@click.option(
    "--model",
    metavar="NAME",
    type=completed.TRANSFORMER,
    help="Sizes of a GPT or Llama of the zoo, such as llama3-8b, or hf:CONFIG; the next five override.",
)
@click.option("--layers", type=click.IntRange(1, 10**4), help="Transformer layers.")
@click.option("--hidden", type=COUNT, help="Hidden size.")
@click.option("--heads", type=COUNT, help="Attention heads.")
@click.option("--sequence", type=COUNT, help="Tokens in a sample.")
@click.option("--vocabulary", type=COUNT, help="Entries of the token table.")
@click.option("--untied", is_flag=True, help="The head has a table of its own.")
@click.option(
    "--gpus",
    type=Gpus(most=MOST_GPUS),
    help="All GPUs: --inter times --data-parallel; two of the three say it.  [default: 1]",
)
@click.option("--inter", type=COUNT, help="Stages of each pipeline.")
@click.option("--data-parallel", "data", type=COUNT, help="Pipelines that share the batch.")
@click.option("--data", "old_data", type=COUNT, hidden=True)
@click.option("--microbatch", type=COUNT, default=1, show_default=True, help="Samples that move together.")
@click.option("--batch", type=click.IntRange(1, 10**9), help="Samples per update.  [default: 4 microbatches per GPU]")
@click.option(
    "--limit", type=COUNT, help="Admitted at once at most: microbatches in each pipeline.  [default: --inter]"
)
@click.option(
    "--ac",
    metavar="N|none",
    help="Layers from one checkpoint to the next.  [default: Myelin's rule, near the root of --layers]",
)
@click.option("--offload", is_flag=True, help="Keep optimizer state in host memory.")
@click.option("--zero", type=click.IntRange(0, 1), default=0, help="1: the pipelines share optimizer state (ZeRO-1).")
@click.option(
    "--bucket-size",
    type=click.IntRange(1, 10**12),
    default=16 * 10**6,
    show_default=True,
    help="With --offload: parameters whose state is on the GPU at a time.",
)
@click.option(
    "--gpu", metavar="NAME|FILE", type=completed.GPU, help="Take --mem and --peak from the table of GPUs, such as v100."
)
@click.option("--mem", metavar="SIZE", help="Memory of a GPU, such as 16GB: exit 1 when a stage doesn't fit.")
@click.option("--peak", type=Number(1e-6, 10**6), metavar="TFLOPS", help="Peak of a GPU in 1e12 flop/s.")
@click.option("--share", type=Share(), default="50%", show_default=True, help="Share of the peak over a whole batch.")
@click.option("--tokens", default="300e9", show_default=True, metavar="N", help="Tokens to train on.")
@click.option("--bandwidth", metavar="RATE", help=f"In the all-reduce, per GPU.  [default: {DEFAULT_BANDWIDTH}]")
@JSON
def command(
    model: str | None,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    sequence: int | None,
    vocabulary: int | None,
    untied: bool,
    gpus: tuple[int, ...] | None,
    inter: int | None,
    data: int | None,
    old_data: int | None,
    microbatch: int,
    batch: int | None,
    limit: int | None,
    ac: str | None,
    offload: bool,
    zero: Zero,
    bucket_size: int,
    gpu: str | None,
    mem: str | None,
    peak: float | None,
    share: float,
    tokens: str,
    bandwidth: str | None,
    as_json: bool,
) -> None:
    """Estimate memory and time of training a GPT on a grid of pipelines x data parallelism, without a profile.

    Parameters, bytes on each GPU by class, flops of a batch, the all-reduce, days for so many tokens: mixed precision
    with Adam and recomputation between checkpoints, as in Myelin.

    \b
    Example: pipeplan estimate --model myelin-12b --gpus 48 --inter 6 --microbatch 8 --batch 16384 --offload --gpu v100
    """
    from ..files.accelerators import accelerator
    from ..papers.transformer import MIXED, check_sizes
    from ..papers.transformer_report import Question, estimate_figures, print_estimate

    network = _network(model, dict(zip(SIZES, (layers, hidden, heads, sequence, vocabulary), strict=True)), untied)
    assumptions = []
    stages, pipelines = _shape(None if gpus is None else prod(gpus), inter, data or old_data)
    if batch is None:
        batch = 4 * stages * pipelines * microbatch
        assumptions.append(f"batch of {batch} samples, 4 microbatches per GPU")
    if bandwidth is None:
        assumptions.append(f"all-reduce at {format_bandwidth(parse_bandwidth(DEFAULT_BANDWIDTH))} per GPU (PCIe 3 x16)")
    grid = _checkpointed(network, stages, pipelines, microbatch, batch, limit, ac)
    check_sizes(network, grid)
    device = None if gpu is None else accelerator(gpu)
    memory = parse_bytes(mem, "--mem") if mem is not None else None if device is None else device.memory_bytes
    flops = peak * 1e12 if peak is not None else None if device is None else device.peak("float16")
    if share < LEAST_SHARE:
        raise BadInput(f"--share: {100 * share:g}% of the peak is less than {LEAST_SHARE:.2%}")
    question = Question(
        name=model or "transformer",
        model=network,
        grid=grid,
        policy=replace(MIXED, offload=offload, bucket_parameters=bucket_size, accumulate=grid.microbatches, zero=zero),
        memory_bytes=memory,
        bandwidth=parse_bandwidth(bandwidth or DEFAULT_BANDWIDTH, "--bandwidth"),
        peak=flops,
        share=share,
        tokens=_tokens(tokens),
    )
    figures = estimate_figures(question)
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        print_estimate(question, figures, assumptions)
    if figures["memory"]["fits"] is False:
        raise click.exceptions.Exit(1)


def _network(name: str | None, sizes: dict[str, int | None], untied: bool) -> Transformer:
    from ..zoo import HUGGING_FACE, ZOO
    from ..zoo.sizes import TRANSFORMERS, Llama, Transformer

    given = {key: value for key, value in sizes.items() if value is not None}
    if name is None:
        if missing := [f"--{key}" for key in SIZES if key not in given]:
            raise click.UsageError(f"say the network: --model, or also {', '.join(missing)}")
        return Transformer(**given, tied=not untied)
    if name.startswith(HUGGING_FACE):
        from ..runtime.model.build.transformer_sizes import sizes_of

        known = sizes_of(name.removeprefix(HUGGING_FACE))
    elif (short := name.removeprefix(ZOO)) in TRANSFORMERS:
        known = TRANSFORMERS[short]
    else:
        listed = f"{', '.join(TRANSFORMERS)}, or hf:CONFIG"
        raise BadInput(f"--model: no GPT or Llama is named '{shown(short, 40)}'; known are {listed}")
    if isinstance(known, Llama) and given.get("heads", known.heads) % known.groups:
        raise BadInput(f"--heads: {given['heads']} heads don't share {known.groups} of keys and values evenly")
    return replace(known, **given, tied=known.tied and not untied)


def _shape(gpus: int | None, inter: int | None, data: int | None) -> tuple[int, int]:
    """Return stages and pipelines from two of the three counts, or one of the latter two."""
    if gpus is None:
        return inter or 1, data or 1
    if inter is None and data is None:
        if gpus == 1:
            return 1, 1
        raise BadInput(f"--gpus: {gpus} GPUs can be many grids; say also --inter or --data-parallel")
    known, other = ("--inter", inter) if inter is not None else ("--data-parallel", data)
    assert other is not None
    if gpus % other:
        raise BadInput(f"--gpus: {gpus} is not a multiple of {known} {other}")
    if inter is not None and data is not None and inter * data != gpus:
        raise BadInput(f"--gpus: {gpus} is not --inter {inter} times --data-parallel {data}, which is {inter * data}")
    return (inter, gpus // inter) if inter is not None else (gpus // other, other)


def _checkpointed(
    network: Transformer, inter: int, data: int, microbatch: int, batch: int, limit: int | None, ac: str | None
) -> Grid:
    from ..papers.transformer import Grid, paper_checkpoint

    grid = Grid(inter, data, microbatch, batch, None, limit)
    if ac is None:
        return replace(grid, checkpoint=paper_checkpoint(network.layers, min(inter, network.layers)))
    if ac == "none":
        return grid
    if not (ac.isascii() and ac.isdecimal() and 0 < len(ac) < 8 and int(ac)):
        raise BadInput(f"--ac: '{shown(ac, 40)}' is neither a positive number of layers nor none")
    return replace(grid, checkpoint=int(ac))


def _tokens(text: str) -> int:
    count = Fraction(text) if re.fullmatch(r"[0-9]{1,19}(\.[0-9]{1,18})?([eE]\+?[0-9]{1,2})?", text) else None
    if count is None or count.denominator != 1 or not 0 < count <= MOST_TOKENS:
        raise BadInput(f"--tokens: '{shown(text, 40)}' is not a positive whole number up to 1e18, such as 300e9")
    return int(count)
