"""Servers whose GPUs share network cards: who sends by which, what queues there, and what bounds make of it."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from cases.chains import random_chain

from pipeplan.check.bounds import any_bound
from pipeplan.check.validate import pattern_violations
from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem
from pipeplan.schedule.pattern import starts_of
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.solvers import SolverLimits
from pipeplan.schedule.programs.one_f_one_b import gpipe
from pipeplan.schedule.simulate import simulate

CHAIN = Chain("c", tuple(Layer(f"{i}", 2, 2, 0, 5, 1) for i in range(4)), 0)


def servers(count, gpus, links, bandwidth=10**9):
    levels = Level(gpus, 10**12), Level(count, bandwidth, 0, links)
    return Platform((Device(10**6),) * (count * gpus), levels)


def graph_on(platform, *groups):
    stages = [Stage(s, s + 1, group) for s, group in enumerate(groups)]
    chain = replace(CHAIN, layers=CHAIN.layers[: len(groups)])
    return stage_graph(chain, platform, Policy("stash"), stages)


def links_of(graph):
    return [(resource.name, resource.replicas) for resource in graph.resources if resource.is_link]


@pytest.mark.parametrize(("gpus", "links", "expected"), [
    (4, 1, [0, 0, 0, 0, 1, 1, 1, 1]),
    (4, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
    (4, 3, [0, 0, 1, 2, 3, 3, 4, 5]),
    (4, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
    (2, 5, [0, 2, 5, 7]),
])  # fmt: skip
def test_neighbours_share_a_link(gpus, links, expected):
    platform = servers(2, gpus, links)
    assert [platform.link_of(d) for d in range(2 * gpus)] == expected


def test_each_gpu_may_have_one_link_for_all_that_it_sends():
    platform = Platform((Device(1),) * 3, (Level(3, 10**9, 0, 1),))
    assert [platform.link_of(d) for d in range(3)] == [0, 1, 2]
    graph = graph_on(platform, (0,), (1,), (2,))
    assert links_of(graph) == [("link of 0", 1), ("link of 1", 1), ("link of 2", 1)]
    assert [graph.operations[i].kind for i in graph.on_resource[4]] == ["SEND_F", "SEND_B"]  # of the one in the middle
    assert not graph.separate


def test_who_shares_which_links():
    one, two = servers(2, 4, 1), servers(2, 4, 2)
    # a pipeline through both servers: what stays inside one has a link of its own
    graph = graph_on(one, (0,), (1,), (4,), (5,))
    assert links_of(graph) == [("link 0 - 1", 1), ("link of 0-3", 1), ("link of 4-7", 1), ("link 4 - 5", 1)]
    assert graph.separate
    # replicas in a server send one after the other, or by the halves' own links
    assert links_of(graph_on(one, (0, 1), (4, 5))) == [("link of 0-3", 1), ("link of 4-7", 1)]
    assert links_of(graph_on(two, (0, 1), (4, 5))) == [("link of 0,1", 1), ("link of 4,5", 1)]
    assert links_of(graph_on(two, (0, 2), (4, 6))) == [("links of 0-3", 2), ("links of 4-7", 2)]
    # microbatches of a group in both servers take the cards in turn only if the group does
    assert links_of(graph_on(one, (0, 4), (1, 5))) == [("link 0,4 - 1,5", 2)]
    assert links_of(graph_on(one, (0, 4), (5, 1))) == [("links of 0-7", 1)]
    assert links_of(graph_on(one, (0, 4), (1,))) == [("links of 0-7", 1)]
    assert links_of(graph_on(servers(4, 1, 1), (0, 1), (2, 3))) == [("links of 0,1", 2), ("links of 2,3", 2)]


@pytest.mark.parametrize(("links", "forwards"), [
    (None, [7, 7, 12, 12]),
    (2, [7, 7, 12, 12]),
    (1, [7, 12, 17, 22]),
])  # fmt: skip
def test_what_a_server_sends_queues_on_its_card(links, forwards):
    """By hand: two GPUs run a forward of 2 ns every 2 ns each; 5 ns on the way, one after the other on one card."""
    graph = graph_on(servers(2, 2, links), (0, 1), (2, 3))
    timeline = simulate(gpipe(graph, 4))
    at = graph.position["F", 1]
    assert [timeline.start_ns[m][at] for m in range(4)] == forwards


@pytest.mark.parametrize("seed", range(20))
def test_patterns_never_have_two_messages_on_one_card(seed):
    """Every transfer of many periods, laid out on the cards of its senders; and all bounds are below."""
    rng = random.Random(seed)
    count, gpus = rng.choice(((2, 2), (2, 3), (3, 2), (1, 4)))
    platform = servers(count, gpus, rng.choice((1, 1, 2)), rng.choice((10**9, 5 * 10**8)))
    if seed % 4 == 0:
        platform = replace(platform, levels=(Level(count * gpus, 10**9, 0, 1),))
    order = list(range(count * gpus))
    if seed % 2:
        rng.shuffle(order)
    stages, layers = rng.randint(2, 4), rng.randint(4, 5)
    ends = sorted(rng.sample(range(1, len(order) + 1), min(stages, len(order))))
    groups = [tuple(order[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    cuts = [0, *sorted(rng.sample(range(1, layers), len(groups) - 1)), layers]
    homes = [Stage(a, b, group) for a, b, group in zip(cuts, cuts[1:], groups, strict=False)]
    chain, policy = random_chain(rng, layers), Policy("stash")
    graph = stage_graph(chain, platform, policy, homes)
    found = schedule_ilp(graph, solver="highs", limits=SolverLimits(own_s=20))
    assert found.status == "optimal"
    pattern = found.pattern
    assert pattern_violations(graph, pattern) == []
    apart = stage_graph(chain, platform, policy, homes, sharing=False)
    assert group_bound(apart) <= group_bound(graph) <= pattern.period_ns
    assert any_bound(Problem(chain, platform, policy)).period_ns <= pattern.period_ns
    busy = {}
    below = platform.unit_sizes[platform.shared_level - 1] if platform.shared_level else 1
    for m in range(24):
        for op, start in zip(graph.operations, starts_of(pattern), strict=True):
            if op.kind.startswith("SEND"):
                there = homes[op.stage + (1 if op.kind == "SEND_F" else -1)].devices
                here = homes[op.stage].devices
                sender, receiver = here[m % len(here)], there[m % len(there)]
                if sender // below != receiver // below:
                    begin = start + m * pattern.period_ns
                    busy.setdefault(platform.link_of(sender), []).append((begin, begin + op.duration_ns))
    for spans in busy.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
