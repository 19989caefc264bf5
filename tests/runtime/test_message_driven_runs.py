"""Message-driven runs: real processes against plain training, and the order of arrival on its own."""

import json
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.patience import SECONDS
from cases.runtime import chain_of, largest_difference, plan_of, serial, zoo_chain

from pipeplan.check.bounds import any_bound
from pipeplan.check.evaluate import evaluate
from pipeplan.cli import group
from pipeplan.errors import BadInput
from pipeplan.files.plans import plan_text
from pipeplan.plan import Stage
from pipeplan.problem import Platform, Problem
from pipeplan.runtime.engine.arrival_order import arrival_order
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.engine.executor import execute
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.exchange.threaded import Message
from pipeplan.runtime.lowering.instructions import Backward, Forward, Send, Update
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.measure.recorder import Recorder
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.schedule.program import Step
from pipeplan.schedule.programs.deciding import next_message

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16"  # embedding, two blocks, norm, head, loss
GRID = [(0, 2, (0, 1)), (2, 6, (2, 3))]
RECOMPUTED = [Stage(0, 2, (0, 1), ((0, 2),)), Stage(2, 6, (2, 3), ((2, 3), (3, 5)))]


def driven(stages, microbatches, limit=None, *, chain=None, **options):
    plan = plan_of(chain or zoo_chain(GPT, 2), stages, weights="flush", accumulate=microbatches, **options)
    return under(plan, "message-driven", limit)


# --- exactness ---------------------------------------------------------------------------------------------------

TRAINING = {  # what a grid's stages do differently
    "stored, 2": {"stages": GRID, "limit": 2},
    "recomputed, offloaded, 3": {"stages": RECOMPUTED, "limit": 3, "offload": True},
}


@pytest.mark.parametrize("training", TRAINING)
def test_a_grid_equals_training_in_one_process(training, tmp_path):
    """Two pipelines of two stages, limits p and 2p - 1, over four updates."""
    options = TRAINING[training]
    plan = driven(options["stages"], 8, options["limit"], optimizer="adam")
    policy = replace(plan.policy, offload=options.get("offload", False), bucket_parameters=3000)
    plan = replace(plan, policy=policy)
    saved = tmp_path / "state.pt"
    report = run_plan(plan, ModelSpec(GPT), RunOptions(steps=4, lr=0.006, seed=1, save=saved))
    losses, state = serial(GPT, 2, steps=4, accumulate=8, optimizer="adam", lr=0.006, seed=1)
    assert report.losses == pytest.approx(losses, abs=1e-5)
    assert largest_difference(torch.load(saved), state) <= 1e-4  # Adam divides by gradients near 0
    assert report.step_losses[-1] < report.step_losses[0] - 0.1
    assert len(report.times) == 4


