"""Arguments that others run, read back: what is exported comes back as it was, defaults are theirs, slips are said."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import Command

from pipeplan.check.targets import TARGETS, Shape, refusals
from pipeplan.errors import BadInput
from pipeplan.files.frameworks import READERS, WRITERS, Asked, Source, parsed_renames, placed, read_options
from pipeplan.files.profiles import profile_text
from pipeplan.plan import Allocation, Plan, Provenance, Schedule
from pipeplan.planner.simulated.other_schedules import own_schedule
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Chain, Layer, Platform, Policy

BLOCKS = 12
RENAME = parsed_renames([r"block(\d+)=layers.\1,embedding=tok_embeddings,head=lm_head,(.*)=\1"])


def decoder(mtp: int = 0, parts: int = 1) -> Chain:
    """A decoder of twelve blocks, each of so many layers."""
    blocks = [f"block{i}" + (f".{j}" if parts > 1 else "") for i in range(BLOCKS) for j in range(parts)]
    names = ["embedding", *blocks, *(f"mtp.{i}" for i in range(mtp)), "norm", "head", "loss"]
    return Chain(
        "decoder",
        tuple(Layer(name, 3, 6, 0 if name == "loss" else 4, 1, saved_bytes=2) for name in names),
        1,
        microbatch=2,
    )


def source(tmp_path, text: str, chain: Chain | None = None, gpus: int = 4) -> Source:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return Source(read_options(str(path)), chain or decoder(), gpus, RENAME)


def random_plan(name: str, rng: random.Random, chain: Chain) -> Plan | None:
    """A plan of the target's class, None where the numbers that were drawn make none."""
    target, ranks, pipelines = TARGETS[name], rng.randint(1, 4), rng.randint(1, 2)
    chunks = rng.randint(1, 3) if ranks > 1 else 1
    shape, units = Shape(ranks, pipelines, chunks), target.units(chain)
    kind = "interleaved" if chunks > 1 else "1f1b"
    count = pipelines * (ranks * rng.randint(1, 3) if ranks > 1 or name == "megatron" else 1)
    if refusals(target, kind, shape, count):
        return None
    ends = [0, *sorted(rng.sample(range(1, len(units)), ranks * chunks - 1)), len(units)]
    counts = [b - a for a, b in pairwise(ends)]
    way = rng.choice(list(target.ways(max(counts), range(1, max(counts) + 1))))
    given = Source(read_options("/dev/null"), chain, ranks * pipelines)
    stages = placed(given, name, units, counts, kind, shape, count, way)
    platform, policy = Platform.flat(ranks * pipelines, 10**9, 10**9), Policy("flush", accumulate=count)
    return Plan(chain, platform, policy, Allocation(stages), None, (), Provenance("test"), Schedule(kind, count))


@pytest.mark.parametrize("name", list(READERS))
def test_what_is_exported_is_read_as_it_was(name, tmp_path):
    rng, kinds = random.Random(7), set()
    for draw in range(60):
        plan = random_plan(name, rng, decoder(parts=1 + draw % 2))
        if plan is None:
            continue
        run = simulate_plan(plan, None, own_schedule(plan)).timeline
        asked = Asked(plan, plan.allocation.stages, run, RENAME if name == "torchtitan" else ())
        text = WRITERS[name].write(asked)
        found = READERS[name](source(tmp_path, text, plan.chain, len(plan.platform)))
        assert found.stages == plan.allocation.stages
        assert (found.kind, found.microbatches) == (plan.schedule.kind, plan.schedule.microbatches)
        kinds.add((found.kind, len(found.stages[0].devices), bool(found.stages[0].checkpoint)))
    assert len(kinds) >= 6


