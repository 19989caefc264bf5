"""What can go wrong for a user, each with the exit code that the command line answers."""

from __future__ import annotations


class PipeplanError(Exception):
    """A failure that is the user's to see: one clear sentence, never a traceback."""

    exit_code = 1


class BadInput(PipeplanError):
    """Input that cannot be read or makes no sense; the message names the place and the numbers."""

    exit_code = 2


class CodeFailed(PipeplanError):
    """The user's own code raised, or ended the program; the message says what it said, and in which file and line."""


class Infeasible(PipeplanError):
    """No plan exists under the limits; the message names what binds and the least change that helps."""


class InvalidPlan(PipeplanError):
    """A plan that breaks the rules; ``violations`` holds one sentence for each."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = list(violations)
        super().__init__("; ".join(self.violations))


class RunFailed(PipeplanError):
    """A run on torch that ended early; the message names the root cause, the rank and the operation."""


class RunStopped(PipeplanError):
    """A run on torch that was asked to stop and has left a checkpoint; the message says where."""

    exit_code = 130
