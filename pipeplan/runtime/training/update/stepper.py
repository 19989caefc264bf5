"""How do a stage's gradients become new weights? All at once or in buckets, and all of them or a replica's share.

The masters are what torch's optimizer works on: the weights themselves, or copies in 32 bits of 16-bit ones, or the
true values of predicted ones; then the new values go to the others after a step. Between updates they are those of the
newest version. Elementwise optimizers give the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ....choices import OPTIMIZERS
from ....errors import BadInput
from ....registry import Late
from ...device import CPU
from ...exchange.collective import ChunkSum
from ..weights.buckets import Kept, Rows, SharedChunk, Sharing, cut_into_buckets, gathered, is_large, shared_chunks
from ..weights.versions import Versions
from .offload import BucketBuffers
from .optimizers import MakeOptimizer, MakeSchedule, delay_of, delayed, predicted

ELEMENTWISE = tuple(
    getattr(torch.optim, kind) for row in OPTIMIZERS.values() for kind in row.kinds if row.elementwise
)  # each element's step depends on its own gradient and state alone


Factor = float | Tensor  # what gradients are multiplied with before a step; a tensor where the host doesn't know it


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
    observed: Callable[[], None] = lambda: None
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
        made = make_schedule(self.optimizer) if self.optimizer and make_schedule else []
        self._schedules: list[Any] = made if isinstance(made, list) else [made]
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
        now, before = deepcopy(self.groups), deepcopy(self.schedule)
        with catch_warnings(action="ignore"):
            self._step_schedules()
        found = [float(group["lr"]) for group in groups]
        self.restore(now, before)
        return found

    def _step_schedules(self, *values: float) -> None:
        """Let those that follow evaluations hear the values of one, or the others go on."""
        for schedule in self._schedules:
            if isinstance(schedule, ReduceLROnPlateau) == bool(values):
                schedule.step(*values)

    def advance(self) -> None:
        """Let the schedule go on after an update."""
        self._coming = None
        if self.optimizer is not None:
            self.used = float(self.optimizer.param_groups[0]["lr"])
        self._step_schedules()

    def observe(self, value: float) -> None:
        """Let a schedule that follows evaluations hear what one gave."""
        self._step_schedules(value)

    @property
    def groups(self) -> list[dict[str, Any]] | None:
        """The optimizer's options as they are now, without weights; None for a stage that trains nothing."""
        if self.optimizer is None:
            return None
        return [{key: x for key, x in group.items() if key != "params"} for group in self.optimizer.param_groups]

    @property
    def schedule(self) -> list[dict[str, Any]]:
        """The states of the learning-rate schedules."""
        return [schedule.state_dict() for schedule in self._schedules]

    def restore(self, groups: Sequence[Mapping[str, Any]] | None, states: Sequence[dict[str, Any]]) -> None:
        """Go on with the options and the schedule of another run's optimizer, but for how its device stepped."""
        if self.optimizer is not None and groups is not None:
            for group, before in zip(self.optimizer.param_groups, groups, strict=True):
                group.update({key: x for key, x in before.items() if key != "fused"})
        if self._schedules and states:
            for schedule, state in zip(self._schedules, states, strict=True):
                schedule.load_state_dict(state)

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


bucketed = Late("runtime.training.update.bucketed_stepper:BucketedStepper")


def stepper_kind(versions: Versions, how: Stepping) -> Callable[..., Any]:
    """Return what steps the weights of ``versions`` as ``how`` says, all at once or in buckets."""
    return Stepper if (how.bucket is None and how.sharing is None) or not versions.installed else bucketed


Parted = Callable[[Sequence[nn.Parameter], Sequence[nn.Parameter]], list[dict[str, Any]] | None]


