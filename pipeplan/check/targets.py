"""What of a plan can the frameworks express that people train with? One row for each, from reading its source.

There a stage is a range of whole units (an embedding, a block, a head with its loss), all stages have as many replicas,
which makes equal pipelines side by side, and what is recomputed is one rule for all of them. A new target is a row of
:data:`TARGETS` and a writer of the same name in ``files.frameworks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..choices import Optimizer, Precision
from ..names import shown
from ..plan import Plan, ScheduleKind, Stage
from ..problem import LOSS_NAME, Chain, Engine, Problem, Zero
from ..schedule.kinds import KINDS
from .units import CannotExpress, Unit, decoder, layers_in_a_row, nameable, whole_blocks

Ranges = tuple[tuple[int, int], ...]
Rule = Literal["none", "first", "every"]


@dataclass(frozen=True, slots=True, order=True)
class Recompute:
    """What every stage recomputes: nothing (``none``), each of its ``first`` so many units that can be, or all of them
    in segments of ``every`` so many, from the stage's first on."""

    rule: Rule = "none"
    count: int = 0

    def segments(self, target: Target, units: Sequence[Unit], weights: Callable[[int, int], int]) -> Ranges:
        """Return the recomputed layers of a stage of ``units``; ``weights(start, stop)`` are the bytes of a range.

        A segment without weights is stored.
        """
        own = [unit for unit in units if target.recomputes(unit) and unit.start < unit.modules_stop]
        if self.rule == "none":
            return ()
        if self.rule == "first":
            return tuple((unit.start, unit.modules_stop) for unit in own[: self.count])
        parts = (own[i : i + self.count] for i in range(0, len(own), self.count))
        found = ((part[0].start, part[-1].modules_stop) for part in parts)
        return tuple((start, stop) for start, stop in found if weights(start, stop))

    def __str__(self) -> str:
        one = "it" if self.count == 1 else f"{self.count} of them"
        return {"none": "nothing", "first": f"the first {self.count} units of a stage", "every": f"every {one}"}[
            self.rule
        ]


@dataclass(frozen=True, slots=True)
class Shape:
    """``pipelines`` equal pipelines over ``ranks`` groups of GPUs, each of which has ``chunks`` stages: round and round
    over the ranks, or two of them down and up again, like a ``vee``."""

    ranks: int
    pipelines: int
    chunks: int = 1
    vee: bool = False

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each stage: the replicas of one are neighbours, as all targets number them."""
        r = self.pipelines
        own = tuple(tuple(range(s * r, (s + 1) * r)) for s in range(self.ranks))
        return own + own[::-1] if self.vee else own * self.chunks


@dataclass(frozen=True, slots=True)
class Target:
    """What a framework can express. ``source`` names whose source was read, and in which version.

    ``kinds`` of schedules it runs; ``units(chain)`` are what it doesn't cut (CannotExpress says why there are none);
    ``recomputes(unit)`` says which of them it can, under one of the ``rules``, in segments of ``longest`` at most.
    ``refuses(kind, shape, microbatches)`` are its other rules, for the microbatches of one pipeline. ``ties``: it sums
    the gradients of weights that stages share. ``engine``: whose memory its plans are counted in, if not our own.
    ``tensor``: it runs layers on groups of GPUs, with ``parts_groups`` those alone that divide the heads of keys and
    values. ``traces``: models that are no lists of layers, of which nothing is recomputed then. ``zero`` is the most of
    :data:`..problem.SHARING` that replicas share, and what they do beside pipelines. ``selective``: it can run the
    cores of attention again, and then nothing else. ``holds`` are its bytes per parameter by optimizer and precision,
    where they aren't ours: docs/reference/memory.md has their sources.
    """

    what: str
    source: str
    kinds: tuple[ScheduleKind, ...]
    units: Callable[[Chain], tuple[Unit, ...]]
    rules: tuple[Rule, ...]
    recomputes: Callable[[Unit], bool]
    refuses: Callable[[ScheduleKind, Shape, int], str | None] = lambda kind, shape, microbatches: None
    longest: int | None = None
    ties: bool = False
    engine: Engine | None = None
    tensor: bool = False
    parts_groups: bool = False
    traces: bool = False
    zero: tuple[Zero, Zero] = (1, 1)
    selective: bool = False
    holds: Mapping[tuple[Optimizer, Precision | None], str] = field(default_factory=dict)

    def unshared(self, zero: Zero, shape: Shape) -> str | None:
        """Return why replicas don't share what ``zero`` says on pipelines of a shape, or None."""
        if zero <= self.zero[shape.ranks > 1]:
            return None
        beside = " beside pipelines" if zero <= self.zero[0] else ""
        return f"replicas share no {'weights' if zero == 3 else 'gradients'}{beside} there (--zero {zero})"

    def of(self, chain: Chain) -> Target:
        """Return what it can express of a chain."""
        alone = chain.selective or (self.traces and chain.edges is not None)
        return replace(self, rules=("none",)) if alone else self

    def ways(self, most: int, counts: Sequence[int]) -> Iterator[Recompute]:
        """Yield what may be recomputed of stages with at most ``most`` units, by rules, from little to much; ``counts``
        are the numbers of units to try."""
        for rule in self.rules:
            if rule == "none":
                yield Recompute()
            else:
                longest = most if rule == "first" or self.longest is None else min(most, self.longest)
                yield from (Recompute(rule, count) for count in counts if count <= longest)


