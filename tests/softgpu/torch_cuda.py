"""Lets ``torch.cuda`` of a torch for CPUs see GPUs that aren't there (softgpu.cpp).

torch loads it by its entry point ``torch.backends``, in every process with the environment of
:func:`softgpu.build.environment`. SOFTGPU is how many GPUs there are, SOFTGPU_FOLDER where processes leave what they
did, and find a file ``knobs`` that goes before SOFTGPU_BYTES (memory of a GPU) and SOFTGPU_DELAY_US (how late each
kernel is, on average). Its ``planted`` are other texts for modules, by their names, in processes that are forked.
"""

import atexit
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

HEARD: list[tuple[str, str, str]] = []
"""Kind, what, and where in pipeplan: waits of the host, new segments of memory, and what tests have noted."""


def note(what: str) -> None:
    """Note something between what else is heard."""
    HEARD.append(("note", what, ""))


def install() -> None:
    """Register the device, and patch what torch.cuda asks of its own C++."""
    if not os.environ.get("SOFTGPU"):
        return
    import _softgpu

    _softgpu.hear(lambda kind, what: HEARD.append((kind, what, _place())))
    _configure()
    os.register_at_fork(after_in_child=lambda: _plant(_configure()))
    atexit.register(_leave_report)
    leave = os._exit

    def leave_reported(code: int) -> None:
        _leave_report()
        leave(code)

    os._exit = leave_reported  # type: ignore[assignment]
    _patch_cuda(_softgpu)
    _patch_distributed(_softgpu)


def _place() -> str:
    """The calls in pipeplan's runtime that lead here, from the inside."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # in a thread of autograd there is none of ours
        folder, _, file = frame.f_code.co_filename.rpartition("pipeplan/runtime/")
        if folder:
            found.append(f"{file}:{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


def _configure() -> dict[str, str]:
    import _softgpu

    HEARD.clear()
    folder = os.environ.get("SOFTGPU_FOLDER", "")
    knobs: dict[str, Any] = {"devices": 1, "bytes": 8 << 30, "delay_us": 0, "one_device": 1}
    names = {
        "devices": "SOFTGPU", "bytes": "SOFTGPU_BYTES", "delay_us": "SOFTGPU_DELAY_US", "one_device": "SOFTGPU_ONE",
    }  # fmt: skip
    knobs |= {key: int(os.environ[name]) for key, name in names.items() if name in os.environ}
    file = Path(folder, "knobs")
    if folder and file.exists():
        knobs |= json.loads(file.read_text())
    planted: Any = knobs.pop("planted", {})
    _softgpu.configure(*knobs.values(), os.path.join(folder, "races") if folder else "")
    return planted


def _plant(planted: dict[str, str]) -> None:
    """Let the functions of modules be what other texts for these make them."""
    for name, text in planted.items():
        module = import_module(name)
        left, codes = [compile(text, str(module.__file__), "exec")], {}
        while left:
            code = left.pop()
            codes[code.co_qualname] = code
            left += [x for x in code.co_consts if isinstance(x, CodeType)]
        for x in _functions(module):
            x.__code__ = codes[x.__code__.co_qualname]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module's text has made: its own, of its classes, and what wrappers and closures hold."""
    left: list[Any] = list(vars(module).values())
    seen: set[int] = set()
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, FunctionType):
            if x.__code__.co_filename == module.__file__:
                yield x
            left += [*vars(x).values(), *(cell.cell_contents for cell in x.__closure__ or ())]
        elif isinstance(x, type):
            left += vars(x).values() if x.__module__ == module.__name__ else ()
        elif isinstance(x, staticmethod | classmethod):
            left.append(x.__func__)
        elif isinstance(x, property):
            left += [x.fget, x.fset]


def _leave_report() -> None:
    """Write what this process did with the device, if anything."""
    import _softgpu

    folder = os.environ.get("SOFTGPU_FOLDER")
    if not folder or not os.path.isdir(folder) or not _softgpu.kernels():
        return
    memory = _softgpu.memory(_softgpu.device())
    report = {"heard": HEARD, "exchanges": _softgpu.exchanges(), "kernels": _softgpu.kernels(), "memory": memory}
    whole = Path(folder, f"{os.getpid()}.json")
    part = Path(folder, f"{os.getpid()}-{threading.get_ident()}.part")  # one thread may leave as another one leaves
    part.write_text(json.dumps(report))
    part.rename(whole)


