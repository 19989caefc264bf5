"""Broken files and odd command lines at random, always the same ones; scripts/checks/fuzz.py tries others for long."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.fuzz.commands import FREE, Commands, without_usual_values
from cases.fuzz.readers import SHARES, Readers

pytest.importorskip("torch")  # it reads checkpoints, and estimates profiles
SEED = 13
FILES = 4  # for each share of a kind
LINES = range(40)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory, good: Path) -> Readers:
    return Readers(tmp_path_factory.mktemp("readers"), good)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, good: Path) -> Commands:
    return Commands(tmp_path_factory.mktemp("commands"), good)


@pytest.mark.parametrize("kind", SHARES)
def test_broken_files_end_as_they_have_to(kind: str, readers: Readers) -> None:
    found = {}
    for index in range(FILES * SHARES[kind]):
        case = readers.case(SEED, index, [kind])
        if faults := readers.faults(case):
            found[index, case.arguments] = faults
    assert not found


def test_every_option_is_usually_given_what_it_takes() -> None:
    """Or odd command lines are refused for it, and nothing behind it is tried."""
    free = FREE | {
        (command, option) for command in ("plan", "compare", "estimate") for option in ("--tokens", "--price")
    }
    assert set(without_usual_values()) == free


@pytest.mark.parametrize("part", range(2))
def test_odd_command_lines_end_as_they_have_to(part: int, commands: Commands) -> None:
    found = {}
    for index in LINES[part::2]:
        case = commands.case(SEED, index)
        if faults := commands.faults(case):
            found[index, case.arguments] = faults
    assert not found
