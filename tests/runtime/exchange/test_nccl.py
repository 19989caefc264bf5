"""Runs over NCCL, played on GPUs that aren't there: nothing deadlocks, nothing races, no host waits unasked."""

import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from cases import on_gpu, soft_runs
from cases.blocking import run_deadlock
from cases.on_gpu import played
from cases.runtime import plan_of, uncorrected
from cases.soft_runs import BACK, profile
from oracles.gpu import COMPUTE, Begins, Event, HostsMeet, Recorded, Together, Waited
from oracles.nccl import SEMANTICS, stuck

from pipeplan.errors import InvalidPlan
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Platform, Policy
from pipeplan.runtime.engine import preparation
from pipeplan.runtime.engine.asked import job_of, under
from pipeplan.runtime.engine.job import Launcher
from pipeplan.runtime.exchange.collective import ChunkSum
from pipeplan.runtime.exchange.links import OrderedTransport, in_rounds, pair_options
from pipeplan.runtime.lowering import lowered, lowered_run
from pipeplan.runtime.lowering.instructions import Agree, Reduce, Update
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.training.update import bucketed_stepper
from pipeplan.runtime.training.update.exchanges import OnStream
from pipeplan.runtime.training.update.offload import host_rooms


def job_for(plan, name, steps=2, **options):
    spec = ModelSpec(f"{on_gpu.__name__}:{name}", "cases.runtime:vectors")
    return job_of(plan, spec, uncorrected(steps, 0.01, device="cpu", **options))


def job(name, stages, *, steps=2, dtype=None, policy=None, options=None, **planned):
    plan = plan_of(profile(name, dtype), stages, **planned)
    return job_for(replace(plan, policy=replace(plan.policy, **(policy or {}))), name, steps, **(options or {}))


def nf1b():
    stages = (Stage(0, 2, (0,)), Stage(2, 5, (1,)), Stage(5, 9, (2,)))
    policy = Policy("latest", accumulate=2, optimizer="momentum")
    schedule = Schedule("nf1b", 2, 3)
    return Plan(
        profile("linears"), Platform.flat(3, 10**12), policy, Allocation(stages), None, (), Provenance("hand"), schedule
    )


def any_plan(seed):
    """A plan of a random allocation, replicas and stages that come back to a device among them, and policy."""
    rng = random.Random(seed)
    while True:
        cuts = [0, *sorted(rng.sample(range(1, 9), rng.randint(1, 3))), 9]
        devices, free = [], iter(range(10))
        for _ in cuts[1:]:
            back = len(devices) > 1 and rng.random() < 0.2
            replicas = rng.choice((1, 1, 2))
            devices.append(devices[0] if back else tuple(next(free) for _ in range(replicas)))
        stages = list(zip(cuts, cuts[1:], devices, strict=False))
        weights = rng.choice(("flush", "2bw", "stash", "latest"))
        try:
            return plan_of(
                profile("linears"),
                stages,
                weights=weights,
                accumulate=rng.choice((2, 4)) if weights == "flush" else None,
                optimizer="momentum",
                vertical_sync=weights == "stash" and rng.random() < 0.3,
            )
        except InvalidPlan:  # what is in flight doesn't go with the policy
            continue


REPLICAS = [(0, 3, (0, 1)), (3, 6, (2,)), (6, 9, (3, 4))]


def of_mode(name):
    """The job of a run that GPUs in software make, too."""
    mode = soft_runs.MODES[name]()
    return job_of(mode.plan, mode.spec("cases.runtime:vectors"), uncorrected(2, 0.01, device="cpu", **mode.options))


def ordered(kind):
    """A run by a schedule whose backwards come in an order of its own."""
    stages = BACK if kind == "v-half" else [(0, 3, (0,)), (3, 6, (1,)), (6, 9, (2,))]
    return job_for(under(plan_of(profile("linears", None, kind == "v-half"), stages, accumulate=6), kind), "linears")