def _patch_cuda(native: Any) -> None:
    import torch

    cuda, accelerator = torch.cuda, torch.accelerator

    def index(device: Any = None) -> int:
        found = device if device is None or isinstance(device, int) else torch.device(device).index
        return native.device() if found is None else found

    def device(chosen: Any = None) -> torch.device:
        return torch.device("cuda", index(chosen))

    def current_stream(chosen: Any = None) -> Any:
        return accelerator.current_stream(device(chosen))

    class Stream(torch.Stream):
        def __new__(cls, chosen: Any = None, priority: int = 0, **more: Any) -> Any:
            return (
                super().__new__(cls, **more) if more else super().__new__(cls, device=device(chosen), priority=priority)
            )

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)

        def elapsed_time(self, other: Any) -> float:  # torch.Event's takes no subclasses
            return float(native.elapsed(self.event_id, other.event_id))

        __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

        def record(self, stream: Any = None) -> None:
            super().record(current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            super().wait(current_stream() if stream is None else stream)

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        if chosen is None:
            yield
            return
        on, before = native.device(), accelerator.current_stream(chosen.device)
        native.set_device(chosen.device.index)
        accelerator.set_stream(chosen)
        try:
            yield
        finally:
            accelerator.set_stream(before)
            native.set_device(on)

    def exchange_device(number: int) -> int:
        before: int = native.device()
        if number >= 0:
            native.set_device(number)
        return before

    def memory(chosen: Any = None) -> dict[str, int]:
        return native.memory(index(chosen))

    def memory_stats(chosen: Any = None) -> dict[str, int]:
        found = memory(chosen)
        return {
            "allocated_bytes.all.current": found["allocated"],
            "allocated_bytes.all.peak": found["peak"],
            "reserved_bytes.all.peak": found["peak_reserved"],
            "num_alloc_retries": 0,
        }

    def properties(chosen: Any = None) -> Any:
        return SimpleNamespace(
            name="GPU in software", total_memory=memory(chosen)["bytes"], multi_processor_count=132, major=9, minor=0,
            uuid=f"softgpu-{os.environ.get('SOFTGPU_HOST', '')}-{index(chosen)}",
        )  # fmt: skip

    def seed(number: Any) -> None:
        native.seed(int(number) % 2**64, native.device())

    def seed_all(number: Any) -> None:
        for i in range(native.devices()):
            native.seed(int(number) % 2**64, i)

    patches: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": native.devices,
        "current_device": native.device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "set_device": lambda chosen: native.set_device(index(chosen)),
        "synchronize": lambda chosen=None: accelerator.synchronize(device(chosen)),
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "set_stream": accelerator.set_stream,
        "default_stream": lambda chosen=None: Stream(stream_id=0, device_index=index(chosen), device_type=1),
        "memory_allocated": lambda chosen=None: memory(chosen)["allocated"],
        "max_memory_allocated": lambda chosen=None: memory(chosen)["peak"],
        "memory_reserved": lambda chosen=None: memory(chosen)["reserved"],
        "max_memory_reserved": lambda chosen=None: memory(chosen)["peak_reserved"],
        "mem_get_info": lambda chosen=None: (
            memory(chosen)["bytes"] - memory(chosen)["reserved"],
            memory(chosen)["bytes"],
        ),
        "reset_peak_memory_stats": lambda chosen=None: native.reset_peak(index(chosen)),
        "memory_stats": memory_stats,
        "empty_cache": lambda: None,
        "get_device_name": lambda chosen=None: "GPU in software",
        "get_device_capability": lambda chosen=None: (9, 0),
        "get_device_properties": properties,
        "can_device_access_peer": lambda one, other: True,
        "is_bf16_supported": lambda *_, **__: True,
        "manual_seed": seed,
        "manual_seed_all": seed_all,
        "get_rng_state": lambda chosen="cuda": native.generator(index(chosen)),
        "set_rng_state": lambda state, chosen="cuda": native.set_generator(index(chosen), state.clone()),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda at, size, _: native.pin(at, size) or 0, cudaHostUnregister=native.unpin
        ),
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": lambda mode: None,  # every wait is heard anyway
    }
    for name, value in patches.items():
        setattr(cuda, name, value)
    cuda.streams.Stream, cuda.streams.Event = Stream, Event  # type: ignore[misc]
    torch.backends.cuda.is_built = lambda: True


def _patch_distributed(native: Any) -> None:
    import torch.cuda.nccl
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.config, self._timeout, self.is_high_priority_stream = SimpleNamespace(), None, is_high_priority_stream

    class Meta(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, native.Nccl)

    class ProcessGroupNCCL(metaclass=Meta):
        def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
            return native.Nccl(dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout), rank, size)

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    for module in (dist, c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined, misc, assignment]
        module.is_nccl_available = lambda: True  # type: ignore[assignment]
    c10d._NCCL_AVAILABLE = True
    destroy = dist.destroy_process_group

    def destroy_reported(*group: Any) -> None:
        _leave_report()  # whoever has started this rank may end it soon
        destroy(*group)

    dist.destroy_process_group = destroy_reported
    torch.cuda.nccl.version = lambda: (2, 28, 9)  # type: ignore[assignment]
