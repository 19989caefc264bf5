import itertools
import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import ceil

import numpy as np
import pytest
from cases.chains import random_chain, random_problem
from cases.plans import random_checkpoint
from oracles.schedules import emulated_activations, weights_table

from pipeplan.choices import OPTIMIZERS
from pipeplan.cost import memory_model, time_model
from pipeplan.cost.saved import storages
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.cost.stage_tables import largest_synced_gradient
from pipeplan.partition.cuts import fixed_bytes, memory_counts
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy

PHI = 12 * 10**9 // 6  # parameters of one of six stages of a 12 billion parameter model


@pytest.mark.parametrize(
    ("policy", "in_flight", "bytes_per_parameter"),
    [
        # fp32, W = 4 bytes per parameter: versions and one gradient
        (Policy("flush"), 7, 4 + 4),
        (Policy("2bw"), 7, 2 * 4 + 4),
        (Policy("stash"), 7, 7 * 4 + 4),
        (Policy("stash"), 1, 4 + 4),
        (Policy("latest"), 7, 4 + 4),
        (Policy("latest", vertical_sync=True), 7, 7 * 4 + 4),
        # optimizer state
        (Policy("flush", optimizer="momentum"), 1, 8 + 4),
        (Policy("flush", optimizer="adam"), 1, 8 + 8),
        (Policy("2bw", optimizer="adam"), 1, 12 + 8),
        # mixed: 2 per version, 2 for the gradient, fp32 weights and gradient beside the state
        (Policy("flush", precision="mixed"), 1, 2 + 2 + 8),
        (Policy("flush", precision="mixed", optimizer="momentum"), 1, 2 + 2 + 12),
        (Policy("flush", precision="mixed", optimizer="adam"), 1, 20),
        (Policy("2bw", precision="mixed", optimizer="adam"), 1, 22),
        (Policy("stash", precision="mixed", optimizer="adam"), 5, 5 * 2 + 2 + 16),
    ],
)
def test_weights_per_parameter(policy, in_flight, bytes_per_parameter):
    assert memory_model.weights_bytes(policy, 4 * PHI, PHI, in_flight) == bytes_per_parameter * PHI
    assert memory_model.host_bytes(policy, 4 * PHI, PHI) == 0


def test_myelin_memory():
    mixed = Policy("flush", optimizer="adam", precision="mixed")
    assert memory_model.weights_bytes(mixed, 4 * PHI, PHI, 1) == 40 * 10**9
    offload = Policy("flush", optimizer="adam", precision="mixed", offload=True, bucket_parameters=4 * 10**6)
    assert memory_model.weights_bytes(offload, 4 * PHI, PHI, 1) == 4 * PHI + 16 * 4 * 10**6
    assert memory_model.host_bytes(offload, 4 * PHI, PHI) == 12 * PHI
    assert memory_model.weights_bytes(offload, 4 * 10**6, 10**6, 1) == 20 * 10**6  # a stage smaller than the bucket


