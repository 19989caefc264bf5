"""How is a stage trained whose gradients are late? Its steps are compensated, its weights predicted, by its delay.

A weight's ``delay`` is how many updates its gradients miss on average, tau; b is momentum or beta1, a = b ** tau.

- Spike compensation (Kosson et al. 2020, Pipelined Backpropagation at Scale): what a late gradient would have added to
  later steps by now it adds at once. SGD steps by a v + (1 - a) / (1 - b) g, AdamW by (a m_hat + (1 - a) g) / den.
- Weight prediction (SpecTrain; XPipe): passes read w - tau lr (the optimizer's direction), as the weights should be
  when the gradient comes; the optimizer goes on with w.

Both keep the state of torch's own classes, so checkpoints don't tell runs apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

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
