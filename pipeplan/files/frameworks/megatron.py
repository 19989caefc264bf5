"""Which arguments give stages to Megatron-LM, or to Megatron-Bridge, and which stages do Megatron-LM's say?

In a layout ``E`` is the embedding, ``t`` a decoder layer, ``m`` one of multi-token prediction, ``L`` output and loss;
stages stand between ``|``. The final norm is with ``L``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ...check.targets import TARGETS, Recompute, Rule, Shape
from ...check.units import CannotExpress, mtp_layers, towers
from ...choices import OPTIMIZERS
from ...errors import BadInput
from ...names import shown
from ...plan import ScheduleKind
from ...problem import Zero
from .asked import SELECTIVE, Asked, Imported, Source, placed
from .options import Options

KINDS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
METHODS: dict[Rule, str] = {"first": "block", "every": "uniform"}  # by the rules of what is recomputed
RING, BY_HEADS = "p2p", "a2a"  # of --cp-comm-type
BY_NAME = {row.megatron: name for name, row in OPTIMIZERS.items() if row.megatron is not None}
MOST_LETTERS = 10**5
LAYOUT = "--pipeline-model-parallel-layout"
LETTER = re.compile(r"([EtmL|])(?:\*([0-9]{1,6}))?")
REPEATED = re.compile(r"\(([^()]*)\)\*([0-9]{1,6})")
SHARDED: dict[Zero, str] = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
PLACES = {  # of what Megatron-Bridge has outside of cfg.model
    **dict.fromkeys(("micro-batch-size", "global-batch-size"), "train"),
    **dict.fromkeys(("use-distributed-optimizer", "use-megatron-fsdp", "data-parallel-sharding-strategy"), "ddp"),
    "ckpt-format": "checkpoint",
}

# --- from a plan ------------------------------------------------------------------------------------------------------


def megatron(asked: Asked) -> str:
    """Return Megatron-LM's arguments: layers, pipeline size and layout, batch sizes, recomputation.

    Replicas are its data parallelism: as many as the world has GPUs for.
    """
    head, parts, lines = _facts(asked)
    layout = "|".join("".join(x * n if n < 3 else f"{x}*{n}" for x, n in _runs(part)) for part in parts)
    lines.insert(3, {LAYOUT[2:]: f'"{layout}"'})
    said = [[f"--{x}" if y is True else f"--{x} {y}" for x, y in line.items() if y is not False] for line in lines]
    return head + " \\\n".join(" ".join(words) for words in said if words) + "\n"


def megatron_bridge(asked: Asked) -> str:
    """Return the same as assignments to Megatron-Bridge's ``cfg``, or degrees of modules of their own."""
    if asked.plan.chain.variants:
        return _mimo(asked)
    head, parts, lines = _facts(asked)
    facts = {name: value for line in lines for name, value in line.items()}
    facts["share-embeddings-and-output-weights"] = not facts.pop("untie-embeddings-and-output-weights")
    said = [f"cfg.{PLACES.get(x, 'model')}.{x.replace('-', '_')} = {_written(y)}" for x, y in facts.items()]
    said += ["cfg.dist.use_megatron_fsdp = True"] if "use-megatron-fsdp" in facts else []
    chunks = len(parts) // facts["pipeline-model-parallel-size"]
    said += [
        f"cfg.model.virtual_pipeline_model_parallel_size = {chunks if chunks > 1 else None}",
        "cfg.model.pipeline_model_parallel_layout = [",
        *(
            "    " + " + ".join(f'["{KINDS[x]}"]' + (f" * {n}" if n > 1 else "") for x, n in _runs(part)) + ","
            for part in parts
        ),
        "]",
    ]
    if asked.autocast:
        said += ["cfg.model.enable_autocast = True", f"cfg.model.autocast_dtype = torch.{asked.autocast}"]
    return head + "\n".join(said) + "\n"


