"""Exports: what each target reads, what it refuses, and torch running an exported schedule."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cases.patience import SECONDS
from cases.plans import greedy_pattern

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.files.export import TARGETS, CannotExpress, notes
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.planner.other_schedules import program_of, schedule_stages
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.simulate import simulate

GPT = ["embedding", *(f"block{i}" for i in range(8)), "norm", "head"]


def planned(stages, names=GPT, weights="flush", microbatches=6):
    """A plan with these stages (start, stop, devices, *segments) and some valid order."""
    chain = Chain("gpt", tuple(Layer(name, 3, 6, 4, 1, backward_weight_ns=3) for name in names), 1)
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


def exported(plan, target, schedule="pattern", microbatches=6):
    stages = schedule_stages(plan, schedule)
    return TARGETS[target].export(plan, stages, simulate(program_of(plan, schedule, microbatches)))


THREE = [(0, 4, (0,)), (4, 8, (1,)), (8, 11, (2,))]
SHARED = [(0, 3, (0,)), (3, 6, (1,)), (6, 9, (0,)), (9, 11, (1,))]


def test_torch_csv_has_a_row_per_rank():
    rows = exported(planned(THREE), "torch-csv", "1f1b", 3).splitlines()
    assert rows == [
        "0F0,0F1,0F2,0B0,0B1,0B2",
        "1F0,1F1,1B0,1F2,1B1,1B2",
        "2F0,2B0,2F1,2B1,2F2,2B2",
    ]
    assert exported(planned(THREE), "torch-csv", "zb1p", 2).splitlines()[2] == "2F0,2I0,2F1,2I1,2W0,2W1"


def run_torch(tmp_path: Path, csvs: list[str], held: list[str]) -> list[list[dict]]:
    """Run the schedules on one process per rank; the results of each rank, one per schedule."""
    paths = []
    for i, csv in enumerate(csvs):
        paths.append(tmp_path / f"{i}.csv")
        paths[-1].write_text(csv)
    worker = Path(__file__).parents[1] / "cases" / "torch_csv_worker.py"
    names = ",".join(map(str, paths))
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                worker,
                str(rank),
                str(len(held)),
                tmp_path / "store",
                names,
                stages,
                tmp_path / str(rank),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, stages in enumerate(held)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=SECONDS)
        assert rank.returncode == 0, errors[-2000:]
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(len(held))]


def test_torch_runs_the_csvs_of_a_non_contiguous_plan_and_gets_the_serial_loss(tmp_path):
    """Rank 0 has stages 0 and 3, rank 1 stages 1 and 2; the plan's own pattern, GPipe, and split backwards (ZBV)."""
    torch = pytest.importorskip("torch")
    from cases import torch_csv_worker as worker

    vee = [(0, 1, (0,)), (1, 2, (1,)), (2, 3, (1,)), (3, 4, (0,))]
    plan = planned(vee, names=["a", "b", "c", "d"], microbatches=worker.MICROBATCHES)
    csvs = [exported(plan, "torch-csv", name, worker.MICROBATCHES) for name in ("pattern", "gpipe", "zbv")]
    assert len(set(csvs)) == 3
    found = run_torch(tmp_path, csvs, ["0,3", "1,2"])

    layers, inputs, targets = worker.model()
    losses = []
    for x, y in zip(inputs.split(worker.BATCH), targets.split(worker.BATCH), strict=True):
        for layer in layers:
            x = layer(x)
        losses.append(torch.nn.functional.mse_loss(x, y))
    torch.stack(losses).mean().backward()
    for first, second in zip(*found, strict=True):
        assert first["losses"] == pytest.approx([loss.item() for loss in losses], rel=1e-6)
        gradients = first["gradients"] | second["gradients"]
        for s, layer in enumerate(layers):
            for got, parameter in zip(gradients[str(s)], layer.parameters(), strict=True):
                assert got == pytest.approx(parameter.grad.flatten().tolist(), abs=1e-7)


def test_torch_csv_refuses_what_torch_cannot_do():
    with pytest.raises(CannotExpress, match=r"torch drains the pipeline before every update.*keeps weights 2bw"):
        exported(planned(THREE, weights="2bw"), "torch-csv")
    with pytest.raises(CannotExpress, match="stage 0 has 2 replicas"):
        exported(planned([(0, 6, (0, 1)), (6, 11, (2,))]), "torch-csv")
    plan = planned(THREE)
    with pytest.raises(CannotExpress, match="keeps weights latest"):
        exported(plan, "torch-csv", "nf1b", 8)
    assert exported(planned(THREE, weights="2bw"), "torch-csv", "1f1b").startswith("0F0")


def test_torchtitan_lists_the_modules_of_each_stage():
    found = tomllib.loads(exported(planned(THREE), "torchtitan"))
    assert found["parallelism"] == {
        "pipeline_parallel_degree": 3,
        "data_parallel_replicate_degree": 1,
        "module_fqns_per_model_part": [GPT[0:4], GPT[4:8], GPT[8:11]],
    }
    assert found["activation_checkpoint"] == {"mode": "none"}
    looped = tomllib.loads(exported(planned(SHARED), "torchtitan"))["parallelism"]
    assert looped["pipeline_parallel_degree"] == 2
    assert len(looped["module_fqns_per_model_part"]) == 4
    doubled = tomllib.loads(exported(planned([(0, 6, (0, 1)), (6, 11, (2, 3))]), "torchtitan"))["parallelism"]
    assert doubled["data_parallel_replicate_degree"] == 2


def parsed_layout(layout: str) -> list[str]:
    """Megatron's reading of a layout, re-stated from its documentation."""
    layout = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    return layout.split("|")


