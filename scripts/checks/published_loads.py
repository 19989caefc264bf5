"""What do cuts of a DAG gain over those along one order, as published: the load of the busiest device alone?

Tarnawski et al., "Efficient algorithms for device placement of DNN graph operators" (2020), count what a device
computes and sends and receives, one after the other, and nothing of memory over time, links or schedules. This computes
that objective from their files (github.com/msr-fiddle/dnn-partitioning, throughput-inputs/LayerGraphs), between all
ideals and along single orders, with and without transfers, so that it shows what of a gain is the model's.

    python scripts/checks/published_loads.py resnet50_training.json gnmt_training.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeplan.cost.layer_orders import ideals, members, needed
from pipeplan.problem import Chain, Layer

DEVICES = (2, 3, 4, 6, 8)
MOST = 3000  # ideals, of whose pairs there are tables
RANDOM = 200  # orders by chance

Table = npt.NDArray[np.float64]


class Graph:
    """Layers in a topological order, and original nodes: (layer, ms on a device, what sending its output takes, the
    layers that read it); a backward belongs to its forward's layer."""

    def __init__(self, file: dict[str, Any]) -> None:
        forward = [x for x in file["nodes"] if not x["isBackwardNode"]]
        ids, back = {x["id"] for x in forward}, {x["id"] for x in file["nodes"] if x["isBackwardNode"]}
        edges = [(x["sourceId"], x["destId"]) for x in file["edges"]]
        self.order = depth_first([x["id"] for x in forward], [(i, j) for i, j in edges if i in ids and j in ids])
        place = {x: n for n, x in enumerate(self.order)}
        of_color = {x.get("colorClass", x["id"]): place[x["id"]] for x in forward}
        layer = {x["id"]: place[x["id"]] if x["id"] in ids else of_color[x["colorClass"]] for x in file["nodes"]}
        cost = {x["sourceId"]: x["cost"] for x in file["edges"]}
        reads = {u: {layer[j] for i, j in edges if i == u} for u in cost}
        self.nodes = [(layer[u], cost[u], sorted(reads[u])) for u in cost]
        self.ms, self.bytes = (np.zeros(len(forward)) for _ in range(2))
        for x in file["nodes"]:
            self.ms[layer[x["id"]]] += x["fpgaLatency"]
            self.bytes[layer[x["id"]]] += x["size"]
        self.memory, self.trains = file["maxSizePerFPGA"], bool(back)
        pairs = {(place[i], place[j]) for i, j in edges if i in ids and j in ids}
        self.chain = Chain("", tuple(Layer("", 1, 0, 0, 0) for _ in forward), 0, tuple(sorted(pairs)))

    def loads(self, found: Sequence[int]) -> tuple[Table, Table]:
        """Return by pairs of ideals what the layers between compute, and what they send and receive; infinite where
        one isn't inside the other, or more is between than a device holds."""
        inside = np.array([[x >> i & 1 for i in range(len(self.chain))] for x in found], dtype=np.float64)
        sizes = inside.sum(axis=1)
        possible = (inside @ inside.T == sizes[:, None]) & (sizes[:, None] < sizes[None, :])
        bytes_, ms = ((inside @ x)[None, :] - (inside @ x)[:, None] for x in (self.bytes, self.ms))
        moves = np.zeros_like(ms)
        for layer, cost, readers in self.nodes:
            own = inside[None, :, layer] - inside[:, None, layer] > 0
            count = inside[:, readers].sum(axis=1)
            here = count[None, :] - count[:, None]
            moves += cost * np.where(own, here < len(readers), here > 0)
        return np.where(possible & (bytes_ <= self.memory), ms, np.inf), moves


def depth_first(ids: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the order that follows what has become possible last, as the published program lays graphs out."""
    left, found = {i: sum(j == i for _, j in edges) for i in ids}, list[int]()
    free = [i for i in ids if not left[i]]
    while free:
        found.append(free.pop())
        for i, j in edges:
            if i == found[-1]:
                left[j] -= 1
                if not left[j]:
                    free.append(j)
    return found


def some_orders(chain: Chain) -> Iterator[list[int]]:
    """Yield the order in which the layers stand, and some by chance, as the ideals that they pass through."""
    before, chance, count = needed(chain), Random(0), len(chain)
    for number in range(RANDOM + 1):
        along = [0]
        while len(along) <= count:
            free = [i for i in range(count) if not along[-1] >> i & 1 and not before[i] & ~along[-1]]
            along.append(along[-1] | 1 << (min(free) if not number else chance.choice(free)))
        yield along


def busiest(loads: Table, devices: int) -> float:
    """Return the least load of the busiest of ``devices``."""
    best = np.full(len(loads), np.inf)
    best[0] = 0
    for _ in range(devices):
        best = np.minimum(best, np.maximum(best[:, None], loads).min(axis=0))
    return float(best[-1])


def main() -> None:
    """Print a line for each file, number of devices and objective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        graph = Graph(json.loads(path.read_text()))
        found = ideals(graph.chain, MOST)
        if found is None:
            print(f"{path.stem}: more than {MOST} ideals")
            continue
        began = time.process_time()
        ms, moves = graph.loads(found)
        number = {x: n for n, x in enumerate(found)}
        orders = [[number[x] for x in along] for along in some_orders(graph.chain)]
        mean = graph.ms.sum()
        print(f"{path.stem}: {len(graph.chain)} layers, {len(found)} ideals, {len(members(found[-1]))} in all")
        for what, loads in (("alone", ms), ("with transfers", ms + moves), ("with ten times slower", ms + 10 * moves)):
            for devices in DEVICES:
                best = busiest(loads, devices)
                along = sorted(busiest(loads[np.ix_(x, x)], devices) for x in orders[1:])
                own = busiest(loads[np.ix_(orders[0], orders[0])], devices)
                print(
                    f"  {devices} devices, load {what}: all orders {best:.3f} ms (even {mean / devices:.3f}); depth "
                    f"first {own:.3f}, {own / best - 1:.2%} more; of {RANDOM} by chance the median "
                    f"{along[RANDOM // 2] / best - 1:.2%}, the worst {along[-1] / best - 1:.2%} more"
                )
        print(f"  {time.process_time() - began:.1f} s")


if __name__ == "__main__":
    main()
