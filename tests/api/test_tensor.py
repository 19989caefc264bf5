"""Tensor degrees: what one rank has of a layer, what its group exchanges, and the plans of groups."""

from dataclasses import replace

import pytest

import pipeplan as pp
from pipeplan.api.tensor import parts
from pipeplan.check.targets import CannotExpress
from pipeplan.cost.collectives import collective_ns, with_exchanges
from pipeplan.errors import BadInput
from pipeplan.problem import Chain, Exchange, Level, Platform
from pipeplan.zoo.sizes import TRANSFORMERS

HIDDEN, HEADS, SEQUENCE, BATCH = 1024, 16, 512, 2
GPT = "zoo:gpt2-medium,blocks=4,sequence=512,attention=unfused,dropout=0.1"
WHERE = {"gpus": "2x4", "gpu": "a100", "network": "25GB/s", "batch": 16, "weights": "flush"}


def estimated(options="", **more):
    return pp.profile(GPT + options, gpu="a100", microbatch=BATCH, dtype="bfloat16", optimizer="adam", **more)


@pytest.fixture(scope="module")
def profiled():
    return estimated(tensor="1,2,4", sequence_parallel=True)


@pytest.mark.parametrize(("tensor", "parted"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_a_rank_saves_what_korthikanti_counts(tensor, parted):
    """Reducing Activation Recomputation, Table 2: attention not fused, dropout, 16 bits."""
    found = estimated(f",tensor={tensor}" + (",sequence_parallel=true" if parted else "")).layers[3]
    core, unit = 5 * HEADS * SEQUENCE / HIDDEN, SEQUENCE * BATCH * HIDDEN
    wanted = (34 + core) / tensor if parted else 10 + (24 + core) / tensor
    assert found.saved_bytes == pytest.approx(wanted * unit, rel=2e-3)
    matrices, rest = (
        12 * HIDDEN**2 + 7 * HIDDEN,
        6 * HIDDEN,
    )  # whole are norms and biases of products with a rank's rows
    assert found.parameter_count == matrices // tensor + rest


def test_a_block_exchanges_what_the_papers_say():
    size = 2 * SEQUENCE * BATCH * HIDDEN
    assert {(x.kind, x.backward, x.bytes, x.count, x.hidden) for x in estimated(",tensor=2").layers[3].exchanges} == {
        ("all-reduce", False, size, 2, 0),
        ("all-reduce", True, size, 2, 0),
    }
    parted = estimated(",tensor=2,sequence_parallel=true").layers[3].exchanges
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
    layer = replace(profiled.layers[3], forward_ns=10**6, backward_ns=10**9)
    alone = collective_ns("all-gather", 10**6, 2, link)

    def taken(*exchanges, idle=(0, 0)):
        one = replace(layer, exchanges=exchanges, idle_ns=idle)
        return with_exchanges(Chain("one", (one,), 0, tensor=2), link).layers[0]

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
    each = {x.chain.tensor: pp.plan(x, **WHERE, effort="quick") for x in parts(profiled, "any")}
    found = pp.plan(profiled, **WHERE, tensor="any", effort="quick")
    assert found.period_ns == min(x.period_ns for x in each.values())
    assert found.plan.provenance.options["tensor"] == {str(k): x.period_ns for k, x in sorted(each.items())}
    for degree, other in each.items():
        path = tmp_path / f"{degree}.json"
        other.save(path)
        again = pp.read_plan(path)
        assert again.plan.platform == other.plan.platform
        assert again.period_ns == other.period_ns
        for stage in again.stages:
            groups = [stage.gpus[i : i + degree] for i in range(0, len(stage.gpus), degree)]
            assert all(x == tuple(range(x[0], x[0] + degree)) and x[0] % degree == 0 for x in groups)


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
