"""The validator on plans built by hand, each with one thing wrong."""

from dataclasses import replace

import pytest
from cases.changes import only, with_memory, with_op, with_policy, with_stage, with_stages, with_starts
from cases.plans import graph_of

from pipeplan.check.validate import check, kept_together, label, violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import InvalidPlan
from pipeplan.plan import Allocation, Bound, Pattern, Plan, Provenance, Schedule, Stage, TimedOp
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy
from pipeplan.schedule.pattern import make_pattern, most_in_flight, resource_use, starts_of

CHAIN = Chain("hand", tuple(Layer(f"l{i}", 2, 4, 10, 3) for i in range(4)), 3)


def plan_by_hand(stages, starts, period, memory, policy=None, chain=CHAIN, duplex=False, bandwidth=10**9):
    """Return a plan whose devices, as many as the stages name and one more, have ``memory`` bytes each."""
    policy = policy or Policy("2bw", accumulate=8)
    count = 2 + max(d for stage in stages for d in stage.devices)
    platform = Platform((Device(memory),) * count, (Level(count, bandwidth),), duplex)
    graph = stage_graph(chain, platform, policy, stages)
    schedule = Schedule("flush", policy.accumulate) if policy.weights == "flush" else Schedule()
    pattern = make_pattern(graph, starts, period)
    return Plan(chain, platform, policy, Allocation(tuple(stages)), pattern, (), Provenance("hand"), schedule)


# device 0: F0 2, B0 4 (with stage 2: F2 2, B2 4); device 1: F1 4, B1 8; link: 3 each way
SANDWICH = (Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (0,)))


def sandwich(**options):
    """Stages 0 and 2 on device 0, stage 1 on device 1: the path F0 s F1 s F2 B2 s B1 s B0, period 14."""
    #          F0 SF0 F1 SF1 F2  B2  SB2 B1  SB1 B0
    starts = [0, 2, 5, 9, 12, 16, 20, 23, 40, 48]
    return plan_by_hand(SANDWICH, starts, 14, options.pop("memory", 104), **options)


def replicated():
    """Stage 0 on two devices, each with a period of 32, and stage 1, recomputed, on a third."""
    stages = (Stage(0, 2, (0, 1)), Stage(2, 4, (2,), ((2, 4),)))
    #       F0 SF0 F1 B1  SB1 B0
    starts = [0, 4, 7, 11, 23, 36]
    return plan_by_hand(stages, starts, 16, 100, bandwidth=10**9)


def test_plans_built_by_hand_are_valid():
    assert violations(sandwich()) == []
    assert violations(sandwich(duplex=True)) == []
    assert violations(replicated()) == []
    use = resource_use(graph_of(sandwich()), starts_of(sandwich().pattern), 14, 0)
    # 2bw: 3 * 20; both cuts end on device 0 (2 * 3 each); at F0 four microbatches of stage 0, one of stage 2 are held
    assert (use.weights_bytes, use.buffer_bytes, use.activation_bytes, use.in_flight) == (60, 12, 15, (4, 1))


STRUCTURE = {
    "no stages": (lambda p: with_stages(p), ["the plan has no stages"]),
    "late start": (
        lambda p: with_stages(p, Stage(1, 2, (0,)), Stage(2, 3, (1,)), SANDWICH[2]),
        ["stage 0 starts at layer 1", "end at 0"],
    ),
    "gap": (lambda p: with_stage(p, 1, start=2), ["stage 1 starts at layer 2", "end at 1"]),
    "overlap": (lambda p: with_stage(p, 0, stop=2), ["stage 1 starts at layer 1", "end at 2"]),
    "short": (lambda p: with_stages(p, *SANDWICH[:2]), ["ends at layer 3", "4 layers"]),
    "empty": (lambda p: with_stage(p, 1, stop=1), ["stage 1 is layers [1, 1) of 4"]),
    "reversed": (lambda p: with_stage(p, 1, stop=0), ["stage 1 is layers [1, 0) of 4"]),
    "outside": (lambda p: with_stage(p, 2, stop=5), ["stage 2 is layers [3, 5) of 4"]),
    "far outside": (lambda p: with_stage(p, 2, stop=10**30), [f"stage 2 is layers [3, {10**30}) of 4"]),
    "unknown device": (lambda p: with_stage(p, 1, devices=(3,)), ["stage 1 uses device 3", "devices 0 to 2"]),
    "negative device": (lambda p: with_stage(p, 1, devices=(-1,)), ["stage 1 uses device -1"]),
    "no device": (lambda p: with_stage(p, 1, devices=()), ["stage 1 has no device"]),
    "device twice": (lambda p: with_stage(p, 1, devices=(1, 1)), ["stage 1 lists a device twice: [1, 1]"]),
    "groups overlap": (lambda p: with_stage(p, 1, devices=(0, 1)), ["[0] and [0, 1] overlap"]),
    "segment outside": (lambda p: with_stage(p, 1, checkpoint=((0, 2),)), ["stage 1", "[0, 2)", "[1, 3)"]),
    "segment too long": (lambda p: with_stage(p, 1, checkpoint=((1, 4),)), ["stage 1", "[1, 4)"]),
    "segment empty": (lambda p: with_stage(p, 1, checkpoint=((2, 2),)), ["stage 1", "[2, 2)"]),
    "segments overlap": (lambda p: with_stage(p, 1, checkpoint=((1, 3), (2, 3))), ["stage 1", "[2, 3)"]),
    "segments reversed": (lambda p: with_stage(p, 1, checkpoint=((2, 3), (1, 2))), ["stage 1", "[1, 2)"]),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name):
    change, words = STRUCTURE[name]
    only(change(sandwich()), *words)


