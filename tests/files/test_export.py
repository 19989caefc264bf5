"""Exports: what each target reads, what it refuses, and torch running an exported schedule."""

from __future__ import annotations

import json
import random
import sys
from collections import OrderedDict
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases.kept import check_kept
from cases.patience import SECONDS
from cases.plans import greedy_pattern
from torch import nn

import pipeplan as pp
from pipeplan.api.plans import Exported, own_export
from pipeplan.check.units import whole_blocks
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.files import frameworks
from pipeplan.files.frameworks import WRITERS, Asked, CannotExpress, notes, parsed_renames
from pipeplan.files.profiles import profile_text, read_profile
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.planner.simulated.other_schedules import program_of, schedule_stages
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.problem.chain import Variant
from pipeplan.runtime.model.network import chain_network
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.runtime.processes.own_processes import context_of
from pipeplan.schedule.simulate import simulate
from pipeplan.version import __version__

GPT = ["embedding", *(f"block{i}" for i in range(8)), "norm", "head"]


def planned(stages, names=GPT, weights="flush", microbatches=6):
    """A plan with these stages (start, stop, devices, *segments) and some valid order."""
    chain = Chain(
        "gpt", tuple(Layer(name, 3, 6, 0 if name == "loss" else 4, 1, backward_weight_ns=3) for name in names), 1
    )
    made = tuple(Stage(start, stop, devices, tuple(segments)) for start, stop, devices, *segments in stages)
    platform = Platform.flat(1 + max(d for stage in made for d in stage.devices), 10**9, 10**9)
    policy = Policy(weights=weights, accumulate=microbatches)
    graph = stage_graph(chain, platform, policy, made)
    pattern, period = None, graph.period_floor_ns
    while pattern is None:
        pattern = greedy_pattern(random.Random(1), graph, period, slack=0)
        period += 1
    schedule = Schedule("flush", microbatches) if weights == "flush" else Schedule()
    return Plan(chain, platform, policy, Allocation(made), pattern, (), Provenance("test"), schedule)


def exported(plan, name, schedule="pattern", microbatches=6, rename=(), path="-", beside=False):
    stages = schedule_stages(plan, schedule)
    run = simulate(program_of(plan, schedule, microbatches))
    asked = Asked(plan, stages, run, parsed_renames(rename), path)
    return WRITERS[name].beside[1](asked) if beside else WRITERS[name].write(asked)


THREE = [(0, 4, (0,)), (4, 8, (1,)), (8, 11, (2,))]
SHARED = [(0, 3, (0,)), (3, 6, (1,)), (6, 9, (0,)), (9, 11, (1,))]


def run_torch(tmp_path: Path, files: list[Path], ranks: int) -> list[list[dict]]:
    """Run the exported modules on one process per rank; the results of each rank, one per module."""
    from cases import torch_csv_worker as worker

    context, where = context_of(), [tmp_path / str(rank) for rank in range(ranks)]
    started = [
        context.Process(target=worker.main, args=(rank, ranks, tmp_path / "store", files, where[rank]), daemon=True)
        for rank in range(ranks)
    ]
    for rank in started:
        rank.start()
    for rank in started:
        rank.join(SECONDS)
        assert rank.exitcode == 0
    return [json.loads(path.read_text()) for path in where]


