"""Which devices can a stage take of a server, a unit of servers and so on, and what does it leave?

Stages take a unit's devices one after the other. So what is left of a unit are parts from which nothing was taken, and
of one *open* part the rest: the part in which the last stage took its last devices. In a server any may be taken, since
an order within it changes nothing but which devices a stage has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, NamedTuple

from ...problem import Platform

Key = tuple[Any, ...]  # what is left up to the numbers of devices: units with the same are interchangeable


class Unit(NamedTuple):
    """What is left of a unit: untouched ``parts`` (the devices of one of level 0), equal ones side by side, and the
    open part."""

    parts: tuple[Any, ...]
    open: Unit | None
    key: Key

    def nearest(self, level: int) -> int:
        """Return the level of the innermost open part; ``level`` is the unit's own."""
        return level if self.open is None else self.open.nearest(level - 1)


class Group(NamedTuple):
    """Devices that a stage takes, in this order, what they leave (None: nothing), and the level that joins them."""

    devices: tuple[int, ...]
    left: Unit | None
    span: int


@dataclass(frozen=True)
class Taking:
    """Stages take devices of the kinds ``of``, several of them where there may be ``replicas``."""

    of: tuple[int, ...]
    replicas: bool

    def whole(self, platform: Platform) -> Unit:
        """Return all of a platform, untouched."""
        sizes = (1, *platform.unit_sizes)

        def unit(start: int, level: int) -> Any:
            if level == 0:
                return start
            parts = [unit(i, level - 1) for i in range(start, start + sizes[level], sizes[level - 1])]
            return self._unit(sorted(parts, key=self._key), None)

        found: Unit = unit(0, len(platform.levels))
        return found

    def groups(self, unit: Unit, level: int, eligible: frozenset[int], beyond: bool) -> Iterator[Group]:
        """Yield the groups of ``eligible`` kinds in a unit of ``level``; only such that go ``beyond`` one part.

        A group that goes beyond a part takes all that is eligible of it and of the parts that it passes through: taking
        another there instead of the first one that it takes in its last part keeps what the group is worth, and leaves
        more in one place. Of equal parts it takes the last.
        """
        if level == 0:
            good = [] if beyond else [d for d in unit.parts if self.of[d] in eligible]
            for some in self._choices(good) if self.replicas else ([x[0]] for x in self._alike(good)):
                if some:
                    yield Group(tuple(some), self._left([d for d in unit.parts if d not in some], None), 0)
            return
        if unit.open is not None:
            for group in self.groups(unit.open, level - 1, eligible, beyond):
                yield group._replace(left=self._left(unit.parts, group.left))
        first = self._eligible(unit.open, eligible)
        if unit.open is not None and not (first and self.replicas):
            return  # what is left of it has to be skipped before
        useful = [x for x in unit.parts if self._eligible(x, eligible)]
        for through in self._choices(useful) if self.replicas else [[]]:
            passed = (*first, *(d for x in through for d in self._eligible(x, eligible)))
            for last, *_ in self._alike([x for x in useful if x not in through]):
                others = [x for x in unit.parts if x is not last and x not in through]
                for group in self.groups(last, level - 1, eligible, beyond and not passed):
                    span = level if passed else group.span
                    yield Group((*passed, *group.devices), self._left(others, group.left), span)

    def skips(self, unit: Unit) -> Iterator[Unit | None]:
        """Yield what is left when what is left of an open part, of any level, is skipped."""
        if unit.open is not None:
            yield self._left(unit.parts, None)
            for left in self.skips(unit.open):
                yield self._left(unit.parts, left)

    def _unit(self, parts: Sequence[Any], open_part: Unit | None) -> Unit:
        return Unit(tuple(parts), open_part, (tuple(map(self._key, parts)), () if open_part is None else open_part.key))

    def _left(self, parts: Sequence[Any], open_part: Unit | None) -> Unit | None:
        return self._unit(parts, open_part) if parts or open_part is not None else None

    def _key(self, part: Any) -> Any:
        return self.of[part] if isinstance(part, int) else part.key

    def _alike(self, parts: Sequence[Any]) -> list[list[Any]]:
        """Return the equal ones of ``parts`` together, the last in front."""
        return [list(x)[::-1] for _, x in groupby(parts, key=self._key)]

    def _choices(self, parts: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield every choice of ``parts``, of equal ones the last."""
        alike = self._alike(parts)
        for counts in product(*(range(len(x) + 1) for x in alike)):
            yield [x for n, some in zip(counts, alike, strict=True) for x in some[:n]]

    def _eligible(self, part: Any, eligible: frozenset[int]) -> tuple[int, ...]:
        return tuple(d for d in devices_of(part) if self.of[d] in eligible)


def devices_of(part: Any) -> Iterator[int]:
    """Yield the devices of a part, or of what is left of one (None: nothing), in the order in which they are taken."""
    if isinstance(part, int):
        yield part
    elif part is not None:
        yield from devices_of(part.open)
        for inner in reversed(part.parts):
            yield from devices_of(inner)
