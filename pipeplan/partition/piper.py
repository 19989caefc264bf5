"""Which stages, each with a tensor degree, replicas and layers that it runs again, balance work and transfers best?

Piper's partitioner (Tarnawski et al. 2021, "Piper: Multidimensional Planner for DNN Parallelization"), section 4. A
stage of d replicas that hold its layers on t GPUs each takes ``(times + bytes over its ends / B) / d``, and for the sum
of N microbatches' gradients ``4 (d - 1) weights / (d N B)``. Each of its GPUs holds ``ceil(s / d)`` microbatches, s
being the replicas from this stage on: of every layer ``a`` bytes for each of these and ``b`` for all, by whether it
runs again. Servers, latencies and peaks it doesn't look at. Here layers stand in the chain's own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost import memory_model
from ..cost.saved import inner_bytes, saved_bytes
from ..deadline import NEVER, Deadline
from ..integers import ceil_div
from ..plan import Allocation, Stage
from ..problem import Chain, Problem

Floats = npt.NDArray[np.float64]
STEPS = 50  # halvings of what may be the longest load


class OnGroups(NamedTuple):
    """What layers are for Piper on groups of ``width`` GPUs: times and bytes of those kept and those run again, (2, L);
    ``over`` the bytes that layers i..j-1 send and get, (L + 1, L + 1)."""

    width: int
    times: Floats
    each: Floats
    fixed: Floats
    weights: Floats
    over: Floats


class Found(NamedTuple):
    """A stage: its layers, which variant, its replicas, and which of its layers run again."""

    start: int
    stop: int
    variant: int
    replicas: int
    again: tuple[int, ...]


@dataclass(frozen=True)
class Piper:
    """Piper's dynamic program over layers, GPUs and replicas; ``bandwidth`` in bytes per unit of the times."""

    variants: Sequence[OnGroups]
    gpus: int
    memory: float
    bandwidth: float
    microbatches: int
    replicas: bool = True
    deadline: Deadline = NEVER

    def best(self) -> tuple[float, tuple[Found, ...]] | None:
        """Return the least longest load, to 2^-50 of one GPU's, and stages that have it; None where nothing fits."""
        tables = self._tables()
        high = max(float(2 * (x.times[1].sum() + x.over.max() / self.bandwidth)) for x in self.variants)
        high += 4 * max(float(x.weights.sum()) for x in self.variants) / (self.microbatches * self.bandwidth)
        low, found = 0.0, self._within(tables, high)
        better = found
        for _ in range(STEPS if found else 0):
            if better is not None:
                found, high = better, self._longest(better)
            middle = (low + high) / 2
            if not low < middle < high * (1 - 1e-9):
                break
            better = self._within(tables, middle)
            low = middle if better is None else low
        return None if found is None else (self._longest(found), found)

    def _tables(self) -> dict[tuple[int, int, int], Floats]:
        """Return by (variant, start, stop) the least times of a stage by the microbatches that it holds, 1 and more."""
        count = self.variants[0].times.shape[1]
        found = dict[tuple[int, int, int], Floats]()
        for i, v in product(range(count), range(len(self.variants))):
            self.deadline.check()
            found |= {(v, i, j): self._times(v, i, j) for j in range(i + 1, count + 1)}
        return found

    def _times(self, v: int, i: int, j: int) -> Floats:
        own, count = self.variants[v], np.arange(1, self.gpus + 1)
        kept, held = own.times[0, i:j].sum(), own.each[0, i:j].sum() * count + own.fixed[0, i:j].sum()
        found = np.where(held <= self.memory, kept, np.inf)
        for k in np.flatnonzero(held > self.memory):
            found[k] = kept + self._again(v, i, j, int(count[k]))[0]
            if np.isinf(found[k]):  # nor do more fit
                break
        return found

    def _again(self, v: int, i: int, j: int, held: int) -> tuple[float, tuple[int, ...]]:
        """Return what running layers again takes least, as far as a greedy choice by bytes per time knows, until a
        stage fits that holds so many microbatches, and which; infinite where it never does."""
        own = self.variants[v]
        bytes_of = own.each[:, i:j] * held + own.fixed[:, i:j]
        more, less = own.times[1, i:j] - own.times[0, i:j], bytes_of[0] - bytes_of[1]
        excess = float(bytes_of[0].sum()) - self.memory
        if excess <= 0:
            return 0.0, ()
        order = sorted(np.flatnonzero(less > 0).tolist(), key=lambda k: more[k] / less[k])
        taken: list[int] = []
        while order and excess > 0:
            taken.append(min((x for x in order if less[x] >= excess), key=lambda x: more[x], default=order[0]))
            order.remove(taken[-1])
            excess -= less[taken[-1]]
        return (float(more[taken].sum()), tuple(sorted(i + k for k in taken))) if excess <= 0 else (np.inf, ())

    def _longest(self, stages: Sequence[Found]) -> float:
        """Return the longest load of stages."""
        loads = []
        for i, j, v, d, again in stages:
            own = self.variants[v]
            times = own.times[0, i:j].sum() + (own.times[1] - own.times[0])[list(again)].sum()
            loads.append(float((times + own.over[i, j] / self.bandwidth) / d + self._sums(v, i, j, d)))
        return max(loads)

    def _sums(self, v: int, i: int, j: int, d: int) -> float:
        weights = self.variants[v].weights[i:j].sum()
        return float(4 * (d - 1) * weights / (d * self.microbatches * self.bandwidth))

    def _within(self, tables: dict[tuple[int, int, int], Floats], load: float) -> tuple[Found, ...] | None:
        """Return stages of which none takes more than ``load``, on as few GPUs as any; None where there are none.

        ``least[i][s]`` are the fewest GPUs that take the layers from i on with s replicas in all.
        """
        count, most = self.variants[0].times.shape[1], self.gpus
        least = np.full((count + 1, most + 1), most + 1, dtype=np.int64)
        chosen = np.zeros((count, most + 1, 3), dtype=np.int64)  # stop, variant, replicas
        least[count, 0] = 0
        divisors = [d for d in range(1, (most if self.replicas else 1) + 1) if self.microbatches % d == 0]
        for i in range(count - 1, -1, -1):
            self.deadline.check()
            for j in range(i + 1, count + 1):
                behind = np.flatnonzero(least[j] < most)
                for v, own in enumerate(self.variants):
                    times, over = tables[v, i, j], own.over[i, j] / self.bandwidth
                    for d in divisors if len(behind) else ():
                        if own.width * d > most or (times[0] + over) / d > load:
                            continue
                        into = behind[behind + d <= most] + d
                        spent = (times[ceil_div(into, d) - 1] + over) / d + self._sums(v, i, j, d)
                        gpus = least[j, into - d] + own.width * d
                        better = into[(spent <= load) & (gpus <= most) & (gpus < least[i, into])]
                        least[i, better] = least[j, better - d] + own.width * d
                        chosen[i, better] = j, v, d
                        if len(into) == len(behind) and bool((spent <= load).all()):
                            break
        if int(least[0].min()) > most:
            return None
        found, i, replicas = list[Found](), 0, int(least[0].argmin())
        while i < count:
            j, v, d = map(int, chosen[i, replicas])
            found.append(Found(i, j, v, d, self._again(v, i, j, ceil_div(replicas, d))[1]))
            i, replicas = j, replicas - d
        return tuple(found)


