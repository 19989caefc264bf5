"""``pipeplan list, schema, completion``: which names are there, what may files say, how does a shell complete words?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import BadInput
from .options import JSON
from .showing import GroupedCommand

SHELLS = ("bash", "zsh", "fish")
PLACES = {  # below the home folder: where a shell looks by itself
    "bash": ".local/share/bash-completion/completions/pipeplan",
    "fish": ".config/fish/completions/pipeplan.fish",
}
ZSH_LINE = 'eval "$(pipeplan completion zsh)"'
WHOLE_NAMES = "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n"  # or bash would take zoo:gpt2-xl for three words


@click.command(
    cls=GroupedCommand, examples=("pipeplan completion --install", "pipeplan completion fish > pipeplan.fish")
)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option("--install", is_flag=True, help="Install it in your home folder.")
def completion(shell: str | None, install: bool) -> None:
    """Print or install the text with which a shell completes commands, options, zoo models, GPUs and schedules.

    SHELL is bash, zsh or fish, by default that of $SHELL. Without --install, put the text into the shell's own startup.
    """
    chosen = shell or Path(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise BadInput(f"completion: $SHELL doesn't name {', '.join(SHELLS[:-1])} or {SHELLS[-1]}; name one")
    if install:
        click.echo(f"{_installed(chosen)}; new shells complete pipeplan")
    else:
        click.echo(_script(chosen), nl=False)


def _script(shell: str) -> str:
    """Return the text that a shell reads."""
    from click.shell_completion import get_completion_class

    from . import group

    found = get_completion_class(shell)
    assert found is not None
    text = found(group, {}, "pipeplan", "_PIPEPLAN_COMPLETE").source()
    return (WHOLE_NAMES if shell == "bash" else "") + text.rstrip() + "\n"


def _installed(shell: str) -> str:
    """Install, once however often; return in words what was done."""
    from ..files.text import write_text

    if shell == "zsh":
        path = Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
        text = path.read_text() if path.exists() else ""
        if ZSH_LINE in text:
            return f"{path} has it already"
        with path.open("a") as file:
            file.write(f"{'' if not text or text.endswith(chr(10)) else chr(10)}{ZSH_LINE}\n")
        return f"one line added to {path}"
    path = Path.home() / PLACES[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(str(path), _script(shell))
    return f"written to {path}"


@click.command(cls=GroupedCommand, examples=("pipeplan schema profile", "pipeplan schema plan > plan.schema.json"))
@click.argument("name", type=click.Choice(["profile", "platform", "plan", "trace", "accelerator"]))
def schema(name: str) -> None:
    """Print the JSON Schema of a profile, a platform, a plan, the trace of a run, or an accelerator."""
    from ..files.plans import SCHEMAS, schema
    from ..runtime.measure.trace_file import TraceFile

    click.echo(json.dumps(schema((SCHEMAS | {"trace": TraceFile})[name]), indent=1))


# --- list -------------------------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def _gpus() -> Rows:
    from ..files.machines.accelerators import accelerators

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


def _models() -> Rows:
    from ..zoo import MODELS, ZOO
    from ..zoo.text.sizes import TRANSFORMERS

    sizes = {name: f"{x.parameters / 1e9:.3g} billion parameters" for name, x in TRANSFORMERS.items()}
    return [{"name": f"{ZOO}{name}", "summary": sizes.get(name, "")} for name in MODELS]


def _profiles() -> Rows:
    from ..files.profiles import PREFIX, examples, read_profile

    rows = []
    for name in examples():
        chain = read_profile(f"{PREFIX}{name}")
        summary = f"{len(chain)} layers, microbatch {chain.microbatch}, {chain.dtype}, {chain.device}"
        rows.append({"name": f"{PREFIX}{name}", "summary": summary})
    return rows


def _schedules() -> Rows:
    from ..schedule.kinds import KINDS as OF_PLANS
    from ..schedule.runnable import schedules

    return [
        {"name": name, "summary": x.summary, "source": x.source, "weights": x.weights, "plans": name in OF_PLANS}
        for name, x in schedules().items()
    ]


def _algorithms() -> Rows:
    from ..partition import ALGORITHMS

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


NAMED: dict[str, Callable[[], Rows]] = {
    "gpus": _gpus,
    "models": _models,
    "profiles": _profiles,
    "schedules": _schedules,
    "algorithms": _algorithms,
}


@click.command(cls=GroupedCommand, examples=("pipeplan list gpus", "pipeplan list algorithms --json"))
@click.argument(
    "what", metavar="[gpus|models|profiles|schedules|algorithms]", type=click.Choice([*NAMED]), required=False
)
@JSON
def listing(what: str | None, as_json: bool) -> None:
    """List names: GPUs for --gpu, models of the zoo, profiles that come along, schedules, and algorithms with
    their -O options.
    """
    told = {name: NAMED[name]() for name in ([what] if what else NAMED)}
    if as_json:
        click.echo(json.dumps(told[what] if what else told, indent=1))
        return
    for place, (name, rows) in enumerate(told.items()):
        if what is None:
            click.echo(f"{chr(10) if place else ''}{name}:")
        _print(rows, "" if what else "  ")


def _print(rows: Sequence[dict[str, Any]], indent: str) -> None:
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        knobs = "".join(f"; -O {name}={'|'.join(values)}" for name, values in row.get("options", {}).items())
        source = f" [{row['source']}]" if "source" in row else ""
        click.echo(f"{indent}{row['name']:{width}}  {row['summary']}{knobs}{source}".rstrip())
