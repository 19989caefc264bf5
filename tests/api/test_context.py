"""Context parallelism: what a rank has of each sequence, what its group sends round or trades, and plans of groups."""

from dataclasses import replace
from random import Random

import pytest
from cases.variants import assert_best_of_all_variants, plain_layers

import pipeplan as pp
from pipeplan.api.given.tensor import parts
from pipeplan.check.units import CannotExpress
from pipeplan.cost.roofline import collective_ns, with_exchanges
from pipeplan.errors import BadInput
from pipeplan.problem import Chain, Device, Exchange, Layer, Level, Platform, Variant
from pipeplan.report.searched import tensor_degree

SEQUENCE, HIDDEN, HEADS, GROUPS = 4096, 512, 8, 4
SIZES = f"hidden={HIDDEN},heads={HEADS},vocabulary=1000,sequence={SEQUENCE}"
LLAMA = f"zoo:llama3-8b,blocks=2,groups={GROUPS},feed_forward=1024,{SIZES}"
WHERE = {"gpus": "2x4", "gpu": "h100", "network": "50GB/s", "batch": 32, "weights": "flush", "effort": "quick"}
RENAME = [r"block(\d+)=layers.\1,(.*)=\1"]


def estimated(model=LLAMA, **more):
    asked = {"gpu": "h100", "microbatch": 1, "dtype": "bfloat16", "optimizer": "adam", "engine": "graphs"}
    return pp.profile(model, **{**asked, **more})


@pytest.fixture(scope="module")
def profiled():
    return estimated(context="1,4")


def of(profile, variant):
    return next(x.chain for x in parts(profile, {}) if x.chain.variant == variant)


def test_a_rank_has_its_part_of_a_sequence_and_all_of_the_weights(profiled):
    whole, ring, heads = (of(profiled, x) for x in ("1", "1 context 4", "1 context 4 by heads"))
    one, sent, traded = (x.layers[2] for x in (whole, ring, heads))
    for part in (sent, traded):
        assert part.parameter_count == one.parameter_count
        assert part.own[1] == one.parameter_count // 4  # of four ranks with the same weights each keeps a part
        again = one.output_bytes * (part is traded)  # what attention made, which then goes back to its ranks
        assert 4 * part.saved_bytes == pytest.approx(one.saved_bytes + again, rel=1e-3)
        assert 4 * part.output_bytes == one.output_bytes
        assert [x for x in part.exchanges if x.update] == [
            Exchange("all-reduce", False, 2 * one.parameter_count, ranks=4, update=True)
        ]
    assert (ring.microbatch, ring.each, ring.several, ring.width, ring.input_bytes) == (
        1, 1, 1, 4, whole.input_bytes // 4,
    )  # fmt: skip
    head = SEQUENCE // 4 * HIDDEN // HEADS * 2  # bytes of one head of a rank's tokens
    keys = 2 * GROUPS * head
    forward, backward = (next(x for x in sent.exchanges if not x.update and x.backward is b) for b in (False, True))
    for one_way, times in ((forward, 1), (backward, 2)):  # backward gradients go round, too
        assert one_way == Exchange("send", one_way.backward, times * keys, 3, 3, ranks=4, beside_ns=one_way.beside_ns)
        assert one_way.beside_ns > 0
    sizes = {x.bytes: x.count for x in traded.exchanges if x.kind == "all-to-all" and not x.backward}
    assert sizes == {HEADS * head: 2, GROUPS * head: 2}  # queries and what is attended to, keys and values


def test_attention_is_shared_evenly_by_ranks(profiled):
    """All ranks' causal attention is as much as one GPU's; each makes it in pieces of fewer keys, which are slower."""
    whole, ring = of(profiled, "1").layers[2].work, of(profiled, "1 context 4").layers[2].work
    assert 1.0 <= 4 * ring.forward.compute_ns / whole.forward.compute_ns < 1.35
    assert 1.0 <= 4 * ring.backward.compute_ns / whole.backward.compute_ns < 1.35


