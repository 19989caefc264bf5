"""Replicas that share the optimizer's state (ZeRO-1) train to the bit as those that each have all of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import half as half_cases
from cases.patience import SECONDS
from cases.runtime import chain_of, largest_difference, plan_of, uncorrected, zoo_chain

from pipeplan.check.validate import check
from pipeplan.errors import BadInput
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.processes.own_processes import context_of
from pipeplan.runtime.training.half import HalfOptions
from pipeplan.runtime.training.state.checkpoint import file_of
from pipeplan.runtime.training.update.optimizers import Choice, parse_choice
from pipeplan.runtime.training.weights.buckets import (
    Kept,
    Rows,
    Sharing,
    Slice,
    cut_into_buckets,
    gathered,
    shared_chunks,
)

EXPLODING = ModelSpec("cases.half:exploding", "cases.half:exploding_vectors")


def kept(plan, **policy):
    plan = replace(plan, policy=replace(plan.policy, **policy))
    check(plan)
    return plan


def both(plan, model, folder, **options):
    """Run a plan with replicas that share and with such that don't; return both reports and states."""
    found = []
    for zero in (0, 1):
        report = run_plan(kept(plan, zero=zero), model, uncorrected(save=folder / "s", **options))
        found += [report, torch.load(folder / "s")]
    return found


def gather(rank, store, pipe):
    """Rank 1 has the first two thirds of two weights and of their moments, rank 0 the rest; NCCL takes no part."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group, sizes = object(), []
    shapes = [torch.Size((3, 5)), torch.Size((6,))]

    def rows_of(rank):
        cut = [shape.numel() * 2 // 3 for shape in shapes]
        spans = [Slice(i, 0, cut[i]) if rank else Slice(i, cut[i], shapes[i].numel()) for i in range(2)]
        return Rows([mock.Mock(own=[mock.Mock(slices=spans)])])

    wholes = [torch.arange(float(shape.numel())).view(shape) for shape in shapes]
    kept = [
        Kept(rows_of(rank).taken(i, x), {"moment": rows_of(rank).taken(i, -x), "step": torch.tensor(3.0)})
        for i, x in enumerate(wholes)
    ]
    send = dist.send
    with (
        mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1]),
        mock.patch.object(dist, "send", lambda x, *to, **by: (sizes.append((x.dtype, x.numel())), send(x, *to, **by))),
    ):
        found = gathered(kept, shapes, [rows_of(0), rows_of(1)], Sharing(rank, 2, None, group))
    good = (
        found is None
        if rank
        else all(
            torch.equal(x.master, whole) and torch.equal(x.state["moment"], -whole) and float(x.state["step"]) == 3.0
            for x, whole in zip(found, wholes, strict=True)
        )
    )
    pipe.send((good, [size for dtype, size in sizes if dtype.is_floating_point]))  # and words of what there is
    dist.barrier()
    dist.destroy_process_group()


def test_what_is_shared_is_gathered_between_hosts_tensor_by_tensor(tmp_path):
    """GPUs that are full have no room for a replica's state, let alone for all of them."""
    context = context_of()
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=gather, args=(rank, tmp_path / "store", theirs)))
        processes[-1].start()
        pipes.append(ours)
    try:
        found = [pipe.recv() for pipe in pipes if pipe.poll(SECONDS)]
    finally:
        for process in processes:
            process.kill()
    assert found == [(True, []), (True, [10, 10, 4, 4])]


