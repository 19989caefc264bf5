"""Modules that each have a tensor degree of their own, on GPUs of their own: planned, and said to Megatron-Bridge."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

import pipeplan as pp
from pipeplan.api.plans import exported
from pipeplan.check.units import CannotExpress
from pipeplan.errors import Infeasible
from pipeplan.problem import Chain, Layer, Variant

MS = 10**6
WORDS = {"gpus": 4, "mem": "100MB", "bandwidth": "10GB/s", "batch": 16, "reserve": None}


def two_modules(second="language"):
    """An encoder of two blocks, and a decoder whose block fits on two GPUs together alone; its embedding reads what the
    data give, not what the encoder makes."""
    encoder = [Layer("images.patches", 2 * MS, 4 * MS, MS, MS, MS, module="images")]
    encoder += [Layer(f"images.blocks.{i}", 10 * MS, 20 * MS, 4 * MS, MS, MS) for i in range(2)]
    decoder = [Layer(f"{second}.embedding", 2 * MS, 4 * MS, MS, MS, MS)]
    decoder += [Layer(f"{second}.blocks.0", 60 * MS, 120 * MS, 60 * MS, MS, 2 * MS)]
    decoder += [Layer(f"{second}.head", 4 * MS, 8 * MS, MS, MS, MS), Layer("loss", MS, MS, 0, 4)]
    layers = (*encoder, *decoder)
    edges = (*((i, i + 1) for i in range(len(layers) - 1) if i != 2), (2, 4))

    def part(layer, width):
        extra = (30 if layer.name.startswith("images") else 2) * MS
        times = {x: getattr(layer, x) // width + extra for x in ("forward_ns", "backward_ns")}
        return replace(layer, **times, weight_bytes=layer.weight_bytes // width)

    variants = tuple(Variant(w, False, tuple(part(x, w) for x in layers)) for w in (2, 4))
    return Chain("towers", layers, MS, edges=edges, variants=variants)


def one_module():
    """The same layers under other names."""

    def called(layers):
        return tuple(replace(x, name=f"layers.{i}") for i, x in enumerate(layers))

    whole = two_modules()
    variants = tuple(replace(x, layers=called(x.layers)) for x in whole.variants)
    return replace(whole, layers=called(whole.layers), variants=variants)


@pytest.fixture(scope="module")
def found():
    return pp.plan(two_modules(), tensor="each", for_="megatron", **WORDS)


def test_modules_of_own_degrees_beat_one_degree_for_all(found):
    assert found.bound_ns <= found.period_ns
    stages = found.plan.allocation.stages
    assert [x.tensor for x in stages if x.start >= 3] == [2]
    assert {x.tensor for x in stages if x.stop <= 3} == {1}
    assert 3 in {x.stop for x in stages}
    alike = pp.plan(two_modules(), tensor="any", weights="flush", **WORDS)
    assert found.period_ns < alike.period_ns


def test_megatron_bridge_gets_the_degrees_of_each_module(found, monkeypatch):
    name = "megatron.bridge.models.megatron_mimo.megatron_mimo_config"
    for i in range(1, name.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:i]), ModuleType("m"))
    stub = sys.modules[name]
    stub.ModuleParallelismConfig = stub.MegatronMIMOParallelismConfig = SimpleNamespace
    cfg = SimpleNamespace(train=SimpleNamespace(), ddp=SimpleNamespace())
    made = {"cfg": cfg}
    exec(found.export("megatron-bridge"), made)
    taken = []
    for module, (start, stop) in {"images": (0, 3), "language": (3, 7)}.items():
        own = [x for x in found.plan.allocation.stages if start <= x.start < stop]
        said = made["parallelism"].module_parallelisms[module]
        assert said.tensor_model_parallel_size == own[0].tensor
        assert said.pipeline_model_parallel_size == len(own)
        assert said.data_parallel_size == own[0].replicas
        count = said.tensor_model_parallel_size * said.pipeline_model_parallel_size * said.data_parallel_size
        taken += range(said.rank_offset, said.rank_offset + count)
        assert [d for x in own for d in x.members] == taken[-count:]
    assert len(set(taken)) == len(taken) <= 4
    assert cfg.train.global_batch_size == 16
    with pytest.raises(CannotExpress, match="of several modules export --to megatron-bridge"):
        found.export("megatron")


def test_what_it_has_no_words_for_is_refused():
    called = pp.plan(two_modules("text"), tensor="each", for_="megatron", **WORDS)
    with pytest.raises(CannotExpress, match="no module is called language"):
        called.export("megatron-bridge")
    assert '"language"' in called.export("megatron-bridge", rename=["text=language", "images=images"])
    stages = tuple(
        replace(x, start=x.start - (x.start == 3), stop=x.stop - (x.stop == 3)) for x in called.plan.allocation.stages
    )
    mixed = replace(called.plan, allocation=replace(called.plan.allocation, stages=stages))
    with pytest.raises(CannotExpress, match="has layers of several modules"):
        exported(mixed, "megatron-bridge")
    with pytest.raises(Infeasible, match="are those of one module"):
        pp.plan(one_module(), tensor="each", for_="megatron", **WORDS)
    with pytest.raises(Infeasible, match="no degrees of the modules fit"):
        pp.plan(two_modules(), tensor="each", for_="megatron", **WORDS | {"mem": "20MB"})
