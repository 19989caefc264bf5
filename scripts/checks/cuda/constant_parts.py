"""Which constants of a GPU do estimates take, and how near are estimates to what layers take? Measured, beside them.

What is found is an entry for ``pipeplan/files/machines/accelerators.json``, or for a FILE.json of one's own.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from checking import Check, Figures, Outcome, Part, needed
from torch import Tensor, nn

import pipeplan as pp
from pipeplan.cost.roofline import Product
from pipeplan.files.machines.accelerators import Accelerator, accelerators
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.carry import carried
from pipeplan.problem import Chain, Platform, Problem
from pipeplan.runtime.device import clock_of, settle

GIB: Final = 2**30
REPEATS: Final = 10
SMALL_OPERATIONS: Final = 500
MEMORY, BANDWIDTH = 1 << 50, 12 * 10**9  # of a machine where time alone counts: bytes; bytes/s, of PCIe 3 x16


def entry_of(check: Check) -> tuple[str, Accelerator]:
    """Return the entry of the table that is of this GPU; of a rehearsal any."""
    name = torch.cuda.get_device_name().lower().replace("-", " ") if check.kind == "cuda" else "h200"
    found = max((key for key in accelerators() if key.split("-")[0] in name.split()), key=len, default="")
    needed(bool(found), f"the table has no entry for a {name}")
    return found, accelerators()[found]


def median_ns(check: Check, work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the median time on the device of ``work``."""
    clock, times = clock_of(check.device), []
    for _ in range(repeats + 3):
        start = clock.mark()
        work()
        end = clock.mark()
        clock.settle()
        times.append(clock.between(start, end))
    return statistics.median(times[3:])


def warmed(check: Check, seconds: float = 1.0) -> None:
    """Let the clocks rise: idle ones are at a fifth of those under load."""
    square = torch.randn(2048, 2048, device=check.device)
    until = time.monotonic() + (seconds if check.kind == "cuda" else 0.05)
    while time.monotonic() < until:
        square = (square @ square).clamp_(-1, 1)
        settle(check.device)


def constants(check: Check) -> Outcome:
    """What does this GPU reach of its data sheet: copies, products, small kernels, and its host?"""
    name, entry = entry_of(check)
    warmed(check)
    figures: Figures = {"entry": name, "copies": {}, "products": {}}
    for size in (GIB // 16, GIB // 4, 2 * GIB) if check.kind == "cuda" else (2**20, 2**22):
        source = torch.empty(size, dtype=torch.uint8, device=check.device)
        into = torch.empty_like(source)
        figures["copies"][size] = 2 * size / median_ns(check, lambda into=into, source=source: into.copy_(source)) * 1e9
    figures["bandwidth_share"] = max(figures["copies"].values()) / entry.bandwidth_bytes
    del source, into
    for dtype in ("bfloat16", "float16", "float32", "tf32"):
        figures["products"][dtype] = _products(check, entry, dtype)
    figures["compute_share"] = statistics.median(
        row["share"] / row["shape_share"] for row in figures["products"]["bfloat16"].values()
    )
    figures["kernel_ns"] = _kernel_ns(check)
    figures |= _host(check)
    proposed = {
        "compute_share": _share(figures["compute_share"]),
        "bandwidth_share": _share(figures["bandwidth_share"]),
        "launch": f"{round(figures['kernel_ns'])}ns",
        "host_time": f"{round(figures['forward_host_ns'])}ns,{round(figures['backward_host_ns'])}ns",
    }
    figures["proposed"] = proposed
    file = check.folder / "measured_gpu.json"
    data = {key: getattr(entry, key) for key in ("name", "memory", "bandwidth", "link", "units", "tflops")}
    file.write_text(json.dumps(data | proposed | {"rates": {}, "source": "measured"}))
    return Outcome(f"{name}: {proposed}", figures)


def _kernel_ns(check: Check) -> float:
    """Return what a kernel takes that does next to nothing, behind others, so that no host is waited for."""
    few, large = torch.ones(64, device=check.device), torch.randn(8192 if check.kind == "cuda" else 64, 64)
    large = (large @ large.T).to(check.device)
    clock, times = clock_of(check.device), []
    for _ in range(REPEATS):
        for _ in range(8):
            large @ large
        start = clock.mark()
        for _ in range(SMALL_OPERATIONS):
            few.add_(1)
        end = clock.mark()
        clock.settle()
        times.append(clock.between(start, end) / SMALL_OPERATIONS)
    return statistics.median(times)


def _share(found: float) -> float:
    """Return a share that the table takes, also of a rehearsal's CPU."""
    return round(min(max(found, 0.001), 1.0), 3)


def _products(check: Check, entry: Accelerator, dtype: str) -> Mapping[str, Figures]:
    found: dict[str, Figures] = {}
    real = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    sizes = ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 768, 3072), (4096, 1024, 4096), (16384, 1024, 1024))
    for rows, depth, columns in sizes if check.kind == "cuda" else ((64, 64, 64), (128, 64, 128)):
        a, b = (torch.randn(shape, device=check.device, dtype=real) for shape in ((rows, depth), (depth, columns)))
        took = median_ns(check, lambda a=a, b=b: a @ b)
        share = 2 * rows * depth * columns / took * 1e9 / entry.peak(dtype if dtype in entry.tflops else "float32")
        shape_share = Product(1, rows, columns, depth).share(entry.units or 1)
        found[f"{rows}x{depth}x{columns}"] = {"ns": took, "share": share, "shape_share": shape_share}
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def _host(check: Check) -> Figures:
    """Return what issuing an operation takes the host, forward under autograd and backward, by idle small kernels."""
    x = torch.ones(8, device=check.device, requires_grad=True)
    forward, backward = [], []
    for _ in range(REPEATS):
        y = x
        settle(check.device)
        start = time.perf_counter_ns()
        for _ in range(SMALL_OPERATIONS):
            y = torch.nn.functional.gelu(y)
        middle = time.perf_counter_ns()
        settle(check.device)
        begin = time.perf_counter_ns()
        y.sum().backward()
        end = time.perf_counter_ns()
        forward.append((middle - start) / SMALL_OPERATIONS)
        backward.append((end - begin) / SMALL_OPERATIONS)
    return {"forward_host_ns": statistics.median(forward), "backward_host_ns": statistics.median(backward)}


