"""Which flags give a plan's stages to torchtitan?"""

from __future__ import annotations

import re
import shlex

from ...check.targets import CannotExpress, Unit
from ...names import shown
from ...plan import ScheduleKind
from .asked import Asked, Renames, renamed

DECODER = re.compile(r"tok_embeddings|layers\.\d+|norm|lm_head|output")  # the modules of its own models
MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)?")  # what its splitter reads: a child, or an entry of a list or a dict
SCHEDULES: dict[ScheduleKind, str] = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


def torchtitan(asked: Asked) -> str:
    """Return torchtitan's flags: the modules of each stage by name, degrees, schedule, microbatches, recomputation.

    Its splitter drops what it has no name for without a word, so names are the model's own: as they are in the profile
    where they are those of torchtitan's decoders, else as they are renamed. The loss is no module.
    """
    found = asked.expressed("torchtitan")
    parts: list[list[str]] = []
    for units in found.units:
        names = [module_name(asked.renames, unit) for unit in units if unit.start < unit.modules_stop]
        parts.append(list(dict.fromkeys(names)))
    for s, part in enumerate(parts):
        for name in part:
            elsewhere = next((t for t in range(s + 1, len(parts)) if name in parts[t]), None)
            if elsewhere is not None:
                raise CannotExpress(f"torchtitan: module '{shown(name)}' would be in stages {s} and {elsewhere}")
    if asked.autocast and found.shape.ranks > 1:
        raise CannotExpress(
            "torchtitan: casts nothing in pipelines whose weights it doesn't shard; the plan is under autocast"
        )
    chain = asked.plan.chain
    if chain.tensor > 1 and not chain.sequence_parallel:
        raise CannotExpress(
            "torchtitan: with tensor parallelism it parts the sequence, too; plan with --sequence-parallel"
        )
    shape, each = found.shape, asked.microbatches // found.shape.pipelines
    without = (
        f"# without pipelines it ignores num_pp_microbatches; for {each} microbatches an update "
        f"training.num_tokens_per_train_step is {each * shape.pipelines} times num_tokens_per_microbatch_per_dp_rank\n"
    )
    flags = [
        *([f"--parallelism.tensor_parallel_degree {chain.tensor}"] if chain.tensor > 1 else []),
        f"--parallelism.pipeline_parallel_degree {shape.ranks}",
        f"--parallelism.data_parallel_replicate_degree {shape.pipelines}",
        "--parallelism.data_parallel_shard_degree 1",
        f"--parallelism.pipeline_parallel_schedule {SCHEDULES[asked.kind(shape)]}",
        f"--parallelism.num_pp_microbatches {each}",
        "--parallelism.module_fqns_per_model_part " + " ".join(shlex.quote(",".join(part)) for part in parts),
        "--training.disable_cuda_graphs",
        f"activation_checkpoint:{'none' if found.recompute.rule == 'none' else 'full'}",
    ]
    flags += [f"--training.mixed_precision_param {asked.autocast}"] if asked.autocast else []
    return (without if shape.ranks == 1 < each else "") + " \\\n".join(flags) + "\n"


def module_name(renames: Renames, unit: Unit) -> str:
    """Return what torchtitan calls a unit: its own name, or as it is renamed; CannotExpress where that is no module."""
    if not renames and not DECODER.fullmatch(unit.name):
        raise CannotExpress(
            f"torchtitan: layer '{shown(unit.name)}' isn't a module of its decoders; say the model's own "
            "names, such as "
            r"--rename 'block(\d+)=layers.\1,embedding=tok_embeddings,head=lm_head,(.*)=\1'"
        )
    name = renamed(renames, "torchtitan", unit.name) if renames else unit.name
    if not MODULE.fullmatch(name):
        raise CannotExpress(
            f"torchtitan: '{shown(name)}' isn't the name of a module or of an entry in a list of modules; "
            "plan a profile "
            "with one module per layer, or --rename it"
        )
    return name