def test_a_start_far_before_the_chain_is_no_crash():
    found = violations(with_stage(sandwich(), 0, start=-(10**30)))
    assert found[0].startswith(f"stage 0 starts at layer {-(10**30)}")


def test_groups_in_another_order_overlap():
    stages = (Stage(0, 2, (0, 1)), Stage(2, 4, (1, 0)))
    only(with_stages(sandwich(), *stages), "[0, 1] and [1, 0] overlap")


def test_a_stage_must_take_time():
    idle = replace(CHAIN, layers=(*CHAIN.layers[:3], Layer("idle", 0, 0, 0, 0)))
    only(replace(sandwich(), chain=idle), "stage 2 takes no time")


def test_tied_layers_part_where_all_stages_make_the_same_updates():
    tied, together = replace(CHAIN, tied=((0, 3),)), replace(CHAIN, tied=((1, 2),))
    stash = sandwich(policy=Policy("stash", accumulate=8))
    words = "layers 0 (l0) and 2 (l2) share weights", "stages 0 and 1 on different GPUs", "--weights 2bw and flush"
    apart = replace(CHAIN, tied=((0, 2),))
    only(replace(stash, chain=apart), *words)
    assert violations(replace(stash, chain=together)) == []
    assert violations(replace(stash, chain=tied)) == [], "stages 0 and 2 are on one GPU"
    for weights in ("flush", "2bw"):
        assert violations(sandwich(chain=apart, policy=Policy(weights, accumulate=8))) == []


@pytest.mark.parametrize(
    ("weights", "schedule", "words"),
    [
        ("flush", Schedule(), ["weights flush", "endless pattern"]),
        ("flush", Schedule("flush"), ["schedule.microbatches is missing"]),
        ("flush", Schedule("flush", 0), ["schedule.microbatches is 0"]),
        ("flush", Schedule("flush", 7), ["of 7 microbatches", "every 8"]),
        ("stash", Schedule("flush", 8), ["for weights flush", "stash"]),
        ("latest", Schedule("nf1b", 8, 4), ["nf1b", "has no pattern", "has one"]),
        ("flush", Schedule("message-driven", 8, 4), ["message-driven", "has no pattern", "has one"]),
        ("flush", Schedule("flush", 8), None),
        ("latest", Schedule(), None),
    ],
)
def test_schedule_and_weights_policy_agree(weights, schedule, words):
    plan = replace(sandwich(), policy=Policy(weights, accumulate=8), schedule=schedule)
    if words is None:
        assert violations(plan) == []
    else:
        only(plan, *words)


