"""Exports: what each target reads, what it refuses, and torch running an exported schedule."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections import OrderedDict
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases.patience import SECONDS
from cases.plans import greedy_pattern
from torch import nn

import pipeplan as pp
from pipeplan.api.plans import Exported, own_export
from pipeplan.check.units import whole_blocks
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput
from pipeplan.files.frameworks import WRITERS, Asked, CannotExpress, notes, parsed_renames
from pipeplan.files.profiles import profile_text, read_profile
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.planner.simulated.other_schedules import program_of, schedule_stages
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.runtime.model.network import chain_network
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.schedule.simulate import simulate

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


def test_torch_csv_has_a_row_per_rank():
    rows = exported(planned(THREE), "torch-csv", "1f1b", 3).splitlines()
    assert rows == ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1F1,1B0,1F2,1B1,1B2", "2F0,2B0,2F1,2B1,2F2,2B2"]
    assert exported(planned(THREE), "torch-csv", "zb1p", 2).splitlines()[2] == "2F0,2I0,2F1,2I1,2W0,2W1"


def run_torch(tmp_path: Path, files: list[Path], ranks: int) -> list[list[dict]]:
    """Run the exported modules on one process per rank; the results of each rank, one per module."""
    worker = Path(__file__).parents[1] / "cases" / "torch_csv_worker.py"
    started = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(ranks), tmp_path / "store", ",".join(map(str, files)),
             tmp_path / str(rank)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for rank in started:
        _, errors = rank.communicate(timeout=SECONDS)
        assert rank.returncode == 0, errors[-2000:]
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(ranks)]


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


def test_torch_csv_refuses_what_torch_cannot_do():
    with pytest.raises(CannotExpress, match=r"torch drains the pipeline before every update.*keeps weights 2bw"):
        exported(planned(THREE, weights="2bw"), "torch-csv")
    with pytest.raises(CannotExpress, match="equal pipelines side by side; stage 0 of this plan has 2 GPUs, stage 1"):
        exported(planned([(0, 6, (0, 1)), (6, 11, (2,))]), "torch-csv")
    with pytest.raises(CannotExpress, match="6 microbatches cannot be shared evenly by 4 pipelines"):
        exported(planned([(0, 6, (0, 1, 2, 3)), (6, 11, (4, 5, 6, 7))], microbatches=6), "torch-csv")
    alone = planned([(0, 2, (0,)), (2, 3, (1,))], ["a", "b", "loss"])
    with pytest.raises(CannotExpress, match="the last stage is the loss alone"):
        exported(replace(alone, chain=replace(alone.chain, layers=(*alone.chain.layers[:2], LOSS))), "torch-csv")
    plan = planned(THREE)
    with pytest.raises(CannotExpress, match="keeps weights latest"):
        exported(plan, "torch-csv", "nf1b", 8)
    assert exported(planned(THREE, weights="2bw"), "torch-csv", "1f1b").startswith("0F0")


def test_of_equal_pipelines_the_csv_is_that_of_one():
    pair = planned([(0, 6, (0, 1)), (6, 11, (2, 3))])
    rows = exported(pair, "torch-csv", "1f1b", 6).splitlines()
    assert rows == ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]
    module = exported(pair, "torch-csv", "1f1b", 6, path="a/b.csv", beside=True)
    assert "RANKS = [[0], [1]]" in module
    assert "PIPELINES = 2\nMICROBATCHES = 3\n" in module
    assert "with_name('b.csv')" in module


RENAME = [r"block(\d+)=layers.\1,embedding=tok_embeddings", "head=lm_head,(.*)=\\1"]


def flags(text):
    """The flags of a shell command, each with its words."""
    found = {}
    for line in shlex.split(text.replace("\\\n", ""), comments=True):
        if line.startswith("--"):
            name = line[2:]
            found[name] = []
        else:
            found[name].append(line)
    return found


def test_torchtitan_lists_the_modules_of_each_stage():
    found = flags(exported(planned(THREE), "torchtitan", rename=RENAME))
    parts = found["parallelism.module_fqns_per_model_part"]
    assert [part.split(",") for part in parts] == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "layers.6"],
        ["layers.7", "norm", "lm_head"],
    ]
    assert found["parallelism.pipeline_parallel_degree"] == ["3"]
    assert found["parallelism.pipeline_parallel_schedule"] == ["1F1B"]
    assert found["parallelism.num_pp_microbatches"] == ["6"]
    assert found["training.disable_cuda_graphs"] == ["activation_checkpoint:none"]
    looped = flags(exported(planned(SHARED), "torchtitan", rename=RENAME))
    assert looped["parallelism.pipeline_parallel_schedule"] == ["Interleaved1F1B"]
    assert len(looped["parallelism.module_fqns_per_model_part"]) == 4
    for stages, kind, runs in ((SHARED, "1f1b", "Interleaved1F1B"), (THREE, "interleaved", "1F1B")):
        plan = replace(planned(stages), schedule=Schedule(kind, 6), pattern=None)
        found = flags(exported(plan, "torchtitan", kind, rename=RENAME))
        assert found["parallelism.pipeline_parallel_schedule"] == [runs]
    doubled = flags(exported(planned([(0, 6, (0, 1)), (6, 11, (2, 3))]), "torchtitan", rename=RENAME))
    assert doubled["parallelism.data_parallel_replicate_degree"] == ["2"]
    assert doubled["parallelism.num_pp_microbatches"] == ["3"]
    own = ["tok_embeddings", "layers.0.attention", "layers.0.mlp", "layers.1", "norm", "lm_head", "loss"]
    traced = planned([(0, 3, (0,)), (3, 7, (1,))], own)
    traced = replace(traced, chain=replace(traced.chain, layers=(*traced.chain.layers[:-1], LOSS)))
    assert flags(exported(traced, "torchtitan"))["parallelism.module_fqns_per_model_part"] == [
        "tok_embeddings,layers.0", "layers.1,norm,lm_head"
    ]  # fmt: skip


def test_torchtitan_refuses_names_that_nobody_vouches_for():
    with pytest.raises(CannotExpress, match="layer 'embedding' isn't a module of its decoders; say the model's own"):
        exported(planned(THREE), "torchtitan")
    with pytest.raises(CannotExpress, match="--rename has no pattern for layer 'norm'"):
        exported(planned(THREE), "torchtitan", rename=[r"block(\d+)=layers.\1,embedding=e,head=h"])
    with pytest.raises(CannotExpress, match=r"'conv\.\.relu' isn't the name of a module or of an entry"):
        exported(planned([(0, 1, (0,)), (1, 2, (1,))], ["conv..relu", "out"]), "torchtitan", rename=[r"(.*)=\1"])
    with pytest.raises(CannotExpress, match="module 'layers' would be in stages 0 and 1"):
        exported(planned(THREE), "torchtitan", rename=["block.*=layers,(.*)=m.\\1"])
    for text in ("block", "=x", "(=x", r"a=\1"):
        with pytest.raises(BadInput, match="--rename: "):
            parsed_renames([text])


def parsed_layout(layout: str) -> list[str]:
    """Megatron's reading of a layout, re-stated from its documentation."""
    layout = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    return layout.split("|")


