"""Expert parallelism: what a rank has of a mixture, what its group exchanges and shares, and the plans of groups."""

from dataclasses import replace
from random import Random

import pytest
from cases.variants import assert_best_of_all_variants, plain_layers

import pipeplan as pp
from pipeplan.api.given.tensor import parts
from pipeplan.check.units import CannotExpress
from pipeplan.cost.roofline import with_exchanges
from pipeplan.cost.time_model import collective_ns, ring_all_reduce_ns
from pipeplan.errors import BadInput
from pipeplan.problem import Chain, Device, Exchange, Layer, Level, Platform, Variant
from pipeplan.report.searched import tensor_degree

SEQUENCE, HIDDEN, EXPERTS, CHOSEN, WIDTH = 64, 256, 8, 2, 128
SIZES = f"blocks=2,hidden={HIDDEN},heads=8,groups=4,expert_width={WIDTH},vocabulary=1000,sequence={SEQUENCE}"
MIXTURE = f"zoo:mixtral-8x7b,{SIZES},experts={EXPERTS},chosen={CHOSEN}"
ONE_BLOCK = MIXTURE.replace("blocks=2", "blocks=1")
BATCH = 2
WHERE = {"gpus": "2x4", "gpu": "h100", "network": "25GB/s", "batch": 64, "weights": "flush", "effort": "quick"}


def estimated(options="", model=ONE_BLOCK, **more):
    return pp.profile(model + options, gpu="h100", microbatch=BATCH, dtype="bfloat16", optimizer="adam", **more)


@pytest.fixture(scope="module")
def profiled():
    return estimated(model=MIXTURE, experts="1,4")


def test_a_rank_has_a_share_of_the_experts_and_all_routed_tokens(profiled):
    whole, four = (x.chain for x in parts(profiled, {}))
    one, part = whole.layers[2], four.layers[2]
    experts, rest = 3 * HIDDEN * WIDTH * EXPERTS, HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + EXPERTS + 2)
    assert one.parameter_count == experts + rest
    assert part.parameter_count == experts // 4 + rest
    assert part.own[1] == experts // 4 + rest // 4  # of four ranks that have the rest in common each keeps a part
    assert part.saved_bytes == pytest.approx(one.saved_bytes, rel=1e-3)
    size = 2 * BATCH * SEQUENCE * HIDDEN * CHOSEN
    assert set(part.exchanges) == {
        Exchange("all-to-all", False, size, 2, ranks=4),
        Exchange("all-to-all", True, size, 2, ranks=4),
        Exchange("all-reduce", False, 2 * rest, ranks=4, update=True),
    }
    assert (whole.microbatch, four.microbatch, four.each, four.several, four.width) == (BATCH, 4 * BATCH, BATCH, 4, 4)


def test_the_fullest_rank_has_as_many_more_tokens_as_is_said():
    even, uneven = (estimated(f",expert_ranks=4,imbalance={x}", engine="graphs").layers[1] for x in (1.0, 1.5))
    assert [x.bytes for x in uneven.exchanges] == [x.bytes * (1 if x.update else 1.5) for x in even.exchanges]
    assert uneven.forward_ns >= even.forward_ns
    assert uneven.saved_bytes > even.saved_bytes
    assert pp.plan(estimated(",imbalance=1.5", experts=4), **WHERE).plan.chain.imbalance == 1.5


def test_experts_on_tensor_parallel_ranks_are_whole():
    """Of 8 ranks in two groups of four that run a layer together each has an expert of 8, which nobody else sums."""
    found = estimated(tensor=4, sequence_parallel=True, experts=8).chain
    part = found.part(found.variants[0])
    experts, matrices = 3 * HIDDEN * WIDTH, HIDDEN * 3 * HIDDEN // 4
    assert part.layers[1].parameter_count == experts + matrices + HIDDEN * (EXPERTS + 2)
    assert (part.width, part.several) == (8, 2)
    sums = [x for x in part.layers[1].exchanges if x.update]
    assert [(x.bytes, x.ranks) for x in sums] == [(2 * (matrices + HIDDEN * (EXPERTS + 2)), 2)]
    with pytest.raises(BadInput, match="experts go with sequence parallelism"):
        estimated(tensor=2)


