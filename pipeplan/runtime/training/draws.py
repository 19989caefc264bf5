"""Which random numbers does a layer draw? Those of the run's seed, the microbatch and the layer, wherever it runs.

Dropout and the like then do the same on one process as on any plan, when a segment is recomputed, and after a resume on
another plan. That costs seeding a generator before each pass of a layer that draws; which layers do shows in the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import RunFailed
from ..device import CPU, random_state
from ..model.pieces import Piece, drawn_by
from ..model.randomness import OwnRandomness, key_of, others

Drawn = Literal["nothing", "torch's", "all"]  # random numbers; all are also Python's and NumPy's


def begin_draws(seed: int, microbatch: int, layer: int) -> None:
    """Let the random numbers to come, on all devices in use, be those of ``layer`` (a value that it makes) or of DATA.

    torch.manual_seed does the same, but where no GPU is in use it writes down a traceback for when one will be: 0.2 ms.
    """
    key = key_of(seed, microbatch, layer)
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key)


class Draws:
    """The random numbers of a stage's layers, in a run with ``seed`` on ``device``."""

    def __init__(self, seed: int = 0, device: torch.device = CPU) -> None:
        self._seed, self._device = seed, device
        self._draws: dict[int, Drawn] = {}  # by layer, once it has run
        self._left: Tensor | None = None  # how the layers that draw leave torch's random numbers

    def run(self, piece: Piece, microbatch: int, entered: Sequence[Tensor], target: Any) -> list[Tensor]:
        """Return what ``piece`` makes of ``microbatch``.

        RunFailed where a layer draws that drew nothing in its first microbatch: when it is recomputed, or on another
        plan, it would draw something else.
        """
        self._left = random_state(self._device)
        made = piece.run(entered, target, partial(self.of, microbatch))
        if not torch.equal(self._left, random_state(self._device)):
            names = " or ".join(x.name for x in piece.layers if self._draws.get(drawn_by(x)) == "nothing")
            raise RunFailed(
                f"{names} drew no random numbers in its first microbatch and does in microbatch {microbatch}; let it "
                "draw in each, or in none"
            )
        self._left = None
        return made

    def of(self, microbatch: int, layer: int) -> AbstractContextManager[None]:
        """Return the context in which ``layer`` runs ``microbatch``."""
        return nullcontext() if self._draws.get(layer) == "nothing" else self._seeded(microbatch, layer)

    @contextmanager
    def _seeded(self, microbatch: int, layer: int) -> Iterator[None]:
        known, key = self._draws.get(layer), key_of(self._seed, microbatch, layer)
        late = self._left is not None and not torch.equal(self._left, random_state(self._device))
        # Python's and NumPy's, which a user's data may draw from too, go on behind it as if nothing had been drawn
        with nullcontext() if known == "torch's" else OwnRandomness(key).installed():
            begin_draws(self._seed, microbatch, layer)
            begun = None if known else (random_state(self._device), others())
            yield
            if begun is not None:
                drawn = not torch.equal(begun[0], random_state(self._device))
                self._draws[layer] = "all" if begun[1] != others() else "torch's" if drawn else "nothing"
        if self._left is not None and not late:
            self._left = random_state(self._device)