LOSS = Layer("loss", 3, 6, 0, 1, backward_weight_ns=3)


def test_megatron_layout():
    found = flags(exported(planned(THREE), "megatron"))
    assert found == {
        "num-layers": ["8"],
        "pipeline-model-parallel-size": ["3"],
        "pipeline-model-parallel-layout": ["Et*3|t*4|tL"],
        "micro-batch-size": ["1"],
        "global-batch-size": ["6"],
        "untie-embeddings-and-output-weights": [],
    }
    assert parsed_layout(found["pipeline-model-parallel-layout"][0]) == ["Ettt", "tttt", "tL"]
    looped = planned([(0, 3, (0,)), (3, 6, (1,)), (6, 9, (0,)), (9, 11, (1,))])
    assert flags(exported(looped, "megatron"))["pipeline-model-parallel-layout"] == ["Ett|t*3|t*3|L"]
    names = ["embed", *(f"model.layers.{i}" for i in range(4)), "output"]
    two = planned([(0, 3, (0, 1), (1, 2), (2, 3)), (3, 6, (2, 3), (3, 4), (4, 5))], names)
    text = exported(two, "megatron")
    assert '"Ett|ttL"' in text
    assert text.startswith("# 4 GPUs: data-parallel size 2\n")
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in text
    block = planned([(0, 3, (0,), (1, 2)), (3, 6, (1,), (3, 4))], names)
    assert "--recompute-method block --recompute-num-layers 1" in exported(block, "megatron")


