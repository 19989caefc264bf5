"""Estimate ten CNNs whose layers PipeDream's authors measured, plan on that, and print what the plans are worth.

    python scripts/checks/published_layers.py CHECKOUT [--rates]

CHECKOUT is of github.com/msr-fiddle/pipedream (Narayanan et al. 2019), whose profiles have each module, which modules
it reads, and ms of its forward and backward: float32 on a V100 of 16 GB, each module timed with the GPU waited for. So
a module takes the host 0.3 ms; what no module does (sums, concatenations) is timed with the module behind; and the
first one waits for the pictures to be copied.

Printed for each network: total time estimated over measured, and the regret of plans on 2, 4 and 8 GPUs, each stage on
one of them, joined at 12 GB/s: by how much a plan made on the estimate takes longer than one made on the measured
profile, both with measured times. First with the constants that every estimate for a V100 has, then with the host times
that the other networks show, then with those and the rates by kinds of kernels that fit the other networks.
``--rates`` prints the rates that fit all of them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import mean

import msgspec
import networkx as nx
import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan.files.machines.accelerators import KINDS, RATES, Accelerator, accelerator
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.carry import carried
from pipeplan.problem import Chain, Layer, Platform, Problem
from pipeplan.runtime.profiler.estimate import RooflineClock
from pipeplan.runtime.profiler.operations import Kernel

MODULES = {x.__name__: x for x in (nn.Conv2d, nn.ReLU, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.Linear)}
COPY = 12e9  # bytes/s of pictures to the GPU: PCIe 3 x16
LEAST_SHARE = 0.05  # of modules, that take no longer than the host does
ROUNDS = 10
GPUS = (2, 4, 8)
MEMORY, BANDWIDTH = 1 << 50, 12 * 10**9  # bytes, so that time alone counts; bytes/s, of PCIe 3 x16
CLEAR = 1.2  # kernels so much above the host's time were what was measured
PICTURES = {  # of each network: how many in a microbatch, and their pixels
    "vgg16": (128, 224),
    "alexnet": (256, 224),
    "resnet18": (256, 224),
    "resnet50": (128, 224),
    "resnet101": (64, 224),
    "resnext50": (128, 224),
    "resnext101": (64, 224),
    "densenet121": (64, 224),
    "inception_v3": (128, 299),
    "squeezenet1_0": (256, 224),
    "nasnetalarge": (16, 224),
    "nasnetamobile": (128, 224),
}
UNSEEN = ("nasnetalarge", "nasnetamobile")  # in no fit
Shape = tuple[int, ...]
Kinds = dict[str, float]  # kind -> ms of its kernels where all kinds reach the same


@dataclass(frozen=True)
class Module:
    """A measured module: ms of forward and backward, the kernels of both, and what the first one waits for in ms."""

    name: str
    output_bytes: int
    measured: tuple[float, float]
    kernels: tuple[Kinds, Kinds]
    copied_ms: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether it was timed by itself."""
        return any(self.measured)


@dataclass(frozen=True)
class Network:
    """A measured network, its modules in topological order."""

    name: str
    modules: tuple[Module, ...]
    edges: tuple[tuple[int, int], ...] | None
    input_bytes: int

    def chain(self, times: Sequence[tuple[float, float]]) -> Chain:
        """Return the profile with ``times`` of forward and backward, in ms."""
        layers = tuple(
            Layer(x.name, round(f * 1e6), round(b * 1e6), 0, x.output_bytes)
            for x, (f, b) in zip(self.modules, times, strict=True)
        )
        return Chain(self.name, layers, self.input_bytes, self.edges)

    @property
    def measured(self) -> list[tuple[float, float]]:
        """Times of forward and backward, in ms."""
        return [x.measured for x in self.modules]

    @property
    def total_ms(self) -> float:
        """Time of all modules."""
        return sum(map(sum, self.measured))


@dataclass(frozen=True)
class Fitted:
    """Ms that a module's forward and backward take the host, rates by kind, and whether pictures are copied."""

    host_ms: tuple[float, float]
    rates: dict[str, float]
    copies: bool = True

    def times(self, network: Network) -> list[tuple[float, float]]:
        """Return estimated times of forward and backward, in ms."""
        return [self._times(x) for x in network.modules]

    def _times(self, module: Module) -> tuple[float, float]:
        forward, backward = (
            max(sum(ms / self.rates.get(kind, 1.0) for kind, ms in kernels.items()), host if module.timed else 0.0)
            for kernels, host in zip(module.kernels, self.host_ms, strict=True)
        )
        return forward + module.copied_ms * self.copies, backward


