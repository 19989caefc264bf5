"""How does a command search, and where does its plan go then?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...names import SENTENCE, shown
from ..options import JSON, Output, time_limit
from ..progress import status
from .bill import Bill

if TYPE_CHECKING:
    from ...api.result import PlanResult

Command = TypeVar("Command", bound=Callable[..., Any])

OUTPUT = click.option("-o", "--output", type=Output(), help="Write the plan as JSON; - is standard output.")


def search_options(command: Command) -> Command:
    """Add the options of :func:`search`, and the time limit."""
    limited = time_limit("Stop searching after this time, such as 30s, and keep the best plan so far.")
    return limited(OUTPUT(JSON(command)))


def search(
    find: Callable[..., PlanResult],
    output: str | None,
    as_json: bool,
    verbose: bool = False,
    bill: Bill | None = None,
) -> None:
    """Write or show what ``find(progress=, status=)`` finds, ``verbose`` with reasons, and with the ``bill``."""
    from ...files.text import write_text
    from ...planner.periodic.incumbent import unsolved

    about = status()
    found = find(progress=about.improved, status=about)
    for note in filter(None, (unsolved(about), *dict.fromkeys(about.notes))):
        click.echo(f"note: {note}", err=True)
    text = found.text() if as_json or output is not None else ""
    if output is not None:
        write_text(output, text)
    if as_json and output != "-":
        write_text("-", text)
    elif output != "-":
        found.show(verbose=verbose)
        if bill is not None:
            plan = found.plan
            gpus, batch = len(plan.platform.whole or plan.platform), plan.interval * plan.chain.microbatch
            click.echo(bill.line(found.samples_per_second, gpus, batch))
        if output is not None:
            click.echo(f"written to {shown(output, SENTENCE)}")