def _mimo(asked: Asked) -> str:
    """Return degrees, stages, replicas and GPUs of each module for Megatron-Bridge; CannotExpress where there
    are no words for it.

    Source: NVIDIA-NeMo/Megatron-Bridge, models/megatron_mimo/megatron_mimo_config.py, of 2026.
    """

    def refused(what: str) -> CannotExpress:
        return CannotExpress(f"megatron-bridge: {what} (plan with --for megatron --tensor each)")

    plan, said, world = asked.plan, list[tuple[str, dict[str, int], dict[str, Any], bool]](), set[int]()
    counts = {stage.replicas for stage in asked.stages}
    if len(counts) > 1 or plan.policy.zero > 1:
        what = f"stages have {sorted(counts)} replicas" if len(counts) > 1 else "replicas share gradients"
        raise refused(f"{what}; there all have one number, which share the optimizer's state alone")
    modules = towers(plan.chain)
    for s, stage in enumerate(asked.stages):
        if not any(x.start <= stage.start and stage.stop <= x.stop for x in modules):
            raise refused(f"stage {s} has layers of several modules; there each GPU runs one")
    for module in modules:
        own = [x for x in asked.stages if module.start <= x.start < module.stop]
        gpus, first = [d for x in own for d in x.members], own[0].devices[0]
        kinds = {x.way for x in own}
        blocks = [[i for i in module.blocks if x.start <= i < x.stop] for x in own]
        again = {x.checkpoint == tuple((i, i + 1) for i in of) for x, of in zip(own, blocks, strict=True)}
        stored = not any(x.checkpoint for x in own)
        name = asked.renamed("megatron-bridge", module.name) if asked.renames else module.name
        uneven = len({len(x) for x in blocks}) > 1
        if len(kinds) > 1 or gpus != list(range(first, first + len(gpus))) or world & set(gpus) or any(own[0].way[1:]):
            raise refused(f"the stages of {shown(name)} aren't of one degree on neighbouring GPUs, in order")
        if not (stored or again == {True}) or not all(blocks):
            raise refused(f"{shown(name)} has a stage without blocks, or recomputes others than all of them")
        if own[0].tensor & (own[0].tensor - 1):
            raise refused(f"{shown(name)} is of degree {own[0].tensor}; there degrees are powers of 2")
        world |= set(gpus)
        about = {"tensor_model_parallel_size": own[0].tensor, "pipeline_model_parallel_size": len(own)}
        about |= {"data_parallel_size": own[0].replicas, "rank_offset": first}
        config = {} if stored else {"granularity": "full", "method": "uniform", "num_layers": 1}
        config = {f"recompute_{key}": value for key, value in config.items()}
        if uneven:
            config["pipeline_model_parallel_layout"] = f"E{'|'.join('t' * len(x) for x in blocks)}L"
        said.append((name, about, config, uneven))
    if "language" not in [name for name, *_ in said]:
        raise CannotExpress(
            f"megatron-bridge: no module is called language, as one has to be; {modules[-1].name} may be renamed: "
            f"--rename '{modules[-1].name}=language,(.*)=\\1'"
        )
    odd = next((name for name, *_, uneven in said if uneven and name != "language"), None)
    if odd is not None:
        raise refused(f"the stages of {shown(odd)} have other numbers of blocks; there those of a modality are even")
    lines = [f"# {max(world) + 1} GPUs; the model's own specs say its modules", "module_parallelisms = {"]
    for name, about, _, _ in said:
        words = ", ".join(f"{key}={value}" for key, value in about.items())
        lines.append(f"    {_written(name)}: ModuleParallelismConfig({words}),")
    lines += ["}", "parallelism = MegatronMIMOParallelismConfig(module_parallelisms=module_parallelisms)"]
    lines += [
        f"transformer_configs = {json.dumps({name: config for name, _, config, _ in said})}  # what each also says"
    ]
    each, batch = plan.chain.each * counts.pop(), plan.chain.microbatch * asked.microbatches
    lines += [f"cfg.train.micro_batch_size = {each}  # of all replicas", f"cfg.train.global_batch_size = {batch}"]
    if plan.policy.zero:
        lines.append("cfg.ddp.use_distributed_optimizer = True")
    source = "from megatron.bridge.models.megatron_mimo.megatron_mimo_config import"
    return "\n".join([f"{source} MegatronMIMOParallelismConfig, ModuleParallelismConfig", "", *lines]) + "\n"


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)


