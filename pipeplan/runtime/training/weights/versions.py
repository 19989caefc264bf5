"""Which versions of a stage's weights are still needed, and which one does a pass see?

A version is a list of parameters of its own, put into the stage's modules before a pass that uses it; autograd keeps
what a forward used, so passes of several versions can be in flight. An update works in the storage of the newest
version, unless passes still need that.

With ``shared`` leaves all versions take turns in one list of parameters instead. Then a backward finds in them the
version that is installed when it runs, not the one that its forward had (TiMePReSt). Where forwards read predicted ones
it finds ``true`` ones.

What several stages of a rank use belongs to the first of them, its *owner*, which a mini-batch's backwards reach last:
it keeps versions, gradient and optimizer state, and makes the updates. The others borrow its versions, and add to its
gradient. Where the pipeline doesn't drain they may be mini-batches ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....schedule.weight_versions import Lent
from ...model.structure import hooked_as

Slots = dict[tuple[nn.Module, str], nn.Parameter]  # by owner and name


class Versions:
    """Weight versions of the trainable parameters of ``modules``; version ``first`` is what they hold now.

    ``uses`` counts the passes that each version will serve: a version that has served them all, and is not the newest,
    gives its storage back for the next one. Weights ``tied`` to other ranks' come last. Frozen ones are left alone, and
    what a stage of ``owners`` (by index) has among its own is borrowed.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        uses: Mapping[int, int] | None = None,
        first: int = 0,
        shared: bool = False,
        tied: Collection[nn.Parameter] = (),
        owners: Mapping[int, Versions] | None = None,
    ) -> None:
        slots = _trained(modules)
        self.borrowed = _borrowed(slots, owners or {}, shared)
        last = set(tied)
        leaves = sorted(dict.fromkeys(slots.values()), key=lambda leaf: leaf in last)
        index = {leaf: place for place, leaf in enumerate(leaves)}
        self._slots = [(owner, name, index[leaf]) for (owner, name), leaf in slots.items()]
        self._uses = Counter(uses)
        if shared:  # so that storages tell weights apart
            for leaf in leaves:
                if leaf.untyped_storage().nbytes() != leaf.nbytes:
                    leaf.data = leaf.data.clone()
        self._shared = leaves if shared else None
        self._leaves = {first: [nn.Parameter(leaf.data) for leaf in leaves] if shared else leaves}
        self.newest = self._installed = first  # the newest is the version that was made last
        self.true: Sequence[nn.Parameter] = ()  # of the newest version, where it is predicted and leaves are shared
        self._shows_true = False
        self._spare: list[list[Tensor]] = []
        self.own = sum(leaf not in last for leaf in leaves)  # weights that no other rank has, which come first
        self.made: list[Tensor] = []  # storage of the version that is being made
        self.most = 1  # versions that were live at once

    def install(self, version: int, lent: Lent = (), back: bool = False) -> None:
        """Put ``version`` into the modules. By assignment, which modules that keep lists of their weights notice.

        ``lent`` has the versions of what is borrowed, by owner; without it they have the same number. Passes that go
        ``back`` read the ``true`` weights where these are told apart.
        """
        for borrowed in self.borrowed:
            borrowed.install(dict(lent).get(borrowed.owner, version), back)
        true = back and bool(self.true)
        if version == self._installed and true == self._shows_true:
            return
        assert not true or version == self.newest, "the others' true weights are gone"
        leaves = self._leaves[version]
        if self._shared is None:
            for owner, name, index in self._slots:
                setattr(owner, name, leaves[index])
        else:
            for shared, leaf in zip(self._shared, self.true if true else leaves, strict=True):
                shared.data = leaf.data
        self._installed, self._shows_true = version, true

    def install_newest(self) -> None:
        """Put the newest version into the modules, where the run's result is read."""
        self.install(self.newest, tuple((x.owner, x.home.newest) for x in self.borrowed))

    @property
    def in_turns(self) -> bool:
        """Whether all versions take turns in one list of parameters."""
        return self._shared is not None

    @property
    def readable(self) -> Sequence[nn.Parameter]:
        """The parameters that the modules have now, borrowed ones last."""
        return [*self.installed, *(leaf for borrowed in self.borrowed for leaf in borrowed.leaves)]

    @property
    def installed(self) -> Sequence[nn.Parameter]:
        """The parameters of the stage's own that the modules have now."""
        return self.leaves_of(self._installed)

    def leaves_of(self, version: int) -> Sequence[nn.Parameter]:
        """Return the parameters that passes of ``version`` use, when it is installed."""
        return self._leaves[version] if self._shared is None else self._shared

    def place_of(self, parameter: nn.Parameter) -> int | None:
        """Return the index of a weight of the version that is installed, None for a frozen or borrowed one."""
        return next((index for index, leaf in enumerate(self.installed) if leaf is parameter), None)

    def weights(self) -> list[Tensor]:
        """Return the weights of the newest version, as storage."""
        return [leaf.data for leaf in self._leaves[self.newest]]

    def storages(self) -> set[int]:
        """Return the identities of the storages of all live versions, borrowed ones included."""
        every = (*self._leaves.values(), self.true)
        own = {leaf.untyped_storage()._cdata for leaves in every for leaf in leaves}
        return own.union(*(borrowed.home.storages() for borrowed in self.borrowed))

    def released(self, version: int) -> None:
        """Count one pass of ``version``, and of what was borrowed with it, as over."""
        for borrowed in self.borrowed:
            borrowed.home.released_by_borrower(borrowed.version)
        self.released_by_borrower(version)

    def released_by_borrower(self, version: int) -> None:
        """Count one pass of a stage that borrows as over."""
        self._uses[version] -= 1
        if not self._uses[version] and version != self.newest:
            self._spare.append([leaf.data for leaf in self._leaves.pop(version)])

    def begin(self) -> None:
        """Find room to make a version in: the newest one's own, or another if its passes aren't over."""
        self.made = self.weights()
        if self._uses[self.newest] > 0:
            self.made = self._spare.pop() if self._spare else [torch.empty_like(x) for x in self.made]

    def end(self, version: int) -> None:
        """Let what has been made be ``version``."""
        if self._uses[self.newest] > 0:
            before = self._leaves[self.newest]
            made = zip(before, self.made, strict=True)
            self._leaves[version] = [hooked_as(leaf, nn.Parameter(storage)) for leaf, storage in made]
            self.newest = version
        else:
            self.rename(version)
        self.made = []
        self.most = max(self.most, len(self._leaves))

    def rename(self, version: int) -> None:
        """Let the newest version, whose passes are over, be ``version``."""
        assert not self._uses[self.newest], "updates are skipped where the pipeline is empty"
        self._leaves[version] = self._leaves.pop(self.newest)
        self._installed = version if self._installed == self.newest else self._installed
        self.newest = version

    def tensors(self) -> Iterator[Tensor]:
        """Yield all of them, and room for more."""
        for leaves in self._leaves.values():
            yield from (leaf.data for leaf in leaves)
        for storages in (*self._spare, self.made):
            yield from storages

    def attached(self) -> Iterator[Tensor]:
        """Yield the gradients that passes under way add to."""
        for leaves in (*self._leaves.values(), self._shared or []):
            yield from (leaf.grad for leaf in leaves if leaf.grad is not None)


