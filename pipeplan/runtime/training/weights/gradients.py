"""What is being summed for a stage's updates? One gradient that passes add to, and what belongs to another update.

``next`` is the gradient for the next update where passes make the one behind it already, ``tied`` what waits of
weights that other ranks have too for theirs, and ``later`` what stages that borrow weights have begun ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .versions import Versions


class Gradients:
    """The gradients of ``versions``, whose borrowed weights have theirs with ``owners``.

    ``flat`` ones can be summed over replicas in chunks. With ``ahead`` the next update's is put aside while passes make
    another. With ``waits`` those of tied weights are stepped later than the others.
    """

    def __init__(
        self,
        versions: Versions,
        flat: bool = False,
        ahead: bool = False,
        waits: bool = False,
        owners: Mapping[int, Gradients] | None = None,
    ) -> None:
        self.versions, self.waits, self._owners = versions, waits, owners or {}
        leaves = versions.installed
        self._flat = FlatGradient(leaves) if flat else None
        self._flat_next = FlatGradient(leaves) if flat and ahead else None
        self._passes: list[Tensor | None] = [None] * len(leaves)
        self._next: list[Tensor | None] | None = None
        self._tied: list[Tensor | None] | None = None
        self._later: dict[tuple[int, int], Tensor] = {}  # by update and weight
        self._begin(range(len(leaves)), versions.newest + 1)

    def attach(self, version: int) -> None:
        """Let backward passes through ``version`` add to the gradient."""
        for leaf, gradient in zip(self.versions.leaves_of(version), self._passes, strict=True):
            leaf.grad = gradient
        update = self._passes_for
        for borrowed in self.versions.borrowed:
            home = self._owners[borrowed.owner]
            for index, leaf in zip(borrowed.indices, borrowed.leaves, strict=True):
                own = update == home._passes_for
                leaf.grad = home._passes[index] if own else home._later.get((update, index))

    def detach(self, version: int) -> None:
        """Take the gradient back from ``version``."""
        for index, leaf in enumerate(self.versions.leaves_of(version)):
            self._passes[index], leaf.grad = leaf.grad, None
        update = self._passes_for
        for borrowed in self.versions.borrowed:
            home = self._owners[borrowed.owner]
            for index, leaf in zip(borrowed.indices, borrowed.leaves, strict=True):
                if update == home._passes_for:
                    home._passes[index] = leaf.grad
                elif leaf.grad is not None:
                    home._later[update, index] = leaf.grad
                leaf.grad = None

    @property
    def _passes_for(self) -> int:
        """The update that passes make the gradient for."""
        return self.versions.newest + (1 if self._next is None else 2)

    @property
    def due(self) -> list[Tensor | None]:
        """The gradient for the next update; None where no pass has made any, but in a flat one."""
        return self._passes if self._next is None else self._next

    @property
    def summed(self) -> FlatGradient:
        """The flat gradient that replicas sum."""
        found = self._flat if self._flat_next is None else self._flat_next
        assert found is not None, "replicated stages have flat gradients"
        return found

    def put_aside(self) -> None:
        """Keep the gradient for the next update, and let passes begin with that for the one behind it."""
        assert self._next is None, "the last update is over"
        if self._flat is None or self._flat_next is None:
            self._next = list(self._passes)
        else:
            for dtype, flat in self._flat.flats.items():
                self._flat_next.flats[dtype].copy_(flat)
            self._next = list(self._flat_next.views)
        self._begin(range(len(self._passes)), self.versions.newest + 2)

    def begin_update(self) -> list[Tensor | None]:
        """Return what the weights are stepped with. What waits is put aside, so that passes can begin the next."""
        if not self.waits:
            return self.due
        assert self._tied is None, "the last update is over"
        own, due = self.versions.own, self.due
        self._tied = [x.clone() if self._flat and x is not None else x for x in self._passes[own:]]
        self._begin(range(own, len(self._passes)), self.versions.newest + 2)
        return [*due[:own], *[None] * (len(due) - own)]

    def end_update(self, version: int, skipped: bool = False) -> None:
        """Forget what ``version``, which isn't the newest yet, was made from, but for what waits."""
        if self._next is None:
            begins = self.versions.own if self.waits and not skipped else len(self._passes)
            self._begin(range(begins), version + 1)
        self._next = None

    @property
    def tied(self) -> list[Tensor | None] | None:
        """What the tied weights of the newest version are still to be stepped with."""
        return None if self._tied is None else [*[None] * self.versions.own, *self._tied]

    def end_tied(self) -> None:
        """Forget it."""
        self._tied = None

    def tied_gradient(self, index: int) -> Tensor:
        """Return the gradient of the tied weight at ``index`` for the next update, to be changed; zeros for none."""
        of, place = (self.due, index) if self._tied is None else (self._tied, index - self.versions.own)
        found = of[place]
        if found is None:
            found = of[place] = torch.zeros_like(self.versions.weights()[index])
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yield all gradients."""
        following = (self._next or ()) if self._flat_next is None else self._flat_next.views
        yield from self.versions.attached()
        for gradients in (self._passes, self._tied or (), following, self._later.values()):
            yield from (gradient for gradient in gradients if gradient is not None)

    def _begin(self, indices: range, update: int) -> None:
        """Begin with the gradients of the weights at ``indices`` for ``update``, as far as borrowers haven't."""
        if self._flat is not None and len(indices) == len(self._passes):
            self._flat.clear()
        for index in indices:
            later = self._later.pop((update, index), None)
            if self._flat is None:
                self._passes[index] = later
                continue
            self._passes[index] = view = self._flat.views[index]
            if later is not None:
                view.copy_(later)
            elif len(indices) < len(self._passes):
                view.zero_()


class FlatGradient:
    """One gradient of all weights, flat for each type, so that a chunk of it is summed over replicas without copies.

    ``views`` has the shapes of the weights; backward passes add to them in place.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.flats: dict[torch.dtype, Tensor] = {}
        self.views = list(weights)
        for dtype in dict.fromkeys(weight.dtype for weight in weights):
            own = [index for index, weight in enumerate(weights) if weight.dtype == dtype]
            sizes = [weights[index].numel() for index in own]
            flat = self.flats[dtype] = torch.zeros(sum(sizes), dtype=dtype, device=weights[own[0]].device)
            for index, part in zip(own, torch.split(flat, sizes), strict=True):
                self.views[index] = part.view(weights[index].shape)

    def clear(self) -> None:
        """Begin a new sum."""
        for flat in self.flats.values():
            flat.zero_()