def test_heads_and_tokens_that_ranks_do_not_share_evenly_are_refused():
    found = estimated(LLAMA.replace("blocks=2", "blocks=1"), context="8")
    assert [x.chain.variant for x in parts(found, {})] == ["1", "1 context 8"]  # 4 groups of heads aren't shared by 8
    with pytest.raises(BadInput, match="3 ranks don't share 4096 tokens evenly in two parts per rank"):
        estimated(context=3)
    gpt = f"zoo:gpt2-small,blocks=1,{SIZES}"
    assert "2 context 2" in {x.chain.variant for x in parts(estimated(gpt, tensor="2", context="2"), {})}
    with pytest.raises(BadInput, match="share the sequences of fused attention"):
        estimated(f"{gpt},attention=unfused", context=2)
    with pytest.raises(BadInput, match=r"context: zoo:gnmt,.* is not written by parts"):
        estimated("zoo:gnmt,hidden=16,vocabulary=130,sequence=6", context=2)


def test_what_goes_round_counts_where_it_outlasts_the_attention_beside_it():
    servers = replace(Platform.flat(8, 10**9), levels=(Level(4, 300 * 10**9), Level(2, 50 * 10**9)))
    size = 10**8
    beside = collective_ns("send", size, 2, 300 * 10**9)
    for tensor, apart, bandwidth in ((2, 2, 300), (4, 4, 50)):  # two groups of four ranks are of two servers
        sent = Exchange("send", False, size, 3, 3, ranks=2, apart=apart, beside_ns=beside)
        chain = Chain("c", (Layer("l", 1000, 1000, 0, 0, exchanges=(sent,)),), 0, tensor=tensor, context=2)
        each = collective_ns("send", size, 2, bandwidth * 10**9)
        assert with_exchanges(chain, servers).layers[0].forward_ns == 1000 + 3 * (each - beside)