class Attention(nn.Module):
    """Attention of 16 heads of 64 over sequences, by torch's own kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position sees."""
        heads = x.unflatten(-1, (16, 64)).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return seen.transpose(1, 2).flatten(-2)


class Scaled(nn.Module):
    """Something to train before what has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values."""
        return x * self.scale


def kinds(check: Check) -> Mapping[str, tuple[Callable[[], nn.Module], Tensor]]:
    """Return an operation of each kind that estimates tell apart, with an input for which the device is busy."""
    large = check.kind == "cuda"
    pictures, text = ((64, 256, 56, 56), (16, 1024, 1024)) if large else ((2, 16, 8, 8), (1, 16, 1024))
    n = pictures[1]
    image, tokens = torch.randn(pictures), torch.randn(text)
    return {
        "product": (lambda: nn.Linear(1024, 1024), tokens),
        "attention": (Attention, tokens),
        "norm": (lambda: nn.LayerNorm(1024), tokens),
        "activation": (nn.GELU, tokens),
        "convolution-1x1": (lambda: nn.Conv2d(n, n, 1), image),
        "convolution-3x3": (lambda: nn.Conv2d(n, n, 3, padding=1), image),
        "convolution": (lambda: nn.Conv2d(n, n, 5, padding=2), image),
        "convolution-grouped": (lambda: nn.Conv2d(n, n, 3, padding=1, groups=n), image),
        "batch-norm": (lambda: nn.BatchNorm2d(n), image),
        "pooling": (lambda: nn.AvgPool2d(3, 1, 1), image),
    }


def rates(check: Check) -> Outcome:
    """What does each kind of kernel reach of what products and copies do?"""
    file = check.folder / "measured_gpu.json"
    needed(file.exists(), "the part constants has to be good before")
    figures: Figures = {}
    for name, (make, x) in kinds(check).items():
        model = nn.Sequential(Scaled(), make(), make())  # the last one has an input that wants a gradient

        def loss(output: Tensor, _: Any) -> Tensor:
            return output.float().square().mean()

        def again(index: int, seed: int, x: Tensor = x) -> tuple[Tensor, Tensor]:
            return x, torch.zeros(())

        with as_usual():
            measured = pp.profile(model, x, loss, device=check.kind, steps=check.steps, data=again).chain
        estimated = pp.profile(model, x, loss, gpu=str(file)).chain
        rows = {}
        for way in ("forward_ns", "backward_ns"):
            took, guessed = (getattr(chain.layers[2], way) for chain in (measured, estimated))
            rows[way] = {"measured": took, "estimated": guessed, "rate": guessed / max(took, 1)}
        figures[name] = rows
        check.clean()
    text = ", ".join(
        f"{name} {row['forward_ns']['rate']:.2f}/{row['backward_ns']['rate']:.2f}" for name, row in figures.items()
    )
    return Outcome(f"forward/backward of the estimate without rates: {text}", figures)