def test_exchanges_take_the_slowest_links_of_their_group():
    servers = replace(Platform.flat(8, 10**9), levels=(Level(4, 300 * 10**9), Level(2, 50 * 10**9)))
    size = 10**8
    layer = Layer("l", 1000, 1000, 0, 0, exchanges=(
        Exchange("all-to-all", False, size, ranks=8),
        Exchange("all-reduce", False, size, ranks=4, update=True),
    ))  # fmt: skip
    inside, across = (with_exchanges(Chain("c", (layer,), 0, experts=e), servers).layers[0] for e in (4, 8))
    assert inside.forward_ns == across.forward_ns == 1000 + collective_ns("all-to-all", size, 8, 50 * 10**9)
    assert inside.optimizer_ns == collective_ns("all-reduce", size, 4, 300 * 10**9)
    assert across.optimizer_ns == collective_ns("all-reduce", size, 4, 50 * 10**9)
    groups = servers.grouped(8, 1)
    assert (len(groups), groups.width, groups.levels[-1].count) == (1, 8, 1)
    assert [x.count for x in replace(Platform.flat(16, 1), levels=(Level(4, 3), Level(4, 1))).grouped(8, 1).levels] == [
        1,
        2,
    ]
    with pytest.raises(ValueError, match="groups of 8 GPUs don't share 4 in a server"):
        servers.grouped(8)


