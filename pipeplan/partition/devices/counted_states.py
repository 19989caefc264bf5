"""What can be left of unequal devices, whatever the order in which stages take them? States that count equal ones.

On a network of one level a state is how many devices of each kind are left, and a stage takes any number of each: these
are all plans in which no device has two stages. With levels, stages take a unit's devices one after the other: a state
is how many units of each sort are untouched, and what is left of the open one (:mod:`.left_units`). So there is one
state for all orders that differ in equal devices, or in units with equal devices, alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ...integers import Ints
from ...problem import Platform
from .device_classes import DeviceKinds
from .device_states import Flags, Step, Take, in_their_order, places
from .left_units import Group, Key, Taking, Unit, devices_of


class _Move(NamedTuple):
    """A stage takes a group of ``replicas`` devices of a floor, joined by level ``span``, from one state to another."""

    floor: int
    replicas: int
    span: int
    found: int
    leaves: int


class _Moves(NamedTuple):
    """The moves of one take, in order of their rows: arrays of one entry each; ``level`` is that of the label left."""

    row: Ints
    found: Ints
    leaves: Ints
    level: Ints
    size: Ints


@dataclass(frozen=True)
class Counted:
    """The states of all orders of devices of some ``kinds``: see :class:`.device_states.DeviceStates`.

    ``speed_of`` says how fast each device is.
    """

    kinds: DeviceKinds
    replicas: bool
    speed_of: tuple[Fraction, ...]

    @property
    def uniform(self) -> bool:
        """Whether only the number of devices left counts."""
        return False

    @cached_property
    def _taking(self) -> Taking:
        return Taking(self.kinds.of, self.replicas)

    @property
    def _top(self) -> int:
        return len(self.kinds.platform.levels) - 1

    @cached_property
    def _reached(self) -> tuple[dict[Key, Unit | None], set[tuple[int, int, int, Key, Key]]]:
        """What can be left of all devices, and the moves (floor, replicas, level, from, to) by which it is reached."""
        full = self._taking.whole(self.kinds.platform)
        units, moves, waiting = {(): None, full.key: full}, set(), deque([full])
        while waiting:
            unit = waiting.popleft()
            groups = self._groups(unit)
            moves |= {(self._floor(x), len(x.devices), x.span, unit.key, _key(x.left)) for x in groups}
            for left in (*(x.left for x in groups), *self._taking.skips(unit)):
                if left is not None and left.key not in units:
                    units[left.key] = left
                    waiting.append(left)
        return units, moves

    @cached_property
    def _units(self) -> tuple[Unit | None, ...]:
        """The states, each with devices that may be left in it."""
        return tuple(sorted(self._reached[0].values(), key=lambda x: (len(list(devices_of(x))), _key(x))))

    @cached_property
    def _number(self) -> dict[Key, int]:
        return {_key(unit): i for i, unit in enumerate(self._units)}

    @cached_property
    def left(self) -> Ints:
        """How many devices are left in each state."""
        return np.array([len(list(devices_of(x))) for x in self._units])

    @cached_property
    def speeds(self) -> tuple[Fraction, ...]:
        """How fast the devices left are together."""
        return tuple(sum((self.speed_of[d] for d in devices_of(x)), Fraction(0)) for x in self._units)

    @cached_property
    def first(self) -> Flags:
        """In which states the chain's last stage takes its devices: with all left."""
        found: Flags = self.left == len(self.kinds.platform)
        return found

    def _groups(self, unit: Unit) -> list[Group]:
        """Return the groups of all floors that a stage may take of what is left."""
        every = frozenset(range(len(self.kinds.kinds)))
        found = list(self._taking.groups(unit, self._top, every, False))
        for eligible in dict.fromkeys(self.kinds.eligible) if self._top and self.replicas else ():
            if eligible != every:
                found += self._taking.groups(unit, self._top, eligible, True)
        return found

    def _floor(self, group: Group) -> int:
        kinds = frozenset(self.kinds.of[d] for d in group.devices)
        if kinds not in self._floors:
            self._floors[kinds] = self.kinds.floor(kinds)
        return self._floors[kinds]

    @cached_property
    def _floors(self) -> dict[frozenset[int], int]:
        return {}

    @cached_property
    def _moves(self) -> list[tuple[int, list[_Move]]]:
        """The floor and the moves of every take, one take for each way to take something in a row."""
        number = self._number
        seen = (_Move(floor, size, span, number[a], number[b]) for floor, size, span, a, b in self._reached[1])
        ways: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        found: dict[tuple[int, int], list[_Move]] = {}
        for move in sorted(seen):
            same = ways.setdefault((move.floor, int(self._row[move.leaves]), move.found), [])
            if (move.replicas, move.span) not in same:
                same.append((move.replicas, move.span))
            found.setdefault((move.floor, same.index((move.replicas, move.span))), []).append(move)
        return [(floor, moves) for (floor, _), moves in sorted(found.items())]

    @cached_property
    def _row(self) -> Ints:
        """The row of what leaves each state."""
        return self.left if self.replicas else np.zeros_like(self.left)

    @cached_property
    def takes(self) -> tuple[Take, ...]:
        """What stages can take."""
        rows = len(self.kinds.platform) if self.replicas else 1
        found = []
        for floor, moves in self._moves:
            replicas, spans = (np.zeros((rows, len(self._units)), dtype=np.int64) for _ in range(2))
            for move in moves:
                at = self._row[move.leaves], move.found
                replicas[at], spans[at] = move.replicas, move.span
            found.append(Take(floor, replicas, spans))
        return tuple(found)

    @cached_property
    def sizes(self) -> Ints:
        """How many devices a stage may have."""
        return np.unique([1, *(move.replicas for _, moves in self._moves for move in moves)])

    @cached_property
    def _arrays(self) -> list[_Moves]:
        place, found = places(self.sizes), []
        for _, moves in self._moves:
            _, size, span, state, leaves = np.array(moves).T
            order = np.argsort(self._row[leaves], kind="stable")
            columns = self._row[leaves], state, leaves, np.maximum(span, self._nearest[leaves]), place[size]
            found.append(_Moves(*(x[order] for x in columns)))
        return found

    @cached_property
    def _nearest(self) -> Ints:
        """The lowest level of a unit in which devices were taken and some are left, of each state."""
        return np.array([self._top if x is None else x.nearest(self._top) for x in self._units])

    def lower(self, labels: Ints, take: int, rows: slice, found: Ints, values: Ints) -> None:
        """Lower ``labels`` to what comes of the moves of a take."""
        moves = self._arrays[take]
        some = slice(*np.searchsorted(moves.row, (rows.start, rows.stop)).tolist())
        column = np.full(len(self._units), -1)
        column[found] = np.arange(len(found))
        at = column[moves.found[some]]
        there = at >= 0
        row, leaves, level, size = (x[some][there] for x in (moves.row, moves.leaves, moves.level, moves.size))
        target = np.ravel_multi_index((leaves, level, size), labels.shape)
        np.minimum.at(labels.reshape(-1), target, values[row - rows.start, at[there]])

    def into(self, take: int, state: int, level: int) -> Flags:
        """Return from which states a take leads to ``state`` with a label of ``level``."""
        moves = self._arrays[take]
        which = np.zeros(len(self._units), dtype=np.bool_)
        which[moves.found[(moves.leaves == state) & (moves.level == level)]] = True
        return which

    @cached_property
    def _skipping(self) -> tuple[Ints, Ints] | None:
        """Pairs (a state, one from which skipping devices leads there), by state, itself first; None: no others."""
        pairs = [(i, False, i) for i in range(len(self._units))]
        for i, unit in enumerate(self._units):
            skipped = {_key(x) for x in ([] if unit is None else self._taking.skips(unit))} - {()}
            pairs += [(self._number[key], True, i) for key in skipped]
        if len(pairs) == len(self._units):
            return None
        state, _, other = np.array(sorted(pairs)).T
        return state, other

    def skipped(self, labels: Ints) -> Ints:
        """Return the least labels behind open units whose rest is skipped."""
        if self._skipping is None:
            return labels
        state, other = self._skipping
        behind: Ints = np.minimum.reduceat(labels[:, :, other], np.flatnonzero(np.diff(state, prepend=-1)), axis=2)
        for level in range(len(behind)):  # what is skipped was nearer than that
            own = self._nearest > level
            behind[level][:, own] = labels[level][:, own]
        return behind

    def before(self, state: int, level: int) -> Ints:
        """Return the states whose labels up to ``level`` become such of ``state``, itself first."""
        if self._skipping is None or self._nearest[state] > level:
            return np.array([state])
        states, other = self._skipping
        found: Ints = other[states == state]
        return found

    def devices(self, steps: Sequence[Step]) -> list[tuple[int, ...]]:
        """Return the devices of the stages that take ``steps``."""
        unit: Unit | None = self._taking.whole(self.kinds.platform)
        found: list[tuple[int, ...]] = []
        for step in reversed(steps):
            assert unit is not None
            here, after = _key(self._units[step.found]), _key(self._units[step.leaves])
            if unit.key != here:
                unit = next(x for x in self._taking.skips(unit) if x is not None and x.key == here)
            take = self.takes[step.take]
            size = int(take.replicas[self._row[step.leaves], step.found])
            group = next(
                x
                for x in self._groups(unit)
                if _key(x.left) == after and len(x.devices) == size and self._floor(x) == take.floor
            )
            found.append(in_their_order(self.kinds.platform, reversed(group.devices)))
            unit = group.left
        return found[::-1]


@lru_cache(maxsize=4)
def counted(platform: Platform, replicas: bool, speed_of: tuple[Fraction, ...]) -> Counted:
    """Return the states of all orders of a platform's devices, remembered while searches ask for them again."""
    return Counted(DeviceKinds.on(platform, replicas), replicas, speed_of)


def _key(unit: Unit | None) -> Key:
    return () if unit is None else unit.key