ELSEWHERE = ("fp16, overflowing", "1f1b, under torchrun")  # data of its own; the same to a rank
JOBS = {
    **{name: partial(of_mode, name) for name in soft_runs.MODES if name not in ELSEWHERE},
    **{kind: partial(ordered, kind) for kind in ("gpipe", "v-half")},
    "tied, drained": lambda: job("tied", [(0, 3, (0,)), (3, 6, (1,)), (6, 9, (2, 3))], accumulate=4),
    "2bw, clipped": lambda: job("linears", REPLICAS, weights="2bw", accumulate=8, options={"clip_norm": 1.0}),
    "mixed": lambda: job(
        "linears", [(0, 2, (0, 1)), (2, 9, (2,))], dtype=torch.bfloat16, accumulate=4, policy={"precision": "mixed"}
    ),
    "mixed, ZeRO-1, clipped": lambda: job(
        "linears", [(0, 4, (0, 1)), (4, 9, (2, 3))], dtype=torch.bfloat16, accumulate=4, optimizer="adam",
        policy={"precision": "mixed", "zero": 1}, options={"clip_norm": 1.0, "bucket_size": 100},
    ),
    "one backward for two": lambda: job_for(nf1b(), "linears"),
    "evaluation": lambda: job("linears", REPLICAS, accumulate=4, options={"evaluates": True}),
}  # fmt: skip


def connected_late(gpu, ranks):
    """What hosts wait for each other for in the middle of the run, as they do what they have not done before."""
    begun = gpu.trace.index(HostsMeet(ranks.everybody, "a barrier"))
    return [x.what for x in gpu.trace[begun:] if isinstance(x, HostsMeet) and "connecting" in x.what]


def check(found):
    """Every rank comes through whatever blocks, uses its memory in order, and makes the same groups as all others."""
    for semantics in SEMANTICS:
        assert stuck({gpu.rank: gpu.trace for gpu, _ in found}, semantics) == []
    for gpu, ranks in found:
        assert gpu.races == []
        assert connected_late(gpu, ranks) == []
        assert ranks.groups == found[0][1].groups


@pytest.mark.parametrize("name", JOBS)
def test_every_kind_of_run_comes_through(name):
    check(played(JOBS[name]()))


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_groups_for_the_norm_of_gradients_are_connected_before_the_run(weights):
    own = job("linears", REPLICAS, weights=weights, accumulate=4, options={"clip_norm": 1.0})
    for gpu, ranks in played(own):
        norms = [x for x in gpu.trace if isinstance(x, Together) and x.what[0] == "norm"]
        assert len(norms) == 1 + 2, "and one for each update"
        assert connected_late(gpu, ranks) == gpu.races == []


@pytest.mark.parametrize("seed", [0, 5, 6, 7, 11, 13, 17])  # stages that come back to a device; every policy
def test_random_plans_come_through(seed):
    check(played(job_for(any_plan(seed), "linears")))


def test_instructions_of_random_plans_come_through_when_everything_blocks():
    for seed in range(16):
        assert run_deadlock(any_plan(seed)) == [], seed


@pytest.mark.parametrize("number", [0, 2])
def test_no_number_of_the_host_becomes_a_tensor_of_the_gpu_within_the_run(number):
    """For the copy the host would wait until the GPU comes to it."""
    begun, made, begin, tensor = [], [], on_gpu.Gpu.begin, torch.tensor

    def beginning(gpu, what):
        begun.append(what)
        begin(gpu, what)

    def making(*given, **by):
        if begun and by.get("device") is not None:
            made.append(begun[-1])
        return tensor(*given, **by)

    own = JOBS["mixed"]()
    with mock.patch.object(on_gpu.Gpu, "begin", beginning), mock.patch.object(torch, "tensor", making):
        on_gpu.play(own, own.lowered(), number)
    assert made == []
    assert any(isinstance(what, Agree) for what in begun)


def test_all_of_a_sum_beside_passes_is_queued_where_it_begins():
    """So nothing of it is left for the update but to wait, of which passes before it have no part."""
    own = JOBS["2bw, replicas, in chunks"]()
    summing = {rank for s in own.lowered().beside for rank in own.lowered().ranks_of(s)}
    assert len(summing) == 4
    for gpu, _ in played(own):
        doing, begun, ends, waits = None, set(), set(), []
        for x in gpu.trace:
            doing = x.what if isinstance(x, Begins) else doing
            if isinstance(doing, Reduce):
                begun |= {x.stream for x in [x] if isinstance(x, Together)}
                ends |= {x.event for x in [x] if isinstance(x, Recorded) and x.stream in begun}
                waits += [x.stream for x in [x] if isinstance(x, Waited) and x.event in ends]
            assert not (isinstance(doing, Update) and isinstance(x, Together)), "nothing is begun there"
        assert bool(begun) == bool(waits) == (gpu.rank in summing)
        assert COMPUTE not in waits


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_messages_take_no_more_than_planned_however_far_the_host_is_ahead(weights):
    """One of an edge, beside the one in flight of the last stage; a gradient is freed before the next is due."""
    own = job("linears", [(0, 4, (0,)), (4, 9, (1,))], weights=weights, accumulate=8, optimizer="momentum")
    assert [gpu.most_messages for gpu, _ in played(own)] == [1, 1 + 1]


