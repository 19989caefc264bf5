"""Orders of a DAG's layers: which there are, how they are taken back, and what the few that are tried gain."""

import random
from dataclasses import replace

from cases.chains import published
from cases.dags import all_orders, best_of_all_orders, free_problem, random_dag

from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.planner.layer_orders import other_orders, several_orders
from pipeplan.problem import Platform, Policy, Problem

CHOSEN = (7, 34, 41, 47, 51, 58, 66, 73, 84, 90, 94, 96, 98, 100, 109, 119, 128)  # order matters in most of them


def test_orders_are_such_that_layers_stand_behind_what_they_read():
    several = 0
    for seed in range(30):
        chain = random_dag(random.Random(seed), 6)
        orders = set(all_orders(chain))
        found = list(other_orders(chain))
        assert several_orders(chain) == (len(orders) > 1)
        assert set(found) <= orders - {tuple(range(6))}
        assert len(found) == len(set(found)) <= 3
        several += len(found) > 1
    assert several > 10


def test_an_order_can_be_taken_back():
    rng = random.Random(1)
    for _ in range(12):
        chain = random_dag(rng, 6, saved=True)
        chain = replace(chain, tied=((0, 3),))
        one, other = (rng.choice(list(all_orders(chain))) for _ in range(2))
        moved = chain.reordered(one)
        assert [x.name for x in moved.layers] == [chain.layers[i].name for i in one]
        assert moved.in_own_order() == chain
        again = [one.index(i) for i in other]
        assert moved.reordered(again) == chain.reordered(other)


def test_in_some_networks_another_order_is_the_best_of_all():
    compared = better = 0
    for problem in filter(None, map(free_problem, CHOSEN)):
        truth, given = best_of_all_orders(problem), smallest_period(problem)
        others = (
            smallest_period(replace(problem, chain=problem.chain.reordered(x))) for x in other_orders(problem.chain)
        )
        found = [x.claimed_period_ns for x in (given, *others) if x is not None]
        assert not found or min(found) >= truth
        compared += bool(found)
        better += bool(found) and min(found) == truth and (given is None or given.claimed_period_ns > truth)
    assert compared > 8
    assert better > 2


def test_a_published_network_gains_on_slow_links_by_small_cuts():
    chain = published("resnet50")
    problem = Problem(chain, Platform.flat(8, 16 * 10**9, 3 * 10**8), Policy(), True, "stages")
    first = next(other_orders(chain))
    given, small = smallest_period(problem), smallest_period(replace(problem, chain=chain.reordered(first)))
    assert small.claimed_period_ns < 0.97 * given.claimed_period_ns