def test_torch_runs_what_is_exported_and_gets_the_serial_loss_and_gradients(tmp_path):
    """Rank 0 has stages 0 and 3, rank 1 stages 1 and 2, of which stage 2 recomputes: the plan's own pattern, GPipe,
    and split backwards (ZBV); then two stages of ``pipeline()`` under torch's own 1F1B."""
    torch = pytest.importorskip("torch")
    from cases import torch_csv_worker as worker

    vee = [(0, 1, (0,)), (1, 2, (1,)), (2, 3, (1,), (2, 3)), (3, 4, (0,))]
    plan = planned(vee, names=worker.NAMES, microbatches=worker.MICROBATCHES)
    files = []
    for name in ("pattern", "gpipe", "zbv"):
        path = str(tmp_path / f"{name}.csv")
        for ending, beside in ((".csv", False), (".py", True)):
            text = exported(plan, "torch-csv", name, worker.MICROBATCHES, path=path, beside=beside)
            Path(path).with_suffix(ending).write_text(text)
        files.append(Path(path).with_suffix(".py"))
    two = planned([(0, 1, (0,)), (1, 4, (1,))], names=worker.NAMES, microbatches=worker.MICROBATCHES)
    files.append(tmp_path / "split.py")
    files[-1].write_text(exported(two, "torch-split", microbatches=worker.MICROBATCHES))
    found = run_torch(tmp_path, files, 2)

    layers, inputs, targets = worker.model()
    losses = [
        torch.nn.functional.mse_loss(layers(x), y)
        for x, y in zip(inputs.split(worker.BATCH), targets.split(worker.BATCH), strict=True)
    ]
    torch.stack(losses).mean().backward()
    serial = {name: parameter.grad.flatten().tolist() for name, parameter in layers.named_parameters()}
    for first, second in zip(*found, strict=True):
        assert (first["losses"] or second["losses"]) == pytest.approx([loss.item() for loss in losses], rel=1e-6)
        assert not first["gradients"].keys() & second["gradients"].keys()
        gradients = first["gradients"] | second["gradients"]
        assert gradients.keys() == serial.keys()
        for name, expected in serial.items():
            assert gradients[name] == pytest.approx(expected, abs=1e-7)
    for stages, split, ranks in zip(
        (vee, vee, vee, [(0, 1, (0,)), (1, 4, (1,))]), (0, 0, 1, 0), zip(*found, strict=True), strict=True
    ):
        held, each = [rank["held"] for rank in ranks], worker.WIDTH * worker.BATCH * 4
        modelled = held_to_the_end(stages, each, split)
        if split:  # the stage that recomputes frees the gradients of its input, which none else does
            modelled[1] -= each * worker.MICROBATCHES
        assert held == modelled


def held_to_the_end(stages, each, split):
    """What the model of memory says that torch's runtime holds of tensors of ``each`` bytes when a step is over: its
    buffers, without the gradients that are on their way."""
    plan = planned(stages, names=["a", "b", "c", "d"])
    layers = tuple(replace(layer, output_bytes=each) for layer in plan.chain.layers)
    chain, policy = replace(plan.chain, layers=layers, input_bytes=each), replace(plan.policy, engine="torch")
    graph = stage_graph(chain, plan.platform, policy, plan.allocation.stages)
    return [
        sum(
            stage.buffer_bytes + split * stage.split_buffer_bytes - 2 * each * (s > 0)
            for s, stage in enumerate(graph.stages)
            if stage.resource == rank
        )
        for rank in range(2)
    ]


RENAME = [r"block(\d+)=layers.\1,embedding=tok_embeddings", "head=lm_head,(.*)=\\1"]


LOSS = Layer("loss", 3, 6, 0, 1, backward_weight_ns=3)


class PipelineModule:
    """What an exported subclass sees of DeepSpeed's."""

    def __init__(self, layers, num_stages, loss_fn, activation_checkpoint_interval, stage_id=0):
        self._topo = SimpleNamespace(get_dim=lambda axis: num_stages, get_coord=lambda rank: SimpleNamespace(pipe=rank))
        self._num_layers, self.global_rank, self.interval = len(layers), stage_id, activation_checkpoint_interval
        self._partition_layers(method="parameters")

    def _set_bounds(self, start, stop):
        self.bounds = start, stop


def imported(text, monkeypatch):
    """The exported module, with a stand-in for DeepSpeed."""
    pipe = ModuleType("deepspeed.pipe")
    pipe.PipelineModule = PipelineModule
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)
    found = {}
    exec(text, found)
    return found


def test_deepspeed_gets_a_pipeline_module_with_the_stages(monkeypatch):
    plan = planned([(0, 4, (0, 1)), (4, 11, (2, 3))], [*GPT[:-1], "loss"])
    plan = replace(plan, chain=replace(plan.chain, layers=(*plan.chain.layers[:-1], LOSS)))
    module = imported(exported(plan, "deepspeed"), monkeypatch)
    assert module["CONFIG"] == {
        "train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3
    }  # fmt: skip
    made = [module["planned"]([None] * 10, None, stage_id=s) for s in range(2)]
    assert [x.bounds for x in made] == [(0, 4), (4, 10)]  # the loss is none of its layers
    assert (made[0].parts, made[0].interval) == ([0, 4, 10], 0)
    with pytest.raises(ValueError, match="planned for 2 stages of 10 layers; these are 2 of 11"):
        module["planned"]([None] * 11, None)
    pairs = [(0, 2, (0,), (0, 2)), (2, 5, (1,), (2, 4), (4, 5))]
    assert '"activation_checkpoint_interval": 2' in exported(planned(pairs, GPT[:5]), "deepspeed")


