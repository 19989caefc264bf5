"""Longest spans of synthesised orders beside the best public ones, with bounds: figures of docs/research/synthesis.md.

    python -m scripts.studies.synthesis --solver highs   (a quarter of an hour; --only 4,12 for one size)
    python -m scripts.studies.synthesis --only 4,12,8 --picture docs/images/synthesised.svg
    python -m scripts.studies.synthesis --random 126   (tiny problems: how many orders are the best of all)

V placement, times of F, B and W of every chunk, at most so many chunk activations on a GPU. Public: V-Min, V-Half, ZB-V
and the schedule search of "Pipeline Parallelism with Controllable Memory" (Qi et al. 2024), of its own scheduler.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from pipeplan.api.synthesizing import graph_of_times, synthesize
from pipeplan.choices import Solver
from pipeplan.deadline import NEVER
from pipeplan.schedule.programs.controlled import v_half, v_min
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.synthesis.exact import best_words
from pipeplan.schedule.synthesis.justify import Orders
from pipeplan.schedule.synthesis.synthesize import EFFORT, Synthesis, proved
from pipeplan.schedule.timeline import Timeline, longest_span_ns

UNIT, REAL = (1, 1, 1), (20, 24, 16)
SIZES = ((4, 8), (4, 12), (6, 18), (8, 16), (8, 24), (8, 32), (16, 48))
TINY, LONG = 54, 10**6  # passes; steps of the exact search
PUBLIC = {  # (GPUs, microbatches, times): best public spans by limit, other than V-Min's and V-Half's
    (4, 12, UNIT): {4: 83, 5: 80, 6: 77, 8: 72},
    (4, 12, REAL): {4: 1912, 5: 1828, 6: 1592, 8: 1488},
    (6, 18, UNIT): {6: 125, 7: 122, 8: 119, 9: 116, 12: 108},
    (6, 18, REAL): {6: 2880, 7: 2776, 8: 2468, 9: 2408, 12: 2240},
}


def public(gpus: int, microbatches: int, times: tuple[int, int, int]) -> dict[int, int]:
    """Return the best public longest span for each limit."""
    graph = graph_of_times(gpus, "vee", times)
    found: dict[int, int] = {}
    for build, limit in ((v_min, 2 * ((gpus + 4) // 3)), (v_half, 2 * ((gpus + 2) // 2))):
        found[limit] = longest_span_ns(simulate(build(graph, microbatches)))
    for limit, span in PUBLIC.get((gpus, microbatches, times), {}).items():
        found[limit] = min(span, found.get(limit, span))
    return dict(sorted(found.items()))


def main() -> None:
    """Print a row for each case, and what they say together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solver", default="cbc", choices=["cbc", "highs"])
    parser.add_argument("--only", default="", help="GPUs,microbatches or GPUs,microbatches,limit")
    parser.add_argument("--times", default="", help="1,1,1 or 20,24,16")
    parser.add_argument("--effort", type=int, default=1, help="times the usual moves")
    parser.add_argument("--solver-seconds", type=float, help="for one more linear program each, behind the search")
    parser.add_argument("--picture", help="draw the last case beside V-Half")
    parser.add_argument("--random", type=int, help="so many tiny problems instead")
    given = parser.parse_args()
    if given.random:
        count_best(given.random, given.solver)
        return
    only = tuple(map(int, given.only.split(","))) if given.only else ()
    gaps: dict[tuple[int, int, int], list[float]] = {UNIT: [], REAL: []}
    print("| GPUs | microbatches | F, B, W | limit | public | synthesised | bound | gap | s |\n|" + "---|" * 9)
    last: tuple[Synthesis, int, int, tuple[int, int, int]] | None = None
    for times in (UNIT, REAL):
        for gpus, microbatches in SIZES:
            if given.times and given.times != ",".join(map(str, times)):
                continue
            for limit, best in public(gpus, microbatches, times).items():
                if only and (gpus, microbatches, limit)[: len(only)] != only:
                    continue
                began = time.monotonic()
                moves = given.effort * EFFORT // (6 * gpus * microbatches)
                about = {"gpus": gpus, "times": times, "limit": limit, "moves": moves, "solver": given.solver}
                found = synthesize(microbatches=microbatches, barrier=False, **about).found
                if given.solver_seconds:
                    found = proved(found, given.solver, each_s=given.solver_seconds)
                gaps[times].append(found.gap)
                last = found, gpus, microbatches, times
                gap = "best" if found.optimal else f"{found.gap:.2%}"
                print(
                    f"| {gpus} | {microbatches} | {', '.join(map(str, times))} | {limit} | {best} | {found.value_ns} | "
                    f"{found.bound_ns} | {gap} | {time.monotonic() - began:.0f} |",
                    flush=True,
                )
    for times, some in gaps.items():
        if some:
            best = sum(not gap for gap in some)
            print(f"{times}: mean gap {sum(some) / len(some):.2%}, {best} of {len(some)} proved best")
    if given.picture and last is not None:
        found, gpus, microbatches, times = last
        picture(found, simulate(v_half(graph_of_times(gpus, "vee", times), microbatches)), given.picture)


def count_best(instances: int, solver: Solver) -> None:
    """Hold random tiny problems to the best of all orders, which a long exact search finds, and print by what they miss
    it and whether that is proved."""
    ratios: list[float] = []
    proofs = unknown = 0
    for seed in range(instances):
        rng = random.Random(seed)
        gpus, placement, transfer = rng.randint(2, 3), rng.choice(["straight", "vee", "loop"]), rng.choice([0, 0, 1, 5])
        chunks = 1 + (placement != "straight")
        microbatches = rng.randint(2, TINY // (3 * gpus * chunks))
        about: dict[str, Any] = {"gpus": gpus, "placement": placement, "transfer": transfer, "solver": solver}
        times, limit = [rng.randint(1, 24) for _ in range(3)], rng.randint(chunks, chunks * microbatches)
        found = synthesize(
            microbatches=microbatches, times=times, limit=limit, barrier=rng.random() < 0.5, **about
        ).found
        proofs += found.optimal
        done, words = (True, None) if found.optimal else best_words(found.problem, found.value_ns, LONG, NEVER)
        unknown += not done
        best = found.value_ns
        if words is not None:
            orders = Orders(found.problem, words)
            best = orders.value if orders.settle() else best
            print(f"{seed}: {found.value_ns}, the best is {best}", flush=True)
        ratios += [found.value_ns / best] if done else []
    reached = sum(ratio == 1 for ratio in ratios)
    print(f"{reached} of {len(ratios)} are the best, {max(ratios):.3f} at worst; {proofs} proved, {unknown} not known")


def picture(found: Synthesis, known: Timeline, path: str) -> None:
    """Draw a synthesised order above a known one."""
    from pipeplan.report.gantt import draw_bars, make_figure, save_figure, timeline_rows

    runs = {"synthesised": found.timeline, "V-Half": known}
    titles = [f"{name}: longest span {longest_span_ns(x)}" for name, x in runs.items()]
    drawn = [[row for row in timeline_rows(x) if row.device is not None] for x in runs.values()]
    figure, charts = make_figure([len(rows) for rows in drawn])
    end = max(found.timeline.makespan_ns, known.makespan_ns)
    for axes, rows, title in zip(charts, drawn, titles, strict=True):
        draw_bars(axes, rows, 0, end)
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    save_figure(figure, charts[0], titles[0], path)


if __name__ == "__main__":
    main()
