"""What would a large transformer take that nobody has profiled? Time of a batch, and a chain to plan with."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.cost.time_model import ring_all_reduce_ns
from pipeplan.problem import Chain, Layer, SharedWeights
from pipeplan.zoo.text.sizes import Transformer

from .formulas import MIXED, Grid, block_bytes, even_share, head_flops, layer_flops, output_bytes, stage_layers

MIXED_WEIGHT_BYTES = 4  # per parameter in fp32, as profiles count them; mixed precision is the policy's


def transformer_chain(
    model: Transformer,
    microbatch: int,
    flops: float,
    fixed_ns: int = 0,
    optimizer_ns: float = 0.0,
    name: str = "transformer",
) -> Chain:
    """Return the chain embedding, blocks, head with microbatches of ``microbatch`` samples in half precision.

    A forward takes ``fixed_ns`` and its flops at ``flops`` per second, a backward twice that; the embedding is free but
    for its fixed part. The optimizer takes ``optimizer_ns`` per parameter. Bytes as in ``transformer``: a block saves
    s b h (34 + 5 a s / h), the embedding its dropout mask, the head its inputs and the logits in fp32; a tied table
    counts in both of its layers, which share it.
    """
    tokens = microbatch * model.sequence

    def layer(what: str, work: int, parameters: int, output: int, saved: int) -> Layer:
        forward = fixed_ns + round(work / 3 / flops * 1e9)
        return Layer(
            what,
            forward,
            2 * forward,
            MIXED_WEIGHT_BYTES * parameters,
            output,
            saved,
            optimizer_ns=round(optimizer_ns * parameters),
            parameters=parameters,
        )

    moved = output_bytes(model, microbatch)
    block = layer(
        "block",
        layer_flops(model, microbatch, recompute=False),
        model.block_parameters,
        moved,
        block_bytes(model, microbatch),
    )
    head = model.norm_parameters + model.table_parameters
    tables = (0, model.layers + 1), MIXED_WEIGHT_BYTES * model.table_parameters, model.table_parameters
    logits = tokens * (4 * model.hidden + 4 * model.vocabulary)
    layers = (
        layer("embedding", 0, model.embedding_parameters, moved, tokens * model.hidden),
        *(block for _ in range(model.layers)),
        layer("head", head_flops(model, microbatch), head, 0, logits),
    )
    return Chain(
        name,
        layers,
        input_bytes=8 * tokens,
        tied=((0, len(layers) - 1),) if model.tied else (),
        shared=(SharedWeights(*tables),) if model.tied else None,
        microbatch=microbatch,
        dtype="float16",
        source="computed from the network's sizes",
    )


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """Predicted seconds of one batch: ``pipeline`` of which ``idle`` the average GPU waits, then ``all_reduce``."""

    pipeline: float
    idle: float
    all_reduce: float

    @property
    def total(self) -> float:
        """Seconds from the first forward to the last gradient."""
        return self.pipeline + self.all_reduce


def predicted_time(model: Transformer, grid: Grid, peak: float, efficiency: float, bandwidth: int) -> PredictedTime:
    """Predict a batch's time where kernels reach ``efficiency`` of ``peak`` flop/s, without counting messages.

    m microbatches take the sum of all stages plus (m - 1) times the slowest, which is the last, that has the head: the
    more stages, the more the others wait for it. Then the all-reduce of an even share of the gradients, which is what
    Myelin's measurements follow (0.62 s and 4.32 s, section V-B); the optimizer's steps overlap with it.
    """
    recompute = grid.checkpoint is not None
    layer, head = layer_flops(model, grid.microbatch, recompute), head_flops(model, grid.microbatch)
    flops = [count * layer for count in stage_layers(model.layers, grid.inter)]
    flops[-1] += head
    rate = peak * efficiency
    pipeline = (sum(flops) + (grid.microbatches - 1) * max(flops)) / rate
    busy = grid.microbatches * sum(flops) / grid.inter / rate
    exchange = ring_all_reduce_ns(even_share(model, grid, MIXED).gradient_bytes, grid.data, bandwidth)
    return PredictedTime(pipeline, pipeline - busy, exchange / 1e9)