class Written(nn.Module):
    """Blocks that begin with an operation, a module that is called twice, and sums written out."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.h = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        x = self.first(x * 2) + 1
        for block in self.h:
            x = x * 3 + block(x)
        return self.head(self.twice(self.twice(x)))


@pytest.mark.parametrize(
    ("model", "beginnings"),
    [
        (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), ["1", "2"]),
        (nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Linear(4, 4))), ["b"]),
        (Written(), ["h.0", "h.1", "head"]),
    ],
)
def test_torch_splits_where_profiles_say_that_modules_begin(model, beginnings):
    from torch.distributed.pipelining import SplitPoint, pipeline  # which takes a second

    x = torch.zeros(2, 4)
    network = trace_module(model, x) if isinstance(model, Written) else chain_network(model, x)
    layers = tuple(Layer(code.name, 1, 1, 4, 4, module=code.path) for code in network.layers)
    chain = Chain("own", layers, 8, None if network.chain else network.edges())
    assert read_profile("own", profile_text(chain)) == chain
    units = whole_blocks(chain)
    own = [name for name, _ in model.named_parameters()]
    for unit, beginning in zip(units[1:], beginnings, strict=True):
        two = planned([(0, unit.start, (0,)), (unit.start, len(chain), (1,))], [x.name for x in layers])
        text = exported(replace(two, chain=chain), "torch-split")
        assert f'SPLIT = ["{beginning}"]' in text
        pipe = pipeline(deepcopy(model), (x,), split_spec={beginning: SplitPoint.BEGINNING})  # which changes it
        held = [[name for name, _ in pipe.get_stage_module(s).named_parameters()] for s in range(pipe.num_stages)]
        assert sorted([*held[0], *held[1]]) == sorted(own)
        assert any(name.startswith(beginning) for name in held[1])


def test_notes_say_what_changes():
    plan = planned(THREE, weights="2bw")
    assert "drains the pipeline before every update" in notes(plan, "deepspeed", plan.allocation.stages)[0]
    assert notes(plan, "torch-csv", plan.allocation.stages) == []
    crossed = planned([(0, 6, (0, 2)), (6, 11, (1, 3))])
    assert notes(crossed, "megatron", crossed.allocation.stages) == [
        "rank i is GPU 0, 2, 1, 3 of the platform, for i from 0 on"
    ]
    fewer = replace(crossed.allocation.stages[0], devices=(0, 1))
    assert notes(crossed, "megatron", [fewer])[1] == "2 ranks; 2 of the 4 GPUs have none"
    other = replace(plan, policy=Policy(weights="flush"))
    assert "2 stages of its own" in notes(other, "deepspeed", plan.allocation.stages[:2])[0]


def test_the_command_writes_a_file_and_refuses_with_the_reason(pipeplan, tmp_path):
    profile = tmp_path / "profile.json"
    from pipeplan.files.profiles import profile_text

    profile.write_text(profile_text(planned(THREE).chain))
    plan, out = tmp_path / "plan.json", tmp_path / "schedule.csv"
    asked = ["--gpus", "2", "--mem", "16GB", "--no-replicas", "--checkpointing", "none", "--algorithm", "balance"]
    code, _, err = pipeplan("plan", str(profile), *asked, "-o", str(plan))
    assert code == 0, err
    code, _, err = pipeplan("export", str(plan), "--to", "torch-csv")
    assert (code, "torch drains the pipeline" in err) == (1, True)
    code, _, err = pipeplan(
        "export", str(plan), "--to", "torch-csv", "--schedule", "1f1b", "--microbatches", "4", "-o", str(out)
    )
    assert (code, out.read_text().splitlines()[0]) == (0, "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3")
    assert "MICROBATCHES = 4" in out.with_suffix(".py").read_text()
    code, text, err = pipeplan("export", str(plan), "--to", "megatron", "--json")
    assert code == 0
    assert "Et*4|t*4L" in json.loads(text)["text"]
    assert "drains the pipeline" in err
    assert pipeplan("export", str(plan), "--to", "torch-csv", "--schedule", "nothing")[0] == 2


def test_torch_recomputes_nothing_of_models_that_it_traces_so_nothing_is_planned_that_no_export_takes():
    """Either its plan stores all, or one sentence says that it doesn't fit."""
    layers = tuple(Layer(f"block{i}", 10, 20, 10, 10, saved_bytes=1000) for i in range(4))
    chain = Chain("own", layers, 10, edges=((0, 1), (0, 2), (1, 2), (2, 3)))
    asked: dict[str, Any] = {"for_": "torch", "gpus": 2, "batch": 4, "bandwidth": "1TB/s"}
    assert not any(x.checkpoint for x in pp.plan(chain, mem="1MB", **asked).plan.allocation.stages)
    with pytest.raises(pp.Infeasible, match="it recomputes nothing of models that it traces"):
        pp.plan(chain, mem="2500B", **asked)
    listed = pp.plan(replace(chain, edges=None), mem="2500B", **asked)
    assert any(x.checkpoint for x in listed.plan.allocation.stages)
    assert isinstance(own_export(listed.plan, "torch"), Exported)