OPERATIONS = {
    "no pattern": (lambda p: replace(p, pattern=None), ["no pattern"]),
    "period 0": (lambda p: replace(p, pattern=replace(p.pattern, period_ns=0)), ["period is 0 ns"]),
    "negative period": (lambda p: replace(p, pattern=replace(p.pattern, period_ns=-14)), ["period is -14 ns"]),
    "operation missing": (
        lambda p: replace(p, pattern=Pattern(14, p.pattern.operations[:-1])),
        ["has 9 operations", "need 10"],
    ),
    "operation twice": (
        lambda p: replace(p, pattern=Pattern(14, (*p.pattern.operations, p.pattern.operations[-1]))),
        ["has 11 operations", "need 10"],
    ),
    "kind": (lambda p: with_op(p, 2, kind="B"), ["operation 2 is B of stage 1", "has F of stage 1"]),
    "stage": (lambda p: with_op(p, 4, stage=1), ["operation 4 is F of stage 1", "has F of stage 2"]),
    "duration": (lambda p: with_op(p, 2, duration_ns=3), ["F of stage 1 lasts 3 ns", "take 4 ns"]),
    "transfer": (lambda p: with_op(p, 1, duration_ns=0), ["SEND_F of stage 0 lasts 0 ns", "take 3 ns"]),
    "before time 0": (lambda p: with_op(p, 0, start_ns=-1), ["F of stage 0 starts at -1 ns"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    change, words = OPERATIONS[name]
    only(change(sandwich()), *words)


def test_the_path_must_be_followed():
    plan = with_op(sandwich(), 2, start_ns=4)
    only(plan, "F of stage 1 starts at 4 ns, before SEND_F of stage 0 ends at 5 ns")
    plan = sandwich()
    starts = starts_of(plan.pattern)
    found = violations(with_starts(plan, [*starts[:9], starts[9] - 14]))  # the same offset, one microbatch too early
    assert any(s == "B of stage 0 starts at 34 ns, before SEND_B of stage 1 ends at 43 ns" for s in found)


def test_operations_of_one_device_or_link_exclude_each_other():
    plan = sandwich()
    starts = starts_of(plan.pattern)
    # device 0: F0 0..2, B2 2..6, B0 6..10, F2 12..14
    only(
        with_starts(plan, [*starts[:9], 53]),
        "B of stage 0 (offset 11 ns, 4 ns long) overlaps F of stage 2 (offset 12 ns) on device 0, "
        "whose period is 14 ns",
    )
    # link: SF0 2..5, SB2 6..9, SF1 9..12, SB1 12..1
    found = violations(with_starts(plan, [*starts[:6], 21, *starts[7:]]))
    assert found == [
        "B of stage 1 starts at 23 ns, before SEND_B of stage 2 ends at 24 ns",
        "SEND_B of stage 2 (offset 7 ns, 3 ns long) overlaps SEND_F of stage 1 (offset 9 ns) on link 0 - 1, "
        "whose period is 14 ns",
    ]


def test_a_replica_sees_every_second_microbatch_only():
    stages = (Stage(0, 4, (0, 1)),)
    plan = plan_by_hand(stages, [0, 8], 12, 200)
    assert violations(plan) == []
    found = violations(with_starts(plan, [0, 8], 11))
    assert found == ["each of devices 0,1 is busy 24 ns in each of its periods of 22 ns"]
    only(with_starts(plan, [0, 28]), "F of stage 0 (offset 0 ns, 8 ns long) overlaps B of stage 0 (offset 4 ns)")


def test_directions_of_a_full_duplex_link_don_t_exclude_each_other():
    stages = (Stage(0, 2, (0,)), Stage(2, 4, (1,)))
    starts = [0, 4, 7, 11, 19, 22]  # SEND_F 4..7 and SEND_B 19..22, at period 15 both at offset 4
    full = plan_by_hand(stages, starts, 15, 200, duplex=True)
    assert not any("link" in s for s in violations(full))
    half = plan_by_hand(stages, starts, 15, 200)
    assert any(
        s.startswith("SEND_F of stage 0 (offset 4 ns, 3 ns long) overlaps SEND_B of stage 1") and "link 0 - 1" in s
        for s in violations(half)
    )


def test_memory_names_what_needs_it():
    plan = sandwich()
    peak = resource_use(graph_of(plan), starts_of(plan.pattern), 14, 0).peak_bytes
    assert violations(with_memory(plan, 0, peak)) == []
    only(
        with_memory(plan, 0, peak - 1),
        "device 0 needs",
        f"({peak} bytes",
        f"({peak - 1} bytes)",
        "stage 0 with 4 in flight, stage 2 with 1 in flight",
    )
    only(with_memory(replicated(), 1, 0), "each of devices 0,1 needs", "stage 0 with 2 in flight", "(0 bytes)")
    assert violations(with_memory(plan, 2, 0)) == []  # unused


def test_2bw_accumulates_what_is_in_flight():
    plan = sandwich()
    assert most_in_flight(graph_of(plan), starts_of(plan.pattern), 14) == 4
    assert violations(with_policy(plan, accumulate=4)) == []
    only(with_policy(plan, accumulate=3), "2bw accumulates 3 microbatches per update, but 4 are in flight")
    only(with_policy(plan, accumulate=None), "2bw accumulates None microbatches")
    assert violations(with_policy(plan, weights="stash", accumulate=1)) == []


def test_all_reduces_must_keep_up():
    heavy = replace(CHAIN, layers=tuple(replace(x, weight_bytes=16) for x in CHAIN.layers))
    plan = plan_by_hand((Stage(0, 4, (0, 1)),), [0, 8], 12, 10**4, Policy("latest", accumulate=1), heavy)
    only(plan, "stage 0 on devices 0,1 needs 32 ns of gradient all-reduce", "period of 12 ns")
    assert violations(with_policy(plan, accumulate=6)) == []
    only(with_policy(plan, accumulate=5), "needs 13 ns")


def test_stages_that_share_devices_share_the_network_of_their_all_reduces():
    heavy = replace(CHAIN, layers=tuple(replace(x, weight_bytes=16) for x in CHAIN.layers))
    policy = Policy("latest", accumulate=1)
    one = plan_by_hand((Stage(0, 4, (0, 1)),), [0, 8], 31, 10**4, policy, heavy)
    only(one, "stage 0 on devices 0,1 needs 32 ns")
    stages = (Stage(0, 2, (0, 1)), Stage(2, 4, (0, 1)))
    two = plan_by_hand(stages, [0, 4, 8, 16], 31, 10**4, policy, heavy)
    only(two, "stages 0, 1 together on devices 0,1 need 32 ns of gradient all-reduce", "period of 31 ns")
    assert violations(replace(two, pattern=replace(two.pattern, period_ns=32))) == []


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (Bound("any", True, "segments", 14), None),
        (Bound("any", True, "segments", 15), ["bound 15 ns for class any is above the period 14 ns"]),
        (Bound("contiguous", True, "segments", 9), ["class contiguous does not hold for this plan"]),
        (Bound("one-special", True, "segments", 9), None),
        (Bound("any", False, "none", 9), None),
    ],
)
def test_bounds_hold_for_the_plan(bound, words):
    plan = replace(sandwich(), lower_bounds=(bound,))
    if words is None:
        assert violations(plan) == []
    else:
        only(plan, *words)


def test_bounds_of_narrower_classes():
    plan = replicated()
    for bound, words in [
        (Bound("contiguous", True, "stages", 12), None),
        (Bound("contiguous", False, "stages", 12), ["without replicas"]),
        (Bound("any", True, "none", 12), ["without checkpointing"]),
    ]:
        marked = replace(plan, lower_bounds=(bound,))
        assert violations(marked) == [] if words is None else only(marked, *words) is None
    part = with_stage(plan, 1, checkpoint=((2, 3),))
    part = replace(part, pattern=None)
    graph = graph_of(part)
    part = replace(part, pattern=make_pattern(graph, [0, 4, 7, 11, 23, 36], 16))
    assert violations(replace(part, lower_bounds=(Bound("any", True, "segments", 12),))) == []
    only(replace(part, lower_bounds=(Bound("any", True, "stages", 12),)), "recompute whole stages")
    special = with_stages(sandwich(), Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,)), Stage(3, 4, (1,)))
    graph = graph_of(special)
    starts = [sum(op.duration_ns for op in graph.operations[:i]) for i in range(len(graph.operations))]
    special = replace(special, pattern=make_pattern(graph, starts, 100))
    only(replace(special, lower_bounds=(Bound("one-special", True, "none", 12),)), "not in that class")


def test_check_raises_with_every_violation():
    check(sandwich())
    plan = with_memory(with_memory(sandwich(), 0, 1), 1, 1)
    with pytest.raises(InvalidPlan) as caught:
        check(plan)
    assert caught.value.violations == violations(plan)
    assert len(caught.value.violations) == 2
    assert str(caught.value) == "; ".join(violations(plan))
    assert caught.value.exit_code == 1


def test_labels():
    assert label(TimedOp("SEND_B", 3, 0, 1)) == "SEND_B of stage 3"


def test_layers_that_share_weights_are_kept_together_where_stages_update_at_different_times():
    layer = Layer("l", 1, 1, 4, 1)
    chain = Chain("tied", (layer,) * 5, 1, tied=((1, 2), (0, 3)))
    for weights in ("2bw", "flush"):
        assert kept_together(chain, Policy(weights)) is None
    for weights in ("stash", "latest"):
        assert kept_together(replace(chain, tied=()), Policy(weights)) is None
        said = kept_together(chain, Policy(weights))
        assert said == (
            f"layers 0 (l) and 3 (l) (and 1 more pair) share weights and must stay on one GPU under --weights {weights}"
        )
