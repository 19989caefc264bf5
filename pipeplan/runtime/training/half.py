"""What is a model in 16 bits? Its weights, buffers and activations, or what autocast casts, as its profile counts them.

Both run a model in the type of its profile, whose activation bytes and times the plan was made with. Under autocast
(:mod:`.model.autocast`) a model stays as it is. Mixed precision converts it, and its inputs but not its targets; the
loss is computed in 32 bits (:func:`..model.network.loss_value`). The weights in full precision, as the model was built
or loaded, are handed over for the optimizer. The loss is scaled in both (:mod:`.update.factors`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ...plan import Plan
from ...problem import AUTOCAST
from ..device import CPU
from ..model.autocast import Autocast
from ..model.contract import boundaries_of
from ..model.loaded import LoadedModel, constants_of
from ..model.network import refuse_converted
from ..model.structure import converted
from .update.factors import START, WINDOW, LossScale

Half = Literal["bf16", "fp16"]
TYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class HalfOptions:
    """Which 16 bits (None: the profile's), and the loss scale: its start (None: the type's) and when it doubles."""

    half: Half | None = None
    loss_scale: float | None = None
    window: int | None = None


AS_PROFILED = HalfOptions()


def half_type(plan: Plan, options: HalfOptions) -> torch.dtype | None:
    """Return the 16-bit type that ``plan`` runs in, None for fp32; BadInput for options that don't go with it."""
    if plan.policy.precision == "fp32":
        if options != AS_PROFILED:
            raise BadInput("plan: its precision is fp32; --half and --loss-scale are for mixed precision and autocast")
        return None
    dtype = TYPES[options.half] if options.half else getattr(torch, plan.chain.dtype.removeprefix(AUTOCAST))
    assert isinstance(dtype, torch.dtype), "lower_run refuses profiles of other types"
    if dtype == torch.float16 and not plan.policy.drains:
        raise BadInput(
            f"plan: --weights {plan.policy.weights} cannot skip an update on all stages at once, as fp16 needs when a "
            "gradient overflows; bf16 can be run, or --weights flush"
        )
    if options.window is not None and not plan.policy.drains:
        raise BadInput(
            f"plan: with --weights {plan.policy.weights} no update can be skipped, so the loss scale stays as it is; "
            "a window goes with --weights flush"
        )
    return dtype


def conversion(plan: Plan, options: HalfOptions, device: torch.device) -> tuple[torch.dtype | None, Autocast | None]:
    """Return the type that the model of ``plan`` is converted to, and what casts its operations on ``device``."""
    dtype = half_type(plan, options)
    if dtype is None or plan.policy.precision == "mixed":
        return dtype, None
    return None, Autocast(dtype, device.type)


def first_scale(plan: Plan, dtype: torch.dtype, options: HalfOptions) -> LossScale:
    """Return the loss scale to begin with; it stays the same where no update can be skipped."""
    start = START[dtype] if options.loss_scale is None else options.loss_scale
    window = WINDOW if options.window is None else options.window
    return LossScale(start, window if plan.policy.drains else 0)


def halved(
    model: LoadedModel, dtype: torch.dtype, own: Iterable[nn.Module], device: torch.device = CPU
) -> tuple[LoadedModel, dict[nn.Parameter, Tensor]]:
    """Convert ``model``; return it, and the full-precision values of the weights of its modules ``own``.

    What lies between its layers is sized on ``device``, as :func:`load_model` does.
    """
    slots = [
        (part, name, parameter)
        for module in dict.fromkeys(own)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.is_floating_point()
    ]
    refuse_converted(model.loss, dtype)
    converted(nn.ModuleList(layer.module for layer in model.layers), dtype, constants_of(model))
    masters: dict[nn.Parameter, Tensor] = {}
    for part, name, before in slots:
        parameter = part._parameters[name]
        assert parameter is not None, "converting replaces weights by weights"
        masters.setdefault(parameter, before.data.float())
    del slots
    if not model.chain:  # it was traced in that type, and its data comes in it
        return model, masters
    first = model.specs[0]
    kind = dtype if first.dtype.is_floating_point else first.dtype
    example = torch.zeros(first.shape, dtype=kind, device=device)

    def entering(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    specs = dict(enumerate(boundaries_of([layer.module for layer in model.layers[:-1]], example)))
    return replace(model, specs=specs, data=model.data.then(entering)), masters
