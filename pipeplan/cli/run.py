"""``pipeplan run``: train a model from a plan on torch processes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from ..units import parse_time
from .model import ZOO
from .options import JSON, PLAN


@click.command()
@PLAN
@click.option(
    "--model", metavar="MODEL", help="zoo:NAME or module:function.  [default: the zoo model of the plan's name]"
)
@click.option("--data", metavar="MODULE:FUNCTION", help="data(index, seed) -> (input, target).  [default: the zoo's]")
@click.option("--steps", type=click.IntRange(1), default=50, show_default=True, help="Weight updates.")
@click.option("--lr", type=float, default=0.1, show_default=True, help="Learning rate.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--timeout", metavar="TIME", help="Longest wait for another rank, such as 60s.  [default: from the plan]")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of each process.")
@click.option(
    "--save", metavar="FILE", type=click.Path(path_type=Path), help="Write the trained state_dict (torch.save)."
)
@JSON
def command(
    plan: str,
    model: str | None,
    data: str | None,
    steps: int,
    lr: float,
    seed: int,
    timeout: str | None,
    threads: int,
    save: Path | None,
    as_json: bool,
) -> None:
    """Train from PLAN with one process per GPU over torch.distributed, and print measured beside predicted.

    Starts its processes itself; under torchrun it is the rank that the environment names.

    \b
    Example: pipeplan run plan.json --model zoo:gpt-tiny --steps 50
    """
    from ..files import load_plan

    loaded = load_plan(plan)
    from ..runtime.launch import run_plan
    from ..runtime.model import ModelSpec

    name = (model or loaded.chain.name).removeprefix(ZOO)
    timeout_s = None if timeout is None else parse_time(timeout, "--timeout") / 1e9
    report = run_plan(
        loaded, ModelSpec(name, data), steps=steps, lr=lr, seed=seed, timeout_s=timeout_s, threads=threads, save=save
    )
    if report is None:  # another rank under torchrun reports
        return
    if as_json:
        figures = dataclasses.asdict(report)
        del figures["times"]  # for every operation of every rank: thousands
        click.echo(json.dumps({**figures, "samples_per_s": report.samples_per_s}, indent=1))
        return
    from ..report.run import print_run

    print_run(loaded, report)
