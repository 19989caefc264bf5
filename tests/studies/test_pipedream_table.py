"""What the docs say of PipeDream's table and figures is what the scripts compute: those rows that take little time."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
from scripts.studies.myelin import memory as myelin_memory
from scripts.studies.pipedream import figures as pipedream_figures
from scripts.studies.pipedream import table1 as pipedream_table1

DOCS = "".join((ROOT / "docs" / "research" / f"{name}.md").read_text() for name in ("pipedream", "myelin"))
QUICK = [row for row in pipedream_table1.TABLE if row.model in ("vgg16", "alexnet")]


@pytest.mark.parametrize("row", QUICK, ids=[f"{row.model} {row.cluster}" for row in QUICK])
def test_the_table_is_what_the_script_prints(row: pipedream_table1.Row) -> None:
    assert f"| {' | '.join(pipedream_table1.cells(row))} |" in DOCS


def test_the_row_of_vgg_follows_by_hand() -> None:
    """553 MB round a ring of 16 at 1.25 GB/s: 830 ms for 16 microbatches of 336 ms each."""
    found = pipedream_table1.predicted(QUICK[0])
    assert found.data_parallel == pytest.approx(2 * 15 / 16 * 553.43 / 1.25 / 16, rel=1e-4)
    assert found.exposed == pytest.approx(found.data_parallel + 672.535 / 2 / 16, rel=1e-4)
    assert (found.named, found.best_config) == (pytest.approx(found.best, rel=1e-6), "15-1")


def test_memory_and_bytes_are_those_of_the_docs() -> None:
    stages, alone = pipedream_figures.figure16("gnmt")
    assert f"| {', '.join(f'{x:.2f}' for x in stages)} | {alone:.2f} | {max(stages) / alone:.2f} |" in DOCS
    parallel, other, config = pipedream_figures.figure17("vgg16", pipedream_figures.SHAPES)
    straight = pipedream_figures.figure17("vgg16", pipedream_figures.STRAIGHT)[1]
    assert f"| VGG-16 | {parallel:.2f} | {other:.2f} ({config}) | {straight:.2f} |" in DOCS
    assert parallel == pytest.approx(2 * 3 / 4 * 553.43 / 64, rel=1e-4)


def test_depths_of_myelin_are_those_of_the_docs() -> None:
    efficiency = myelin_memory.formula(6) / 34.05
    assert f"{myelin_memory.formula(24, efficiency):.2f} | 42.21 |" in DOCS
    assert myelin_memory.simulated(24, myelin_memory.calibrated()) == pytest.approx(42.21, abs=0.005)
