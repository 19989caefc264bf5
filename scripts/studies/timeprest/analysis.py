"""What does TiMePReSt's schedule do to the weights? In unit time, read off the simulated schedule, not off formulas.

A worker is a stage; a mini-batch is N microbatches, each one time point forward on each worker, and one backward of b
time points on each worker. Mini-batches, their weights (the weights that mini-batch k makes are version k, 0 is the
start) and, in what is printed, workers count from 1, as in the paper. Every gradient is applied to the newest weights
(the paper's equation (2)); what differs is the weights that it is taken at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil

from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.errors import BadInput
from pipeplan.integers import smallest
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy, Weights
from pipeplan.schedule.program import Step
from pipeplan.schedule.programs.deciding import nf1b
from pipeplan.schedule.programs.one_f_one_b import one_f_one_b
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import Timeline, most_held
from pipeplan.schedule.weight_versions import Use, kept, used, weight_policy

MOST_PASSES = 300_000  # of microbatches through workers; simulating takes many seconds beyond
FAR = 64  # workers up to which a version difference of 1 is looked for
NEAR = 16  # microbatches up to which it is, where the backward's time is proportional to them


@dataclass(frozen=True, slots=True)
class BackwardTime:
    """Time points of one mini-batch's backward on one worker: ``factor``, or ``factor`` for each of its microbatches.

    The paper says 1 whatever N is; a backward that takes twice its forwards has 2N.
    """

    factor: Fraction = Fraction(1)
    per_microbatch: bool = False

    def of(self, microbatches: int) -> Fraction:
        """Return the time points for a mini-batch of ``microbatches``."""
        return self.factor * microbatches if self.per_microbatch else self.factor

    def __str__(self) -> str:
        return f"{self.factor}{'N' if self.per_microbatch else ''}"


def parse_backward(text: str, where: str) -> BackwardTime:
    """Return the backward time that ``2``, ``1.5``, ``7/3``, ``N`` or ``2N`` says; BadInput names ``where``."""
    number = text.removesuffix("N")
    try:
        factor = Fraction(number or "1") if text else Fraction(0)
    except (ValueError, ZeroDivisionError):
        raise BadInput(f"{where}: {text!r} isn't a number of time points such as 2, 1.5, 7/3 or 2N") from None
    if factor <= 0:
        raise BadInput(f"{where}: {text!r} is not positive")
    return BackwardTime(factor, number != text)


@dataclass(frozen=True)
class Analysis:
    """A run of ``workers`` workers with mini-batches of ``microbatches``, long enough for a steady middle.

    ``backward`` is b, ``limit`` how many mini-batches may be between worker 1's first forward and last backward (None:
    any). With ``vertical_sync`` a pass uses one version on all workers, the newest that all of them had when it
    started; without, each worker its own newest. ``steady`` is the range of mini-batches, from 0, that neither filling
    nor draining the pipeline touches; with a limit it spans whole cycles of it.
    """

    workers: int
    microbatches: int
    backward: Fraction
    vertical_sync: bool
    limit: int | None
    timeline: Timeline
    steady: range

    @cached_property
    def unit_ns(self) -> int:
        """Nanoseconds of one time point in the timeline."""
        return self.timeline.program.operations[0].duration_ns

    @cached_property
    def uses(self) -> list[list[Use]]:
        """For each worker, its passes in order with the version of the weights that each uses."""
        policy = weight_policy(Policy("latest", vertical_sync=self.vertical_sync))
        return used(self.timeline, policy, self.microbatches)

    @cached_property
    def version(self) -> dict[Step, int]:
        """The version of the weights that each pass uses."""
        return {use.step: use.version for uses in self.uses for use in uses}

    @cached_property
    def forward_times(self) -> tuple[Fraction, ...]:
        """For each mini-batch, the time points from its first forward's start to its last forward's end: f1, f2, .."""
        timeline, count = self.timeline, self.microbatches
        last = self.workers - 1
        return tuple(
            Fraction(timeline.end_ns(Step(m + count - 1, last)) - timeline.begin_ns(Step(m, 0)), self.unit_ns)
            for m in range(0, timeline.program.microbatches, count)
        )

    @cached_property
    def backward_versions(self) -> tuple[int, ...]:
        """For each mini-batch, the version at which its gradient is taken."""
        first_backward, count = self.workers, self.microbatches
        leaders = range(count - 1, self.timeline.program.microbatches, count)
        return tuple(self.version[Step(m, first_backward)] for m in leaders)

    @cached_property
    def forward_versions(self) -> tuple[tuple[int, ...], ...]:
        """For each mini-batch, the version with which each of its microbatches starts on worker 1."""
        entered = [self.version[Step(m, 0)] for m in range(self.timeline.program.microbatches)]
        return tuple(tuple(entered[m : m + self.microbatches]) for m in range(0, len(entered), self.microbatches))

    @cached_property
    def version_differences(self) -> tuple[int, ...]:
        """The values of k - (version at which mini-batch k's gradient is taken) in the steady state, in order."""
        return tuple(sorted({k + 1 - self.backward_versions[k] for k in self.steady}))

    @property
    def version_difference(self) -> int:
        """v, the paper's version difference: the largest of the steady state. Without a limit there is only one."""
        return self.version_differences[-1]

    @cached_property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The paper's sequences of mini-batches: each takes its gradient at the weights that the one before it made.

        A mini-batch whose predecessor already has a successor starts a sequence of its own.
        """
        chains: list[list[int]] = []
        ends: dict[int, list[int]] = {}
        for k, parent in enumerate(self.backward_versions, 1):
            chain = ends.pop(parent, None)
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(k)
            ends[k] = chain
        return tuple(map(tuple, chains))

    @cached_property
    def activations(self) -> tuple[int, ...]:
        """For each worker, the most microbatches whose activations it holds."""
        return _held(self.timeline)

    @cached_property
    def live_versions(self) -> tuple[int, ...]:
        """For each worker, the most versions of its weights that it holds at once."""
        return tuple(kept([(use.made, use.version) for use in uses]) for uses in self.uses)


def analyse(
    workers: int,
    microbatches: int,
    backward: Fraction = Fraction(1),
    *,
    vertical_sync: bool = True,
    limit: int | None = None,
) -> Analysis:
    """Return what nF1B does with W = ``workers``, N = ``microbatches``, b = ``backward``, from a simulated run.

    Source: TiMePReSt sections 4.1, 4.2 and 4.4. BadInput when a count is not positive or the run would be too long.
    """
    for name, value in (("workers", workers), ("microbatches", microbatches), ("limit", limit)):
        if value is not None and value < 1:
            raise BadInput(f"{name}: {value} is not positive")
    if backward <= 0:
        raise BadInput(f"backward time: {backward} is not positive")
    filling = ceil((workers + microbatches - 1 + workers * backward) / microbatches) + 1  # until a first update is done
    middle = max(filling, limit or 0)
    mini_batches = 3 * filling + middle
    passes = workers * microbatches * mini_batches
    if passes > MOST_PASSES:
        raise BadInput(
            f"{workers} workers, {microbatches} microbatches and a backward of {float(backward):g} time points need "
            f"{passes} forward passes ({mini_batches} mini-batches) until the state is surely steady; at most "
            f"{MOST_PASSES} are simulated"
        )
    graph = unit_time(workers, microbatches, backward, "latest")
    admitted = limit or filling + 1  # a limit that is never reached makes no difference, but for shorter queues
    while True:
        timeline = simulate(nf1b(graph, mini_batches * microbatches, microbatches, admitted))
        if limit is not None or _most_open(timeline) < admitted:
            break
        admitted *= 2
    steady = range(2 * filling, 2 * filling + middle)
    return Analysis(workers, microbatches, backward, vertical_sync, limit, timeline, steady)


def unit_time(workers: int, microbatches: int, backward: Fraction, weights: Weights) -> StageGraph:
    """Return equal stages, one per worker, whose backward of ``microbatches`` takes ``backward`` of their forwards.

    One time point is as many ns as make all durations integers. Transfers take no time, as in the paper's figures.
    """
    forward_ns = microbatches * backward.denominator
    layers = tuple(Layer(f"stage{s}", forward_ns, backward.numerator, 0, 0, saved_bytes=1) for s in range(workers))
    policy = Policy(weights, accumulate=microbatches)
    stages = [Stage(s, s + 1, (s,)) for s in range(workers)]
    return stage_graph(Chain("unit time", layers, 0), Platform.flat(workers, 10**9), policy, stages)


def _most_open(timeline: Timeline) -> int:
    """Return the most mini-batches that have started on worker 1 and whose backward there is not over."""
    program, last = timeline.program, 2 * len(timeline.program.graph.stages) - 1
    over = [timeline.end_ns(Step(program.leader(m), last)) for m in range(0, program.microbatches, program.batch)]
    starts = (timeline.begin_ns(Step(m, 0)) for m in range(0, program.microbatches, program.batch))
    return max(k - bisect_right(over, at) for k, at in enumerate(starts, 1))


def _held(timeline: Timeline) -> tuple[int, ...]:
    return tuple(most_held(timeline, i) for i, lane in enumerate(timeline.program.lanes) if lane.device is not None)


def activations_of_1f1b(workers: int, microbatches: int, backward: Fraction) -> tuple[int, ...]:
    """Return, for each worker, the microbatches' worth of activations that PipeDream's 1F1B holds at most.

    It runs a whole mini-batch at a time, so a pass of it is ``microbatches`` time points; it stashes a version of the
    weights for each mini-batch that it holds.
    """
    graph = unit_time(workers, 1, backward / microbatches, "stash")
    timeline = simulate(one_f_one_b(graph, 4 * workers))
    return tuple(microbatches * held for held in _held(timeline))


def most_workers(microbatches: int, backward: BackwardTime, limit: int | None = None) -> int | None:
    """Return the most workers with a version difference of 1 under vertical sync, None when :data:`FAR` still have."""

    def delayed(workers: int) -> bool:
        return analyse(workers, microbatches, backward.of(microbatches), limit=limit).version_difference > 1

    few = _first(delayed, FAR)
    return None if few is None else few - 1


def fewest_microbatches(workers: int, backward: BackwardTime, limit: int | None = None) -> int | None:
    """Return the fewest microbatches with a version difference of 1 under vertical sync, None when there are none.

    Looks up to the time points that a backward takes through all workers when a forward is in its way on each (there
    it is over before N forwards are), and up to :data:`NEAR` where it takes longer with more microbatches.
    """

    def prompt(microbatches: int) -> bool:
        return analyse(workers, microbatches, backward.of(microbatches), limit=limit).version_difference == 1

    return _first(prompt, NEAR if backward.per_microbatch else ceil(workers * (backward.factor + 1)))


def _first(holds: Callable[[int], bool], far: int) -> int | None:
    """Return the least count up to ``far`` that ``holds``, which is monotone but for fractions of a time point."""
    low = high = 1
    while high < far and not holds(high):
        low, high = high + 1, min(2 * high, far)
    found = smallest(lambda count: holds(count) or None, low, high)
    return None if found is None else found[0]


def paper_version_difference(workers: int, microbatches: int) -> int:
    """Return the paper's formula (18) for v at b = 1, floor((W + N - 2) / N), which is wrong in general.

    The schedule gives ceil(W / (N + 1)) there, and ceil(W b / (N + b)) for a whole number b.
    """
    return (workers + microbatches - 2) // microbatches


def paper_holds(analysis: Analysis) -> bool | None:
    """Whether the paper's formula gives the schedule's v; None where it says nothing.

    That is with b other than 1, a limit, one worker, or without vertical sync.
    """
    if analysis.backward != 1 or not analysis.vertical_sync or analysis.limit is not None or analysis.workers < 2:
        return None
    return analysis.version_differences == (paper_version_difference(analysis.workers, analysis.microbatches),)


def table(
    workers: Sequence[int],
    microbatches: Sequence[int],
    backward: BackwardTime,
    *,
    vertical_sync: bool = True,
    limit: int | None = None,
) -> list[list[Analysis]]:
    """Return one row per W, one analysis per N."""
    return [
        [analyse(w, n, backward.of(n), vertical_sync=vertical_sync, limit=limit) for n in microbatches] for w in workers
    ]