# --- who has what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_element_is_one_replicas_and_all_have_as_many(ranks):
    weights = [torch.arange(n) for n in (7, 1, 40, 3, 3)]
    for size, coarsening, apart in ((None, None, 0), (6, 1, 0), (6, 2, 2), (100, None, 1)):
        buckets = cut_into_buckets(weights, size, apart)
        last = sum(bucket.slices[0].index >= len(weights) - apart for bucket in buckets)
        whole = [torch.full_like(weight, -1) for weight in weights]
        counts = []
        for rank in range(ranks):
            chunks = shared_chunks(buckets, last, Sharing(rank, ranks, coarsening), size)
            rows = Rows(chunks)
            counts.append(sum(rows.sizes.values()))
            for index, weight in enumerate(weights):
                row = rows.taken(index, weight)
                assert bool((whole[index][row] == -1).all())  # the values are the places
                rows.put(index, row, whole[index])
            assert all(bucket.size <= (size or 100) for chunk in chunks for bucket in chunk.own)
            assert sum(span.size for chunk in chunks if not chunk.summed for span in chunk.slices) == 3 * apart
        assert all(torch.equal(one, other) for one, other in zip(whole, weights, strict=True))
        assert max(counts) == -(-54 // ranks)
        assert sum(counts) == 54


# --- to the bit -------------------------------------------------------------------------------------------------------

PLAIN = ModelSpec("cases.half:exploding", "cases.runtime:vectors")
SCHEDULER = parse_choice("StepLR,step_size=2,gamma=0.5", "here")
LAYOUTS = {
    "2bw, three replicas": ({"stages": [(0, 3, (0, 1, 2)), (3, 6, (3,))], "weights": "2bw"}, "adam"),
    "stash": ({"stages": [(0, 6, (0, 1))], "weights": "stash", "accumulate": 2}, "momentum"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharing_changes_no_bit_and_takes_what_is_planned(layout, tmp_path):
    settings, optimizer = LAYOUTS[layout]
    plan = plan_of(chain_of(half_cases.exploding, 4), **settings, optimizer=optimizer)
    plain, state, shared, same = both(plan, PLAIN, tmp_path, steps=4, lr=0.05, scheduler=SCHEDULER)
    assert shared.losses == plain.losses
    assert largest_difference(state, same) == 0
    replicas = plan.allocation.stages[0].replicas
    count = int(plan.chain.sums.parameters[plan.allocation.stages[0].stop])
    copies = {"adam": 2, "momentum": 1}[optimizer]
    sizes = [count // replicas + (rank < count % replicas) for rank in range(replicas)]
    for before, after, own in zip(plain.states, shared.states, sizes, strict=False):
        assert before.measured_bytes == before.planned_bytes or layout == "stash"  # one stage needs no second version
        assert before.measured_bytes - after.measured_bytes == 4 * copies * (count - own)
        assert after.planned_bytes == before.planned_bytes - 4 * copies * (count - max(sizes))
    assert plain.states[replicas:] == shared.states[replicas:]


@pytest.mark.parametrize("offload", [False, True])
def test_mixed_precision_gathers_16_bit_weights_and_shares_those_of_32(offload, tmp_path):
    """An overflow skips updates, and chunks are under way while others are stepped; on the host is a share as well."""
    chain = chain_of(half_cases.exploding, 4, dtype=torch.bfloat16)
    plan = plan_of(chain, [(0, 6, (0, 1))], weights="flush", accumulate=4, optimizer="adam")
    policy = {"precision": "mixed", "offload": offload, "bucket_parameters": 100, "coarsening": 3 if offload else None}
    options = {"coarsening": 0} if not offload else {}
    half = HalfOptions(loss_scale=2.0**8, window=3)
    plain, state, shared, same = both(kept(plan, **policy), EXPLODING, tmp_path, steps=5, lr=0.02, half=half, **options)
    assert shared.skipped == plain.skipped == (2, 4)
    assert shared.losses == plain.losses
    assert largest_difference(state, same) == 0
    for state in shared.states:  # with chunks, what is under way is counted as well
        assert state.measured_bytes == state.planned_bytes or offload
    assert shared.states[0].planned_host_bytes == shared.states[0].measured_host_bytes == (12 * 544 if offload else 0)
    assert shared.states[0].planned_bytes == (4 * 1088 + 16 * (100 if offload else 544))


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_weights_tied_to_another_stage_are_shared_too(weights, tmp_path):
    """Their gradients are summed over all who have them; the new weights come from the stage's own replicas."""
    stages = [(0, 4, (0,)), (4, 8, (1, 2))] if weights == "2bw" else [(0, 4, (0, 1)), (4, 8, (2,))]
    plan = plan_of(zoo_chain("gpt-tiny,tied=true", 2), stages, weights=weights, accumulate=4, optimizer="adam")
    plain, state, shared, same = both(plan, ModelSpec("gpt-tiny,tied=true"), tmp_path, steps=3, lr=0.01)
    assert shared.losses == plain.losses
    assert largest_difference(state, same) == 0
    if weights == "2bw":  # the later stage steps them later
        return
    before, after = plain.states[0], shared.states[0]
    under_way = 4 * 154_048  # the first chunk's new weights, while those of the second, the tied ones, are made
    assert after.measured_bytes - under_way == after.planned_bytes == before.planned_bytes - 2 * 4 * 162_240 // 2


@pytest.mark.parametrize("zero", [2, 3])
def test_what_replicas_exchange_in_passes_is_not_run(zero):
    chain = chain_of(half_cases.exploding, 4)
    plan = plan_of(chain, [(0, 6, (0, 1))], weights="flush", accumulate=2)
    plan = replace(plan, policy=replace(plan.policy, zero=zero))
    with pytest.raises(BadInput, match=rf"--zero {zero}: run shares the optimizer's state alone \(--zero 1\)"):
        run_plan(plan, EXPLODING, uncorrected(steps=1, lr=0.1))
    plan = replace(plan, chain=replace(plan.chain, selective=True), policy=replace(plan.policy, zero=0))
    with pytest.raises(
        BadInput,
        match="the plan recomputes attention's core, which run does of a zoo's GPT with attention=unfused or hf: with ",
    ):
        run_plan(plan, EXPLODING, uncorrected(steps=1, lr=0.1))


def test_optimizers_that_look_at_whole_weights_are_refused():
    plan = kept(plan_of(chain_of(half_cases.exploding, 4), [(0, 6, (0, 1))], accumulate=2), zero=1)
    with pytest.raises(BadInput, match=r"Adafactor isn't known to step each .*, as sharing its state between replicas"):
        run_plan(plan, PLAIN, uncorrected(steps=1, lr=0.1, optimizer=Choice("Adafactor")))


def test_a_checkpoint_goes_on_with_any_number_of_replicas(tmp_path):
    """Two that share write it; one, four that share, and two that don't go on as they did."""
    chain = chain_of(half_cases.exploding, 4)
    options = {"lr": 0.05, "scheduler": SCHEDULER, "checkpoint": tmp_path / "c"}

    def plan(replicas, zero):
        settings = {"weights": "flush", "accumulate": 4, "optimizer": "adam"}
        return kept(plan_of(chain, [(0, 6, tuple(range(replicas)))], **settings), zero=zero)

    run_plan(plan(2, 1), PLAIN, uncorrected(steps=2, **options))
    again = {**options, "steps": 4, "resume": True, "checkpoint": None}
    found = {}
    for replicas, zero in ((2, 0), (2, 1), (1, 0), (4, 1)):
        shutil.copytree(tmp_path / "c", tmp_path / f"{replicas}{zero}")
        again["checkpoint"] = tmp_path / f"{replicas}{zero}"
        found[replicas, zero] = (
            run_plan(plan(replicas, zero), PLAIN, uncorrected(save=tmp_path / "s", **again)),
            (torch.load(tmp_path / "s")),
        )
    first, whole = found[2, 0]
    assert found[2, 1][0].losses == first.losses
    assert largest_difference(found[2, 1][1], whole) == 0
    for folder in (tmp_path / f"{replicas}{zero}" / "step-00000004" for replicas, zero in found):
        written = [torch.load(folder / file_of(rank))["optimizer"] for rank in range(int(folder.parent.name[0]))]
        assert {float(state["step"]) for own in written for state in own.values()} == {4.0}, "also of others' elements"
    for other in ((1, 0), (4, 1)):  # gradients are added in another order
        assert found[other][0].losses == pytest.approx(first.losses, abs=1e-6)
        assert largest_difference(found[other][1], whole) < 1e-6
