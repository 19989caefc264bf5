"""Which versions of a stage's weights are still needed? They, their gradient, and the optimizer.

A version is a list of parameters of its own, put into the stage's modules before a pass that uses it; autograd keeps
what a forward used, so passes of several versions can be in flight. Parameters of a version share storage with the
optimizer's until an update would overwrite weights that are still needed; then the update works on a copy. Versions of
16 bits are copies of what the optimizer works on. Device memory: needed versions, one gradient, the optimizer's state.

With ``shared`` leaves all versions take turns in one list of parameters instead. Then a backward finds in them the
version that is installed when it runs, not the one that its forward had, provided that autograd keeps no weights of
the forward but looks them up (:mod:`.newest_weights`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....schedule.weight_versions import Lent
from ...device import CPU
from ...exchange.replica_sum import ChunkSum
from ...model.structure import hooked_as
from ..update.bucketed_optimizer import BucketedOptimizer, StageOptimizer
from ..update.buckets import Bucket, FlatGradient, cut_into_buckets
from ..update.groups import Groups
from ..update.offload import BucketBuffers
from ..update.optimizers import MakeOptimizer, MakeSchedule
from ..update.shards import Kept, Rows, SharedChunk, Sharing, gathered, shared_chunks
from ..update.stage_optimizer import Factor, Rates, WholeOptimizer, nothing
from .borrowed import borrowed_of


@dataclass(frozen=True)
class Keeping:
    """How a stage keeps its weights, gradient and optimizer state.

    ``masters`` has the 32-bit values of 16-bit weights. ``bucket`` is the number of parameters that are stepped at a
    time, None for all; with ``offload`` what is not being stepped stays in host memory. ``flat`` gradients can be
    summed over replicas in chunks; weights ``tied`` to other stages', which are summed otherwise, come last. With
    ``aside`` a gradient is put aside before the update that it is for, while passes make the next one. With
    ``waits`` these are stepped later than the others, by :meth:`Versions.update_tied`. With ``sharing`` each replica
    keeps masters and state of its share alone.
    ``groups`` are the optimizer's, of weights by ``names``. ``observed`` hears when memory is at its fullest.
    """

    masters: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
    bucket: int | None = None
    offload: bool = False
    flat: bool = False
    tied: Collection[nn.Parameter] = ()
    waits: bool = False
    aside: bool = False
    sharing: Sharing | None = None
    buffers: BucketBuffers = field(default_factory=BucketBuffers)
    observed: Callable[[], None] = nothing
    groups: Groups | None = None
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)


class Versions:
    """Weight versions of the trainable parameters of ``modules``; version ``first`` is what they hold now.

    ``uses`` counts the passes that each version will serve: a version that has served them all, and is not the newest,
    gives its storage back for the next one. Tied parameters stay tied. Frozen ones are left alone, and what a stage
    of ``lenders`` (by index) on the same rank has among its own is borrowed (:mod:`.borrowed`).
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        uses: Counter[int],
        make_optimizer: MakeOptimizer,
        make_schedule: MakeSchedule | None = None,
        first: int = 0,
        shared: bool = False,
        keeping: Keeping | None = None,
        lenders: Mapping[int, Versions] | None = None,
    ) -> None:
        keeping = keeping or Keeping()
        slots: dict[tuple[nn.Module, str], nn.Parameter] = {}  # a module may stand in the stage twice
        for module in modules:
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is None or not parameter.requires_grad:
                        continue
                    slots[owner, name] = parameter
        self._borrowed = borrowed_of(slots, lenders or {}, shared)
        tied = set(keeping.tied)
        leaves = sorted(dict.fromkeys(slots.values()), key=lambda leaf: leaf in tied)
        index = {leaf: place for place, leaf in enumerate(leaves)}
        if keeping.bucket is not None or keeping.sharing is not None:
            for leaf in leaves:
                leaf.data = leaf.data.contiguous()  # so that pieces of it are views
        self._slots = [(owner, name, index[leaf]) for (owner, name), leaf in slots.items()]
        self._uses = Counter(uses)
        if shared:  # so that storages tell weights apart
            for leaf in leaves:
                if leaf.untyped_storage().nbytes() != leaf.nbytes:
                    leaf.data = leaf.data.clone()
        self._shared = leaves if shared else None
        self._leaves = {first: [nn.Parameter(leaf.data) for leaf in leaves] if shared else leaves}
        self._newest = self._installed = first
        self._places: dict[int, int] | None = None
        device = leaves[0].device if leaves else CPU
        self._mixed = bool(keeping.masters)
        home = CPU if keeping.offload else device
        masters = [nn.Parameter(keeping.masters[x].to(home) if self._mixed else x.data) for x in leaves]
        self._masters = masters
        self._spare: list[list[Tensor]] = []
        self.own = sum(leaf not in tied for leaf in leaves)  # weights that no other stage has, which come first
        self.buckets: tuple[Bucket, ...] = cut_into_buckets(leaves, keeping.bucket, len(leaves) - self.own)
        self._shapes = [leaf.shape for leaf in leaves]
        self._sharing, self._bucket = keeping.sharing, keeping.bucket
        self._whole: list[Kept] | None = None  # of all shares, while a checkpoint is written or read
        self.chunks = self._chunks_of(keeping.sharing)
        groups = None
        if keeping.groups is not None:
            groups = keeping.groups.parted([keeping.names[leaf] for leaf in leaves], masters)
        rates = Rates(masters, make_optimizer, make_schedule, groups)
        self.optimizer: StageOptimizer = (
            WholeOptimizer(masters, rates, self._mixed, keeping.observed)
            if (keeping.bucket is None and keeping.sharing is None) or not leaves
            else BucketedOptimizer(
                masters,
                rates,
                self._mixed,
                keeping.observed,
                device,
                self.buckets if self.chunks is None else [bucket for chunk in self.chunks for bucket in chunk.own],
                keeping.offload,
                keeping.buffers,
                None if self.chunks is None else Rows(self.chunks),
            )
        )
        self.waits = keeping.waits
        self._waiting: list[Tensor | None] | None = None  # the tied weights' gradients for the newest version
        self.flat = FlatGradient(leaves) if keeping.flat else None
        self._flat_aside = FlatGradient(leaves) if keeping.flat and keeping.aside else None
        self._aside: list[Tensor | None] | None = None  # the gradient for the next update, if passes make another one
        self._gradients: list[Tensor | None] = [None] * len(leaves)
        self._ahead: dict[tuple[int, int], Tensor] = {}  # by update and weight, gradients that borrowers have begun
        self._begin_gradients(range(len(leaves)), first + 1)
        self._next: list[Tensor] = []  # storage of the version that is being made
        self.most = 1  # versions that were live at once

    def _chunks_of(self, sharing: Sharing | None) -> tuple[SharedChunk, ...] | None:
        if sharing is None:
            return None
        apart = sum(bucket.slices[0].index >= self.own for bucket in self.buckets)
        return shared_chunks(self.buckets, apart, sharing, self._bucket)

    def install(self, version: int, lent: Lent = ()) -> None:
        """Put ``version`` into the modules. By assignment, which modules that keep lists of their weights notice.

        ``lent`` has the versions of what is borrowed, by lender; without it they have the same number.
        """
        for borrowed in self._borrowed:
            borrowed.install(dict(lent).get(borrowed.lender, version))
            self._places = None
        if version == self._installed:
            return
        leaves = self._leaves[version]
        if self._shared is None:
            for owner, name, index in self._slots:
                setattr(owner, name, leaves[index])
        else:
            for shared, leaf in zip(self._shared, leaves, strict=True):
                shared.data = leaf.data
        self._installed = version
        self._places = None

    @property
    def places(self) -> Mapping[int, int]:
        """The index among :attr:`readable` of the parameter that the modules have now in each storage."""
        if self._places is None:
            self._places = {leaf.untyped_storage()._cdata: index for index, leaf in enumerate(self.readable)}
        return self._places

    @property
    def readable(self) -> Sequence[nn.Parameter]:
        """The parameters that the modules have now, borrowed ones last."""
        return [*self.installed, *(leaf for borrowed in self._borrowed for leaf in borrowed.leaves)]

    @property
    def installed(self) -> Sequence[nn.Parameter]:
        """The parameters of the stage's own that the modules have now."""
        return self.leaves_of(self._installed)

    @property
    def newest(self) -> int:
        """The version that was made last."""
        return self._newest

    def leaves_of(self, version: int) -> Sequence[nn.Parameter]:
        """Return the parameters that passes of ``version`` use, when it is installed."""
        return self._leaves[version] if self._shared is None else self._shared

    def storages(self) -> set[int]:
        """Return the identities of the storages of all live versions, borrowed ones included."""
        own = {leaf.untyped_storage()._cdata for leaves in self._leaves.values() for leaf in leaves}
        return own.union(*(borrowed.home.storages() for borrowed in self._borrowed))

    def attach_gradient(self, version: int) -> None:
        """Let backward passes through ``version`` add to the stage's one gradient."""
        for leaf, gradient in zip(self._shared or self._leaves[version], self._gradients, strict=True):
            leaf.grad = gradient
        for borrowed in self._borrowed:
            borrowed.attach_gradient(self._due)

    def detach_gradient(self, version: int) -> None:
        """Take the gradient back from ``version``."""
        for index, leaf in enumerate(self._shared or self._leaves[version]):
            self._gradients[index] = leaf.grad
            leaf.grad = None
        for borrowed in self._borrowed:
            borrowed.detach_gradient(self._due)

    @property
    def _due(self) -> int:
        """The update that passes make the gradient for."""
        return self._newest + (1 if self._aside is None else 2)

    def gradient_for(self, update: int, index: int) -> Tensor | None:
        """Return what there is of the gradient of the weight at ``index`` for an ``update`` to come, for borrowers."""
        return self._gradients[index] if update == self._due else self._ahead.get((update, index))

    def take_gradient(self, update: int, index: int, gradient: Tensor | None) -> None:
        """Keep what a borrower has added to :meth:`gradient_for`."""
        if update == self._due:
            self._gradients[index] = gradient
        elif gradient is not None:
            self._ahead[update, index] = gradient

    def released(self, version: int) -> None:
        """Count one pass of ``version``, and of what was borrowed with it, as over."""
        for borrowed in self._borrowed:
            borrowed.released()
        self.released_by_borrower(version)

    def released_by_borrower(self, version: int) -> None:
        """Count one pass of a stage that borrows as over."""
        self._uses[version] -= 1
        if not self._uses[version] and version != self._newest:
            self._spare.append([leaf.data for leaf in self._leaves.pop(version)])

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient for the next update; None where no pass has made any, but in a flat one."""
        return self._gradients if self._aside is None else self._aside

    @property
    def summed(self) -> FlatGradient:
        """The flat gradient that replicas sum."""
        found = self.flat if self._flat_aside is None else self._flat_aside
        assert found is not None, "replicated stages have flat gradients"
        return found

    def put_aside(self) -> None:
        """Keep the gradient for the next update, and let passes begin with that for the one behind it."""
        assert self._aside is None, "the last update is over"
        if self.flat is None or self._flat_aside is None:
            self._aside = list(self._gradients)
        else:
            for dtype, flat in self.flat.flats.items():
                self._flat_aside.flats[dtype].copy_(flat)
            self._aside = list(self._flat_aside.views)
        self._begin_gradients(range(len(self._gradients)), self._newest + 2)

    def tied_gradient(self, index: int) -> Tensor:
        """Return the gradient of the tied weight at ``index`` for the next update, to be changed; zeros for none."""
        of, place = (self.gradients(), index) if self._waiting is None else (self._waiting, index - self.own)
        found = of[place]
        if found is None:
            found = of[place] = torch.zeros_like(self._leaves[self._newest][index])
        return found

    @property
    def parts(self) -> range:
        """The optimizer's parts that an update steps; those of tied weights that wait are not among them."""
        if not self.waits:
            return range(self.optimizer.parts)
        if self.chunks is not None:
            return range(sum(len(chunk.own) for chunk in self.chunks if chunk.summed))
        if self.optimizer.parts != len(self.buckets):
            return range(self.optimizer.parts)
        return range(sum(bucket.slices[0].index < self.own for bucket in self.buckets))

    def begin_update(self) -> None:
        """Find room for a new version: the newest one's own, or another if its passes aren't over.

        Gradients that wait are put aside, so that passes can begin to add to the next ones.
        """
        if self.waits:
            assert self._waiting is None, "the last update is over"
            self._waiting = [x.clone() if self.flat and x is not None else x for x in self._gradients[self.own :]]
            self._begin_gradients(range(self.own, len(self._gradients)), self._newest + 2)
        newest = self._leaves[self._newest]
        self._next = [leaf.data for leaf in newest]
        if self._uses[self._newest] > 0:
            self._next = self._spare.pop() if self._spare else [torch.empty_like(leaf.data) for leaf in newest]
            if not self._mixed:
                for master, storage in zip(self._masters, self._next, strict=True):
                    storage.copy_(master.data)
                    master.data = storage

    def step(self, part: int, factor: Factor = 1.0) -> None:
        """Make one of the optimizer's parts of the new version from the gradient times ``factor``."""
        gradients = self.gradients()
        if self.waits:  # what there is of the tied ones' is for the next update
            gradients = [*gradients[: self.own], *[None] * (len(gradients) - self.own)]
        self.optimizer.step(part, gradients, factor, self._next)

    def end_update(self, version: int) -> None:
        """Let what has been made be ``version``; the gradient is gone afterwards, but for what waits."""
        if self._waiting is None:
            self.optimizer.finish()
        if self._aside is None:
            self._begin_gradients(range(self.own if self.waits else len(self._gradients)), version + 1)
        self._aside = None
        if self._uses[self._newest] > 0:
            before = self._leaves[self._newest]
            made = zip(before, self._next, strict=True)
            self._leaves[version] = [hooked_as(leaf, nn.Parameter(storage)) for leaf, storage in made]
            self._newest = version
        else:
            self._rename(version)
        self._next = []
        self.most = max(self.most, len(self._leaves))

    def update_tied(self, factor: Factor = 1.0) -> bool:
        """Step the tied weights of the newest version, which no pass has used yet, with the gradients that waited.

        Return whether there were any.
        """
        if self._waiting is None:
            return False
        gradients = [*[None] * self.own, *self._waiting]
        weights = [leaf.data for leaf in self._leaves[self._newest]]
        whole = self.chunks is None and self.optimizer.parts != len(self.buckets)
        for part in range(0 if whole else len(self.parts), self.optimizer.parts):
            self.optimizer.step(part, gradients, factor, weights)
        for chunk in self.chunks or ():
            if not chunk.summed:
                self._spread(chunk, weights)
        self.optimizer.finish()
        self._waiting = None
        return True

    def update(self, version: int, factor: Factor = 1.0) -> None:
        """Make ``version`` from the newest one and the gradient times ``factor``, which is gone afterwards."""
        self.begin_update()
        for part in self.parts:
            self.step(part, factor)
        self.end_update(version)

    def skip_update(self, version: int) -> None:
        """Let the newest version be ``version`` as well, and forget the gradient: nothing else changes."""
        assert not self._uses[self._newest], "updates are skipped where the pipeline is empty"
        self._begin_gradients(range(len(self._gradients)), version + 1)
        self._rename(version)

    def _rename(self, version: int) -> None:
        old = self._newest
        self._leaves[version] = self._leaves.pop(old)
        self._installed = version if self._installed == old else self._installed
        self._newest = version

    def _begin_gradients(self, indices: range, update: int) -> None:
        """Begin with the gradients of the weights at ``indices`` for ``update``, as far as borrowers haven't."""
        if self.flat is not None and len(indices) == len(self._gradients):
            self.flat.clear()
        for index in indices:
            ahead = self._ahead.pop((update, index), None)
            if self.flat is None:
                self._gradients[index] = ahead
                continue
            self._gradients[index] = view = self.flat.views[index]
            if ahead is not None:
                view.copy_(ahead)
            elif len(indices) < len(self._gradients):
                view.zero_()

    def install_newest(self) -> None:
        """Put the newest version into the modules, where the run's result is read."""
        self.install(self._newest, tuple((x.lender, x.home.newest) for x in self._borrowed))

    def place_of(self, parameter: nn.Parameter) -> int | None:
        """Return the index of a weight of the version that is installed, None for a frozen or borrowed one."""
        for index, leaf in enumerate(self.installed):
            if leaf is parameter:
                return index
        return None

    def whole(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a weight of the newest version, which is installed, as :meth:`master` does; None for a frozen one."""
        index = self.place_of(parameter)
        if index is not None:
            return self.master(index)
        return next((x for b in self._borrowed if (x := b.home.whole(parameter)) is not None), None)

    def give_stepped(self, chunk: SharedChunk) -> None:
        """Put the new weights of the own share of ``chunk`` into its place in the gradient, from where all get them."""
        chunk.give(self._next, self._row(chunk))

    def take_gathered(self, chunk: SharedChunk) -> None:
        """Let the new version have the weights that are in the place of the gradient of ``chunk``."""
        chunk.take(self._row(chunk), self._next)

    def _row(self, chunk: SharedChunk) -> Tensor:
        return self.summed.flats[chunk.dtype][chunk.start : chunk.stop]

    def _spread(self, chunk: SharedChunk, weights: Sequence[Tensor]) -> None:
        """Give the own share of ``chunk`` of ``weights`` to all, and take theirs."""
        assert self._sharing is not None, "only shares are spread"
        row = torch.empty_like(self._row(chunk))
        chunk.give(weights, row)
        exchange = ChunkSum(row, self._sharing.group, chunk.first, self._sharing.link)
        exchange.spread()
        exchange.end()
        chunk.take(row, weights)

    def assemble(self) -> None:
        """Bring what replicas share together on the first of them, until :meth:`part` is called; all do so at once."""
        self.optimizer.settle()
        if self._sharing is not None:
            mixed = self._mixed
            kept = [Kept(x.data if mixed else None, self.optimizer.state_of(i)) for i, x in enumerate(self._masters)]
            self._whole = gathered(kept, self._shapes, self._rows_of, self._sharing)

    def _rows_of(self, rank: int) -> Rows:
        assert self._sharing is not None, "only shares have rows"
        return Rows(self._chunks_of(replace(self._sharing, rank=rank)) or ())

    def make_room(self) -> None:
        """Have whole masters to be filled, of which :meth:`take_masters` takes the own share."""
        if self._sharing is not None:
            self._whole = [Kept(torch.empty(shape), {}) if self._mixed else Kept(None, {}) for shape in self._shapes]

    def part(self) -> None:
        """Forget what others keep."""
        self._whole = None

    def master(self, index: int) -> Tensor:
        """Return the weight at ``index`` as the optimizer has it: the newest version's, in full precision."""
        whole = None if self._whole is None else self._whole[index].master
        return self._masters[index].data if whole is None else whole

    def state_of(self, index: int) -> Mapping[str, Any]:
        """Return what the optimizer remembers of the weight at ``index``."""
        return self.optimizer.state_of(index) if self._whole is None else self._whole[index].state

    def take_masters(self) -> None:
        """Give the newest version, if it has 16 bits, the values of the full-precision weights."""
        for index, leaf in enumerate(self._leaves[self._newest] if self._mixed else ()):
            whole = self.master(index)
            leaf.data.copy_(whole)
            if self.chunks is not None:
                self._masters[index].data.copy_(Rows(self.chunks).taken(index, whole))
        self.part()

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield all weights, gradients and optimizer state, and whether they are in host memory for want of room."""
        for leaves in self._leaves.values():
            yield from ((leaf.data, False) for leaf in leaves)
        for leaves in [*self._leaves.values(), *([] if self._shared is None else [self._shared])]:
            yield from ((leaf.grad, False) for leaf in leaves if leaf.grad is not None)
        for storages in (*self._spare, self._next):
            yield from ((storage, False) for storage in storages)
        aside = (self._aside or ()) if self._flat_aside is None else self._flat_aside.views
        for gradients in (self._gradients, self._waiting or (), aside, self._ahead.values()):
            yield from ((gradient, False) for gradient in gradients if gradient is not None)
        yield from self.optimizer.tensors()
