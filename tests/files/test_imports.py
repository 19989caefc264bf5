"""Arguments that others run, read back: what is exported comes back as it was, defaults are theirs, slips are said."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from cases.kept import check_kept
from conftest import Command

from pipeplan.check.targets import TARGETS, Shape, refusals
from pipeplan.errors import BadInput
from pipeplan.files.frameworks import READERS, WRITERS, Asked, Source, parsed_renames, placed, read_options
from pipeplan.files.profiles import profile_text
from pipeplan.plan import Allocation, Plan, Provenance, Schedule
from pipeplan.planner.simulated.other_schedules import own_schedule
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Chain, Layer, Platform, Policy

KEPT = Path(__file__).with_name("imported.txt")
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


SCRIPT = r"""
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
    --recompute-granularity full --recompute-method block --recompute-num-layers 2  # or --num-layers 24
"""
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
ALONE = TOML.replace("degree = 2", "degree = 1").replace("local_batch_size = 8", "local_batch_size = 2")
POINTS = 'pipeline_parallel_degree = 2\npipeline_parallel_split_points = ["layers.3"]'
HIGH = "--num-layers 12 --micro-batch-size 2 --global-batch-size 32 "
TWO, FOUR = HIGH + "--pipeline-model-parallel-size 2 ", HIGH + "--pipeline-model-parallel-size 4 "
EACH = "--num-layers-per-virtual-pipeline-stage"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
LAYOUT = TWO + "--pipeline-model-parallel-layout "
FSDP, STRATEGY = "--use-megatron-fsdp ", "--data-parallel-sharding-strategy "
FULL = "--recompute-granularity full --recompute-method "
P = "--parallelism."
PAIR = f"{P}pipeline_parallel_degree 2 {P}num_pp_microbatches 4 "
LOOPED = PAIR + f"{P}pipeline-parallel-schedule interleaved1f1b "
SHARDS, RESHARD = f"{P}data_parallel_shard_degree -1 ", f"{P}fsdp_reshard_after_forward "
LESS = f"{P}pipeline_parallel_first_stage_less_layers"
PARTS, AT = f"{P}module_fqns_per_model_part ", f"{P}pipeline_parallel_split_points "
TOKENS = "--training.num_tokens_per_train_step"
HALVES = "tok_embeddings," + ",".join(f"layers.{i}" for i in range(6)), ",".join(f"layers.{i}" for i in range(6, 12))
READ: dict[str, list[str]] = {
    "megatron": [
        SCRIPT, FOUR, TWO + "--microbatch-group-size-per-virtual-pipeline-stage 4",
        TWO + EACH + " 3", TWO + VIRTUAL + " 2", f"{FOUR}{FIRST} 2 {LAST} 4", f"{FOUR}{FIRST} 3",
        f"{FOUR}{LAST} 6", f"{FOUR}{FIRST} 1 {LAST} 1", f"{TWO}{FIRST} 5 {LAST} 7", f"{HIGH}{FIRST} 12",
        TWO + "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        FOUR + "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        f"{FOUR}{FIRST} 4 --account-for-embedding-in-pipeline-split",
        f"{FOUR}{LAST} 4 --account-for-loss-in-pipeline-split",
        LAYOUT + '"Et,(tt|)*3,t*4|t|L"', LAYOUT + "'Et*12|L'", LAYOUT + "'E|t*12L' --untie_embeddings",
        HIGH + "--recompute-granularity selective", HIGH + "--recompute-activations --fp16", TWO + FULL + "uniform",
        TWO + FULL + "uniform --recompute-num-layers 3", TWO + "--optimizer sgd", TWO + "--optimizer lion",
        HIGH + FSDP, f"{HIGH}{FSDP}{STRATEGY}optim_grads", f"{HIGH}{FSDP}{STRATEGY}no_shard",
        f"{HIGH}{STRATEGY}optim_grads --use-distributed-optimizer", f"{HIGH}{FSDP}{STRATEGY}optim",
        HIGH + STRATEGY + "some", HIGH + "--cp-comm-type a2a", HIGH + "--cp-comm-type p2p+a2a",
        LAYOUT + "'Et*6|t*5L'", LAYOUT + "'Et*6|t*6|L'", LAYOUT + "'Et*6||t*6|L'", LAYOUT + "'Et*6|x*6L'",
        LAYOUT + "'E(t|t*6L'", LAYOUT + "'Et*999999|L'", LAYOUT + "'E(t*99)*9999L'", LAYOUT + "'Et*6|t*999999'",
        LAYOUT + "'tE|t*11L'",
        LAYOUT + "'Et*6|t*6m*1L'", LAYOUT + "'Et*6|t*6'", LAYOUT + "'Et*6|t*6L' --num-layers 24",
        LAYOUT + "'E|t*6|t*6|L' --global-batch-size 4", LAYOUT + "$LAYOUT", LAYOUT, f"{LAYOUT}'Et*6|t*6L' {EACH} 3",
        f"{LAYOUT}'E|t*6|t*6|L' --microbatch-group-size-per-virtual-pipeline-stage 4", f"{TWO}{VIRTUAL} 4",
        f"{TWO}{VIRTUAL} 2 {EACH} 3", f"{TWO}{EACH} 4", f"{FOUR}{FIRST} 5", f"{FOUR}{FIRST} 13",
        "--pipeline-model-parallel-size 3", "--pipeline-model-parallel-size 2", "--num-layers 1000000000",
        "--num-layers 12 --mtp-num-layers 1000000000", f"{TWO}{VIRTUAL} 1000000000 {FIRST} 6 {LAST} 6",
        "--num-layers 12\nA=xx\n" + "A=$A$A\n" * 40, "--num-layers 12 " + "x" * 10**6, "--num-layers x",
        "--num-layers 0", "--num-layers 12 --tensor-model-parallel-size 2", HIGH + "--expert-model-parallel-size 2",
        "--num-layers 12 --context-parallel-size 2", "--num-layers 12 --micro-batch-size 1",
        "--num-layers 12 --global-batch-size 9", "--num-layers 12 --recompute-granularity full", FULL + "block",
        "echo hello", "--name 'x",
    ],
    "torchtitan": [
        PAIR + "activation_checkpoint:full", PAIR + "activation_checkpoint:none activation_checkpoint:full",
        f"{PAIR}{P}pipeline_parallel_last_stage_less_layers=3", LOOPED,
        f"{LOOPED}{P}pipeline_parallel_layers_per_stage 4", f"{LOOPED}{P}pipeline_parallel_layers_per_stage 7",
        LOOPED.replace("interleaved1f1b", "ZBVZeroBubble"), f"{PAIR}{LESS} 0", f"{PAIR}{LESS} 8",
        f"{PAIR}{P}pipeline_parallel_layers_per_stage 1", TOML, TOML.replace("pipeline_parallel_degree = 2", POINTS),
        ALONE, ALONE.replace("64", "-1"), "seed = 1\n" + TOML, f"{P}data_parallel_shard_degree 1",
        TOML.replace("64", "16"), *(x.replace("pipeline_parallel_microbatch_size = 2", "") for x in (ALONE, TOML)),
        ALONE.replace("64", "-2"), f"{PAIR}{PARTS}{HALVES[0]} {HALVES[1]},norm,lm_head {AT}layers.3",
        TOML.replace("full", "selective"), TOML.replace("full", "none"), SHARDS, SHARDS + RESHARD + "never",
        f"{P}data_parallel_replicate_degree 4", PAIR + RESHARD + "always", PAIR + RESHARD + "sometimes",
        f"{SHARDS}{TOKENS} 131072", f"{SHARDS}{TOKENS} 131073", f"{SHARDS}{TOKENS} 69632", f"{SHARDS}{TOKENS} 0",
        f"{SHARDS}{TOKENS} 4096 --training.num_tokens_per_microbatch_per_dp_rank 256",
        f"{PAIR}{PARTS}{HALVES[0]} {HALVES[1]},norm,lm_head", f"{PAIR}{PARTS}{HALVES[0]} {HALVES[1]},norm",
        f"{PAIR}{PARTS}{HALVES[0]},layers.6 {HALVES[1]},norm,lm_head", PARTS + "tok_embeddings", PARTS + "tok,norm",
        PARTS + "layers.1,tok_embeddings", f"{P}pipeline_parallel_degree 4", f"{P}pipeline_parallel_degree 16",
        f"{SHARDS}{P}pipeline_parallel_schedule GPipe", f"{P}pipeline_parallel_degree 3",
        f"{P}pipeline_parallel_degree 2 {P}pipeline_parallel_schedule GPipe", f"{LOOPED}{AT}layers.3",
        LOOPED.replace("interleaved1f1b", "zbvzerobubble") + AT + "layers.3,layers.4,layers.5,layers.6,layers.7",
        f"{PAIR}{AT}layers.3 layers.2", f"{LOOPED}{AT}layers.3 layers.5,norm", AT + "layers.99", 'hello = "world"',
        '[training]\nsteps = "many"', TOML.replace("microbatch_size = 2", "microbatch_size = 4"),
        TOML.replace("global_batch_size = 64", "global_batch_size = -1"),
        TOML.replace("global_batch_size = 64", "global_batch_size = 65"), ALONE.replace("64", "65"),
        TOML.replace("local_batch_size = 8", "local_batch_size = 7"), TOML.replace('mode = "full"', 'mode = "op"'),
    ],
}  # fmt: skip
OTHERWISE = [  # of other chains, on other GPUs
    ("megatron", FOUR.replace("12", "13"), decoder(), 4),
    ("megatron", TWO + "--mtp-num-layers 2", decoder(2), 4),
    ("megatron", LAYOUT + "'Et*8|t*4mmL'", decoder(2), 2),
    ("megatron", LAYOUT + "'Et*4|t*4|t*4mm|L'", decoder(2), 2),
    ("megatron", LAYOUT + "'Et*8m|t*4mL'", decoder(2), 2),
    ("megatron", LAYOUT + "'E|t*8|t*4m|mL'", decoder(2), 2),
    ("megatron", TWO + "--context-parallel-size 2 --cp-comm-type a2a", replace(decoder(), context=2), 8),
    ("megatron", HIGH + "--recompute-granularity selective", replace(decoder(), selective=True), 1),
    ("torchtitan", f"{PAIR}{P}context_parallel_degree 2 {SHARDS}", replace(decoder(), context=2), 4),
    ("torchtitan", TOML.replace("ism]", "ism]\ncontext_parallel_degree = 2"), replace(decoder(), context=2), 4),
    (
        "torchtitan",
        TOML.replace("ism]", "ism]\nexpert_parallel_degree = 2"),
        replace(decoder(), experts=2, microbatch=4),
        4,
    ),
    ("torchtitan", f"{PAIR}{P}data_parallel_shard_degree 0", decoder(), 4),
    ("torchtitan", f"{P}pipeline_parallel_degree 16", decoder(), 16),
    ("torchtitan", f"{PAIR}{LESS} 12", decoder(), 2),
    ("torchtitan", f"{PAIR}{LESS} 20", decoder(), 2),
    ("torchtitan", f"{P}pipeline_parallel_degree 1", replace(decoder(), layers=decoder().layers[:1]), 1),
    ("torchtitan", LOOPED.replace("interleaved1f1b", "ZBVZeroBubble"), decoder(), 2),
    ("torchtitan", PAIR, replace(decoder(), layers=tuple(replace(x, name="m." + x.name) for x in decoder().layers)), 2),
]


def read_so(name, text, chain, gpus, tmp_path):
    """What is read, in a line, with the notes; or what is refused."""
    try:
        given = source(tmp_path, text, chain, gpus)
        found, own = READERS[name](given), READERS[name].by_heads(given.options)
    except BadInput as error:
        return f"! {str(error).replace(str(tmp_path), '')}"
    stages = (
        f"{x.start}-{x.stop}@{','.join(map(str, x.devices))}" + "".join(f"({a}-{b})" for a, b in x.checkpoint)
        for x in found.stages
    )
    about = (found.kind, found.microbatches, found.optimizer, found.precision, found.zero, own)
    return " ".join(map(str, (*about, *stages, *(f"; {note}" for note in found.notes))))


def read_all(tmp_path):
    cases = [(name, text, decoder(), 4) for name, texts in READ.items() for text in texts]
    lines = [f"{x[0]} {x[1][-50:]!r}: {read_so(*x, tmp_path)}" for x in [*cases, *OTHERWISE]]
    return "\n".join(lines) + "\n"


def test_what_others_run_is_read_or_refused_as_is_kept(tmp_path):
    check_kept(read_all(tmp_path), KEPT)


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
