"""Which optimizers and learning-rate schedules are there, and how are steps with late gradients corrected?

They are the plan's, or any of torch's by name with options. Every stage has an optimizer and a schedule of its own over
its own weights; what needs all gradients of the model at once, such as clipping by their total norm, is elsewhere
(:mod:`.factors`).

A weight's ``delay`` is how many updates its gradients miss on average, tau; b is momentum or beta1, a = b ** tau.

- Spike compensation (Kosson et al. 2020, Pipelined Backpropagation at Scale): what a late gradient would have added to
  later steps by now it adds at once. SGD steps by a v + (1 - a) / (1 - b) g, AdamW by (a m_hat + (1 - a) g) / den.
- Weight prediction (SpecTrain; XPipe): passes read w - tau lr (the optimizer's direction), as the weights should be
  when the gradient comes; the optimizer goes on with w.

Both keep the state of torch's own classes, so checkpoints don't tell runs apart.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from ....choices import BY_MATRIX, OPTIMIZERS, Optimizer
from ....errors import BadInput
from ....problem import matrix_state, small_matrices
from ...model.build.spec import find
from ...model.user_code import user_code

for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    # what torch's compiler is to leave alone asks for it, and so imports it for a second, when first called
    _plain = getattr(getattr(torch.optim.Optimizer, _name), "__wrapped__", None)
    if _plain is not None:
        setattr(_plain, "__dynamo_disable", _plain)

MakeOptimizer = Callable[[list[nn.Parameter] | list[dict[str, Any]]], torch.optim.Optimizer]
PLATEAU = ReduceLROnPlateau.__name__
Schedules = LRScheduler | list[LRScheduler]  # several: each changes the rate
MakeSchedule = Callable[[torch.optim.Optimizer], Schedules]
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # by default they take 4 bytes more of each weight
RATE = 0.1  # at which SGD learns if nobody says another
LENGTHS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}  # how schedules call the updates until their end


@dataclass(frozen=True, slots=True)
class Choice:
    """A name, or ``module:function``, with keyword options, as typed: ``AdamW,weight_decay=0.01,betas=(0.9,0.95)``."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()


