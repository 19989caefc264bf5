"""What do devices do between two checkpoints of a run? Every rank's instructions for so many updates.

The pipeline is filled before them and drained behind them; a long segment is put together from what repeats itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from ...check.delays import waits_of
from ...cost.shared_weights import lending_stages, summed_stages
from ...plan import Plan
from ...schedule.kinds import graph_of, kind_of, program_of_kind
from ...schedule.pattern import most_in_flight, starts_of
from ...schedule.program import Program
from ...schedule.simulate import simulate
from ...schedule.timeline import Timeline, Times
from ...schedule.weight_versions import PROMPT, weight_policy
from .instructions import Agree, Forward, Instruction, Norm, Receive, Reduce, ReduceTied, Send, Update
from .lowered import lowered
from .repeats import Repeat, Repeated, continued

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
        finish = with_updates_last if plan.policy.precision == "fp32" else agreed  # all stages skip, or none
        lists = [finish(instructions) for instructions in lists]
        if plan.policy.clip:
            lists = [clipped(instructions) for instructions in lists]
        on = [[s for s, stage in enumerate(plan.allocation.stages) if d in stage.devices] for d in self.devices]
        lists = [with_tied_sums(x, self.tied, own) for x, own in zip(lists, on, strict=True)]
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


def agreed(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule, with all updates at the end, behind one agreement on them."""
    version = next(x.version for x in instructions if isinstance(x, Update))
    return with_updates_last([*instructions, Agree(version)])


def with_updates_last(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule with all updates at the end.

    Sums over replicas stay where they begin, so they go on beside other stages' passes. Updates keep their order, which
    is the same on all ranks.
    """
    return sorted(instructions, key=lambda x: isinstance(x, Update))


def clipped(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule with all sums and then all updates at the end, between them the norm.

    Sums and updates keep their order, which is the same on all ranks.
    """
    updates = [x for x in instructions if isinstance(x, Update)]
    sums = [x for x in instructions if isinstance(x, Reduce)]
    others = [x for x in instructions if not isinstance(x, Reduce | Update)]
    return [*others, *sums, Norm(updates[0].version), *updates]


def with_tied_sums(
    instructions: Sequence[Instruction], tied: Sequence[tuple[int, ...]], own: Sequence[int]
) -> list[Instruction]:
    """Return one mini-batch of a drained schedule on a rank with stages ``own``, sums of ``tied`` weights included.

    A rank that holds any of them makes all its updates at the end, behind the sums, which come in the order of
    ``tied``. The ranks of a device group hold the same stages. So all ranks' lists are parts of one total order: the
    program's, with these sums, and then these updates in their order, after everything else. Nothing deadlocks.
    """
    sums = [stages for stages in tied if set(stages) & set(own)]
    if not sums:
        return list(instructions)
    updates = [x for x in instructions if isinstance(x, Reduce | Norm | Update)]
    others = [x for x in instructions if not isinstance(x, Reduce | Norm | Update)]
    return [*others, *(ReduceTied(stages, updates[0].version) for stages in sums), *updates]


def forwards(instructions: Sequence[Instruction], version: int) -> list[Instruction]:
    """Return the forwards and their exchanges alone, all with ``version``: a run that evaluates."""
    kept: list[Instruction] = []
    for x in instructions:
        match x:
            case Forward():
                kept.append(replace(x, version=version, lent=tuple((s, version) for s, _ in x.lent)))
            case Send("F") | Receive("F"):
                kept.append(x)
    return kept
