"""Where does a rank compute, and what marks moments of that? A CPU, a GPU of its own or shared, and their clocks.

On a GPU operations are queued: the host runs ahead, and reading a value would wait for everything before it. So values
are copied out asynchronously (:func:`on_host`) and looked at when the device is there (``measure.recorder``). Sums on
a GPU may differ in the last bits from run to run; ``torch.use_deterministic_algorithms`` in the model's module helps.
"""

from __future__ import annotations

import ctypes
import os
import platform as host
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import BadInput, PipeplanError, RunFailed
from ..problem import Chain, PassWork
from ..problem import Exchange as GroupExchange
from ..registry import Late

Kind = Literal["cpu", "cuda"]
Choice = Literal["auto", "cpu", "cuda"]
Exchange = Literal["gloo", "staged", "nccl"]  # between CPUs; between GPUs through host memory; between GPUs

unseen_gpus = Late("runtime.surroundings:unseen_gpus")
CPU: Final = torch.device("cpu")
LOOKS_S: Final = (5e-5, 2e-4)  # pauses between two looks at an event, growing from the first to the second
LONG: Final = timedelta(minutes=10)  # for what needs no other rank
LAST_RESORT: Final = timedelta(minutes=2)  # by which torch's watchdog is later than we are
FILL: Final = 0.8  # share of the free memory that holding a whole model may need
LARGEST_IN_HEAP: Final = 32 << 20  # bytes, of one tensor; glibc takes no more
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of them
NCCL: Final = {  # torch's watchdog of exchanges over NCCL, where the user doesn't say otherwise
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # it ends the process and doesn't first wait for NCCL, which may hang
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # without a page of C++ that nobody asked for
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # the host never waits there, where nothing can be told to it
}


class DeviceWaits(PipeplanError):
    """A device doesn't come to the end of its work: it waits for another rank, as all that is its own ends."""


def kind_of(choice: Choice, chain: Chain) -> Kind:
    """Return the kind of device to run on: ``auto`` is a GPU, unless the profile is of a CPU or of none that is known
    and torch sees no GPU.

    What a plan promises holds for its profile's device. BadInput when there is no GPU.
    """
    if choice == "auto" and (chain.of_cpu or not (chain.device or torch.cuda.is_available())):
        return "cpu"
    if choice == "cpu" or torch.cuda.is_available():
        return "cpu" if choice == "cpu" else "cuda"
    unseen = unseen_gpus()
    why = "torch sees no GPU here" if unseen is None else f"{unseen[0]}: {unseen[1]}"
    asked = "--device cuda" if choice == "cuda" else f"the plan is for {chain.device}, and --device is auto"
    raise BadInput(f"{asked}: {why}; --device cpu runs on the CPU")


def own_device(kind: Kind, local_rank: int) -> torch.device:
    """Return the device of the ``local_rank``-th process of this machine, and make it torch's current one.

    With fewer GPUs than processes they go round. A process that sees one GPU alone takes that.
    """
    if kind == "cpu":
        return CPU
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def sharing(kind: Kind, ranks: int, by_threads: bool = False) -> str | None:
    """Return why tensors of GPUs travel through host memory, None if they don't.

    That is where ranks share GPUs, and for messages that threads receive (``by_threads``).
    """
    gpus = torch.cuda.device_count() if kind == "cuda" else ranks
    if gpus < ranks:
        return f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}: what they exchange travels through host memory"
    if kind == "cuda" and by_threads:
        return "messages come in any order, so threads receive them, through host memory; sums travel over NCCL"
    return None


def label(device: torch.device) -> str:
    """Return the name for reports: ``cpu``, or the GPU's model."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def gpu_of(device: torch.device, machine: str) -> str | None:
    """Return what tells this ``machine``'s GPU from all others, None for a CPU."""
    return None if device.type == "cpu" else f"{machine} {torch.cuda.get_device_properties(device).uuid}"


def exchange_of(gpus: Sequence[str | None]) -> Exchange:
    """Return how tensors of ranks on these :func:`gpu_of` travel.

    NCCL refuses two ranks on one GPU; where any two share, all exchange through the host. RunFailed when some ranks
    have GPUs and others don't.
    """
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    if not without:
        return "nccl" if len(set(gpus)) == len(gpus) and dist.is_nccl_available() else "staged"
    if len(without) < len(gpus):
        raise RunFailed(f"rank {without[0]} sees no GPU, others do; run all with --device cpu or give it one")
    return "gloo"


