"""Truths about schedules that share no code with the package: enumeration, event sweeps, emulation, an interpreter.

They read the package's data classes and nothing that computes; what they return is compared with what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np


def all_patterns(graph: Any, period: int) -> np.ndarray:
    """Return the starts of every pattern that respects path and exclusivity, shape (patterns, operations).

    Each gap on the path takes every value below the least common period of the resources; a longer gap, shortened by
    that, leaves all offsets alone and holds less. So nothing better exists outside this list.
    """
    operations = graph.operations
    duration = [op.duration_ns for op in operations]
    step = [graph.resources[op.resource].replicas * period for op in operations]
    if any(d > s for d, s in zip(duration, step, strict=True)):
        return np.zeros((0, len(operations)), dtype=np.int64)
    gaps = np.arange(lcm(*step))
    starts = np.zeros((1, 1), dtype=np.int64)
    for v in range(1, len(operations)):
        tried = starts[:, -1:] + duration[v - 1] + gaps
        grown = np.hstack([np.repeat(starts, len(gaps), axis=0), tried.reshape(-1, 1)])
        keep = np.ones(len(grown), dtype=bool)
        for u in range(v):
            if operations[u].resource == operations[v].resource:
                between = (grown[:, v] - grown[:, u]) % step[v]
                keep &= (between >= duration[u]) & (between <= step[v] - duration[v])
        starts = grown[keep]
    return starts


def held_counts(graph: Any, starts: np.ndarray, period: int) -> np.ndarray:
    """Return the most microbatches that one replica of each stage holds, shape (patterns, stages)."""
    columns = []
    for s, stage in enumerate(graph.stages):
        begin, end = lifetime(graph, starts, s)
        columns.append(-((begin - end) // (graph.resources[stage.resource].replicas * period)))
    return np.stack(columns, axis=1)


def lifetime(graph: Any, starts: np.ndarray, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Return when microbatch 0 enters and leaves ``stage``, one entry per pattern."""
    kinds = [(op.kind, op.stage) for op in graph.operations]
    forward, backward = kinds.index(("F", stage)), kinds.index(("B", stage))
    return starts[:, forward], starts[:, backward] + graph.operations[backward].duration_ns


