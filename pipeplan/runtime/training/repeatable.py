"""How is a microbatch the same whenever and wherever it runs? It has random numbers, and buffers, of its own.

What a layer draws is that of the run's seed, the microbatch and the layer. So dropout and the like do the same on one
process as on any plan, when a segment is recomputed, and after a resume on another plan. That costs seeding a generator
before each pass of a layer that draws; which layers do shows in the first.

In plain training the backward of a microbatch comes before the next forward changes any buffer. In a pipeline it may
come later: so every forward gets copies to change, and those before are left to the graphs, and recomputations, that
need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

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


# --- buffers ----------------------------------------------------------------------------------------------------------


COUNT = "num_batches_tracked"  # of torch's norms, which nothing else reads

Slot = tuple[nn.Module, str]
Before = Sequence[tuple[Slot, Tensor]]  # what buffers were before a forward


@contextmanager
def installed(values: Before) -> Iterator[None]:
    """Within the context buffers have these ``values`` again."""
    present = [((owner, name), owner._buffers[name]) for (owner, name), _ in values]
    _install(values)
    try:
        yield
    finally:
        _install(present)


class ChangingBuffers:
    """The buffers of ``modules`` that are seen to change.

    They are found by torch's count of changes in place: the first forward changes copies of all, later ones of those
    that have changed. Norms write running statistics without being counted, and no graph needs those of before.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = dict.fromkeys(owner for module in modules for owner in module.modules())
        self._slots = [(owner, name) for owner in owners for name in owner._buffers if name != COUNT]
        self._changing: set[Slot] | None = None  # None: nothing has run yet

    def apart(self, recomputed: bool) -> AbstractContextManager[Before]:
        """Run a forward within the context: what it changes are copies. It is told what was there before.

        RunFailed when what will be ``recomputed`` begins to change a buffer late.
        """
        return self._apart(recomputed) if self._slots else nullcontext(())

    @contextmanager
    def _apart(self, recomputed: bool) -> Iterator[Before]:
        chosen = self._slots if self._changing is None else [slot for slot in self._slots if slot in self._changing]
        before = [(slot, x) for slot in chosen if (x := _present(slot)) is not None]
        copies = {id(x): x.clone() for _, x in before}  # what is one buffer stays one
        _install([(slot, copies[id(x)]) for slot, x in before])
        seen = [(slot, x, x._version) for slot in self._slots if (x := _present(slot)) is not None]
        yield before
        changed = {slot for slot, x, version in seen if _present(slot) is not x or x._version != version}
        # what has changed uncounted stays as it is now; later forwards write to it
        _install([(slot, x) for slot, x in before if slot not in changed and torch.equal(x, copies[id(x)])])
        if recomputed and self._changing is not None and not changed <= self._changing:
            owner, name = next(iter(changed - self._changing))
            raise RunFailed(
                f"buffer {name!r} of {type(owner).__name__} didn't change in the first microbatch and does now; let "
                "the plan store that layer instead of recomputing it"
            )
        self._changing = changed | (self._changing or set())


def _present(slot: Slot) -> Tensor | None:
    owner, name = slot
    return owner._buffers.get(name)


def _install(values: Sequence[tuple[Slot, Tensor | None]]) -> None:
    for (owner, name), tensor in values:
        owner._buffers[name] = tensor
