"""Which optimizers and learning-rate schedules are there? The plan's, or any of torch's by name with options.

Every stage has an optimizer and a schedule of its own over its own weights; what needs all gradients of the model at
once, such as clipping by their total norm, is elsewhere (:mod:`.clipping`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from ...errors import BadInput
from ...problem import Optimizer
from ..model.spec import find
from ..model.user_code import user_code

MakeOptimizer = Callable[[list[nn.Parameter] | list[dict[str, Any]]], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler]
MOMENTUM = 0.9
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
    match choice.name:
        case "Adam" | "AdamW" if not dict(choice.options).get("amsgrad"):
            return "adam"
        case "SGD":
            return "momentum" if dict(choice.options).get("momentum") else "sgd"
    return None


def optimizer_maker(choice: Optimizer | Choice, lr: float) -> MakeOptimizer:
    """Return what makes the optimizer of a stage at learning rate ``lr``.

    ``sgd``, ``momentum`` (0.9) and ``adam`` are a plan's; a :class:`Choice` names a class of ``torch.optim``, or a
    function that takes parameters, ``lr`` and its options. BadInput when it doesn't take these options.
    """
    if isinstance(choice, str):
        own = {"sgd": Choice("SGD"), "momentum": Choice("SGD", (("momentum", MOMENTUM),)), "adam": Choice("Adam")}
        choice = own[choice]
    make = _named(choice, torch.optim, torch.optim.Optimizer, "optimizer")
    options = dict(choice.options)
    if make is torch.optim.LBFGS:
        raise BadInput("optimizer: LBFGS runs the model several times per update; a pipeline runs it once")

    def optimizer(parameters: list[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        return make(parameters, **{"lr": lr, **options})  # type: ignore[no-any-return]  # as asked for by name

    _try(optimizer, [nn.Parameter(torch.zeros(1))], f"optimizer {choice.name}")
    return optimizer


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

    def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rising = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
        return rising if then is None else SequentialLR(optimizer, [rising, then(optimizer)], [warmup])

    return schedule


def schedule_maker(choice: Choice, updates: int | None = None) -> MakeSchedule:
    """Return what makes the learning-rate schedule of a stage's optimizer; it steps after every update.

    The choice names a class of ``torch.optim.lr_scheduler``, or a function that takes the optimizer and its options.
    One that ends takes ``updates``, if nothing else is said. BadInput when it doesn't take these options, or wants to
    see losses.
    """
    make = _named(choice, torch.optim.lr_scheduler, LRScheduler, "scheduler")
    options = dict(choice.options)
    if updates is not None and choice.name in LENGTHS and not options.keys() & {LENGTHS[choice.name], "epochs"}:
        options[LENGTHS[choice.name]] = updates
    if make is ReduceLROnPlateau:
        raise BadInput("scheduler: ReduceLROnPlateau follows the loss, which only the last stage sees")

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
