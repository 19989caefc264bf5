"""Tensor degrees: what one rank has of a layer, what its group exchanges, and the plans of groups."""

import json
from dataclasses import replace
from random import Random

import pytest
from cases.variants import plain_layers
from oracles.partition import contiguous_optimum

import pipeplan as pp
from pipeplan.api.given.problems import problem_of
from pipeplan.api.given.tensor import parts
from pipeplan.api.planning import _parts_of
from pipeplan.check.targets import express
from pipeplan.check.units import CannotExpress
from pipeplan.cost.roofline import with_exchanges
from pipeplan.cost.time_model import collective_ns
from pipeplan.errors import BadInput, InvalidPlan
from pipeplan.problem import Chain, Device, Exchange, Layer, Level, Platform, Variant
from pipeplan.zoo.text.sizes import TRANSFORMERS

HIDDEN, HEADS, SEQUENCE, BATCH = 1024, 16, 512, 2
GPT = "zoo:gpt2-medium,blocks=2,sequence=512,attention=unfused,dropout=0.1"
WHERE = {"gpus": "2x4", "gpu": "a100", "network": "25GB/s", "batch": 16, "weights": "flush"}


def estimated(options="", model=GPT, **more):
    return pp.profile(model + options, gpu="a100", microbatch=BATCH, dtype="bfloat16", optimizer="adam", **more)


def block(options):
    """The only one of a model."""
    return estimated(options, GPT.replace("blocks=2", "blocks=1")).layers[1]


@pytest.fixture(scope="module")
def profiled():
    return estimated(tensor="1,2,4", sequence_parallel=True)


@pytest.mark.parametrize(("tensor", "parted"), [(1, False), (4, False), (2, True)])
def test_a_rank_saves_what_korthikanti_counts(tensor, parted):
    """Reducing Activation Recomputation, Table 2: attention not fused, dropout, 16 bits."""
    found = block(f",tensor={tensor}" + (",sequence_parallel=true" if parted else ""))
    core, unit = 5 * HEADS * SEQUENCE / HIDDEN, SEQUENCE * BATCH * HIDDEN
    wanted = (34 + core) / tensor if parted else 10 + (24 + core) / tensor
    assert found.saved_bytes == pytest.approx(wanted * unit, rel=2e-3)
    matrices, rest = 12 * HIDDEN**2 + 7 * HIDDEN, 6 * HIDDEN  # whole: norms, biases of products with a rank's rows
    assert found.parameter_count == matrices // tensor + rest


def test_a_block_exchanges_what_the_papers_say():
    size = 2 * SEQUENCE * BATCH * HIDDEN
    assert {(x.kind, x.backward, x.bytes, x.count, x.hidden) for x in block(",tensor=2").exchanges} == {
        ("all-reduce", False, size, 2, 0),
        ("all-reduce", True, size, 2, 0),
    }
    parted = block(",tensor=2,sequence_parallel=true").exchanges
    assert {(x.kind, x.backward, x.bytes, x.count, x.hidden) for x in parted} == {
        ("all-gather", False, size, 2, 0),
        ("reduce-scatter", False, size, 2, 0),
        ("all-gather", True, size, 4, 2),
        ("reduce-scatter", True, size, 2, 0),
    }


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-175b", 174.604259328), ("llama3-8b", 8.030261248), ("llama3-70b", 70.553706496),
                           ("llama3-405b", 405.853388800)],
)  # fmt: skip
def test_published_parameters(name, billions):
    assert TRANSFORMERS[name].parameters == round(billions * 1e9)


@pytest.mark.parametrize(("mib", "us"), [(1, 79), (64, 652), (1024, 8140)])
def test_all_reduces_of_eight_a100s_take_what_was_measured(mib, us):
    """Galvatron's table of eight A100s by NVSwitch."""
    assert collective_ns("all-reduce", mib * 10**6, 8, 300 * 10**9) == pytest.approx(us * 1000, rel=0.15)


