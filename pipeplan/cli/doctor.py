"""``pipeplan doctor``: what has this machine for planning and training, in which version, and what lacks?"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import click

from ..errors import PipeplanError
from ..names import SENTENCE, shown
from ..runtime.surroundings import Finding, findings
from ..version import __version__
from .options import JSON
from .showing import new_command, print_json

MARKS = {"good": "ok", "absent": "-", "broken": "!!"}
OLDEST = (3, 11)
NEEDED = {
    name: Finding(name, "broken", "lacks", f"pip install {name}")
    for name in ("click", "msgspec", "networkx", "numpy", "pulp", "rich")
}
EXTRAS = {
    name: Finding(name, "absent", f"not installed: {use} need it", f"pip install 'pipeplan[{extra}]'")
    for name, extra, use in (
        ("transformers", "models", "models named hf:CONFIG"),
        ("matplotlib", "plots", "pictures, -o x.png"),
    )
}


@new_command("pipeplan doctor", "pipeplan doctor --json")
@JSON
def command(as_json: bool) -> None:
    """Show versions of Python, packages, solvers, torch, gloo and NCCL, and the GPUs with their links.

    Exit 1 when something installed doesn't work (!!). A missing package (-) is not a fault.
    """
    found = examined()
    broken = [x for x in found if x.state == "broken"]
    if as_json:
        print_json({"good": not broken, "findings": [asdict(x) for x in found]})
    else:
        width = max(len(x.name) for x in found)
        for x in found:
            told = shown("; ".join(filter(None, (x.told, x.help))), SENTENCE)
            click.echo(f"{MARKS[x.state]:2}  {x.name:{width}}  {told}")
    raise click.exceptions.Exit(1 if broken else 0)


def examined() -> list[Finding]:
    """Return what there is, in the order in which it is needed, torch and its GPUs last."""
    return [*_python(), *_packages(NEEDED), *_solvers(), *_packages(EXTRAS), *findings()]


def _python() -> Iterator[Finding]:
    said = f"{platform.python_version()}, {os.cpu_count()} CPUs, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < OLDEST:
        yield Finding("Python", "broken", said, f"at least {'.'.join(map(str, OLDEST))} is needed")
    else:
        yield Finding("Python", "good", said)
    yield Finding("pipeplan", "good", __version__)


def _solvers() -> Iterator[Finding]:
    from ..schedule.periodic.solvers import refuse_lacking

    try:
        refuse_lacking("cbc")
        yield Finding("CBC", "good", "runs: -O solver=cbc")
    except PipeplanError as error:
        yield Finding("CBC", "broken", str(error), "-O solver=highs")
    found = _version("highspy")
    if found is None:
        yield Finding("HiGHS", "absent", "not installed: -O solver=highs needs it", "pip install 'pipeplan[highs]'")
        return
    try:
        refuse_lacking("highs")
        yield Finding("HiGHS", "good", found)
    except PipeplanError as error:
        yield Finding("HiGHS", "broken", str(error), "pip install --force-reinstall highspy")


def _packages(lacking: dict[str, Finding]) -> Iterator[Finding]:
    for name, lacks in lacking.items():
        found = _version(name)
        yield Finding(name, "good", found) if found else lacks


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
