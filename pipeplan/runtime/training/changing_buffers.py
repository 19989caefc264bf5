"""Which buffers do forwards change, and what had each microbatch? Several are in flight, and each has its own values.

In plain training the backward of a microbatch comes before the next forward changes anything. In a pipeline it may come
later: so every forward gets copies to change, and those before are left to the graphs, and recomputations, that need
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import RunFailed

COUNT = "num_batches_tracked"  # of torch's norms, which nothing else reads

Slot = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class Before:
    """What buffers were before a forward."""

    values: Sequence[tuple[Slot, Tensor]] = ()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context they are that again."""
        present = [((owner, name), owner._buffers[name]) for (owner, name), _ in self.values]
        _install(self.values)
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
        return self._apart(recomputed) if self._slots else nullcontext(Before())

    @contextmanager
    def _apart(self, recomputed: bool) -> Iterator[Before]:
        chosen = self._slots if self._changing is None else [slot for slot in self._slots if slot in self._changing]
        before = [(slot, x) for slot in chosen if (x := _present(slot)) is not None]
        copies = {id(x): x.clone() for _, x in before}  # what is one buffer stays one
        _install([(slot, copies[id(x)]) for slot, x in before])
        seen = [(slot, x, x._version) for slot in self._slots if (x := _present(slot)) is not None]
        yield Before([(slot, x) for slot, x in before])
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
