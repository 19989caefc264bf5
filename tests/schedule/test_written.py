"""Written schedules: what is missing or out of order, and under which semantics ranks wait for each other for good."""

from __future__ import annotations

import random

import pytest
from cases.plans import straight
from cases.schedules import balanced, looped, vee

from pipeplan.errors import BadInput
from pipeplan.files.schedule_csv import read_schedule
from pipeplan.planner.simulated.other_schedules import program_of
from pipeplan.planner.simulated.simulation import simulate_plan, simulate_written
from pipeplan.schedule.deadlock import SEMANTICS, Action, lower
from pipeplan.schedule.programs.loops import interleaved
from pipeplan.schedule.programs.one_f_one_b import one_f_one_b
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.written import Written, deadlock, incomplete

SENDS_BOTH_WAYS = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""


@pytest.fixture
def read(tmp_path):
    def written(text):
        path = tmp_path / "schedule.csv"
        path.write_text(text)
        return read_schedule(str(path))

    return written


def test_two_sends_towards_each_other_need_a_group_or_a_stream_of_their_own(read):
    """The last forward of rank 0 and the first backward of rank 1, as 1F1B written without fused sends and receives."""
    written = read(SENDS_BOTH_WAYS)
    assert incomplete(written) == []
    assert deadlock(written, "blocking") == [
        "rank 0 stands at 0SEND_F1, until rank 1 comes to 1RECV_F1",
        "rank 1 stands at 1SEND_B0, until rank 0 comes to 0RECV_B0",
    ]
    assert [name for name in SEMANTICS if not deadlock(written, name)] == ["together", "batched", "free"]
    assert deadlock(written, "rank")[0] == "rank 0 stands at 0B0, which waits for 0RECV_B0"


def test_a_mistyped_number_is_said_at_once(read):
    assert incomplete(read("0F0,0B0,999999F999999\n"))[-1] == "and at least 990 more"


def test_one_stream_per_rank_couples_pairs_that_have_nothing_to_do_with_each_other(read):
    """Rank 1 has a receive from rank 2 before one from rank 0, and rank 0 a send to rank 1 before what rank 2 needs."""
    written = read(
        "0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0,3RECV_F1,3F1,3B1,3SEND_B1,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1RECV_F1,1B0,1SEND_B0,1F1,1SEND_F1,1RECV_B1,1B1,1SEND_B1\n"
        "2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0,2RECV_F1,2F1,2SEND_F1,2RECV_B1,2B1,2SEND_B1\n"
    )
    assert incomplete(written) == []
    assert [name for name in SEMANTICS if deadlock(written, name)] == ["blocking", "together", "rank"]


def listed(program):
    """The lists that processes are given, with their transfers, as a written schedule."""
    ranks = lower(program, simulate(program).start_ns)
    rows = [[Action(op.stage, op.kind, op.microbatch) for op in ranks[d]] for d in sorted(ranks)]
    return Written(tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    "program",
    [
        one_f_one_b(balanced(3, 1, 2, 1), 5),
        interleaved(balanced(4, 1, 2, 1, homes=looped(2, 2)), 4),
        one_f_one_b(balanced(4, 1, 2, 1, homes=vee(2)), 3),
    ],
)
def test_lists_that_cannot_deadlock_when_everything_blocks_come_through_under_all_that_do_not_wait_for_groups(program):
    written = listed(program)
    assert incomplete(written) == []
    assert [name for name in SEMANTICS if deadlock(written, name) and name != "together"] == []


def test_blocking_is_the_strongest_and_free_the_weakest():
    rng, stuck = random.Random(3), 0
    base = listed(one_f_one_b(balanced(3, 1, 2, 1), 3))
    for _ in range(150):
        rows = [list(row) for row in base.rows]
        for row in rows:
            at = rng.randrange(len(row) - 1)
            row[at], row[at + 1] = row[at + 1], row[at]
        written = Written(tuple(map(tuple, rows)))
        if incomplete(written):
            continue
        found = {name: not deadlock(written, name) for name in SEMANTICS}
        stuck += not found["blocking"]
        assert not found["blocking"] or all(found[name] for name in SEMANTICS if name != "together")
        assert not found["together"] or found["batched"]
        assert found["free"] or not any(found.values())
    assert stuck > 3


def test_what_is_missing_twice_misplaced_or_out_of_order_is_said(read):
    assert incomplete(read("0F0,0B0\n1F0\n")) == ["the backward of stage 1, microbatch 0 is missing"]
    assert incomplete(read("0F0,0F0,0B0\n")) == ["0F0 is there twice: on ranks 0 and 0"]
    assert incomplete(read("0F0,0B0\n0F1,0B1\n"))[0].startswith("0F0 is on rank 0; stage 0 is on rank 1")
    assert incomplete(read("0B0,0F0\n")) == ["rank 0 runs 0B0 before 0F0, which it needs"]
    assert incomplete(read("0F0,0I0\n")) == ["the backward of stage 0, microbatch 0 has I"]
    lost = incomplete(read(SENDS_BOTH_WAYS.replace("1RECV_F1,", "")))
    assert "0SEND_F1 on rank 0 has no 1RECV_F1" in lost
    assert len(incomplete(read("0F40,0B40\n"))) == 11
    with pytest.raises(BadInput, match="row 1, cell 2: 'x' isn't an action such as 0F0"):
        read("0F0,x\n")
    with pytest.raises(BadInput, match="has no action of a stage"):
        read(",,\n")
    assert read("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD\n").microbatches == 2


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "gpipe"])
def test_a_written_schedule_is_simulated_as_the_schedule_that_it_was_written_by(name, read):
    plan = straight()
    program = program_of(plan, name, 8)
    rows = [",".join(map(program.name, lane.steps)) for lane in program.lanes if lane.device is not None]
    written = read("\n".join(rows) + "\n")
    assert simulate_written(plan, written, "file").makespan_ns == simulate_plan(plan, 8, name).makespan_ns
    short = Written(written.rows[:-1])
    with pytest.raises(BadInput, match="file: "):
        simulate_written(plan, short, "file")


def test_the_commands_read_a_file(pipeplan, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(SENDS_BOTH_WAYS)
    code, out, _ = pipeplan("check", "--schedule", str(path))
    assert (code, out.splitlines()[-1]) == (0, "valid: 2 stages on 2 ranks, 2 microbatches, with its transfers")
    assert pipeplan("check", "--schedule", str(path), "--semantics", "pair", "--json")[0] == 1
    path.write_text("0F0\n")
    code, _, err = pipeplan("check", "--schedule", str(path))
    assert (code, "the backward of stage 0, microbatch 0 is missing" in err) == (1, True)
    assert pipeplan("check")[0] == 2
    assert pipeplan("check", "plan.json", "--semantics", "free")[0] == 2
