"""How is a model built that is larger than memory? Its large tensors are promised; what makes them is done later.

Within the context a tensor above :data:`SMALL` bytes has a shape and no values (torch's ``FakeTensor``), and what is
done to it is noted. Random numbers are drawn when it is the program's turn, into memory that is given back at once, so
the generator goes on as ever; with each draw the generator's state is noted. :meth:`Deferred.values` then does again,
in the program's order, what some of the tensors come from: to the last bit what they would have been. Where the
program looks at a value, that one is made for it. (The idea of deferred initialisation is torchdistx's.)
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..structure import hooked_as, substitute
from .replay import SMALL, Call, Given, NotDeferred, Notes, View
from .torch_operations import (
    DRAWS,
    FILLS,
    aten,
    is_elsewhere,
    is_random,
    is_whole,
    states_of,
    statistics,
    storage_of,
    takes_device,
    tensors_in,
    written_by,
)

WIDEST: Final = 16  # bytes of an element
THREADS: Final = "it is built by several threads"


def lacking() -> str | None:
    """Return what this torch lacks of what is needed for promises, in words; None where it has all."""
    if hasattr(torch._C, "_swap_tensor_impl"):
        return None
    return f"torch {torch.__version__} has no torch._C._swap_tensor_impl"


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
        self._notes = Notes()

    @property
    def puts_off(self) -> bool:
        """Whether there is anything that it would promise."""
        return self._small < sys.maxsize

    @property
    def promises(self) -> bool:
        """Whether anything is promised."""
        return bool(self._notes.storages)

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
        return isinstance(x, FakeTensor) and x.fake_mode is self.fake and storage_of(x) in self._notes.storages

    def values(self, tensors: Iterable[Tensor], empty: Iterable[Tensor] = ()) -> Callable[[Tensor], Tensor]:
        """Make what is promised of ``tensors``, and room alone for those of ``empty`` that share nothing with them.

        Return what gives the value of each, and others as they are. Views of one storage stay so. NotDeferred where
        that is impossible.
        """
        wanted = {storage_of(x) for x in tensors if self.holds(x)}
        made = self._notes.made(wanted)
        for x in empty:
            if self.holds(x):
                self._notes.room(storage_of(x), made)

        def value(x: Tensor) -> Tensor:
            return View.of(x).on(made[storage_of(x)]) if self.holds(x) and storage_of(x) in made else x

        return value

    def adopt(self, modules: Iterable[torch.nn.Module]) -> None:
        """Promise what the program itself has put on ``meta``, though nothing makes its values."""
        found: dict[int, Tensor] = {}
        wholes: dict[int, Tensor] = {}

        def adopted(x: Tensor) -> Tensor:
            if not x.is_meta:
                return x
            if id(x) not in found:
                with self.fake:
                    whole = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8)
                    storage = wholes.setdefault(storage_of(x), whole)
                    twin = torch.empty(0, dtype=x.dtype)
                    twin.set_(storage.untyped_storage(), x.storage_offset(), x.size(), x.stride())
                self._blanks.add(storage_of(storage))
                self._notes.storages[storage_of(storage)] = storage.untyped_storage()
                found[id(x)] = parameter(x, twin)
                kept.append(x)
            return found[id(x)]

        kept: list[Tensor] = []  # so that no other gets the number of one
        substitute(modules, adopted)

    def is_blank(self, x: Tensor) -> bool:
        """Whether nothing makes the values of ``x``."""
        return self.holds(x) and storage_of(x) in self._blanks

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
            _become(x, value(x))

    # --- noting -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation, or promise to."""
        kwargs = kwargs or {}
        if not self.puts_off:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        promised = [x for x in given if self.holds(x)]
        if not promised:
            return self._begun(func, args, kwargs, given)
        if statistics(func, args, kwargs):
            raise NotDeferred("it runs a norm in training while it is built")
        written = written_by(func, args, kwargs)
        lazily = all(self.holds(x) for x in written)
        if is_random(func):
            return self._drawn(func, args, kwargs, written)
        if not lazily or is_elsewhere(func, kwargs):
            return self._at_once(func, args, kwargs, written)
        try:
            with self.fake:
                found = func(*args, **kwargs)
        except Exception as error:  # it needs values, or is wrong, which it will say when it has them
            if func.overloadpacket is aten.set_:
                raise NotDeferred("it puts a tensor into another's place") from error
            if not written:
                return self._at_once(func, args, kwargs, written)
            found = written[0]
        if func.overloadpacket is not aten.set_:
            self._note(func, args, kwargs, written, found, ())
        return found

    def _begun(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Do what needs nothing that is promised; what becomes large is promised."""
        there = kwargs.get("device") in (None, torch.device("cpu"))
        if not given and there and takes_device(func) and not is_random(func) and self._may_be_large(args):
            with self.fake:
                found = func(*args, **kwargs)
            if self._is_large(found):
                self._note(func, args, kwargs, (), found, ())
                return found
        states = states_of(kwargs) if is_random(func) else ()
        versions = [x._version for x in given]
        found = func(*args, **kwargs)
        if [x._version for x in given] != versions:
            return found
        return self._promised(func, args, kwargs, given, found, states)

    def _promised(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], found: Any, states: Any, written: Any = ()
    ) -> Any:
        """Return ``found`` with what is large and new in it promised instead."""
        old = {storage_of(x) for x in given if x.layout == torch.strided}
        leaves, spec = pytree.tree_flatten(found)
        large = [self._is_large(x) and x.device.type == "cpu" and storage_of(x) not in old for x in leaves]
        if not any(large):
            return found
        leaves = [self._twin(x) if lazily else x for x, lazily in zip(leaves, large, strict=True)]
        found = pytree.tree_unflatten(leaves, spec)
        self._note(func, args, kwargs, written, found, states)
        return found

    def _drawn(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
        """Draw what is promised, so that the generator goes on."""
        states = states_of(kwargs)
        if func.overloadpacket in DRAWS:
            room = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype)
            func(room, *args[1:], **kwargs)
            self._note(func, args, kwargs, written, None, states)
            return args[0]
        values, more = self._filled((args, kwargs))
        found = func(*values, **more)
        if not written:
            return self._promised(func, args, kwargs, (), found, states)
        self._note(func, args, kwargs, written, None, states)
        return written[0]

    def _at_once(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
        """Do what the program wants to see, with the values of what it needs."""
        if any(self.holds(x) for x in written):
            raise NotDeferred(f"{func} changes large tensors and others together")
        values, more = self._filled((args, kwargs))
        return func(*values, **more)

    def _filled(self, arguments: Any) -> Any:
        value = self.values(tensors_in(arguments))
        return pytree.tree_map_only(Tensor, value, arguments)

    def _may_be_large(self, args: Any) -> bool:
        """Whether a tensor of sizes among ``args`` can be; what isn't seen here is when it is there."""
        return WIDEST * math.prod(max(1, abs(x)) for x in pytree.tree_leaves(args) if type(x) is int) > self._small

    def _is_large(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.layout == torch.strided and x.untyped_storage().nbytes() > self._small

    def _note(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor], found: Any, states: Any) -> None:
        kept: dict[int, Any] = {}

        def noted(x: Tensor) -> Any:
            if id(x) not in kept:
                kept[id(x)] = View.of(x) if self.holds(x) else Given(x)
            return kept[id(x)]

        changed = {storage_of(x) for x in written}
        fills = {storage_of(x) for x in written[:1] if func.overloadpacket in FILLS and is_whole(x)}
        arguments = pytree.tree_map_only(Tensor, noted, (args, kwargs))
        reads = {x.storage for x in kept.values() if isinstance(x, View)}
        if fills:
            reads = {storage_of(x) for x in tensors_in((args[1:], kwargs)) if self.holds(x)}
        made = {
            place: View.of(x)
            for place, x in enumerate(pytree.tree_leaves(found))
            if isinstance(x, FakeTensor) and storage_of(x) not in self._notes.storages
        }
        for x in pytree.tree_leaves(found):
            if isinstance(x, FakeTensor):
                self._notes.storages.setdefault(storage_of(x), x.untyped_storage())
        begun = frozenset(view.storage for view in made.values())
        if changed or begun:
            writes = begun | changed
            call = Call(func, arguments, frozenset(reads), writes, begun | fills, made, states)
            self._notes.calls.append(call)

    def _twin(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x`` without values."""
        with self.fake:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)


def _become(x: Tensor, value: Tensor) -> None:
    """Let ``x``, whoever holds it, be ``value``."""
    more = more_of(x)
    value = parameter(x, value)
    x.__class__ = type(value)
    vars(x).clear()
    vars(x).update(more)
    torch._C._swap_tensor_impl(x, value)  # what torch.utils.swap_tensors ends with


def parameter(like: Tensor, value: Tensor) -> Tensor:
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
