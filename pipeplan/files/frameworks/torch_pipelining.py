"""Which schedule and which stages give a plan to torch.distributed.pipelining?"""

from __future__ import annotations

import re
from pathlib import PurePath

from ...check.targets import Shape, refuse_chain, refuse_parted
from ...check.units import CannotExpress, Unit, module_of, whole_blocks
from ...names import shown
from ...schedule.program import unequal
from ...version import __version__
from ..schedule_csv import written_schedule
from .asked import SCHEDULES, Asked

MODULE = re.compile(r"\w+(?:\.\w+)*")


def torch_csv(asked: Asked) -> str:
    """Return the schedule that torch's ``_PipelineScheduleRuntime._load_csv(path, "compute_only")`` reads.

    One row per rank (the used devices in order), ``0F0,0F1,0B0`` or with ``I`` and ``W`` where the backward is split;
    torch inserts the communication. Any placement of stages; of equal pipelines the row of one, since all run the same;
    a drained schedule, since torch keeps one version of the weights and updates after every step.
    """
    program = asked.run.program
    graph, pipelines = program.graph, _pipelines(asked)
    refuse_chain(asked.plan.chain, "torch")
    asked.refuse_unshared("torch", Shape(len({stage.devices for stage in asked.stages}), pipelines))
    refuse_parted(asked.plan.chain, asked.stages, "torch-csv")
    if asked.stages[-1].start >= whole_blocks(asked.plan.chain)[-1].modules_stop:
        raise CannotExpress("torch-csv: the last stage is the loss alone; there it is no part of the model")
    if not graph.policy.drains:
        raise CannotExpress(
            f"torch-csv: torch drains the pipeline before every update, and this schedule keeps weights "
            f"{graph.policy.weights}; plan with --weights flush, or export a drained --schedule such as 1f1b"
        )
    if program.split and pipelines > 1:
        raise CannotExpress(
            f"torch-csv: of {pipelines} pipelines DistributedDataParallel would sum the gradients, which it doesn't of "
            "split backwards; plan with --no-replicas, or with another --schedule"
        )
    if program.apart:
        raise CannotExpress(
            f"torch-csv: stage {min(program.apart)} recomputes in passes of its own, which torch has none of; export "
            "another --schedule, or plan with --checkpointing none"
        )
    return written_schedule(program)


def _pipelines(asked: Asked) -> int:
    """Return how many equal pipelines there are; CannotExpress where replicas differ, or what each of them runs."""
    graph = asked.run.program.graph
    uneven = unequal(graph, "torch")
    if uneven is not None:
        raise CannotExpress(f"torch-csv: {uneven}")
    count = graph.resources[graph.stages[0].resource].replicas
    if asked.microbatches % count:
        raise CannotExpress(
            f"torch-csv: {asked.microbatches} microbatches cannot be shared evenly by {count} pipelines"
        )
    return count


HEAD = '''"""Stages of {model} for torch.distributed.pipelining, planned by pipeplan {version}.

    {ranks} ranks x {pipelines} pipelines, {microbatches} microbatches of {each} samples for each pipeline and update.
    Every process calls schedule(..) and then step(..) on it; with several pipelines ``mesh`` is that of
    init_device_mesh(device, ({ranks}, {pipelines}), mesh_dim_names=("pp", "dp")).
"""

'''

LAYERS = '''STAGES = {stages}  # the layers of each stage, which the loss is none of
RECOMPUTED = {recomputed}  # layers that a backward runs again


class Recomputed(nn.Sequential):
    """Layers whose activations are not kept."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def stage_module(layers, number):
    """Return the module of stage ``number`` of the model's ``layers``, a list or an nn.Sequential."""
    layers = list(layers)
    (at, stop), parts = STAGES[number], []
    for first, last in RECOMPUTED[number]:
        parts += [*layers[at:first], Recomputed(*layers[first:last])]
        at = last
    return nn.Sequential(*parts, *layers[at:stop])


def schedule(layers, device, loss_fn, mesh=None):
    """Return this rank's schedule of the model ``layers``, whose step() trains one mini-batch."""
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    stages = []
    for number in RANKS[dist.get_rank(group)]:
        module = stage_module(layers, number).to(device)
        if PIPELINES > 1:
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
        stages.append(PipelineStage(module, number, len(STAGES), device, group=group))
'''

TRACED = '''SPLIT = [{split}]


def schedule(model, microbatch, device, loss_fn, mesh=None):
    """Return this rank's schedule of ``model``, whose step() trains one mini-batch; ``microbatch`` is an example: a
    tensor, a tuple of arguments or a dict of keywords."""
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    keywords = microbatch if isinstance(microbatch, dict) else {{}}
    given = () if keywords else microbatch if isinstance(microbatch, tuple) else (microbatch,)
    pipe = pipeline(model, given, keywords, {{name: SplitPoint.BEGINNING for name in SPLIT}})
    stages = []
    for number in RANKS[dist.get_rank(group)]:
        stage = pipe.build_stage(number, device, group)
        if PIPELINES > 1:
            same = mesh.get_group("dp")
            stage.submod = DistributedDataParallel(stage.submod, process_group=same, gradient_as_bucket_view=True)
        stages.append(stage)
'''

