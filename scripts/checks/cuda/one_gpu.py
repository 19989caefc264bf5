"""What would NCCL do between ranks that share one GPU, which it refuses? A stand-in with its semantics, and no others.

Each group has a stream of its own. What is issued in it waits for what the current stream had been given, and blocks
that stream, never the host, until the other ranks come: a message goes through a mailbox in memory that both processes
have opened (CUDA's IPC), and streams wait for words there (``cuStreamWaitValue32``). ``Work.wait`` lets the current
stream wait. A message is through when it has been taken. Messages of one pair of ranks are taken in the order sent.
What it cannot show are NCCL's kernels on the GPU's processors, its bandwidth and its watchdog.

On a CPU a thread of the group stands for its stream, so that all but the driver's calls can be rehearsed there.

A rank has it once it has imported this: its models and data are those of :mod:`checked_models`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import queue
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from checked_models import FOLDER, dying, gpt, watched  # noqa: F401  # under these names runs find data here
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from pipeplan.runtime.engine import own_stages, preparation
from pipeplan.runtime.exchange import links
from pipeplan.runtime.training.update.exchanges import OnThread

NAME = "one_gpu"
SLOT = 4 << 20  # bytes that go at a time
SLOTS = 2  # of a mailbox
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
LOOK_S = 1e-5
LATE_CYCLES = int(os.environ.get("CHECKED_LATE", "0"))  # of the GPU's clock, by which streams are late at random


class Mailbox(Protocol):
    """Memory and two words between a sender and a receiver: how many slots were filled, and how many emptied."""

    room: Tensor

    def wait(self, word: int, value: int) -> None:
        """Let the current stream wait until a word is at least ``value``."""

    def write(self, word: int, value: int) -> None:
        """Let the current stream set a word."""


FILLED, EMPTIED = 0, 1


class OnGpu:
    """A mailbox in the GPU's memory; ``handles`` are the sender's tensors, as another process opens them."""

    def __init__(self, handles: bytes | None = None) -> None:
        if handles is None:
            self.room = torch.empty(SLOT * SLOTS, dtype=torch.uint8, device="cuda")
            self.words = torch.zeros(2, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
        else:
            self.room, self.words = (open_it(*arguments) for open_it, arguments in pickle.loads(handles))

    @property
    def handles(self) -> bytes:
        """What another process opens it by."""
        return pickle.dumps([reduce_tensor(self.room), reduce_tensor(self.words)])

    @cached_property
    def _driver(self) -> Any:
        return ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, word: int, value: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(self.words.data_ptr() + 4 * word)
        code = getattr(self._driver, name)(stream, address, ctypes.c_uint32(value), ctypes.c_uint(AT_LEAST))
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def wait(self, word: int, value: int) -> None:
        """Let the current stream wait."""
        self._call("cuStreamWaitValue32_v2", word, value)

    def write(self, word: int, value: int) -> None:
        """Let the current stream write."""
        self._call("cuStreamWriteValue32_v2", word, value)


class OnHost:
    """A mailbox in a file that two processes map; the thread that stands for a stream waits by looking."""

    def __init__(self, handles: bytes | None = None) -> None:
        self.handles = handles or f"{tempfile.mkdtemp(dir=FOLDER)}/mailbox".encode()
        size = SLOT * SLOTS + 8
        whole = torch.from_file(self.handles.decode(), shared=True, size=size, dtype=torch.uint8)
        self.room, self.words = whole[: SLOT * SLOTS], whole[SLOT * SLOTS :].view(torch.int32)
        if handles is not None:  # both have it now
            shutil.rmtree(os.path.dirname(handles.decode()))

    def wait(self, word: int, value: int) -> None:
        """Wait."""
        while int(self.words[word]) < value:
            time.sleep(LOOK_S)

    def write(self, word: int, value: int) -> None:
        """Write."""
        self.words[word] = value


class Channel:
    """One direction between two ranks of a group; connected, as NCCL's, at its first message, at which hosts wait."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox, self._slots = mailbox, 0

    def send(self, piece: Tensor) -> None:
        """Put at most a slot's bytes into the mailbox, when there is room."""
        self._mailbox.wait(EMPTIED, max(0, self._slots + 1 - SLOTS))
        self._slot(piece).copy_(piece, non_blocking=True)
        self._slots += 1
        self._mailbox.write(FILLED, self._slots)

    def receive(self, piece: Tensor) -> None:
        """Take what comes next."""
        self._mailbox.wait(FILLED, self._slots + 1)
        piece.copy_(self._slot(piece), non_blocking=True)
        self._slots += 1
        self._mailbox.write(EMPTIED, self._slots)

    def taken(self) -> None:
        """Wait until all that was sent has been taken."""
        self._mailbox.wait(EMPTIED, self._slots)

    def _slot(self, piece: Tensor) -> Tensor:
        first = self._slots % SLOTS * SLOT
        return self._mailbox.room[first : first + piece.numel()]


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return the bytes of a contiguous tensor in parts of a slot each; an empty one sends nothing."""
    return tensor.reshape(-1).view(torch.uint8).split(SLOT) if tensor.numel() else []


class Issued(dist.Work):  # type: ignore[misc]  # torch has no type there
    """Something issued in a group's stream: :meth:`wait` lets the current stream wait for it, or on a CPU the host."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept: Sequence[Tensor] = kept  # until somebody waits, as NCCL's works do
        self.event: Any = None
        self.over = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let what comes next wait."""
        if self.event is not None:
            self.event.wait()
        else:
            self.over.wait()
            if self.error is not None:
                raise RuntimeError(str(self.error))
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return bool(self.event.query()) if self.event is not None else self.over.is_set()


class OneGpu(dist.ProcessGroup):
    """A process group over mailboxes, with a stream of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._own_rank, self._ranks = store, rank, size
        self._channels: dict[tuple[int, int], Channel] = {}
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._random = random.Random(rank)
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._stream is None:
            threading.Thread(target=self._serve, daemon=True).start()

    def getBackendName(self) -> str:  # torch's name
        """Return how torch knows it."""
        return NAME

    # --- what torch calls

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Issued:
        """Send a tensor to rank ``to`` of the group."""
        channel = self._channel(self._own_rank, to)

        def sent() -> None:
            for piece in pieces(tensors[0]):
                channel.send(piece)
            channel.taken()

        return self._issue(sent, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Issued:
        """Receive a tensor from rank ``source`` of the group."""
        channel = self._channel(source, self._own_rank)

        def received() -> None:
            for piece in pieces(tensors[0]):
                channel.receive(piece)

        return self._issue(received, tensors)

    def alltoall_base(
        self, into: Tensor, source: Tensor, coming: list[int], going: list[int], options: Any = None
    ) -> Issued:
        """Give each rank its part of ``source``."""
        outgoing, incoming = list(source.split(going)), list(into.split(coming))
        others = [(k, self._beside(k), self._beside(-k)) for k in range(1, self._ranks)]
        channels = [(self._channel(self._own_rank, to), self._channel(come, self._own_rank)) for _, to, come in others]

        def exchanged() -> None:
            incoming[self._own_rank].copy_(outgoing[self._own_rank])
            for (_, to, come), (there, here) in zip(others, channels, strict=True):
                _both(there, pieces(outgoing[to]), here, pieces(incoming[come]))

        return self._issue(exchanged, [into, source])

    def allreduce(self, tensors: list[Tensor], options: Any) -> Issued:
        """Add up, or take the largest of, everybody's tensor, in the order of the ranks."""
        (tensor,) = tensors
        most = options.reduceOp == dist.ReduceOp.MAX
        others = [(self._beside(k), self._beside(-k)) for k in range(1, self._ranks)]
        channels = [(self._channel(self._own_rank, to), self._channel(come, self._own_rank)) for to, come in others]

        def reduced() -> None:
            parts = {self._own_rank: tensor.clone()}
            for (_, come), (there, here) in zip(others, channels, strict=True):
                parts[come] = torch.empty_like(tensor)
                _both(there, pieces(parts[self._own_rank]), here, pieces(parts[come]))
            ordered = torch.stack([parts[rank] for rank in range(self._ranks)])
            tensor.copy_(ordered.amax(0) if most else ordered.sum(0))

        return self._issue(reduced, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Issued:
        """Give all what the root has."""
        (tensor,), root = tensors, options.rootRank
        if root != self._own_rank:
            return self.recv(tensors, root)
        channels = [self._channel(root, other) for other in range(self._ranks) if other != root]

        def given() -> None:
            for channel in channels:
                for piece in pieces(tensor):
                    channel.send(piece)

        return self._issue(given, tensors)

    def barrier(self, options: Any = None) -> Issued:
        """Wait for all."""
        return self.allreduce([torch.zeros(1, device="cuda" if self._stream else "cpu")], dist.AllreduceOptions())

    # --- streams and channels

    def _issue(self, work: Callable[[], None], tensors: Sequence[Tensor]) -> Issued:
        issued = Issued(tensors)
        if self._stream is None:
            self._orders.put((work, issued))
            return issued
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._dawdle()
            work()
            issued.event = torch.cuda.Event()
            issued.event.record()
        self._dawdle()
        return issued

    def _dawdle(self) -> None:
        """Be late at random, so that what doesn't wait for a stream reads what isn't there yet."""
        if LATE_CYCLES and self._random.random() < 0.3:
            torch.cuda._sleep(self._random.randrange(LATE_CYCLES))  # type: ignore[no-untyped-call]

    def _serve(self) -> None:
        while True:
            work, issued = self._orders.get()
            try:
                work()
            except BaseException as error:
                issued.error = error
            issued.over.set()

    def _beside(self, steps: int) -> int:
        return (self._own_rank + steps) % self._ranks

    def _channel(self, source: int, to: int) -> Channel:
        if (source, to) not in self._channels:
            kind = OnHost if self._stream is None else OnGpu
            key = f"{source}>{to}"
            if source == self._own_rank:
                mailbox = kind()
                self._store.set(key, mailbox.handles)
            else:
                mailbox = kind(self._store.get(key))
            self._channels[source, to] = Channel(mailbox)
        return self._channels[source, to]


def _both(there: Channel, going: Sequence[Tensor], here: Channel, coming: Sequence[Tensor]) -> None:
    """Send and receive by turns, so that of ranks which all do so none waits for ever."""
    for k in range(max(len(going), len(coming))):
        if k < len(going):
            there.send(going[k])
        if k < len(coming):
            here.receive(coming[k])


def install() -> None:
    """Let this rank have the stand-in wherever the runtime asks for NCCL."""
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, OneGpu, devices=["cpu", "cuda"])
    new_group = dist.new_group

    def made(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **more: Any) -> Any:
        return new_group(ranks, timeout, NAME if backend == "nccl" else backend, **more)

    dist.new_group = made
    links.pair_options = lambda *_, **__: nullcontext()  # type: ignore[assignment]  # unused, as made drops it
    preparation.exchange_of = lambda gpus: "nccl"
    if not torch.cuda.is_available():  # nor has it events: a thread waits
        own_stages.OnStream = lambda exchange, _: OnThread(exchange)  # type: ignore[assignment, misc]


if multiprocessing.parent_process() is not None:  # a rank, not the process that starts them
    install()
