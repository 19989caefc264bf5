"""What is said beside plans of estimated times."""

from dataclasses import replace

from cases.plans import quick_bound, straight

from pipeplan.check.evaluate import evaluate
from pipeplan.plan import Alternative, Provenance
from pipeplan.problem import Policy, Problem
from pipeplan.report.searched import undecided
from pipeplan.report.words import coarse_sentence, estimated, orders_sentence


def test_an_estimated_plan_says_its_range_and_which_others_may_be_faster():
    plan = straight()
    period = 10**6
    result = replace(evaluate(plan), period_ns=period)

    def said(within, **options):
        others = (
            Alternative("2bw", plan.interval, round(1.04 * period)),
            Alternative("stash", plan.interval, 2 * period),
        )
        told = replace(plan.provenance, options=options, alternatives=others)
        one = replace(plan, chain=replace(plan.chain, within=within), provenance=told)
        return estimated(one, result), undecided(one, result)

    assert said(None) == (None, None)
    spans, others = said((0.5, 2.0))
    assert spans == "from 0.500 ms to 2.000 ms, as 9 of 10 such estimates were when measured"
    assert others == "2bw may be faster: estimates are off by more than these differ"
    degrees = {"1": {"period_ns": 100}, "2": {"period_ns": 130}, "4": {"period_ns": 140}, "8": {"bound_ns": 1}}
    assert said((0.9, 1.35), tensor=degrees)[1].startswith("2bw, tensor degree 2 may be faster")
    rows = [{"inter": x, "data": 8 // x, "microbatch": x, "batch_ns": 10 + x} for x in (1, 2, 4, 8)]
    named = said((0.5, 2.0), grids=rows, grid=rows[0])[1]
    assert named.startswith("2bw, 2 x 4 of microbatches of 2, 4 x 2 of microbatches of 4 and 1 more may be faster")


def test_only_a_search_of_all_cuts_says_what_it_left_out(monkeypatch):
    monkeypatch.setattr("pipeplan.report.words.coarseness", lambda _: "coarse")
    plan = straight()
    larger = replace(plan.platform.devices[0], memory_bytes=2 * 10**9)
    plan = replace(plan, platform=replace(plan.platform, devices=(larger, *plan.platform.devices[1:])))
    whole = quick_bound(Problem(plan.chain, plan.platform, plan.policy))

    def said(algorithm, weights, bounds=(whole,)):
        one = replace(
            plan, provenance=Provenance(algorithm), policy=Policy(weights, accumulate=16), lower_bounds=bounds
        )
        found = (orders_sentence(one, replace(whole, allocation=x)) for x in ("any", "contiguous"))
        return [coarse_sentence(one), *found]

    orders = "best of all 4 orders of 2 kinds of devices"
    assert [said(x, "2bw") for x in ("auto", "contiguous")] == [["coarse", None, orders]] * 2
    assert said("auto", "2bw", ()) == [None, None, orders]
    assert said("auto", "flush") == said("madpipe", "2bw") == [None, None, None]
