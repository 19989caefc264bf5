"""Schedules that hung where people trained with them, rebuilt: under which semantics they do, where, and what helped.

pytorch/pytorch#172668 (two traces), pytorch/torchtitan#775, NVIDIA/Megatron-LM#5240.
"""

from __future__ import annotations

import json

import pytest
from cases.schedules import balanced, looped
from conftest import Command

from pipeplan.schedule.deadlock import SEMANTICS, Action, lower
from pipeplan.schedule.programs.loops import interleaved
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.written import Written, deadlock, incomplete


def comes_through(rows):
    """The semantics under which rows do, which must be complete."""
    written = Written(tuple(map(tuple, rows)))
    assert incomplete(written) == []
    return {name for name in SEMANTICS if not deadlock(written, name)}


def passes(ranks, chunks, microbatches):
    """The passes of each rank under interleaved 1F1B."""
    program = interleaved(balanced(ranks * chunks, 1, 2, 1, homes=looped(ranks, chunks)), microbatches)
    lanes = [lane for lane in program.lanes if lane.device is not None]
    return [[Action(*_pass(program, step)) for step in lane.steps] for lane in lanes]


def _pass(program, step):
    work = program.operations[step.position]
    return work.stage, work.kind, step.microbatch


def received(action, stages):
    """The receive that a pass needs, if any."""
    if action.kind == "F":
        return Action(action.stage, "RECV_F", action.microbatch) if action.stage else None
    return Action(action.stage, "RECV_B", action.microbatch) if action.stage < stages - 1 else None


def sent(action, stages):
    """The send that follows a pass, if any."""
    if action.kind == "F":
        return Action(action.stage, "SEND_F", action.microbatch) if action.stage < stages - 1 else None
    return Action(action.stage, "SEND_B", action.microbatch) if action.stage else None


def late(rows, stages):
    """Passes with every receive right before the pass that needs it, and every send right behind its own."""
    return [[x for one in row for x in (received(one, stages), one, sent(one, stages)) if x] for row in rows]


def swapped(row):
    """A row in which a receive right behind a send comes before it."""
    row = list(row)
    for at in range(len(row) - 1):
        if row[at].kind.startswith("SEND") and row[at + 1].kind.startswith("RECV"):
            row[at], row[at + 1] = row[at + 1], row[at]
    return row


def text(rows):
    return ["".join(f"{action}," for action in row) for row in rows]


def test_receives_right_before_use_hang_two_ranks_that_share_a_stream():
    """pytorch#172668, first trace: Interleaved1F1B of two ranks and four stages, receives moved to where they are used.

    Both ranks send before they receive; the second of their transfers waits in the one stream that they have.
    """
    rows = late(passes(2, 2, 4), 4)
    assert "0SEND_F1,2RECV_F0,2F0," in text(rows)[0]
    assert "1SEND_F0,1RECV_F1,1F1," in text(rows)[1]
    assert comes_through(rows) == {"free"}
    found = deadlock(Written(tuple(map(tuple, rows))), "blocking")
    assert found == [
        "rank 0 stands at 0SEND_F1, until rank 1 comes to 1RECV_F1",
        "rank 1 stands at 1SEND_F0, until rank 0 comes to 2RECV_F0",
    ]
    assert deadlock(Written(tuple(map(tuple, rows))), "pair")[0] == "rank 0 stands at 2F0, which waits for 2RECV_F0"


def test_receiving_first_on_odd_ranks_alone_does_not_help():
    """pytorch#172668, second trace: where odd ranks receive before they send, a later pair of sends meets the same."""
    rows = late(passes(2, 2, 4), 4)
    rows[1] = swapped(rows[1])
    assert "2SEND_F1,0F2,0SEND_F2,2RECV_B0,2B0," in text(rows)[0]
    assert "3RECV_F1,3SEND_B0,3F1,3B1,1RECV_F2,3SEND_B1,1F2," in text(rows)[1]
    assert deadlock(Written(tuple(map(tuple, rows))), "blocking") == [
        "rank 0 stands at 0SEND_F2, until rank 1 comes to 1RECV_F2",
        "rank 1 stands at 3SEND_B0, until rank 0 comes to 2RECV_B0",
    ]
    assert comes_through(rows) == {"free"}