@dataclass(frozen=True, slots=True)
class Expressed:
    """A plan in a target's terms: its shape, the units of each stage, and what is recomputed."""

    shape: Shape
    units: tuple[tuple[Unit, ...], ...]
    recompute: Recompute


def express(chain: Chain, stages: Sequence[Stage], name: str) -> Expressed:
    """Return ``stages`` in the terms of the target ``name``; CannotExpress says what it has no words for."""
    refuse_chain(chain, name)
    target = TARGETS[name].of(chain)
    shape = _shape(name, stages)
    units = target.units(chain)
    ends = {0, *(unit.stop for unit in units)}
    for s, stage in enumerate(stages):
        if stage.stop not in ends:
            unit = next(unit for unit in units if unit.start < stage.stop < unit.stop)
            raise CannotExpress(
                f"{name}: stage {s} ends inside of {_named(chain, unit)}, which are one there (plan with --for {name})"
            )
    if not target.ties:
        refuse_parted(chain, stages, name)
    parts = tuple(tuple(unit for unit in units if stage.start <= unit.start < stage.stop) for stage in stages)
    weights = weight_bytes(chain)
    most = max(map(len, parts))
    for way in target.ways(most, range(1, most + 1)):
        if all(
            way.segments(target, part, weights) == stage.checkpoint for part, stage in zip(parts, stages, strict=True)
        ):
            return Expressed(shape, parts, way)
    s = next(s for s, stage in enumerate(stages) if stage.checkpoint)
    raise CannotExpress(
        f"{name}: stage {s} recomputes {_ranges(stages[s].checkpoint)}; there all stages recompute "
        f"{' or '.join(_RULES[rule] for rule in target.rules)} (plan with --for {name}, or --checkpointing none)"
    )


def as_run_by(problem: Problem, name: str) -> Problem:
    """Return the problem in whose memory is what the target ``name`` holds."""
    return problem.with_policy(replace(problem.policy, engine=TARGETS[name].engine))


