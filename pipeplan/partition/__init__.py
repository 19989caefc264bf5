"""Where should a chain be cut, and which devices get which stage? Each file or folder answers by one algorithm.

All partitioners have one signature, ``(problem, **options) -> iterator of allocations, best first``, and are
interchangeable; the command line reads their names here. None of them schedules: an allocation's claimed period is what
its own model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..plan import Allocation
from ..registry import Late


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A registered partitioner: ``optimal`` says whether its first allocation is the best contiguous one; ``options``
    names the keyword arguments that it takes, and the values of each, the default first. ``simple``: its allocations,
    with any options, are tried for whatever a plan costs."""

    partition: Callable[..., Iterator[Allocation]]
    summary: str
    source: str
    optimal: bool = False
    simple: bool = False
    options: Mapping[str, tuple[str | bool, ...]] = field(default_factory=dict)


ALGORITHMS: dict[str, Algorithm] = {
    "contiguous": Algorithm(
        Late("partition.contiguous.contiguous:contiguous"),
        "exact best contiguous stages under memory, with replicas, checkpointing, levels, unequal devices",
        "MadPipe section 4.1, extended to replicas and checkpointing",
        optimal=True,
    ),
    "madpipe": Algorithm(
        Late("partition.madpipe.exact:madpipe"),
        "exact over all plans with one special device of several stages, as MadPipe charges its memory",
        "MadPipe section 4.2, solved without a grid",
        options={"charge": ("full", "tight", "paper"), "split": (False, True)},
    ),
    "madpipe-paper": Algorithm(
        Late("partition.madpipe.paper:madpipe_paper"),
        "MadPipe's dynamic program on its published grid",
        "MadPipe section 4.2, Algorithm 1",
    ),
    "pipedream": Algorithm(
        Late("partition.pipedream.paper:pipedream"),
        "hierarchical dynamic program with replicated stages, blind to memory in flight",
        "PipeDream section 3.1",
        simple=True,
        options={"straight": (False, True)},
    ),
    "piper": Algorithm(
        Late("partition.piper:piper"),
        "replicas, recomputed layers and, with --tensor each, degrees of stages, memory as Piper counts it",
        "Piper section 4, on layers in their order",
    ),
    "balance": Algorithm(
        Late("partition.balance:balance"),
        "equal compute per device, one stage each",
        "baseline (block partition)",
        simple=True,
    ),
    "data-parallel": Algorithm(Late("partition.balance:data_parallel"), "the whole model on every device", "baseline"),
}