def test_offloaded_state_has_its_room_before_the_run_and_travels_beside_its_steps():
    asked = []

    def rooms(*arguments):
        asked.append(arguments)
        return host_rooms(*arguments)

    plan = plan_of(profile("linears"), [(0, 4, (0,)), (4, 9, (1,))], accumulate=2, optimizer="adam")
    plan = replace(plan, policy=replace(plan.policy, offload=True, bucket_parameters=10**6))
    with mock.patch.object(bucketed_stepper, "host_rooms", rooms):
        found = played(job_for(plan, "linears"))
    assert len(asked) == 4, "two moments on two ranks, each in one block"
    for gpu, _ in found:
        begin = next(i for i, x in enumerate(gpu.trace) if x == Begins(Update(gpu.rank, 2)))
        events = [x.stream for x in gpu.trace[begin:] if isinstance(x, Recorded) and x.stream.startswith("stream")]
        there, home = events[0], events[-1]
        assert there != home
        assert events == [there] * 3 + [home] * 3, "all of the bucket is on its way before its first third is stepped"


# --- the checks see what they are for ---


def test_an_update_of_replicas_that_moves_deadlocks_when_everything_blocks_and_only_then():
    move = lowered._sends_before_updates
    with (
        mock.patch.object(lowered_run, "summed_beside", return_value={}),  # as without room for that
        mock.patch.object(lowered, "_sends_before_updates", lambda x, _: move(x, set(range(3)))),
    ):
        found = played(
            job("linears", [(0, 2, (0,)), (2, 5, (1, 2)), (5, 9, (3, 4))], weights="2bw", accumulate=6, steps=4)
        )
    traces = {gpu.rank: gpu.trace for gpu, _ in found}
    assert stuck(traces, "asynchronous") == []
    assert len(stuck(traces, "blocking")) > 1


def nothing(*_):
    """In place of what must be done."""


def two_ranks():
    return [gpu for gpu, _ in played(job("linears", [(0, 4, (0, 1)), (4, 9, (2,))], weights="2bw"))]


def test_a_tensor_that_is_not_kept_while_it_is_sent_is_seen():
    issue = OrderedTransport.send

    def forgetting(self, send, tensor):
        issue(self, send, tensor)
        self._sent[send.edge] = send, None, self._sent[send.edge][2]

    with mock.patch.object(OrderedTransport, "send", forgetting):
        assert any("compute gets back what communicator" in race for gpu in two_ranks() for race in gpu.races)


def test_a_wait_that_is_left_out_is_seen():
    with mock.patch.object(ChunkSum, "_wait", nothing):
        assert any("what communicator" in race for gpu in two_ranks() for race in gpu.races)
    with mock.patch.object(OrderedTransport, "take", lambda self, *message: self._coming.pop(message)[1]):
        assert any("compute uses what communicator" in race for gpu in two_ranks() for race in gpu.races)


def test_weights_that_are_stepped_before_their_sum_are_seen():
    with mock.patch.object(OnStream, "_await", nothing):
        races = [race for gpu, _ in played(JOBS["2bw, replicas, in chunks"]()) for race in gpu.races]
    assert any("on compute uses what" in race for race in races)


def test_state_that_is_stepped_before_it_has_come_is_seen():
    with mock.patch.object(Event, "wait", nothing):
        races = [race for gpu, _ in played(JOBS["offloaded"]()) for race in gpu.races]
    assert any("on compute uses what stream" in race for race in races)


def test_ranks_that_connect_in_different_orders_are_seen():
    found = two_ranks()
    exchanges = [i for i, x in enumerate(found[0].trace) if hasattr(x, "ranks") and x.ranks == (0, 2)]
    trace = found[0].trace
    trace[exchanges[0]], trace[exchanges[-1]] = trace[exchanges[-1]], trace[exchanges[0]]
    with pytest.raises(AssertionError, match=r"hosts meet|in one"):
        assert stuck({gpu.rank: gpu.trace for gpu in found}, "asynchronous") == ["the hosts meet"]


# --- how ranks connect -----------------------------------------------------------------------------------------------


