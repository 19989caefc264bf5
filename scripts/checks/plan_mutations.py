"""Change every single field of thirteen kinds of plans in every way, and say what is accepted without a reason.

Every change is refused with a sentence that names a place, or accepted with a reason of ``tests/cases/mutations.py``;
what is accepted goes through the readers of plans. Also names reasons that nothing needs.

With ``--judged N`` it makes random plans instead, edits them in up to two places, and holds the figures of what is
accepted, and of what is counted anew, to ``tests/oracles/plans.py``.

usage: python scripts/checks/plan_mutations.py [--readers] [--judged N [--seed S]]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.mutations import ACCEPTED, PLACE, document_of, judged_edit, kinds, mutations, reason_of, refusal

from pipeplan.files.plans import load_plan, plan_text
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.report.page.html import report_html
from pipeplan.report.tables.plan import print_plan
from pipeplan.report.tables.simulations import print_pattern, print_simulation
from pipeplan.schedule.deadlock import plan_deadlock


def show(file: Path) -> None:
    """Let everything that reads a plan read this one."""
    plan = load_plan(str(file))
    assert not plan_deadlock(plan)
    run = simulate_plan(plan)
    with contextlib.redirect_stdout(io.StringIO()):
        print_plan(plan)
        print_pattern(plan)
        print_simulation(run)
    report_html(run)
    plan_text(plan)


def judge(seeds: range) -> int:
    """Return 1 if figures of an edited plan are others than the oracle's."""
    ends, bad = Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            ended, wrong = judged_edit(random.Random(seed), Path(name))
            ends[ended] += 1
            bad += bool(wrong)
            for sentence in wrong:
                print(f"{seed}: {ended}: {sentence}", flush=True)
    print(f"{len(seeds)} edits: {', '.join(f'{n} {what}' for what, n in ends.most_common())}; {bad} findings")
    return min(bad, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", action="store_true", help="let every reader of plans read what is accepted")
    parser.add_argument("--judged", type=int, metavar="N", help="edits of random plans, judged by an oracle")
    parser.add_argument("--seed", type=int, default=0, help="of the first edit")
    arguments = parser.parse_args()
    if arguments.judged:
        return judge(range(arguments.seed, arguments.seed + arguments.judged))
    counts, reasons, bad = Counter[str](), Counter[str](), 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, plan in kinds().items():
            for place, change, document in mutations(document_of(plan)):
                counts["changes"] += 1
                try:
                    found = refusal(document, folder)
                    if not found and arguments.readers:
                        show(folder / "plan.json")
                except Exception as error:
                    found = [f"{type(error).__name__}: {error}"]
                    print(f"{kind}: {place}: {change}: {found[0]}")
                    bad += 1
                    continue
                counts["refused" if found else "accepted"] += 1
                reason = reason_of(place, change)
                if not found and reason is not None:
                    reasons[reason] += 1
                elif not found:
                    print(f"{kind}: {place}: {change}: accepted, and nothing says why")
                    bad += 1
                for sentence in found:
                    if not PLACE.search(sentence):
                        print(f"{kind}: {place}: {change}: refused without a place: {sentence}")
                        bad += 1
    for reason in (reason for _, reason in ACCEPTED.values() if reason not in reasons):
        print(f"nothing needs: {reason}")
        bad += 1
    print(f"{dict(counts)} in {time.perf_counter() - began:.0f} s; {bad} findings")
    for reason, count in reasons.most_common():
        print(f"{count:6}  {reason}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
