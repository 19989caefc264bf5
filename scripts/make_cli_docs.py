"""Write docs/reference/cli.md: what --help says of every command.

python scripts/make_cli_docs.py
"""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.cli import COMMANDS, group
from pipeplan.cli.grouped import EVERY

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
WIDTH = 110


def page() -> str:
    """Return the page: a section for each command, in the order of ``pipeplan --help``."""
    parts = ["# Command line", "What `--help-all` says. Made by `python scripts/make_cli_docs.py`."]
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None, name
        wide = {"terminal_width": WIDTH, "max_content_width": WIDTH}
        above = click.Context(group, info_name="pipeplan", **wide, **group.context_settings)  # a run has those, too
        context = click.Context(command, info_name=name, parent=above, **wide)
        context.meta[EVERY] = True
        parts.append(f"## {name}\n\n```\n{command.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
