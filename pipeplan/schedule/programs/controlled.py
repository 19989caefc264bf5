"""What runs when if two chunks per device, placed like a V, may hold only so much? V-Min and V-Half, split backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

from ...cost.stage_graph import StageGraph
from ..program import Program
from .slots import Pass, homes, listed
from .vees import no_vee

PERIOD = 6  # slots: what a device runs of one microbatch
_F, _F2, _B2, _B, _W = range(
    5
)  # passes of a microbatch on one device: 2 is the second chunk, W a weight part of either
_HOLDS = {_F: 1, _F2: 1, _B2: 0, _B: 0, _W: -1}  # by how many chunk activations a pass changes what is held
_FREE = -1
Block = Callable[[int], list[list[int]]]  # devices -> for each the slots of microbatch 0's _F, _F2, _B2 and _B
Slots = list[list[list[int]]]  # [device][kind][microbatch] -> slot


def v_min(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Program:
    """Return V-Min for p devices, stages d and 2p - 1 - d on device d: about a third of 1F1B's activations.

    A microbatch waits nowhere on its way down, up, down and up again, where slots allow, so none is held for longer
    than that takes: no more than 2((p + 4) // 3) chunk activations. With p = 2 and 4 microbatches, lower case in the
    second chunk (F = I = W)::

        device 0  F0 F1 .  f0 i0 w0 .  I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 F3 I2 W2 f3 i3 w3 .  I3 W3
        device 1  .  F0 f0 .  .  i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 F3 f3 w2 W2 i3 I3 w3 W3

    Orders are those of equal parts; with others devices wait longer and hold no more. With r replicas of every stage it
    is r such pipelines side by side. Source: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), section 3
    and its public scheduler.
    """
    return _controlled(graph, microbatches, weight_keeps, "v-min", _least)


def v_half(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Program:
    """Return V-Half for p devices, stages d and 2p - 1 - d on device d: about half of 1F1B's activations.

    As :func:`v_min`, but the first chunk goes down at half the speed, so that unequal parts delay it less; no more than
    2((p + 2) // 2) chunk activations. With p = 3 and 4 microbatches::

        device 0  F0 F1 F2 .  .  f0 i0 w0 f1 i1 w1 .  I0 W0 F3 f2 i2 w2 I1 W1 .  f3 i3 I2 w3 W2 .  I3 W3
        device 1  .  F0 F1 .  f0 .  f1 i0 w0 F2 .  I0 i1 w1 f2 W0 F3 I1 i2 w2 f3 W1 I2 i3 w3 W2 I3 W3
        device 2  .  .  F0 f0 F1 f1 .  .  i0 w0 I0 W0 F2 f2 i1 I1 w1 F3 W1 f3 i2 I2 w2 W2 i3 I3 w3 W3
    """
    return _controlled(graph, microbatches, weight_keeps, "v-half", _half)


def _least(devices: int) -> list[list[int]]:
    wait = 2 if devices % 3 == 0 else 0
    turn, home = 2 * devices + wait, 4 * devices + wait - 1
    return [[d, 2 * devices - 1 - d, turn + d, home - d] for d in range(devices)]


def _half(devices: int) -> list[list[int]]:
    wait = 3 if devices % 2 == 0 else 0
    turn, home = 3 * devices + wait - 1, 6 * devices + wait - 2
    return [[2 * d, 3 * devices - 2 - d, turn + 2 * d, home - d] for d in range(devices)]


def _controlled(graph: StageGraph, microbatches: int, weight_keeps: Fraction, name: str, block: Block) -> Program:
    @cache
    def orders(count: int) -> list[list[Pass]]:
        return block_passes(block(len(homes(graph))), count)

    refused = no_vee(graph, name)
    return listed(
        graph, microbatches, refused, lambda d, count: orders(count)[d], split=True, weight_keeps=weight_keeps
    )


def block_passes(block: Sequence[Sequence[int]], microbatches: int) -> list[list[Pass]]:
    """Return what each device does: ``block`` repeated every PERIOD slots, its fill and its drain squeezed."""
    if not microbatches:
        return [[] for _ in block]
    at: Slots = [[list(range(x, x + PERIOD * microbatches, PERIOD)) for x in starts] for starts in block]
    at = [[*kinds, _in_gaps(kinds)] for kinds in at]
    _squeeze(at, True)
    at = [kinds[:_W] for kinds in _asap(at)]
    _squeeze(at, False)
    at = _asap([[*kinds, _in_gaps(kinds)] for kinds in at])
    return [_named(kinds[:_W], d, 2 * len(block) - 1 - d) for d, kinds in enumerate(at)]


def _in_gaps(kinds: Sequence[Sequence[int]]) -> list[int]:
    """Return slots of a device's weight parts: free ones, each after as many backwards, and after everything."""
    busy = {slot: kind for kind, slots in enumerate(kinds) for slot in slots}
    end, found, due = max(busy) + 1, [], 0
    for slot in range(end):
        if slot in busy:
            due += busy[slot] >= _B2
        elif due:
            found.append(slot)
            due -= 1
    return found + list(range(end, end + due))


def _named(kinds: Sequence[Sequence[int]], first: int, second: int) -> list[Pass]:
    """Return a device's passes in order, weight parts in its gaps: those of the second chunk before the first's."""
    stages = {_F: first, _F2: second, _B2: second, _B: first}
    busy = {slot: (kind, m) for kind, slots in enumerate(kinds) for m, slot in enumerate(slots)}
    order: list[Pass] = []
    due: dict[int, list[Pass]] = {second: [], first: []}
    for slot in range(max(busy) + 1):
        if slot in busy:
            kind, m = busy[slot]
            order.append(("F" if kind < _B2 else "B", stages[kind], m))
            if kind >= _B2:
                due[stages[kind]].append(("W", stages[kind], m))
        else:
            waiting = due[second] or due[first]
            if waiting:
                order.append(waiting.pop(0))
    return order + due[second] + due[first]


def _squeeze(at: Slots, weights: bool) -> None:
    """Move passes of the fill and of the drain into the first free slots that dependencies and memory allow.

    No device holds more than the pattern does anywhere. With ``weights`` they are among the passes; else free slots run
    those that are due, and the fill stays as it is. What runs between the first device's first backward and the last
    forward that enters stays.
    """
    rows = [_Row(kinds, not weights) for kinds in at]
    most = max(row.peak() for row in rows)
    returned, entered = at[0][_B][0], (at[0][_F][-1], 0)
    for slot, d, kind, m in _in_time(at):
        if (slot, d) <= entered and (slot >= returned or not weights):
            continue
        for earlier in range(_earliest(at, d, kind, m), slot):
            if rows[d].moves(slot, earlier, most):
                at[d][kind][m] = earlier
                break


def _in_time(at: Slots) -> list[tuple[int, int, int, int]]:
    """Return (slot, device, kind, microbatch) of every pass, sorted."""
    return sorted(
        (slot, d, kind, m)
        for d, kinds in enumerate(at)
        for kind, slots in enumerate(kinds)
        for m, slot in enumerate(slots)
    )


class _Row:
    """A device's slots: the kind of pass in each, and before each (chunk activations held, weight parts due).

    Where a row ``fills``, free slots run weight parts that are due.
    """

    def __init__(self, kinds: Sequence[Sequence[int]], fills: bool) -> None:
        self.fills = fills
        busy = {slot: kind for kind, slots in enumerate(kinds) for slot in slots}
        self.kinds = [busy.get(slot, _FREE) for slot in range(max(busy) + 1)]
        self.before = [(0, 0)]
        for kind in self.kinds:
            self.before.append(self._after(self.before[-1], kind))

    def _after(self, state: tuple[int, int], kind: int) -> tuple[int, int]:
        held, due = state
        if kind == _FREE:
            runs = self.fills and due > 0
            return held - runs, due - runs
        return held + _HOLDS[kind], due + (kind in (_B2, _B))

    def peak(self) -> int:
        """Return the most chunk activations held."""
        return max(held for held, _ in self.before)

    def moves(self, slot: int, earlier: int, most: int) -> bool:
        """Move a pass to an ``earlier`` slot, if that is free and no more than ``most`` is held then; say whether."""
        if self.kinds[earlier] != _FREE:
            return False
        self.kinds[earlier], self.kinds[slot] = self.kinds[slot], _FREE
        changed, state = [], self.before[earlier]
        for at in range(earlier, len(self.kinds)):
            state = self._after(state, self.kinds[at])
            if state[0] > most:
                self.kinds[slot], self.kinds[earlier] = self.kinds[earlier], _FREE
                return False
            if at >= slot and state == self.before[at + 1]:
                break
            changed.append(state)
        self.before[earlier + 1 : earlier + 1 + len(changed)] = changed
        return True


def _earliest(at: Slots, d: int, kind: int, m: int) -> int:
    """Return the first slot after all that a pass needs: its input, and the one before of its kind."""
    needs = [at[d][kind][m - 1]] if m else []
    if kind == _W:
        needs.append(sorted(at[d][_B2] + at[d][_B])[m])
    elif kind:
        needs.append(at[d][kind - 1][m])
    before = {_F: d - 1, _F2: d + 1, _B2: d - 1, _B: d + 1}.get(kind, -1)
    if 0 <= before < len(at):
        needs.append(at[before][kind][m])
    return max(needs, default=-1) + 1


def _asap(at: Slots) -> Slots:
    """Return the slots of the same orders if every pass takes one and runs as soon as it can."""
    found: Slots = [[[0] * len(slots) for slots in kinds] for kinds in at]
    free = [0] * len(at)
    for _, d, kind, m in _in_time(at):
        earliest = 0 if kind == _W else _earliest(found, d, kind, m)
        found[d][kind][m] = max(free[d], earliest)
        free[d] = found[d][kind][m] + 1
    return found
