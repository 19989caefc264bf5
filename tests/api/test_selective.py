"""Selective recomputation: what a block keeps and takes whose attention's core runs again, and plans of such."""

import json
from dataclasses import replace
from random import Random

import pytest
import torch
from oracles.partition import contiguous_optimum

import pipeplan as pp
from pipeplan import zoo
from pipeplan.api.problems import problem_of
from pipeplan.api.tensor import parts
from pipeplan.check.bounds import any_bound
from pipeplan.check.targets import express
from pipeplan.check.units import CannotExpress
from pipeplan.errors import BadInput, PipeplanError
from pipeplan.files.frameworks import READERS, Source, read_options
from pipeplan.files.profile_rules import check_variants
from pipeplan.files.profiles import read_profile
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Variant

HIDDEN, HEADS, SEQUENCE, BATCH = 1024, 16, 512, 2
GPT = "zoo:gpt2-medium,blocks=2,sequence=512,attention=unfused,dropout=0.1"
WHERE = {"gpus": "2x4", "gpu": "a100", "network": "25GB/s", "batch": 16, "weights": "flush"}


def estimated(options="", **more):
    model = GPT.replace("unfused", more.pop("attention", "unfused")) + options
    return pp.profile(model, gpu="a100", microbatch=BATCH, dtype="bfloat16", optimizer="adam", **more)


@pytest.fixture(scope="module")
def profiled():
    return estimated(selective=True)


@pytest.mark.parametrize(("tensor", "parted"), [(1, False), (2, False), (4, True)])
def test_a_selective_block_keeps_what_korthikanti_counts(tensor, parted):
    """Reducing Activation Recomputation, Table 2: 34 sbh / t in parts along the sequence, 10 sbh + 24 sbh / t else."""
    options = f",tensor={tensor}" + (",sequence_parallel=true" if parted else "")
    found = estimated(options, attention="again").layers[2]
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
    for mem in ("600MB", "40GB"):
        where = {**WHERE, "gpu": None, "mem": mem, "bandwidth": "300GB/s", "effort": "quick", "optimizer": "sgd"}
        periods = {}
        for part in parts(profiled, {}):
            try:
                periods[part.chain.variant] = pp.plan(part, **where).period_ns
            except PipeplanError:
                continue
        if not periods:
            continue
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
    assert False in seen
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


def test_what_is_no_such_model_is_refused(profiled):
    with pytest.raises(BadInput, match="selective: goes with a zoo's GPT that says attention=unfused"):
        pp.profile("zoo:llama3-8b,blocks=2", gpu="a100", microbatch=1, selective=True)
    with pytest.raises(BadInput, match="selective: parts of layers are estimated"):
        pp.profile(torch.nn.Linear(2, 2), torch.zeros(1, 2), torch.nn.functional.mse_loss, selective=True)
    twice = replace(profiled.chain, variants=profiled.chain.variants * 2)
    with pytest.raises(BadInput, match="is a second time"):
        check_variants(twice, "p.json")


def tiny(seed):
    """Four layers that keep much, and the same at a part of that whose backwards take longer."""
    draw = Random(seed)
    plain = tuple(
        Layer(
            f"l{i}", draw.randint(4, 40), draw.randint(8, 80), 100 * draw.randint(1, 4), 10, 100 * draw.randint(4, 20)
        )
        for i in range(4)
    )
    again = tuple(
        replace(x, saved_bytes=x.saved_bytes // 4, backward_ns=x.backward_ns + x.forward_ns // draw.randint(2, 4))
        for x in plain
    )
    return Chain("tiny", plain, 10, variants=(Variant(1, False, again, selective=True),))


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_as_good_as_all_plans_of_both(seed):
    memory = Random(seed).choice((3000, 5000, 9000))
    where = Platform((Device(memory),) * 3, (Level(3, 10**12),))
    words = {"platform": where, "weights": "2bw", "accumulate": 8, "checkpointing": "stages", "reserve": None}
    words |= {"no_replicas": True}  # so that no update waits for sums
    least = {}
    for part in parts(pp.Profile(tiny(seed)), {}):
        problem = problem_of(part, **words)[0]
        found = contiguous_optimum(problem)
        least[part.chain.variant] = None if found is None else found[0]
        assert found is None or any_bound(problem).period_ns <= found[0]
    possible = [x for x in least.values() if x is not None]
    if not possible:
        with pytest.raises(PipeplanError):
            pp.plan(tiny(seed), algorithm="contiguous", **words)
        return
    found = pp.plan(tiny(seed), algorithm="contiguous", **words)
    assert found.period_ns == min(possible) == least[found.plan.chain.variant]
    for variant, told in found.plan.provenance.options["tensor"].items():
        assert told["bound_ns"] is None or least[variant] is None or told["bound_ns"] <= least[variant]