def tiny(seed):
    """A network of three layers whose sequences 2 or 4 ranks share, one way or the other; the more, the less memory."""
    draw = Random(seed)
    plain = plain_layers(draw, (8, 80), (16, 99), 2, 4000, 8000)
    variants = []
    for ranks in (2, 4):
        for by_heads in (False, True):
            kind = "all-to-all" if by_heads else "send"
            layers = []
            for x in plain:
                hidden = (ranks - 1) * (not by_heads)
                size, beside = draw.randint(1, 999) * 1000, 0 if by_heads else draw.randint(1, 40_000)
                sent = Exchange(kind, draw.random() < 0.5, size, 4 if by_heads else hidden, hidden, ranks,
                                beside_ns=beside)  # fmt: skip
                layers.append(
                    replace(
                        x,
                        forward_ns=x.forward_ns // ranks,
                        backward_ns=x.backward_ns // ranks,
                        output_bytes=x.output_bytes // ranks,
                        saved_bytes=x.saved_bytes // ranks,
                        own_parameters=-(-x.parameter_count // ranks),
                        exchanges=(sent, Exchange("all-reduce", False, x.weight_bytes, ranks=ranks, update=True)),
                    )
                )
            variants.append(Variant(1, False, tuple(layers), context=ranks, by_heads=by_heads))
    return Chain("tiny", plain, 4000, variants=tuple(variants))


@pytest.mark.parametrize("seed", [0, 1, 2, 5])  # each memory, with state shared and not
def test_degrees_of_context_are_as_good_as_all_plans_of_all_of_them(seed):
    memory = Random(seed).choice((16000, 20000, 60000))
    servers = Platform((Device(memory),) * 8, (Level(4, 10**12), Level(2, 10**11)))
    words = {"platform": servers, "weights": "2bw", "batch": 32, "checkpointing": "none", "reserve": None}
    words |= {"optimizer": "adam", "zero": seed % 2}
    assert all(x.chain.several == 1 for x in parts(pp.Profile(tiny(seed)), {}))  # a group has each microbatch
    assert_best_of_all_variants(tiny(seed), words)
    with pytest.raises(BadInput, match="context 8: the profile has degree 1, 2, 4"):
        pp.plan(tiny(seed), context=8, **words)


def test_plans_say_who_shares_sequences_and_are_written_for_frameworks(profiled, tmp_path, pipeplan):
    words = {**WHERE, "zero": 1, "for_": "megatron", "precision": "mixed", "optimizer": "adam"}
    (ring,) = (x for x in parts(profiled, {"tensor": 1, "context": 4}) if not x.chain.by_heads)
    (heads,) = (x for x in parts(profiled, {"tensor": 1, "context": 4}) if x.chain.by_heads)
    found, other = (pp.plan(x, **words) for x in (ring, heads))
    assert "4 of them share each sequence, whose keys and values go round" in tensor_degree(found.plan)[0]
    assert "4 of them share each sequence, by heads in attention" in tensor_degree(other.plan)[0]
    assert "--context-parallel-size 4 --cp-comm-type p2p" in found.export("megatron")
    assert "cfg.model.context_parallel_size = 4" in found.export("megatron-bridge")
    assert "--cp-comm-type a2a" in other.export("megatron")
    assert "--parallelism.context_parallel_degree 4" in found.export("torchtitan", rename=RENAME)
    with pytest.raises(CannotExpress, match="not by heads"):
        other.export("torchtitan", rename=RENAME)
    with pytest.raises(CannotExpress, match="4 GPUs run each layer together"):
        found.export("deepspeed")
    plan, script, titan = (str(tmp_path / x) for x in ("plan.json", "train.sh", "train.toml"))
    found.save(plan)
    assert pp.read_plan(plan).plan.chain == found.plan.chain
    code, _, error = pipeplan("run", plan, "--model", LLAMA, "--device", "cpu")
    assert code == 2
    assert "in the plan 4 GPUs share a sequence, which run doesn't; export it" in error
    asked = {"gpus": "2x4", "gpu": "h100", "network": "50GB/s", "effort": "quick"}
    for own in (found, other):
        (tmp_path / "train.sh").write_text(own.export("megatron") + " --bf16 --optimizer adam")
        judged = pp.import_plan(profiled, script, framework="megatron", **asked)
        assert judged.today.plan.chain.variant == own.plan.chain.variant
        assert judged.today.period_ns == own.period_ns
    (tmp_path / "train.sh").write_text(found.export("megatron").replace("p2p", "allgather"))
    with pytest.raises(BadInput, match=r"cp.comm.type allgather is neither p2p nor a2a"):
        pp.import_plan(profiled, script, framework="megatron", **asked)
    (tmp_path / "train.toml").write_text(
        "[parallelism]\ncontext_parallel_degree = 4\npipeline_parallel_degree = 2\n"
        "num_pp_microbatches = 4\ndata_parallel_shard_degree = 1\n"
    )
    judged = pp.import_plan(profiled, titan, framework="torchtitan", rename=RENAME, **asked)
    assert judged.today.plan.chain.variant == "1 context 4"
    (tmp_path / "train.sh").write_text(found.export("megatron"))
    with pytest.raises(BadInput, match="context 4: the profile has degree 1; a profile with others"):
        pp.import_plan(pp.Profile(of(profiled, "1")), script, framework="megatron", **asked)


def test_transformers_models_are_parted_along_the_sequence():
    model = "hf:LlamaForCausalLM,num_hidden_layers=1,hidden_size=256,intermediate_size=512,num_attention_heads=8"
    try:
        found = estimated(f"{model},num_key_value_heads=4,vocab_size=1000,sequence=1024", context="1,2",
                          granularity="block")  # fmt: skip
    except BadInput as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))
    ring, heads = (of(found, x) for x in ("1 context 2", "1 context 2 by heads"))
    one, sent, traded = (
        next(x for x in own.layers if x.name == "model.layers.0") for own in (found.chain, ring, heads)
    )
    keys = 2 * 512 * 4 * 32 * 2  # bytes of keys and values of 512 tokens, of 4 heads of 32 numbers
    assert [(x.kind, x.bytes, x.count) for x in sent.exchanges if not x.update and not x.backward] == [
        ("send", keys, 1)
    ]
    assert sum(x.count for x in traded.exchanges if x.kind == "all-to-all") == 8
    assert 2 * sent.saved_bytes == pytest.approx(one.saved_bytes, rel=0.01)


def test_transformers_models_are_exported_with_their_embedding():
    model = "hf:LlamaForCausalLM,num_hidden_layers=2,hidden_size=256,intermediate_size=512,num_attention_heads=8"
    asked = {"gpus": 2, "gpu": "h100", "microbatch": 1, "precision": "mixed", "optimizer": "adam", "batch": 8}
    try:
        found = pp.plan(f"{model},vocab_size=1000,sequence=256", for_="torchtitan", tensor=1, effort="quick",
                        granularity="block", schedule="1f1b", no_replicas=True, **asked)  # fmt: skip
    except BadInput as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))
    with pytest.raises(CannotExpress, match="say the model's own names") as refused:
        found.export("torchtitan")
    hint = str(refused.value).rpartition("--rename '")[2].rstrip("'")
    assert " tok_embeddings,layers.0" in found.export("torchtitan", rename=[hint])
    assert found.export("torchtitan", rename=[hint]).count("lm_head") == 1
    assert '"Et' in found.export("megatron")