# --- whole files ------------------------------------------------------------------------------------------------------

KEPT = Path(__file__).with_name("exported.txt")


def chained(plan, **fields):
    """The plan of a chain that has some fields otherwise."""
    policy = {x: fields.pop(x) for x in ("zero", "precision") if x in fields}
    return replace(plan, chain=replace(plan.chain, **fields), policy=replace(plan.policy, **policy))


def cases() -> dict[str, tuple[Plan, str, dict[str, Any]]]:
    """Plans, targets, and what else is asked."""
    two, one = [(0, 6, (0, 1)), (6, 11, (2, 3))], [(0, 11, (0,))]
    every = [(0, 6, (0, 1), *((i, i + 1) for i in range(1, 6))), (6, 11, (2, 3), *((i, i + 1) for i in (6, 7, 8)))]
    first = [(0, 4, (0,), (1, 2)), (4, 8, (1,), (4, 5)), (8, 11, (2,), (8, 9))]
    pairs = [(0, 2, (0,), (0, 2)), (2, 5, (1,), (2, 4), (4, 5))]
    vee, halves = [(0, 3, (0,)), (3, 6, (1,)), (6, 9, (1,)), (9, 11, (0,))], [(0, 1, (0,)), (1, 2, (1,))]
    odd = [(0, 3, (0,)), (3, 6, (1,)), (6, 8, (1,)), (8, 9, (0,)), (9, 11, (1,))]
    degrees = {"tensor": 2, "sequence_parallel": True, "experts": 2, "context": 4, "microbatch": 4, "zero": 1}
    mtp = ["embed", "layers.0", "layers.1", "norm", "mtp.0.proj", "mtp.0.block", "mtp.1.block", "output"]
    own = ["tok_embeddings", "layers.0.attention", "layers.0.mlp", "layers.1", "norm", "lm_head", "loss"]
    cast = {"dtype": "autocast-bfloat16", "precision": "autocast"}
    listed, tied = planned([(0, 3, (0,)), (3, 7, (1,))], own), planned(halves, ["a", "b"])
    lossy = planned([(0, 2, (0,)), (2, 3, (1,))], ["a", "b", "loss"])

    def last(plan):  # with a loss that has no weights
        return chained(plan, layers=(*plan.chain.layers[:-1], LOSS))

    def kind(plan, name):
        return replace(plan, schedule=Schedule(name, 6), pattern=None)

    def renamed(*names):
        return {"rename": names}

    one_by_one = tuple((i, i + 1) for i in range(10))
    every_form, torch_forms = " ".join(WRITERS), "torch-split torch-csv"
    return {
        "plain": (planned(THREE), every_form, {}),
        "equal": (planned(every), "torch-csv", {"schedule": "1f1b"}),
        "beside": (planned(every), "torch-csv", {"schedule": "1f1b", "beside": True, "path": "a/b.csv"}),
        "quoted": (chained(planned(THREE), name='a"b\n'), "torch-csv", {"beside": True, "path": "it's.csv"}),
        "blocks": (chained(planned(every), microbatch=2, tied=((0, 10),)), every_form, {}),
        "tied inside": (chained(planned(THREE), tied=((0, 7), (0, 8))), "megatron", {}),
        "within": (chained(planned(two), tied=((0, 7), (1, 10))), "megatron", {}),
        "pairs": (planned(pairs, GPT[:5]), "deepspeed", {}),
        "first": (planned(first), every_form, {}),
        "mixed": (planned([(0, 4, (0,)), (4, 8, (1,), (4, 6)), (8, 11, (2,))]), "megatron deepspeed torch-csv", {}),
        "looped": (planned(SHARED), every_form, {}),
        "a 1f1b": (kind(planned(SHARED), "1f1b"), "torchtitan", {"schedule": "1f1b"}),
        "a loop": (kind(planned(THREE), "interleaved"), "torchtitan", {"schedule": "interleaved"}),
        "a split loop": (kind(planned(SHARED), "interleaved-zb"), "torchtitan", {"schedule": "interleaved-zb"}),
        "vee": (planned(vee), every_form, {}),
        "odd": (planned(odd), every_form.replace("megatron-bridge ", ""), {}),
        "unequal": (planned([(0, 6, (0, 1)), (6, 11, (2,))]), every_form.replace("megatron-bridge ", ""), {}),
        "uneven": (planned([(0, 6, (0, 1, 2, 3)), (6, 11, (4, 5, 6, 7))]), "torch-csv megatron", {}),
        "degrees": (chained(planned(two), **degrees), every_form, {}),
        "heads": (chained(planned(two), context=2, by_heads=True, selective=True), "megatron torchtitan", {}),
        "by heads": (chained(planned(two), context=2, by_heads=True), "torchtitan", {}),
        "whole": (chained(planned(two), tensor=2), "megatron torchtitan", {}),
        "experts": (chained(planned(two), experts=2), "torchtitan", {}),
        "zero 1": (chained(planned(two), zero=1), every_form, {}),
        "zero 2": (chained(planned(two), zero=2), every_form, {}),
        "alone 2": (chained(planned([(0, 11, (0, 1))]), zero=2), "torchtitan torch-split deepspeed", {}),
        "alone": (chained(planned([(0, 11, (0, 1))]), zero=3), every_form, {}),
        "one": (planned(one), every_form, {}),
        "autocast": (chained(planned(one), **cast), every_form, {}),
        "cast": (chained(planned(THREE), **cast), "torchtitan deepspeed", {}),
        "mtp": (planned([(0, 2, (0,)), (2, 7, (1,)), (7, 8, (2,))], mtp), "megatron megatron-bridge", {}),
        "mtp first": (planned([(0, 7, (0,)), (7, 8, (1,))], mtp), "megatron", {}),
        "listed": (last(listed), every_form, {"rename": ()}),
        "unnamed": (planned(THREE), "torchtitan", {"rename": ()}),
        "no norm": (planned(THREE), "torchtitan", renamed(r"block(\d+)=layers.\1,embedding=e,head=h")),
        "dots": (planned(halves, ["conv..relu", "out"]), "torchtitan torch-split", renamed(r"(.*)=\1")),
        "alike": (planned(THREE), "torchtitan", renamed(r"block.*=layers,(.*)=m.\1")),
        "images": (planned([(0, 2, (0,)), (2, 4, (1,))], ["conv", "pool", "flat", "out"]), "megatron", {}),
        "between": (planned([(0, 5, (0,))], ["e", "block0", "pool", "block1", "head"]), "megatron", {}),
        "no start": (planned([(0, 2, (0,))], ["block0", "head"]), "megatron", {}),
        "inside": (planned([(0, 1, (0,)), (1, 4, (1,))], ["tokens", "positions", "block0", "head"]), "megatron", {}),
        "traced": (chained(planned(THREE), edges=one_by_one), "deepspeed torch-split", {}),
        "traced beside": (chained(planned(THREE), edges=one_by_one), "torch-csv", {"beside": True}),
        "traced again": (chained(planned([first[0], (4, 11, (1,))]), edges=one_by_one), "torch-csv", {"beside": True}),
        "ordered": (chained(planned(THREE), edges=one_by_one, order=(1, 0, *range(2, 11))), "torch-split", {}),
        "again": (planned([(0, 1, (0,), (0, 1)), (1, 2, (1,), (1, 2))], ["a", "b"]), torch_forms, {}),
        "calls": (planned(halves, ["b", "b#2"]), "torch-split", {"rename": ()}),
        "called": (planned(halves, ["b", "b#2"]), "torch-split", renamed("b#2=c.d")),
        "tied": (chained(tied, tied=((0, 1),)), torch_forms, {}),
        "the loss": (last(lossy), torch_forms, {"rename": ()}),
        "split": (planned(THREE), "torch-csv", {"schedule": "zb1p"}),
        "split 2": (planned(two), "torch-csv", {"schedule": "zb1p"}),
        "nf1b": (planned(THREE), "torch-csv", {"schedule": "nf1b", "microbatches": 8}),
        "versions": (planned(THREE, weights="2bw"), "torch-csv megatron", {}),
        "drained": (planned(THREE, weights="2bw"), "torch-csv", {"schedule": "1f1b"}),
    }  # fmt: skip


