"""The README is true: every console block runs, prints what it says, and every command is in it."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases.patience import SECONDS

from pipeplan.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_every_command_is_documented() -> None:
    for name in COMMANDS:
        assert f"pipeplan {name}" in README, f"README says nothing about pipeplan {name}"


def test_the_first_commands_are_the_two_scripts() -> None:
    commands = re.findall(r"^(?:\$ |    )?((?:scripts/|pipeplan )\S+)", README, re.MULTILINE)
    assert commands[:2] == ["scripts/demo", "scripts/test"]


def test_quoted_paths_exist() -> None:
    for path in set(re.findall(r"`((?:scripts|profiles|pipeplan|tests)/[\w./-]+)`", README)):
        assert (ROOT / path).exists(), f"README names {path}, which is not there"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout to the blocks, which share it."""
    made = tmp_path_factory.mktemp("readme")
    (made / "profiles").symlink_to(ROOT / "profiles")
    return made


WRITTEN = re.compile(r"(?:-o|--trace|--recalibrated|--checkpoint) (\w[\w.]*)")


def blocks_before(block: str, folder: Path) -> list[str]:
    """The earlier blocks that write what ``block`` reads and is not there: another process may have run them."""
    lacking = {name for name in re.findall(r"[\w.]+", block) if not (folder / name).exists()}
    earlier = BLOCKS[: BLOCKS.index(block)]
    found = [x for x in earlier if lacking.intersection(WRITTEN.findall(x))]
    return [y for x in found for y in [*blocks_before(x, folder), x]]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0][2:60] for block in BLOCKS])
def test_console_blocks_print_what_they_say(block: str, folder: Path) -> None:
    """Lines after ``$ `` are commands; what follows is their output, where ``...`` stands for anything."""
    for each in dict.fromkeys([*blocks_before(block, folder), block]):
        check_block(each, folder)


def check_block(block: str, folder: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
    }
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        said = re.sub(r"^ *[\d.]+ s  .*\n", "", done.stderr, flags=re.MULTILINE)  # progress depends on the load
        got = done.stdout + (said if done.returncode else "")
        assert checker.check_output(wanted, got, flags), f"$ {command}\nREADME says:\n{wanted}\nit prints:\n{got}"