def test_a_training_script_is_read_with_its_variables_and_arrays(tmp_path):
    found = READERS["megatron"](source(tmp_path, r"""
#!/bin/bash
PP=2   # ranks
GPUS_PER_NODE=4
MODEL_ARGS=(
    --num-layers 12 --hidden-size 64
    --bf16
)
export BATCH="--micro-batch-size 2 --global-batch-size=32"
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py ${MODEL_ARGS[@]} $BATCH \
    --pipeline-model-parallel-size ${PP} --use-distributed-optimizer \
    --recompute-granularity full --recompute-method block --recompute-num-layers 2
"""))  # fmt: skip
    assert [(x.start, x.stop, x.devices, x.checkpoint) for x in found.stages] == [
        (0, 7, (0, 1), ((1, 2), (2, 3))),
        (7, 16, (2, 3), ((7, 8), (8, 9))),
    ]
    assert (found.kind, found.microbatches, found.precision, found.zero, found.optimizer) == (
        "1f1b", 16, "mixed", 1, "adam",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("--num-layers 12 --pipeline-model-parallel-size 4", [4, 3, 3, 6]),
        ("--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", [4, 3, 3, 6]),
        ("--num-layers 12 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", [4, 3, 3, 6]),
        (
            "--num-layers 12 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
            "--decoder-last-pipeline-num-layers 4",
            [3, 3, 3, 7],
        ),
        (
            "--num-layers 12 --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            [7, 9],
        ),
        ('--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et,(tt|)*3,t*4|t|L"', [4, 2, 2, 4, 1, 3]),
    ],
)
def test_megatrons_own_ways_to_share_layers(text, layers, tmp_path):
    each = "--micro-batch-size 2 --global-batch-size 32 "
    stages = READERS["megatron"](source(tmp_path, each + text)).stages
    assert [stage.stop - stage.start for stage in stages] == layers


def test_torchtitans_own_ways_to_share_layers(tmp_path):
    """Embedding and output count as a block each; the split of 12 over 2 x 2 is 3, 4, 3, 2 or as the weights say."""
    pair = "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 4 "
    looped = pair + "--parallelism.pipeline-parallel-schedule interleaved1f1b "
    for text, layers in (
        (pair, [7, 9]),
        (pair + "--parallelism.pipeline_parallel_last_stage_less_layers=3", [8, 8]),
        (looped, [4, 4, 3, 5]),
        (looped + "--parallelism.pipeline_parallel_layers_per_stage 4", [4, 4, 3, 5]),
    ):
        found = READERS["torchtitan"](source(tmp_path, text + " activation_checkpoint:full"))
        assert [stage.stop - stage.start for stage in found.stages] == layers
        assert found.zero == 1  # what is left of the GPUs is sharded
        assert found.microbatches == 8
        assert found.stages[0].checkpoint[0] == (1, 2)


TOML = """
[training]
local_batch_size = 8
global_batch_size = 64
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "full"
"""


def test_torchtitan_s_toml_is_read(tmp_path):
    found = READERS["torchtitan"](source(tmp_path, TOML))
    assert [stage.stop - stage.start for stage in found.stages] == [7, 9]
    assert (found.kind, found.microbatches, found.stages[0].checkpoint[0]) == ("1f1b", 8, (1, 2))
    assert "an update is 4 batches of 16 samples there; one is judged" in found.notes
    points = 'pipeline_parallel_degree = 2\npipeline_parallel_split_points = ["layers.3"]'
    split = READERS["torchtitan"](source(tmp_path, TOML.replace("pipeline_parallel_degree = 2", points)))
    assert [stage.stop - stage.start for stage in split.stages] == [4, 12]
    alone = TOML.replace("degree = 2", "degree = 1").replace("local_batch_size = 8", "local_batch_size = 2")
    assert READERS["torchtitan"](source(tmp_path, alone)).microbatches == 32


LAYOUT = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "


def test_recomputation_inside_of_layers_is_judged_as_none_and_said(tmp_path):
    said = {
        "megatron": "--num-layers 12 --recompute-granularity selective",
        "torchtitan": TOML.replace("full", "selective"),
    }
    for name, text in said.items():
        found = READERS[name](source(tmp_path, text))
        assert not any(x.checkpoint for x in found.stages)
        assert any("selective recomputation is inside of layers" in x for x in found.notes)