def test_megatron_bridge_gets_the_same_as_python():
    cfg = SimpleNamespace(model=SimpleNamespace(), train=SimpleNamespace())
    exec(exported(planned(THREE), "megatron-bridge"), {"cfg": cfg})
    assert cfg.model.pipeline_model_parallel_layout == [
        ["embedding", "decoder", "decoder", "decoder"], ["decoder"] * 4, ["decoder", "loss"]
    ]  # fmt: skip
    assert (cfg.model.num_layers, cfg.model.virtual_pipeline_model_parallel_size) == (8, None)
    assert (cfg.train.micro_batch_size, cfg.train.global_batch_size) == (1, 6)


def test_megatron_has_multi_token_prediction_in_the_last_stage_of_a_later_rank():
    names = ["embed", "layers.0", "layers.1", "norm", "mtp.0.proj", "mtp.0.block", "mtp.1.block", "output"]
    found = flags(exported(planned([(0, 2, (0,)), (2, 7, (1,)), (7, 8, (2,))], names), "megatron"))
    assert found["pipeline-model-parallel-layout"] == ["Et|tmm|L"]
    assert found["mtp-num-layers"] == ["2"]
    with pytest.raises(CannotExpress, match="multi-token prediction are in stage 0; they must be in the last stage"):
        exported(planned([(0, 7, (0,)), (7, 8, (1,))], names), "megatron")


def test_megatron_refuses_other_models_and_cuts():
    with pytest.raises(CannotExpress, match="no layer of gpt is named as a decoder layer"):
        exported(planned([(0, 2, (0,)), (2, 4, (1,))], ["conv", "pool", "flat", "out"]), "megatron")
    with pytest.raises(CannotExpress, match=r"layer 2 \(pool\) between the decoder layers"):
        exported(planned([(0, 5, (0,))], ["e", "block0", "pool", "block1", "head"]), "megatron")
    with pytest.raises(CannotExpress, match="starts with the embedding"):
        exported(planned([(0, 2, (0,))], ["block0", "head"]), "megatron")
    with pytest.raises(CannotExpress, match=r"stage 0 ends inside of layers 0 to 1 \(tokens to positions\)"):
        exported(planned([(0, 1, (0,)), (1, 4, (1,))], ["tokens", "positions", "block0", "head"]), "megatron")


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


def test_deepspeed_refuses_several_stages_per_rank_and_traced_profiles():
    with pytest.raises(CannotExpress, match=r"GPU 0 holds stages \[0, 2\]; there a rank holds one range"):
        exported(planned(SHARED), "deepspeed")
    plan = planned(THREE)
    traced = replace(plan, chain=replace(plan.chain, edges=tuple((i, i + 1) for i in range(10))))
    with pytest.raises(CannotExpress, match="the profile was traced and isn't a list of layers"):
        exported(traced, "deepspeed")


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "deepspeed", "torch-split"])
def test_split_targets_refuse_placements_and_partial_recomputation(name):
    odd = [(0, 3, (0,)), (3, 6, (1,)), (6, 8, (1,)), (8, 9, (0,)), (9, 11, (1,))]
    with pytest.raises(CannotExpress, match=r"stages are on ranks \[0, 1, 1, 0, 1\]"):
        exported(planned(odd), name)
    vee = planned([(0, 3, (0,)), (3, 6, (1,)), (6, 9, (1,)), (9, 11, (0,))])
    if name == "torch-split":
        assert "ScheduleZBVZeroBubble(stages" in exported(vee, name)
    elif name != "torchtitan":
        with pytest.raises(CannotExpress, match=r"stages are on ranks \[0, 1, 1, 0\]"):
            exported(vee, name)
    mixed = [(0, 4, (0,)), (4, 8, (1,), (4, 6)), (8, 11, (2,))]
    with pytest.raises(CannotExpress, match="stage 1 recomputes layers 4 to 5; there all stages recompute nothing or"):
        exported(planned(mixed), name)
    with pytest.raises(CannotExpress, match="replicas"):
        exported(planned([(0, 6, (0, 1)), (6, 11, (2,))]), name)