SHAPES = {
    "one microbatch": {"stages": GRID, "microbatches": 2, "limit": 3},
    "one at a time": {"stages": GRID, "microbatches": 4, "limit": 1},
    "more room than microbatches": {"stages": [(0, 2, (0,)), (2, 6, (1,))], "microbatches": 3, "limit": 8},
    "one device": {"stages": [(0, 6, (0,))], "microbatches": 3, "limit": 2},
    "many to one": {"stages": [(0, 3, (0, 1)), (3, 6, (2,))], "microbatches": 6, "limit": 2},
    "one to many": {"stages": [(0, 3, (0,)), (3, 6, (1, 2))], "microbatches": 6, "limit": 3},
    "two stages on one device": {"stages": [(0, 2, (0,)), (2, 3, (1,)), (3, 6, (0,))], "microbatches": 4, "limit": 3},
    "three stages, default limit": {"stages": [(0, 2, (0,)), (2, 3, (1,)), (3, 6, (2,))], "microbatches": 6},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_grid_equals_training_in_one_process(shape, tmp_path):
    plan = driven(**SHAPES[shape])
    count = plan.schedule.microbatches
    saved = tmp_path / "state.pt"
    report = run_plan(plan, ModelSpec(GPT), RunOptions(steps=2, lr=0.05, seed=1, save=saved))
    losses, state = serial(GPT, 2, steps=2, accumulate=count, optimizer="sgd", lr=0.05, seed=1)
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert largest_difference(torch.load(saved), state) <= 1e-6
    assert all(x.planned_bytes <= x.allowed_bytes >= x.measured_bytes for x in report.activations)
    order = [(t.activity, t.microbatch) for t in report.times[0] if t.activity in "FB" and t.stage == 0]
    limit = lower_run(plan, 1).limit
    held = most = 0
    for activity, _ in order:
        held += 1 if activity == "F" else -1
        most = max(most, held)
    own = count // plan.allocation.stages[0].replicas
    assert most <= min(limit, own)
    if len(plan.allocation.stages) > 1:  # the first stage injects as many before it hears of any
        assert all(activity == "F" for activity, _ in order[: min(limit, own)])


def test_an_evaluation_makes_no_update(tmp_path):
    plan = driven(GRID, 4, 3)
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    run_plan(plan, ModelSpec(GPT), RunOptions(steps=2, lr=0.05, seed=1, save=before))
    report = run_plan(
        plan, ModelSpec(GPT), RunOptions(steps=2, lr=0.05, seed=1, load=before, save=after, evaluates=True)
    )
    assert largest_difference(torch.load(before), torch.load(after)) == 0
    assert len(report.losses) == 8
    assert not [t for times in report.times for t in times if t.activity in ("B", "UPDATE", "REDUCE")]


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    plan = driven(GRID, 4, 3, optimizer="momentum")
    options = {"lr": 0.05, "seed": 1, "checkpoint": tmp_path / "checkpoints"}
    first = run_plan(plan, ModelSpec(GPT), RunOptions(steps=3, every=2, **options))
    second = run_plan(plan, ModelSpec(GPT), RunOptions(steps=5, resume=True, **options))
    losses, _ = serial(GPT, 2, steps=5, accumulate=4, optimizer="momentum", lr=0.05, seed=1)
    assert [*first.losses, *second.losses] == pytest.approx(losses, abs=1e-6)


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "forced"), [(1, True), (2, True), (3, False)])
def test_a_rank_holds_what_the_limit_allows(limit, forced):
    """With one at a time, or two on two stages, the order leaves no choice of what is held."""
    plan = driven([(0, 2, (0,)), (2, 6, (1,))], 6, limit)
    report = run_plan(plan, ModelSpec(GPT), RunOptions(steps=2, lr=0.01))
    graph = lower_run(plan, 1).graph
    for found, stage in zip(report.activations, graph.stages, strict=True):
        assert 0 < found.measured_bytes <= limit * stage.saved_bytes
        if forced:
            assert found.measured_bytes == found.planned_bytes


# --- what cannot be run, and the command ---------------------------------------------------------------------------


def test_a_batch_must_fill_the_grid():
    with pytest.raises(
        BadInput, match=r"7 microbatches cannot be shared evenly by the 2 replicas of stage 0; 6 or 8 can"
    ):
        lower_run(driven(GRID, 7), 1)
    with pytest.raises(
        BadInput, match=r"of 1 microbatches cannot be shared evenly by the 2 replicas of stage 0; 2 can"
    ):
        lower_run(driven(GRID, 1), 1)


def test_only_plans_that_drain_can_be_message_driven():
    plan = plan_of(zoo_chain(GPT, 2), [(0, 2, (0,)), (2, 6, (1,))], weights="2bw")
    with pytest.raises(BadInput, match="drains every mini-batch, which is for weights flush; the policy is 2bw"):
        under(plan, "message-driven", 3)


def test_the_command_runs_a_drained_plan_by_messages(tmp_path):
    made = plan_of(zoo_chain(GPT, 2), [(0, 2, (0,)), (2, 6, (1,))], weights="flush", accumulate=4)
    bound = any_bound(Problem(made.chain, made.platform, made.policy))
    path, own = tmp_path / "plan.json", tmp_path / "own.json"
    path.write_text(plan_text(replace(made, lower_bounds=(bound,))))
    own.write_text(plan_text(replace(under(made, "message-driven", 2), lower_bounds=(bound,))))

    def run(*arguments):
        return CliRunner().invoke(group, ["run", *map(str, arguments)], catch_exceptions=False)

    model = ["--model", f"zoo:{GPT}", "--lr", "0.05", "--seed", "1"]
    shown = run(path, "--schedule", "message-driven", "--limit", "3", "--dry-run", "--steps", "2")
    assert "at most 3 microbatches in each pipeline; arrivals decide the order" in shown.stdout
    assert "0F0v0 0f0>1 0F1v0 0f1>1 0F2v0" in shown.stdout
    losses, _ = serial(GPT, 2, steps=3, accumulate=4, optimizer="sgd", lr=0.05, seed=1)
    options = [*model, "--steps", 3, "--link-delay", "2ms"]
    done = run(path, "--schedule", "message-driven", "--limit", 3, *options, "--json")
    assert json.loads(done.stdout)["losses"] == pytest.approx(losses, abs=1e-5)
    trace = tmp_path / "trace.json"
    assert "of a mini-batch, by messages, limit 2" in run(own, *options, "--trace", trace).stdout
    assert "0F0" in trace.read_text()
    refused = run(path, "--limit", 3)
    assert (refused.exit_code, "--limit goes with --schedule message-driven" in refused.stderr) == (2, True)


# --- the order alone ---------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


