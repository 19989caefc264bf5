"""``pipeplan completion``: how does a shell complete commands, options and names?"""

from __future__ import annotations

import os
from pathlib import Path

import click

from ...errors import BadInput
from ..grouped import GroupedCommand

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
def command(shell: str | None, install: bool) -> None:
    """Print what lets a shell complete commands, options, zoo models, GPUs, schedules and algorithms, or install it.

    SHELL is bash, zsh or fish, by default that of $SHELL. Without --install, put the text into the shell's own startup.
    """
    chosen = shell or Path(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise BadInput(f"completion: $SHELL doesn't name {', '.join(SHELLS[:-1])} or {SHELLS[-1]}; name one")
    if not install:
        click.echo(script(chosen), nl=False)
        return
    click.echo(f"{_installed(chosen)}; new shells complete pipeplan")


def script(shell: str) -> str:
    """Return the text that a shell reads."""
    from click.shell_completion import get_completion_class

    from .. import group

    found = get_completion_class(shell)
    assert found is not None
    text = found(group, {}, "pipeplan", "_PIPEPLAN_COMPLETE").source()
    return (WHOLE_NAMES if shell == "bash" else "") + text.rstrip() + "\n"


def _installed(shell: str) -> str:
    """Install, once however often; return in words what was done."""
    from ...files.text import write_text

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
    write_text(str(path), script(shell))
    return f"written to {path}"
