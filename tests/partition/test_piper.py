"""Piper's partitioner: against all stages of tiny networks, a row of what its own code prints, and in plans."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from test_variants import random_instance

from pipeplan.errors import BadInput, Infeasible
from pipeplan.files.piper_json import read_piper
from pipeplan.partition.piper import OnGroups, Piper
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Checkpointing

GIB = 2**30


def random_piper(rng: random.Random) -> Piper:
    """Return a tiny network of layers that are alike in what running them again saves per time."""
    count, widths = rng.randint(1, 3), (1, 2)
    block = rng.randrange(20, 60)
    variants = []
    for width in widths:
        times = np.full(count, block / width + rng.randrange(5))
        each, weights = np.full(count, 60.0 / width), np.full(count, 40.0 / width)
        cut = np.array([0, *(rng.randrange(9) for _ in range(count - 1)), 0], dtype=float)
        over = 2 * (cut[:, None] + cut[None, :])
        variants.append(
            OnGroups(width, np.stack([times, times * 4 / 3]), np.stack([each, each / 6]),
                    np.stack([2 * weights, 2 * weights + each * 5 / 6]), weights, over)
        )  # fmt: skip
    return Piper(variants, rng.randint(1, 5), rng.randrange(80, 700), rng.choice((1.0, 10.0)), 12)


def all_stages(piper: Piper, layer: int = 0) -> Iterator[tuple[tuple[int, int, int, int, tuple[int, ...]], ...]]:
    """Yield all stages from a layer on, however many GPUs they take."""
    count = piper.variants[0].times.shape[1]
    if layer == count:
        yield ()
        return
    for stop in range(layer + 1, count + 1):
        for v, d, again in product((0, 1), range(1, piper.gpus + 1), product((0, 1), repeat=stop - layer)):
            for behind in all_stages(piper, stop) if 12 % d == 0 else ():
                yield ((layer, stop, v, d, again), *behind)


def load(piper: Piper, stages: Sequence[tuple[int, int, int, int, tuple[int, ...]]]) -> float:
    """Return the longest load of stages, infinite where they don't fit: the paper's section 4, term by term."""
    if sum(d * piper.variants[v].width for _, _, v, d, _ in stages) > piper.gpus:
        return float("inf")
    longest = 0.0
    for place, (i, j, v, d, again) in enumerate(stages):
        own, held = piper.variants[v], -(-sum(x[3] for x in stages[place:]) // d)
        layers = [(a, k) for a, k in zip(again, range(i, j), strict=True)]
        if sum(own.each[a, k] * held + own.fixed[a, k] for a, k in layers) > piper.memory:
            return float("inf")
        sums = 4 * (d - 1) * own.weights[i:j].sum() / d / 12 / piper.bandwidth
        longest = max(longest, (sum(own.times[a, k] for a, k in layers) + own.over[i, j] / piper.bandwidth) / d + sums)
    return longest


def test_equals_all_stages() -> None:
    several = 0
    for seed in range(40):
        piper = random_piper(random.Random(seed))
        truth, found = min(load(piper, x) for x in all_stages(piper)), piper.best()
        assert (found is None) == (truth == float("inf")), seed
        if found is not None:
            assert found[0] == pytest.approx(truth, rel=1e-6), seed
            several += len(found[1]) > 1
    assert several


def test_blocks_of_bert_take_what_its_own_code_prints() -> None:
    """The blocks alone of its bert32a100.json, on 8 GPUs by 25 GiB/s: of 80 GiB data parallelism, of 1 GiB nothing."""
    times, weights, cut = np.full(32, 0.030492), np.full(32, 176997120.0), np.array([0.0, *[31457280.0] * 31, 0.0])
    block = OnGroups(1, np.stack([times, np.full(32, 0.040685)]),
                    np.stack([np.full(32, 606478336.0), np.full(32, 48234496.0)]),
                    np.stack([np.full(32, 353994240.0), np.full(32, 912500224.0)]), weights,
                    2 * (cut[:, None] + cut[None, :]))  # fmt: skip
    found = Piper([block], 8, 80 * GIB, 25 * GIB, 1920).best()
    assert found is not None
    assert found[0] == pytest.approx(32 * 0.030492 / 8 + 4 * 7 * 32 * 176997120 / (8 * 1920 * 25 * GIB), rel=1e-9)
    assert [(x.start, x.stop, x.replicas) for x in found[1]] == [(0, 32, 8)]
    assert Piper([block], 8, GIB, 25 * GIB, 1920).best() is None


@pytest.mark.parametrize("checkpointing", ["none", "segments"])
def test_its_stages_are_planned(checkpointing: Checkpointing) -> None:
    planned = 0
    for seed in range(300, 330):
        try:
            found = make_plan(random_instance(seed, checkpointing), "piper")
        except Infeasible:
            continue
        planned += len(found.plan.allocation.stages) > 1 or found.plan.allocation.stages[0].tensor > 1
        assert found.plan.provenance.algorithm == "piper"
    assert planned


def piper_input() -> dict[str, object]:
    """Return two blocks of its bert32a100.json, and what masks them, in its form."""
    blocks = {
        "1": [
            ("vanilla", 0.030492, 176997120.0, 606478336.0),
            ("activation recomp", 0.040685, 176997120.0, 48234496.0),
        ],
        "2": [("vanilla", 0.018696, 88510080.0, 341581824.0), ("activation recomp", 0.024891, 88510080.0, 48234496.0)],
    }
    keys = "id", "timePerSample", "parameterSize", "memoryUsageA"
    ways = {t: [dict(zip(keys, way, strict=True)) for way in rows] for t, rows in blocks.items()}
    mask = {t: [dict(zip(keys, ("vanilla", 0.0, 0.0, 0.0), strict=True))] for t in blocks}
    nodes = [{"id": 4, "name": "tensor", "TMPCs": mask}, *({"id": k, "name": "Layer", "TMPCs": ways} for k in (3, 5))]
    edges = [(4, 3, 16777216.0), (3, 5, 31457280.0), (4, 5, 16777216.0)]
    names = "sourceId", "destId", "communicationCost"
    return {"maxDevices": 8, "nodes": nodes, "edges": [dict(zip(names, x, strict=True)) for x in edges]}


def test_its_inputs_are_profiles_with_variants() -> None:
    chain = read_piper(json.dumps(piper_input()), "bert", "bert.json")
    assert [x.name for x in chain.layers] == ["tensor-4", "Layer-3", "Layer-5"]
    assert chain.edges == ((0, 1), (0, 2), (1, 2))
    block, part = chain.layers[1], chain.variants[0].layers[1]
    assert (block.forward_ns, block.backward_ns, block.weight_bytes) == (10193000, 20299000, 176997120)
    assert (part.forward_ns, part.forward_ns + part.backward_ns, part.saved_bytes) == (6195000, 18696000, 341581824)
    assert [x.tensor for x in chain.variants] == [2]
    assert chain.cut_bytes[2] == 16777216 + 31457280


@pytest.mark.parametrize(
    ("change", "words"),
    [({"nodes": []}, "acyclic|on one GPU"),
     ({"edges": [{"sourceId": 3, "destId": 3, "communicationCost": 1}]}, "acyclic"),
     ({"edges": [{"sourceId": 3, "destId": 9, "communicationCost": 1}]}, "acyclic"),
     ({"edges": [{"sourceId": 4, "destId": 3, "communicationCost": -1}]}, "communicationCost")],
)  # fmt: skip
def test_no_input_of_its_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_piper(json.dumps(piper_input() | change), "bert", "bert.json")