class Recorder(RooflineClock):
    """Kernels by kind as a device does them where all kinds reach the same."""

    def __init__(self, device: Accelerator) -> None:
        alike = {kind: rates for kind, rates in RATES.items() if isinstance(rates, tuple)}
        super().__init__(msgspec.structs.replace(device, rates=alike), device.constants("graphs"))
        self.found: Kinds = {}

    def launch(self, kernel: Kernel) -> None:
        """Count a kernel under its kind."""
        before = self.mark()
        super().launch(kernel)
        taken = self.constants.kernels_ns(self.work(before, self.mark())) / 1e6
        self.found[kernel.kind] = self.found.get(kernel.kind, 0.0) + taken


@cache
def run(module: str, shapes: tuple[Shape, ...], first: bool) -> tuple[Kinds, Kinds, Shape]:
    """Return the kernels of a module's forward and backward, and the shape of its output."""
    device = accelerator("v100")
    forward, backward = Recorder(device), Recorder(device)
    with FakeTensorMode():
        inputs = [torch.empty(shape, requires_grad=not first) for shape in shapes]
        layer = eval(module, dict(MODULES)) if module.split("(")[0] in MODULES else None  # of a file that is known
        with forward:
            out = _output(module, layer, inputs)
        wanted = [*([] if first else inputs), *([] if layer is None else layer.parameters())]
        if wanted and out.requires_grad:
            gradient = torch.empty_like(out)
            with backward:
                torch.autograd.grad(out, wanted, gradient)
    return forward.found, backward.found, tuple(out.shape)