def _facts(asked: Asked) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Return a line on the GPUs, the letters of each stage, and what else is said, by flags and in lines; CannotExpress
    where layers of multi-token prediction must not be."""
    found, chain = asked.expressed("megatron"), asked.plan.chain
    shape, units, mtp, way = found.shape, found.units, mtp_layers(chain), found.recompute
    parts = [
        "".join("m" * mtp if x.name == "mtp" else "t" if x.block else "L" if x.start else "E" for x in part)
        for part in units
    ]
    for s, part in enumerate(parts):
        if "m" in part and s <= len(parts) - shape.ranks:
            raise CannotExpress(
                f"megatron: layers of multi-token prediction are in stage {s}; they must be in the last stage of a "
                "rank that is not the first"
            )
    tied = any(a < units[0][0].stop and units[-1][-1].start <= b for a, b in chain.tied)
    lines: list[dict[str, Any]] = [
        {"num-layers": sum(unit.block for part in units for unit in part)},
        {"tensor-model-parallel-size": chain.tensor, "sequence-parallel": chain.sequence_parallel}
        if chain.tensor > 1
        else {},
        {"expert-model-parallel-size": chain.experts, "expert-tensor-parallel-size": 1} if chain.experts > 1 else {},
        {"context-parallel-size": chain.context, "cp-comm-type": BY_HEADS if chain.by_heads else RING}
        if chain.context > 1
        else {},
        {"pipeline-model-parallel-size": shape.ranks},
        {"micro-batch-size": chain.each},
        {"global-batch-size": chain.microbatch * asked.microbatches},
        {"untie-embeddings-and-output-weights": not tied},  # which isn't the default there
        {"mtp-num-layers": mtp} if mtp else {},
    ]
    if chain.selective:
        lines.append({"recompute-granularity": "selective"})
    if way.rule != "none":
        full = {"recompute-granularity": "full", "recompute-method": METHODS[way.rule]}
        lines.append({**full, "recompute-num-layers": way.count})
    zero = asked.plan.policy.zero
    if zero:
        lines.append({"use-distributed-optimizer": True})
    if zero > 1:
        fsdp = {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": SHARDED[zero]}
        lines.append({**fsdp, "ckpt-format": "fsdp_dtensor"})
    world = shape.ranks * shape.pipelines * chain.width
    return f"# {world} GPUs: data-parallel size {shape.pipelines * chain.several}\n", parts, lines


def _runs(letters: str) -> list[tuple[str, int]]:
    return [(letter, len(list(run))) for letter, run in groupby(letters)]


# --- from arguments ---------------------------------------------------------------------------------------------------


def read_megatron(source: Source) -> Imported:
    """Return what Megatron-LM runs with the arguments: stages, schedule, batch, recomputation, optimizer.

    The data-parallel size is what the GPUs leave. Without a layout the decoder's layers are shared evenly, but for the
    options that give the first or the last rank fewer, and embedding and output are with the first and last ones.
    """
    options, chain = source.options, source.chain
    units = TARGETS["megatron"].units(chain)
    ranks = options.count("pipeline-model-parallel-size", 1)
    if source.gpus % ranks:
        raise BadInput(f"{source.path}: {source.gpus} GPUs aren't a multiple of --pipeline-model-parallel-size {ranks}")
    layout = options.text(LAYOUT[2:])
    blocks, mtp = sum(unit.block for unit in units), mtp_layers(chain)
    for name, there, what in (("num-layers", blocks, "decoder layers"), ("mtp-num-layers", mtp, "layers of that kind")):
        asked = options.count(name, there, least=min(there, 1))
        if asked != there:
            raise BadInput(f"{source.path}: --{name} is {asked}; the profile has {there} {what}")
    parts = _even(options, ranks, mtp) if layout is None else _parsed(options, layout, ranks)
    _compare(source, parts, blocks)
    counts = [len(part) - (mtp - 1 if "m" in part else 0) for part in parts]
    shape = Shape(ranks, source.gpus // ranks, len(parts) // ranks)
    kind: ScheduleKind = "interleaved" if shape.chunks > 1 else "1f1b"
    microbatches = _microbatches(source, shape)
    zero = _zero(options)
    stages = placed(source, "megatron", units, counts, kind, shape, microbatches, _recompute(options), zero or 0)
    optimizer = options.text("optimizer") or "adam"
    return Imported(
        stages,
        kind,
        microbatches,
        optimizer=BY_NAME.get(optimizer),
        precision="mixed" if "bf16" in options or "fp16" in options else None,
        zero=zero,
        notes=(
            *([SELECTIVE] if selective(options) and not chain.selective else []),
            *([] if optimizer in BY_NAME else [f"what --optimizer {shown(optimizer)} keeps is not known"]),
        ),
    )


def by_heads(options: Options) -> bool:
    """Whether ranks that share sequences have all of them for some heads in attention; BadInput for yet another way."""
    said = options.text("cp-comm-type") or RING
    if said not in (RING, BY_HEADS):
        raise BadInput(
            f"{options.path}: --cp-comm-type {shown(said)} is neither {RING} nor {BY_HEADS}, which are known"
        )
    return said == BY_HEADS


def _zero(options: Options) -> Zero | None:
    """Return what replicas share of the optimizer's state, gradients and weights."""
    strategy = options.text("data-parallel-sharding-strategy") or SHARDED[3]
    found = next((zero for zero, name in SHARDED.items() if name == strategy), None)
    if found is None and strategy != "no_shard":
        raise BadInput(f"{options.path}: --data-parallel-sharding-strategy {shown(strategy)} isn't known")
    whole: Zero | None = 1 if "use-distributed-optimizer" in options else None
    return found or whole if "use-megatron-fsdp" in options else whole