def parse_choice(text: str, place: str) -> Choice:
    """Return the choice that ``text`` names; BadInput starts with ``place``. Option values are Python literals."""
    name, _, rest = text.partition(",")
    try:
        call = ast.parse(f"f({rest})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not name or not all(x.arg for x in call.keywords):
            raise ValueError
        options = tuple((str(keyword.arg), ast.literal_eval(keyword.value)) for keyword in call.keywords)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the latter two for thousands of brackets
        raise BadInput(f"{place}: {text!r} is not of the form Name,option=value,...") from None
    return Choice(name, options)


def planned_as(choice: Choice) -> Optimizer | None:
    """Return the plan's name for an optimizer with as much state, None where that isn't known."""
    options = dict(choice.options)
    momentum = bool(options.get("momentum"))
    if options.get("amsgrad") or (choice.name == "RMSprop" and (momentum or options.get("centered"))):
        return None
    names = [name for name, row in OPTIMIZERS.items() if choice.name in row.kinds]
    return names[-1 if momentum else 0] if names else None


def optimizer_maker(choice: Optimizer | Choice, lr: float | None, as_on_gpus: bool = False) -> MakeOptimizer:
    """Return what makes the optimizer of a stage at learning rate ``lr`` (None: torch's own, of SGD :data:`RATE`).

    A name is a plan's; a :class:`Choice` names a class of ``torch.optim``, or a function that takes parameters, ``lr``
    and its options. If its options say nothing else, weights on a GPU are stepped by fused kernels where there are any
    (:data:`FUSED`). What is ``as_on_gpus`` steps others so too, and by ``foreach`` where there are none. BadInput when
    it doesn't take these options.
    """
    if isinstance(choice, str):
        choice = Choice(OPTIMIZERS[choice].kinds[0], OPTIMIZERS[choice].options)
    make = _named(choice, torch.optim, torch.optim.Optimizer, "optimizer")
    make = MuonForMatrices if make is torch.optim.Muon else make
    options = dict(choice.options)
    said = options.keys() & {"fused", "foreach", "differentiable"}
    if as_on_gpus and not said and "foreach" in inspect.signature(make).parameters:
        options["fused" if make in FUSED else "foreach"] = True
    if make is torch.optim.LBFGS:
        raise BadInput("optimizer: LBFGS runs the model several times per update; a pipeline runs it once")
    if make is torch.optim.SparseAdam:
        raise BadInput(
            "optimizer: SparseAdam takes sparse gradients alone, which are made dense here; take Adam or SGD"
        )

    if lr is None:
        own = inspect.signature(make).parameters.get("lr")
        lr = RATE if make is torch.optim.SGD or own is None or not isinstance(own.default, float) else own.default
    optimizer = partial(make, **{"lr": lr, **options})  # which other processes can be told
    if make in FUSED and not said and not as_on_gpus:
        optimizer = partial(_fused_on_gpus, optimizer)
    _try(optimizer, [nn.Parameter(torch.zeros(1))], f"optimizer {choice.name}")
    return optimizer


def _fused_on_gpus(make: Callable[..., torch.optim.Optimizer], parameters: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer of ``parameters``, or of groups of them; on a GPU one without temporaries."""
    weights = [x for given in parameters for x in (given["params"] if isinstance(given, dict) else [given])]
    fused = bool(weights) and all(x.device.type == "cuda" and x.is_floating_point() for x in weights)
    return make(parameters, fused=True) if fused else make(parameters)


AVERAGE = "average"  # of a weight, in the optimizer's state


def averaging(make: MakeOptimizer, decay: float) -> MakeOptimizer:
    """Return what makes optimizers that keep a running average of each weight as part of their state.

    It begins as the weight after its first step; then each step takes 1 - ``decay`` of the new weight, as torch's
    AveragedModel does with ``get_ema_multi_avg_fn``.
    """

    def average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [x for group in optimizer.param_groups for x in group["params"]]
        begun = [x for x in weights if AVERAGE in optimizer.state.get(x, ())]
        for weight in weights:
            if weight.grad is not None and AVERAGE not in optimizer.state[weight]:
                optimizer.state[weight][AVERAGE] = weight.detach().clone()
        if begun:
            torch._foreach_lerp_([optimizer.state[x][AVERAGE] for x in begun], [x.data for x in begun], 1 - decay)

    def optimizer(parameters: list[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = make(parameters)
        made.register_step_post_hook(average)
        return made

    return optimizer


class MuonForMatrices(torch.optim.Optimizer):
    """Torch's Muon for weights of two dimensions, which are all that it takes, and AdamW for all others.

    Both have the group's rate and weight decay: Muon's updates are as large as AdamW's if nothing else is said
    (``adjust_lr_fn``, Liu et al., Muon is Scalable for LLM Training).
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, **options: Any) -> None:
        self._options = {"adjust_lr_fn": "match_rms_adamw", **options}
        torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], lr=lr, weight_decay=weight_decay, **self._options)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here runs a model again
        """Step every group."""
        for group in self.param_groups:
            shared = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            matrices = [p for p in group["params"] if p.ndim == 2]
            others = [p for p in group["params"] if p.ndim != 2]
            parts = [torch.optim.Muon(matrices, **shared, **self._options)] if matrices else []
            for part in [*parts, *([torch.optim.AdamW(others, **shared)] if others else [])]:
                part.state = self.state
                part.step()


def check_state(choice: Optimizer | Choice, weights: Iterable[Tensor], where: str) -> None:
    """Raise BadInput where an optimizer of whole matrices keeps more of ``weights`` than a plan counts for it."""
    name = choice if isinstance(choice, str) else planned_as(choice)
    if name is None or OPTIMIZERS[name].elementwise:
        return
    shapes = [weight.shape for weight in weights]
    kept = matrix_state(shapes)[BY_MATRIX.index(name)]
    why = small_matrices(name, kept, sum(map(prod, shapes)), where)
    if why is not None:
        raise BadInput(why)