def refuse_chain(chain: Chain, name: str) -> None:
    """Raise CannotExpress where the loss has weights, for which no target has a place, or where the target has no words
    for how many GPUs run each layer together."""
    last, target = chain.layers[-1], TARGETS[name]
    if last.name == LOSS_NAME and last.weight_bytes:
        raise CannotExpress(f"{name}: the loss has weights, and there it is a function")
    if chain.offloaded:
        how = _WAITING.get(name, "it has no words for")
        raise CannotExpress(f"{name}: activations wait in host memory, which {how}")
    if chain.variants and max(x.width for x in chain.variants) == 1:
        raise CannotExpress(f"{name}: each stage has activations in a way of its own, and there all have one")
    if chain.variants:
        raise CannotExpress(
            f"{name}: each stage has a tensor degree of its own, and there all have one; say --tensor 2, or of several "
            "modules export --to megatron-bridge"
        )
    if chain.width > 1 and not target.tensor:
        raise CannotExpress(f"{name}: {chain.width} GPUs run each layer together, which it has no words for")
    if chain.selective and not target.selective:
        raise CannotExpress(f"{name}: attention's core runs again in backwards, which it has no words for")
    if target.parts_groups and (chain.head_groups or chain.tensor) % chain.tensor:
        raise CannotExpress(
            f"{name}: {chain.head_groups} heads of keys and values aren't shared evenly by {chain.tensor} GPUs, and "
            "there no two have the same"
        )
    if chain.own_ways and target.traces:
        raise CannotExpress(
            f"{name}: layer '{shown(chain.own_ways)}' has a region of torch.no_grad or autocast, or a gradient "
            "or code of its own, which the trace there doesn't keep; call detach() instead, or begin autocast outside"
        )


def refuse_parted(chain: Chain, stages: Sequence[Stage], name: str) -> None:
    """Raise CannotExpress where layers that share weights are in two stages, whose gradients a target doesn't sum."""
    for one, other in chain.tied:
        if any((stage.start <= one < stage.stop) != (stage.start <= other < stage.stop) for stage in stages):
            raise CannotExpress(
                f"{name}: layers {one} and {other} share weights and are in two stages, whose gradients nobody sums "
                "there"
            )


_WAITING: dict[str, str] = {  # --cpu-offloading-num-layers and cpu_checkpointing
    "megatron": "it does without pipelines alone",
    "deepspeed": "it does with the inputs of recomputed layers alone, and each pass waits for them",
}
_RULES: dict[Rule, str] = {
    "none": "nothing",
    "first": "each of their first so many units",
    "every": "all units, so many at a time",
}


def weight_bytes(chain: Chain) -> Callable[[int, int], int]:
    """Return what gives the bytes of the weights of ``layers[start:stop]``."""
    sums = chain.sums.weight_bytes
    return lambda start, stop: int(sums[stop] - sums[start])


def target_violations(plan: Plan, name: str) -> list[str]:
    """Return why ``plan`` is none of those that the target ``name`` runs; empty where it is."""
    target, kind = TARGETS[name], plan.schedule.kind
    if kind not in target.kinds:
        return [f"{name}: runs {' and '.join(target.kinds)}; the schedule is {kind}"]
    try:
        found = express(plan.chain, plan.allocation.stages, name)
    except CannotExpress as error:
        return [str(error)]
    split = found.recompute.rule != "none" and KINDS[kind].splits
    reasons = ["recomputes nothing where backwards are split"] if split else []
    reasons += refusals(target, kind, found.shape, plan.schedule.mini_batch, plan.policy.zero)
    return [f"{name}: {reason}" for reason in reasons]


