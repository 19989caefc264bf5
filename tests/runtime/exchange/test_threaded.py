"""Exchanges by threads, in real processes: slow links, ranks that fail, and runs that end early."""

import os
import signal
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.patience import SECONDS, fails_when_patient
from cases.runtime import BACKWARD_S, FORWARD_S, chain_of, plan_of, serial, simulated_version, undisturbed, zoo_chain

from pipeplan.errors import RunFailed, RunStopped
from pipeplan.problem import Platform
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import newest

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16"  # embedding, two blocks, norm, head, loss


def driven(chain, stages, microbatches, limit):
    return under(plan_of(chain, stages, weights="flush", accumulate=microbatches), "message-driven", limit)


# --- slow links -------------------------------------------------------------------------------------------------


def pausing_plan(microbatches, limit):
    """Four stages of one pause each, over links that carry both directions at once."""
    chain = chain_of(runtime_cases.pausing, 4)
    layers = [replace(x, forward_ns=round(FORWARD_S * 1e9), backward_ns=round(BACKWARD_S * 1e9)) for x in chain.layers]
    layers[-1] = replace(layers[-1], forward_ns=10**4, backward_ns=10**4)
    stages = [(0, 1, (0,)), (1, 2, (1,)), (2, 3, (2,)), (3, 5, (3,))]
    plan = driven(replace(chain, layers=tuple(layers)), stages, microbatches, limit)
    return replace(plan, platform=Platform(plan.platform.devices, plan.platform.levels, full_duplex=True))


@pytest.mark.alone
def test_a_larger_limit_hides_a_slow_link_as_predicted():
    """f = c = 10 ms, b = 20 ms: with limit p a stage idles while its next message travels, with 2p - 1 it doesn't."""
    model = ModelSpec("cases.runtime:pausing", "cases.runtime:vectors")
    plans = [pausing_plan(16, limit) for limit in (4, 7)]

    def measured():
        reports = [run_plan(plan, model, RunOptions(steps=3, lr=0.01, link_delay_s=FORWARD_S)) for plan in plans]
        for report in reports:
            assert all(x.measured_ns >= FORWARD_S * 1e9 for x in report.transfers)
            assert 0.85 <= report.measured_period_ns / report.calibrated_period_ns <= 1.25
        measured, simulated = (
            reports[0].measured_period_ns / reports[1].measured_period_ns,
            reports[0].calibrated_period_ns / reports[1].calibrated_period_ns,
        )
        assert simulated == pytest.approx(84 / 63, rel=0.1)  # ALGORITHMS section 7
        assert measured == pytest.approx(simulated, rel=0.2)
        assert measured > 1.1

    undisturbed(measured)


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_a_fixed_order_runs_over_a_slow_link_too(weights):
    plan = plan_of(zoo_chain(GPT, 2), [(0, 2, (0,)), (2, 6, (1,))], weights=weights, accumulate=3)
    delay_s = 0.02
    report = run_plan(plan, ModelSpec(GPT), RunOptions(steps=3, lr=0.05, seed=1, link_delay_s=delay_s))
    version = simulated_version(plan, 9) if weights == "2bw" else None
    losses, _ = serial(GPT, 2, steps=3, accumulate=3, optimizer="sgd", lr=0.05, seed=1, version=version, cuts=[2])
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert all(x.measured_ns >= delay_s * 1e9 for x in report.transfers)
    sent = {t.microbatch: t.end_ns for t in report.times[0] if t.activity == "F"}
    used = {t.microbatch: t.start_ns for t in report.times[1] if t.activity == "F"}
    assert all(used[m] - sent[m] >= delay_s * 1e9 for m in sent)  # both ranks read the machine's one clock


# --- what goes wrong ----------------------------------------------------------------------------------------------

FAULTS = {
    "raising": "rank {rank} failed in the forward of microbatch 4 on stage {rank}: ValueError: a bad microbatch",
    "backward_raising": "rank {rank} failed in the backward of microbatch 4 on stage {rank}: "
    "ArithmeticError: no way back",
    "killed": "rank {rank} died in the forward of microbatch 4 on stage {rank}: killed by SIGKILL",
}


def faulty_plan(cut):
    return driven(chain_of(runtime_cases.healthy, 4), [(0, cut, (0,)), (cut, 6, (1,))], 8, 3)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_ends_the_run_and_is_named(fault, rank):
    """The fault is in layer 3; nobody waits for a timeout."""
    model = ModelSpec(f"cases.faults:{fault}", "cases.runtime:vectors")
    with pytest.raises(RunFailed) as caught:
        run_plan(faulty_plan(cut=4 if rank == 0 else 3), model, RunOptions(steps=20, lr=0.01, timeout_s=10 * SECONDS))
    assert str(caught.value).startswith(FAULTS[fault].format(rank=rank))


@pytest.mark.parametrize("place", ["isend", "irecv", "reduce"])
def test_a_rank_of_a_grid_killed_in_an_exchange_is_named(place):
    """In its main thread or in one that exchanges beside it."""
    plan = driven(chain_of(runtime_cases.healthy, 4), [(0, 3, (0, 1)), (3, 6, (2, 3))], 8, 3)
    model = ModelSpec(f"cases.faults:deadly_{place}_1", "cases.runtime:vectors")
    with pytest.raises(RunFailed, match=r"^rank 1 died in .*\bstage 0\b.*: killed by SIGKILL"):
        run_plan(plan, model, RunOptions(steps=20, lr=0.01, timeout_s=10 * SECONDS))


def test_a_rank_that_hangs_is_named_when_the_others_wait_in_vain():
    model = ModelSpec("cases.faults:hanging", "cases.runtime:vectors")

    def run(timeout_s):
        run_plan(faulty_plan(cut=3), model, RunOptions(steps=20, lr=0.01, timeout_s=timeout_s))

    words = r"rank 1 doesn't answer in the forward of microbatch 4 on stage 1: rank 0 lost .*for [0-9]+ s"
    fails_when_patient(run, RunFailed, words)


def test_a_signal_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path):
    """Threads are ready for messages of the mini-batch that nobody begins any more."""
    plan = driven(zoo_chain(GPT, 2), [(0, 2, (0, 1)), (2, 6, (2, 3))], 4, 3)
    options = {"steps": 300, "lr": 0.05, "seed": 1, "checkpoint": tmp_path / "checkpoints"}

    def stop(done):
        if done.step == 3:  # a second signal would end us
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunStopped) as stopped:
        run_plan(plan, ModelSpec(GPT), RunOptions(timeout_s=SECONDS, **options), listener=stop)
    kept = newest(str(options["checkpoint"])).position.step
    assert str(stopped.value).startswith(f"stopped after update {kept};")
    again = run_plan(plan, ModelSpec(GPT), RunOptions(resume=True, **options | {"steps": kept + 1}))
    losses, _ = serial(GPT, 2, steps=kept + 1, accumulate=4, optimizer="sgd", lr=0.05, seed=1)
    assert again.losses == pytest.approx(losses[-4:], abs=1e-5)