def piper(problem: Problem) -> Iterator[Allocation]:
    """Yield Piper's stages, whose longest load is what it claims; nothing where it finds that nothing fits."""
    names = tuple(problem.chain.names)
    found = Piper(
        [_variant(problem, way[0], chain) for way, chain in problem.chain.names.items()],
        len(problem.platform),
        min(x.memory_bytes for x in problem.platform.devices),
        problem.platform.paths[-1][0] / 1e9,
        problem.policy.update_interval(),
        problem.replicas,
        problem.deadline,
    ).best()
    if found is None:
        return
    stages, at = dict[int, Stage](), 0
    for i, j, v, d, again in sorted(found[1], key=lambda x: (-names[x.variant][0], x.start)):  # none crosses servers
        width = names[v][0]
        devices = tuple(range(at, at + d * width, width))
        cores = ((i, j),) * names[v][1]
        stages[i] = Stage(i, j, devices, tuple((x, x + 1) for x in again), width, cores, names[v][2])
        at += d * width
    yield Allocation(tuple(stages[i] for i in sorted(stages)), round(found[0]))


def _variant(problem: Problem, width: int, chain: Chain) -> OnGroups:
    """Return a chain's layers as Piper sees them."""
    layers, policy, again = chain.layers, problem.policy, problem.checkpointing != "none"
    start = np.arange(len(chain))
    saved = np.asarray(saved_bytes(chain, start, start + 1), dtype=float)
    kept = saved - np.asarray(inner_bytes(chain, start, start + 1), dtype=float)
    size, count = np.array([(x.weight_bytes, x.parameter_count) for x in layers], dtype=np.int64).T
    fixed = np.asarray(memory_model.weights_bytes(policy, size, count, 1), dtype=float)
    forward, backward = (np.array([getattr(y, x) for y in layers], float) for x in ("forward_ns", "backward_ns"))
    crossing = np.array([0, *chain.cut_bytes[1:-1], 0], dtype=float)
    return OnGroups(
        width,
        np.stack([forward + backward, forward + backward + forward]),
        np.stack([saved, kept if again else saved]),
        np.stack([fixed, fixed + (saved - kept if again else 0)]),
        np.asarray(memory_model.gradient_bytes(policy, size, count), dtype=float),
        2 * (crossing[:, None] + crossing[None, :]),
    )
