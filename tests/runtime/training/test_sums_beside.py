"""Sums over replicas that go on beside passes: what they change, and what they don't."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import largest_difference, plan_of, uncorrected, zoo_chain

from pipeplan.check.evaluate import evaluate
from pipeplan.check.validate import check
from pipeplan.errors import RunFailed
from pipeplan.problem import Device
from pipeplan.runtime.lowering.instructions import Forward, Norm, PutAside, Reduce, Update
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.measure.progress import place, teller
from pipeplan.runtime.measure.recorder import Recorder
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.update.exchanges import Exchange, OnThread

MODEL = ModelSpec("gpt-tiny")


@pytest.fixture(scope="module")
def chain():
    return zoo_chain("gpt-tiny", 2)


def replicated(chain, **given):
    return plan_of(chain, [(0, 5, (0, 1)), (5, 8, (2,))], **{"weights": "2bw", "optimizer": "momentum"} | given)


def without_room(plan):
    """The same on devices that have no byte more than is planned."""
    most = max(x.peak_bytes for x in evaluate(plan).devices)
    plan = replace(plan, platform=replace(plan.platform, devices=tuple(Device(most) for _ in plan.platform.devices)))
    check(plan)
    return plan


def test_the_pace_is_that_of_the_passes_however_late_updates_are(chain):
    """Both updates wait for the norm until the end of the run, and come right behind each other."""
    plan = plan_of(chain, [(0, 5, (0,)), (5, 8, (1,))], weights="2bw", accumulate=4)
    plan = replace(plan, policy=replace(plan.policy, clip=True))
    told = []
    report = run_plan(plan, MODEL, uncorrected(steps=2, lr=0.1, clip_norm=1.0), told.append)
    backwards = [x for times in report.times for x in times if (x.activity, x.stage) == ("B", 1)]
    ends = [max(x.end_ns for x in backwards if x.microbatch // 4 == step) for step in range(2)]
    assert told[1].period_ns == pytest.approx((ends[1] - ends[0]) / 4, rel=1e-3)
    lowered = lower_run(plan, 2)
    said = [place(lowered, index) for index in range(-1, len(lowered.instructions[teller(lowered)]))]
    assert said[0] == "update 1 of 2: microbatch 1 of 4"
    assert said[-1] == "update 2 of 2"
    assert len(set(said)) == 2 * (4 + 1)


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
def test_an_update_comes_right_before_its_first_use(chain, clip):
    plan = replicated(chain, accumulate=4)
    plan = replace(plan, policy=replace(plan.policy, clip=clip))
    lowered = lower_run(plan, 8)
    assert set(lowered.beside) == {0}
    for rank in lowered.ranks_of(0):
        listing = list(lowered.instructions[rank])
        for version in range(1, 7):
            aside, begun, made = (
                listing.index(x) for x in (PutAside(0, version), Reduce(0, version), Update(0, version))
            )
            first = next(i for i, x in enumerate(listing) if isinstance(x, Forward) and x.version == version)
            assert aside < begun < made < first
            assert not any(isinstance(x, Forward) for x in listing[made + 1 : first])
            assert listing.index(Norm(version)) in range(begun, made) if clip else Norm(version) not in listing
    assert lower_run(without_room(replicated(chain, accumulate=4)), 8).beside == {}


def test_a_drained_batch_sums_a_stage_while_others_pass(chain):
    plan = plan_of(chain, [(0, 3, (0, 1)), (3, 8, (0, 1))], accumulate=4)
    lowered = lower_run(plan, 1)
    assert set(lowered.beside) == {0, 1}
    kinds = [(type(x), getattr(x, "stage", None)) for x in lowered.instructions[0]]
    assert kinds.index((Reduce, 1)) < len(kinds) - 4 - (kinds[-4:].count((Reduce, 0)) == 0)
    assert [kind for kind, _ in kinds[-2:]] == [Update, Update]


# --- the thread -------------------------------------------------------------------------------------------------------


class Slow(Exchange):
    """An exchange of two sums that end when they may."""

    def __init__(self, recorder, error=None):
        no_weights = SimpleNamespace(waits=False)
        super().__init__(0, no_weights, SimpleNamespace(parts=lambda tied: range(2)), recorder)
        self.parts, self.may, self.error = [range(1), range(1, 2)], [Event(), Event()], error
        self.heard = []

    def begin(self, version):
        self.heard.append(("begin", version))

    def complete(self, told=lambda _: None):
        for index, event in enumerate(self.may):
            self._note_begin(index)
            event.wait()
            if self.error is not None:
                raise self.error
            self._note_end(index)
            told(index)

    def ready(self, index):
        self.heard.append(index)


def test_parts_are_stepped_as_they_come_and_notes_are_told_then():
    recorder = Recorder()
    slow = Slow(recorder)
    beside = OnThread(slow)
    beside.begin(1)  # comes back, though nothing has been summed
    assert list(recorder.settle()) == []
    slow.may[0].set()
    beside.wait(0)  # though the second one goes on
    assert len(list(recorder.settle())) == 1
    slow.may[1].set()
    beside.wait(1)
    assert slow.heard == [("begin", 1), 0, 1]
    assert [x.activity for x in recorder.settle()] == ["REDUCE", "REDUCE"]


@pytest.mark.parametrize("waits", [lambda x: x.wait(0), lambda x: x.wait(1), OnThread.join])
def test_what_goes_wrong_is_raised_where_the_sum_is_waited_for(waits):
    slow = Slow(Recorder(), RunFailed("gone"))
    beside = OnThread(slow)
    beside.begin(1)
    slow.may[0].set()
    with pytest.raises(RunFailed, match="gone"):
        waits(beside)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_bits_are_those_of_sums_that_are_waited_for_also_after_a_checkpoint(chain, tmp_path):
    plan = replicated(chain, weights="2bw-uniform", accumulate=4)  # else they read what is ready, one of them earlier
    found = {}
    for name, given in (("beside", plan), ("waits", without_room(plan))):
        options = {"lr": 0.05, "checkpoint": tmp_path / name, "every": 2}
        first = run_plan(given, MODEL, uncorrected(steps=2, **options))
        rest = run_plan(given, MODEL, uncorrected(steps=5, resume=True, save=tmp_path / "state", **options))
        found[name] = (*first.losses, *rest.losses), torch.load(tmp_path / "state"), rest
    assert found["beside"][0] == found["waits"][0]
    assert largest_difference(found["beside"][1], found["waits"][1]) == 0
    for _, _, report in found.values():
        assert report.stages[0].sum_ns > 0
        assert report.stages[1].sum_ns == 0
    assert found["waits"][2].stages[0].sum_wait_ns > 0
    for state in found["beside"][2].states:
        assert state.measured_bytes <= state.planned_bytes