class Stepper:
    """Steps the weights of ``versions`` all at once, as ``how`` says; ``masters`` has the 32-bit values of 16-bit ones.

    ``parted`` makes torch's parameter groups of masters by the weights that they are for.
    """

    def __init__(
        self,
        versions: Versions,
        make_optimizer: MakeOptimizer,
        make_schedule: MakeSchedule | None = None,
        how: Stepping = Stepping(),  # noqa: B008, RUF100 -- it is frozen
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        parted: Parted | None = None,
    ) -> None:
        leaves = versions.installed
        self._device = leaves[0].device if leaves else CPU
        self._versions, self._how, self._mixed = versions, how, bool(masters) or how.predicts
        home = CPU if how.offload else self._device
        values = [masters[x] if masters else x.data.clone() if how.predicts else x.data for x in leaves]
        delays = how.delays or [0.0] * len(leaves)
        self._masters = [
            delayed(nn.Parameter(x.to(home) if self._mixed else x), delay)
            for x, delay in zip(values, delays, strict=True)
        ]
        if how.predicts and versions.in_turns:
            versions.true = self._masters
        self._shapes = [leaf.shape for leaf in leaves]
        self.buckets = cut_into_buckets(leaves, how.bucket, len(leaves) - versions.own)
        self.chunks = None if how.sharing is None else self.chunks_of(how.sharing)
        self._rows = None if self.chunks is None else Rows(self.chunks)
        groups = None if parted is None else parted(leaves, self._masters)
        self.rates = Rates(self._masters, make_optimizer, make_schedule, groups)
        self._whole: list[Kept] | None = None  # of all shares, while a checkpoint is written or read
        self._prepare()

    def _prepare(self) -> None:
        """Bring masters and state to where they are kept."""

    def chunks_of(self, sharing: Sharing) -> tuple[SharedChunk, ...]:
        """Return the chunks in which weights are summed; of each the own part is what is stepped by ``sharing``."""
        apart = sum(bucket.slices[0].index >= self._versions.own for bucket in self.buckets)
        return shared_chunks(self.buckets, apart, sharing, self._how.bucket)

    @property
    def every(self) -> int:
        """The number of parts that are stepped one after the other: 1, if anything is trained."""
        return 1 if self.rates.optimizer else 0

    @property
    def by_bucket(self) -> bool:
        """Whether each of :attr:`buckets` is a part of what is stepped."""
        return self.every == len(self.buckets)

    def parts(self, tied: bool) -> range:
        """Return the parts that an update steps, those of weights ``tied`` to other ranks' among them."""
        if tied:
            return range(self.every)
        if self.chunks is not None:
            return range(sum(len(chunk.own) for chunk in self.chunks if chunk.summed))
        own = self._versions.own
        return range(sum(x.slices[0].index < own for x in self.buckets) if self.by_bucket else self.every)

    def begin(self) -> None:
        """Let masters that are weights themselves be in the version that is being made."""
        for master, made in zip(self._masters, self._versions.made, strict=True):
            if not self._mixed and master.data_ptr() != made.data_ptr():
                made.copy_(master.data)
                master.data = made

    def step(self, part: int, gradients: Sequence[Tensor | None], factor: Factor = 1.0) -> None:
        """Make one of the parts of the version that is being made from ``gradients`` times ``factor``."""
        self._step(part, gradients, factor, self._versions.made)

    def _step(
        self, part: int, gradients: Sequence[Tensor | None], factor: Factor, weights: Sequence[Tensor | None]
    ) -> None:
        """Step a part; ``weights`` apart from masters get the new values."""
        assert self.rates.optimizer is not None, "otherwise there are no parts"
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        if changes(factor):
            torch._foreach_mul_([master.grad for master in self._masters if master.grad is not None], factor)
        self.rates.optimizer.step()
        if self._mixed:
            for master, weight in zip(self._masters, weights, strict=True):
                if weight is not None:
                    weight.copy_(self.rates.predicted(master, self.rates.group_of[master]))
        self._how.observed()
        for master in self._masters:
            master.grad = None

    def step_tied(self, gradients: Sequence[Tensor | None], factor: Factor) -> None:
        """Step the tied weights of the newest version, which no pass has used yet."""
        weights = self._versions.weights()
        stepped: list[Any] = [*[None] * self._versions.own, *weights[self._versions.own :]]
        whole = self.chunks is None and not self.by_bucket
        for part in range(0 if whole else self.parts(tied=False).stop, self.every):
            self._step(part, gradients, factor, stepped)
        for chunk in self.chunks or ():
            if not chunk.summed:
                self._spread(chunk, weights)

    def show_true(self) -> None:
        """Let passes to come, of which none is under way, read the weights themselves; all replicas together."""
        if not self._how.predicts:
            return
        self._settle()
        weights = self._versions.weights()
        for index, weight in enumerate(weights):
            if self._rows is None:
                weight.copy_(self._masters[index].data)
            else:
                self._rows.put(index, self._masters[index].data, weight)
        for chunk in self.chunks or ():
            self._spread(chunk, weights)

    def _spread(self, chunk: SharedChunk, weights: Sequence[Tensor]) -> None:
        """Give the own share of ``chunk`` of ``weights`` to all, and take theirs."""
        assert self._how.sharing is not None, "only shares are spread"
        assert self._how.sharing.group is not None, "over those that share"
        row = torch.empty(chunk.stop - chunk.start, dtype=chunk.dtype, device=weights[0].device)
        chunk.give(weights, row)
        exchange = ChunkSum(row, self._how.sharing.group, chunk.first)
        exchange.spread()
        exchange.end()
        chunk.take(row, weights)

    def finish(self) -> None:
        """End an update of all weights: the schedule goes on."""
        self.rates.advance()

    def _settle(self) -> None:
        """Wait until all is where it is kept."""

    # --- for checkpoints: whole weights and states ---

    def assemble(self) -> None:
        """Bring what replicas share together on the first of them, until :meth:`part` is called; all do so at once."""
        self._settle()
        sharing = self._how.sharing
        if sharing is not None:
            kept = [Kept(x.data if self._mixed else None, self._kept(i)) for i, x in enumerate(self._masters)]
            rows = [
                Rows(self.chunks_of(replace(sharing, rank=rank)))
                for rank in range(0 if sharing.rank else sharing.ranks)
            ]
            self._whole = gathered(kept, self._shapes, rows, sharing)

    def make_room(self) -> None:
        """Have whole masters to be filled, of which :meth:`take_masters` takes the own share."""
        if self._how.sharing is not None:
            self._whole = [Kept(torch.empty(shape) if self._mixed else None, {}) for shape in self._shapes]

    def part(self) -> None:
        """Forget what others keep."""
        self._whole = None

    def master(self, index: int) -> Tensor:
        """Return the weight at ``index`` as the optimizer has it: the newest version's, in full precision."""
        whole = None if self._whole is None else self._whole[index].master
        return self._masters[index].data if whole is None else whole

    def state_of(self, index: int) -> Mapping[str, Any]:
        """Return what the optimizer remembers of the weight at ``index``."""
        return self._kept(index) if self._whole is None else self._whole[index].state

    def _kept(self, index: int) -> dict[str, Any]:
        """Return what is remembered here, without Nones."""
        state = {} if self.rates.optimizer is None else self.rates.optimizer.state.get(self._masters[index], {})
        return {key: value for key, value in state.items() if value is not None}

    def restore_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Let the optimizer remember ``state`` of the weight at ``index``, next to it."""
        if self.rates.optimizer is not None and state:
            master = self._masters[index]
            known = {key: self.rates.at_home(key, x, master.device) for key, x in state.items()}
            self.rates.optimizer.state[master] = known

    def take_masters(self) -> None:
        """Give the newest version, if it has 16 bits, the values of the full-precision weights."""
        for index, weight in enumerate(self._versions.weights() if self._mixed else ()):
            whole = self.master(index)
            weight.copy_(whole)
            if self._rows is not None:
                self._masters[index].data.copy_(self._rows.taken(index, whole))
        self.part()

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the optimizer keeps, and whether it is in host memory for want of room on the device."""
        for index, master in enumerate(self._masters):
            yield master.data, False
            if master.grad is not None:
                yield master.grad, False
            yield from ((value, False) for value in self._kept(index).values() if is_large(value))