def test_exchanges_wait_for_no_idle_device_and_hide_beside_products(profiled):
    link = 10**9
    layer = replace(profiled.layers[2], forward_ns=10**6, backward_ns=10**9)
    alone = collective_ns("all-gather", 10**6, 2, link)

    def taken(*exchanges, idle=(0, 0)):
        one = replace(layer, exchanges=exchanges, idle_ns=idle)
        return with_exchanges(Chain("one", (one,), 0, tensor=2), Platform.flat(2, 1, link)).layers[0]

    assert taken(Exchange("all-gather", False, 10**6, 3)).forward_ns == 10**6 + 3 * alone
    assert taken(Exchange("all-gather", True, 10**6, 3, hidden=3)).backward_ns == 10**9
    assert taken(Exchange("all-gather", False, 10**6, 1), idle=(alone // 2, 0)).forward_ns == 10**6 + alone - alone // 2


def test_groups_of_gpus_are_devices_of_one_server_each():
    two = Platform.flat(8, 10**9).grouped(4)
    assert (len(two), two.width, list(two.gpus(1)), two.devices[0].memory_bytes) == (2, 4, [4, 5, 6, 7], 10**9)
    servers = replace(Platform.flat(8, 10**9), levels=(Level(4, 300), Level(2, 100, links=2)))
    grouped = servers.grouped(4)
    assert [(x.count, x.bandwidth, x.links) for x in grouped.levels] == [(1, 300, None), (2, 50, 1)]
    assert servers.grouped(2).levels[1] == Level(2, 100, links=1)
    with pytest.raises(ValueError, match="groups of 3 GPUs don't share 4 in a server evenly"):
        servers.grouped(3)


def test_the_best_degree_is_the_best_of_all(profiled, tmp_path):
    each = {x.chain.tensor: pp.plan(x, **WHERE, effort="quick") for x in parts(profiled, {"tensor": "any"})}
    found = pp.plan(profiled, **WHERE, effort="quick")  # all that it has, where nobody says
    assert found.period_ns == min(x.period_ns for x in each.values())
    for degree, told in found.plan.provenance.options["tensor"].items():
        assert told["period_ns"] in (None, each[int(degree)].period_ns)
        assert told["bound_ns"] >= found.period_ns if told["period_ns"] is None else told["bound_ns"] > 0
    for degree, other in each.items():
        path = tmp_path / f"{degree}.json"
        other.save(path)
        again = pp.read_plan(path)
        assert again.plan.platform == other.plan.platform
        assert again.period_ns == other.period_ns
        for stage in again.stages:
            groups = [stage.gpus[i : i + degree] for i in range(0, len(stage.gpus), degree)]
            assert all(x == tuple(range(x[0], x[0] + degree)) and x[0] % degree == 0 for x in groups)


def tiny(seed):
    """A network of three layers in degrees 1, 2 and 4, the more GPUs the less memory and the more work in all."""
    draw = Random(seed)
    plain = plain_layers(draw, (4, 40), (8, 80), 1, 1000, 4000)
    variants = []
    for degree in (2, 4):
        shares = {x: draw.uniform(1.0, 1.4) / degree for x in ("forward_ns", "backward_ns")}
        layers = (
            replace(
                x,
                **{name: round(share * getattr(x, name)) for name, share in shares.items()},
                weight_bytes=x.weight_bytes // degree,
                saved_bytes=x.saved_bytes // degree,
                exchanges=(Exchange("all-reduce", draw.random() < 0.5, draw.randint(1, 999), 1),),
            )
            for x in plain
        )
        variants.append(Variant(degree, False, tuple(layers)))
    return Chain("tiny", plain, 1000, variants=tuple(variants))


@pytest.mark.parametrize("seed", range(4))
def test_degrees_are_as_good_as_all_plans_of_all_of_them(seed):
    memory = Random(seed).choice((9000, 14000, 40000))
    servers = Platform((Device(memory),) * 8, (Level(4, 10**12), Level(2, 10**9)))
    words = {"platform": servers, "weights": "2bw", "accumulate": 16, "checkpointing": "none", "reserve": None}
    words |= {"no_replicas": True}  # so that no update waits for sums
    least = {}
    for part in parts(pp.Profile(tiny(seed)), {}):
        found = contiguous_optimum(problem_of(part, **words)[0])
        least[str(part.chain.tensor)] = None if found is None else found[0]
    found = pp.plan(tiny(seed), algorithm="contiguous", **words)
    assert found.period_ns == min(x for x in least.values() if x is not None)
    for degree, told in found.plan.provenance.options["tensor"].items():
        assert told["bound_ns"] is None or least[degree] is None or told["bound_ns"] <= least[degree]
        assert told["bound_ns"] is not None or least[degree] is None


def test_grids_comparisons_and_pages_are_of_groups(tmp_path):
    chain = tiny(0)
    words = {"gpus": (8,), "mem": "0.04MB", "bandwidth": "1TB/s", "reserve": None}
    found = pp.grid(chain, batch=16, **words)
    told = found.plan.provenance.options["tensor"]
    assert set(told) == {"1", "2", "4"}
    assert min(x["batch_ns"] for x in told.values()) == found.evaluation.makespan_ns
    rows = pp.compare(chain, algorithms="contiguous", weights="2bw", **words | {"gpus": (4, 6)}).rows
    assert [(x.tensor, x.gpus) for x in rows] == [(1, 4), (1, 6), (2, 4), (2, 6), (4, 4)]
    four = pp.plan(chain, tensor=4, weights="flush", **words)
    four.report(tmp_path / "page.html")
    assert "GPUs 4-7" in (tmp_path / "page.html").read_text() or len(four.stages) == 1


def test_a_profile_keeps_its_variants(profiled, tmp_path):
    profiled.save(tmp_path / "profile.json")
    assert pp.read_profile(tmp_path / "profile.json").chain == profiled.chain


def test_degrees_that_a_model_or_a_profile_has_not_are_refused(profiled):
    with pytest.raises(BadInput, match="3 ranks don't divide 16 heads"):
        estimated(tensor="3")
    with pytest.raises(BadInput, match="tensor 8: the profile has degree 1, 2, 4"):
        pp.plan(profiled, **WHERE, tensor=8)
    with pytest.raises(BadInput, match="'two' is neither degrees"):
        pp.plan(profiled, **WHERE, tensor="two")
    with pytest.raises(BadInput, match="zoo models of GPT and Llama"):
        pp.profile("zoo:small-cnn", gpu="a100", tensor=2)


def test_exports_name_the_degree_or_say_that_they_cannot(profiled):
    found = pp.plan(profiled, **WHERE, tensor=4, for_="megatron", effort="quick")
    assert "--tensor-model-parallel-size 4 --sequence-parallel" in found.export("megatron")
    with pytest.raises(CannotExpress, match="4 GPUs run each layer together"):
        found.export("deepspeed")
    for degrees, along in ((None, True), ("any", True), ("2,4", False)):  # of a named model
        said = {"tensor": degrees, "sequence_parallel": False, "for_": "megatron"}
        assert _parts_of(GPT, said)["sequence_parallel"] is along


def test_transformers_models_are_parted_by_their_own_plan():
    sizes = (
        "num_hidden_layers=1,hidden_size=256,intermediate_size=512,num_attention_heads=8,num_key_value_heads=4,"
        "vocab_size=1000"
    )
    asked = {"gpu": "h100", "microbatch": 2, "dtype": "bfloat16", "tensor": "1,4", "granularity": "block"}
    found = pp.profile(f"hf:LlamaForCausalLM,{sizes},sequence=64", **asked).chain
    own, part = (
        found.part(found.variants[0]),
        pp.profile(
            "zoo:llama3-8b,blocks=1,hidden=256,heads=8,groups=4,feed_forward=512,vocabulary=1000,sequence=64",
            **asked | {"granularity": "node"},
        ).chain.variants[0],
    )
    assert int(own.sums.parameters[-1]) == sum(x.parameter_count for x in part.layers)
    block = next(x for x in own.layers if x.name == "model.layers.0")
    assert set(block.exchanges) == set(part.layers[1].exchanges)
    with pytest.raises(BadInput, match="8 ranks don't divide 4 key value heads"):
        pp.profile(f"hf:LlamaForCausalLM,{sizes}", **asked | {"tensor": 8})


def test_degrees_that_divide_no_heads_are_for_targets_that_share_them(tmp_path):
    """torchtitan's own recipes with two heads of keys and values and degree 4 were refused by it for months."""
    asked = {"gpu": "a100", "microbatch": 2, "dtype": "bfloat16", "tensor": "4", "sequence_parallel": True}
    sizes = "zoo:llama3-8b,blocks=2,hidden=256,heads=8,groups=2,feed_forward=512,vocabulary=1000,sequence=64"
    found = pp.profile(sizes, **asked)
    found.save(tmp_path / "profile.json")
    again = pp.read_profile(tmp_path / "profile.json")
    with pytest.raises(CannotExpress, match="torchtitan: 2 heads of keys and values aren't shared evenly by 4 GPUs"):
        pp.plan(again, **WHERE, tensor=4, for_="torchtitan")
    assert pp.plan(again, **WHERE, for_="torchtitan", effort="quick").plan.chain.tensor == 1
    assert pp.plan(again, **WHERE, tensor=4, for_="megatron", effort="quick").plan.chain.tensor == 4


def test_an_imported_recipe_is_judged_beside_all_degrees(profiled, tmp_path, pipeplan):
    profiled.save(tmp_path / "profile.json")
    (tmp_path / "train.sh").write_text(
        "torchrun pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 2 "
        "--micro-batch-size 2 --global-batch-size 16 --bf16 --recompute-granularity selective"
    )
    asked = "--gpus", "2x4", "--gpu", "a100", "--network", "25GB/s", "--effort", "quick", "--json"
    files = (str(tmp_path / name) for name in ("profile.json", "train.sh"))
    code, said, _ = pipeplan("import", *files, "--from", "megatron", *asked)
    assert code == 0
    found = json.loads(said)
    assert (found["today"]["tensor"], found["today"]["ranks"]) == (4, 2)
    words = {"precision": "mixed", "optimizer": "adam"}
    best = pp.plan(profiled, **WHERE | words, for_="megatron", effort="quick")
    assert found["best"]["period_ns"] == min(best.period_ns, found["today"]["period_ns"])
    assert (best.plan.policy.bytes_per_parameter, best.plan.policy.shared_bytes_per_parameter) == (18, None)
    assert any("6+12 as Megatron-LM has them" in x for x in best.assumptions)
    shared = pp.plan(profiled, **WHERE | words, tensor=4, zero=1, for_="megatron", effort="quick").plan.policy
    assert (shared.bytes_per_parameter, shared.shared_bytes_per_parameter) == (18, 12)


def of_two_towers():
    """Three blocks that fit on a GPU each, and a head that fits on two together alone."""
    layers = [Layer(f"block{i}", 40 * 10**6, 60 * 10**6, 8 * 10**6, 10**6, 2 * 10**6) for i in range(3)]
    layers.append(Layer("head", 80 * 10**6, 120 * 10**6, 4 * 10**7, 4, 2 * 10**6))

    def part(layer, width):
        forward, backward = (x // width + width * n * 10**6 for n, x in ((2, layer.forward_ns), (3, layer.backward_ns)))
        weights = layer.weight_bytes // width
        return replace(layer, forward_ns=forward, backward_ns=backward, weight_bytes=weights, saved_bytes=10**6)

    variants = (Variant(w, True, tuple(part(x, w) for x in layers)) for w in (2, 4))
    return Chain("towers", tuple(layers), 10**6, variants=tuple(variants))


def test_each_stage_has_a_degree_of_its_own_in_plan_and_file(tmp_path, capsys):
    asked = {"gpus": 4, "mem": "90MB", "bandwidth": "10GB/s", "weights": "2bw", "batch": 16}
    each, alike = (pp.plan(of_two_towers(), tensor=x, **asked) for x in ("each", None))
    assert [x.tensor for x in each.stages] == [1, 2] != [x.tensor for x in alike.stages]
    assert each.period_ns < alike.period_ns
    assert each.bound_ns <= each.period_ns
    assert [x.gpus for x in each.stages] == [(0, 1), (2, 3)]
    assert {x.allocation for x in each.plan.lower_bounds} == {"any", "contiguous"}
    assert set(each.plan.provenance.options["tensor"]) == {"1", "2", "4", "each"}
    each.save(tmp_path / "plan.json")
    again = pp.read_plan(tmp_path / "plan.json")
    assert again.plan.allocation.stages == each.plan.allocation.stages
    assert len({x.peak_bytes for x in again.evaluation.devices[2:]}) == 1 <= again.evaluation.devices[3].peak_bytes
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [x.get("tensor") for x in written["stages"]] == [None, 2]
    for change, words in [
        ({"tensor": 3, "devices": [1, 2, 3]}, "degree 3"),
        ({"devices": [1, 2]}, "overlap"),
        ({"devices": [2, 1]}, "groups"),
    ]:
        wrong = json.loads(json.dumps(written))
        wrong["stages"][1].update(change)
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises((BadInput, InvalidPlan), match=words):
            pp.read_plan(tmp_path / "wrong.json")
    with pytest.raises(CannotExpress, match="of its own"):
        express(each.plan.chain, each.plan.allocation.stages, "megatron")
    each.show()
    assert "tensor degrees of their own: 1, 2 by stage" in capsys.readouterr().out


def test_each_stage_needs_variants():
    with pytest.raises(BadInput, match="one degree alone"):
        pp.plan(replace(of_two_towers(), variants=()), tensor="each", gpus=4, mem="90MB")


def test_each_stage_drains_with_a_degree_of_its_own():
    found = pp.plan(of_two_towers(), tensor="each", gpus=4, mem="90MB", bandwidth="10GB/s", weights="flush", batch=8)
    assert found.plan.policy.drains
    assert found.bound_ns <= found.period_ns


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"for_": "torchtitan"}, "torchtitan gives all stages one degree"),
        ({"algorithm": "madpipe"}, "madpipe gives all stages one degree"),
        ({"blocking_transfers": True}, "messages keep GPUs from computing"),
        ({"gpus": 3}, "degree 1 alone"),
    ],
)
def test_each_is_refused_where_it_has_no_meaning(more, words):
    with pytest.raises(BadInput, match=words):
        pp.plan(of_two_towers(), **{"gpus": 4, "mem": "90MB", "tensor": "each", **more})
