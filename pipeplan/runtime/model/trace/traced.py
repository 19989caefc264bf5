"""How is a model run that is one module? As the layers of its trace, which is that of its profile (:mod:`.trace`)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ....errors import BadInput
from ..autocast import Autocast
from ..contract import Data, Samples, sample_of
from ..deferred import mode_of
from ..loaded import LoadedModel, grouped, with_loss_root
from ..network import Loss, TensorSpec, loss_layer, own_loss, refuse_converted, trained_loss
from ..structure import as_type, in_type, mapped, placed, places_in, tensors_in, tensors_of
from .adapted import uncompiled
from .trace import trace_module, with_state_of


def traced_model(
    module: nn.Module,
    example_input: Any,
    loss: Loss | None,
    data: Data,
    device: torch.device,
    training: bool = True,
    dtype: torch.dtype | None = None,
    autocast: Autocast | None = None,
) -> LoadedModel:
    """Trace ``module``, in training or in evaluation, and return it as a model, with a layer for each of the trace.

    Without ``loss`` the module returns it. With ``dtype`` the trace is that of the module in this type, to which its
    layers are yet to be converted; its data is. Its layers run under ``autocast``.
    """
    refuse_converted(loss, dtype)
    example_input = as_type(example_input, dtype)
    mode = mode_of([*tensors_of([module]), *tensors_in(example_input)])
    with mode or nullcontext():  # a trace needs no values
        example = example_input
        if mode is not None:
            example = mapped(lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x), example)
        with in_type(module, dtype):
            network = trace_module(module, example, str(device), loss is None, training, autocast)
    constants = with_state_of(uncompiled(module), network)
    compared = loss or own_loss
    codes = (*network.layers, loss_layer(network, compared))
    wanted = places_in(example_input)

    def entering(index: int, given: Any) -> tuple[tuple[Tensor, ...], Any]:
        x, target = sample_of(given, loss, len(wanted))
        x = as_type(x, dtype)
        tensors = placed(x, wanted)
        if len(tensors) != len(wanted):
            places = places_in(x)
            missing = [place for place in wanted if place and place not in places]
            more = f"; it lacks {', '.join(missing)}" if missing and any(places) else ""
            raise BadInput(
                f"data: microbatch {index} has {len(tensors)} input tensors; the example input has {len(wanted)}{more}"
            )
        for value, tensor in enumerate(tensors):
            found, spec = TensorSpec(tuple(tensor.shape), tensor.dtype), network.shapes[value]
            if (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise BadInput(f"data: microbatch {index} has an input of {found}; the example input has {spec}")
        return tuple(tensors), target

    model = LoadedModel(
        False,
        len(network.inputs),
        (),
        network.shapes,
        network.trained,
        compared,
        Samples(data, entering),
        (("", module),),
        notes=network.notes,
        training=training,
        constants=constants,
    )
    trained = trained_loss(compared)
    if trained is not None:
        model = replace(model, roots=with_loss_root(model.roots, trained))
    return grouped(model, [(code,) for code in codes])
