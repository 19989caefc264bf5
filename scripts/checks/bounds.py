"""Is any bound of class any above a true optimum, and how far below it are they?

On random tiny instances, of chains and DAGs, on equal and unequal devices, flat and in two levels, half and full
duplex and blocking, with and without replicas and recomputation, whose memory mostly binds: the truth by brute force
(every allocation, each scheduled exactly) beside the bound from averages alone and the whole one. Exits with 1 where a
bound is above a truth, or says that nothing fits where something does. Then as many random plans of other schedules,
drained, message-driven and nF1B, which must not be below their bounds either.

    python scripts/checks/bounds.py --instances 300
    python scripts/checks/bounds.py --instances 300 --special   # the same of class one-special
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.bounds import instance
from cases.plans import random_plan, random_simulated_plan
from oracles.any_class import optimum

from pipeplan.check.bounds import proof, quick_proof
from pipeplan.check.bounds.strong import Refutations
from pipeplan.check.evaluate import evaluate
from pipeplan.partition.madpipe.exact import one_special_bound
from pipeplan.planner.periodic.special import proved_special
from pipeplan.problem import Problem


def main() -> None:
    """Print what is wrong, and by kind of instance the mean of optimum / bound before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--details", action="store_true", help="print every instance")
    parser.add_argument("--special", action="store_true", help="hold the bound of class one-special to its optimum")
    options = parser.parse_args()
    if options.special:
        sys.exit(special(range(options.first, options.first + options.instances)) > 0)
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    wrong = infeasible = proved = covered = 0
    spent = 0.0
    for seed in range(options.first, options.first + options.instances):
        problem = instance(seed)
        before = quick_proof(problem).period_ns
        began = time.process_time()
        after = proof(problem)
        spent += time.process_time() - began
        truth = optimum(problem)
        covered += truth is not None and covers(problem, truth)
        wrong += truth is not None and refuted(problem, truth)
        if truth is None:
            infeasible += 1
            proved += after.infeasible
            continue
        if after.infeasible or after.period_ns > truth or before > truth:
            wrong += 1
            print(f"{seed}: optimum {truth}, bounds {before} and {after}", flush=True)
            continue
        kinds = ["all", f"{'' if problem.replicas else 'no '}replicas", f"recomputes {problem.checkpointing}"]
        kinds += [f"weights {problem.policy.weights}"]
        kinds += ["unequal devices"] if len(set(problem.platform.devices)) > 1 else []
        kinds += ["two levels"] if len(problem.platform.levels) > 1 else []
        kinds += ["binds: " + after.part]
        for kind in kinds:
            ratios[kind].append((truth / before, truth / after.period_ns))
        if options.details:
            print(f"{seed}: optimum {truth}, bounds {before} and {after}", flush=True)
    print(f"{options.instances} instances, {wrong} wrong; {infeasible} infeasible, of which proved {proved}")
    print(f"just below the optimum no sets of stages cover the chain in {covered}")
    print(f"bounds took {1000 * spent / options.instances:.1f} ms each\n")
    print(f"{'optimum / bound':40s} instances  averages    whole   exact")
    for kind, pairs in ratios.items():
        one, two = (sum(x) / len(pairs) for x in zip(*pairs, strict=True))
        exact = sum(pair[1] == 1 for pair in pairs) / len(pairs)
        print(f"{kind:40s} {len(pairs):9d} {one:9.3f} {two:8.3f} {exact:7.0%}")
    wrong += sum(above(seed) for seed in range(options.first, options.first + options.instances))
    sys.exit(wrong > 0)


def special(seeds: range) -> int:
    """Print how far the bound of class one-special, and MadPipe's rules alone, are below its optimum; return how often
    either is above."""
    wrong, ratios = 0, defaultdict[str, list[tuple[float, float]]](list)
    for seed in seeds:
        problem = replace(instance(seed), replicas=False, checkpointing="none")
        truth = optimum(problem, special=True)
        if truth is None:
            continue
        rules, bound = one_special_bound(problem), proved_special(problem)
        if rules is None or bound is None or bound > truth:
            wrong += 1
            print(f"{seed}: optimum of class one-special {truth}, bounds {rules} and {bound}", flush=True)
            continue
        equal = len(set(problem.platform.devices)) == 1
        levels = "two levels" if len(problem.platform.levels) > 1 else "flat"
        ratios[f"{levels}, {'equal' if equal else 'unequal'} devices"].append((truth / rules, truth / bound))
    print(f"{'optimum / bound':28s} instances  MadPipe's rules  exact  whole  exact")
    for kind, found in ratios.items():
        means = [sum(pair[i] for pair in found) / len(found) for i in (0, 1)]
        exact = [sum(pair[i] == 1 for pair in found) / len(found) for i in (0, 1)]
        print(f"{kind:28s} {len(found):9d} {means[0]:16.3f} {exact[0]:6.0%} {means[1]:6.3f} {exact[1]:6.0%}")
    print(f"{wrong} wrong")
    return wrong


def refuted(problem: Problem, truth: int) -> bool:
    """Whether any condition, each by itself, refutes a period that can be met, the optimum or a longer one."""
    conditions = Refutations(problem)
    for period in (truth, truth + 1, truth * 11 // 10, truth * 2, truth * 10, None):
        parts = [conditions.refuted(period)]
        if period is not None:
            parts += [conditions.pool_refuted(period), conditions.cover_refuted(period)]
        for part in parts:
            if part is not None:
                print(f"{period} ns is refuted by {part}, the optimum is {truth}", flush=True)
                return True
    return False


def covers(problem: Problem, truth: int) -> bool:
    """Whether the condition that is looked at last refutes the period just below the optimum."""
    return Refutations(problem).cover_refuted(truth - 1) is not None


def above(seed: int) -> bool:
    """Whether the bound is above a random plan of a schedule that is no pattern, or a drained one."""
    rng = random.Random(seed)
    plan = random_simulated_plan(rng) if seed % 2 else random_plan(rng, weights=("flush",), most_devices=4)
    found, period = proof(Problem(plan.chain, plan.platform, plan.policy, True, "segments")), evaluate(plan).period_ns
    if found.infeasible or found.period_ns > period:
        print(f"{seed}: a plan of {plan.schedule.kind} takes {period}, bound {found}", flush=True)
    return found.infeasible or found.period_ns > period


if __name__ == "__main__":
    main()