def fused_1f1b(ranks, microbatches):
    """1F1B as torch's single-stage schedule posts it: what is in a row, together.

    The last forward of the warm-up goes out with the first gradient's receive, a gradient with the next forward's.
    """
    rows = []
    for rank in range(ranks):

        def only(kind, m, rank=rank):
            first = kind in ("RECV_F", "SEND_B")
            return [] if (rank == 0 if first else rank == ranks - 1) else [Action(rank, kind, m)]

        warm = min(microbatches, ranks - rank)
        row: list[Action] = []
        for m in range(warm):
            row += [*only("RECV_F", m), Action(rank, "F", m), *(only("SEND_F", m) if m < warm - 1 else [])]
        forward, pending = warm, only("SEND_F", warm - 1)
        for m in range(microbatches):
            row += [*pending, *only("RECV_B", m), Action(rank, "B", m), *only("SEND_B", m)]
            pending = []
            if forward < microbatches:
                row += [*only("RECV_F", forward), Action(rank, "F", forward)]
                pending = only("SEND_F", forward)
                forward += 1
        rows.append(row)
    return rows


@pytest.mark.parametrize(("ranks", "microbatches"), [(8, 1), (4, 2), (4, 3)])
def test_fewer_microbatches_than_stages_hang_where_sends_wait_for_what_they_were_posted_with(ranks, microbatches):
    """torchtitan#775: 1F1B with fewer microbatches than stages stops in its warm-up, also with one on eight ranks.

    The last forward waits for the receive beside it, which nobody can answer before that forward has come.
    """
    rows = fused_1f1b(ranks, microbatches)
    assert {"batched", "free"} <= comes_through(rows) <= set(SEMANTICS) - {"together"}
    found = deadlock(Written(tuple(map(tuple, rows))), "together")
    last = microbatches - 1
    assert found[0] == f"rank 0 stands at 0SEND_F{last}, until rank 1 comes to 1RECV_F{last}"
    assert found[1] == f"rank 1 stands at 1RECV_F{last}, until rank 0 comes to 0SEND_F{last}"
    assert len(found) == ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 9), (8, 8)])
def test_as_many_microbatches_as_stages_match_each_others_groups(ranks, microbatches):
    assert "together" in comes_through(fused_1f1b(ranks, microbatches))


def test_communicators_made_at_first_use_hang_where_ranks_come_to_them_in_other_orders():
    """Megatron-LM#5240: interleaved on four ranks with two chunks each, unbatched, a communicator for every two ranks.

    A rank that posts the receive for its second chunk before its first send stands at the communicator with the last
    rank, which waits for all ranks between. Batched in one group, or where communicators are there, the same transfers
    come through.
    """
    program = interleaved(balanced(8, 1, 2, 1, homes=looped(4, 2)), 8)
    lists = lower(program, simulate(program).start_ns)
    rows = [[Action(op.stage, op.kind, op.microbatch) for op in lists[rank]] for rank in sorted(lists)]
    assert comes_through(rows) >= set(SEMANTICS) - {"together"}
    early = Action(4, "RECV_F", 0)
    rows[0].remove(early)
    rows[0].insert(rows[0].index(Action(0, "SEND_F", 0)), early)
    assert comes_through(rows) == {"batched", "pair", "free"}
    assert deadlock(Written(tuple(map(tuple, rows))), "lazy") == [
        "rank 0 stands at 4RECV_F0, until rank 3 comes to 3SEND_F0",
        "rank 1 stands at 1RECV_F0, until rank 0 comes to 0SEND_F0",
        "rank 2 stands at 2RECV_F0, until rank 1 comes to 1SEND_F0",
        "rank 3 stands at 3RECV_F0, until rank 2 comes to 2SEND_F0",
    ]


def test_check_says_under_which_semantics_a_schedule_hangs(tmp_path, pipeplan: Command) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(line.rstrip(",") for line in text(fused_1f1b(3, 2))) + "\n")
    code, out, _ = pipeplan("check", "--schedule", str(path))
    assert code == 0
    assert "together  deadlock: rank 0 stands at 0SEND_F1, until rank 1 comes to 1RECV_F1" in out
    assert "batched   comes through" in out
    code, out, _ = pipeplan("check", "--schedule", str(path), "--semantics", "together", "--json")
    assert code == 1
    assert len(json.loads(out)["deadlocks"]["together"]) == 3
