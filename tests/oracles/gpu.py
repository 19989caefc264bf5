"""A GPU that isn't there: what the host gives it, which of that may run at once, and whether that is safe.

The runtime's own code runs on CPU tensors that count as a GPU's. Every kernel, message and event is put into a trace,
from which :mod:`oracles.nccl` tells whether all ranks come through. Here one rank's memory is watched: by vector
clocks (Mattern 1989; FastTrack, Flanagan and Freund 2009) two uses of which one writes must be ordered by streams,
events or the host, and memory that is given back must have been used before by what its stream, or a recorded one, has
come to: that is when torch's allocator gives it to somebody else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPUTE, HOST = "compute", "host"
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}  # for the device's values
Clock = dict[Hashable, int]


@dataclass(frozen=True)
class Recorded:
    """An event in a stream."""

    stream: Hashable
    event: int


@dataclass(frozen=True)
class Waited:
    """A stream waits for an event."""

    stream: Hashable
    event: int


@dataclass(frozen=True)
class HostWaits:
    """The host waits for an event, or for all that it has issued (None)."""

    event: int | None


@dataclass(frozen=True)
class HostsMeet:
    """The hosts of ``ranks`` wait for each other."""

    ranks: tuple[int, ...]
    what: Hashable


@dataclass(frozen=True)
class Together:
    """What ``ranks`` do in a communicator's stream, each of them ``what``."""

    stream: Hashable
    ranks: tuple[int, ...]
    what: Any


@dataclass(frozen=True)
class Begins:
    """The host comes to something."""

    what: Any


@dataclass(frozen=True)
class Use:
    """That ``stream``, at ``count`` of its clock, reads or writes the bytes ``[start, stop)`` of some memory."""

    stream: Hashable
    count: int
    writes: bool
    start: int
    stop: int

    def disturbs(self, other: Use) -> bool:
        """Whether two uses must not run at once."""
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


@dataclass
class Memory:
    """A storage: of which stream's memory it is, and its uses, but for those that later ones stand for."""

    home: Hashable
    ref: StorageWeakRef
    made: str
    on_host: bool = False
    uses: list[Use] = field(default_factory=list)
    recorded: set[Hashable] = field(default_factory=set)

    def used_by_others(self, known: Clock) -> bool:
        """Whether a recorded stream may still use it, for all that is known."""
        return any(known.get(x.stream, 0) < x.count for x in self.uses if x.stream in self.recorded)


