"""How does a command search for a plan, and where does it go then?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..names import SENTENCE, shown
from .options import JSON, Output, time_limit

if TYPE_CHECKING:
    from ..planner.incumbent import Settings
    from ..planner.plan import Planned

Command = TypeVar("Command", bound=Callable[..., Any])

OUTPUT = click.option("-o", "--output", type=Output(), help="Write the plan as JSON; - is standard output.")


def search_options(command: Command) -> Command:
    """Add the options of :func:`search`."""
    limited = time_limit("Stop searching after this long, such as 30s, with the best so far.")
    return limited(OUTPUT(JSON(command)))


def search(
    find: Callable[[Settings], Planned],
    show: Callable[[Planned], None],
    output: str | None,
    as_json: bool,
    solver: str = "cbc",
    gap: float | None = None,
) -> None:
    """Write or ``show`` what ``find`` finds, with the seconds that it took."""
    from ..files.plans import plan_text
    from ..files.text import write_text
    from ..planner.incumbent import GAP, Settings, Status
    from .progress import LiveLine

    began, status = time.perf_counter(), Status()
    with LiveLine(status) as live:
        settings = Settings(solver, gap=GAP if gap is None else gap, progress=live.best, status=status)  # type: ignore[arg-type]  # click checked it
        found = find(settings)
    seconds = round(time.perf_counter() - began, 3)
    plan = replace(found.plan, provenance=replace(found.plan.provenance, seconds=seconds))
    text = plan_text(plan, found.evaluation) if as_json or output is not None else ""
    if output is not None:
        write_text(output, text)
    if as_json and output != "-":
        write_text("-", text)
    elif output != "-":
        show(replace(found, plan=plan))
        if output is not None:
            click.echo(f"written to {shown(output, SENTENCE)}")
