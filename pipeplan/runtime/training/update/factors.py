"""What are an update's gradients multiplied by? The loss scale's inverse, and what clips their norm over all stages.

The loss is scaled so that 16-bit gradients don't vanish: by one number for the whole run, equal on all ranks. It is
halved when any rank of any stage has a gradient that overflows, and doubled after so many updates without one
(Micikevicius et al., Mixed Precision Training, section 3.2). The decision is taken once for each update, by all ranks
together, before any of them changes anything.

Gradients are clipped as torch's ``clip_grad_norm_`` does it. Every rank adds up the squares of what it answers for, so
that every weight counts once: of a replicated stage the first replica does, or each for its share of the sum, and of
weights that stages share the first stage. One number for each update is summed over all ranks. Norms are those of
gradients without their loss scale, in 32 bits at least (Pascanu et al., On the difficulty of training recurrent neural
networks, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import RunFailed
from ...device import on_host
from ...exchange.layer_group import LayerGroup
from ...exchange.transport import Group, exchanging
from ...measure.recorder import Recorder
from .stepper import Factor

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


# --- clipping ---------------------------------------------------------------------------------------------------------


SMALL = 1e-6  # what torch adds to the norm


class Clipping:
    """Clips gradients to a total norm of ``most`` on one of the ranks of ``group`` (None: the only one).

    The sum is made on ``home``, the host or the device; ``norms`` has each update's once the device is there, and what
    is wrong with it is told then. Updates that are skipped have none. Those that run layers ``together`` add theirs.
    """

    def __init__(
        self,
        most: float,
        group: Group,
        home: torch.device,
        recorder: Recorder,
        scaling: Scaling | None = None,
        together: LayerGroup | None = None,
    ) -> None:
        self._together = together
        self._most, self._group, self._home, self._recorder, self._scaling = most, group, home, recorder, scaling
        self._begun: dict[int, tuple[Tensor, dist.Work | None]] = {}
        self._known: tuple[int, Factor] = 0, 1.0
        self.norms: dict[int, float] = {}

    def begin(self, version: int, measured: Sequence[Tensor]) -> None:
        """Begin the sum for ``version``; ``measured`` are the gradients that this rank answers for."""
        if self._scaling is not None and self._scaling.skips:
            return
        total, work = squares(measured, self._home), None
        if self._together is not None:
            total = self._together.summed(total)
        if self._group is not None:
            with exchanging("the norm of all gradients"):
                work = dist.all_reduce(total, group=self._group, async_op=True)
        self._begun[version] = total, work

    def factor(self, version: int) -> Factor:
        """Return what the gradients for ``version`` are to be multiplied with, beside the loss scale's inverse."""
        known, factor = self._known
        if known == version:
            return factor
        start = self._recorder.mark()
        total, work = self._begun.pop(version)
        if work is not None:
            with exchanging("the norm of all gradients"):
                work.wait()
        if self._together is not None:
            total = self._together.of_first(total)  # at other places there may be fewer ranks
        norm = total.sqrt() / (1.0 if self._scaling is None else self._scaling.used)
        self._read_later(version, norm)
        found = (self._most / (norm + SMALL)).clamp(max=1.0)
        factor = float(found) if found.device.type == "cpu" else found
        self._known = version, factor
        self._recorder.note("NORM", -1, version, start)
        return factor

    def _read_later(self, version: int, norm: Tensor) -> None:
        value = on_host(norm)

        def read() -> None:
            self.norms[version] = found = float(value)
            if not isfinite(found):
                raise RunFailed(
                    f"the norm of all gradients is {found} in update {version}; a lower learning rate may help"
                )

        self._recorder.later(read)


def squares(gradients: Sequence[Tensor], home: torch.device) -> Tensor:
    """Return the sum of all squares in 64 bits, on ``home``; those of 16-bit gradients are summed in 32 bits."""
    total = torch.zeros((), dtype=torch.float64, device=home)
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        own = [gradient for gradient in gradients if gradient.dtype == dtype and gradient.numel()]
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        if own:
            total += torch.stack(torch._foreach_norm(own, 2, wide)).double().square().sum().to(home)
    return total
