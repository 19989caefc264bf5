"""How far is a run? Where the last stage is, what its replicas tell of every update, and the best evaluation so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from ...status import Status
from ..lowering.instructions import Message, StagePass
from ..lowering.lowered_run import LoweredRun


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Update ``step`` of ``steps`` is made; ``period_ns`` is the time per microbatch since the update before.

    ``gradient_norm`` is that of all gradients before they are clipped; None where they aren't. ``learning_rate`` is
    that of the update, of the first of several groups; None where the last stage trains nothing. An ``evaluation``
    after the update is told apart, with its loss, and whether it is the ``best`` so far.
    """

    step: int
    steps: int
    loss: float
    period_ns: float | None
    samples_per_s: float | None
    gradient_norm: float | None
    learning_rate: float | None = None
    evaluation: Mapping[str, float] | None = None
    best: bool = False


def metrics_of(progress: StepProgress) -> dict[str, float]:
    """Return the loss of an update and what else is known of it; of an evaluation its means: ``evaluation/loss``."""
    if progress.evaluation is not None:
        return {f"evaluation/{key}": value for key, value in progress.evaluation.items()}
    names = ("loss", "learning_rate", "gradient_norm", "period_ns", "samples_per_s")
    return {name: value for name in names if (value := getattr(progress, name)) is not None}


def place(lowered: LoweredRun, index: int) -> str:
    """Return in words at which update and microbatch the last stage's first replica is at its instruction ``index``."""
    instruction = lowered.instructions[teller(lowered)][max(0, index)]
    minibatch = lowered.minibatch(instruction)
    text = f"update {minibatch + 1} of {lowered.last.step}"
    if isinstance(instruction, StagePass | Message):
        number = instruction.microbatch - lowered.at(minibatch).microbatch + 1
        return f"{text}: microbatch {number} of {lowered.interval}"
    return text


def teller(lowered: LoweredRun) -> int:
    """Return the rank that tells how far a run is: that of the last stage's first replica."""
    return lowered.ranks_of(len(lowered.plan.allocation.stages) - 1)[0]


class Progress:
    """Tells ``listener`` of every update that all ``replicas`` of the last stage have made."""

    def __init__(self, listener: Callable[[StepProgress], None], replicas: int, lowered: LoweredRun) -> None:
        self._listener, self._replicas, self._steps = listener, replicas, lowered.last.step
        self._interval, self._batch = lowered.interval, lowered.plan.chain.microbatch
        self._open: dict[int, list[StepDone]] = {}
        self._before: int | None = None

    def hear(self, done: StepDone) -> None:
        """Take one replica's word."""
        if done.metrics is not None:
            loss = done.metrics["loss"]
            told = StepProgress(done.step, self._steps, loss, None, None, None, evaluation=done.metrics, best=done.best)
            self._listener(told)
            return
        heard = self._open.setdefault(done.step, [])
        heard.append(done)
        if len(heard) < self._replicas:
            return
        del self._open[done.step]
        now = max(x.at_ns for x in heard)
        period = None if self._before is None else (now - self._before) / self._interval
        self._before = now
        losses = [loss for x in heard for loss in x.losses]
        rate = self._batch * 1e9 / period if period else None
        self._listener(StepProgress(done.step, self._steps, fmean(losses), period, rate, done.norm, done.learning_rate))


@dataclass(frozen=True, slots=True)
class Audience:
    """Who hears of a run: of every update, of what is to be noted, and, asked for at any time, where it is."""

    listener: Callable[[StepProgress], None] | None = None
    note: Callable[[str], None] | None = None
    status: Status = field(default_factory=Status)

    def hear(self, lowered: LoweredRun, replicas: int) -> Callable[[StepDone], None]:
        """Return what takes the words of so many ``replicas`` of the last stage."""
        if self.listener is None:
            return lambda _: None
        return Progress(self.listener, replicas, lowered).hear


@dataclass(frozen=True, slots=True)
class StepDone:
    """The last stage has made update ``step``; ``losses`` are those of its microbatches that this rank had.

    It was through with them at ``at_ns``; the update may have waited for other stages.
    ``norm`` is that of all gradients, where they are clipped, ``learning_rate`` that of the update.
    An evaluation behind it has ``metrics`` instead.
    """

    step: int
    losses: tuple[float, ...]
    at_ns: int
    norm: float | None = None
    learning_rate: float | None = None
    metrics: Mapping[str, float] | None = None
    best: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """The best evaluation so far: its ``value``, the less the better, the update ``step`` that it came after, and how
    many there have been ``since``."""

    value: float | None = None
    step: int = 0
    since: int = 0

    def after(self, step: int, value: float) -> tuple[Trial, bool]:
        """Return what it is behind another evaluation, and whether that is the best; NaN never is."""
        if value == value and (self.value is None or value < self.value):
            return Trial(value, step), True
        return replace(self, since=self.since + 1), False