class Letters:
    """Messages that come at given times: (at, edge, microbatch); waiting moves the clock."""

    def __init__(self, clock, letters):
        self.clock, self.letters = clock, sorted(letters)

    def news(self, until_ns):
        if self.letters and self.letters[0][0] > self.clock.now and (until_ns is None or until_ns > self.clock.now):
            self.clock.now = self.letters[0][0] if until_ns is None else min(until_ns, self.letters[0][0])
        elif until_ns is not None and not self.letters:
            self.clock.now = max(self.clock.now, until_ns)
        come = [x for x in self.letters if x[0] <= self.clock.now]
        self.letters = self.letters[len(come) :]
        assert come or until_ns is not None, "waits for ever"
        return [Message(edge, m, at) for at, edge, m in come]


def words(script, rank, letters, durations, limit=None, allows=lambda _: True, most_held=None):
    """Carry out a rank's instructions in the order of arrival; return (time, word) of its passes."""
    clock = Clock()
    instructions = script.instructions[rank]
    order = arrival_order(
        SimpleNamespace(lowered=script, number=rank), SimpleNamespace(allows=allows, at=lambda _: None),
        Letters(clock, letters), limit or script.limit, most_held or script.most_held(rank), clock,
    )  # fmt: skip
    done = []
    for index in order:
        match instructions[index]:
            case Forward(s, m, _):
                done.append((clock.now, f"{s}F{m}"))
                clock.now += durations["F"]
            case Backward(s, m, _):
                done.append((clock.now, f"{s}B{m}"))
                clock.now += durations["B"]
            case Send(kind, s, m, _):
                done.append((clock.now, f"{s}{kind.lower()}{m}"))
            case Update(s, version):
                done.append((clock.now, f"{s}U{version}"))
    return done


def two_stages(microbatches, limit):
    return driven([(0, 3, (0,)), (3, 6, (1,))], microbatches, limit, chain=chain_of(runtime_cases.healthy, 4))


def test_the_first_stage_injects_the_limit_and_then_one_for_each_that_is_through():
    script = lower_run(two_stages(4, 2), 1)
    letters = [(30, ("B", 1), 0), (31, ("B", 1), 1), (70, ("B", 1), 2), (71, ("B", 1), 3)]
    done = words(script, 0, letters, {"F": 10, "B": 5})
    assert [word for _, word in done if "f" not in word] == [
        "0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3", "0U1"
    ]  # fmt: skip
    assert {word: at for at, word in done}["0B0"] == 30
    assert {word: at for at, word in done}["0B1"] == 45  # the injected forward went first


def test_a_stage_that_holds_all_it_may_lets_forwards_wait():
    script = lower_run(two_stages(3, 3), 1)
    letters = [(30, ("B", 1), 0), (31, ("B", 1), 1), (70, ("B", 1), 2)]
    done = words(script, 0, letters, {"F": 10, "B": 5}, most_held={0: 1})
    assert [word for _, word in done if "f" not in word] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0U1"]


def test_a_stage_holds_what_its_devices_memory_has_room_for():
    plan = two_stages(4, 3)
    peak = evaluate(plan).devices[0].peak_bytes
    (kept,) = {lower_run(plan, 1).graph.stages[0].kept_bytes}
    assert lower_run(plan, 1).most_held(0)[0] > 3
    for spare, more in [(0, 0), (kept - 1, 0), (kept, 1)]:
        tight = replace(plan, platform=Platform.flat(2, peak + spare))
        assert lower_run(tight, 1).most_held(0) == {0: evaluate(plan).devices[0].in_flight[0] + more}


def test_what_arrived_first_runs_first():
    script = lower_run(two_stages(4, 3), 1)
    letters = [(0, ("F", 0), 1), (1, ("F", 0), 0), (2, ("F", 0), 3), (3, ("F", 0), 2)]
    done = words(script, 1, letters, {"F": 10, "B": 20})
    assert [word for _, word in done] == [
        "1F1", "1B1", "1b1", "1F0", "1B0", "1b0", "1F3", "1B3", "1b3", "1F2", "1B2", "1b2", "1U1"
    ]  # fmt: skip


def test_a_message_is_not_used_before_its_time():
    script = lower_run(two_stages(2, 2), 1)
    done = words(script, 1, [(50, ("F", 0), 0), (90, ("F", 0), 1)], {"F": 10, "B": 20})
    assert [(at, word) for at, word in done if word[1] in "FB"] == [(50, "1F0"), (60, "1B0"), (90, "1F1"), (100, "1B1")]


def test_what_a_run_may_not_begin_is_not_waited_for():
    script = lower_run(two_stages(2, 2), 3)
    letters = [(10 * m, ("F", 0), m) for m in range(2)]
    done = words(script, 1, letters, {"F": 1, "B": 1}, allows=lambda x: script.minibatch(x) < 1)
    assert [word for _, word in done if "U" in word] == ["1U1"]