def place(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move ``modules`` to ``device`` in place; what is one weight or one buffer in several of them stays one.

    BadInput for distinct weights over one memory, as each would get its own.
    """
    if device.type != "cpu":
        _refuse_aliases(modules)
    buffers: dict[Tensor, Tensor] = {}  # those that were, kept until all are moved, and what they are now
    for part in (part for module in modules for part in module.modules()):
        for name, buffer in part._buffers.items():
            if buffer is not None:
                if buffer not in buffers:
                    buffers[buffer] = buffer.to(device)
                part._buffers[name] = buffers[buffer]
    for module in modules:
        module.to(device)


def _refuse_aliases(modules: Sequence[nn.Module]) -> None:
    """Raise BadInput for distinct weights that overlap in memory; those side by side in one storage may well part."""
    seen: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for module in modules:
        for name, weight in module.named_parameters():
            start = int(weight.storage_offset())
            stop = start + 1 + sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride(), strict=True))
            others = seen.setdefault(weight.untyped_storage()._cdata, [])
            for begin, end, other_name, other in others:
                if other is not weight and begin < stop and start < end:
                    raise BadInput(
                        f"model: the weights {other_name} and {name} are two over one memory, which come apart on a "
                        "GPU; use one nn.Parameter for both"
                    )
            others.append((start, stop, name, weight))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; to a GPU from pinned memory, so that the host doesn't wait for the copy."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` in host memory, which is there when the device has got here; on a CPU itself."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return another queue of the device's; None on a CPU, which has none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def settle(device: torch.device, timeout: timedelta = LONG) -> None:
    """Wait until the device has done what the current stream was given, and all that this waits for in others."""
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        await_event(event, timeout)


def await_event(event: Any, timeout: timedelta) -> None:
    """Wait until the device has come to ``event``; DeviceWaits where that takes longer than ``timeout``.

    The host looks again and again: were it to wait in the driver, nothing could end that when another rank has gone.
    """
    until, pause = time.monotonic() + timeout.total_seconds(), LOOKS_S[0]
    while not event.query():
        if time.monotonic() > until:
            raise DeviceWaits(f"the GPU has waited for {timeout.total_seconds():g} s")
        time.sleep(pause)
        pause = min(2 * pause, LOOKS_S[1])


def watch_last(device: torch.device) -> None:
    """Make torch's own watchdog of a GPU's exchanges the last resort, before the first of them."""
    for name, value in NCCL.items() if device.type == "cuda" else ():
        os.environ.setdefault(name, value)


def group_timeout(timeout: timedelta, backend: str) -> timedelta:
    """Return the timeout of a process group whose exchanges we wait ``timeout`` for."""
    return timeout + LAST_RESORT if backend == "nccl" else timeout


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's random numbers: the CPU's, and a GPU's after it, in one row of bytes."""
    state = torch.get_rng_state()
    return state if device.type == "cpu" else torch.cat([state, torch.cuda.get_rng_state(device)])


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set what :func:`random_state` returned; a state without a GPU's leaves that as it is."""
    length = torch.get_rng_state().numel()
    torch.set_rng_state(state[:length])
    if device.type == "cuda" and state.numel() > length:
        torch.cuda.set_rng_state(state[length:], device)


@contextmanager
def freed_kept() -> Iterator[None]:
    """Let memory that this process frees within the context stay its own for as long.

    glibc gives what lies free at the end of its heap back, and the system hands it out again page by page: 2 ms for 4
    MB, in the backwards of some runs and not of others. What is larger than 32 MB goes back in any case.
    """
    libc = ctypes.CDLL(None) if host.libc_ver()[0] == "glibc" else None
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        libc.mallopt(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        if libc is not None:
            libc.mallopt(_TRIM_THRESHOLD, 2 * LARGEST_IN_HEAP)
            libc.malloc_trim(0)


def begin_peak(device: torch.device) -> None:
    """Let :func:`peak_bytes` count from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, ...] | None:
    """Return the most bytes of a GPU that a rank's tensors took, and that torch held for them; what was in use beside
    that at the end, by CUDA's context, NCCL and whoever shares it; and how often torch had to give some back to get
    others. None on a CPU, where nobody counts.
    """
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        total - free - torch.cuda.memory_reserved(device),
        torch.cuda.memory_stats(device)["num_alloc_retries"],
    )


def free_bytes(device: str) -> int:
    """Return the memory that is free on ``device``: of a CPU what the system can give without swapping."""
    if torch.device(device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch keeps it for itself
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


# --- clocks -----------------------------------------------------------------------------------------------------------


class Clock:
    """Marks on a time line, read once it is settled: here in ns of the host's monotonic clock, read at once.

    ``warm_s`` is how long the device has to be at work before it is at full speed.
    """

    warm_s = 0.0

    def mark(self) -> Any:
        """Return a mark at this moment of the device's work."""
        return time.perf_counter_ns()

    @property
    def host(self) -> Clock:
        """What marks the host's own work."""
        return self

    def settle(self) -> None:
        """Wait until all marks can be read."""

    def between(self, start: Any, end: Any) -> int:
        """Return the nanoseconds from one mark to a later one."""
        ns: int = round(end - start)
        return ns

    def exchanges(self, start: Any, end: Any, backward: bool) -> list[GroupExchange]:
        """Return what a group's ranks exchanged between two marks, where that is counted."""
        return []

    def work(self, start: Any, end: Any) -> PassWork | None:
        """Return what was asked of the device between two marks, where that is counted."""
        return None


class ThreadClock(Clock):
    """CPU time of the calling thread: one thread's work, whatever else the machine is busy with."""

    def mark(self) -> int:
        """Return the nanoseconds that this thread has run."""
        return time.thread_time_ns()


class CudaClock(Clock):
    """Events in the stream of a GPU's kernels."""

    warm_s = 1.0  # idle clocks are a fraction of those under load

    def mark(self) -> Any:
        """Return an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @property
    def host(self) -> Clock:
        """The monotonic clock, as the host works beside the GPU."""
        return Clock()

    def settle(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def between(self, start: Any, end: Any) -> int:
        """Return the nanoseconds between two events."""
        return super().between(0, start.elapsed_time(end) * 1e6)


def clock_of(device: torch.device) -> Clock:
    """Return the clock of ``device``."""
    return CudaClock() if device.type == "cuda" else Clock()
