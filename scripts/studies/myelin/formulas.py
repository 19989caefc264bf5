"""What memory and time does a large transformer take on a grid of pipelines x data parallelism (Myelin)?

Closed formulas of a network's sizes, for machines that nobody has profiled: parameters, bytes on each GPU by class,
flops and time of a batch. Legend of the papers' letters: l layers, h hidden size, a heads, s sequence length, V
vocabulary, b samples, N = l, G_inter stages of a pipeline, G_data pipelines, ac layers between two checkpoints, phi
parameters. Sources: Myelin sections V and VI as corrected in ALGORITHMS section 9; Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (2022), section 4; Narayanan et al., Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM (2021), section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import sqrt

from pipeplan.cost.memory_model import gradient_bytes, held_bytes, host_bytes, weights_bytes
from pipeplan.errors import BadInput
from pipeplan.integers import ceil_div
from pipeplan.problem import Policy
from pipeplan.zoo.text.sizes import Llama, Transformer

MIXED = Policy("flush", optimizer="adam", precision="mixed")  # Myelin's training: 20 bytes per parameter


@dataclass(frozen=True, slots=True)
class Grid:
    """How a batch is trained: ``data`` pipelines of ``inter`` stages, each fed ``microbatch`` samples at a time.

    ``checkpoint`` is ac, the layers between two checkpoints (None: nothing is recomputed). ``limit`` is the most
    microbatches in one pipeline (None: ``inter``, as in Myelin section IV-A).
    """

    inter: int
    data: int
    microbatch: int
    batch: int
    checkpoint: int | None
    limit: int | None = None

    @property
    def gpus(self) -> int:
        """GPUs of the grid."""
        return self.inter * self.data

    @property
    def microbatches(self) -> int:
        """Microbatches that each pipeline runs for one batch."""
        return self.batch // (self.data * self.microbatch)

    @property
    def pipeline_limit(self) -> int:
        """Microbatches in one pipeline at most."""
        return self.inter if self.limit is None else self.limit


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU by class, and the bytes of its share of the optimizer's state in host memory.

    ``bucket_bytes`` is what an offloaded state takes on the GPU; ``buffer_bytes`` the messages to and from neighbours.
    """

    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    bucket_bytes: int
    activation_bytes: int
    buffer_bytes: int
    host_bytes: int

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state: 20 phi, with offload 4 phi + 16 bsize (Myelin section V-B)."""
        return self.weights_bytes + self.gradient_bytes + self.optimizer_bytes + self.bucket_bytes

    @property
    def total_bytes(self) -> int:
        """Everything on the GPU."""
        return self.state_bytes + self.activation_bytes + self.buffer_bytes


def check_sizes(model: Transformer, grid: Grid) -> None:
    """Raise BadInput with the numbers where the grid doesn't fit the network, or the batch the grid."""
    if model.hidden % model.heads:
        raise BadInput(f"hidden: {model.hidden} is not a multiple of heads: {model.heads}")
    if grid.inter > model.layers:
        raise BadInput(f"inter: {grid.inter} stages are more than the network's {model.layers} layers")
    fed = grid.data * grid.microbatch
    if grid.batch % fed:
        raise BadInput(
            f"batch: {grid.batch} is not a multiple of {fed}, {grid.data} pipelines x microbatches of {grid.microbatch}"
        )
    most = max(stage_layers(model.layers, grid.inter))
    if grid.checkpoint is not None and grid.checkpoint > most:
        raise BadInput(f"ac: {grid.checkpoint} is more than the {most} layers of the largest stage")


def stage_layers(layers: int, inter: int) -> list[int]:
    """Return the layers of each stage, as even as possible, the larger stages in the middle where memory is left."""
    least, more = divmod(layers, inter)
    middle_first = sorted(range(inter), key=lambda stage: (abs(2 * stage - (inter - 1)), stage))
    larger = set(middle_first[:more])
    return [least + (stage in larger) for stage in range(inter)]


# Activations: what one microbatch leaves on a GPU.
def matrix_parameters(model: Transformer) -> int:
    """Return the parameters of one layer's matrices, by each of which every token is multiplied."""
    return model.block_parameters - (2 if isinstance(model, Llama) else 13) * model.hidden


