from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeplan.cost.roofline import Constants, timed
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.planner.calibrate import calibration
from pipeplan.planner.calibrate.calibration import calibrate
from pipeplan.planner.calibrate.costed import Configuration, Passes, Run, costed, critical_passes, stage_passes
from pipeplan.problem import Chain, Layer, LayerWork, PassWork, Platform, Policy

START = Constants(0.75, 0.9, 5000, 20_000, 10_000)
TRUE = Constants(0.6, 0.72, 6250, 45_000, 22_500)


def layer(index: int, size: int) -> Layer:
    """A block: host-bound where it is small, with arithmetic and traffic that grow with its size."""
    work = LayerWork(
        PassWork(40_000 * size, 30_000 * size, 2, 12),
        PassWork(80_000 * size, 50_000 * size, 2, 24),
        PassWork(0, 0, 3, 3),
    )
    return Layer(f"block{index}", 1, 2, 4000, 1000, saved_bytes=1000, backward_weight_ns=1, work=work)


def model(size: int) -> Chain:
    return timed(Chain(f"of{size}", tuple(layer(i, size) for i in range(8)), 1000, microbatch=size), START)


def runs(constants: Constants = TRUE) -> list[Run]:
    found = []
    chains = {size: model(size) for size in (1, 2, 4, 16, 32)}
    for size, chain in chains.items():
        for split, pipelines, recompute in (("8", 1, "none"), ("4,4", 1, "each"), ("2,2,2,2", 2, "none")):
            asked = Configuration(split, pipelines, recompute=recompute, batch=8 * size * pipelines)
            platform = Platform.flat(8, 10**9, 12 * 10**9)
            run = Run(f"{size} {split}", chain, platform, Policy("flush"), asked, 1.0)
            found.append(replace(run, measured_ns=float(run.costed(constants).iteration_ns)))
    return found


def test_the_constants_that_made_the_times_are_found_again() -> None:
    found = calibrate(runs(), START)
    assert found.error_before > 0.2
    assert found.chosen.freedom.names == ("scale", "host"), "which is all that differs"
    assert found.chosen.left_out is not None
    assert found.chosen.left_out < 0.005
    for name in ("compute_share", "bandwidth_share", "forward_host_ns", "backward_host_ns"):
        assert getattr(found.chosen.constants, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name


def test_each_run_is_judged_by_constants_fitted_to_the_others() -> None:
    given = runs()[:5]
    wrong = [*given[:-1], replace(given[-1], measured_ns=3 * given[-1].measured_ns)]
    found = calibrate(wrong, START)
    scale = found.tried[0]
    others = calibrate(wrong[:-1], START).tried[0].constants
    alone = wrong[-1].costed(others).iteration_ns
    assert scale.predicted_ns[-1] == pytest.approx(alone, rel=1e-3)
    assert scale.left_out is not None
    assert scale.left_out > scale.error
    assert len(found.tried) == 2, "five times bear no three constants"


def test_host_times_keep_to_their_ratio_where_little_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Passes] = []
    for run in runs():
        off = 0.97 if run.configuration.recompute == "each" else 1.03
        if run.chain.microbatch <= 2:
            given += 10 * [replace(critical_passes(run, TRUE), measured_ns=off * run.measured_ns)]

    def ratio(weight: float) -> float:
        monkeypatch.setattr(calibration, "TOGETHER", weight)
        apart = ("host forward", "host backward")  # all runs wait for their host
        found = next(x for x in calibrate([], START, given).tried if x.freedom.names == apart)
        return found.constants.backward_host_ns / found.constants.forward_host_ns

    free, kept, tied = ratio(0.0), ratio(0.1), ratio(2.0)
    assert free > 1.05 * kept > 1.05 * tied
    assert tied == pytest.approx(START.backward_host_ns / START.forward_host_ns, rel=0.01)


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb1p", "interleaved"])
def test_the_passes_on_the_critical_path_account_for_the_iteration(schedule: str, barrier: bool) -> None:
    run = runs()[-1]
    on = "0/1/0/1" if schedule == "interleaved" else None
    asked = replace(run.configuration, pipelines=1, schedule=schedule, on=on, batch=256, barrier=barrier)
    run = replace(run, configuration=asked)
    now, later = (replace(START, compute_share=share) for share in (0.75, 0.6))
    passes = critical_passes(run, now)
    chain = timed(run.chain, later)
    times = [
        np.array([getattr(x, name) for x in chain.layers]) for name in ("forward_ns", "backward_ns", "optimizer_ns")
    ]
    counts = passes.forward, passes.backward, passes.optimizer
    predicted = passes.rest_ns + sum(float(a @ b) for a, b in zip(counts, times, strict=True))
    assert predicted == pytest.approx(run.costed(later).iteration_ns, rel=0.01), "the path is the same at another speed"
    assert sum(passes.forward) > 0


