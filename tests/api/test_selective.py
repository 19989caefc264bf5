"""Selective recomputation: what a block keeps and takes whose attention's core runs again, and plans of such."""

import json
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from oracles.partition import contiguous_optimum

import pipeplan as pp
from pipeplan import zoo
from pipeplan.api.given.problems import problem_of
from pipeplan.api.given.tensor import parts
from pipeplan.check.targets import express
from pipeplan.check.units import CannotExpress
from pipeplan.errors import BadInput, InvalidPlan, PipeplanError
from pipeplan.files.frameworks import READERS, Source, read_options
from pipeplan.files.profile_rules import check_variants
from pipeplan.files.profiles import read_profile
from pipeplan.problem import Chain, Device, Layer, LayerTimes, Level, Platform, Variant

HIDDEN, HEADS, SEQUENCE, BATCH = 1024, 16, 512, 2
GPT = "zoo:gpt2-medium,blocks=2,sequence=512,attention=unfused,dropout=0.1"
WHERE = {"gpus": "2x4", "gpu": "a100", "network": "25GB/s", "batch": 16, "weights": "flush"}


def estimated(options="", **more):
    return pp.profile(GPT + options, gpu="a100", microbatch=BATCH, dtype="bfloat16", optimizer="adam", **more)


@pytest.fixture(scope="module")
def profiled():
    return estimated(selective=True)


@pytest.mark.parametrize(("tensor", "parted"), [(2, False), (4, True)])
def test_a_selective_block_keeps_what_korthikanti_counts(tensor, parted):
    """Reducing Activation Recomputation, Table 2: 34 sbh / t in parts along the sequence, 10 sbh + 24 sbh / t else."""
    options = f",tensor={tensor}" + (",sequence_parallel=true" if parted else "")
    one = GPT.replace("unfused", "again").replace("blocks=2", "blocks=1")
    found = pp.profile(one + options, gpu="a100", microbatch=BATCH, dtype="bfloat16").layers[1]
    wanted = 34 / tensor if parted else 10 + 24 / tensor
    assert found.saved_bytes == pytest.approx(wanted * SEQUENCE * BATCH * HIDDEN, rel=2e-3)


def test_its_backward_takes_the_core_of_its_forward_more(profiled):
    plain, again = (x.chain.layers[2] for x in parts(profiled, {}))
    assert again.forward_ns == pytest.approx(plain.forward_ns, rel=0.01)
    assert 1.02 * plain.backward_ns < again.backward_ns < plain.backward_ns + plain.forward_ns
    assert [x.chain.variant for x in parts(profiled, {})] == ["1", "1 selective"]
    assert [x.chain.variant for x in parts(profiled, {}, False)] == ["1"]


def test_gradients_are_the_same():
    torch.manual_seed(0)
    sizes = "gpt-tiny,blocks=2,dropout=0.3,attention="
    found = []
    for how in ("unfused", "again"):
        model = zoo.load(sizes + how)
        layers, _, loss, *_ = model(2)
        layers.train()
        data, target = model.data(2)(0, 0)
        torch.manual_seed(1)
        loss(layers(data), target).backward()
        found.append([x.grad for x in layers.parameters()])
    assert all(map(torch.equal, *found))


def test_plans_run_cores_again_where_that_is_best(profiled, tmp_path, capsys):
    """The best is the best of both, at every memory; where there is little of it it is the selective one."""
    seen = set()
    for mem in ("1GB", "40GB"):
        where = {"gpus": 4, "mem": mem, "bandwidth": "300GB/s", "batch": 16, "weights": "flush", "optimizer": "sgd"}
        where["effort"] = "quick"
        periods = {x.chain.variant: pp.plan(x, **where).period_ns for x in parts(profiled, {})}
        found = pp.plan(profiled, **where)
        assert found.period_ns == min(periods.values()) == periods[found.plan.chain.variant]
        seen.add(found.plan.chain.selective)
        if found.plan.chain.selective:
            path = tmp_path / "plan.json"
            found.save(path)
            assert pp.read_plan(path).plan.chain.selective
            found.show()
            assert "attention's core again in backwards" in capsys.readouterr().out
            with pytest.raises(CannotExpress, match="torchtitan: attention's core runs again in backwards"):
                express(found.plan.chain, found.plan.allocation.stages, "torchtitan")
    assert seen == {False, True}
    none = pp.plan(profiled, **{**WHERE, "checkpointing": "none", "effort": "quick"})
    assert "selective" not in json.dumps(none.plan.provenance.options)


def test_megatron_says_it_and_is_read(profiled, tmp_path, pipeplan):
    (again,) = parts(profiled, {"tensor": 1}, True)
    found = pp.plan(again, **{**WHERE, "gpus": 4, "network": None}, for_="megatron", effort="quick")
    assert all(not stage.checkpoint for stage in found.plan.allocation.stages)
    text = found.export("megatron")
    assert "--recompute-granularity selective" in text
    script = tmp_path / "run.sh"
    script.write_text(text)
    said = read_options(str(script))
    assert READERS["megatron"].selective(said)
    read = READERS["megatron"](Source(said, again.chain, 4))
    assert read.stages == found.plan.allocation.stages
    assert read.notes == ()
    (plain,) = parts(profiled, {"tensor": 1}, False)
    assert "judged as none" in READERS["megatron"](Source(said, plain.chain, 4)).notes[0]
    profile = tmp_path / "profile.json"
    profiled.save(profile)
    assert [x.selective for x in read_profile(str(profile)).variants] == [True]
    best = tmp_path / "today.json"
    said = "import", profile, script, "--from", "megatron", "--gpus", 4, "--gpu", "a100", "-o", best
    pipeplan(*map(str, said), "--effort", "quick")
    assert pp.read_plan(best).plan.chain.selective