def weights_table(
    policy: Any, weight_bytes: int, parameters: int, in_flight: int, replicas: int = 1, first: tuple[int, int] = (1, 1)
) -> int:
    """Return the bytes of weights, gradient and state: the table of the model, written out.

    ``first`` is (in flight, replicas) of the first stage, for vertical sync.
    """
    spans = []
    for count, r in ((in_flight, replicas), first) if policy.vertical_sync else ((in_flight, replicas),):
        interval = max(r, policy.accumulate or 1)
        older = range(1, r * count)  # of the microbatches held, those before the one that comes right after an update
        spans.append(1 + len({(m - 1) // interval for m in older}))
    stashed = max(spans)
    kept = {"flush": 1, "2bw": 2, "stash": stashed, "latest": stashed if policy.vertical_sync else 1}
    versions = kept[policy.weights]

    def share(elements: int) -> int:
        """Deal the elements out to the replicas that share; return the most that one gets."""
        return max(len(range(rank, elements, replicas)) for rank in range(replicas)) if policy.zero else elements

    if policy.precision == "mixed":
        per_parameter = {"sgd": 8, "momentum": 12, "adam": 16}[policy.optimizer]
        own = share(parameters)
        state = per_parameter * (min(own, policy.bucket_parameters) if policy.offload else own)
        return versions * 2 * parameters + 2 * parameters + state
    copies = {"sgd": 0, "momentum": 1, "adam": 2}[policy.optimizer]
    whole = 4 * share((weight_bytes + 3) // 4) if policy.zero else weight_bytes
    state = copies * (4 * min(share(parameters), policy.bucket_parameters) if policy.offload else whole)
    return versions * weight_bytes + weight_bytes + state


def sustainable(graph: Any, period: int, synced: Sequence[Fraction]) -> bool:
    """Whether every all-reduce keeps up: ``synced`` has each stage's load in ns per microbatch."""
    return all(load <= period for load in synced)


def smallest_period_by_force(graph: Any, synced: Sequence[Fraction], longest: int) -> int | None:
    """Return the least period up to ``longest`` at which any pattern at all fits memory, updates and synchronisation.

    For stages that share no device.
    """
    for period in range(1, longest + 1):
        if not sustainable(graph, period, synced):
            continue
        starts = all_patterns(graph, period)
        if not len(starts):
            continue
        counts = held_counts(graph, starts, period)
        fits = np.ones(len(starts), dtype=bool)
        for s, stage in enumerate(graph.stages):
            room = graph.resources[stage.resource].memory_bytes
            replicas, entered = (graph.resources[graph.stages[q].resource].replicas for q in (s, 0))
            needs = {
                (g, e): weights_table(graph.policy, stage.weight_bytes, stage.parameters, g, replicas, (e, entered))
                + (g - 1) * stage.kept_bytes
                + stage.peak_bytes
                + stage.buffer_bytes
                + stage.waiting_bytes
                for g, e in {(int(g), int(e)) for g, e in counts[:, [s, 0]]}
            }
            fits &= np.array([needs[int(g), int(e)] <= room for g, e in counts[:, [s, 0]]])
            if graph.policy.weights == "2bw" and graph.policy.accumulate is not None:
                begin, end = lifetime(graph, starts, s)
                fits &= -((begin - end) // period) <= graph.policy.accumulate
        if fits.any():
            return period
    return None


# --- the unrolled sweep ----------------------------------------------------------------------------------------------


def unrolled(graph: Any, starts: Sequence[int], period: int) -> Iterator[tuple[tuple[int, Any], int, int, Any, int]]:
    """Yield ((resource, replica), begin, end, operation, microbatch) around one common period of the steady state.

    A transfer's replica is the two devices that exchange the microbatch.
    """
    window = lcm(*(resource.replicas for resource in graph.resources))
    reach = max(starts) // period + max(op.duration_ns for op in graph.operations) // period + 2
    for m in range(-reach * 2, window + 1):
        for op, start in zip(graph.operations, starts, strict=True):
            begin = start + m * period
            yield (op.resource, _who(graph, op, m)), begin, begin + op.duration_ns, op, m


def _who(graph: Any, op: Any, m: int) -> Any:
    if not op.kind.startswith("SEND"):
        return m % graph.resources[op.resource].replicas
    stages = op.stage, op.stage + (1 if op.kind == "SEND_F" else -1)
    homes = [graph.resources[graph.stages[s].resource].devices for s in stages]
    return tuple(sorted(home[m % len(home)] for home in homes))


def overlaps(graph: Any, starts: Sequence[int], period: int) -> set[int]:
    """Return the resources on which two operations ever run at once, by looking at every instant's occupant."""
    lanes: dict[tuple[int, Any], list[tuple[int, int]]] = {}
    for lane, begin, end, _, _ in unrolled(graph, starts, period):
        lanes.setdefault(lane, []).append((begin, end))
    found = set()
    for (resource, _), spans in lanes.items():
        spans.sort()
        busy_until = spans[0][1]
        for begin, end in spans[1:]:
            if begin < busy_until:
                found.add(resource)
            busy_until = max(busy_until, end)
    return found


def peak_activations(graph: Any, starts: Sequence[int], period: int) -> dict[int, int]:
    """Return the most activation bytes of each device group: +kept at F, +transient in B, all gone at B's end."""
    events: dict[tuple[int, Any], list[tuple[int, int]]] = {}
    first = _windows(graph, period)
    for lane, begin, end, op, _ in unrolled(graph, starts, period):
        stage = graph.stages[op.stage]
        changes = events.setdefault(lane, [])
        if op.kind == "F":
            changes.append((begin, stage.kept_bytes))
        elif op.kind == "B":
            transient = stage.peak_bytes - stage.kept_bytes
            changes += [(begin, transient), (end, -transient - stage.kept_bytes)]
    peaks: dict[int, int] = {}
    for lane, changes in events.items():
        if graph.resources[lane[0]].memory_bytes is None:
            continue
        held = peak = 0
        for time, change in sorted(changes):
            held += change
            if 0 <= time < first[lane]:
                peak = max(peak, held)
        peaks[lane[0]] = max(peaks.get(lane[0], 0), peak)
    return peaks


def _windows(graph: Any, period: int) -> dict[tuple[int, int], int]:
    return {
        (index, replica): resource.replicas * period
        for index, resource in enumerate(graph.resources)
        for replica in range(resource.replicas)
    }


# --- activations, step by step ---------------------------------------------------------------------------------------


def storages_of(chain: Any, start: int) -> dict[int, tuple[Any, int]]:
    """Return (storage, bytes) of every tensor in a stage that begins at layer ``start``, or a part run again from it.

    Tensors are numbered from 0, the network's input. What enters arrives by itself.
    """
    found: dict[int, tuple[Any, int]] = {0: ("tensor 0", chain.input_bytes)}
    for i, layer in enumerate(chain.layers):
        own = layer.output_bytes if i < start or layer.storage_bytes is None else layer.storage_bytes
        fresh = (f"tensor {i + 1}", own)
        found[i + 1] = fresh if i < start or layer.view_of is None else found[layer.view_of + 1]
    return found


def saved_by(chain: Any, layer: int, storages: dict[int, tuple[Any, int]]) -> dict[Any, int]:
    """Return what one layer saves where tensors lie in ``storages``, and its private bytes, by name."""
    about = chain.layers[layer]
    if about.saved_bytes is None:
        return dict(storages[t] for t, readers in enumerate(chain.readers) if layer in readers)
    alone = storages_of(chain, layer)
    tensors = [x + 1 for x in about.saves or ()]
    private = about.saved_bytes - sum(dict(alone[t] for t in tensors).values())
    return {**dict(storages[t] for t in tensors), f"private {layer}": private}


def emulated_activations(
    chain: Any, start: int, stop: int, checkpoint: Sequence[tuple[int, int]], *, shared: bool
) -> tuple[int, int]:
    """Return (kept after the forward, peak) of one microbatch, walking layer by layer forward and then backward.

    Stored runs and recomputed segments each hold storages, by name. ``shared`` counts one held by several parts once,
    as an allocator would. A segment that runs again makes its tensors anew, but for its input and views of that.
    """
    stage = storages_of(chain, start)

    def size(parts: Sequence[dict[Any, int]]) -> int:
        if shared:
            return sum({name: size for part in parts for name, size in part.items()}.values())
        return sum(size for part in parts for size in part.values())

    parts: list[tuple[list[int], bool]] = []
    recomputed = {layer: k for k, (first, last) in enumerate(checkpoint) for layer in range(first, last)}
    previous: Any = "nothing"
    for layer in range(start, stop):
        key = recomputed.get(layer)
        if not parts or key != previous:
            parts.append(([], key is not None))
        parts[-1][0].append(layer)
        previous = key

    def part_storages(first: int) -> dict[int, tuple[Any, int]]:
        """Storages where each part counts for itself: as if the part were a stage."""
        return stage if shared else storages_of(chain, first)

    held: list[dict[Any, int]] = []
    peak = 0
    for layers, again in parts:  # forward
        held.append({})
        at = part_storages(layers[0])
        for layer in layers:
            entering = [t for t, readers in enumerate(chain.readers) if layer in readers and t <= layers[0]]
            held[-1] |= dict(at[t] for t in entering) if again else saved_by(chain, layer, at)
            peak = max(peak, size(held))
    kept = size(held)
    for layers, again in reversed(parts):  # backward
        if again:
            first = layers[0]
            at, inside = part_storages(first), storages_of(chain, first)
            names = {inside[t][0]: at[t] for t in range(first + 1)}  # the input is the one that is held
            anew = {
                t: names.get(name, (f"again {name}", count)) for t, (name, count) in inside.items()
            }  # fmt: skip
            made = dict(held[-1])
            for layer in layers:
                made |= saved_by(chain, layer, anew)
                about = chain.layers[layer]
                if about.saved_bytes is not None and about.saves is None and layer == first:
                    made[f"private {layer}"] -= min(about.saved_bytes, chain.tensor_bytes[first])  # taken for the input
            peak = max(peak, size([*held[:-1], made]))
        else:
            peak = max(peak, size(held))
        held.pop()
    return kept, peak


# --- rendezvous ------------------------------------------------------------------------------------------------------


def run_ranks(ranks: dict[int, list[Any]]) -> tuple[list[tuple[int, Any]], str | None]:
    """Run each rank's list with blocking exchanges: a send returns when its receive runs, and the other way round.

    Returns the (rank, operation) pairs in the order in which they ended, and None or what is stuck.
    """
    at = dict.fromkeys(ranks, 0)
    ran: list[tuple[int, Any]] = []
    moved = True
    while moved:
        moved = False
        for rank, ops in ranks.items():
            while at[rank] < len(ops) and ops[at[rank]].peer is None:
                ran.append((rank, ops[at[rank]]))
                at[rank] += 1
                moved = True
            if at[rank] == len(ops):
                continue
            op = ops[at[rank]]
            there = ranks[op.peer]
            if at[op.peer] < len(there) and _match(op, rank, there[at[op.peer]], op.peer):
                ran += [(rank, op), (op.peer, there[at[op.peer]])]
                at[rank] += 1
                at[op.peer] += 1
                moved = True
    stuck = [f"{rank}: {ops[at[rank]]}" for rank, ops in ranks.items() if at[rank] < len(ops)]
    return ran, "; ".join(stuck) or None


def missing_data(ran: Sequence[tuple[int, Any]], stages: int) -> str | None:
    """Return the first operation that ran before what it needs was on its rank, or None.

    A forward needs its input, received or made by the stage before on the same rank; a backward its own forward and the
    gradient; a send what it sends.
    """
    there: set[tuple[int, str, int, int]] = set()
    for rank, op in ran:
        s, m = op.stage, op.microbatch
        made = {
            "F": [] if s == 0 else [("F", s - 1), ("RECV_F", s)],
            "B": [] if s == stages - 1 else [("B", s + 1), ("RECV_B", s)],
            "SEND_F": [("F", s)],
            "SEND_B": [("B", s)],
        }.get(op.kind, [])
        if made and not any((rank, kind, stage, m) in there for kind, stage in made):
            return f"rank {rank}: {op}"
        if op.kind == "B" and (rank, "F", s, m) not in there:
            return f"rank {rank}: {op}"
        there.add((rank, op.kind, s, m))
    return None


def _match(one: Any, rank: int, other: Any, peer: int) -> bool:
    if other.peer != rank or one.peer != peer or one.microbatch != other.microbatch:
        return False
    if one.kind.startswith("RECV"):
        one, other = other, one
    step = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}.get(one.kind)
    return step is not None and other.kind == step[0] and other.stage == one.stage + step[1]


def least_starts(steps: dict[Any, list[tuple[Any, int]]]) -> dict[Any, int]:
    """Return the least start of each step, given its predecessors as (step, delay): by sweeping until nothing moves."""
    starts = dict.fromkeys(steps, 0)
    for _ in range(len(steps) + 1):
        moved = False
        for step, before in steps.items():
            earliest = max((starts[other] + delay for other, delay in before), default=0)
            if earliest > starts[step]:
                starts[step] = earliest
                moved = True
        if not moved:
            return starts
    raise AssertionError("the steps wait for each other in a circle")