def test_pipeline_of_torch_recomputes_nothing_and_splits_at_modules():
    each = [(0, 1, (0,), (0, 1)), (1, 2, (1,), (1, 2))]
    with pytest.raises(CannotExpress, match=r"pipeline\(\) traces the model, and nothing there recomputes"):
        exported(planned(each, ["a", "b"]), "torch-split")
    with pytest.raises(CannotExpress, match="a stage begins with 'b#2', where no module of the model does"):
        exported(planned([(0, 1, (0,)), (1, 2, (1,))], ["b", "b#2"]), "torch-split")
    text = exported(planned([(0, 1, (0,)), (1, 2, (1,))], ["b", "b#2"]), "torch-split", rename=["b#2=c.d"])
    assert 'SPLIT = ["c.d"]' in text
    tied = planned([(0, 1, (0,)), (1, 2, (1,))], ["a", "b"])
    with pytest.raises(CannotExpress, match="layers 0 and 1 share weights and are in two stages"):
        exported(replace(tied, chain=replace(tied.chain, tied=((0, 1),))), "torch-csv")


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


def test_autocast_is_said_where_the_target_has_a_word_for_it():
    def cast(plan):
        chain = replace(plan.chain, dtype="autocast-bfloat16")
        return replace(plan, chain=chain, policy=replace(plan.policy, precision="autocast"))

    assert '"torch_autocast": {"enabled": True, "dtype": "bfloat16"},' in exported(cast(planned(THREE)), "deepspeed")
    assert "autocast" not in exported(planned(THREE), "deepspeed")
    with pytest.raises(CannotExpress, match="torchtitan: casts nothing in pipelines"):
        exported(cast(planned(THREE)), "torchtitan", rename=[r"(.*)=\1"])
    one = cast(planned([(0, 11, (0,))]))
    assert "--training.mixed_precision_param bfloat16" in exported(one, "torchtitan", rename=[r"(.*)=\1"])
    blocks = ["embedding", *(f"block{i}" for i in range(8)), "norm", "loss"]
    made = exported(cast(planned(THREE, blocks)), "megatron-bridge")
    assert "cfg.model.enable_autocast = True\ncfg.model.autocast_dtype = torch.bfloat16" in made


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


def shared(zero, stages):
    plan = planned(stages)
    return replace(plan, policy=replace(plan.policy, zero=zero))


def test_what_replicas_share_is_said(monkeypatch):
    one, two = [(0, 11, (0, 1))], [(0, 6, (0, 1)), (6, 11, (2, 3))]
    for zero, stages, reshards in ((1, two, "never"), (2, one, "never"), (3, one, "always")):
        found = flags(exported(shared(zero, stages), "torchtitan", rename=RENAME))
        assert found["parallelism.data_parallel_replicate_degree"] == ["1"]
        assert found["parallelism.data_parallel_shard_degree"] == ["2"]
        assert found["parallelism.fsdp_reshard_after_forward"] == [reshards]
        config = imported(exported(shared(zero, stages), "deepspeed"), monkeypatch)["CONFIG"]
        assert config["zero_optimization"] == {"stage": zero}
    assert "PipelineModule" not in exported(shared(3, one), "deepspeed")
    for zero, strategy in ((2, "optim_grads"), (3, "optim_grads_params")):
        found = flags(exported(shared(zero, two), "megatron"))
        assert found["data-parallel-sharding-strategy"] == [strategy]
        assert found["ckpt-format"] == ["fsdp_dtensor"]
        assert {"use-megatron-fsdp", "use-distributed-optimizer"} <= set(found)
        made = exported(shared(zero, two), "megatron-bridge")
        assert f'cfg.ddp.data_parallel_sharding_strategy = "{strategy}"' in made
        assert 'cfg.checkpoint.ckpt_format = "fsdp_dtensor"' in made
        assert "cfg.ddp.use_megatron_fsdp = True" in made
        assert "cfg.dist.use_megatron_fsdp = True" in made
        for name in ("torchtitan", "deepspeed"):
            what = "weights" if zero == 3 else "gradients"
            with pytest.raises(CannotExpress, match=f"{name}: replicas share no {what} beside pipelines there"):
                exported(shared(zero, two), name, rename=RENAME)
        with pytest.raises(CannotExpress, match=rf"torch: replicas share no {what} there \(--zero {zero}\)"):
            exported(shared(zero, one), "torch-split")
    assert "use-distributed-optimizer" in flags(exported(shared(1, two), "megatron"))
