"""Which options state a configuration instead of searching for one?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
NAMES = ("split", "replicas", "on", "recompute")


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
