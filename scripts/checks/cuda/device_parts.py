"""Checks in one process: the machine, random numbers, NCCL, memory by class, layer times, and how exact a GPU is."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from checked_models import MODELS
from checking import Check, Figures, Outcome, Part, apart, built, must, needed, serial
from torch import Tensor, nn

from pipeplan.runtime.device import clock_of, settle
from pipeplan.runtime.training.repeatable import Draws
from pipeplan.runtime.training.update.optimizers import optimizer_maker

LEAST_NCCL = (2, 26)  # from which on several communicators of a GPU keep the host's order
LEAST_SHM = 2**30
MIB = 2**20
TIMEOUT = timedelta(minutes=10)


def hardware(check: Check) -> Outcome:
    """What is this machine, and what of it would get in the way of runs?"""
    shm = shutil.disk_usage("/dev/shm") if os.path.exists("/dev/shm") else None
    own: set[Any] = set()
    with suppress(OSError):  # a name that nothing knows
        own = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None)}
    figures: Figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "shm_bytes": shm and shm.total,
        "locked_memory_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "host_addresses": sorted(map(str, own)),
    }
    wrong = []
    if all(str(x).startswith("127.") or x == "::1" for x in own):
        wrong.append("the host's own name stands for the loopback or nothing, so other nodes need GLOO_SOCKET_IFNAME")
    if shm is not None and shm.total < LEAST_SHM:
        wrong.append(f"/dev/shm has {shm.total // MIB} MiB, too little for NCCL between GPUs without peer access")
    words = f"torch {torch.__version__} on {os.cpu_count()} CPUs"
    if check.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch has no type there
        figures |= {
            "gpus": check.gpus,
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": list(nccl),
            "topology": said("nvidia-smi", "topo", "-m"),
            "peer_access": [
                [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(check.gpus)]
                for i in range(check.gpus)
            ],
        }
        words = f"{check.gpus} x {properties.name}, NCCL {'.'.join(map(str, nccl))}, {words}"
        if nccl[:2] < LEAST_NCCL:
            wrong.append(f"NCCL is older than {'.'.join(map(str, LEAST_NCCL))}")
    return Outcome(f"{words}{': ' if wrong else ''}{'; '.join(wrong)}", figures)


def said(*words: str) -> str | None:
    """Return what a command prints, None where there is none."""
    with suppress(OSError):
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    return None


def randomness(check: Check) -> Outcome:
    """Does dropout that is run again drop the same?"""
    drop, draws = nn.Dropout(0.5).to(check.device), Draws(5, check.device)
    x = torch.ones(10_000, device=check.device)

    def dropped(microbatch: int) -> Tensor:
        with draws.of(microbatch, 0):
            return drop(x)

    first, other, again = dropped(3), dropped(4), dropped(3)
    must(torch.equal(first, again), "dropout run again drops something else")
    must(not torch.equal(first, other), "two microbatches lose the same in dropout")
    return Outcome("dropout that is run again drops the same")


def nccl(check: Check) -> Outcome:
    """Does NCCL connect and sum beside gloo, with the options that pairs of ranks get?"""
    needed(check.kind == "cuda", "there is no GPU")
    from pipeplan.runtime.exchange.links import pair_options

    with _alone():
        found = []
        for options in (None, pair_options("nccl", TIMEOUT)):
            group = dist.new_group([0], TIMEOUT, "nccl", options)
            x = torch.ones(1000, device=check.device)
            dist.all_reduce(x, group=group)
            dist.barrier()
            settle(check.device)
            found.append(float(x.sum()))
        must(found == [1000, 1000], f"sums of ones are {found}")
    return Outcome("NCCL connects and sums beside gloo, with few processors of the GPU too")


@contextmanager
def _alone() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as place:
        store = dist.FileStore(f"{place}/store", 1)  # type: ignore[attr-defined]  # not exported for type checkers
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def memory(check: Check) -> Outcome:
    """What takes a GPU's memory beside tensors: the context, NCCL, temporaries of optimizers, what is reserved?"""
    needed(check.kind == "cuda", "nobody counts a CPU's memory")
    from pipeplan.runtime.exchange.links import pair_options

    figures: Figures = {"context_bytes": _outside()}
    with _alone():
        for name, options in (("group", None), ("pair", pair_options("nccl", TIMEOUT))):
            before = _outside()
            dist.all_reduce(torch.ones(2**20, device=check.device), group=dist.new_group([0], TIMEOUT, "nccl", options))
            settle(check.device)
            figures[f"nccl_{name}_of_one_bytes"] = _outside() - before
    before = _outside()
    square = torch.randn(4096, 4096, device=check.device)
    (square @ square).sum().item()
    figures["cublas_bytes"] = torch.cuda.memory_allocated() - 2 * square.nbytes + _outside() - before
    for name, more in (("default", {}), ("fused", {"fused": True})):
        weights = [nn.Parameter(torch.randn(2**22, device=check.device)) for _ in range(16)]
        stepper = torch.optim.Adam(weights, **more)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            stepper.step()
            settle(check.device)
        total = sum(weight.nbytes for weight in weights)
        figures[f"adam_{name}_temporaries_over_weights"] = (torch.cuda.max_memory_allocated() - held) / total
        del weights, stepper
    figures["reserved_over_allocated"] = torch.cuda.memory_reserved() / max(1, torch.cuda.memory_allocated())
    torch.cuda.empty_cache()
    return Outcome(
        f"the context takes {figures['context_bytes'] // MIB} MiB, a group {figures['nccl_group_of_one_bytes'] // MIB} "
        f"and a pair's {figures['nccl_pair_of_one_bytes'] // MIB}, Adam's temporaries "
        f"{figures['adam_default_temporaries_over_weights']:.2f} of the weights (fused: "
        f"{figures['adam_fused_temporaries_over_weights']:.2f})",
        figures,
    )


