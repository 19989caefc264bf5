"""Write docs/reference/cli.md: what --help says of every command, each option that several commands have once.

python scripts/make_cli_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import fill

import click

from pipeplan.cli import COMMANDS, group
from pipeplan.cli.showing import EVERY

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
WIDTH = 110
HEAD = (
    "# Command line",
    "The text of `--help-all`. Made by `python scripts/make_cli_docs.py`. An option that several commands have is "
    "explained at the first; the others list it under `as above`.",
)
OPTION = re.compile(r"^  (-.*\n(?: {4,}.*\n|\n(?= {4,}))*)", re.MULTILINE)


def page() -> str:
    """Return the page: a section for each command, in the order of ``pipeplan --help``."""
    parts = list(HEAD)
    explained: set[str] = set()
    for name in COMMANDS:
        parts.append(f"## {name}\n\n```\n{shortened(help_of(name) + chr(10), explained)}\n```")
    return "\n\n".join(parts) + "\n"


def help_of(name: str) -> str:
    """What ``pipeplan NAME --help-all`` prints."""
    command = group.get_command(click.Context(group), name)
    assert command is not None, name
    wide = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    above = click.Context(group, info_name="pipeplan", **wide, **group.context_settings)  # a run has those, too
    context = click.Context(command, info_name=name, parent=above, **wide)
    context.meta[EVERY] = True
    return command.get_help(context)


def shortened(text: str, explained: set[str]) -> str:
    """Return a help without the options in ``explained``, which gets the others; those are named at the end."""
    known: list[str] = []

    def keep(found: re.Match[str]) -> str:
        entry = " ".join(found[1].split())
        if entry in explained:
            known.extend(x for x in re.findall(r"(?<!\S)--[\w-]+", entry)[:1] if x != "--help")
            return ""
        explained.add(entry)
        return found[0]

    kept = re.sub(r"\n\w[^\n]*:\n(?=\n|\Z)", "", OPTION.sub(keep, text))
    return kept.strip() + (
        "\n\n" + fill(f"as above: {', '.join(known)}", WIDTH, break_on_hyphens=False) if known else ""
    )


if __name__ == "__main__":
    PAGE.write_text(page())