MEGATRON_SLIPS = [
    (LAYOUT + "'Et*6|t*5L'", "--pipeline-model-parallel-layout has decoder layers 11 times, the profile 12"),
    (LAYOUT + "'Et*6|t*6|L'", "has 3 stages, no multiple of 2 ranks"),
    (LAYOUT + "'Et*6||t*6|L'", "stage 1 holds nothing; plans have a layer in every stage"),
    (LAYOUT + "'Et*6|x*6L'", "'x*6L' begins with none of E, t, m, L, | and (..)*n"),
    (LAYOUT + "'E(t|t*6L'", "'(t|t*6L' begins with none of"),
    (LAYOUT + "'Et*999999|L'", "has more than 100000 letters"),
    (LAYOUT + "'tE|t*11L'", "must begin with E, then have all t"),
    (LAYOUT + "'Et*6|t*6m*1L'", "has layers of multi-token prediction 1 times, the profile 0"),
    (LAYOUT + "'Et*6|t*6L' --num-layers 24", "--num-layers is 24; the profile has 12 decoder layers"),
    (LAYOUT + "'E|t*6|t*6|L' --global-batch-size 4", "must be a multiple of its 2 ranks"),
    (LAYOUT + "$LAYOUT", "is $LAYOUT, which the file doesn't set"),
    (LAYOUT, "--pipeline-model-parallel-layout has no value"),
    ("--pipeline-model-parallel-size 3", "4 GPUs aren't a multiple of --pipeline-model-parallel-size 3"),
    ("--pipeline-model-parallel-size 2", "--num-layers is missing"),
    ("--num-layers 1000000000", "--num-layers is 1000000000; the profile has 12 decoder layers"),
    ("--num-layers 12 --mtp-num-layers 1000000000", "--mtp-num-layers is 1000000000; the profile has 0"),
    (
        "--num-layers 12 --num-virtual-stages-per-pipeline-rank 1000000000 --pipeline-model-parallel-size 2 "
        "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6",
        "6 layers of a rank cannot be shared evenly by 1000000000 stages",
    ),
    ("--num-layers 12\nA=xx\n" + "A=$A$A\n" * 40, "its variables stand for more than 100,000 letters"),
    ("--num-layers 12 " + "x" * 10**6, "is longer than 0.1 MB, the most that is read"),
    ("--num-layers x", "--num-layers: 'x' isn't a count of at least 1"),
    ("--num-layers 12 --tensor-model-parallel-size 2", "--tensor-model-parallel-size is 2, the profile's degree 1"),
    ("--num-layers 12 --context-parallel-size 2", "--context-parallel-size is 2, the profile's degree 1"),
    ("--num-layers 12 --micro-batch-size 1", "is 1, the profile is of 2 samples; profile with --microbatch 1"),
    ("--num-layers 12 --global-batch-size 9", "9 isn't a multiple of microbatches of 2 in each of 4"),
    ("--num-layers 12 --recompute-granularity full", "here it is 'full', 'None'"),
    ("echo hello", "isn't Megatron-LM's arguments, with or without --pipeline-model-parallel-layout: it has no option"),
]
PARTS = "--parallelism.module_fqns_per_model_part "
TORCHTITAN_SLIPS = [
    (PARTS + "tok_embeddings", "no part has 'layers.0', which torchtitan drops without a word"),
    (PARTS + "tok,norm", "part 0 names 'tok', which the profile"),
    (PARTS + "layers.1,tok_embeddings", "part 0 has 'layers.1' out of order"),
    ("--parallelism.pipeline_parallel_degree 4", "1f1b needs as many microbatches"),
    ("--parallelism.pipeline_parallel_degree 3", "3 ranks x 1 replicas x 1 shards are 3 GPUs, not 4"),
    (
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule GPipe",
        "schedule 'GPipe' isn't one of 1F1B and Interleaved1F1B",
    ),
    ('hello = "world"', "it has no option such as --parallelism.."),
    ('[training]\nsteps = "many"', "it has no option such as --parallelism.."),
    (TOML.replace("microbatch_size = 2", "microbatch_size = 4"), "in microbatches of 4, the profile is of 2 samples"),
    (TOML.replace("global_batch_size = 64", "global_batch_size = 65"), "isn't a multiple of 8 x 2"),
    (TOML.replace('mode = "full"', 'mode = "op"'), "activation_checkpoint:op isn't one of none, full, selective"),
    ("--parallelism.pipeline_parallel_split_points layers.99", "names 'layers.99', which the profile hasn't"),
]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [("megatron", *slip) for slip in MEGATRON_SLIPS] + [("torchtitan", *slip) for slip in TORCHTITAN_SLIPS],
)
def test_slips_are_said_in_a_sentence(name, text, sentence, tmp_path):
    with pytest.raises(BadInput, match=f"run.sh: .*{re.escape(sentence)}"):
        READERS[name](source(tmp_path, text))