class FakeUpdate:
    """Replicas that wait for each other."""

    def __init__(self, barrier):
        self.barrier, self.made = barrier, []

    def reduce(self, version):
        self.barrier.wait(SECONDS)

    def update(self, version):
        self.made.append(version)


class FakeStage:
    """A stage that takes a random moment and counts what it holds."""

    takes_targets = reads = splits = False

    def __init__(self, chance):
        self.chance, self.held, self.most = chance, set(), 0

    def forward(self, m, version, x, target, counted, lent, inputs):
        time.sleep(self.chance.random() / 500)
        self.held.add(m)
        self.most = max(self.most, len(self.held))
        return torch.tensor(m)

    def backward(self, m, version, gradient, covers, lent):
        time.sleep(self.chance.random() / 500)
        self.held.remove(m)
        return torch.tensor(m)


class Post:
    """Messages between threads, each a random moment late."""

    def __init__(self, ranks, seed):
        self.changed = threading.Condition()
        self.boxes = [{} for _ in range(ranks)]
        self.unread = [[] for _ in range(ranks)]
        self.chance = random.Random(seed)

    def deliver(self, rank, edge, m, tensor):
        with self.changed:
            at = time.monotonic_ns() + round(self.chance.random() * 3e6)
            self.boxes[rank][edge, m] = tensor
            self.unread[rank].append(Message(edge, m, at))
            self.changed.notify_all()


class PostBox:
    def __init__(self, post, rank):
        self.post, self.rank = post, rank

    def start(self):
        pass

    def finish(self):
        pass

    def take(self, edge, m):
        with self.post.changed:
            return self.post.boxes[self.rank].pop((edge, m))

    def look_ahead(self, edge):
        pass

    def await_room(self, send):
        return False

    def send(self, send, tensor):
        self.post.deliver(send.peer, send.edge, send.microbatch, tensor)

    def news(self, until_ns):
        seconds = SECONDS if until_ns is None else max(0, until_ns - time.monotonic_ns()) / 1e9
        with self.post.changed:
            came = self.post.changed.wait_for(lambda: self.post.unread[self.rank], seconds)
            assert came or until_ns is not None, "deadlock"
            news, self.post.unread[self.rank] = self.post.unread[self.rank], []
            return news


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 2, 2), (2, 1, 3)])
def test_random_delays_neither_deadlock_nor_exceed_the_limit(replicas, limit):
    devices = iter(range(sum(replicas)))
    places = [tuple(next(devices) for _ in range(r)) for r in replicas]
    stages = [(2 * i, 2 * i + 2, where) for i, where in enumerate(places)]
    script = lower_run(driven(stages, 12, limit, chain=chain_of(runtime_cases.healthy, 4)), 2)
    post = Post(len(script.devices), seed=limit)
    barriers = {s: threading.Barrier(r) for s, r in enumerate(replicas)}
    ran, modules, made, errors = [[] for _ in script.devices], [], [], []

    def play(rank):
        mine = {s: FakeStage(random.Random(rank)) for s in script.stages_of(rank)}
        modules.append((rank, mine))
        box = PostBox(post, rank)
        updates = {s: FakeUpdate(barriers[s]) for s in mine}
        made.extend(updates.values())
        run = SimpleNamespace(
            rank=SimpleNamespace(lowered=script, number=rank),
            stages=SimpleNamespace(runners=mine, updates=updates),
            reader=SimpleNamespace(activity="DATA", take=lambda m: (torch.tensor(m), None)),
            meeting=SimpleNamespace(recorder=Recorder()),
        )
        end = SimpleNamespace(
            allows=lambda _: True, over=lambda _: False, at=lambda _: None, updated=lambda s, version: None
        )
        order = arrival_order(run.rank, end, box, script.limit, {s: min(2, limit) for s in mine})
        try:
            ran[rank] = execute(run, end, box, order)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(len(script.devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert errors == []
    for rank, times in enumerate(ran):
        for s in script.stages_of(rank):
            share = 24 // replicas[s]
            assert Counter(t.activity for t in times if t.activity in "FB") == {"F": share, "B": share}
    assert all(update.made == [1, 2] for update in made)
    for _, mine in modules:
        for stage in mine.values():
            assert not stage.held
            assert stage.most <= min(2, limit)


def test_the_rule_is_the_simulators():
    script = lower_run(driven(GRID, 8, 3), 1)
    assert script.limit == 3
    assert script.program.limit == 6  # of both pipelines
    assert script.rule(0).__qualname__ == next_message(2).__qualname__
    assert Step(0, 0) in script.timeline.program.lanes[0].steps
