"""``pipeplan list, schema, completion``: which names are there, what may files say, how does a shell complete words?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..errors import BadInput
from .options import JSON
from .showing import new_command, print_json

SHELLS = ("bash", "zsh", "fish")
PLACES = {  # below the home folder: where a shell looks by itself
    "bash": ".local/share/bash-completion/completions/pipeplan",
    "fish": ".config/fish/completions/pipeplan.fish",
}
ZSH_LINE = 'eval "$(pipeplan completion zsh)"'
WHOLE_NAMES = "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n"  # or bash would take zoo:gpt2-xl for three words


@new_command("pipeplan completion --install", "pipeplan completion fish > pipeplan.fish")
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


@new_command("pipeplan schema profile", "pipeplan schema plan > plan.schema.json")
@click.argument("name", type=click.Choice(["profile", "platform", "plan", "trace", "accelerator"]))
def schema(name: str) -> None:
    """Print the JSON Schema of a profile, a platform, a plan, the trace of a run, or an accelerator."""
    from ..files.plans import SCHEMAS, schema
    from ..runtime.measure.trace_file import TraceFile

    print_json(schema((SCHEMAS | {"trace": TraceFile})[name]))


Rows = list[dict[str, Any]]


def _gpus() -> Rows:
    from ..files.machines.accelerators import accelerators

    return [
        {"name": name, "summary": f"{x.name}: {x.memory} at {x.bandwidth}, links of {x.link or 'unknown bandwidth'}"}
        | {"gpu": x.name} | {key: getattr(x, key) for key in ("memory", "bandwidth", "link", "tflops")}
        for name, x in accelerators().items()
    ]  # fmt: skip


def _models() -> Rows:
    from ..zoo import MODELS, ZOO
    from ..zoo.text.sizes import TRANSFORMERS

    sizes = {name: f"{x.parameters / 1e9:.3g} billion parameters" for name, x in TRANSFORMERS.items()}
    return [{"name": f"{ZOO}{name}", "summary": sizes.get(name, "")} for name in MODELS]


def _profiles() -> Rows:
    from ..files.profiles import PREFIX, examples, read_profile

    read = {name: read_profile(name) for name in (f"{PREFIX}{x}" for x in examples())}
    return [
        {"name": name, "summary": f"{len(x)} layers, microbatch {x.microbatch}, {x.dtype}, {x.device}"}
        for name, x in read.items()
    ]


def _schedules() -> Rows:
    from ..schedule.kinds import KINDS as OF_PLANS
    from ..schedule.kinds import schedules

    return [
        {"name": name, "summary": x.summary, "source": x.source, "weights": x.own_weights, "plans": name in OF_PLANS}
        for name, x in schedules().items()
    ]


def _algorithms() -> Rows:
    from ..partition import ALGORITHMS

    portfolio = "the portfolio: exact contiguous first, then MadPipe's plans, then local search over all plans"
    rows: list[tuple[str, str, str, bool, dict[str, list[str]]]] = [("auto", portfolio, "the default", False, {})]
    for name, x in ALGORITHMS.items():
        options = {key: [str(value).lower() for value in values] for key, values in x.options.items()}
        rows.append((name, x.summary, x.source, x.optimal, options))
    return [dict(zip(("name", "summary", "source", "optimal", "options"), row, strict=True)) for row in rows]


NAMED = {"gpus": _gpus, "models": _models, "profiles": _profiles, "schedules": _schedules, "algorithms": _algorithms}


@new_command("pipeplan list gpus", "pipeplan list algorithms --json")
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
        print_json(told[what] if what else told)
        return
    for place, (name, rows) in enumerate(told.items()):
        if what is None:
            click.echo(f"{chr(10) if place else ''}{name}:")
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            knobs = "".join(f"; -O {key}={'|'.join(values)}" for key, values in row.get("options", {}).items())
            source = f" [{row['source']}]" if "source" in row else ""
            click.echo(f"{'' if what else '  '}{row['name']:{width}}  {row['summary']}{knobs}{source}".rstrip())
