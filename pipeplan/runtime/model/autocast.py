"""How does a layer run under ``torch.autocast``? Its weights stay as they are, and torch's lists cast each operation.

Casts of weights are kept for one pass through a piece of a stage, as torch keeps them until its context ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .structure import mapped

# what torch's list for GPUs computes in 32 bits and its list for CPUs does not, by the names of functions and operators
FP32_ON_GPUS = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus "
    "layer_norm native_layer_norm group_norm norm cosine_similarity l1_loss smooth_l1_loss huber_loss mse_loss "
    "nll_loss kl_div cross_entropy cross_entropy_loss binary_cross_entropy_with_logits softmax log_softmax logsumexp "
    "sum prod cumsum cumprod dist cdist"
)


@dataclass(frozen=True, slots=True)
class Autocast:
    """``dtype`` is what products are computed in, by torch's lists for ``device`` (``"cpu"``, or that of GPUs)."""

    dtype: torch.dtype
    device: str = "cpu"

    @contextmanager
    def on(self, device: torch.device, trace: bool = False) -> Iterator[None]:
        """Cast operations on ``device`` within the context; in a ``trace`` by the lists of that device.

        Without gradients no cast of a weight is kept: it would lose them for who comes behind.
        """
        kept = None if torch.is_grad_enabled() else False  # None: as around it
        there = device.type == self.device or trace
        with (
            torch.autocast(device.type, self.dtype, cache_enabled=kept),
            nullcontext() if there else _Lists(self.dtype),
        ):
            yield


def autocasting(autocast: Autocast | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of ``autocast``; None: operations run in the types of what they get."""
    return nullcontext() if autocast is None else autocast.on(device)


def is_cast(device: torch.device) -> bool:
    """Whether operations on ``device`` are cast now; those on meta never are."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


class _Lists(TorchFunctionMode):
    """Computes in 32 bits what GPUs do, on tensors elsewhere."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").partition(".")[0] in FP32_ON_GPUS.split():
            args, kwargs = mapped(lambda x: x.float() if x.dtype == self._dtype else x, (tuple(args), kwargs))
        return func(*args, **kwargs)
