"""How far off are estimates of one H200's kernels and networks, and which rates do its kernels reach?

``h200-kernels.csv`` has us of single operations (torch 2.11, CUDA 13.0; medians of 8 by CUDA events, the host ahead),
``h200-models.csv`` us of forward/backward of each layer of 27 networks as ``profile`` measured them (``-f`` in float32
with convolutions in tf32, ``-b`` in bfloat16), and ms of their sums as estimates were with an A100's shares.

The rates of kernels are fitted to ``h200-kernels.csv`` alone, so no network is in any fit but that of the host: what
an operation takes it, forward and backward, is what the other networks show.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import pipeplan as pp
from pipeplan.files.machines.accelerators import PLAIN, Accelerator, accelerator
from pipeplan.runtime.profiler.estimate import AsOnGpu, RooflineClock
from pipeplan.runtime.profiler.operations import Kernel

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64, "float8": torch.float8_e4m3fn,
}  # fmt: skip
SIMPLE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "softmax": lambda x: F.softmax(x, -1), "add": lambda x: x + x,
    "avg-pool": lambda x: F.avg_pool2d(x, 3, 1, 1), "max-pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive-pool": lambda x: F.adaptive_avg_pool2d(x, 1),
}  # fmt: skip
HOSTS = np.geomspace(5e3, 100e3, 40)  # ns of an operation that are tried
ARITHMETIC, TRAFFIC = np.geomspace(0.002, 1.5, 300)[:, None, None], np.geomspace(0.05, 1.0, 60)[:, None]
LEAST_TRAFFIC = 0.3  # of kernels that compute
NETWORKS = {  # of timm: pictures, pixels
    "resnet50": (64, 224), "resnext50_32x4d": (64, 224), "regnety_032": (64, 224), "densenet121": (64, 224),
    "vgg16": (64, 224), "mobilenetv3_large_100": (128, 224), "efficientnet_b0": (64, 224), "convnext_tiny": (64, 224),
    "nasnetalarge": (16, 331), "vit_base_patch16_224": (64, 224), "mixer_b16_224": (64, 224),
}  # fmt: skip
DROPOUT = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "use_cache": False}
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "use_cache": False}
WORDS: dict[str, tuple[str, int, int, dict[str, Any]]] = {  # of transformers: class, sequences, their length, sizes
    "gpt2-b": ("GPT2LMHeadModel", 16, 1024, DROPOUT),
    "gpt2-f": ("GPT2LMHeadModel", 8, 1024, DROPOUT),
    "gpt2m-b": ("GPT2LMHeadModel", 8, 1024, {"n_embd": 1024, "n_layer": 8, "n_head": 16, **DROPOUT}),
    "llama1b-b": (
        "LlamaForCausalLM", 2, 2048,
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 32000, **LLAMA},
    ),
    "llama8b-b": (
        "LlamaForCausalLM", 1, 4096,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 3, "vocab_size": 128256, **LLAMA},
    ),
    "bert-f": ("BertForMaskedLM", 16, 512, {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}),
}  # fmt: skip


class Timed(NamedTuple):
    """A kernel that was timed: us at all of peak and bandwidth, but for what its shape leaves idle; measured; and of
    what is copied before and after."""

    arithmetic: float
    traffic: float
    measured: float
    beside: float


class Recorder(RooflineClock):
    """Which kernels are launched, not at which rates."""

    def __init__(self, device: Accelerator) -> None:
        super().__init__(device, device.constants("graphs"))
        self.found: list[Kernel] = []

    def launch(self, kernel: Kernel) -> None:
        self.found.append(kernel)


LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # an operation that timm asks for, in builds for CPUs
LIBRARY.define("nms(Tensor a, Tensor b, float c) -> Tensor")


def rows(name: str) -> list[dict[str, str]]:
    with open(Path(__file__).with_name(name), encoding="utf-8") as file:
        return list(csv.DictReader(file))


def operation(kind: str, dtype: str, shape: list[int]) -> tuple[Callable[[], Any], list[Tensor]]:
    """Return an operation of a row on fake tensors, and what its backward has gradients of."""
    number = DTYPES.get(dtype, torch.float32)

    def made(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=number, requires_grad=number.itemsize > 1)

    if kind == "product":
        one, other = made(*shape[:2]), made(*shape[1:])
        if dtype == "float8":
            one_all, other = torch.ones(1), torch.empty(shape[2], shape[1], dtype=number).t()
            return lambda: torch._scaled_mm(one, other, one_all, one_all, out_dtype=torch.bfloat16), []
        return lambda: one @ other, []
    if kind.startswith("attention"):
        q, k, v = (made(*shape) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal="causal" in kind), [q, k, v]
    if kind.startswith("conv"):
        count, inputs, outputs, side, edge, stride, groups = shape
        x, weight = made(count, inputs, side, side), made(outputs, inputs // groups, edge, edge)
        if kind.endswith("-last"):
            x, weight = (y.detach().to(memory_format=torch.channels_last).requires_grad_() for y in (x, weight))
        wanted = [weight] if "weight" in kind else [x]
        return lambda: F.conv2d(x, weight, stride=stride, padding=edge // 2, groups=groups), wanted
    kind = kind.removesuffix("-back")
    x = made(*shape, *shape[2:])
    if kind == "batch-norm":
        norm = nn.BatchNorm2d(shape[1], dtype=number)
        return lambda: norm(x), [x, *norm.parameters()]
    gain, bias = made(shape[-1]), made(shape[-1])
    if kind == "layer-norm":
        return lambda: F.layer_norm(x, shape[-1:], gain, bias), [x, gain, bias]
    if kind == "rms-norm":
        return lambda: F.rms_norm(x, shape[-1:], gain), [x, gain]
    return lambda: SIMPLE[kind](x), [x]


def kernels(row: dict[str, str], device: Accelerator) -> list[Kernel]:
    """Return the kernels that estimates count for a row, those that matter."""
    kind = row["kind"]
    recorder = Recorder(device)
    with FakeTensorMode(), AsOnGpu():
        function, wanted = operation(kind, row["dtype"], [int(x) for x in row["shape"].split("x")])
        if "-back" in kind or kind.startswith(("conv-data", "conv-weight")):
            out = function()
            gradient = torch.empty_like(out)
            with recorder:
                torch.autograd.grad(out, wanted, gradient)
        else:
            with recorder:
                function()
    return [x for x in recorder.found if x.moved > 1000]


def timed_kernels(device: Accelerator) -> dict[tuple[str, str], list[Timed]]:
    """Return what was timed by the kinds of its kernels and their numbers."""
    found, clock = defaultdict(list), RooflineClock(device, device.constants())
    for row in rows("h200-kernels.csv"):
        if row["shape"].count("x") == 0:  # copies and updates
            continue
        launched = kernels(row, device)
        if not launched:
            continue
        number = "tf32" if row["dtype"] == "tf32" else None
        kind, number, arithmetic, traffic = clock.asked(launched[-1], number)
        number = "half" if number in ("float16", "bfloat16") else number
        every = "last" if launched[-1].last else "" if kind.startswith(PLAIN) else number
        share = clock.constants.bandwidth_share * device.bandwidth_bytes / 1e6
        beside = sum(x.moved for x in launched[:-1]) / share
        found[kind, every].append(Timed(arithmetic / 1e3, traffic / 1e3, float(row["us"]), beside))
    return found


def fit(which: list[Timed], launch: float, traffic_least: float) -> tuple[tuple[float, float], float, float]:
    """Return the shares of peak and of bandwidth, of this at least so much, that fit kernels best, and by how much they
    are off on average, fitted to all and each fitted to the others; a kernel takes ``launch`` us at least."""
    arithmetic, traffic, measured, beside = (np.array(x) for x in zip(*which, strict=True))
    taken = np.maximum(np.maximum(arithmetic / ARITHMETIC, traffic / TRAFFIC), launch) + beside
    off = np.abs(np.log(taken / measured)) + (traffic_least > TRAFFIC) * 10
    off = off.reshape(-1, len(which))
    whole = off.sum(axis=1)
    best = int(whole.argmin())
    others = [off[(whole - off[:, i]).argmin(), i] for i in range(len(which))]
    shares = float(ARITHMETIC.ravel()[best // TRAFFIC.size]), float(TRAFFIC.ravel()[best % TRAFFIC.size])
    return shares, float(np.expm1(off[best].mean())), float(np.expm1(mean(others)))


def judge_kernels() -> None:
    device = accelerator("h200")
    constants, rates = device.constants(), {}
    usual = msgspec.structs.replace(device, rates=None)
    print(f"{'kind':30}{'numbers':9}rows      off   left out   as A100s  as listed")
    for (kind, number), which in sorted(timed_kernels(device).items()):
        computes = any(x.arithmetic for x in which)
        shares, off, left_out = fit(which, device.launch_ns / 1e3, LEAST_TRAFFIC * (computes and "grouped" not in kind))
        both = shares[0] / constants.compute_share, shares[1] / constants.bandwidth_share
        arithmetic, traffic = (float(f"{x:.2g}") for x in both)
        rates[f"{kind} {number}".strip()] = [arithmetic, traffic] if computes else traffic
        left = f"{left_out:11.0%}" if len(which) > 1 else f"{'-':>11}"
        print(f"{kind:30}{number:9}{len(which):4}{off:9.0%}{left}", end="")
        for one in usual, device:
            way = one.rate(kind, "half" if number == "last" else number or "float32", number == "last")
            print(f"{np.expm1(mean(abs(np.log(_taken(x, way, constants) / x.measured)) for x in which)):11.0%}", end="")
        print()
    print(json.dumps(rates))  # rates of these kinds that fit


def _taken(x: Timed, rates: tuple[float, float], constants: Any) -> float:
    arithmetic, traffic = rates
    return x.beside + max(
        x.arithmetic / arithmetic / constants.compute_share,
        x.traffic / traffic / constants.bandwidth_share,
        constants.kernel_ns / 1e3,
    )


def network(name: str) -> dict[str, Any]:
    """Return what ``profile`` takes of a network."""
    torch.manual_seed(0)
    if name in WORDS:
        import transformers

        kind, count, length, sizes = WORDS[name]
        made = getattr(transformers, kind)
        model = made(made.config_class(**sizes))
        words = torch.zeros(count, length, dtype=torch.int64)
        return {"model": model, "inputs": {"input_ids": words, "labels": words.clone()}}
    import timm

    count, pixels = NETWORKS[name[:-2]]
    pictures, labels = torch.zeros(count, 3, pixels, pixels), torch.zeros(count, dtype=torch.int64)
    return {
        "model": timm.create_model(name[:-2]),
        "inputs": pictures,
        "loss": F.cross_entropy,
        "data": lambda step, sample: (pictures, labels),
    }


class Passes(NamedTuple):
    """Ns of the kernels of each layer, how many operations it has, and ns measured, in one direction."""

    kernels: np.ndarray
    operations: np.ndarray
    measured: np.ndarray

    def off(self, host: float) -> float:
        """Return the logarithm of estimated over measured time where an operation takes the host so many ns."""
        taken = np.maximum(self.kernels, self.operations * host)
        return float(np.log(taken.sum() / self.measured.sum()))


def passes(name: str, layers: str) -> list[Passes]:
    device = accelerator("h200")
    constants = device.constants("graphs")
    dtype = {"f": "float32", "b": "bfloat16"}[name[-1]]
    chain = pp.profile(**network(name), gpu="h200", dtype=dtype, granularity="block").chain
    measured = np.array([[1e3 * float(x) for x in layer.split("/")] for layer in layers.split()])
    found = []
    for i, direction in enumerate(("forward", "backward")):
        works = [getattr(layer.work, direction) for layer in chain.layers if layer.work is not None]
        kernels = np.array([constants.kernels_ns(x) for x in works])
        found.append(Passes(kernels, np.array([x.operations for x in works]), measured[:, i]))
    return found


def judge_networks(which: Sequence[str]) -> None:
    """Print for each network, forward and backward, estimated over measured time."""
    chosen = [row for row in rows("h200-models.csv") if not which or row["model"] in which]
    found = {row["model"]: passes(row["model"], row["layers"]) for row in chosen}
    print(f"{'forward, backward: ms':31}{'as A100s':>9}{'kernels':>9}{'with the host as others show':>30}")
    bound: dict[str, list[float]] = defaultdict(list)
    for row in chosen:
        name = row["model"]
        for i, before in enumerate(row["before"].split("/")):
            one = found[name][i]
            others = [x[i] for other, x in found.items() if other[:-2] != name[:-2]]
            host = min(HOSTS, key=lambda ns: sum(abs(x.off(ns)) for x in others))
            waits = float(one.measured[one.operations * host > one.kernels].sum() / one.measured.sum())
            total = one.measured.sum() / 1e6
            bound["host" if waits > 0.5 else name[-1]].append(abs(np.expm1(one.off(host))))
            print(
                f"{name if i == 0 else '':23}{total:8.2f}{float(before) / total:9.2f}{np.exp(one.off(0)):9.2f}"
                f"{np.exp(one.off(host)):9.2f} ({host / 1e3:.0f} us; of layers that wait for it {waits:.0%})"
            )
    for name, errors in bound.items():
        what = {"f": "float32, kernels bind", "b": "bfloat16, kernels bind", "host": "the host binds"}[name]
        print(
            f"{what}: {len(errors)} passes, {mean(errors):.0%} off, nine of ten within {np.quantile(errors, 0.9):.0%}"
        )