def _microbatches(source: Source, shape: Shape) -> int:
    """Return the microbatches of all pipelines for an update."""
    options, each, replicas = source.options, source.chain.each, shape.pipelines * source.chain.several
    micro = options.count("micro-batch-size", each)
    if micro != each:
        raise BadInput(
            f"{source.path}: --micro-batch-size is {micro}, the profile is of {each} samples; profile with "
            f"--microbatch {micro}"
        )
    whole = options.count("global-batch-size", micro * replicas)
    if whole % (micro * replicas):
        raise BadInput(
            f"{source.path}: --global-batch-size {whole} isn't a multiple of microbatches of {micro} in each of "
            f"{replicas} pipelines"
        )
    group = options.count("microbatch-group-size-per-virtual-pipeline-stage", shape.ranks)
    if shape.chunks > 1 and group != shape.ranks:
        raise BadInput(
            f"{source.path}: microbatches go through a chunk in groups of {group}; plans know groups of as many as "
            f"ranks, {shape.ranks}"
        )
    return whole // source.chain.microbatch


def selective(options: Options) -> bool:
    """Whether the cores of attention run again."""
    return options.text("recompute-granularity") == "selective" or "recompute-activations" in options


def _recompute(options: Options) -> Recompute:
    granularity = options.text("recompute-granularity")
    if granularity is None or selective(options):
        return Recompute()
    method, count = options.text("recompute-method"), options.count("recompute-num-layers", 1)
    rule = next((rule for rule, name in METHODS.items() if name == method), None)
    if granularity != "full" or rule is None:
        raise BadInput(
            f"{options.path}: recomputation is full, uniform or block; here it is '{shown(granularity)}', "
            f"'{shown(str(method))}'"
        )
    return Recompute(rule, count)