def turns(pairs):
    """How many pairs connect one after the other where each rank goes through its own in this order."""
    at = Counter()
    for a, b in pairs:
        at[a] = at[b] = 1 + max(at[a], at[b])
    return max(at.values())


def test_a_chain_of_any_length_connects_in_four_rounds():
    chain = {(a, b) for a in range(64) for b in (a - 1, a + 1) if 0 <= b < 64}
    assert turns(sorted(chain)) >= 64
    assert turns(in_rounds(chain)) == 4
    assert in_rounds(chain)[:2] == [(0, 1), (2, 3)]


def test_any_pairs_connect_in_few_rounds_each_once():
    for seed in range(20):
        rng = random.Random(seed)
        ranks = rng.randint(2, 20)
        pairs = {(a, b) for a in range(ranks) for b in range(ranks) if a != b and rng.random() < 3 / ranks} or {(0, 1)}
        found = in_rounds(pairs)
        assert sorted(found) == sorted(pairs)
        assert found == in_rounds(sorted(pairs, reverse=True)), "all ranks find the same order"
        degree = Counter(rank for pair in pairs for rank in pair)
        assert turns(found) <= 2 * max(degree.values())


def test_pairs_are_put_into_rounds_without_looking_at_each_with_each_other():
    class Rank(int):
        looks = 0

        def __hash__(self):
            Rank.looks += 1
            return int.__hash__(self)

    ranks = [Rank(number) for number in range(256)]
    pairs = [(ranks[a], ranks[b]) for a in range(256) for b in (a - 1, a + 1) if 0 <= b < 256]
    assert len(in_rounds(pairs)) == 510
    assert Rank.looks < 20 * len(pairs)


def test_sockets_and_files_are_seen_to_before_any_group_is_made():
    """Of gloo, which all ranks have beside NCCL: tests of it (test_gloo.py) say what for."""
    made, own = mock.Mock(), JOBS["mixed"]()
    with (
        mock.patch.object(on_gpu.Ranks, "init_process_group", made),
        mock.patch.object(preparation, "spare_sockets", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        on_gpu.play(own, own.lowered(), 0)
    made.assert_not_called()


def test_pairs_get_few_processors_and_a_stream_that_comes_first(monkeypatch):
    class Options:
        def __init__(self, is_high_priority_stream):
            self.is_high_priority_stream, self.config = is_high_priority_stream, mock.Mock()

    assert pair_options("gloo", timedelta(seconds=1)) is None
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", mock.Mock(Options=Options), raising=False)
    found = played(job("linears", [(0, 4, (0, 1)), (4, 9, (2,))], weights="2bw"))
    for _, ranks in found:
        made = zip(ranks.groups, ranks.options, strict=True)
        pairs = {group.ranks: options for group, options in made if group.backend == "nccl"}
        assert pairs.pop((0, 1)) is None, "the sum of the replicas"
        assert [(x.is_high_priority_stream, x.config.max_ctas) for x in pairs.values()] == [(True, 4)] * 2
        made = zip(ranks.options, ranks.timeouts, strict=True)
        assert all(x is None or x._timeout == its for x, its in made), "torch would warn"


def test_sums_of_message_driven_pipelines_travel_over_nccl():
    plan = under(plan_of(profile("linears"), [(0, 4, (0, 1)), (4, 9, (2, 3))], accumulate=4), "message-driven")
    own = job_for(plan, "linears")
    with on_gpu.gpu_of(0, 4) as (_, ranks):
        launcher = Launcher()
        rank, ties, masters = preparation.build_model(own, 0, launcher)
        meeting = preparation.meet(own, rank, launcher, ties, masters)
    assert (meeting.links.exchange, meeting.sums) == ("staged", "nccl")
    assert [group.ranks for group in ranks.groups if group.backend == "nccl"] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("name", ["linears", "tied"])
def test_a_rank_keeps_no_layers_but_its_own(name):
    own = job(name, [(0, 3, (0,)), (3, 9, (1,))], accumulate=2)
    for number, layers in ((0, range(3)), (1, range(3, 8))):
        rank, _, _ = preparation.build_model(own, number, Launcher())
        found = [layer.module for layer in rank.model.layers if any(not x.is_meta for x in layer.module.parameters())]
        shared = [7, 4] if (name, number) == ("tied", 0) else [0, 1] if name == "tied" else []
        assert {id(x) for x in found} == {id(rank.model.layers[i].module) for i in [*layers, *shared]}
        assert not any(x.is_meta for s in rank.stages for module in rank.modules(s) for x in module.parameters())