@contextmanager
def as_usual() -> Iterator[None]:
    """Let cuDNN choose kernels as it does for users, and not those alone whose sums come in one order."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = False, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before


def profiling(check: Check, name: str) -> Outcome:
    """Are estimates those of layers?"""
    from checked_models import MODELS

    (model, batch), (label, _) = MODELS[name], entry_of(check)
    with as_usual():
        asked: dict[str, Any] = {"device": check.kind, "steps": check.steps, "seconds": 15.0}
        measured = pp.profile(f"zoo:{model}", microbatch=batch, **asked).chain
    estimated = pp.profile(f"zoo:{model}", microbatch=batch, gpu=label).chain
    return compared(name, measured, estimated)


def transformer(check: Check) -> Outcome:
    """How near is the estimate of a transformers model in 16 bits?"""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = check.kind == "cpu"
    config = GPT2Config(n_layer=2 if small else 12, n_positions=64 if small else 1024, n_embd=64 if small else 768,
                        n_head=4 if small else 12, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)  # fmt: skip
    tokens = torch.zeros(2, config.n_positions, dtype=torch.int64)
    asked: dict[str, Any] = {"inputs": {"input_ids": tokens, "labels": tokens.clone()}, "granularity": "block"}
    model = GPT2LMHeadModel(config)
    dtype = "float32" if small else "bfloat16"
    measured = pp.profile(model, device=check.kind, steps=check.steps, dtype=dtype, **asked).chain
    estimated = pp.profile(model, gpu=entry_of(check)[0], dtype=dtype, **asked).chain
    return compared("GPT-2 of transformers", measured, estimated)


def compared(name: str, measured: Chain, estimated: Chain) -> Outcome:
    """Return how far an estimate is off, and what a plan that is made on it takes more."""
    sums = {}
    for way in ("forward_ns", "backward_ns", "optimizer_ns"):
        took, guessed = (sum(getattr(layer, way) or 0 for layer in chain.layers) for chain in (measured, estimated))
        sums[way] = {"measured": took, "estimated": guessed, "ratio": guessed / max(took, 1)}
    regret = regrets(estimated, measured)
    layers = [
        (x.name, x.forward_ns, y.forward_ns, x.backward_ns, y.backward_ns)
        for x, y in zip(measured.layers, estimated.layers, strict=False)
    ]
    off = {way: f"{row['ratio']:.2f}" for way, row in sums.items()}
    words = f"{name}: estimated over measured {off}; plans on the estimate take {max(regret):+.1%} at most"
    return Outcome(words, {"sums": sums, "regrets": regret, "layers": layers})


def regrets(estimated: Chain, measured: Chain, gpus: tuple[int, ...] = (2, 4)) -> list[float]:
    """Return by how much plans made on ``estimated`` are above those made on ``measured``, with measured costs."""
    found = []
    for count in gpus:
        machine = Platform.flat(count, MEMORY, BANDWIDTH)
        guess, best = (
            make_plan(Problem(chain, machine, replicas=False), "contiguous").plan for chain in (estimated, measured)
        )
        period = carried(guess, measured).period_ns
        assert period is not None
        assert best.pattern is not None
        found.append(period / best.pattern.period_ns - 1)
    return found


CONSTANTS = {
    "constants": Part(constants, "What does this GPU reach of its data sheet?", 45),
    "rates": Part(rates, "What does each kind of kernel reach?", 60),
    "estimate_cnn": Part(lambda check: profiling(check, "cnn"), "How near is the estimate of ResNet-50?", 30),
    "estimate_gpt": Part(lambda check: profiling(check, "gpt"), "How near is the estimate of GPT-2?", 30),
    "estimate_transformer": Part(transformer, "How near is the estimate of a transformers model?", 40),
}
