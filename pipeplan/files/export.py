"""How does another runtime say this plan? What one of those that people already use can't express is refused.

Every exporter takes a plan and the simulated run of the schedule to export, and returns the text of a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..errors import PipeplanError
from ..names import shown
from ..plan import Plan, Stage
from ..schedule.timeline import Timeline


class CannotExpress(PipeplanError):
    """A plan that a target has no words for; the message says which part and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A registered target: ``export(plan, stages, run)`` gives the text; ``what`` it is and where the runtime reads it.

    ``schedule`` says whether the order of the operations is part of it; the other targets take the split alone and run
    a schedule of their own.
    """

    export: Callable[[Plan, Sequence[Stage], Timeline], str]
    what: str
    schedule: bool = False


def torch_csv(plan: Plan, stages: Sequence[Stage], run: Timeline) -> str:
    """Return the schedule that torch's ``_PipelineScheduleRuntime._load_csv(path, "compute_only")`` reads.

    One row per rank (the used devices in order), ``0F0,0F1,0B0`` or with ``I`` and ``W`` where the backward is split;
    torch inserts the communication. Any placement of stages; one device per stage; a drained schedule, since torch
    keeps one version of the weights and updates after every step.
    """
    program = run.program
    _refuse_replicas("torch-csv", stages)
    if program.graph.policy.weights != "flush":
        raise CannotExpress(
            f"torch-csv: torch drains the pipeline before every update, and this schedule keeps weights "
            f"{program.graph.policy.weights}; plan with --weights flush, or export a drained --schedule such as 1f1b"
        )
    if program.batch > 1:
        raise CannotExpress(f"torch-csv: one backward covers {program.batch} microbatches here, and one in torch")
    rows = [",".join(map(program.name, lane.steps)) for lane in program.lanes if lane.device is not None and lane.steps]
    return "\n".join(rows) + "\n"


def torchtitan(plan: Plan, stages: Sequence[Stage], run: Timeline) -> str:
    """Return torchtitan's ``[parallelism]`` section: ``module_fqns_per_model_part`` and the degrees, as TOML.

    Stages go round the ranks in order (a loop), as torchtitan places them. Layer names must be the modules' FQNs.
    """
    ranks = _ranks("torchtitan", stages, loop=True)
    parts = []
    for stage in stages:
        names = [layer.name for layer in plan.chain.layers[stage.start : stage.stop]]
        odd = next((name for name in names if ".." in name or "(" in name or not name.isprintable()), None)
        if odd is not None:
            raise CannotExpress(
                f"torchtitan: layer '{shown(odd)}' is no module name; plan a profile with one module per layer"
            )
        parts.append(names)
    lines = [
        "[parallelism]",
        f"pipeline_parallel_degree = {ranks}",
        f"data_parallel_replicate_degree = {stages[0].replicas}",
        "module_fqns_per_model_part = [",
        *(f"    {json.dumps(names, ensure_ascii=False)}," for names in parts),
        "]",
        "",
        "[activation_checkpoint]",
        f'mode = "{"full" if _recomputes("torchtitan", stages) else "none"}"',
    ]
    return "\n".join(lines) + "\n"


DECODER = re.compile(r"(?:.*[._])?(?:blocks?|layers?|decoder|h)[._]?\d+")


def megatron(plan: Plan, stages: Sequence[Stage], run: Timeline) -> str:
    """Return Megatron-LM's arguments: the pipeline size and ``--pipeline-model-parallel-layout``.

    ``E`` embedding, ``t`` decoder layer, ``L`` output and loss, stages between ``|``; the layers before the first
    decoder layer are the embedding, the last layer is ``L``, a final norm belongs to Megatron's last decoder stage.
    """
    ranks = _ranks("megatron", stages, loop=True)
    names = [layer.name for layer in plan.chain.layers]
    decoders = [i for i, name in enumerate(names) if DECODER.fullmatch(name)]
    if not decoders:
        raise CannotExpress(
            f"megatron: no layer of {shown(plan.chain.name)} is named as a decoder layer, such as layers.3"
        )
    odd = next((i for i in range(decoders[0], decoders[-1]) if i not in decoders), None)
    if odd is not None:
        raise CannotExpress(f"megatron: layer {odd} ({shown(names[odd])}) between the decoder layers is none")
    if decoders[0] == 0 or decoders[-1] == len(names) - 1:
        raise CannotExpress("megatron: a layout starts with the embedding and ends with the output layer")
    if stages[0].stop < decoders[0]:
        raise CannotExpress("megatron: the embedding is one layer there; this plan cuts it")
    letters = ["E", *[""] * (decoders[0] - 1), *"t" * len(decoders), *[""] * (len(names) - 2 - decoders[-1]), "L"]
    layout = "|".join(_repeated("".join(letters[stage.start : stage.stop])) for stage in stages)
    arguments = [f"--pipeline-model-parallel-size {ranks}", f'--pipeline-model-parallel-layout "{layout}"']
    if _recomputes("megatron", stages):
        arguments.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return " \\\n".join(arguments) + "\n"


def deepspeed(plan: Plan, stages: Sequence[Stage], run: Timeline) -> str:
    """Return what DeepSpeed's ``PipelineModule`` needs, as JSON: ``num_stages`` and ``parts``, the stages' boundaries.

    ``parts`` goes where ``PipelineModule._partition_layers`` would compute it; one stage per rank, in order.
    """
    ranks = _ranks("deepspeed", stages, loop=False)
    found = {
        "num_stages": ranks,
        "parts": [stage.start for stage in stages] + [stages[-1].stop],
        "data_parallel_size": stages[0].replicas,
        "activation_checkpoint_interval": 1 if _recomputes("deepspeed", stages) else 0,
        "micro_batches": run.program.microbatches,
    }
    return json.dumps(found, indent=1) + "\n"


def torchgpipe(plan: Plan, stages: Sequence[Stage], run: Timeline) -> str:
    """Return ``torchgpipe.GPipe``'s arguments as JSON: ``balance``, ``devices``, ``chunks`` and ``checkpoint``."""
    _refuse_replicas("torchgpipe", stages)
    _ranks("torchgpipe", stages, loop=False)
    found: dict[str, Any] = {
        "balance": [stage.stop - stage.start for stage in stages],
        "devices": [stage.devices[0] for stage in stages],
        "chunks": run.program.microbatches,
        "checkpoint": "always" if _recomputes("torchgpipe", stages) else "never",
    }
    return json.dumps(found, indent=1) + "\n"


