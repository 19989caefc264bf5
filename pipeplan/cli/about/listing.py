"""``pipeplan list``: which GPUs, models, profiles, schedules and algorithms have names?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from ..grouped import GroupedCommand
from ..options import JSON

KINDS = ("gpus", "models", "profiles", "schedules", "algorithms")


@click.command(cls=GroupedCommand, examples=("pipeplan list gpus", "pipeplan list algorithms --json"))
@click.argument("what", metavar="[gpus|models|profiles|schedules|algorithms]", type=click.Choice(KINDS), required=False)
@JSON
def command(what: str | None, as_json: bool) -> None:
    """List what has a name: GPUs for --gpu, models of the zoo, profiles that come along, schedules, and algorithms with
    their -O options.
    """
    told = {name: _rows(name) for name in ([what] if what else KINDS)}
    if as_json:
        click.echo(json.dumps(told[what] if what else told, indent=1))
        return
    for place, (name, rows) in enumerate(told.items()):
        if what is None:
            click.echo(f"{chr(10) if place else ''}{name}:")
        _print(rows, "" if what else "  ")


def _rows(what: str) -> list[dict[str, Any]]:
    rows = {"gpus": _gpus, "models": _models, "profiles": _profiles, "schedules": _schedules, "algorithms": _algorithms}
    return rows[what]()


def _print(rows: Sequence[dict[str, Any]], indent: str) -> None:
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        knobs = "".join(f"; -O {name}={'|'.join(values)}" for name, values in row.get("options", {}).items())
        source = f" [{row['source']}]" if "source" in row else ""
        click.echo(f"{indent}{row['name']:{width}}  {row['summary']}{knobs}{source}".rstrip())


def _gpus() -> list[dict[str, Any]]:
    from ...files.machines.accelerators import accelerators

    return [
        {
            "name": name,
            "summary": f"{x.name}: {x.memory} at {x.bandwidth}, links of {x.link or 'unknown bandwidth'}",
            "gpu": x.name,
            "memory": x.memory,
            "bandwidth": x.bandwidth,
            "link": x.link,
            "tflops": x.tflops,
        }
        for name, x in accelerators().items()
    ]


def _models() -> list[dict[str, Any]]:
    from ...zoo import MODELS, ZOO
    from ...zoo.text.sizes import TRANSFORMERS

    sizes = {name: f"{x.parameters / 1e9:.3g} billion parameters" for name, x in TRANSFORMERS.items()}
    return [{"name": f"{ZOO}{name}", "summary": sizes.get(name, "")} for name in MODELS]


def _profiles() -> list[dict[str, Any]]:
    from ...files.examples import PREFIX, examples
    from ...files.profiles import read_profile

    rows = []
    for name in examples():
        chain = read_profile(f"{PREFIX}{name}")
        summary = f"{len(chain)} layers, microbatch {chain.microbatch}, {chain.dtype}, {chain.device}"
        rows.append({"name": f"{PREFIX}{name}", "summary": summary})
    return rows


def _schedules() -> list[dict[str, Any]]:
    from ...schedule.kinds import KINDS as OF_PLANS
    from ...schedule.kinds import schedules

    return [
        {"name": name, "summary": x.summary, "source": x.source, "weights": x.weights, "plans": name in OF_PLANS}
        for name, x in schedules().items()
    ]


def _algorithms() -> list[dict[str, Any]]:
    from ...partition import ALGORITHMS

    auto = {
        "name": "auto",
        "summary": "the portfolio: exact contiguous first, then MadPipe's plans, then local search over all plans",
        "source": "the default",
        "optimal": False,
        "options": {},
    }
    return [
        auto,
        *(
            {
                "name": name,
                "summary": x.summary,
                "source": x.source,
                "optimal": x.optimal,
                "options": {key: [str(value).lower() for value in values] for key, values in x.options.items()},
            }
            for name, x in ALGORITHMS.items()
        ),
    ]