def saved_bytes(model: Transformer) -> int:
    """Return what one layer saves of a token for its backward in half precision: 34 h + 5 a s (Korthikanti et al., 1).

    A Llama's: inputs of two norms and of what follows them, queries, keys, values and what attention gives, 12 h + 4 k;
    gate, its activation, the other part and their product, 8 f; scores, 2 a s.
    """
    if not isinstance(model, Llama):
        return 34 * model.hidden + 5 * model.heads * model.sequence
    keys = model.groups * model.hidden // model.heads
    return 12 * model.hidden + 4 * keys + 8 * model.feed_forward + 2 * model.heads * model.sequence


def output_bytes(model: Transformer, microbatch: int) -> int:
    """Return the bytes of one layer's output in half precision: 2 b s h."""
    return 2 * microbatch * model.sequence * model.hidden


def block_bytes(model: Transformer, microbatch: int) -> int:
    """Return what one layer saves for its backward: of a GPT s b h (34 + 5 a s / h) (Korthikanti et al., eq. 1)."""
    return microbatch * model.sequence * saved_bytes(model)


def paper_checkpoint(layers: int, inter: int) -> int:
    """Return Myelin's ac: the divisor of N / G_inter closest to sqrt(N) (section V-A); the smaller of two as close.

    Where G_inter doesn't divide N the largest stage's layers stand for N / G_inter.
    """
    count = max(stage_layers(layers, inter))
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    return min(divisors, key=lambda d: (abs(d - sqrt(layers)), d))


def held_layers(layers: int, inter: int, checkpoint: int) -> Fraction:
    """Return the most layers' worth of activations on a GPU: G_inter (N / (G_inter ac) + 1) + ac.

    In Myelin's unit, in which a layer's output and a layer's inside count the same: least at ac = sqrt(N). Only the
    microbatch in its backward has the inside of a segment, so ac is counted once (ALGORITHMS section 9).
    """
    return inter * (Fraction(layers, inter * checkpoint) + 1) + checkpoint


def printed_held_layers(layers: int, inter: int, checkpoint: int) -> Fraction:
    """Return the same as printed in Myelin section V-A, ``G_inter (N / (G_inter ac) + 1 + ac)``.

    A misprint: it counts the inside of a segment for every microbatch in flight, and is least at sqrt(N / G_inter), not
    at the sqrt(N) that the paper derives from it.
    """
    return inter * (Fraction(layers, inter * checkpoint) + 1 + checkpoint)


def activation_bytes(model: Transformer, layers: int, grid: Grid, in_flight: int) -> int:
    """Return the bytes that ``layers`` layers hold with ``in_flight`` microbatches, one of them in its backward.

    With checkpoints each microbatch holds the input of every segment and the stage's output; the one in its backward
    holds the inside of a segment as well. For ``inter`` in flight that is :func:`held_layers` in bytes.
    """
    inside, output = block_bytes(model, grid.microbatch), output_bytes(model, grid.microbatch)
    if grid.checkpoint is None:
        return in_flight * (layers * inside + output)
    kept = (ceil_div(layers, grid.checkpoint) + 1) * output
    return int(held_bytes(kept, kept + min(grid.checkpoint, layers) * inside, in_flight))


def printed_activation_bytes(model: Transformer, grid: Grid) -> int | None:
    """Return :func:`printed_held_layers` in bytes, for an even share of the layers; None without checkpoints."""
    if grid.checkpoint is None:
        return None
    outputs = grid.inter + Fraction(model.layers, grid.checkpoint)
    insides = grid.inter * grid.checkpoint * block_bytes(model, grid.microbatch)
    return round(outputs * output_bytes(model, grid.microbatch)) + insides


def lightest_checkpoint(model: Transformer, grid: Grid) -> int:
    """Return the ac with the least bytes on the largest stage; the largest of several.

    About sqrt(N output / inside) for ``inter`` in flight: a layer's inside is some 20 outputs, so it lies below the
    sqrt(N) of equal units. Every ac recomputes each layer once, so it costs no time.
    """
    count = max(stage_layers(model.layers, grid.inter))

    def size(checkpoint: int) -> int:
        tried = replace(grid, checkpoint=checkpoint)
        return activation_bytes(model, count, tried, min(grid.pipeline_limit, grid.microbatches))

    return min(range(1, count + 1), key=lambda checkpoint: (size(checkpoint), -checkpoint))


