"""How far is a run? One line for each update, put together from what the last stage's replicas tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Update ``step`` of ``steps`` is made; ``period_ns`` is the time per microbatch since the update before.

    ``gradient_norm`` is that of all gradients before they are clipped; None where they aren't.
    """

    step: int
    steps: int
    loss: float
    period_ns: float | None
    samples_per_s: float | None
    gradient_norm: float | None


class Progress:
    """Tells ``listener`` of every update that all ``replicas`` of the last stage have made."""

    def __init__(
        self, listener: Callable[[StepProgress], None], replicas: int, steps: int, interval: int, batch: int
    ) -> None:
        self._listener, self._replicas, self._steps = listener, replicas, steps
        self._interval, self._batch = interval, batch
        self._open: dict[int, list[StepDone]] = {}
        self._before: int | None = None

    def hear(self, done: StepDone) -> None:
        """Take one replica's word."""
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
        self._listener(StepProgress(done.step, self._steps, fmean(losses), period, rate, done.norm))


@dataclass(frozen=True, slots=True)
class StepDone:
    """The last stage has made update ``step``; ``losses`` are those of its microbatches that this rank had.

    ``norm`` is that of all gradients, where they are clipped.
    """

    step: int
    losses: tuple[float, ...]
    at_ns: int
    norm: float | None = None