def test_of_gpus_with_times_of_their_own_nothing_is_known_of_variants():
    chain = tiny(9)
    own = [LayerTimes(name, *(tuple(k * getattr(x, f"{y}_ns") for x in chain.layers) for y in ("forward", "backward")),
                      *[(0,) * 3] * 2) for k, name in enumerate("ab", 1)]  # fmt: skip
    where = Platform(tuple(Device(10**6, times=x) for x in own), (Level(2, 10**12),))
    for part in parts(pp.Profile(chain), {}):
        if not part.chain.selective:
            assert pp.plan(part, platform=where, algorithm="contiguous").plan.chain.variant == "1"
            continue
        with pytest.raises(BadInput, match="own, which aren't known of layers in variant 1 selective"):
            pp.plan(part, platform=where)


def test_what_is_no_such_model_is_refused(profiled):
    with pytest.raises(BadInput, match="selective: goes with a zoo's GPT that says attention=unfused"):
        pp.profile("zoo:llama3-8b,blocks=2", gpu="a100", microbatch=1, selective=True)
    with pytest.raises(BadInput, match="selective: parts of layers are estimated"):
        pp.profile(torch.nn.Linear(2, 2), torch.zeros(1, 2), torch.nn.functional.mse_loss, selective=True)
    twice = replace(profiled.chain, variants=profiled.chain.variants * 2)
    with pytest.raises(BadInput, match="is a second time"):
        check_variants(twice, "p.json")


def tiny(seed):
    """Three layers that keep much, and the same at a part of that whose backwards take longer, in a chain or a DAG."""
    draw = Random(seed)
    working = {"working_bytes": draw.choice((0, 300))}
    plain = tuple(
        Layer(f"l{i}", *(draw.randint(x, 10 * x) for x in (4, 8)), 300, 10, 100 * draw.randint(4, 20), **working)
        for i in range(3)
    )
    again = tuple(
        replace(x, saved_bytes=x.saved_bytes // 4, backward_ns=x.backward_ns + x.forward_ns // draw.randint(2, 4),
                forward_ns=x.forward_ns + draw.randint(-2, 2), optimizer_ns=draw.randint(0, 9))
        for x in plain
    )  # fmt: skip
    edges = draw.choice((None, ((0, 1), (0, 2), (1, 2))))
    return Chain("tiny", plain, 10, edges=edges, variants=(Variant(1, False, again, selective=True),))


def asked(seed):
    """Return what plans of :func:`tiny` networks are asked for."""
    where = Platform((Device(Random(seed).choice((2000, 3000, 4000, 5000))),) * 2, (Level(2, 10**12),))
    words = {"platform": where, "weights": "2bw", "accumulate": 8, "checkpointing": "segments", "reserve": None}
    return words | {"no_replicas": True}  # so that no update waits for sums


@pytest.mark.parametrize("seed", range(10))
def test_plans_are_as_good_as_all_plans_in_which_any_layers_run_cores_again(seed):
    chain, words, possible = tiny(seed), asked(seed), []
    for layers in product(*zip(*(x.layers for x in chain.choices), strict=True)):
        problem = problem_of(pp.Profile(replace(chain, layers=layers, variants=())), **words)[0]
        found = contiguous_optimum(problem)
        possible += [] if found is None else [found[0]]
    if not possible:
        with pytest.raises(PipeplanError):
            pp.plan(chain, algorithm="contiguous", **words)
        return
    found = pp.plan(chain, algorithm="contiguous", **words)
    assert found.period_ns == min(possible)
    assert found.plan.provenance.options["tensor"]["1 by layer"]["bound_ns"] <= min(possible)


def test_layers_are_named_whose_cores_run_again(tmp_path, capsys):
    found = pp.plan(tiny(9), algorithm="contiguous", **asked(9))
    assert [x.selective for x in found.plan.allocation.stages] == [((1, 2),), ()]
    found.save(tmp_path / "plan.json")
    pp.read_plan(tmp_path / "plan.json").show()
    assert "(selective recomputation) in layers 1-1 of stage 0" in capsys.readouterr().out
    with pytest.raises(CannotExpress, match="each stage has activations in a way of its own"):
        express(found.plan.chain, found.plan.allocation.stages, "megatron")
    for old, new, words in (
        (
            "[[1,2]]",
            "[[2,3]]",
            "stage 0 runs the cores again of layers [2, 3), which is empty, out of order or outside",
        ),
        ('"checkpoint":null,"selective"', '"checkpoint":[[0,2]],"selective"', "recomputes layers [0, 2), and runs the"),
    ):
        text = json.dumps(json.loads((tmp_path / "plan.json").read_text()), separators=(",", ":"))
        (tmp_path / "edited.json").write_text(text.replace(old, new))
        with pytest.raises(InvalidPlan) as raised:
            pp.read_plan(tmp_path / "edited.json")
        assert words in str(raised.value)
