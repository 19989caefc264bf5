"""By how much is an update's gradient clipped? By its norm over all stages, as torch's ``clip_grad_norm_`` does it.

Every rank adds up the squares of what it answers for, so that every weight counts once: of a replicated stage the first
replica does, or each for its share of the sum, and of weights that stages share the first stage. One number for each
update is summed over all ranks. Norms are those of gradients without their loss scale, in 32 bits at least (Pascanu et
al., On the difficulty of training recurrent neural networks, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import RunFailed
from ...device import on_host
from ...exchange.transport import Group, exchanging
from ...measure.recorder import Recorder
from .loss_scale import Scaling
from .stage_optimizer import Factor

SMALL = 1e-6  # what torch adds to the norm


class Clipping:
    """Clips gradients to a total norm of ``most`` on one of the ranks of ``group`` (None: the only one).

    The sum is made on ``home``, the host or the device; ``norms`` has each update's once the device is there, and what
    is wrong with it is told then. Updates that are skipped have none.
    """

    def __init__(
        self, most: float, group: Group, home: torch.device, recorder: Recorder, scaling: Scaling | None = None
    ) -> None:
        self._most, self._group, self._home, self._recorder, self._scaling = most, group, home, recorder, scaling
        self._begun: dict[int, tuple[Tensor, dist.Work | None]] = {}
        self._known: tuple[int, Factor] = 0, 1.0
        self.norms: dict[int, float] = {}

    def begin(self, version: int, measured: Sequence[Tensor]) -> None:
        """Begin the sum for ``version``; ``measured`` are the gradients that this rank answers for."""
        if self._scaling is not None and self._scaling.skips:
            return
        total, work = squares(measured, self._home), None
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
