"""Orders that are torch's: those of its own schedules, pass by pass, for several sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cases.schedules import balanced, looped, vee

from pipeplan.schedule.programs.loops import breadth_first, interleaved, interleaved_zero_bubble
from pipeplan.schedule.programs.vees import dualpipev, zbv
from pipeplan.schedule.simulate import simulate


def torchs(name, devices, chunks, microbatches):
    """What torch has each rank do, as words; without the gaps that it leaves for others."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, microbatches // devices)
    rank = SimpleNamespace(
        pp_group_size=devices,
        n_local_stages=chunks,
        _stages=[None] * chunks,
        _num_stages=devices * chunks,
        num_stages=devices * chunks,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    order = getattr(schedules, name)._calculate_single_rank_operations
    return [[str(action) for action in order(rank, d) if action is not None] for d in range(devices)]


def ours(program):
    """What each device does, as words."""
    return [program.cells(lane) for lane in simulate(program).program.lanes if lane.device is not None]


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 2), (2, 1), (2, 4), (3, 6), (4, 8), (4, 10)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_loops(devices, microbatches, chunks):
    graph = balanced(devices * chunks, 1, 2, weight_part=1, homes=looped(devices, chunks))
    for name, build in (
        ("ScheduleInterleaved1F1B", interleaved),
        ("ScheduleInterleavedZeroBubble", interleaved_zero_bubble),
        ("ScheduleLoopedBFS", breadth_first),
    ):
        assert ours(build(graph, microbatches)) == torchs(name, devices, chunks, microbatches), name


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 2), (2, 4), (2, 5), (3, 6), (4, 12)])
def test_zbv_forwards_and_input_parts(devices, microbatches):
    """Weight parts go where there is room."""
    graph = balanced(2 * devices, 1, 2, weight_part=1, homes=vee(devices))
    rows = [torchs("ScheduleZBVZeroBubble", devices, 2, microbatches), ours(zbv(graph, microbatches))]
    first, second = ([[word for word in row if "W" not in word] for row in found] for found in rows)
    assert first == second


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 2), (2, 4), (2, 5), (3, 7), (4, 8), (5, 12)])
def test_dualpipev(devices, microbatches):
    graph = balanced(2 * devices, 1, 2, weight_part=1, homes=vee(devices))
    assert ours(dualpipev(graph, microbatches)) == torchs("ScheduleDualPipeV", devices, 2, microbatches)
