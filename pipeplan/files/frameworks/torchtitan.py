"""Which flags give stages to torchtitan, and which stages do its flags or TOML say?

By the names of modules; without any by its own rule for decoders.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

from ...check.targets import TARGETS, Recompute, Shape
from ...check.units import CannotExpress, Unit
from ...errors import BadInput
from ...names import shown
from ...plan import ScheduleKind
from ...problem import Zero
from .asked import SCHEDULES, SELECTIVE, Asked, Imported, Renames, Source, placed, renamed
from .options import Options

DECODER = re.compile(r"tok_embeddings|layers\.\d+|norm|lm_head|output")  # the modules of its own models
MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)?")  # what its splitter reads: a child, or an entry of a list or a dict
OF_ZOO = r"block(\d+)=layers.\1,embedding=tok_embeddings,head=lm_head,(.*)=\1"  # what --rename says of its models
OF_TRANSFORMERS = r".*embed_tokens=tok_embeddings,model\.(.*)=\1,lm_head.*=lm_head"
PARTS = "parallelism.module-fqns-per-model-part"
POINTS = "parallelism.pipeline-parallel-split-points"
RESHARD = "--parallelism.fsdp_reshard_after_forward"
LOCAL = ("training.local-batch-size", "training.batch-size")
KINDS: dict[str, ScheduleKind] = {name.lower(): kind for kind, name in SCHEDULES.items()}
RECOMPUTED = {"none": Recompute(), "full": Recompute("every", 1)}

# --- from a plan ------------------------------------------------------------------------------------------------------


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
    zero = asked.plan.policy.zero
    if asked.autocast and found.shape.ranks > 1 and not zero:
        raise CannotExpress(
            "torchtitan: casts nothing in pipelines whose weights it doesn't shard; the plan is under autocast"
        )
    chain = asked.plan.chain
    if chain.tensor > 1 and not chain.sequence_parallel:
        raise CannotExpress(
            "torchtitan: with tensor parallelism it parts the sequence, too; plan with --sequence-parallel"
        )
    if chain.by_heads:
        raise CannotExpress("torchtitan: ranks share sequences by keys and values alone, not by heads")
    if chain.experts > 1 and not zero:
        raise CannotExpress("torchtitan: the ranks of experts are those that share weights; plan with --zero 1")
    shape, each, several = found.shape, asked.microbatches // found.shape.pipelines, chain.several
    without = (
        f"# without pipelines it ignores num_pp_microbatches; for {each} microbatches an update "
        f"training.num_tokens_per_train_step is {each * shape.pipelines * several} times "
        "num_tokens_per_microbatch_per_dp_rank\n"
    )
    flags = [
        *([f"--parallelism.tensor_parallel_degree {chain.tensor}"] if chain.tensor > 1 else []),
        *([f"--parallelism.context_parallel_degree {chain.context}"] if chain.context > 1 else []),
        *([f"--parallelism.expert_parallel_degree {chain.experts}"] if chain.experts > 1 else []),
        f"--parallelism.pipeline_parallel_degree {shape.ranks}",
        f"--parallelism.data_parallel_replicate_degree {1 if zero else shape.pipelines * several}",
        f"--parallelism.data_parallel_shard_degree {shape.pipelines * several if zero else 1}",
        *([f"{RESHARD} {'always' if zero == 3 else 'never'}"] if zero else []),
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
            f"names, such as --rename '{OF_TRANSFORMERS if 'model.' in unit.name else OF_ZOO}'"
        )
    name = renamed(renames, "torchtitan", unit.name) if renames else unit.name
    if not MODULE.fullmatch(name):
        raise CannotExpress(
            f"torchtitan: '{shown(name)}' isn't the name of a module or of an entry in a list of modules; "
            "plan a profile with one module per layer, or --rename it"
        )
    return name


# --- from flags -------------------------------------------------------------------------------------------------------


def read_torchtitan(source: Source) -> Imported:
    """Return what torchtitan runs with the flags: stages, schedule, microbatches, recomputation.

    Names are the profile's as ``--rename`` has them. Without names its rule shares the blocks evenly, embedding and
    output counting as blocks. Sharded data parallelism is ZeRO-3 where weights are gathered in every pass, ZeRO-2 where
    forwards leave them whole; beside pipelines gradients are whole, too, while a mini-batch runs: ZeRO-1.
    """
    options, chain = source.options, source.chain
    units = TARGETS["torchtitan"].units(chain)
    ranks = options.count("parallelism.pipeline-parallel-degree", 1)
    pipelines, sharded = _pipelines(source, ranks)
    named = options.text("parallelism.pipeline-parallel-schedule") or SCHEDULES["1f1b"]
    if ranks > 1 and named.lower() not in KINDS:
        raise BadInput(f"{source.path}: schedule '{shown(named)}' isn't one of {' and '.join(SCHEDULES.values())}")
    kind = KINDS[named.lower()] if ranks > 1 else "1f1b"
    named_parts = next((read for name, read in ((PARTS, _named), (POINTS, _between)) if name in options), None)
    counts = named_parts(source, units) if named_parts else _even(options, units, ranks, kind)
    if len(counts) % ranks or (kind == "1f1b") != (len(counts) == ranks):
        raise BadInput(f"{source.path}: {len(counts)} parts for {ranks} ranks, which {named} doesn't run")
    if kind == "zbv" and len(counts) != 2 * ranks:
        raise BadInput(f"{source.path}: {len(counts)} parts for {ranks} ranks; {named} needs two for each rank")
    shape = Shape(ranks, pipelines, len(counts) // ranks, vee=kind == "zbv")
    recompute, notes = _recompute(options)
    microbatches, more = _microbatches(source, ranks, pipelines)
    notes += more
    zero = _zero(options, ranks, sharded)
    stages = placed(source, "torchtitan", units, counts, kind, shape, microbatches, recompute, zero or 0)
    if zero == 1:
        notes += ("sharded data parallelism as ZeRO-1: whole weights and gradients while pipelines run",)
    return Imported(stages, kind, microbatches, zero=zero, notes=notes)


def _zero(options: Options, ranks: int, sharded: bool) -> Zero | None:
    said = options.text(RESHARD[2:].replace("_", "-")) or "default"
    if said not in ("default", "always", "never"):
        raise BadInput(f"{options.path}: {RESHARD} {shown(said)} isn't default, always or never")
    if not sharded:
        return None
    gathered = said == "always" or (said == "default" and ranks == 1)
    return 3 if gathered else 2 if ranks == 1 else 1


def _pipelines(source: Source, ranks: int) -> tuple[int, bool]:
    """Return how many pipelines the degrees of data parallelism make of the GPUs, and whether they share state."""
    options, gpus = source.options, source.gpus * source.chain.several
    replicate = options.count("parallelism.data-parallel-replicate-degree", 1)
    shard = options.count("parallelism.data-parallel-shard-degree", 0, least=-1)
    if shard < 1:
        shard = max(1, gpus // (ranks * replicate))
    if ranks * replicate * shard != gpus:
        raise BadInput(
            f"{source.path}: {ranks} ranks x {replicate} replicas x {shard} shards are "
            f"{ranks * replicate * shard} GPUs, not {gpus}"
        )
    return max(1, replicate * shard // source.chain.several), shard > 1


def _microbatches(source: Source, ranks: int, pipelines: int) -> tuple[int, tuple[str, ...]]:
    """Return the microbatches of all pipelines for an update, and what to note of them; without pipelines it
    accumulates gradients instead."""
    options = source.options
    local = next((name for name in LOCAL if name in options), None)
    if local is not None:
        return _of_samples(source, local, ranks, pipelines)
    if ranks > 1:
        return options.count("parallelism.num-pp-microbatches", 1) * pipelines, ()
    whole = options.count("training.num-tokens-per-train-step", -1, least=-1)
    each = options.count("training.num-tokens-per-microbatch-per-dp-rank", 16384) * source.chain.several
    if whole > 0 and whole % (each * pipelines):
        raise BadInput(f"{options.path}: {whole} tokens an update aren't a multiple of {each} on {pipelines} GPUs")
    return whole // each if whole > 0 else pipelines, ()


def _of_samples(source: Source, local: str, ranks: int, pipelines: int) -> tuple[int, tuple[str, ...]]:
    """Return what :func:`_microbatches` does where batches are said in samples, as torchtitan's older TOML says them:
    ``local`` those of one pipeline, which are one microbatch where it is one rank."""
    options, profiled, several = source.options, source.chain.each, source.chain.several
    samples = options.count(local)
    each = options.count("parallelism.pipeline-parallel-microbatch-size", 1) if ranks > 1 else samples
    if each != profiled or samples % each:
        raise BadInput(
            f"{source.path}: --{local} {samples} is in microbatches of {each}, the profile is of {profiled} samples; "
            f"profile with --microbatch {each}"
        )
    steps, odd = divmod(
        max(1, options.count("training.global-batch-size", -1, least=-1)), samples * pipelines * several
    )
    if steps and odd:
        raise BadInput(
            f"{source.path}: --training.global-batch-size isn't a multiple of {samples} x {pipelines * several}"
        )
    if ranks == 1:
        return max(1, steps) * pipelines, ()
    notes = (f"an update is {steps} batches of {samples * pipelines * several} samples there; one is judged",) * (
        steps > 1
    )
    return samples // each * pipelines, notes


def _recompute(options: Options) -> tuple[Recompute, tuple[str, ...]]:
    words = [word.lower().replace("-", "_") for word in options.words]
    said = [word.partition(":")[2] for word in words if word.startswith("activation_checkpoint:")]
    said += [x for x in (options.text("activation-checkpoint.mode"),) if x is not None]
    if not said:
        return Recompute(), ("the flags say no activation_checkpoint; nothing is recomputed",)
    if said[-1] == "selective":
        return Recompute(), (SELECTIVE,)
    if said[-1] not in RECOMPUTED:
        known = ", ".join((*RECOMPUTED, "selective"))
        raise BadInput(f"{options.path}: activation_checkpoint:{shown(said[-1])} isn't one of {known}")
    return RECOMPUTED[said[-1]], ()


def _between(source: Source, units: Sequence[Unit]) -> list[int]:
    """Return how many units each part has, by the names of the modules that begin all but the first."""
    names = [module_name(source.renames, unit) for unit in units]
    points = [name for word in source.options.given[POINTS] for name in word.split(",")]
    odd = next((name for name in points if name not in names), None)
    if odd is not None:
        raise BadInput(f"{source.path}: --{POINTS} names '{shown(odd)}', which the profile hasn't (--rename)")
    ends = [0, *map(names.index, points), len(names)]
    if ends != sorted(ends):
        raise BadInput(f"{source.path}: --{POINTS} are out of order")
    return [b - a for a, b in pairwise(ends)]


def _named(source: Source, units: Sequence[Unit]) -> list[int]:
    """Return how many units each part has, by the names of their modules."""
    names = [module_name(source.renames, unit) for unit in units]
    counts, at = [], 0
    words = [word for word in source.options.given[PARTS] if ":" not in word]  # which are commands of their own
    for s, word in enumerate(words):
        part = [name for name in word.split(",") if name]
        odd = next((name for name in part if name not in names), None)
        if odd is not None:
            raise BadInput(f"{source.path}: part {s} names '{shown(odd)}', which the profile hasn't (--rename)")
        wanted = set(part)
        stop = at
        while stop < len(names) and names[stop] in wanted:
            stop += 1
        beyond = next((name for name in part if name not in names[at:stop]), None)
        if beyond is not None:
            left = names[stop] if stop < len(names) else names[-1]
            raise BadInput(
                f"{source.path}: part {s} has '{shown(beyond)}' out of order: '{shown(left)}' comes before it or is in "
                "another part"
            )
        counts.append(stop - at)
        at = stop
    if at < len(names):
        raise BadInput(f"{source.path}: no part has '{shown(names[at])}', which torchtitan drops without a word")
    return counts


def _even(options: Options, units: Sequence[Unit], ranks: int, kind: ScheduleKind) -> list[int]:
    """Return how many units each part has where none are named."""
    blocks = [i for i, unit in enumerate(units) if unit.block]
    if not blocks:
        raise BadInput(f"{options.path}: --{PARTS} is missing, and no layer of the profile is named as a block")
    before, after = blocks[0], len(units) - 1 - blocks[-1]
    first = options.count("parallelism.pipeline-parallel-first-stage-less-layers", 1, least=0)
    last = options.count("parallelism.pipeline-parallel-last-stage-less-layers", 1, least=0)
    layers = len(units) - before - after
    each = options.count("parallelism.pipeline-parallel-layers-per-stage", 0)
    weight = layers + first + last
    stages = -(-weight // each) if each else ranks * (1 if kind == "1f1b" else 2)
    if stages == 1:
        return [len(units)]
    if stages > weight or max(first, last) > weight // stages:
        raise BadInput(f"{options.path}: {layers} blocks cannot be shared by {stages} stages")
    counts = [weight // stages + (s < weight % stages) for s in range(stages)]
    counts[0] += before - first
    counts[-1] += after - last
    return counts