def refusals(target: Target, kind: ScheduleKind, shape: Shape, microbatches: int, zero: Zero = 0) -> list[str]:
    """Return why a target doesn't run a mini-batch of ``microbatches`` on pipelines of a shape; empty where it does."""
    unshared = target.unshared(zero, shape)
    if unshared is not None:
        return [unshared]
    if microbatches % shape.pipelines:
        return [f"{microbatches} microbatches cannot be shared evenly by {shape.pipelines} pipelines"]
    reason = target.refuses(kind, shape, microbatches // shape.pipelines)
    return [] if reason is None else [reason]


def _shape(name: str, stages: Sequence[Stage]) -> Shape:
    """Return the shape of stages that have as many replicas each and go round the ranks in order."""
    counts = {stage.replicas for stage in stages}
    if len(counts) > 1:
        raise CannotExpress(f"{name}: stages have {sorted(counts)} replicas; there all have the same number")
    groups = [stage.devices for stage in stages]
    ranks = list(dict.fromkeys(groups))
    chunks = len(groups) // len(ranks)
    if groups == ranks + ranks[::-1] and len(ranks) > 1 and "zbv" in TARGETS[name].kinds:
        return Shape(len(ranks), stages[0].replicas, 2, vee=True)
    if groups != ranks * chunks:
        order = [ranks.index(group) for group in groups]
        raise CannotExpress(f"{name}: stages are on ranks {order}; there stage i is on rank i mod {len(ranks)}")
    if chunks > 1 and "interleaved" not in TARGETS[name].kinds:
        held = [s for s, group in enumerate(groups) if group == groups[0]]
        raise CannotExpress(f"{name}: GPU {groups[0][0]} holds stages {held}; there a rank holds one range of layers")
    return Shape(len(ranks), stages[0].replicas, chunks)


# --- the other rules ------------------------------------------------------------------------------------------------


def _megatron(kind: ScheduleKind, shape: Shape, microbatches: int) -> str | None:
    if kind == "interleaved" and microbatches % shape.ranks:
        return (
            f"interleaved, the {microbatches} microbatches of a pipeline must be a multiple of its {shape.ranks} ranks"
        )
    return None


def _torch(kind: ScheduleKind, shape: Shape, microbatches: int) -> str | None:
    if kind == "1f1b" and microbatches < shape.ranks:
        return f"1f1b needs as many microbatches in a pipeline as stages, {shape.ranks}, not {microbatches}"
    if KINDS[kind].splits and shape.pipelines > 1:
        return f"{kind} runs on one pipeline: DistributedDataParallel sums no gradients of split backwards"
    rounds = max(1, microbatches // shape.ranks)
    if kind in ("interleaved", "interleaved-zb") and microbatches % rounds:
        return f"{kind}, the {microbatches} microbatches of a pipeline must be a multiple of its {rounds} rounds"
    return None


TARGETS: dict[str, Target] = {  # the sources are of August 2026
    "megatron": Target(
        what="Megatron-LM",
        source="NVIDIA/Megatron-LM at d98e8a64: pipeline_parallel_layer_layout.py, schedules.py, arguments.py",
        kinds=("1f1b", "interleaved"),
        units=decoder,
        rules=("none", "every", "first"),
        recomputes=lambda unit: unit.block,
        refuses=_megatron,
        ties=True,
        tensor=True,
        zero=(3, 3),
        selective=True,
        holds={("adam", "mixed"): "6+12"},
    ),
    "torchtitan": Target(
        what="torchtitan",
        source="pytorch/torchtitan at b5bcd76c: distributed/pipeline_parallel.py, activation_checkpoint.py",
        kinds=("1f1b", "interleaved", "interleaved-zb", "zbv"),
        units=nameable,
        rules=("none", "every"),
        recomputes=lambda unit: unit.block,
        refuses=_torch,
        longest=1,
        engine="torch",
        tensor=True,
        parts_groups=True,
        zero=(3, 1),
    ),
    "deepspeed": Target(
        what="DeepSpeed",
        source="deepspeedai/DeepSpeed at edaa7221: runtime/pipe/module.py, runtime/pipe/schedule.py",
        kinds=("1f1b",),
        units=layers_in_a_row,
        rules=("none", "every"),
        recomputes=lambda unit: True,
        ties=True,
        zero=(3, 1),
        holds={("adam", "mixed"): "4+12"},
    ),
    "torch": Target(
        what="torch.distributed.pipelining",
        source="torch 2.13: distributed/pipelining/schedules.py, _IR.py",
        kinds=("1f1b", "interleaved", "interleaved-zb", "zbv"),
        units=whole_blocks,
        rules=("none", "every"),
        recomputes=lambda unit: True,
        refuses=_torch,
        engine="torch",
        traces=True,
    ),
}


def _named(chain: Chain, unit: Unit) -> str:
    names = shown(chain.layers[unit.start].name), shown(chain.layers[unit.stop - 1].name)
    return f"layers {unit.start} to {unit.stop - 1} ({names[0]} to {names[1]})"


def _ranges(segments: Ranges) -> str:
    return "layers " + ", ".join(str(a) if b == a + 1 else f"{a} to {b - 1}" for a, b in segments)
