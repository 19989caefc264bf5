"""Which names does a shell complete: GPUs, models, schedules, algorithms and what they have?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from ..choices import BEST, PLANNED


class Named(click.ParamType[str]):
    """A text that is one of ``names``, or with ``files`` a file; none is refused here. ``lists``: several by commas."""

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]], *, files: bool = False, lists: bool = False) -> None:
        self.names, self.files, self.lists = names, files, lists

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return what ``incomplete`` may become: names where any begin so, else a file."""
        before, comma, last = incomplete.rpartition(",") if self.lists else ("", "", incomplete)
        if last or not self.files:
            found = [CompletionItem(f"{before}{comma}{name}") for name in self.names() if name.startswith(last)]
            if found or not self.files:
                return found
        return [CompletionItem(incomplete, type="file")]


def _gpus() -> Iterable[str]:
    from ..files.machines.accelerators import accelerators

    return accelerators()


def _models() -> Iterable[str]:
    from ..zoo import MODELS, ZOO

    return (f"{ZOO}{name}" for name in MODELS)


def _profiles() -> Iterable[str]:
    from ..files.examples import PREFIX, examples

    return (f"{PREFIX}{name}" for name in examples())


def _schedules() -> Iterable[str]:
    from ..schedule.kinds import schedules

    return schedules()


def _algorithms() -> Iterable[str]:
    from ..api.comparing import NAMES

    return NAMES


def knobs(tuning: Iterable[str] = ()) -> Iterable[str]:
    """Return what -O may say: names that tune a search, and the options of algorithms with their values."""
    from ..partition import ALGORITHMS

    of_algorithms = {
        (name, str(value).lower()) for x in ALGORITHMS.values() for name, of in x.options.items() for value in of
    }
    return (*(f"{name}=" for name in tuning), *(f"{name}={value}" for name, value in sorted(of_algorithms)))


GPU = Named(_gpus, files=True)
MODEL = Named(_models)
PROFILE = Named(lambda: (*_models(), *_profiles()), files=True)
SCHEDULE = Named(_schedules)
RUN_SCHEDULE = Named(lambda: (*PLANNED, "pipedream", BEST), files=True)
WRITTEN = Named(lambda: (*_schedules(), "all", BEST), files=True)
ALGORITHMS_LIST = Named(_algorithms, lists=True)
