"""With which options, and at which rate, are one stage's weights stepped? By torch's optimizer and schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ....choices import OPTIMIZERS
from ....errors import BadInput
from ..weights.buckets import Sharing, is_large
from ..weights.late import delay_of, predicted
from .offload import BucketBuffers
from .optimizers import MakeOptimizer, MakeSchedule, Rising

ELEMENTWISE = tuple(
    getattr(torch.optim, kind) for row in OPTIMIZERS.values() for kind in row.kinds if row.elementwise
)  # each element's step depends on its own gradient and state alone


Factor = float | Tensor  # what gradients are multiplied with before a step; a tensor where the host doesn't know it


def nothing() -> None:
    """Observe nothing."""


@dataclass(frozen=True)
class Stepping:
    """How a stage's weights are stepped: ``bucket`` parameters at a time, None for all at once.

    With ``offload`` what is not being stepped is in host memory, and travels through ``buffers``. With ``sharing`` each
    replica steps, and keeps masters and state of, its share alone. ``observed`` hears when memory is at its fullest.
    ``delays`` of weights, by index, are compensated as far as the optimizer does that; with ``predicts`` passes read
    predicted weights, and true ones are kept apart.
    """

    bucket: int | None = None
    offload: bool = False
    sharing: Sharing | None = None
    buffers: BucketBuffers = field(default_factory=BucketBuffers)
    observed: Callable[[], None] = nothing
    delays: Sequence[float] = ()
    predicts: bool = False


def is_elementwise(make_optimizer: MakeOptimizer) -> bool:
    """Whether what ``make_optimizer`` makes is known to step every element by itself."""
    return type(make_optimizer([nn.Parameter(torch.zeros(1))])) in ELEMENTWISE


def check_elementwise(make_optimizer: MakeOptimizer, why: str) -> None:
    """Raise BadInput unless the optimizer can be stepped in parts; ``why`` says what asks for it."""
    made = make_optimizer([nn.Parameter(torch.zeros(1))])
    if type(made) not in ELEMENTWISE:
        known = ", ".join(dict.fromkeys(kind.__name__ for kind in ELEMENTWISE))
        raise BadInput(
            f"optimizer: {type(made).__name__} isn't known to step each element by itself, as {why} needs; {known} do"
        )


def changes(factor: Factor) -> bool:
    """Whether gradients are to be multiplied at all."""
    return isinstance(factor, Tensor) or factor != 1


class Rates:
    """What both ways to step share: the optimizer of ``masters``, if there are any, and its learning-rate schedule.

    ``groups`` are torch's parameter groups of the masters; without them they are one.
    """

    def __init__(
        self,
        masters: Sequence[nn.Parameter],
        make_optimizer: MakeOptimizer,
        make_schedule: MakeSchedule | None,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        self._make_optimizer = make_optimizer
        self.optimizer = make_optimizer(list(masters) if groups is None else groups) if masters else None
        self._schedule = make_schedule(self.optimizer) if self.optimizer and make_schedule else None
        self.used: float | None = None  # the rate of the last update
        self.group_of = {
            x: g
            for g, group in enumerate(self.optimizer.param_groups if self.optimizer else ())
            for x in group["params"]
        }
        self._coming: list[float] | None = None

    def predicted(self, weight: nn.Parameter, group: int) -> Tensor:
        """Return what passes read of ``weight``, just stepped as one of the ``group`` of that index."""
        assert self.optimizer is not None, "otherwise nothing is stepped"
        if not delay_of(weight):
            return weight.data
        if self._coming is None:
            self._coming = self._next_rates()
        return predicted(self.optimizer, self.optimizer.param_groups[group], weight, self._coming[group])

    def _next_rates(self) -> list[float]:
        """Return the rates of the next update; a schedule that follows evaluations is taken to stay."""
        assert self.optimizer is not None, "otherwise there are no rates"
        groups = self.optimizer.param_groups
        if self._schedule is None or isinstance(self._schedule, ReduceLROnPlateau):
            return [float(group["lr"]) for group in groups]
        now, before = deepcopy(self.groups), deepcopy(self._schedule.state_dict())
        with catch_warnings(action="ignore"):
            self._schedule.step()
        found = [float(group["lr"]) for group in groups]
        self.restore(now, before)
        return found

    def advance(self) -> None:
        """Let the schedule go on after an update."""
        self._coming = None
        if self.optimizer is not None:
            self.used = float(self.optimizer.param_groups[0]["lr"])
        if self._schedule is not None and not isinstance(self._schedule, ReduceLROnPlateau):
            self._schedule.step()

    def observe(self, value: float) -> None:
        """Let a schedule that follows evaluations hear what one gave."""
        if isinstance(self._schedule, ReduceLROnPlateau | Rising):
            self._schedule.step(value)

    @property
    def groups(self) -> list[dict[str, Any]] | None:
        """The optimizer's options as they are now, without weights; None for a stage that trains nothing."""
        if self.optimizer is None:
            return None
        return [{key: x for key, x in group.items() if key != "params"} for group in self.optimizer.param_groups]

    @property
    def schedule(self) -> dict[str, Any] | None:
        """The state of the learning-rate schedule, None without one."""
        return None if self._schedule is None else self._schedule.state_dict()

    def restore(self, groups: Sequence[Mapping[str, Any]] | None, schedule: dict[str, Any] | None) -> None:
        """Go on with the options and the schedule of another run's optimizer, but for how its device stepped."""
        if self.optimizer is not None and groups is not None:
            for group, before in zip(self.optimizer.param_groups, groups, strict=True):
                group.update({key: x for key, x in before.items() if key != "fused"})
        if self._schedule is not None and schedule is not None:
            self._schedule.load_state_dict(schedule)

    def steps_on(self, device: torch.device) -> None:
        """Step as an optimizer of weights on ``device`` does by itself, where they come from elsewhere."""
        if self._make_optimizer([nn.Parameter(torch.zeros(1, device=device))]).defaults.get("fused"):
            for group in self.optimizer.param_groups if self.optimizer else ():
                group["fused"] = True

    def large_state(self, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Return what the optimizer will remember of each element of a weight of this type, told from a small one."""
        weight = nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
        weight.grad = torch.zeros_like(weight)
        tried = self._make_optimizer([weight])
        tried.step()
        return [key for key, value in tried.state[weight].items() if is_large(value) and value.dtype == dtype]

    def at_home(self, key: str, value: Any, home: torch.device) -> Any:
        """Return an entry of the optimizer's state where it wants it: a counter where it counts."""
        assert self.optimizer is not None, "only optimizers have state"
        group = self.optimizer.param_groups[0]
        counts_there = group.get("capturable") or group.get("fused")
        return value.to(home) if isinstance(value, Tensor) and (key != "step" or counts_there) else value
