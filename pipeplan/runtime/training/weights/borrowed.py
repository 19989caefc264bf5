"""Which weights of a stage does an earlier stage on the same rank keep? There is one storage of them for both.

They belong to the first stage of the rank that uses them, their *home*, which a mini-batch's backwards reach last: it
keeps their versions, gradient and optimizer state, and makes their updates. The others use its versions, and add to its
gradient. Where the pipeline doesn't drain they may be mini-batches ahead, for which they begin gradients of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .versions import Versions

Slots = dict[tuple[nn.Module, str], nn.Parameter]  # by owner and name


class Borrowed:
    """What a stage uses of ``home``, the versions of stage ``lender``: by ``slots`` the index there.

    Where versions take turns in one list of ``shared`` parameters, its modules have these for good.
    """

    def __init__(self, lender: int, home: Versions, slots: Sequence[tuple[nn.Module, str, int]], shared: bool) -> None:
        self.lender, self.home = lender, home
        self._slots, self._shared = slots, shared
        self._indices = sorted({index for _, _, index in slots})
        self._version = home.newest

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters that the modules have now."""
        leaves = self.home.leaves_of(self._version)
        return [leaves[index] for index in self._indices]

    def install(self, version: int) -> None:
        """Put ``version`` of the home's weights into the modules."""
        self._version = version
        if self._shared:
            self.home.install(version)
            return
        leaves = self.home.leaves_of(version)
        for owner, name, index in self._slots:
            setattr(owner, name, leaves[index])

    def attach_gradient(self, update: int) -> None:
        """Let backward passes add to the gradient from which ``update`` will be made."""
        for index, leaf in zip(self._indices, self.leaves, strict=True):
            leaf.grad = self.home.gradient_for(update, index)

    def detach_gradient(self, update: int) -> None:
        """Give the gradient back to the home."""
        for index, leaf in zip(self._indices, self.leaves, strict=True):
            self.home.take_gradient(update, index, leaf.grad)
            leaf.grad = None

    def released(self) -> None:
        """Count one pass of the version that is installed as over."""
        self.home.released_by_borrower(self._version)


def borrowed_of(slots: Slots, lenders: Mapping[int, Versions], shared: bool) -> list[Borrowed]:
    """Return what of ``slots`` the ``lenders`` (by stage) keep, and take it out of them."""
    found = []
    for lender, home in lenders.items():
        places = {leaf: index for index, leaf in enumerate(home.installed)}
        own = [(owner, name, places[leaf]) for (owner, name), leaf in slots.items() if leaf in places]
        for owner, name, _ in own:
            del slots[owner, name]
        if own:
            found.append(Borrowed(lender, home, own, shared))
    return found


def borrowers(modules: Mapping[int, Iterable[nn.Module]]) -> dict[int, set[int]]:
    """Return for each stage of a rank, in order, the later ones that use trained weights of its ``modules``."""
    found: dict[int, set[int]] = {s: set() for s in modules}
    home: dict[nn.Parameter, int] = {}
    for s, own in modules.items():
        for module in own:
            for parameter in module.parameters():
                if parameter.requires_grad and home.setdefault(parameter, s) != s:
                    found[home[parameter]].add(s)
    return found