def test_a_runs_own_stage_times_are_fitted() -> None:
    chain = model(32)
    stages = (Stage(0, 3, (0,)), Stage(3, 8, (1,), ((3, 5),)))
    slow = timed(chain, TRUE).layers
    times = []
    for stage in stages:
        own = slow[stage.start : stage.stop]
        again = sum(x.forward_ns for first, last in stage.checkpoint for x in slow[first:last])
        forward, backward = sum(x.forward_ns for x in own), sum(x.backward_ns for x in own)
        times.append((forward, backward + again, sum(x.optimizer_ns for x in own)))
    found = calibrate([], START, stage_passes(chain, stages, times))
    assert found.names[:3] == ("forward of stage 0", "backward of stage 0", "update of stage 0")
    assert found.chosen.constants.compute_share == pytest.approx(TRUE.compute_share, rel=0.05)
    assert found.chosen.error < 0.02


def test_runs_tell_of_what_they_wait_for() -> None:
    waiting = [x for x in runs() if x.chain.microbatch <= 2]
    found = calibrate(waiting, START)
    assert {x.freedom.names for x in found.tried} == {("host",), ("host forward", "host backward")}
    assert found.chosen.constants.compute_share == START.compute_share
    busy = calibrate([x for x in runs() if x.chain.microbatch >= 16], START)
    assert [x.freedom.names for x in busy.tried] == [("scale",)]
    assert busy.chosen.constants.forward_host_ns == START.forward_host_ns
    alone = calibrate(runs(), START, hosts_alone=True)
    assert not any("scale" in x.freedom.names for x in alone.tried)
    low, high = found.ranges["forward_host_ns"]
    assert low <= found.chosen.constants.forward_host_ns * 1.001
    assert high >= found.chosen.constants.forward_host_ns * 0.999
    assert high - low < 0.2 * high


def test_shares_stay_within_what_kernels_reach() -> None:
    quick = [x for x in runs(Constants(1.0, 1.0, 4000, 20_000, 10_000)) if x.chain.microbatch >= 16]
    found = calibrate(quick, START)
    assert found.chosen.constants.compute_share == 0.9
    assert not calibrate(quick[:3], START).enough
    assert calibrate(runs(), START).enough
    assert found.within[1] < 1, "they took less than even that"


def test_what_cannot_be_fitted_or_run_is_refused() -> None:
    with pytest.raises(BadInput, match="no measured times"):
        calibrate([], START)
    measured = replace(model(1), layers=tuple(replace(x, work=None) for x in model(1).layers))
    with pytest.raises(BadInput, match="profile 'of1': its times are measured"):
        calibrate([replace(runs()[0], chain=measured)], START)
    platform = Platform.flat(2, 10**9)
    for asked, message in (
        (Configuration("4,4", batch=3, pipelines=2), "batch: 3 samples are no whole number of microbatches of 2"),
        (Configuration("4,4", schedule="nf1b"), "schedule: 'nf1b' doesn't drain; those that do are .*gpipe"),
        (Configuration("4,4", pipelines=2), "4 GPUs, the platform has 2"),
    ):
        with pytest.raises(BadInput, match=message):
            costed(model(2), platform, Policy("flush"), asked)
