"""Which options state a configuration instead of searching for one?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

Command = TypeVar("Command", bound=Callable[..., Any])
NAMES = ("split", "replicas", "on", "recompute")
SEARCH = ("algorithm", "effort", "gap", "data_parallel")  # how to search


def stated_options(command: Command) -> Command:
    """Add the options that state a configuration."""
    for option in (
        click.option(
            "--recompute",
            metavar="all|none|each|LAYERS",
            help="With --split: layers to recompute: whole stages, each layer by itself, or ranges such as 0-3,8, a "
            "segment each.  [default: none]",
        ),
        click.option("--on", metavar="GPUS", help="With --split: the GPUs of each stage, such as 0,1/2/3/2."),
        click.option(
            "--replicas", metavar="COUNTS", help="With --split: GPUs of each stage, such as 2,1,1.  [default: 1 each]"
        ),
        click.option(
            "--split",
            "--split-at",
            "split",
            metavar="COUNTS|NAMES",
            help="Search nothing: evaluate stages of 4,4,4,5 layers, or those that later begin with the "
            "layers, or modules, named.",
        ),
    ):
        command = option(command)
    return command


def stated_of(shared: dict[str, Any]) -> dict[str, str] | None:
    """Take the options of :func:`stated_options` out of ``shared`` and return those given, None without --split.

    UsageError where they go without --split, or where it goes with an option that says how to search.
    """
    given = {name: value for name in NAMES if (value := shared.pop(name)) is not None}
    if not given:
        return None
    if "split" not in given:
        raise click.UsageError(f"--{next(iter(given))} goes with --split, which says the stages")
    context = click.get_current_context()
    for name in SEARCH:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--split searches nothing; leave out --{name.replace('_', '-')}")
    return given
