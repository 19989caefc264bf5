"""How large is the loss made so that 16-bit gradients don't vanish? An update that overflows is skipped.

The scale is one number for the whole run, equal on all ranks. It is halved when any rank of any stage has a gradient
that overflows, and doubled after so many updates without one (Micikevicius et al., Mixed Precision Training, section
3.2). The decision is taken once for each update, by all ranks together, before any of them changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from ....errors import RunFailed
from ...device import on_host

Later = Callable[[Callable[[], None]], None]  # does something when the device has come so far

START = {torch.float16: 2.0**16, torch.bfloat16: 1.0}  # bfloat16 has the range of float32
WINDOW = 2000
LEAST = 2.0**-16  # below it the gradient is not too large but not a number


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor of the loss, doubled after ``window`` updates in a row without overflow, of which ``good`` are made.

    ``window`` 0 keeps the scale as it is.
    """

    scale: float
    window: int = WINDOW
    good: int = 0

    def after(self, overflow: bool) -> LossScale:
        """Return the scale of the next update; RunFailed when it has become so small that scaling cannot help."""
        if overflow:
            if self.scale / 2 < LEAST:
                raise RunFailed(
                    f"the gradient overflows at a loss scale of {self.scale:g} still; a lower learning rate may help"
                )
            return replace(self, scale=self.scale / 2, good=0)
        if self.window and self.good + 1 >= self.window:
            return replace(self, scale=self.scale * 2, good=0)
        return replace(self, good=self.good + 1)


def overflow(gradients: Iterable[Tensor | None], replicas: int) -> Tensor | None:
    """Return whether a gradient isn't finite, or so large that the sum over ``replicas`` of such ones might not be.

    The answer, None where there are no gradients, stays on their device: whoever reads it waits for all before it.
    Looked at before the sum, so that sums and optimizer steps can overlap once the update is agreed on.
    """
    known = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    fine: list[Tensor] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in known):
        largest = torch._foreach_norm([gradient for gradient in known if gradient.dtype == dtype], inf)
        fine.append((torch.stack(largest) <= torch.finfo(dtype).max / replicas).all())  # no NaN is
    return ~torch.stack(fine).all() if fine else None


class Scaling:
    """The loss scale of a run on one rank: ``current`` for the passes to come, ``used`` for the gradients there are.

    ``any_rank`` tells whether a flag is set on any of the ranks. Without it no update can be skipped, because stages
    make their updates at different times: then the scale is fixed, and an overflow ends the run.
    """

    def __init__(self, first: LossScale, any_rank: Callable[[bool], bool] | None) -> None:
        self.current = first
        self.used = first.scale
        self.skips = False
        self.decided = 0  # the last version that was agreed on
        self.skipped: list[int] = []
        self._any_rank = any_rank

    @property
    def agrees(self) -> bool:
        """Whether all ranks decide on each update together."""
        return self._any_rank is not None

    def agree(self, version: int, overflow: bool) -> None:
        """Decide with all ranks whether ``version`` is made from the gradients; ``overflow`` is this rank's word."""
        assert self._any_rank is not None, "only then are there instructions to agree"
        self.skips, self.decided = self._any_rank(overflow), version
        self.used = self.current.scale
        self.current = self.current.after(self.skips)
        if self.skips:
            self.skipped.append(version)

    def resume(self, scale: float, good: int) -> None:
        """Go on with the scale of another run."""
        self.current = replace(self.current, scale=scale, good=good)
        self.used = scale

    def check(self, version: int, gradients: Iterable[Tensor | None], replicas: int, later: Later) -> None:
        """Raise RunFailed for a gradient that overflows in an update that cannot be skipped, ``later`` at the latest.

        That is before anything is saved of what has been made from it.
        """
        found = None if self.agrees else overflow(gradients, replicas)
        if found is None:
            return
        flag, scale = on_host(found), self.used

        def read() -> None:
            if flag:
                raise RunFailed(
                    f"the gradient of update {version} overflows at loss scale {scale:g}; only weights that drain "
                    "(--weights flush) can skip an update on all stages"
                )

        later(read)
