"""When are updates made that wait for a norm, or for sums that go on beside passes?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from ...errors import InvalidPlan
from ...schedule.timeline import Turn


class LateUpdates:
    """When each stage's gradients for a version are there, and when it is first used: the updates come between."""

    def __init__(self) -> None:
        self._due: dict[tuple[int, int], Turn] = {}  # by stage and version
        self._first: dict[tuple[int, int], Turn] = {}

    def used(self, stage: int, version: int, turn: Turn) -> None:
        """Note that a pass at ``turn`` uses ``version`` of the weights of ``stage``."""
        self._first[stage, version] = min(self._first.get((stage, version), turn), turn)

    def due(self, stage: int, version: int, turn: Turn) -> None:
        """Note that the stage's gradient for ``version`` is there behind ``turn``."""
        self._due[stage, version] = turn

    def norms(self, turns: Sequence[Turn] = (), sums_ns: Mapping[int, int] | None = None) -> list[tuple[Turn, int]]:
        """Return behind which turn all stages have their gradients, for each version that all make.

        Sums of stages that go on beside passes take ``sums_ns`` more: then return by when they are over the last of
        the ``turns`` of all passes, but leave one before the first update.
        """
        known: dict[int, Turn] = {}
        over: dict[int, int] = {}
        for (s, version), turn in self._due.items():
            known[version] = max(known.get(version, turn), turn)
            begin, duration, _ = turn
            over[version] = max(over.get(version, 0), begin + duration + (sums_ns or {}).get(s, 0))
        for version in known if turns else ():
            ends = [end for s, made in self._due if made == version and (end := self._end(s, version)) is not None]
            latest = bisect_left(turns, min(ends)) - 2 if ends else -1
            place = min(latest, bisect_left(turns, over[version], key=lambda turn: turn[0]))
            if place >= 0:
                known[version] = max(known[version], turns[place])
        return [(turn, version) for version, turn in known.items()]

    def _end(self, stage: int, version: int) -> Turn | None:
        """Return before which turn the stage must make a version: its first use, or when the next gradient is there."""
        ends = [self._first.get((stage, version)), self._due.get((stage, version + 1))]
        return min((end for end in ends if end is not None), default=None)

    def updates(self, clips: bool) -> Iterator[tuple[int, int, Turn, bool]]:
        """Yield (stage, version, turn, whether the update comes before that turn or behind it).

        It comes before the first use of the version, and before the next gradient is put aside. With ``clips``
        InvalidPlan where that would be before the norm is known.
        """
        norms = {version: turn for turn, version in self.norms()} if clips else {}  # at the earliest
        for (s, version), due in sorted(self._due.items(), key=lambda entry: (entry[0][1], entry[0][0])):
            known, turn = norms.get(version, due), self._end(s, version)
            if turn is not None and turn <= known:
                raise InvalidPlan(
                    [
                        f"stage {s} would have three gradients at once, because the norm of all gradients for "
                        f"update {version} is known too late; accumulate more microbatches"
                    ]
                )
            yield s, version, known if turn is None else turn, turn is not None