def _outside() -> int:
    """Return the bytes of the GPU that are in use and not torch's: this process's and others'."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def profiling(check: Check, name: str) -> Outcome:
    """Are layer times those of whole steps, and saved bytes those that a whole forward keeps?"""
    chain = check.profile(name).chain
    layers, loss, data = built(check, name)
    stepper = optimizer_maker("sgd", 0.0)(list(layers.parameters()))
    clock = clock_of(check.device)
    x, target = data(0)
    times, kept = [], None
    for _ in range(12):
        layers.zero_grad(set_to_none=True)
        settle(check.device)
        before = torch.cuda.memory_allocated() if check.kind == "cuda" else None
        start = clock.mark()
        value = loss(layers(x), target)
        if before is not None:
            kept = torch.cuda.memory_allocated() - before
        value.backward()
        end = clock.mark()
        stepper.step()
        clock.settle()
        times.append(clock.between(start, end))
    whole = statistics.median(times[4:])
    parts = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    saved = sum(layer.saved_bytes or 0 for layer in chain.layers)
    figures = {
        "device": chain.device,
        "whole_step_ns": whole,
        "layers_over_whole": parts / whole,
        "saved_bytes": saved,
        "forward_keeps_bytes": kept,
        "saved_over_kept": None if not kept else saved / kept,
    }
    words = f"layers take {parts / whole:.2f} of the whole step"
    return Outcome(f"{words}, saved bytes are {saved / kept:.2f} of those kept" if kept else words, figures)


def noise(check: Check) -> Outcome:
    """By how much do two equal plain trainings differ?"""
    found = {name: apart(*(serial(built(check, name), 6)[0] for _ in range(2))) for name in ("cnn", "gpt")}
    worst = max(found.values())
    check.noise.append(worst)
    return Outcome(f"two equal plain trainings differ by {worst:.1e} at most", {**found, "worst": worst})


DEVICE = {
    "hardware": Part(hardware, "What is this machine, and what would get in the way?", 5),
    "randomness": Part(randomness, "Does dropout that is run again drop the same?", 3),
    "nccl": Part(nccl, "Does NCCL connect and sum beside gloo?", 15),
    "memory": Part(memory, "What takes a GPU's memory beside tensors?", 20),
    **{
        f"profiling_{name}": Part(
            lambda check, name=name: profiling(check, name), f"Are the layers' times those of a whole {name}?", 25
        )
        for name in MODELS
        if name not in ("tied", "tiny")
    },
    "noise": Part(noise, "By how much do two equal plain trainings differ?", 15),
}