def _compare(source: Source, parts: Sequence[str], blocks: int) -> None:
    """Raise BadInput where what is in the stages is not what the profile has."""
    mtp = mtp_layers(source.chain)
    letters = "".join(parts)
    whats = "the embedding", "the output with the loss", "decoder layers", "layers of multi-token prediction"
    for letter, count, name in zip("ELtm", (1, 1, blocks, mtp), whats, strict=True):
        if letters.count(letter) != count:
            raise BadInput(f"{source.path}: {LAYOUT} has {name} {letters.count(letter)} times, the profile {count}")
    if letters != "E" + "t" * blocks + "m" * mtp + "L":
        raise BadInput(f"{source.path}: {LAYOUT} must begin with E, then have all t, then all m, and end with L")
    if mtp and not any("m" * mtp in part for part in parts):
        raise BadInput(f"{source.path}: {LAYOUT} has layers of multi-token prediction in several stages")


def _parsed(options: Options, layout: str, ranks: int) -> list[str]:
    """Return the letters of each stage of a layout such as ``Et*3|(tt|)*2L``."""
    for name in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        if name in options:
            raise BadInput(f"{options.path}: {LAYOUT} and --{name} contradict each other")
    parts = _letters(options.path, layout.replace(",", "")).split("|")
    if len(parts) % ranks:
        raise BadInput(f"{options.path}: {LAYOUT} has {len(parts)} stages, no multiple of {ranks} ranks")
    return parts


def _letters(path: str, layout: str) -> str:
    """Return a layout without its repetitions."""
    found, at = "", 0
    while at < len(layout):
        group, letter = REPEATED.match(layout, at), LETTER.match(layout, at)
        if group is not None:
            part, times = _letters(path, group[1]), int(group[2])
        elif letter is not None:
            part, times = letter[1], int(letter[2] or 1)
        else:
            raise BadInput(f"{path}: {LAYOUT}: '{shown(layout[at:])}' begins with none of E, t, m, L, | and (..)*n")
        if len(found) + len(part) * times > MOST_LETTERS:
            raise BadInput(f"{path}: {LAYOUT} has more than {MOST_LETTERS} letters")
        found += part * times
        at = (group or letter).end()  # type: ignore[union-attr]  # one of them matched
    return found


def _even(options: Options, ranks: int, mtp: int) -> list[str]:
    """Return the letters of each stage without a layout."""
    layers = options.count("num-layers")
    first = options.count("decoder-first-pipeline-num-layers", 0)
    last = options.count("decoder-last-pipeline-num-layers", 0)
    ends = "account-for-embedding-in-pipeline-split" in options, "account-for-loss-in-pipeline-split" in options
    middle = ranks - (first > 0) - (last > 0)
    rest = layers - first - last + sum(ends)
    if (rest and not middle) or rest < 0 or (middle and rest % middle):
        raise BadInput(
            f"{options.path}: {rest} layers cannot be shared evenly by {middle} ranks; say {LAYOUT} as it is run"
        )
    chunks = _chunks(options, rest // middle if middle else first or last)
    shares = [first] * (first > 0) + [rest // middle] * middle if middle else [first]
    shares += [last] * (last > 0)
    uneven = next((share for share in shares if share % chunks), None)
    if uneven is not None:
        raise BadInput(f"{options.path}: {uneven} layers of a rank cannot be shared evenly by {chunks} stages")
    counts = [share // chunks for share in shares] * chunks
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    parts = ["t" * count for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * mtp + "L"
    return parts


def _chunks(options: Options, share: int) -> int:
    """Return the stages of a rank with ``share`` layers."""
    stages = options.count("num-virtual-stages-per-pipeline-rank", 1)
    each = options.count("num-layers-per-virtual-pipeline-stage", 0)
    if not each:
        return stages
    if stages > 1 or share % each:
        raise BadInput(
            f"{options.path}: --num-layers-per-virtual-pipeline-stage {each} doesn't divide the {share} of a rank"
        )
    return share // each
