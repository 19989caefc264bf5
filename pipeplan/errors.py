"""What can go wrong for a user, each with the exit code that the command line answers."""

from __future__ import annotations

BY_SIGNAL = 128  # and the signal's number: as a shell says it of what a signal has ended
BROKEN_PIPE = BY_SIGNAL + 13  # SIGPIPE's

MOST_SAID = 100  # sentences of one error


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


class NoBetter(Infeasible):
    """No plan is shorter than one that is known; none is below ``bound_ns``."""

    def __init__(self, bound_ns: int) -> None:
        self.bound_ns = bound_ns
        super().__init__("no plan is shorter than the best one known")


class InvalidPlan(PipeplanError):
    """A plan that breaks the rules; ``violations`` holds one sentence for each, and one for those beyond a hundred."""

    def __init__(self, violations: list[str]) -> None:
        more = len(violations) - MOST_SAID
        self.violations = violations if more <= 1 else [*violations[:MOST_SAID], f"and {more} more like these"]
        super().__init__("; ".join(self.violations))

    def __reduce__(self) -> tuple[type[InvalidPlan], tuple[list[str]]]:
        return type(self), (self.violations,)  # on its way from another process


class RunFailed(PipeplanError):
    """A run on torch that ended early; the message names the root cause, the rank and the operation."""


class RunStopped(PipeplanError):
    """A run on torch that was asked to stop; the message says where its checkpoint is, if it has left one.

    ``report`` is its RunReport, where it was asked in time for one.
    """

    def __init__(self, message: str, exit_code: int = BY_SIGNAL + 2, report: object = None) -> None:
        self.exit_code, self.report = exit_code, report
        super().__init__(message)


class OutputLost(PipeplanError):
    """Standard output took no more; ``reason`` is what the system says, None where the reader of a pipe has gone."""

    def __init__(self, reason: str | None) -> None:
        self.reason, self.exit_code = reason, BROKEN_PIPE if reason is None else BadInput.exit_code
        super().__init__(f"standard output cannot be written: {reason}")


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C asks the process to end; as with that, a search answers with its best plan so far."""

    def __init__(self, number: int) -> None:
        self.number, self.exit_code = number, BY_SIGNAL + number
        super().__init__(number)
