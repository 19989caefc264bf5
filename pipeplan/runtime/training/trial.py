"""Which evaluation of a run was the best so far?"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Trial:
    """The best evaluation so far: its ``value``, the less the better, the update ``step`` that it came after, and how
    many there have been ``since``."""

    value: float | None = None
    step: int = 0
    since: int = 0

    def after(self, step: int, value: float) -> tuple[Trial, bool]:
        """Return what it is behind another evaluation, and whether that is the best; NaN never is."""
        if value == value and (self.value is None or value < self.value):
            return Trial(value, step), True
        return replace(self, since=self.since + 1), False
