"""What do signals and lost streams do to a command? ``pipeplan`` or ``python -m pipeplan``, a process of its own.

Until a command is at work a signal ends the process at once, as nothing has begun. Then it is raised where the command
is, which cleans up behind itself; another signal meanwhile changes nothing.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # typing takes longer to load than a Ctrl-C to come
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> NoReturn:
    """Run the command, and exit with its code."""
    _on_signals(_exit_at_once)
    _open_streams()
    from .cli import main as run_command

    sys.unraisablehook = _unraisable
    _on_signals(_raise)
    try:
        run_command()
    except SystemExit as error:
        _on_signals(_exit_at_once)
        _flush()
        code = error.code or 0
        if isinstance(code, int) and (code > 128 or "RANK" in os.environ):
            atexit._run_exitfuncs()  # multiprocessing has a folder to remove
            _flush()
            # Python may remember a Ctrl-C that has been dealt with, and end by it. A rank never finalises: exchanges
            # that will never end may hold it up, and Python ends threads that are in C++ by what C++ aborts at
            os._exit(code)
        raise


def _on_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let ``handler`` have the signals that are not ignored, as behind nohup they are."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _exit_at_once(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _raise(number: int, _: FrameType | None) -> None:
    """Raise what the signal stands for, unless an earlier one is on its way up through what cleans up."""
    from .errors import Ended

    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return
        error = error.__context__
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Ended(number)


def _unraisable(found: Any) -> None:
    """End the process by a signal that was raised where nothing can be, such as while an object is deleted."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        os._exit(128 + getattr(found.exc_value, "number", signal.SIGINT))
    sys.__unraisablehook__(found)


def _open_streams() -> None:
    """Give the numbers of closed streams to no other file; lose what is told to a standard error that takes nothing.

    What is written to a closed standard output fails as on a full disk: with OutputLost.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    for stream, failed in ((sys.stdout, _lost), (sys.stderr, _ignored)):
        for name in ("write", "flush"):
            setattr(stream, name, _guarded(getattr(stream, name), failed))


def _guarded(operation: Callable[..., Any], failed: Callable[[OSError], None]) -> Callable[..., Any]:
    def guarded(*arguments: Any) -> Any:
        if arguments == ("",):  # click tries streams so, and takes no notice of what it hears
            return 0
        try:
            return operation(*arguments)
        except OSError as error:
            return failed(error)

    return guarded


def _lost(error: OSError) -> None:
    from .errors import OutputLost

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or what is left would fail again, at the latest when Python ends
    raise OutputLost(None if isinstance(error, BrokenPipeError) else error.strerror) from error


def _ignored(_: OSError) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _flush() -> None:
    """Write what is left of the output of a command that has ended already."""
    from .errors import OutputLost

    try:
        sys.stdout.flush()
    except OutputLost:
        return


if __name__ == "__main__":
    main()