# Memory: even shares as in the paper, and stage by stage.
def even_share(model: Transformer, grid: Grid, policy: Policy) -> Memory:
    """Return each GPU's bytes by Myelin's rule: phi / G_inter parameters, N / G_inter layers, ``limit`` in flight.

    Without message buffers, and with the embedding spread over all stages; :func:`stage_memories` counts both.
    """
    parameters = ceil_div(model.parameters, grid.inter)
    layers = max(stage_layers(model.layers, grid.inter))
    activations = activation_bytes(model, layers, grid, min(grid.pipeline_limit, grid.microbatches))
    return _memory(policy, grid.data, parameters, activations, 0)


def stage_memories(model: Transformer, grid: Grid, policy: Policy) -> list[Memory]:
    """Return the bytes of a GPU of each stage, with what the first and the last stage hold beside their layers.

    The first has the tables and the embedding's dropout mask, s b h per microbatch in flight; the last the final norm,
    the head (a copy of the table where it is tied), their inputs, 4 s b h, and logits in fp32, 4 s b V (Korthikanti et
    al., section 4.3). The last stage runs each backward right after its forward: one microbatch. Each cut takes an
    activation and a gradient on both its ends (ALGORITHMS section 3).
    """
    found = []
    tokens = grid.microbatch * model.sequence
    for stage, layers in enumerate(stage_layers(model.layers, grid.inter)):
        first, last = stage == 0, stage == grid.inter - 1
        in_flight = 1 if last else min(grid.pipeline_limit, grid.microbatches)
        activations = activation_bytes(model, layers, grid, in_flight)
        parameters = layers * model.block_parameters
        if first:
            parameters += model.embedding_parameters
            activations += (
                in_flight * tokens * (0 if isinstance(model, Llama) else model.hidden)
            )  # the mask of its dropout
        if last:
            parameters += model.norm_parameters
            parameters += 0 if model.tied and first else model.table_parameters
            activations += tokens * (4 * model.hidden + 4 * model.vocabulary)
        cuts = (not first) + (not last)
        buffers = 2 * cuts * output_bytes(model, grid.microbatch)
        found.append(_memory(policy, grid.data, parameters, activations, buffers))
    return found


def _memory(policy: Policy, replicas: int, parameters: int, activations: int, buffers: int) -> Memory:
    """Return the bytes of ``parameters`` parameters under ``policy`` (one version of weights), which ``replicas`` have,
    and of activations."""
    size = 4 * parameters
    gradient = int(gradient_bytes(policy, size, parameters))
    state = int(weights_bytes(policy, size, parameters, 1, replicas)) - 2 * gradient
    return Memory(
        weights_bytes=gradient,
        gradient_bytes=gradient,
        optimizer_bytes=0 if policy.offload else state,
        bucket_bytes=state if policy.offload else 0,
        activation_bytes=activations,
        buffer_bytes=buffers,
        host_bytes=int(host_bytes(policy, size, parameters, replicas)),
    )


# Time: flops, days.
def batch_flops(model: Transformer, samples: int, recompute: bool = True) -> int:
    """Return the flops of training on ``samples`` samples: 96 b s l h^2 (1 + s/(6h) + V/(16 l h)), exactly.

    Per layer a forward is 24 b s h^2 + 4 b s^2 h; the backward is two of them and recomputation one, so 96 is 72
    without it; the head is 6 b s h V, never recomputed (Narayanan et al., appendix; Myelin section VI-D).
    """
    return model.layers * layer_flops(model, samples, recompute) + head_flops(model, samples)


def layer_flops(model: Transformer, samples: int, recompute: bool = True) -> int:
    """Return the flops of one layer's forward and backward, and of its recomputation."""
    tokens = samples * model.sequence
    return (4 if recompute else 3) * tokens * (2 * matrix_parameters(model) + 4 * model.sequence * model.hidden)


def head_flops(model: Transformer, samples: int) -> int:
    """Return the flops of the head's forward and backward."""
    return 6 * samples * model.sequence * model.hidden * model.vocabulary


def share_seconds(model: Transformer, grid: Grid, peak: float, share: float) -> float:
    """Return the seconds of a batch at ``share`` of the GPUs' ``peak`` flop/s over all of it (Myelin section VI-D)."""
    return batch_flops(model, grid.batch, grid.checkpoint is not None) / (grid.gpus * peak * share)


def training_days(model: Transformer, grid: Grid, tokens: int, batch_seconds: float) -> float:
    """Return the days of ``tokens`` tokens: tokens * t / (b s) (Myelin section VI-D, whose 3e10^11 means 3e11)."""
    return tokens * batch_seconds / (grid.batch * model.sequence) / 86400