OWN = "    return without_outputs({name}({stages}, MICROBATCHES, loss_fn=loss_fn))\n"
FROM_CSV = """    run = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_fn)
    run._load_csv(Path(__file__).with_name({csv}))
    return without_outputs(run)
"""
WITHOUT_OUTPUTS = '''

def without_outputs(run):
    """Return a schedule whose step() doesn't keep the model's outputs, of all microbatches, unless it is asked to."""
    run.step = partial(run.step, return_outputs=False)
    return run
'''


def torch_split(asked: Asked) -> str:
    """Return a Python module that cuts a model into the plan's stages and makes each rank's schedule.

    It runs torch's own, 1F1B or interleaved, on the stages that ``pipeline()`` makes of the model by ``split_spec``.
    """
    found = asked.expressed("torch")
    if found.recompute.rule != "none":
        raise CannotExpress(
            "torch-split: pipeline() traces the model, and nothing there recomputes; --to torch-csv writes stages that "
            "do, or plan with --checkpointing none"
        )
    name = f"Schedule{SCHEDULES[asked.kind(found.shape)]}"
    own = OWN.format(name=name, stages="stages" if found.shape.chunks > 1 else "stages[0]")
    return _module(asked, _traced(asked), own, "SplitPoint, pipeline", name)


def torch_stages(asked: Asked) -> str:
    """Return a Python module that makes the plan's stages of a list of layers, or of a traced model, for the CSV."""
    csv = FROM_CSV.format(csv=repr(PurePath(asked.path).name))
    if asked.plan.chain.edges is None:
        count = whole_blocks(asked.plan.chain)[-1].modules_stop
        layers = LAYERS.format(
            stages=[(x.start, min(x.stop, count)) for x in asked.stages],
            recomputed=[[(a, min(b, count)) for a, b in x.checkpoint if a < count] for x in asked.stages],
        )
        return _module(asked, layers, csv, "PipelineStage", "_PipelineScheduleRuntime", layers=True)
    if any(stage.checkpoint for stage in asked.stages):
        raise CannotExpress(
            "torch-csv: pipeline() traces the model, and nothing there recomputes; plan with --checkpointing none"
        )
    return _module(asked, _traced(asked), csv, "SplitPoint, pipeline", "_PipelineScheduleRuntime")


def _traced(asked: Asked) -> str:
    if asked.plan.chain.order is not None:
        raise CannotExpress(
            "torch-split: pipeline() runs a model's layers in the model's own order, and the plan's stand in another; "
            "plan with -O order=given"
        )
    chain, names = asked.plan.chain, []
    units = {unit.start: unit for unit in whole_blocks(chain)}
    for stage in asked.stages[1:]:
        shown_as = chain.layers[stage.start].name
        unit = units.get(stage.start, Unit(shown_as, stage.start, stage.stop, stage.stop, False))
        name = asked.renamed("torch-split", shown_as) if asked.renames else module_of(chain, unit)
        if not MODULE.fullmatch(name):
            raise CannotExpress(
                f"torch-split: a stage begins with '{shown(shown_as)}', where no module of the model does"
            )
        names.append(name)
    return TRACED.format(split=", ".join(f'"{name}"' for name in names))


def _module(asked: Asked, body: str, schedule: str, names: str, kind: str, layers: bool = False) -> str:
    pipelines = _pipelines(asked)
    ranks: dict[tuple[int, ...], list[int]] = {}
    for s, stage in enumerate(asked.stages):
        ranks.setdefault(stage.devices, []).append(s)
    from_csv = kind.startswith("_")
    imports = [
        "from functools import partial",
        *(["from pathlib import Path"] if from_csv else []),
        "",
        "import torch.distributed as dist",
        *(["from torch import nn"] if layers else []),
        f"from torch.distributed.pipelining import {names if from_csv else f'{kind}, {names}'}",
        *([f"from torch.distributed.pipelining.schedules import {kind}"] if from_csv else []),
        "from torch.nn.parallel import DistributedDataParallel",
        *(["from torch.utils.checkpoint import checkpoint"] if layers else []),
    ]
    head = HEAD.format(
        model=asked.title,
        version=__version__,
        ranks=len(ranks),
        pipelines=pipelines,
        microbatches=asked.microbatches // pipelines,
        each=asked.plan.chain.microbatch,
    )
    facts = [
        f"RANKS = {[ranks[group] for group in sorted(ranks)]}  # the stages of each rank of a pipeline",
        f"PIPELINES = {pipelines}",
        f"MICROBATCHES = {asked.microbatches // pipelines}",
    ]
    return head + "\n".join([*imports, "", *facts, ""]) + body + schedule + WITHOUT_OUTPUTS
