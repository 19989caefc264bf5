"""Which arguments give a plan's stages to Megatron-LM, or to Megatron-Bridge?"""

from __future__ import annotations

from itertools import groupby

from ...check.targets import CannotExpress, Expressed, Recompute, Unit, mtp_layers
from ...problem import Chain
from .asked import Asked

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def megatron(asked: Asked) -> str:
    """Return Megatron-LM's arguments: layers, pipeline size and layout, batch sizes, recomputation.

    In the layout ``E`` is the embedding, ``t`` a decoder layer, ``L`` output and loss, stages stand between ``|``. The
    final norm is with ``L``. Replicas are its data parallelism: as many as the world has GPUs for.
    """
    found = asked.expressed("megatron")
    layout = "|".join(_repeated("".join(LETTERS[kind] for kind in part)) for part in _parts(asked, found))
    each = asked.plan.chain.microbatch
    lines = [
        f"--num-layers {_decoders(found)}",
        *_tensor_flags(asked.plan.chain),
        f"--pipeline-model-parallel-size {found.shape.ranks}",
        f'--pipeline-model-parallel-layout "{layout}"',
        f"--micro-batch-size {each}",
        f"--global-batch-size {each * asked.microbatches}",
    ]
    lines += ["--untie-embeddings-and-output-weights"] if _untied(asked) else []
    lines += [f"--mtp-num-layers {mtp_layers(asked.plan.chain)}"] if mtp_layers(asked.plan.chain) else []
    method = _recompute(found.recompute)
    if method is not None:
        lines.append(f"--recompute-granularity full --recompute-method {method[0]} --recompute-num-layers {method[1]}")
    world = found.shape.ranks * found.shape.pipelines * asked.plan.chain.tensor
    return f"# {world} GPUs: data-parallel size {found.shape.pipelines}\n" + " \\\n".join(lines) + "\n"


def megatron_bridge(asked: Asked) -> str:
    """Return the same as assignments to Megatron-Bridge's ``cfg.model`` and ``cfg.train``."""
    found = asked.expressed("megatron")
    each, chunks = asked.plan.chain.microbatch, found.shape.chunks
    method = _recompute(found.recompute)
    lines = [
        f"# {found.shape.ranks * found.shape.pipelines * asked.plan.chain.tensor} GPUs: "
        f"data-parallel size {found.shape.pipelines}",
        f"cfg.model.num_layers = {_decoders(found)}",
        f"cfg.model.pipeline_model_parallel_size = {found.shape.ranks}",
        f"cfg.model.virtual_pipeline_model_parallel_size = {chunks if chunks > 1 else None}",
        "cfg.model.pipeline_model_parallel_layout = [",
        *(f"    {_listed(part)}," for part in _parts(asked, found)),
        "]",
        f"cfg.train.micro_batch_size = {each}",
        f"cfg.train.global_batch_size = {each * asked.microbatches}",
        f"cfg.model.share_embeddings_and_output_weights = {not _untied(asked)}",
    ]
    lines += [f"cfg.model.mtp_num_layers = {mtp_layers(asked.plan.chain)}"] if mtp_layers(asked.plan.chain) else []
    if asked.plan.chain.tensor > 1:
        lines += [
            f"cfg.model.tensor_model_parallel_size = {asked.plan.chain.tensor}",
            f"cfg.model.sequence_parallel = {asked.plan.chain.sequence_parallel}",
        ]
    if asked.autocast:
        lines += ["cfg.model.enable_autocast = True", f"cfg.model.autocast_dtype = torch.{asked.autocast}"]
    if method is not None:
        lines += [
            'cfg.model.recompute_granularity = "full"',
            f'cfg.model.recompute_method = "{method[0]}"',
            f"cfg.model.recompute_num_layers = {method[1]}",
        ]
    return "\n".join(lines) + "\n"


def _parts(asked: Asked, found: Expressed) -> list[list[str]]:
    """Return the kinds of layers in each stage; CannotExpress where those of multi-token prediction must not be."""
    count = mtp_layers(asked.plan.chain)
    parts = [[kind for unit in units for kind in _kinds(unit, count)] for units in found.units]
    for s, part in enumerate(parts):
        if "mtp" in part and (s < len(parts) - found.shape.ranks or not s % found.shape.ranks):
            raise CannotExpress(
                f"megatron: layers of multi-token prediction are in stage {s}; they must be in the last stage of a "
                "rank that is not the first"
            )
    return parts


def _kinds(unit: Unit, mtp: int) -> list[str]:
    if unit.name == "mtp":
        return ["mtp"] * mtp
    return ["decoder" if unit.block else "loss" if unit.start else "embedding"]


def _tensor_flags(chain: Chain) -> list[str]:
    if chain.tensor == 1:
        return []
    along = " --sequence-parallel" if chain.sequence_parallel else ""
    return [f"--tensor-model-parallel-size {chain.tensor}{along}"]


def _untied(asked: Asked) -> bool:
    """Whether embedding and output have weights of their own, which isn't the default there."""
    last = len(asked.plan.chain) - 1
    units = asked.expressed("megatron").units
    return not any(a < units[0][0].stop and units[-1][-1].start <= b <= last for a, b in asked.plan.chain.tied)


def _decoders(found: Expressed) -> int:
    return sum(unit.block for part in found.units for unit in part)


def _recompute(way: Recompute) -> tuple[str, int] | None:
    methods = {"first": "block", "every": "uniform"}
    return None if way.rule == "none" else (methods[way.rule], way.count)


def _runs(kinds: list[str] | str) -> list[tuple[str, int]]:
    return [(kind, len(list(run))) for kind, run in groupby(kinds)]


def _repeated(letters: str) -> str:
    """Return ``Et*3`` for ``Ettt``."""
    return "".join(letter * count if count < 3 else f"{letter}*{count}" for letter, count in _runs(letters))


def _listed(kinds: list[str]) -> str:
    """Return ``["embedding"] + ["decoder"] * 3``."""
    return " + ".join(f'["{kind}"]' + (f" * {count}" if count > 1 else "") for kind, count in _runs(kinds))
