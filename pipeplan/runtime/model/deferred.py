"""How is a model built that is larger than memory? Its large tensors are promised; what makes them is done later.

Within the context a tensor above :data:`SMALL` bytes has a shape and no values (torch's ``FakeTensor``), and what is
done to it is noted. Random numbers are drawn when it is the program's turn, into memory that is given back at once, so
the generator goes on as ever; with each draw the generator's state is noted. :meth:`Deferred.values` then does again,
in the program's order, what some of the tensors come from: to the last bit what they would have been. Where the
program looks at a value, that one is made for it. (The idea of deferred initialisation is torchdistx's.)
"""

from __future__ import annotations

import gc
import sys
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .operations import DRAWS, aten, is_random, statistics, tensors_among, written_by
from .structure import hooked_as, substitute

SMALL: Final = 2**18  # bytes of a tensor that is made at once: biases, and all of a small model
THREADS: Final = "it is built by several threads"


class NotDeferred(Exception):
    """What the program did cannot be done later; it says why."""


def _storage_of(x: Tensor) -> int:
    """Return the number of the storage of ``x``, 0 where it has several."""
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else 0


# --- notes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """A promised tensor: which storage, and where in it."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(x: Tensor) -> _View:
        """Return where ``x`` lies."""
        if x.is_conj() or x.is_neg():
            raise NotDeferred("it builds on a conjugated view")
        return _View(_storage_of(x), x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return it, on the memory that its storage has got."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Given:
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
class _Call:
    """One operation: what it reads and writes, by storage; ``made`` are those that it begins, by place among results.

    ``states`` are the generators that it draws from, and their states before.
    """

    function: Any
    arguments: Any
    reads: frozenset[int]
    writes: frozenset[int]
    made: Mapping[int, _View]
    states: Sequence[tuple[torch.Generator, Tensor]]


class _Fake(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves the base untyped
    """The mode of all promised tensors, also of copies of them.

    ``thread`` is the one that builds, while it does; ``elsewhere`` says that another one has had to do with them.
    """

    thread: int | None = None
    elsewhere = False

    def __deepcopy__(self, memo: Any) -> _Fake:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.thread not in (None, get_ident()):
            self.elsewhere = True
            raise NotDeferred(THREADS)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base untyped
    """Builds within its context without memory for large tensors; ``small`` bytes is what isn't large."""

    def __init__(self, small: int = SMALL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._small = small
        self.fake = _Fake(allow_non_fake_inputs=True)
        self._warnings = ExitStack()
        self._blanks: set[int] = set()
        self._calls: list[_Call] = []  # in the program's order
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no other gets the place of one

    @property
    def puts_off(self) -> bool:
        """Whether there is anything that it would promise."""
        return self._small < sys.maxsize

    @property
    def promises(self) -> bool:
        """Whether anything is promised."""
        return bool(self._storages)

    def __enter__(self) -> Deferred:
        self._warnings.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # as copies do
        self.fake.thread = get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self.fake.thread = None
        self._warnings.close()
        if self.fake.elsewhere and error[0] is None:
            raise NotDeferred(THREADS)

    def holds(self, x: Tensor) -> bool:
        """Whether ``x`` is promised."""
        return isinstance(x, FakeTensor) and x.fake_mode is self.fake and _storage_of(x) in self._storages

    def values(self, tensors: Iterable[Tensor], empty: Iterable[Tensor] = ()) -> Callable[[Tensor], Tensor]:
        """Make what is promised of ``tensors``, and room alone for those of ``empty`` that share nothing with them.

        Return what gives the value of each, and others as they are. Views of one storage stay so. NotDeferred where
        that is impossible.
        """
        made = self._made({_storage_of(x) for x in tensors if self.holds(x)})
        for x in empty:
            if self.holds(x):
                self._room(_storage_of(x), made)
        return lambda x: _View.of(x).on(made[_storage_of(x)]) if self.holds(x) and _storage_of(x) in made else x

    def adopt(self, modules: Iterable[torch.nn.Module]) -> None:
        """Promise what the program itself has put on ``meta``, though nothing makes its values."""
        wholes: dict[int, Tensor] = {}

        @cache  # which keeps x, so that no other is taken for it
        def adopted(x: Tensor) -> Tensor:
            if not x.is_meta:
                return x
            with self.fake:
                whole = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8)
                storage = wholes.setdefault(_storage_of(x), whole)
                twin = torch.empty(0, dtype=x.dtype)
                twin.set_(storage.untyped_storage(), x.storage_offset(), x.size(), x.stride())
            self._blanks.add(_storage_of(storage))
            self._storages[_storage_of(storage)] = storage.untyped_storage()
            return parameter_like(x, twin)

        substitute(modules, adopted)

    def is_blank(self, x: Tensor) -> bool:
        """Whether nothing makes the values of ``x``."""
        return self.holds(x) and _storage_of(x) in self._blanks

    def settle(self, known: Iterable[Tensor] = ()) -> None:
        """Give values to what is promised and held by others than those of ``known``: caches, and the program's own."""
        if not self.promises:
            return
        kept = set(map(id, known))
        gc.collect()
        objects = gc.get_objects()
        alive = [x for x in objects if issubclass(type(x), FakeTensor) and id(x) not in kept and self.holds(x)]
        del objects
        alive = [x for x in alive if any(other is not alive for other in gc.get_referrers(x))]  # none: bases of views
        value = self.values(alive)
        for x in alive:
            new, more = parameter_like(x, value(x)), more_of(x)
            x.__class__ = type(new)
            vars(x).clear()
            vars(x).update(more)
            torch._C._swap_tensor_impl(x, new)  # what torch.utils.swap_tensors ends with

    # --- noting ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation, or promise to."""
        kwargs = kwargs or {}
        if not self.puts_off:
            return func(*args, **kwargs)
        given = tensors_among((args, kwargs))
        promised = any(map(self.holds, given))
        if promised and statistics(func, args, kwargs):
            raise NotDeferred("it runs a norm in training while it is built")
        written = written_by(func, args, kwargs)
        lazily = all(map(self.holds, written))
        if written and not lazily and any(map(self.holds, written)):
            raise NotDeferred(f"{func} changes large tensors and others together")
        if is_random(func):
            generator = kwargs.get("generator") or torch.default_generator
            states = ((generator, generator.get_state()),)
            drawn = self._drawn if written and lazily else self._at_once
            return drawn(func, args, kwargs, given, written, states)
        elsewhere = torch.device(kwargs.get("device") or "cpu").type != "cpu"
        if not promised or elsewhere or not lazily:
            return self._at_once(func, args, kwargs, given, written)
        try:
            with self.fake:
                found = func(*args, **kwargs)
        except Exception as error:  # it needs values, or is wrong, which it will say when it has them
            if func.overloadpacket is aten.set_:
                raise NotDeferred("it puts a tensor into another's place") from error
            if not written:
                return self._at_once(func, args, kwargs, given, written)
            found = written[0]
        if func.overloadpacket is not aten.set_:
            self._note(func, args, kwargs, written, found)
        return found

    def _at_once(self, func: Any, args: Any, kwargs: Any, given: Any, written: Any, states: Any = ()) -> Any:
        """Do it with the values of what it needs; what becomes large is promised."""
        values, more = self._filled((args, kwargs))
        found = func(*values, **more)
        return found if written else self._promised(func, args, kwargs, given, found, states)

    def _drawn(self, func: Any, args: Any, kwargs: Any, given: Any, written: Any, states: Any) -> Any:
        """Draw into what is promised, so that the generator goes on."""
        if func.overloadpacket in DRAWS:
            func(torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype), *args[1:], **kwargs)
        else:
            values, more = self._filled((args, kwargs))
            func(*values, **more)
        self._note(func, args, kwargs, written, None, states)
        return written[0]

    def _promised(self, func: Any, args: Any, kwargs: Any, given: Any, found: Any, states: Any = ()) -> Any:
        """Return ``found`` with what is large and new in it promised instead."""
        old = {_storage_of(x) for x in given if x.layout == torch.strided}
        leaves, spec = pytree.tree_flatten(found)
        large = [self._is_large(x) and x.device.type == "cpu" and _storage_of(x) not in old for x in leaves]
        if not any(large):
            return found
        with self.fake:
            twins = [
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype) if lazily else x
                for x, lazily in zip(leaves, large, strict=True)
            ]
        found = pytree.tree_unflatten(twins, spec)
        self._note(func, args, kwargs, (), found, states)
        return found

    def _filled(self, arguments: Any) -> Any:
        return pytree.tree_map_only(Tensor, self.values(tensors_among(arguments)), arguments)

    def _is_large(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.layout == torch.strided and x.untyped_storage().nbytes() > self._small

    def _note(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor], found: Any, states: Any = ()) -> None:
        noted = {id(x): _View.of(x) if self.holds(x) else _Given(x) for x in tensors_among((args, kwargs))}
        arguments = pytree.tree_map_only(Tensor, lambda x: noted[id(x)], (args, kwargs))
        fakes = [(place, x) for place, x in enumerate(pytree.tree_leaves(found)) if isinstance(x, FakeTensor)]
        made = {place: _View.of(x) for place, x in fakes if _storage_of(x) not in self._storages}
        for _, x in fakes:
            self._storages.setdefault(_storage_of(x), x.untyped_storage())
        reads = frozenset(x.storage for x in noted.values() if isinstance(x, _View))
        writes = frozenset((*(view.storage for view in made.values()), *map(_storage_of, written)))
        if writes:
            self._calls.append(_Call(func, arguments, reads, writes, made, states))

    # --- doing it again ---

    def _made(self, wanted: Collection[int]) -> dict[int, torch.UntypedStorage]:
        """Return the storages ``wanted`` with what the program has put into them so far."""
        chosen: list[_Call] = []
        needed = set(wanted)
        for call in reversed(self._calls):
            if needed & call.writes:
                chosen.append(call)
                needed -= {view.storage for view in call.made.values()}
                needed |= call.reads
        chosen.reverse()
        last = {key: place for place, call in enumerate(chosen) for key in call.reads | call.writes}
        made: dict[int, torch.UntypedStorage] = {}
        generators = {own for call in chosen for own, _ in call.states}
        before = {own: own.get_state() for own in generators}
        try:
            with torch.no_grad():
                for place, call in enumerate(chosen):
                    self._do(call, made)
                    for key in call.reads | call.writes:
                        if last[key] == place and key not in wanted:
                            made.pop(key, None)
        finally:
            for own, state in before.items():
                own.set_state(state)
        for key in wanted:
            self._room(key, made)
        return made

    def _do(self, call: _Call, made: dict[int, torch.UntypedStorage]) -> None:
        for generator, state in call.states:
            generator.set_state(state)

        def value(x: Any) -> Any:
            if isinstance(x, _View):
                return x.on(self._room(x.storage, made))
            return x.value() if isinstance(x, _Given) else x

        args, kwargs = pytree.tree_map(value, call.arguments)
        found = pytree.tree_leaves(call.function(*args, **kwargs))
        for place, view in call.made.items():
            x = found[place]
            if (x.size(), x.stride(), x.storage_offset()) != (view.size, view.stride, view.offset):
                raise NotDeferred(f"{call.function} makes another layout than was expected")
            made[view.storage] = x.untyped_storage()

    def _room(self, key: int, made: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        """Return what is ``made`` of a storage; where nothing is yet, room for it."""
        if key not in made:
            made[key] = torch.UntypedStorage(self._storages[key].nbytes())  # type: ignore[no-untyped-call]
        return made[key]


def parameter_like(like: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` as a parameter where ``like`` is one, with what the program has noted on it."""
    if isinstance(like, torch.nn.Parameter):
        value = hooked_as(like, torch.nn.Parameter(value, like.requires_grad))
    vars(value).update(more_of(like))
    return value


def more_of(x: Tensor) -> dict[str, Any]:
    """Return the attributes that the program has given to ``x``."""
    if not isinstance(x, FakeTensor):
        return dict(vars(x))
    with x.fake_mode:
        own = {*vars(torch.empty(0)), "_is_param"}
    return {name: value for name, value in vars(x).items() if name not in own}


def mode_of(tensors: Iterable[Tensor]) -> FakeTensorMode | None:
    """Return the mode in which code runs that has promised ``tensors``, None if there are none."""
    return next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), None)
