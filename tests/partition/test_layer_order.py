"""Orders of a DAG's layers: what stages between sets of layers cost, and the best over all orders."""

import random
from dataclasses import replace

import pytest
from cases.chains import published
from cases.dags import all_orders, best_of_all_orders, free_problem, random_dag

from pipeplan.check.bounds import proof
from pipeplan.cost import memory_model, time_model
from pipeplan.cost.layer_orders import ideals, members, several_orders
from pipeplan.cost.saved import entering_bytes, inner_bytes, saved_bytes
from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.partition.layer_orders.ideal_chain import IdealChain
from pipeplan.partition.layer_orders.idle_layers import idle_layers
from pipeplan.partition.layer_orders.layer_order import OrderEffort, best_ordered
from pipeplan.problem import Platform, Policy, Problem

CHOSEN = (7, 34, 41, 47, 51, 58, 66, 73, 84, 90, 94, 96, 98, 100, 109, 119, 128)  # order matters in most of them
SOME = OrderEffort(at_once=24, rounds=3)


def test_ideals_are_what_orders_pass_through():
    for seed in range(12):
        chain = random_dag(random.Random(seed), 6)
        orders = list(all_orders(chain))
        passed = {sum(1 << i for i in order[:n]) for order in orders for n in range(len(chain) + 1)}
        found = ideals(chain, 10**6)
        assert set(found) == passed
        assert len(found) == len(passed)
        assert all(a & ~b or n < m for n, a in enumerate(found) for m, b in enumerate(found) if a != b)
        assert ideals(chain, len(passed) - 1) is None
        assert several_orders(chain) == (len(orders) > 1)


def test_layers_that_take_no_time_double_no_ideals():
    chain = published("gnmt")
    idle = idle_layers(chain)
    assert len(ideals(chain, 10**6)) == 6565
    assert len(ideals(chain, 10**6, idle.early, idle.beside)) == 48
    assert chain.layers[idle.early[0]].name == "hidden-20"
    assert {chain.layers[i].name for i in idle.beside} == {f"__getitem__-{n}" for n in (9, 13, 18, 25, 27, 33, 39, 46)}
    problem = Problem(chain, Platform.flat(4, 16 * 10**9, 12 * 10**9), Policy(), replicas=False)
    found = best_ordered(problem)
    assert (found.ideals, found.exact, found.allocation.claimed_period_ns) == (48, True, 25_868_000)
    few = best_ordered(problem, OrderEffort(at_once=47, rounds=0))
    assert not few.exact


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


@pytest.mark.parametrize("saved", [False, True])
def test_stages_between_ideals_cost_what_they_cost_in_an_order_through_both(saved):
    for seed in range(8):
        rng = random.Random(seed)
        chain = random_dag(rng, 6, saved=saved, optimizer=True)
        some = ideals(chain, 10**6)
        between = IdealChain.of(chain, some)
        policy = Policy()
        for a, inner in enumerate(some):
            for b, outer in enumerate(some):
                assert between.is_range(a, b) == (inner != outer and not inner & ~outer)
                if not between.is_range(a, b):
                    assert saved_bytes(between, a, b) > 2**58
                    continue
                order = [*members(inner), *members(outer & ~inner), *members((1 << len(chain)) - 1 & ~outer)]
                moved, start, stop = chain.reordered(order), inner.bit_count(), outer.bit_count()
                assert between.cut_bytes[b] == moved.cut_bytes[stop]
                for ask in (saved_bytes, inner_bytes, entering_bytes, memory_model.segment, memory_model.weights_of):
                    assert ask(between, a, b) == ask(moved, start, stop), ask.__name__
                work = (time_model.work_ns(x, policy, i, j) for x, i, j in ((between, a, b), (moved, start, stop)))
                assert len(set(map(int, work))) == 1


def test_the_best_between_all_ideals_is_the_best_of_all_orders():
    compared = better = 0
    for problem in filter(None, map(free_problem, CHOSEN)):
        truth, found = best_of_all_orders(problem), best_ordered(problem)
        assert (found is None) == (truth is None)
        proved = proof(problem, any_order=True)
        assert not (proved.infeasible and truth)
        if found is None:
            continue
        assert found.complete
        assert found.exact
        assert found.allocation.claimed_period_ns == truth
        assert proved.period_ns <= truth
        moved = replace(problem, chain=problem.chain.reordered(found.order))
        assert smallest_period(moved).claimed_period_ns == truth
        given = smallest_period(problem)
        compared += 1
        better += given is None or given.claimed_period_ns > truth
    assert compared > 8
    assert better > 5


def test_where_ideals_are_many_some_are_looked_at_and_what_comes_is_a_plan_no_worse_than_the_given_order():
    better = 0
    for problem in filter(None, (free_problem(seed, layers=9) for seed in range(6))):
        given, found, best = smallest_period(problem), best_ordered(problem, SOME), best_ordered(problem)
        if given is None:
            continue
        assert not found.complete
        assert found == best_ordered(problem, SOME)
        moved = replace(problem, chain=problem.chain.reordered(found.order))
        assert best.allocation.claimed_period_ns <= found.allocation.claimed_period_ns
        assert smallest_period(moved).claimed_period_ns <= found.allocation.claimed_period_ns
        assert found.allocation.claimed_period_ns <= given.claimed_period_ns
        better += found.allocation.claimed_period_ns < given.claimed_period_ns
    assert better
