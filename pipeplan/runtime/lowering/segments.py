"""What do devices do between two checkpoints of a run? Every rank's instructions for so many updates.

The pipeline is filled before them and drained behind them. A program in its steady state does the same for every few
microbatches, with microbatches and versions counted on; so a rank's instructions are kept as what repeats itself, and
how often: its fill, one round and its drain, however long it runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from math import lcm
from typing import overload

from ...check.lateness import waits_of
from ...cost.stage_cost import lending_stages, summed_stages
from ...plan import Plan
from ...schedule.kinds import graph_of, kind_of, program_of_kind
from ...schedule.pattern import most_in_flight, starts_of
from ...schedule.program import Program
from ...schedule.simulate import simulate
from ...schedule.timeline import Timeline, Times
from ...schedule.weight_versions import PROMPT, weight_policy
from .instructions import (
    Agree,
    Forward,
    Instruction,
    Norm,
    Receive,
    Reduce,
    ReduceTied,
    Send,
    Update,
    later,
    version_uses,
)
from .lowered import lowered

LEAST = 64  # microbatches of a run that stands for longer ones, and more where many are in flight


class Segments:
    """What devices do between two checkpoints, however long that is; stages ``beside`` sum gradients meanwhile."""

    def __init__(self, plan: Plan, beside: Mapping[int, int], evaluates: bool) -> None:
        stages = plan.allocation.stages
        self.plan, self.beside, self.graph, self.policy = plan, beside, graph_of(plan), weight_policy(plan.policy)
        self.devices = tuple(sorted({device for stage in stages for device in stage.devices}))
        self.tied = summed_stages(plan.chain, stages)
        self._waits = PROMPT if evaluates else waits_of(plan, self.graph, beside)
        self._lenders = lending_stages(plan.chain, stages)

    def of(self, updates: int) -> tuple[Program, Timeline, list[Repeated]]:
        """Return the program, its timeline, and every rank's instructions for so many updates."""
        plan, interval = self.plan, self.plan.interval
        if not self.policy.drains:
            return self._endless(updates * interval)
        program, timeline, lists = self._listed(interval)
        agrees, clips = plan.policy.precision != "fp32", plan.policy.clip  # all stages skip, or none
        on = ({s for s, stage in enumerate(plan.allocation.stages) if d in stage.devices} for d in self.devices)
        tied = ([stages for stages in self.tied if own.intersection(stages)] for own in on)
        lists = [updates_last(x, agrees, own, clips) for x, own in zip(lists, tied, strict=True)]
        return program, timeline, [Repeated([Repeat(tuple(x), updates, interval, 1)]) for x in lists]

    def _listed(self, microbatches: int) -> tuple[Program, Timeline, list[list[Instruction]]]:
        plan = self.plan
        # messages go as soon as they are made: in a pattern's order one might wait for another that isn't made yet
        program = program_of_kind(self.graph, plan.schedule, plan.pattern, microbatches).first_come()
        timeline = simulate(program)
        if not kind_of(plan).by_arrival:  # devices run in the order in which they would by the plan's times
            program = timeline.program
        # what shares an operation runs one after the other, and what the first of it makes goes then
        runs = simulate(replace(timeline.program, fused=())) if timeline.program.fused else timeline
        lists = lowered(
            runs,
            self.policy,
            plan.interval,
            {device: rank for rank, device in enumerate(self.devices)},
            () if self.policy.drains else self.tied,
            self._lenders,
            plan.policy.waits_for_norm,
            self._waits,
        )
        return program, timeline, lists

    def _endless(self, microbatches: int) -> tuple[Program, Timeline, list[Repeated]]:
        """Return program, timeline and every rank's instructions for ``microbatches`` of an asynchronous plan.

        A long run is put together from a shorter one of a few hundred microbatches, whose program and timeline stand
        for it: once every start repeats itself over more microbatches than can be in the pipeline at once, it always
        will, until the last microbatch has entered. Until that is so the shorter run is doubled. Without a pattern
        (nF1B) all is listed.
        """
        pattern, interval = self.plan.pattern, self.plan.interval
        if pattern is not None:
            replicas = lcm(*(resource.replicas for resource in self.graph.resources))
            again = lcm(interval, replicas)  # microbatches of one round
            held = 2 * most_in_flight(self.graph, starts_of(pattern), pattern.period_ns) + replicas + again
            count = LEAST + 8 * held
            while 4 * count < microbatches:
                times = (microbatches - count) // again
                short = microbatches - times * again
                program, timeline, lists = self._listed(short)
                if _repeats(timeline.start_ns, short // 2, held, again):
                    longer = self._listed(short + again)[2]
                    pairs = zip(lists, longer, strict=True)
                    found = [continued(a, b, again, again // interval, times) for a, b in pairs]
                    listings = [listing for listing in found if listing is not None]
                    if len(listings) == len(found):
                        return program, timeline, listings
                count *= 2
        program, timeline, lists = self._listed(microbatches)
        return program, timeline, list(map(Repeated.of, lists))


def _repeats(start_ns: Times, first: int, count: int, again: int) -> bool:
    """Whether ``count`` microbatches from ``first`` on start everything as much after those ``again`` before them."""
    gaps = {
        here - before
        for m in range(first, first + count)
        for here, before in zip(start_ns[m], start_ns[m - again], strict=True)
    }
    return len(gaps) == 1


# --- a mini-batch of a drained schedule -------------------------------------------------------------------------------


def updates_last(
    instructions: Sequence[Instruction], agrees: bool, tied: Sequence[tuple[int, ...]], clips: bool
) -> list[Instruction]:
    """Return one mini-batch of a drained schedule on a rank with all updates at the end, before them what they need.

    That is the agreement on them, sums of the weights that the rank has of those that are ``tied``, and if it ``clips``
    the norm. Sums over replicas stay where they begin, so they go on beside other stages' passes, unless they are to
    come behind tied ones or before the norm. Sums and updates keep their order, which is the same on all ranks, and
    tied sums come in the order of ``tied``; the ranks of a device group hold the same stages. So all ranks' lists are
    parts of one total order: the program's, then these sums, and then the updates. Nothing deadlocks.
    """
    updates = [x for x in instructions if isinstance(x, Update)]
    sums = [x for x in instructions if isinstance(x, Reduce)] if clips or tied else []
    others = [x for x in instructions if not isinstance(x, (Update, Reduce) if sums else Update)]
    version = updates[0].version
    agreement, norm = [Agree(version)] if agrees else [], [Norm(version)] if clips else []
    return [*others, *agreement, *(ReduceTied(stages, version) for stages in tied), *sums, *norm, *updates]


def forwards(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return the forwards and their exchanges alone, all with version 0: a run that evaluates."""
    kept: list[Instruction] = []
    for x in instructions:
        match x:
            case Forward():
                kept.append(replace(x, version=0, lent=tuple((s, 0) for s, _ in x.lent)))
            case Send("F") | Receive("F"):
                kept.append(x)
    return kept


# --- what repeats itself ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeat:
    """``instructions`` that come ``times`` times, first with ``microbatch`` and ``version`` added to theirs.

    Each time after that ``microbatches`` and ``versions`` more are added.
    """

    instructions: tuple[Instruction, ...]
    times: int = 1
    microbatches: int = 0
    versions: int = 0
    microbatch: int = 0
    version: int = 0

    def __len__(self) -> int:
        return len(self.instructions) * self.times

    def at(self, index: int) -> Instruction:
        """Return one of the instructions."""
        turn, place = divmod(index, len(self.instructions))
        return later(
            self.instructions[place], self.microbatch + turn * self.microbatches, self.version + turn * self.versions
        )


class Repeated(Sequence[Instruction]):
    """The instructions of ``parts`` one after the other; they are made when they are asked for."""

    def __init__(self, parts: Sequence[Repeat] = ()) -> None:
        self.parts = tuple(part for part in parts if len(part))
        self._ends = list(accumulate(map(len, self.parts)))

    @staticmethod
    def of(instructions: Sequence[Instruction]) -> Repeated:
        """Return ``instructions`` themselves if they are a listing, or one that holds them."""
        return instructions if isinstance(instructions, Repeated) else Repeated([Repeat(tuple(instructions))])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> list[Instruction]: ...
    def __getitem__(self, index: int | slice) -> Instruction | list[Instruction]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, place)
        return self.parts[number].at(place - (self._ends[number - 1] if number else 0))

    @property
    def longest(self) -> int:
        """The most instructions of a turn."""
        return max((len(part.instructions) for part in self.parts), default=0)

    def later(self, microbatches: int, versions: int) -> Repeated:
        """Return the listing with microbatches and versions counted on by so many."""
        return Repeated(
            [replace(x, microbatch=x.microbatch + microbatches, version=x.version + versions) for x in self.parts]
        )

    def changed(self, change: Callable[[Iterable[Instruction]], Iterable[Instruction]]) -> Repeated:
        """Return what ``change``, which must not ask for microbatches or versions, makes of the instructions."""
        return Repeated([replace(x, instructions=tuple(change(x.instructions))) for x in self.parts])

    def short(self) -> list[Instruction]:
        """Return the instructions with every part at most twice, and what follows counted on by so much less."""
        taken: list[Instruction] = []
        microbatches = versions = 0  # left out so far
        for part in self.parts:
            taken += Repeated([replace(part, times=min(part.times, 2))]).later(-microbatches, -versions)
            left = max(part.times - 2, 0)
            microbatches, versions = microbatches + left * part.microbatches, versions + left * part.versions
        return taken

    def kinds(self) -> Iterator[Instruction]:
        """Yield what the listing is made of, each part once: all stages, edges and peers, but not all microbatches."""
        for part in self.parts:
            yield from part.instructions

    def uses(self, stage: int, by: Collection[int] = ()) -> Counter[int]:
        """Return how many passes use each version of ``stage``, as :func:`.instructions.version_uses` counts them."""
        total: Counter[int] = Counter()
        for part in self.parts:
            once = version_uses(part.instructions, stage, by)
            for turn in range(part.times):
                for version, count in once.items():
                    total[version + part.version + turn * part.versions] += count
        return total


def continued(
    shorter: Sequence[Instruction], longer: Sequence[Instruction], microbatches: int, versions: int, times: int
) -> Repeated | None:
    """Return ``shorter`` with ``times`` rounds of ``microbatches`` and ``versions`` more; None if it has no such round.

    ``longer`` is ``shorter`` with one round more, which tells where the round stands: after what both begin with. What
    follows it must be the rest of ``shorter``, counted on.
    """
    size = len(longer) - len(shorter)
    begin = next((i for i, (a, b) in enumerate(zip_longest(shorter, longer)) if a != b), len(shorter))
    rest = [later(x, microbatches, versions) for x in shorter[begin:]]
    if size <= 0 or begin < size or list(longer[begin + size :]) != rest:
        return None
    body = tuple(longer[begin : begin + size])
    if [later(x, microbatches, versions) for x in shorter[begin - size : begin]] != list(body):
        return None  # the round before is another
    return Repeated(
        [
            Repeat(tuple(shorter[:begin])),
            Repeat(body, times, microbatches, versions),
            Repeat(tuple(shorter[begin:]), 1, 0, 0, times * microbatches, times * versions),
        ]
    )