def tiny(seed):
    """A network of three layers, two of experts, whose weights 2 or 4 ranks share; the more, the less memory."""
    draw = Random(seed)
    plain = plain_layers(draw, (4, 40), (8, 80), 2, 1000, 4000)
    variants = []
    for ranks in (2, 4):
        layers = []
        for i, x in enumerate(plain):
            dense = x.weight_bytes if i == 0 else x.weight_bytes // 8 * 4
            experts = (x.weight_bytes - dense) // (4 * ranks)  # parameters
            sent = Exchange("all-to-all", draw.random() < 0.5, draw.randint(1, 999) * 1000, 2, ranks=ranks)
            layers.append(
                replace(
                    x,
                    weight_bytes=dense + 4 * experts,
                    own_parameters=experts + -(-dense // (4 * ranks)),
                    exchanges=(*[sent] * (i > 0), Exchange("all-reduce", False, dense, ranks=ranks, update=True)),
                )
            )
        variants.append(Variant(1, False, tuple(layers), experts=ranks))
    return Chain("tiny", plain, 1000, variants=tuple(variants))


@pytest.mark.parametrize(("seed", "zero"), [(0, 0), (1, 1), (5, 0), (5, 1)])  # each memory
def test_degrees_of_experts_are_as_good_as_all_plans_of_all_of_them(seed, zero):
    memory = Random(seed).choice((14000, 17000, 40000))
    servers = Platform((Device(memory),) * 8, (Level(4, 10**12), Level(2, 10**11)))
    words = {"platform": servers, "weights": "2bw", "batch": 32, "checkpointing": "none", "reserve": None}
    words |= {"optimizer": "adam", "zero": zero}
    assert_best_of_all_variants(tiny(seed), words)


def test_replicas_share_the_state_of_experts_among_fewer():
    """ZeRO-1 of Adam in mixed precision: of one rank's parameters 16 bits and a gradient each, 12 more of its own."""
    layer = Layer("l", 1000, 1000, 2 * 1200, 0, 0, parameters=1200, own_parameters=800 + 400 // 4)
    chain = Chain("c", (layer,), 0, dtype="bfloat16", microbatch=4, experts=4)
    words = {"mem": "1MB", "batch": 32, "optimizer": "adam", "precision": "mixed", "weights": "flush", "zero": 1}
    words |= {"algorithm": "data-parallel", "network": "1GB/s", "reserve": None}
    for servers, replicas in ((1, 1), (2, 2)):
        found = pp.plan(chain, gpus=(servers, 4), **words).evaluation
        assert found.devices[0].weights_bytes == 4 * 1200 + 16 * 900 // replicas
        summed = ring_all_reduce_ns(2 * 900, replicas, 10**9)  # what the four have summed of theirs
        assert found.graph.stages[0].update_ns == pytest.approx(summed, abs=replicas * 32)


def test_plans_say_the_ranks_of_experts_and_are_written_for_frameworks(profiled, tmp_path, pipeplan):
    found = pp.plan(profiled, **WHERE, experts=4, zero=1, for_="megatron", precision="mixed", optimizer="adam")
    assert "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1" in found.export("megatron")
    assert f"--micro-batch-size {BATCH} " in found.export("megatron").replace("\\\n", "")
    assert "--parallelism.expert_parallel_degree 4" in found.export(
        "torchtitan", rename=[r"block(\d+)=layers.\1,(.*)=\1"]
    )
    with pytest.raises(CannotExpress, match="4 GPUs run each layer together"):
        found.export("deepspeed")
    assert "4 GPUs share the experts of each layer, tokens taken evenly over them" in tensor_degree(found.plan)[0]
    plan, profile, script = (str(tmp_path / x) for x in ("plan.json", "profile.json", "train.sh"))
    found.save(plan)
    again = pp.read_plan(plan)
    assert (again.plan.platform, again.period_ns, again.plan.chain.experts) == (found.plan.platform, found.period_ns, 4)
    code, _, error = pipeplan("run", plan, "--model", MIXTURE, "--device", "cpu")
    assert code == 2
    assert (
        "in the plan 4 GPUs share a layer's experts, which run doesn't; export it to Megatron-LM or torchtitan" in error
    )
    profiled.save(profile)
    assert pp.read_profile(profile).chain == profiled.chain
    (tmp_path / "train.sh").write_text(found.export("megatron") + " --bf16 --optimizer adam")
    asked = {"gpus": "2x4", "gpu": "h100", "network": "25GB/s", "effort": "quick"}
    judged = pp.import_plan(profile, script, framework="megatron", **asked)
    assert judged.today.period_ns == found.period_ns
    assert judged.today.plan.chain.experts == 4


def test_degrees_that_do_not_share_the_experts_are_refused(profiled):
    with pytest.raises(BadInput, match="3 ranks don't share 8 evenly"):
        estimated(experts="3")
    with pytest.raises(BadInput, match="experts 2: the profile has degree 1, 4"):
        pp.plan(profiled, **WHERE, experts=2)
    with pytest.raises(BadInput, match="experts: 'two' is neither degrees"):
        pp.plan(profiled, **WHERE, experts="two")
    with pytest.raises(BadInput, match="zoo models of mixtures"):
        pp.profile("zoo:gpt-tiny", gpu="a100", experts=2)


@pytest.mark.parametrize(
    "name",
    [
        "MixtralForCausalLM,num_local_experts=8,num_experts_per_tok=2,num_key_value_heads=4",
        "Qwen3MoeForCausalLM,num_experts=8,num_experts_per_tok=2,num_key_value_heads=4,moe_intermediate_size=128,"
        "norm_topk_prob=true",
    ],
)
def test_transformers_mixtures_are_parted_by_their_experts(name):
    sizes = (
        "num_hidden_layers=1,hidden_size=256,intermediate_size=128,num_attention_heads=8,vocab_size=1000,sequence=64"
    )
    asked = {"gpu": "h100", "microbatch": BATCH, "dtype": "bfloat16", "granularity": "block"}
    try:
        found = pp.profile(f"hf:{name},{sizes}", experts="1,4", **asked).chain
    except BadInput as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))
    one, part = (
        next(x for x in own.layers if x.name == "model.layers.0") for own in (found, found.part(found.variants[0]))
    )
    experts = 3 * HIDDEN * WIDTH * EXPERTS
    assert one.parameter_count - part.parameter_count == experts * 3 // 4
    size = 2 * BATCH * SEQUENCE * HIDDEN * CHOSEN
    assert [x for x in part.exchanges if not x.update] == [
        Exchange("all-to-all", False, size, 2, ranks=4),
        Exchange("all-to-all", True, size, 2, ranks=4),
    ]
    assert part.own[1] == pytest.approx(experts // 4 + (part.parameter_count - experts // 4) / 4, rel=1e-3)
