"""What was done to tensors that have no values, and how is it done again to give some of them theirs?"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .torch_operations import storage_of

SMALL: Final = 2**18  # bytes of a tensor that is made at once: biases, and all of a small model


class NotDeferred(Exception):
    """What the program did cannot be done later; it says why."""


@dataclass(frozen=True, slots=True)
class View:
    """A promised tensor: which storage, and where in it."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(x: Tensor) -> View:
        """Return where ``x`` lies."""
        if x.is_conj() or x.is_neg():
            raise NotDeferred("it builds on a conjugated view")
        return View(storage_of(x), x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return it, on the memory that its storage has got."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class Given:
    """A tensor with values that something is made from: as it was, or its sum to tell that it has changed since."""

    def __init__(self, x: Tensor) -> None:
        x = x.detach()
        small = x.nbytes <= SMALL or x.is_meta
        self._tensor = x.clone() if small else x
        self._sum = None if small else _sum(x)

    def value(self) -> Tensor:
        """Return it; NotDeferred where it has changed."""
        if self._sum is not None and _sum(self._tensor) != self._sum:
            raise NotDeferred("it builds on a large tensor that it changes later")
        return self._tensor


def _sum(x: Tensor) -> int:
    return zlib.crc32(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: what it reads and writes, by storage; ``made`` are those that it begins, by place among results.

    ``fills`` are storages whose earlier content doesn't matter; ``states`` are the generators that it draws from, and
    their states before.
    """

    function: Any
    arguments: Any
    reads: frozenset[int]
    writes: frozenset[int]
    fills: frozenset[int]
    made: Mapping[int, View]
    states: Sequence[tuple[torch.Generator, Tensor]]


class Notes:
    """Calls in the program's order, and the ``storages`` that they are about, kept so that no other gets the place of
    one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}

    def made(self, wanted: Collection[int]) -> dict[int, torch.UntypedStorage]:
        """Return the storages ``wanted`` with what the program has put into them so far."""
        chosen: list[Call] = []
        needed = set(wanted)
        for call in reversed(self.calls):
            if needed & call.writes:
                chosen.append(call)
                needed -= call.fills
                needed |= call.reads
        chosen.reverse()
        last = {key: place for place, call in enumerate(chosen) for key in call.reads | call.writes}
        made: dict[int, torch.UntypedStorage] = {}
        generators = {id(own): own for call in chosen for own, _ in call.states}
        before = {name: own.get_state() for name, own in generators.items()}
        try:
            with torch.no_grad():
                for place, call in enumerate(chosen):
                    self._do(call, made)
                    for key in call.reads | call.writes:
                        if last[key] == place and key not in wanted:
                            made.pop(key, None)
        finally:
            for name, own in generators.items():
                own.set_state(before[name])
        for key in wanted:
            self.room(key, made)
        return made

    def _do(self, call: Call, made: dict[int, torch.UntypedStorage]) -> None:
        for generator, state in call.states:
            generator.set_state(state)

        def value(x: Any) -> Any:
            if isinstance(x, View):
                return x.on(self.room(x.storage, made))
            return x.value() if isinstance(x, Given) else x

        args, kwargs = pytree.tree_map(value, call.arguments)
        found = pytree.tree_leaves(call.function(*args, **kwargs))
        for place, view in call.made.items():
            x = found[place]
            if (x.size(), x.stride(), x.storage_offset()) != (view.size, view.stride, view.offset):
                raise NotDeferred(f"{call.function} makes another layout than was expected")
            made[view.storage] = x.untyped_storage()

    def room(self, key: int, made: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        """Return what is ``made`` of a storage; where nothing is yet, room for it."""
        if key not in made:
            made[key] = torch.UntypedStorage(self.storages[key].nbytes())  # type: ignore[no-untyped-call]
        return made[key]