def rates_maker(choice: Choice | None, warmup: int, updates: int) -> MakeSchedule | None:
    """Return what makes the learning-rate schedule of a run of so many ``updates``, None for a rate that stays.

    In the first ``warmup`` updates the rate rises in equal steps, to all of it in the last of them; then the choice's
    schedule begins.
    """
    if warmup >= updates:
        raise BadInput(f"warmup: {warmup} updates are all of the run's {updates}, so the rate would never be reached")
    then = None if choice is None else schedule_maker(choice, updates - warmup)
    if warmup < 2:
        return then

    def schedule(optimizer: torch.optim.Optimizer) -> Schedules:
        rising = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
        if then is None:
            return rising
        both: list[Any] = [rising, then(optimizer)]
        follows = isinstance(both[1], ReduceLROnPlateau)  # evaluations, which may get no better
        return both if follows else SequentialLR(optimizer, both, [warmup])

    return schedule


def schedule_maker(choice: Choice, updates: int | None = None) -> MakeSchedule:
    """Return what makes the learning-rate schedule of a stage's optimizer; it steps after every update.

    The choice names a class of ``torch.optim.lr_scheduler``, or a function that takes the optimizer and its options.
    One that ends takes ``updates``, if nothing else is said. BadInput when it doesn't take these options.
    """
    make = _named(choice, torch.optim.lr_scheduler, LRScheduler, "scheduler")
    options = dict(choice.options)
    if updates is not None and choice.name in LENGTHS and not options.keys() & {LENGTHS[choice.name], "epochs"}:
        options[LENGTHS[choice.name]] = updates

    def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return make(optimizer, **options)  # type: ignore[no-any-return]  # as asked for by name

    _try(schedule, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), f"scheduler {choice.name}")
    return schedule


def _named(choice: Choice, home: Any, kind: type, what: str) -> Callable[..., Any]:
    if ":" in choice.name:
        return find(choice.name)  # type: ignore[no-any-return]  # callable, as find checks
    found = getattr(home, choice.name, None)
    if not (isinstance(found, type) and issubclass(found, kind) and found is not kind):
        raise BadInput(f"{what}: {home.__name__} has no {choice.name!r}")
    return found


def _try(make: Callable[[Any], Any], argument: Any, what: str) -> None:
    with user_code(what):
        try:
            make(argument)
        except (TypeError, ValueError) as error:
            raise BadInput(f"{what}: {error}") from error


# --- late gradients ---------------------------------------------------------------------------------------------------


Group = Mapping[str, Any]
Weights = list[Tensor]


def delayed(weight: nn.Parameter, delay: float) -> nn.Parameter:
    """Return ``weight``, whose gradients are ``delay`` updates late."""
    weight.delay = delay  # type: ignore[attr-defined]  # it travels with the weight
    return weight


def delay_of(weight: Tensor) -> float:
    """Return how many updates late the gradients of ``weight`` are."""
    return getattr(weight, "delay", 0.0)