TARGETS: dict[str, Target] = {
    "torch-csv": Target(torch_csv, "schedule CSV for torch.distributed.pipelining's _PipelineScheduleRuntime", True),
    "torchtitan": Target(torchtitan, "module_fqns_per_model_part for torchtitan's [parallelism]"),
    "megatron": Target(megatron, "--pipeline-model-parallel-layout for Megatron-LM"),
    "deepspeed": Target(deepspeed, "parts for DeepSpeed's PipelineModule"),
    "torchgpipe": Target(torchgpipe, "balance for torchgpipe.GPipe"),
}


def notes(plan: Plan, target: str, stages: Sequence[Stage]) -> list[str]:
    """Return what a user should know beside the exported text: what the target will do in its own way."""
    found = []
    if not TARGETS[target].schedule and plan.policy.weights != "flush":
        found.append(
            f"{target} drains the pipeline before every update; the plan's weights {plan.policy.weights} and its "
            f"period hold only where they are kept so"
        )
    if tuple(stages) != plan.allocation.stages:
        found.append(f"the schedule needs {len(stages)} stages of its own; they are exported, not the plan's")
    return found


def _refuse_replicas(target: str, stages: Sequence[Stage]) -> None:
    for s, stage in enumerate(stages):
        if stage.replicas > 1:
            raise CannotExpress(f"{target}: stage {s} has {stage.replicas} replicas; there a stage has one device")


def _ranks(target: str, stages: Sequence[Stage], loop: bool) -> int:
    """Return the number of pipeline ranks when every stage has as many replicas and stages go round them in order."""
    counts = {stage.replicas for stage in stages}
    if len(counts) > 1:
        raise CannotExpress(f"{target}: stages have {sorted(counts)} replicas; there all have the same number")
    groups = [stage.devices for stage in stages]
    ranks = list(dict.fromkeys(groups))
    if not loop and len(groups) > len(ranks):
        shared = next(group for group in ranks if groups.count(group) > 1)
        held = [s for s, group in enumerate(groups) if group == shared]
        raise CannotExpress(f"{target}: GPU {shared[0]} holds stages {held}; there a rank holds one range of layers")
    if groups != ranks * (len(groups) // len(ranks)):
        order = [ranks.index(group) for group in groups]
        raise CannotExpress(f"{target}: stages are on ranks {order}; there stage i is on rank i mod {len(ranks)}")
    return len(ranks)


def _recomputes(target: str, stages: Sequence[Stage]) -> bool:
    """Return whether every stage recomputes all of its layers; refuse what is in between."""
    everything = [sum(stop - start for start, stop in x.checkpoint) == x.stop - x.start for x in stages]
    if all(everything):
        return True
    partial = next((s for s, stage in enumerate(stages) if stage.checkpoint), None)
    if partial is not None:
        raise CannotExpress(
            f"{target}: stage {partial} recomputes some layers of the model and others are stored; there all are "
            "recomputed or none (plan with --no-checkpointing)"
        )
    return False


def _repeated(letters: str) -> str:
    """Return ``Et*3`` for ``Ettt``."""
    runs = ((letter, len(list(run))) for letter, run in groupby(letters))
    return "".join(letter * count if count < 3 else f"{letter}*{count}" for letter, count in runs)
