"""Which random numbers does a layer draw? Those of the run's seed, the microbatch and the layer, wherever it runs.

Dropout and the like then do the same on one process as on any plan, when a segment is recomputed, and after a resume on
another plan. That costs seeding a generator before each pass of a layer that draws; which layers do shows in the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..device import CPU, random_state
from ..model.randomness import key_of


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
        self._draws: dict[int, bool] = {}  # by layer, once it has run

    def of(self, microbatch: int, layer: int) -> AbstractContextManager[None]:
        """Return the context in which ``layer`` runs ``microbatch``."""
        return self._seeded(microbatch, layer) if self._draws.get(layer, True) else nullcontext()

    @contextmanager
    def _seeded(self, microbatch: int, layer: int) -> Iterator[None]:
        begin_draws(self._seed, microbatch, layer)
        if layer in self._draws:
            yield
            return
        begun = random_state(self._device)
        yield
        self._draws[layer] = not torch.equal(begun, random_state(self._device))