def test_megatron_layout():
    text = exported(planned(THREE), "megatron")
    assert text == '--pipeline-model-parallel-size 3 \\\n--pipeline-model-parallel-layout "Et*3|t*4|tL"\n'
    stages = parsed_layout(re.search('"(.*)"', text)[1])
    assert stages == ["Ettt", "tttt", "tL"]
    looped = planned([(0, 3, (0,)), (3, 6, (1,)), (6, 9, (0,)), (9, 11, (1,))])
    assert "--pipeline-model-parallel-size 2" in exported(looped, "megatron")
    assert '"Ett|t*3|t*3|L"' in exported(looped, "megatron")
    names = [f"model.layers.{i}" for i in range(4)]
    assert '"Ett|ttL"' in exported(planned([(0, 3, (0,)), (3, 6, (1,))], ["embed", *names, "output"]), "megatron")


def test_megatron_refuses_other_models_and_cuts():
    with pytest.raises(CannotExpress, match="no layer of gpt is named as a decoder layer"):
        exported(planned([(0, 2, (0,)), (2, 4, (1,))], ["conv", "pool", "flat", "out"]), "megatron")
    with pytest.raises(CannotExpress, match=r"layer 2 \(pool\) between the decoder layers"):
        exported(planned([(0, 5, (0,))], ["e", "block0", "pool", "block1", "head"]), "megatron")
    with pytest.raises(CannotExpress, match="starts with the embedding"):
        exported(planned([(0, 2, (0,))], ["block0", "head"]), "megatron")
    with pytest.raises(CannotExpress, match="the embedding is one layer there"):
        exported(planned([(0, 1, (0,)), (1, 4, (1,))], ["tokens", "positions", "block0", "head"]), "megatron")


def test_deepspeed_parts_and_torchgpipe_balance():
    assert json.loads(exported(planned(THREE), "deepspeed")) == {
        "num_stages": 3,
        "parts": [0, 4, 8, 11],
        "data_parallel_size": 1,
        "activation_checkpoint_interval": 0,
        "micro_batches": 6,
    }
    assert json.loads(exported(planned(THREE), "torchgpipe")) == {
        "balance": [4, 4, 3],
        "devices": [0, 1, 2],
        "chunks": 6,
        "checkpoint": "never",
    }


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed", "torchgpipe"])
def test_split_targets_refuse_placements_and_partial_recomputation(target):
    vee = [(0, 3, (0,)), (3, 6, (1,)), (6, 9, (1,)), (9, 11, (0,))]
    with pytest.raises(CannotExpress, match=r"stages are on ranks \[0, 1, 1, 0\]|holds stages \[0, 3\]"):
        exported(planned(vee), target)
    mixed = [(0, 4, (0,)), (4, 8, (1,), (4, 8)), (8, 11, (2,))]
    with pytest.raises(CannotExpress, match="stage 1 recomputes some layers"):
        exported(planned(mixed), target)
    everything = [(0, 4, (0,), (0, 4)), (4, 8, (1,), (4, 8)), (8, 11, (2,), (8, 11))]
    said = exported(planned(everything), target)
    assert any(word in said for word in ("full", '"activation_checkpoint_interval": 1', "always"))
    with pytest.raises(CannotExpress, match="replicas"):
        exported(planned([(0, 6, (0, 1)), (6, 11, (2,))]), target)


def test_deepspeed_refuses_several_stages_per_rank():
    with pytest.raises(CannotExpress, match=r"GPU 0 holds stages \[0, 2\]; there a rank holds one range"):
        exported(planned(SHARED), "deepspeed")


def test_torchtitan_refuses_merged_layers():
    with pytest.raises(CannotExpress, match=r"layer 'conv\.\.relu' is no module name"):
        exported(planned([(0, 1, (0,)), (1, 2, (1,))], ["conv..relu", "out"]), "torchtitan")


def test_notes_say_what_changes():
    plan = planned(THREE, weights="2bw")
    assert "drains the pipeline before every update" in notes(plan, "deepspeed", plan.allocation.stages)[0]
    assert notes(plan, "torch-csv", plan.allocation.stages) == []
    other = replace(plan, policy=Policy(weights="flush"))
    assert "2 stages of its own" in notes(other, "deepspeed", plan.allocation.stages[:2])[0]


def test_the_command_writes_a_file_and_refuses_with_the_reason(pipeplan, tmp_path):
    profile = tmp_path / "profile.json"
    from pipeplan.files.profiles import profile_text

    profile.write_text(profile_text(planned(THREE).chain))
    plan, out = tmp_path / "plan.json", tmp_path / "schedule.csv"
    asked = ["--gpus", "2", "--mem", "16GB", "--no-replicas", "--no-checkpointing", "--algorithm", "balance"]
    code, _, err = pipeplan("plan", str(profile), *asked, "-o", str(plan))
    assert code == 0, err
    code, _, err = pipeplan("export", str(plan), "--to", "torch-csv")
    assert (code, "torch drains the pipeline" in err) == (1, True)
    code, _, err = pipeplan(
        "export", str(plan), "--to", "torch-csv", "--schedule", "1f1b", "--microbatches", "4", "-o", str(out)
    )
    assert (code, out.read_text().splitlines()[0]) == (0, "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3")
    code, text, err = pipeplan("export", str(plan), "--to", "torchgpipe", "--json")
    assert code == 0
    assert json.loads(json.loads(text)["text"])["balance"] == [5, 6]
    assert "drains the pipeline" in err
    assert pipeplan("export", str(plan), "--to", "torch-csv", "--schedule", "nothing")[0] == 2
