"""Every shipped profile on 2, 4 and 8 GPUs, with two memories, under four policies: the portfolio beside its baselines.

    python -m scripts.studies.profiles [PROFILE ...] [--gpus 2,4,8] [--interval 64] [--jobs 2] [-o out/profiles.md]

Roomy is 16 GB; tight is a quarter more than the least with which 2bw has a plan on so many GPUs. All plans of a row
update weights at one interval, those under ``latest`` after 4 microbatches, since it holds all of a mini-batch. Rows
are kept in a CSV file beside the page and not computed again. The exit code is 1 where a baseline's period is shorter
than that of ``auto``.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import groupby
from pathlib import Path

from pipeplan.files.profiles import read_profile
from pipeplan.planner.periodic.explain import least_memory
from pipeplan.planner.what_if.compare import compare
from pipeplan.problem import Platform, Policy, Problem

SHIPPED = Path(__file__).parents[2] / "profiles"
ALGORITHMS = ("data-parallel", "gpipe", "pipedream", "madpipe", "contiguous", "auto")
POLICIES = ("flush", "2bw", "stash", "latest")
MINI_BATCH = 4  # microbatches between two updates under latest, which holds all of them at once
ROOMY, BANDWIDTH, STEP = 16 * 10**9, 12 * 10**9, 10**8
HEAD = """# All shipped profiles

Of each profile the period in ms per microbatch (CPU seconds of the
search), links of {bandwidth:g} GB/s, an update every {interval} microbatches (under `latest`, which holds all
microbatches of an update at once, every {mini_batch}), segments may be recomputed; `-` where the
algorithm has no plan that fits. The gap is that of `auto` to the
bound of class any. Made by `python -m scripts.studies.profiles`; the shortest period of a
row is bold. `gpipe` drains and stands under that policy alone.
"""


@dataclass(frozen=True)
class Case:
    """One row to compute: a profile's file, GPUs, bytes of memory, and how weights are kept."""

    profile: str
    gpus: int
    memory: int
    weights: str


@dataclass(frozen=True)
class Cell(Case):
    """What one algorithm reached: ns per microbatch (0: no plan), the bound of class any, CPU seconds."""

    algorithm: str
    period_ns: int
    bound_ns: int
    seconds: float


def problem_of(case: Case, interval: int) -> Problem:
    chain = read_profile(str(SHIPPED / f"{case.profile}.json"))
    platform = Platform.flat(case.gpus, case.memory, BANDWIDTH)
    interval = MINI_BATCH if case.weights == "latest" else interval
    return Problem(chain, platform, Policy(case.weights, interval), checkpointing="segments")  # type: ignore[arg-type]


def cases(profile: str, gpus: Iterable[int], interval: int) -> list[Case]:
    found = []
    for count in gpus:
        least = least_memory(problem_of(Case(profile, count, ROOMY, "2bw"), interval))
        tight = -(-5 * least // (4 * STEP)) * STEP if least is not None else ROOMY
        found += [Case(profile, count, memory, weights) for memory in (tight, ROOMY) for weights in POLICIES]
    return found


def row(task: tuple[Case, int]) -> list[Cell]:
    case, interval = task
    names = [name for name in ALGORITHMS if name != "gpipe" or case.weights == "flush"]
    (found,) = compare(problem_of(case, interval), [case.gpus], [case.memory], names, clock=time.process_time)
    return [
        Cell(*astuple(case), x.algorithm, x.period_ns or 0, found.bound_ns, round(x.seconds, 2)) for x in found.cells
    ]


def read(path: Path) -> list[Cell]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Cell(x["profile"], int(x["gpus"]), int(x["memory"]), x["weights"], x["algorithm"], int(x["period_ns"]),
                 int(x["bound_ns"]), float(x["seconds"]))
            for x in csv.DictReader(file)
        ]  # fmt: skip


def page(cells: Sequence[Cell], interval: int) -> str:
    text = [HEAD.format(bandwidth=BANDWIDTH / 1e9, interval=interval, mini_batch=MINI_BATCH)]
    for profile, of_profile in groupby(cells, key=lambda cell: cell.profile):
        text += [
            f"\n## {profile}\n",
            f"| GPUs | memory | weights | {' | '.join(ALGORITHMS)} | gap |",
            "|---" * 10 + "|",
        ]
        for case, group in groupby(of_profile, key=lambda cell: (cell.gpus, cell.memory, cell.weights)):
            reached = {cell.algorithm: cell for cell in group}
            best = min((x.period_ns for x in reached.values() if x.period_ns), default=0)
            auto = reached["auto"]
            gap = f"{auto.period_ns / auto.bound_ns - 1:.1%}" if auto.period_ns else ""
            columns = " | ".join(shown(reached[name], best) if name in reached else "" for name in ALGORITHMS)
            text.append(f"| {case[0]} | {case[1] / 1e9:g} GB | {case[2]} | {columns} | {gap} |")
    return "\n".join(text) + "\n"


def shown(cell: Cell, best: int) -> str:
    if not cell.period_ns:
        return "-"
    period = f"{cell.period_ns / 1e6:.3f}"
    return f"{f'**{period}**' if cell.period_ns == best else period} ({cell.seconds:.1f})"


def beaten(cells: Sequence[Cell]) -> list[str]:
    """Return in words where ``auto`` is longer than another algorithm."""
    autos = {astuple(x)[:4]: x.period_ns for x in cells if x.algorithm == "auto"}
    return [
        f"{x.profile}, {x.gpus} GPUs of {x.memory / 1e9:g} GB, {x.weights}: {x.algorithm} {x.period_ns} ns, auto "
        f"{autos[astuple(x)[:4]]} ns"
        for x in cells
        if x.period_ns and not 0 < autos[astuple(x)[:4]] <= x.period_ns
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", nargs="*", default=sorted(x.stem for x in SHIPPED.glob("*.json")))
    parser.add_argument("--gpus", default="2,4,8")
    parser.add_argument("--interval", type=int, default=64, help="microbatches between two updates")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=Path("out/profiles.md"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    kept = arguments.output.with_suffix(".csv")
    cells = read(kept)
    done = {Case(*astuple(x)[:4]) for x in cells}
    gpus = [int(x) for x in arguments.gpus.split(",")]
    asked = [case for profile in arguments.profiles for case in cases(profile, gpus, arguments.interval)]
    left = [(case, arguments.interval) for case in asked if case not in done]
    with multiprocessing.Pool(arguments.jobs) as pool:
        for number, found in enumerate(pool.imap(row, left), start=1):
            cells += found
            best = next(x for x in found if x.algorithm == "auto")
            print(f"{number}/{len(left)} {best}", file=sys.stderr)
            with kept.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow([x.name for x in fields(Cell)])
                writer.writerows(map(astuple, cells))
    order = {case: i for i, case in enumerate(asked)}
    cells = sorted((x for x in cells if Case(*astuple(x)[:4]) in order), key=lambda x: order[Case(*astuple(x)[:4])])
    arguments.output.write_text(page(cells, arguments.interval))
    worse = beaten(cells)
    print(*worse, f"{len(asked)} rows, auto longer than another in {len(worse)}", sep="\n")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