class LateSGD(torch.optim.SGD):
    """SGD with momentum, compensated for the delay of each weight; without one it steps as torch does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here runs a model again
        """Step every group."""
        for group in self.param_groups:
            for delay, weights in _alike(group):
                self._step(group, delay, weights)

    def _step(self, group: Group, delay: float, weights: Weights) -> None:
        rate, momentum, gradients = group["lr"], group["momentum"], _gradients(weights)
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        for weight in weights:
            self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients)
        share = momentum**delay
        torch._foreach_add_(weights, buffers, alpha=-rate * share)
        if share < 1:
            torch._foreach_add_(weights, gradients, alpha=-rate * (1 - share) / (1 - momentum))


class LateAdam(torch.optim.Adam):
    """Adam or, with decoupled weight decay, AdamW, compensated for the delay of each weight."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here runs a model again
        """Step every group."""
        for group in self.param_groups:
            for delay, weights in _alike(group):
                states = [self._state(weight) for weight in weights]
                for count in dict.fromkeys(float(state["step"]) for state in states):
                    own = [(w, x) for w, x in zip(weights, states, strict=True) if float(x["step"]) == count]
                    self._step(group, delay, *map(list, zip(*own, strict=True)))

    def _state(self, weight: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        if "exp_avg" not in state:
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight)}
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] = state["step"] + 1
        return state

    def _step(self, group: Group, delay: float, weights: Weights, states: list[dict[str, Any]]) -> None:
        rate, decay, (beta1, beta2), gradients = group["lr"], group["weight_decay"], group["betas"], _gradients(weights)
        if decay and decoupled(group):
            torch._foreach_mul_(weights, 1 - rate * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        count = float(states[0]["step"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, sqrt(1 - beta2**count))
        torch._foreach_add_(roots, group["eps"])
        share = beta1**delay
        torch._foreach_addcdiv_(weights, means, roots, -rate * share / (1 - beta1**count))
        if share < 1:
            torch._foreach_addcdiv_(weights, gradients, roots, -rate * (1 - share))


def _alike(group: Group) -> Iterator[tuple[float, Weights]]:
    """Yield the weights of a group that have gradients, by their delay."""
    weights = [weight for weight in group["params"] if weight.grad is not None]
    for delay in dict.fromkeys(map(delay_of, weights)):
        yield delay, [weight for weight in weights if delay_of(weight) == delay]


def _gradients(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def decoupled(group: Group) -> bool:
    """Whether weight decay of Adam's ``group`` is AdamW's, which is in no gradient."""
    return bool(group.get("decoupled_weight_decay"))


def _along_momentum(group: Group, weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    return state["momentum_buffer"]  # type: ignore[no-any-return]  # a tensor


def _along_adam(group: Group, weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    (beta1, beta2), count = group["betas"], float(state["step"])
    root = (state["exp_avg_sq"].sqrt() / sqrt(1 - beta2**count)).add_(group["eps"])
    found: Tensor = (state["exp_avg"] / (1 - beta1**count)).div_(root)
    return found.add_(weight.detach(), alpha=group["weight_decay"]) if decoupled(group) else found


ROWS = {  # torch's class -> (the class that compensates, the direction of its next step, what else must be off)
    torch.optim.SGD: (LateSGD, _along_momentum, ("dampening", "nesterov", "maximize")),
    torch.optim.Adam: (LateAdam, _along_adam, ("amsgrad", "maximize")),
    torch.optim.AdamW: (LateAdam, _along_adam, ("amsgrad", "maximize")),
}
DIRECTIONS = {kind: along for of, (late, along, _) in ROWS.items() for kind in (of, late)}


def correctable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there are formulas for ``optimizer``: SGD with plain momentum, Adam and AdamW."""
    row = ROWS.get(type(optimizer))
    options = optimizer.defaults
    return row is not None and options.get("momentum") != 0 and not any(options[name] for name in row[2])


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` steps along the gradient alone, so that there is no momentum to correct."""
    return type(optimizer) is torch.optim.SGD and not optimizer.defaults["momentum"]


def compensated(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let ``optimizer``, which is correctable, compensate for delays; its counts are then on the host."""
    optimizer.__class__ = ROWS[type(optimizer)][0]
    optimizer._patch_step_function()
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["fused"] = None
    return optimizer


def predicted(optimizer: torch.optim.Optimizer, group: Group, weight: nn.Parameter, rate: float) -> Tensor:
    """Return ``weight``, just stepped, as it should be when its gradients come, at the ``rate`` of the next update."""
    delay, state = delay_of(weight), optimizer.state.get(weight)
    if not delay or not state or weight.grad is None:
        return weight.data
    along = DIRECTIONS[type(optimizer)](group, weight, state)
    return torch.add(weight.data, along, alpha=-delay * rate)
