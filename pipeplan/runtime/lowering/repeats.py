"""How are long lists of instructions kept that repeat themselves? As what repeats, and how often.

A program in its steady state does the same for every few microbatches, with microbatches and versions counted on. So a
rank's instructions take as much memory as its fill, one round of the steady state and its drain, however long it runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import overload

from .instructions import Instruction, later, version_uses


@dataclass(frozen=True)
class Repeat:
    """``instructions`` that come ``times`` times, first with ``microbatch`` and ``version`` added to theirs.

    Each time after that ``microbatches`` and ``versions`` more are added.
    """

    instructions: tuple[Instruction, ...]
    times: int = 1
    microbatches: int = 0
    versions: int = 0
    microbatch: int = 0
    version: int = 0

    def __len__(self) -> int:
        return len(self.instructions) * self.times

    def at(self, index: int) -> Instruction:
        """Return one of the instructions."""
        turn, place = divmod(index, len(self.instructions))
        return later(
            self.instructions[place], self.microbatch + turn * self.microbatches, self.version + turn * self.versions
        )


class Repeated(Sequence[Instruction]):
    """The instructions of ``parts`` one after the other; they are made when they are asked for."""

    def __init__(self, parts: Sequence[Repeat] = ()) -> None:
        self.parts = tuple(part for part in parts if len(part))
        self._ends = list(accumulate(map(len, self.parts)))

    @staticmethod
    def of(instructions: Sequence[Instruction]) -> Repeated:
        """Return ``instructions`` themselves if they are a listing, or one that holds them."""
        return instructions if isinstance(instructions, Repeated) else Repeated([Repeat(tuple(instructions))])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> list[Instruction]: ...
    def __getitem__(self, index: int | slice) -> Instruction | list[Instruction]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, place)
        return self.parts[number].at(place - (self._ends[number - 1] if number else 0))

    def __iter__(self) -> Iterator[Instruction]:
        for part in self.parts:
            for turn in range(part.times):
                microbatch = part.microbatch + turn * part.microbatches
                version = part.version + turn * part.versions
                for x in part.instructions:
                    yield later(x, microbatch, version)

    def places(self, over: Callable[[Instruction], bool]) -> Iterator[int]:
        """Yield the place of each instruction, but of a part nothing after a turn that was ``over`` as a whole.

        What is over stays so, and is so with larger microbatches and versions too: a run of millions of updates that
        was asked to stop need not look at them all.
        """
        begin = 0
        for part in self.parts:
            for first in range(begin, begin + len(part), len(part.instructions)):
                turn = range(first, first + len(part.instructions))
                yield from turn
                if all(over(self[place]) for place in turn):
                    break
            begin += len(part)

    def later(self, microbatches: int, versions: int) -> Repeated:
        """Return the listing with microbatches and versions counted on by so many."""
        return Repeated(
            [replace(x, microbatch=x.microbatch + microbatches, version=x.version + versions) for x in self.parts]
        )

    def where(self, holds: Callable[[Instruction], bool]) -> Repeated:
        """Return those for which ``holds``, which must not ask for microbatches or versions."""
        return Repeated([replace(x, instructions=tuple(filter(holds, x.instructions))) for x in self.parts])

    def short(self) -> list[Instruction]:
        """Return the instructions with every part at most twice, and what follows counted on by so much less."""
        taken: list[Instruction] = []
        microbatches = versions = 0  # left out so far
        for part in self.parts:
            taken += Repeated([replace(part, times=min(part.times, 2))]).later(-microbatches, -versions)
            left = max(part.times - 2, 0)
            microbatches, versions = microbatches + left * part.microbatches, versions + left * part.versions
        return taken

    def kinds(self) -> Iterator[Instruction]:
        """Yield what the listing is made of, each part once: all stages, edges and peers, but not all microbatches."""
        for part in self.parts:
            yield from part.instructions

    def uses(self, stage: int, by: Collection[int] = ()) -> Counter[int]:
        """Return how many passes use each version of ``stage``, as :func:`.instructions.version_uses` counts them."""
        total: Counter[int] = Counter()
        for part in self.parts:
            once = version_uses(part.instructions, stage, by)
            for turn in range(part.times):
                for version, count in once.items():
                    total[version + part.version + turn * part.versions] += count
        return total


def continued(
    shorter: Sequence[Instruction], longer: Sequence[Instruction], microbatches: int, versions: int, times: int
) -> Repeated | None:
    """Return ``shorter`` with ``times`` rounds of ``microbatches`` and ``versions`` more; None if it has no such round.

    ``longer`` is ``shorter`` with one round more, which tells where the round stands: after what both begin with. What
    follows it must be the rest of ``shorter``, counted on.
    """
    size = len(longer) - len(shorter)
    begin = next((i for i, (a, b) in enumerate(zip_longest(shorter, longer)) if a != b), len(shorter))
    rest = [later(x, microbatches, versions) for x in shorter[begin:]]
    if size <= 0 or begin < size or list(longer[begin + size :]) != rest:
        return None
    body = tuple(longer[begin : begin + size])
    if [later(x, microbatches, versions) for x in shorter[begin - size : begin]] != list(body):
        return None  # the round before is another
    return Repeated(
        [
            Repeat(tuple(shorter[:begin])),
            Repeat(body, times, microbatches, versions),
            Repeat(tuple(shorter[begin:]), 1, 0, 0, times * microbatches, times * versions),
        ]
    )