def _output(module: str, layer: nn.Module | None, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    if layer is not None:
        found: torch.Tensor = layer(inputs[0])
        return found
    if module.startswith("Add"):
        return inputs[0] + inputs[1]
    if module.startswith("Concat"):
        return torch.cat(tuple(inputs), 1)
    if module.startswith("View"):  # of the features of all positions, whose mean torch takes without a module
        return inputs[0].flatten(1)
    return inputs[0]


@dataclass
class Node:
    """A line of a published profile: a module, ms of its forward and backward, and which nodes it reads."""

    module: str
    measured: tuple[float, float]
    reads: tuple[int, ...] = ()


def read_network(checkout: Path, name: str) -> Network:
    """Return a network of the checkout; its nodes are numbered in the order of their calls, the pictures first."""
    file = checkout / "profiler" / "image_classification" / "profiles" / name / "graph.txt"
    nodes: dict[int, Node] = {}
    edges: list[tuple[int, int]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        match line.strip().split(" -- "):
            case [node, module, figures]:
                forward, backward = (float(x.split("=")[1]) for x in figures.split(", ")[:2])
                module = module.replace("(inplace)", "()")  # which torch spells otherwise today
                nodes[int(node[4:])] = Node(module, (0.0, 0.0) if module == "Input" else (forward, backward))
            case [source, node]:
                edges.append((int(source[4:]), int(node[4:])))
    sizes = {node for node, x in nodes.items() if x.module.startswith("Size")}  # of a tensor: no module
    for source, node in sorted(edges):
        if source not in sizes and node not in sizes:
            nodes[node].reads += (source,)
    count, pixels = PICTURES[name]
    return _network(name, {node: x for node, x in nodes.items() if node not in sizes}, (count, 3, pixels, pixels))


def _network(name: str, nodes: dict[int, Node], shape: Shape) -> Network:
    graph = nx.DiGraph((source, node) for node, x in nodes.items() for source in x.reads)
    pictures, *order = nx.lexicographical_topological_sort(graph, key=int)
    shapes: dict[int, Shape] = {pictures: shape}
    kernels: dict[int, tuple[Kinds, Kinds]] = {}
    for node in order:
        inputs = tuple(shapes[x] for x in nodes[node].reads)
        forward, backward, shapes[node] = run(nodes[node].module, inputs, node == order[0])
        kernels[node] = forward, backward
    sizes = {node: 4 * prod(shape) for node, shape in shapes.items()}
    _give_to_next(nodes, sorted(order), kernels)
    modules = tuple(
        Module(
            f"{nodes[x].module.split('(')[0]}-{x}",
            sizes[x],
            nodes[x].measured,
            kernels[x],
            sizes[pictures] / COPY * 1e3 if x == order[0] else 0.0,
        )
        for x in order
    )
    index = {node: i for i, node in enumerate(order)}
    edges = tuple(sorted((index[x], index[node]) for node in order for x in nodes[node].reads if x in index))
    return Network(name, modules, None if edges == tuple(pairwise(range(len(order)))) else edges, sizes[pictures])


def _give_to_next(nodes: dict[int, Node], order: Sequence[int], kernels: dict[int, tuple[Kinds, Kinds]]) -> None:
    """Move the kernels of what isn't timed by itself to the next module that is."""
    kept: tuple[Kinds, Kinds] = {}, {}
    for node in order:
        forward, backward = (_sum(a, b) for a, b in zip(kept, kernels[node], strict=True))
        timed = any(nodes[node].measured)
        kernels[node] = (forward, backward) if timed else ({}, {})
        kept = ({}, {}) if timed else (forward, backward)


def _sum(one: Kinds, other: Kinds) -> Kinds:
    return {kind: one.get(kind, 0.0) + other.get(kind, 0.0) for kind in {*one, *other}}


def fit_hosts(networks: Sequence[Network]) -> tuple[float, float]:
    """Return the ms that a module's forward and backward take the host, which the quickest modules show."""
    every = [x.measured for network in networks for x in network.modules if x.timed]
    forward, backward = np.quantile(every, LEAST_SHARE, axis=0).tolist()
    return forward, backward


def fit(networks: Sequence[Network]) -> Fitted:
    """Return host times, and for each kind the rate of its mean time, each network counting the same."""
    hosts = fit_hosts(networks)
    passes = [
        (x.kernels[j], x.measured[j] - (x.copied_ms if j == 0 else 0.0), hosts[j], 1 / network.total_ms)
        for network in networks
        for x in network.modules
        for j in (0, 1)
        if x.timed
    ]
    factors = dict.fromkeys(sorted({kind for kernels, *_ in passes for kind in kernels}), 1.0)
    for _ in range(ROUNDS):
        for kind in factors:
            taken = needed = 0.0
            for kernels, measured, host, weight in passes:
                whole = sum(ms * factors[k] for k, ms in kernels.items())
                if kind not in kernels or whole < CLEAR * host:
                    continue
                others = whole - kernels[kind] * factors[kind]
                taken += weight * max(measured - others, 0.0)
                needed += weight * kernels[kind]
            if needed:
                factors[kind] = max(0.05, taken / needed)
    return Fitted(hosts, {kind: 1 / factor for kind, factor in factors.items()})


def regrets(estimated: Chain, measured: Chain) -> list[float]:
    """Return for each number of GPUs by how much the period of the plan made on ``estimated`` is above that of the plan
    made on ``measured``, both with measured costs; contiguous stages on one GPU each."""
    found = []
    for count in GPUS:
        problems = [
            Problem(chain, Platform.flat(count, MEMORY, BANDWIDTH), replicas=False) for chain in (estimated, measured)
        ]
        guess, best = (make_plan(problem, "contiguous").plan for problem in problems)
        period = carried(guess, measured).period_ns
        assert period is not None
        assert best.pattern is not None
        found.append(period / best.pattern.period_ns - 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rates", action="store_true", help="print the rates that fit all networks")
    arguments = parser.parse_args()
    networks = [read_network(arguments.checkout, name) for name in PICTURES]
    if arguments.rates:
        found = fit([x for x in networks if x.name not in UNSEEN])
        print("host ", ", ".join(f"{ms:.3f} ms" for ms in found.host_ms))
        for kind, rate in found.rates.items():
            print(f"{kind:20} {rate:.2f}")
        return
    device = accelerator("v100")
    constants = device.constants()
    rates = {kind: 1.0 if isinstance(RATES.get(kind), tuple) else device.rate(kind, "float32")[0] for kind in KINDS}
    usual = Fitted((constants.forward_host_ns / 1e6, constants.backward_host_ns / 1e6), rates, copies=False)
    ways: dict[str, Callable[[list[Network]], Fitted]] = {
        "the usual constants": lambda others: usual,
        "host times of the others": lambda others: Fitted(fit_hosts(others), rates),
        "fitted to the others": fit,
    }
    print(f"{'':14}" + "".join(f"{way:>36}" for way in ways))
    totals: dict[str, list[float]] = defaultdict(list)
    found_regrets: dict[str, list[float]] = defaultdict(list)
    for network in networks:
        others = [x for x in networks if x is not network and x.name not in UNSEEN]
        print(f"{network.name:14}", end="")
        for way, constants_of in ways.items():
            times = constants_of(others).times(network)
            off = sum(map(sum, times)) / network.total_ms - 1
            regret = regrets(network.chain(times), network.chain(network.measured))
            totals[way].append(abs(off))
            found_regrets[way] += regret
            print(f"{off:+10.0%}, " + "".join(f"{x:8.1%}" for x in regret), end="")
        print(flush=True)
    print(f"{'mean':14}", end="")
    for way, regret in found_regrets.items():
        print(f"{mean(totals[way]):10.0%}, {mean(regret):8.1%}{f'at worst {max(regret):.0%}':>16}", end="")
    print()


if __name__ == "__main__":
    main()