class Gpu:
    """What one rank has given its GPU. ``races`` are sentences; ``waits`` are (what the host was at, what it read)."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.trace: list[Any] = []
        self.races: list[str] = []
        self.waits: list[tuple[Any, str]] = []
        self.doing: Any = None
        self.current: Hashable = COMPUTE
        self.moved_bytes = 0
        self.most_messages = 0  # whose memory nobody else can have yet
        self._messages: list[Memory] = []
        self._clocks: dict[Hashable, Clock] = {}
        self._memory: dict[int, Memory] = {}
        self._events = self._streams = 0

    def begin(self, what: Any) -> None:
        """Hear what the host comes to."""
        self.doing = what
        self.trace.append(Begins(what))

    # --- streams and events ---

    def clock(self, stream: Hashable) -> Clock:
        """What is known to be over where ``stream`` is."""
        return self._clocks.setdefault(stream, {})

    def record(self, stream: Hashable) -> tuple[int, Clock]:
        """Put an event into a stream."""
        self._events += 1
        self.trace.append(Recorded(stream, self._events))
        return self._events, _joined(self.clock(stream), self.clock(HOST))

    def wait(self, stream: Hashable, event: int, clock: Clock) -> None:
        """Let a stream wait for an event."""
        self.trace.append(Waited(stream, event))
        self._clocks[stream] = _joined(self.clock(stream), clock)

    def host_waits(self, event: int | None, clock: Clock) -> None:
        """Let the host wait for an event, or for everything."""
        self.trace.append(HostWaits(event))
        self._clocks[HOST] = _joined(self.clock(HOST), clock)

    def settle(self, why: str = "the device") -> None:
        """Let the host wait for everything."""
        self.waits.append((self.doing, why))
        for clock in list(self._clocks.values()):
            self._clocks[HOST] = _joined(self.clock(HOST), clock)
        self.trace.append(HostWaits(None))

    def new_stream(self) -> Stream:
        """A further stream."""
        self._streams += 1
        return Stream(self, f"stream {self._streams}")

    # --- memory ---

    def memory(self, tensor: Tensor, made: str = "before") -> Memory:
        """The memory of a tensor, new if it isn't known."""
        storage = tensor.untyped_storage()
        found = self._memory.get(storage._cdata)
        if found is None:
            found = self._memory[storage._cdata] = Memory(self.current, StorageWeakRef(storage), made)
        return found

    def receive(self, tensor: Tensor) -> None:
        """Count a message. Its stream has its memory again when it is freed; where others use it, when they have."""
        known, memory = self.clock(HOST), self.memory(tensor)
        held = [x for x in self._messages if x is not memory and (not x.ref.expired() or x.used_by_others(known))]
        self._messages = [*held, memory]
        self.most_messages = max(self.most_messages, len(self._messages))

    def use(self, stream: Hashable, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Issue something to a stream (or do it on the host) that reads and writes memory."""
        self._look_for_freed()
        clock = self._clocks[stream] = _joined(self.clock(stream), self.clock(HOST))
        clock[stream] = clock.get(stream, 0) + 1
        for tensors, writes_it in ((reads, False), (writes, True)):
            for tensor in tensors:
                memory = self.memory(tensor, what)
                use = Use(stream, clock[stream], writes_it, *_bytes_of(tensor))
                self._check(memory, [x for x in memory.uses if use.disturbs(x)], clock, f"{what} on {stream} uses")
                covered = [x for x in memory.uses if use.start <= x.start and x.stop <= use.stop]
                gone = [x for x in covered if writes_it or (x.stream == stream and not x.writes)]
                memory.uses = [x for x in memory.uses if x not in gone] + [use]

    def _check(self, memory: Memory, uses: Iterable[Use], clock: Clock, what: str) -> None:
        for x in uses:
            if clock.get(x.stream, 0) < x.count:
                verb = "writes" if x.writes else "reads"
                self.races.append(f"{self.doing}: {what} what {x.stream} may not be done with; it {verb} {memory.made}")

    def _look_for_freed(self) -> None:
        for key in [key for key, memory in self._memory.items() if memory.ref.expired()]:
            memory = self._memory.pop(key)
            if memory.on_host:
                continue  # the allocator of pinned memory waits for the copies itself
            clock = _joined(self.clock(memory.home), self.clock(HOST))
            for stream in memory.recorded:
                clock = _joined(clock, self.clock(stream))
            self._check(memory, memory.uses, clock, f"{memory.home} gets back")

    # --- what the runtime calls instead of torch's ---

    def on_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host in the current stream."""
        copy = tensor.detach().clone()
        self.memory(copy).on_host = True
        return copy

    def of_the_host(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, known to be in host memory."""
        self.memory(tensor).on_host = True
        return tensor

    def moved(self, tensor: Tensor, _: Any = None) -> Tensor:
        """Copy from the host in the current stream."""
        self.memory(tensor).on_host = True
        self.moved_bytes += tensor.nbytes
        return tensor.clone()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self.memory(tensor).recorded.add(stream.name)


class Stream:
    """A ``torch.cuda.Stream``."""

    def __init__(self, gpu: Gpu, name: Hashable) -> None:
        self.gpu, self.name = gpu, name

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.gpu.wait(self.name, *self.gpu.record(other.name))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.waits.append((self.gpu.doing, "a stream"))
        self.gpu.host_waits(*self.gpu.record(self.name))


class Event:
    """A ``torch.cuda.Event``, which is there when somebody asks: the oracle of progress is :mod:`oracles.nccl`."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at: tuple[int, Clock] | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.at = self.gpu.record(self.gpu.current if stream is None else stream.name)

    def wait(self, stream: Stream | None = None) -> None:
        if self.at is not None:
            self.gpu.wait(self.gpu.current if stream is None else stream.name, *self.at)

    def synchronize(self) -> None:
        if self.at is not None:
            self.gpu.host_waits(*self.at)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Kernels(TorchDispatchMode):
    """Tells a :class:`Gpu` of every operation on tensors: all are kernels in its current stream."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name == "aten::set_":  # changes no memory
            return result
        arguments = zip(func._schema.arguments, args, strict=False)
        named = {x.name: x for x in func._schema.arguments}
        pairs = [*arguments, *((named[key], value) for key, value in (kwargs or {}).items())]
        written = [x for a, value in pairs if a.alias_info and a.alias_info.is_write for x in _tensors(value)]
        changed = {id(x) for x in written}
        read = [x for _, value in pairs for x in _tensors(value) if id(x) not in changed]
        gpu = self._gpu
        if name in WAITS:
            for tensor in read:
                if not gpu.memory(tensor).on_host:
                    gpu.settle(name)
            gpu.use(HOST, name, read, [])
        elif "empty" in name:
            gpu.use(gpu.current, name, [], _tensors(result))  # as whoever had that memory before it
        else:
            gpu.use(gpu.current, name, read, [*written, *_tensors(result)])
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between a tensor's first and its last element."""
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    return first * size, (last + 1) * size if tensor.numel() else first * size


def _joined(one: Clock, other: Clock) -> Clock:
    joined = dict(one)
    for stream, count in other.items():
        joined[stream] = max(joined.get(stream, 0), count)
    return joined


@contextmanager
def in_stream(gpu: Gpu, stream: Stream) -> Iterator[None]:
    """``torch.cuda.stream``."""
    before, gpu.current = gpu.current, stream.name
    try:
        yield
    finally:
        gpu.current = before