class Borrowed:
    """What a stage uses of ``home``, the versions of stage ``owner``: by ``slots`` the index there.

    Where versions take turns in one list of ``shared`` parameters, its modules have these for good.
    """

    def __init__(self, owner: int, home: Versions, slots: Sequence[tuple[nn.Module, str, int]], shared: bool) -> None:
        self.owner, self.home, self.version = owner, home, home.newest
        self._slots, self._shared = slots, shared
        self.indices = sorted({index for _, _, index in slots})

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters that the modules have now."""
        leaves = self.home.leaves_of(self.version)
        return [leaves[index] for index in self.indices]

    def install(self, version: int, back: bool = False) -> None:
        """Put ``version`` of the home's weights, or its true ones, into the modules."""
        self.version = version
        if self._shared:
            self.home.install(version, back=back)
            return
        leaves = self.home.leaves_of(version)
        for owner, name, index in self._slots:
            setattr(owner, name, leaves[index])


def _trained(modules: Iterable[nn.Module]) -> Slots:
    """Return where the trained parameters of ``modules``, some of which may stand there twice, have their places."""
    return {
        (owner, name): parameter
        for module in modules
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.requires_grad
    }


def _borrowed(slots: Slots, owners: Mapping[int, Versions], shared: bool) -> list[Borrowed]:
    """Return what of ``slots`` the ``owners`` (by stage) keep, and take it out of them."""
    found = []
    for owner, home in owners.items():
        places = {leaf: index for index, leaf in enumerate(home.installed)}
        own = [(module, name, places[leaf]) for (module, name), leaf in slots.items() if leaf in places]
        for module, name, _ in own:
            del slots[module, name]
        if own:
            found.append(Borrowed(owner, home, own, shared))
    return found


def borrowers(modules: Mapping[int, Iterable[nn.Module]]) -> dict[int, set[int]]:
    """Return for each stage of a rank, in order, the later ones that use trained weights of its ``modules``."""
    found: dict[int, set[int]] = {s: set() for s in modules}
    owner: dict[nn.Parameter, int] = {}
    for s, own in modules.items():
        for parameter in _trained(own).values():
            if owner.setdefault(parameter, s) != s:
                found[owner[parameter]].add(s)
    return found


# --- backwards with newer weights than their forwards had -------------------------------------------------------------


def read_weights_themselves(modules: Iterable[nn.Module]) -> None:
    """Let recurrent layers among ``modules`` run without cuDNN, which packs their weights into a copy for both passes.

    Torch's own kernels read the weights; on CPUs oneDNN's do.
    """
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                before: list[bool] = []
                part.register_forward_pre_hook(partial(_cudnn_off, before))
                part.register_forward_hook(partial(_cudnn_back, before), always_call=True)


def _cudnn_off(before: list[bool], *_: Any) -> None:
    before.append(torch.backends.cudnn.enabled)
    torch.backends.cudnn.enabled = False


def _cudnn_back(before: list[bool], *_: Any) -> None:
    torch.backends.cudnn.enabled = before.pop()