def modules() -> dict[str, Asked]:
    """Plans for two modules of three blocks each, on GPUs of their own in degrees of their own."""
    names = ("images.in", *(f"images.h.{i}" for i in range(3)), *(f"language.h.{i}" for i in range(3)), "language.head")
    layers = tuple(Layer(name, 3, 6, 4, 1) for name in names)
    chain = Chain("both", layers, 1, microbatch=2, variants=tuple(Variant(t, False, layers) for t in (2, 3)))
    run: Any = SimpleNamespace(program=SimpleNamespace(microbatches=6))

    def of(*stages: Stage, zero: Any = 0, rename: tuple[str, ...] = (), **fields: Any) -> Asked:
        plan = Plan(
            replace(chain, **fields), Platform.flat(16, 10**9, 10**9), Policy("flush", accumulate=6, zero=zero),
            Allocation(stages), None, (), Provenance("test"), Schedule("1f1b", 6),
        )  # fmt: skip
        return Asked(plan, stages, run, parsed_renames(rename))

    def again(start: int, stop: int, devices: tuple[int, ...], tensor: int = 1, all_of: int = 1) -> Stage:
        blocks = [i for i in range(start, stop) if 1 <= i <= 6]
        return Stage(start, stop, devices, tuple((i, i + 1) for i in blocks[all_of - 1 :]), tensor)

    images, two, end = Stage(0, 4, (0, 1)), Stage(4, 6, (2, 4), tensor=2), Stage(6, 8, (6, 8), tensor=2)
    text = tuple(replace(x, name=x.name.replace("language", "text")) for x in layers)
    called = {"layers": text, "variants": tuple(Variant(t, False, text) for t in (2, 3))}
    even, odd = Stage(4, 8, (2, 4), tensor=2), (Stage(0, 2, (0, 1)), Stage(2, 4, (2, 3)))
    return {
        "even": of(images, even, zero=1),
        "uneven": of(images, two, end),
        "recomputed": of(again(0, 4, (0, 1)), again(4, 6, (2, 4), 2), again(6, 8, (6, 8), 2)),
        "recomputed in part": of(again(0, 4, (0, 1), 1, 2), even),
        "images alone again": of(again(0, 4, (0, 1)), even),
        "odd images": of(*odd, Stage(4, 8, (4, 6), tensor=2)),
        "other replicas": of(Stage(0, 4, (0,)), two, end),
        "gradients shared": of(images, even, zero=2),
        "not neighbours": of(images, Stage(4, 8, (2, 5), tensor=2)),
        "twice": of(images, Stage(4, 8, (1, 3), tensor=2)),
        "two degrees": of(images, two, Stage(6, 8, (6, 7))),
        "selective": of(images, replace(even, selective=True)),
        "three": of(images, Stage(4, 8, (2, 5), tensor=3)),
        "no blocks": of(images, Stage(4, 7, (2, 4), tensor=2), Stage(7, 8, (6, 8), tensor=2)),
        "across": of(Stage(0, 3, (0, 1)), Stage(3, 8, (2, 3))),
        "text": of(images, even, **called),
        "renamed": of(images, even, rename=("text=language,(.*)=\\1",), **called),
        "unknown": of(images, even, rename=("text=language",), **called),
    }


def written_out() -> str:
    """All texts, each in a line, and refusals; without the lines of modules that are everywhere the same."""
    source = "\n".join(x.read_text() for x in Path(frameworks.__file__).parent.glob("*.py"))
    always, parts = {*source.replace("{{", "{").replace("}}", "}").splitlines()}, []
    for case, (plan, names, words) in cases().items():
        for name in names.split():
            try:
                text = exported(plan, name, **{"rename": RENAME, **words}).replace(__version__, "VERSION")
                parts.append(f"{case}: {name}: " + " | ".join(x for x in text.splitlines() if x not in always))
            except CannotExpress as error:
                parts.append(f"{case}: {name}! {error}")
    for case, asked in modules().items():
        try:
            parts.append(f"{case}: modules: " + WRITERS["megatron-bridge"].write(asked).replace("\n", " | "))
        except CannotExpress as error:
            parts.append(f"{case}: modules! {error}")
    return "\n".join(parts) + "\n"


def test_files_are_what_is_kept():
    check_kept(written_out(), KEPT)
