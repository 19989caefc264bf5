"""What would a profile of a GPT of these sizes say? A chain from flops and closed formulas, for planning at once."""

from __future__ import annotations

from ..problem import Chain, Layer
from ..zoo.sizes import Transformer
from .transformer import block_bytes, head_flops, layer_flops, output_bytes

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
    counts in both of its layers.
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
        microbatch=microbatch,
        dtype="float16",
        source="computed from the network's sizes",
    )