@pytest.mark.parametrize(
    ("policy", "replicas", "device", "host"),
    [  # of 100 parameters; the largest share of 3 replicas has 34 of them
        (Policy("flush", optimizer="adam"), 3, 400 + 400 + 8 * 34, 0),
        (Policy("2bw", optimizer="adam"), 4, 2 * 400 + 400 + 8 * 25, 0),
        (Policy("stash", 5, optimizer="momentum"), 3, 4 * 400 + 400 + 4 * 34, 0),  # versions are whole on each
        (Policy("flush", optimizer="sgd"), 3, 800, 0),
        (Policy("flush", optimizer="adam", precision="mixed"), 3, 200 + 200 + 16 * 34, 0),
        (Policy("2bw", optimizer="sgd", precision="mixed"), 200, 3 * 200 + 8, 0),  # some have nothing
        (Policy("flush", optimizer="adam", precision="mixed", offload=True, bucket_parameters=30), 3,
         400 + 16 * 30, 12 * 34),
        (Policy("flush", optimizer="adam", offload=True, bucket_parameters=60), 3, 800 + 8 * 34, 8 * 34),
    ],
)  # fmt: skip
def test_replicas_share_the_optimizers_state(policy, replicas, device, host):
    shared = replace(policy, zero=1)
    assert memory_model.weights_bytes(shared, 400, 100, 4, replicas) == device
    assert memory_model.host_bytes(shared, 400, 100, replicas) == host
    alone = [memory_model.weights_bytes(x, 400, 100, 4, 1) for x in (policy, shared)]
    assert alone[0] == alone[1] == memory_model.weights_bytes(shared, np.array([400]), np.array([100]), 4, 1)[0]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_shares_of_an_optimizers_state_add_up_to_no_less_than_that_of_all(replicas):
    """Weights of any number of bytes, in two stages or in one; bounds take them together."""
    policy = Policy("2bw", optimizer="adam", zero=1)

    def held(size: int, count: int = replicas) -> int:
        return memory_model.weights_bytes(policy, size, size // 4, 1, count)

    for one, other in itertools.product(range(18), repeat=2):
        assert held(one) + held(other) >= held(one + other)
        assert held(one) >= held(one, replicas + 1)


def test_replicas_share_the_optimizers_steps():
    """A step of 12 ns every 8 microbatches costs each of them 12 / 8 ns, on however many replicas; without, r times."""
    chain = Chain("c", (Layer("a", 0, 100, 400, 0, optimizer_ns=12),), 0)
    for accumulate, replicas, whole, shared in [(8, 1, 2, 2), (8, 4, 6, 2), (8, 12, 12, 1), (1, 3, 12, 4)]:
        policy = Policy(accumulate=accumulate)
        assert time_model.Passes(chain, policy, 0, 1, replicas).backward_ns() == 100 + whole
        assert time_model.Passes(chain, replace(policy, zero=1), 0, 1, replicas).backward_ns() == 100 + shared
    overlapped = Policy("flush", 8, coarsening=1, zero=1)
    assert time_model.Passes(chain, overlapped, 0, 1, 5, Fraction(2)).step_ns == 2  # 12 / 5 rounded up, twice as fast


def test_sharing_moves_as_many_bytes():
    """Half a ring scatters the sum and half gathers the weights, but for what is summed over other stages too."""
    layers = (Layer("a", 1, 2, 4000, 4), Layer("b", 1, 2, 8000, 4), Layer("c", 1, 2, 4000, 4))
    chain = Chain("c", layers, 4, tied=((0, 2),))
    stages = [Stage(0, 2, (0, 1)), Stage(2, 3, (2,))]
    times = {}
    for zero in (0, 1):
        graph = stage_graph(chain, Platform.flat(3, 10**6, 10**9), Policy("flush", 4, zero=zero), stages)
        times[zero] = [stage.update_ns for stage in graph.stages]
    ring = 4000 * 2 * 2 // 3 + 1  # of the tied weights over all three
    assert times[0] == [8000 + ring, ring]
    assert times[1] == [8000 + ring + 2000, ring]


def test_offload_of_fp32_state():
    policy = Policy("2bw", optimizer="adam", offload=True, bucket_parameters=10)
    assert memory_model.weights_bytes(policy, 400, 100, 3) == 3 * 400 + 2 * 4 * 10
    assert memory_model.host_bytes(policy, 400, 100) == 2 * 400
    assert memory_model.host_bytes(Policy(offload=True), 400, 100) == 0  # plain SGD has no state to move


def test_weights_equal_the_table_for_every_policy_and_as_arrays():
    sizes = np.array([0, 4, 40, 400])
    for weights, optimizer, precision, offload, sync, bucket, zero in itertools.product(
        ("flush", "2bw", "stash", "latest"),
        ("sgd", "momentum", "adam"),
        ("fp32", "mixed"),
        (False, True),
        (False, True),
        (1, 50),
        (0, 1),
    ):
        policy = Policy(weights, 4, optimizer, precision, offload, sync, bucket, zero=zero)
        for g, r in itertools.product((1, 2, 5), (1, 2, 3, 6)):
            expected = [weights_table(policy, int(w), int(w) // 4, g, r) for w in sizes]
            assert [memory_model.weights_bytes(policy, int(w), int(w) // 4, g, r) for w in sizes] == expected
            assert memory_model.weights_bytes(policy, sizes, sizes // 4, np.full(4, g), r).tolist() == expected


@pytest.mark.parametrize(
    ("accumulate", "replicas", "versions"),
    [  # with 1, 2, ... microbatches in flight on each replica
        (None, 1, [1, 2, 3, 4, 5]),
        (None, 2, [2, 3, 4, 5, 6]),  # an update may come while all are in flight
        (None, 7, [2, 3, 4, 5, 6]),
        (1, 3, [2, 3, 4, 5, 6]),
        (2, 1, [1, 2, 2, 3, 3]),
        (4, 1, [1, 2, 2, 2, 2]),
        (4, 2, [2, 2, 3, 3, 4]),
        (4, 3, [2, 3, 3, 4, 5]),
        (4, 4, [2, 3, 4, 5, 6]),
    ],
)
def test_versions_follow_what_is_in_flight_and_the_updates(accumulate, replicas, versions):
    for policy in (Policy("stash", accumulate), Policy("latest", accumulate, vertical_sync=True)):
        assert [memory_model.versions(policy, g, replicas) for g in range(1, 6)] == versions
    for policy, kept in ((Policy("2bw", 9), 2), (Policy("flush", accumulate), 1), (Policy("latest", accumulate), 1)):
        assert [memory_model.versions(policy, g, replicas) for g in range(1, 6)] == [kept] * 5


def test_stages_slow_down_by_their_speed_rounded_up():
    chain = Chain("c", (Layer("a", 10, 20, 0, 0), Layer("b", 5, 7, 0, 0)), 0)
    assert time_model.Passes(chain, Policy(), 0, 2).forward_ns == 15
    assert time_model.Passes(chain, Policy(), 0, 2, speed=Fraction(2)).forward_ns == 8
    assert time_model.Passes(chain, Policy(), 0, 2, speed=Fraction(2, 3)).forward_ns == 23
    assert time_model.Passes(chain, Policy(), 0, 2, speed=Fraction(4)).backward_ns() == 7
    assert time_model.Passes(chain, Policy(), 0, 2).backward_ns(15) == 42


def test_the_optimizer_is_paid_once_per_update():
    chain = Chain("c", (Layer("a", 0, 100, 0, 0, optimizer_ns=10),), 0)
    for accumulate, replicas, expected in [(None, 1, 101), (1, 1, 110), (4, 1, 103), (None, 4, 101), (8, 4, 105)]:
        assert time_model.Passes(chain, Policy(accumulate=accumulate), 0, 1, replicas).backward_ns() == expected
    # over one update a replica sees interval / replicas microbatches, and pays one step with them
    rng = random.Random(1)
    for _ in range(100):
        accumulate, replicas, step = rng.randint(1, 9), rng.randint(1, 5), rng.randint(0, 50)
        chain = Chain("c", (Layer("a", 0, 0, 0, 0, optimizer_ns=step),), 0)
        seen = Fraction(max(accumulate, replicas), replicas)
        assert time_model.Passes(chain, Policy(accumulate=accumulate), 0, 1, replicas).backward_ns() == ceil(
            step / seen
        )


def test_nothing_waits_for_weight_gradients_and_the_share_of_the_update():
    layers = (Layer("a", 0, 100, 0, 0, optimizer_ns=10, backward_weight_ns=40), Layer("b", 0, 50, 0, 0, optimizer_ns=6))
    chain = Chain("c", layers, 0)
    for accumulate, stop, expected in [
        (None, 1, 40 + 1),
        (1, 1, 40 + 10),
        (4, 1, 40 + 3),
        (4, 2, 40 + layers[1].weight_part_ns + 4),
    ]:
        assert time_model.Passes(chain, Policy(accumulate=accumulate), 0, stop).backward_weight_ns == expected
    assert time_model.Passes(chain, Policy(accumulate=1), 0, 1, speed=Fraction(4)).backward_weight_ns == 13


def test_times_as_arrays():
    rng = random.Random(3)
    chain = random_chain(rng, 6, optimizer=True, saved=True, edges=True)
    pairs = list(itertools.combinations(range(7), 2))
    start, stop = np.array([i for i, _ in pairs]), np.array([j for _, j in pairs])
    policy = Policy(accumulate=3)
    for speed in (Fraction(1), Fraction(2, 3)):
        assert time_model.Passes(chain, Policy(), start, stop, speed=speed).forward_ns.tolist() == [
            time_model.Passes(chain, Policy(), i, j, speed=speed).forward_ns for i, j in pairs
        ]
        assert time_model.Passes(chain, policy, start, stop, 2, speed).backward_ns(5).tolist() == [
            time_model.Passes(chain, policy, i, j, 2, speed).backward_ns(5) for i, j in pairs
        ]
    columns = memory_model.segment(chain, start, stop)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == [
        memory_model.segment(chain, i, j) for i, j in pairs
    ]


def random_stage(rng, **options):
    chain = random_chain(rng, rng.randint(1, 8), **options)
    start = rng.randrange(len(chain))
    stop = rng.randint(start + 1, len(chain))
    return chain, start, stop, random_checkpoint(rng, start, stop)


@pytest.mark.parametrize("saved", [False, True])
def test_activations_of_a_chain_equal_a_walk_forward_and_backward(saved):
    """Each storage counts once, whichever parts hold it."""
    recomputed = above = 0
    for seed in range(600):
        chain, start, stop, checkpoint = random_stage(random.Random(seed), saved=saved)
        kept, peak, again = memory_model.activations(chain, start, stop, checkpoint)
        held, most = emulated_activations(chain, start, stop, checkpoint, shared=True)
        if storages(chain).beyond[
            start
        ]:  # a stage that begins with a view of more: on the safe side behind views of it
            assert kept >= held
            assert peak >= most
            above += (kept, peak) != (held, most)
        else:
            assert (kept, peak) == (held, most)
        assert again == sum(chain.layers[i].forward_ns for first, last in checkpoint for i in range(first, last))
        recomputed += peak > kept
    assert recomputed > 40
    assert above < 12


def test_activations_of_a_dag_count_what_each_part_holds():
    """Parts of one stage that hold the same tensor count it each: on the safe side."""
    recomputed = above = 0
    for seed in range(300):
        chain, start, stop, checkpoint = random_stage(random.Random(seed), edges=True, saved=False)
        kept, peak, _ = memory_model.activations(chain, start, stop, checkpoint)
        assert (kept, peak) == emulated_activations(chain, start, stop, checkpoint, shared=False)
        held, most = emulated_activations(chain, start, stop, checkpoint, shared=True)
        assert kept >= held
        assert peak >= most
        above += (kept, peak) != (held, most)
        recomputed += peak > kept
    assert recomputed > 20
    assert 0 < above < 100


def test_activation_examples():
    layers = tuple(Layer(f"{i}", i + 1, 1, 0, 10 * (i + 1)) for i in range(4))
    chain = Chain("c", layers, 5)  # inputs of 5, 10, 20, 30 bytes
    assert memory_model.activations(chain, 0, 4, ()) == (65, 65, 0)
    assert memory_model.activations(chain, 0, 4, ((0, 4),)) == (5, 65, 10)
    # two halves keep 5 and 20; the second half's transient (30) meets both, the first's (10) only its own
    assert memory_model.activations(chain, 0, 4, ((0, 2), (2, 4))) == (25, 55, 10)
    assert memory_model.activations(chain, 0, 4, ((1, 3),)) == (45, 45, 5)  # 5 + 10 + 20 of transient < 45
    assert memory_model.activations(chain, 0, 2, ((0, 2),)) == (5, 15, 3)
    # a segment that saves less than its input has no transient
    small = Chain("c", (Layer("a", 1, 1, 0, 0, saved_bytes=2),), 8)
    assert memory_model.activations(small, 0, 1, ((0, 1),)) == (8, 8, 1)


def test_one_of_the_microbatches_in_flight_is_in_its_backward():
    assert memory_model.held_bytes(10, 25, 1) == 25
    assert memory_model.held_bytes(10, 25, 4) == 55
    assert memory_model.held_bytes(np.array([10]), np.array([25]), 4).tolist() == [55]


def test_ring_all_reduce():
    # 2(r-1)/r * bytes / bandwidth, once per update
    assert time_model.sync_period_ns(Policy(accumulate=1), 8 * 10**9, 1, 10**9) == 0
    assert (
        time_model.sync_period_ns(Policy(accumulate=1), 8 * 10**9, 4, 10**9) == 3 * 10**9
    )  # 12 s, every 4 microbatches
    assert time_model.sync_period_ns(Policy(accumulate=12), 8 * 10**9, 4, 10**9) == 10**9
    rng = random.Random(0)
    for _ in range(200):
        gradient, r, bandwidth = rng.randint(0, 10**12), rng.randint(2, 9), rng.randint(1, 10**11)
        policy, latency = Policy(accumulate=rng.randint(1, 9)), rng.choice((0, rng.randint(1, 10**6)))
        exact = Fraction(2 * (r - 1), r) * Fraction(gradient * 10**9, bandwidth) + 2 * (r - 1) * latency * (
            gradient > 0
        )
        assert time_model.ring_all_reduce_ns(gradient, r, bandwidth, latency) == ceil(exact)
        shared = ceil(exact / max(r, policy.accumulate))
        assert time_model.sync_period_ns(policy, gradient, r, bandwidth, latency) == shared
    assert time_model.ring_all_reduce_ns(0, 4, 10**9, 50) == 0
    assert time_model.ring_all_reduce_ns(8, 4, 10**9, 50) == 12 + 300  # 6 steps of 2 bytes
    many = np.array([0, 8], dtype=object)
    assert time_model.sync_period_ns(Policy(accumulate=1), many, 4, 10**9, 50).tolist() == [0, 78]


def test_overlapped_sums_and_steps_are_two_machines_in_a_row():
    rng = random.Random(5)
    for _ in range(50):
        chunks, sum_ns, step_ns = rng.randint(1, 6), rng.randint(1, 50), rng.randint(1, 50)
        summed = stepped = 0
        for _ in range(chunks):
            summed += sum_ns
            stepped = max(stepped, summed) + step_ns
        policy = Policy("flush", 4, coarsening=2, bucket_parameters=5)
        parameters = 10 * chunks - rng.randrange(10)
        assert time_model.overlapped_ns(policy, chunks * sum_ns, chunks * step_ns, parameters) == stepped


def test_steps_behind_a_drained_batch_are_not_charged_to_backwards():
    chain = Chain("one", (Layer("a", 1, 2, 4, 0, optimizer_ns=100),), 0)
    assert time_model.Passes(chain, Policy("2bw", 4), 0, 1).backward_ns() == 27
    assert time_model.Passes(chain, Policy("flush", 4), 0, 1).backward_ns() == 2
    assert time_model.Passes(chain, Policy("flush", 4, coarsening=1), 0, 1).backward_ns() == 2
    assert time_model.Passes(chain, Policy(), 0, 1, 4, Fraction(3)).step_ns == 34


def test_the_largest_gradient_is_the_inverse_of_the_sync_period():
    rng = random.Random(2)
    for _ in range(300):
        period, r, bandwidth = rng.randint(0, 1000), rng.randint(2, 9), rng.choice((10**8, 10**9, 7 * 10**9))
        policy, latency = Policy(accumulate=rng.randint(1, 9)), rng.choice((0, 1, 20))
        most = largest_synced_gradient(policy, period, r, bandwidth, latency)
        assert time_model.sync_period_ns(policy, most, r, bandwidth, latency) <= period
        assert time_model.sync_period_ns(policy, most + 1, r, bandwidth, latency) > period
    assert largest_synced_gradient(Policy(), 0, 1, 1) >= 10**18


def test_another_engines_bytes_per_parameter_are_those_of_one_version():
    for weights, extra in (("flush", 0), ("2bw", 1), ("stash", 3)):
        policy = Policy(weights, optimizer="adam", precision="mixed", bytes_per_parameter=18)
        assert memory_model.weights_bytes(policy, 400, 100, 4) == 18 * 100 + extra * 200
    assert (
        memory_model.weights_bytes(Policy("flush", bytes_per_parameter=5), np.array([400]), np.array([100]), 1) == 500
    )


@pytest.mark.parametrize(("own", "shared"), [(4, 16), (6, 12), (8, 8)])
def test_replicas_share_what_megatrons_distributed_optimizer_does(own, shared):
    """Megatron Core User Guide, Distributed Optimizer: 4 + 16/d, 6 + 12/d and 8 + 8/d bytes with d replicas."""
    policy = Policy("flush", bytes_per_parameter=own + shared, shared_bytes_per_parameter=shared, zero=1)
    for d in (1, 2, 4, 8):
        assert memory_model.weights_bytes(policy, 3200, 800, 1, d) == 800 * own + 800 * shared // d
    assert memory_model.weights_bytes(replace(policy, pipelines=4), 3200, 800, 1, 2) == 800 * own + 100 * shared


def test_gradients_are_half_in_mixed_precision():
    assert memory_model.gradient_bytes(Policy(), 400, 100) == 400
    assert memory_model.gradient_bytes(Policy(precision="mixed"), 400, 100) == 200


@pytest.mark.parametrize("seed", range(100))
def test_memory_is_the_same_beyond_the_counts_of_replicas_that_are_looked_at(seed):
    """Searches have a table of memory for each of the counts, and read the last one for all beyond: every policy."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(1, 4), rng.randint(1, 6), weights=("flush", "2bw", "stash", "latest"))
    own, shared = rng.choice(((None, None), (None, None), (5, 0), (2, 4), (8, 8)))
    policy = replace(
        problem.policy,
        accumulate=rng.choice((None, 1, 2, 5)),
        optimizer=rng.choice(tuple(OPTIMIZERS)),
        precision=rng.choice(("fp32", "mixed", "autocast")),
        zero=rng.choice((0, 1)),
        offload=own is None and rng.random() < 0.3,
        bucket_parameters=rng.choice((1, 2, 3, 5, 10**6)),
        ema=rng.random() < 0.3,
        pipelines=rng.choice((1, 1, 3)),
        bytes_per_parameter=None if own is None or shared is None else own + shared,
        shared_bytes_per_parameter=shared,
    )
    problem = replace(problem, policy=policy)
    last, count = memory_counts(problem)[-1], len(problem.chain)
    for start, stop in combinations(range(count + 1), 2):
        for replicas in range(last, len(problem.platform) + 1):
            for in_flight in (1, 2, 5):
                held = fixed_bytes(problem, start, stop, in_flight, replicas)
                assert held == fixed_bytes(problem, start, stop, in_flight, last), (start, stop, replicas)