def test_what_is_no_shell_text_is_said(tmp_path):
    with pytest.raises(BadInput, match=r"run\.sh: isn't shell text: no closing quotation"):
        source(tmp_path, "--name 'x")


def test_the_plan_that_is_run_is_judged_beside_the_best(tmp_path, pipeplan: Command) -> None:
    head = Layer("head", 27000, 6000, 40, 100, saved_bytes=200)
    layers = [replace(head, name=x.name, forward_ns=27000 if x.name == "head" else 3000) for x in decoder().layers]
    layers[-1] = replace(layers[-1], weight_bytes=0)
    profile = str(tmp_path / "profile.json")
    Path(profile).write_text(profile_text(Chain("decoder", tuple(layers), 100, microbatch=2)))
    script = tmp_path / "run.sh"
    script.write_text("--num-layers 12 --pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 16")
    today, best = tmp_path / "today.json", tmp_path / "best.json"
    common = ("import", profile, str(script), "--from", "megatron", "--gpus", "4", "--mem", "1MB")
    code, out, err = pipeplan(*common, "-o", str(today), "--best", str(best))
    assert (code, err) == (0, "")
    assert "class megatron, this interval" in out
    shorter = re.search(r"change +(\d+\.\d)% shorter: .* with what pipeplan finds for Megatron-LM", out)
    assert shorter is not None
    assert float(shorter[1]) > 5
    assert re.search(r"today +4 x 1 +1f1b +nothing +4, 3 x 2, 4", out)
    assert pipeplan("check", str(today))[0] == pipeplan("check", str(best))[0] == 0
    code, out, _ = pipeplan(*common, "--json", "--effort", "quick")
    figures = json.loads(out)
    assert figures["today"]["units"] == [4, 3, 3, 4]
    assert figures["best"]["period_ns"] < figures["today"]["period_ns"]
    small = [*common[:-1], "0.004MB"]
    code, _, err = pipeplan(*small)
    assert code == 1
    assert "run.sh: device" in err
    script.write_text("--num-layers 12 --micro-batch-size 2 --global-batch-size 16")
    _, _, err = pipeplan(*small)
    assert [line.partition(" needs ")[0] for line in err.splitlines()] == [f"error: {script}: each of devices 0-3"]


@pytest.mark.parametrize(
    ("name", "text", "zero"),
    [
        ("megatron", "--use-megatron-fsdp", 3),
        ("megatron", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("megatron", "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", None),
        ("megatron", "--data-parallel-sharding-strategy optim_grads --use-distributed-optimizer", 1),
        ("torchtitan", "", 3),
        ("torchtitan", "--parallelism.fsdp_reshard_after_forward never", 2),
        ("torchtitan", "--parallelism.data_parallel_replicate_degree 4", None),
        ("torchtitan", "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 4", 1),
    ],
)
def test_what_replicas_share_is_read(name, text, zero, tmp_path):
    start = {
        "megatron": "--num-layers 12 --micro-batch-size 2 --global-batch-size 32 ",
        "torchtitan": "--parallelism.data_parallel_shard_degree -1 ",
    }[name]
    assert READERS[name](source(tmp_path, start + text)).zero == zero


def test_what_nobody_shares_so_is_refused(tmp_path):
    both = "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 4 "
    with pytest.raises(BadInput, match=r"replicas share no weights beside pipelines there \(--zero 3\)"):
        READERS["torchtitan"](source(tmp_path, both + "--parallelism.fsdp_reshard_after_forward always"))
    with pytest.raises(BadInput, match="fsdp_reshard_after_forward sometimes isn't default, always or never"):
        READERS["torchtitan"](source(tmp_path, both + "--parallelism.fsdp_reshard_after_forward sometimes"))
    with pytest.raises(BadInput, match="--data-parallel-sharding-strategy some isn't known"):
        READERS["megatron"](source(tmp_path, "--num-layers 12 --data-parallel-sharding-strategy some"))
