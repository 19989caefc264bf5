"""The commands on profiles: ``profile`` measures, estimates and merges; ``diff`` compares and carries plans."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(x + self.inner(x).relu())

def build(batch):
    return Residual(), torch.randn(batch, 8), nn.functional.cross_entropy

def data(index, seed):
    return torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)

def untraceable(batch):
    class Branch(nn.Module):
        def forward(self, x):
            return x[x.sum(1) > 0]
    return Branch(), torch.randn(batch, 8), nn.functional.mse_loss
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mymodel.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop("mymodel", None)
    return tmp_path


def layers(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["layers"]
    return found


def test_a_measured_profile_and_its_table(folder: Path, pipeplan: Command) -> None:
    code, out, err = pipeplan(
        "profile", "zoo:gpt-tiny,blocks=2,tied=true", "--microbatch", "2", "--steps", "2", "-o", "p.json"
    )
    assert (code, out) == (0, "6 layers written to p.json\n")
    assert "holding it all takes " in err
    assert "embedding" in err
    assert "± width of the middle half" in err
    assert "note: embedding and head share weights, which each of them counts, and the sum once" in err
    form = json.loads((folder / "p.json").read_text())
    assert form["tied"] == [[0, 4]]
    assert form["source"].startswith("measured by pipeplan")
    code, out, _ = pipeplan("plan", "p.json", "--gpus", "2", "--mem", "1GB", "--algorithm", "contiguous")
    assert code == 0


def test_any_module_becomes_a_dag_that_can_be_planned(folder: Path, pipeplan: Command) -> None:
    code, out, err = pipeplan(
        "profile", "mymodel:build", "--data", "mymodel:data", "--microbatch", "4", "--steps", "1", "-q", "-o", "p.json"
    )
    assert (code, err) == (0, "")
    form = json.loads((folder / "p.json").read_text())
    assert [x["name"] for x in form["layers"]] == ["enter", "inner", "relu", "add", "leave", "loss"]
    assert form["edges"] == [[0, 1], [0, 3], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert pipeplan("plan", "p.json", "--gpus", "2", "--mem", "1GB", "--algorithm", "contiguous")[0] == 0
    for granularity, count in (("articulation", 4), ("99%", 1), ("0.0001%", 6)):  # of estimates, which no load changes
        words = ("--estimate", "a100", "-q", "--granularity", granularity, "-o", "q.json")
        code, out, _ = pipeplan("profile", "mymodel:build", "--microbatch", "4", *words)
        assert (code, out) == (0, f"{count} layers written to q.json\n")


def test_what_cannot_be_traced_is_one_sentence(folder: Path, pipeplan: Command) -> None:
    code, _, err = pipeplan("profile", "mymodel:untraceable", "--quiet")
    assert code == 2
    assert err.startswith("error: Branch cannot be traced: ")
    assert "nn.Sequential" in err
    assert "Traceback" not in err


def test_an_estimate_takes_type_and_optimizer(folder: Path, pipeplan: Command) -> None:
    common = ("profile", "zoo:gpt-tiny,blocks=2", "--estimate", "a100", "-o")
    code, _, err = pipeplan(*common, "a.json")
    assert (code, "times in ms, estimated" in err, "±" in err) == (0, True, False)  # which nobody measured
    assert pipeplan(*common, "b.json", "-q", "--dtype", "bfloat16", "--optimizer", "adam")[0] == 0
    a, b = json.loads((folder / "a.json").read_text()), json.loads((folder / "b.json").read_text())
    assert a["device"] == b["device"] == "NVIDIA A100 SXM 80GB (estimated)"
    assert (a["dtype"], b["dtype"]) == ("float32", "bfloat16")
    assert a["layers"][1]["weight_bytes"] == 2 * b["layers"][1]["weight_bytes"]
    assert b["layers"][1]["optimizer_ns"] > a["layers"][1]["optimizer_ns"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--estimate", "v100", "--dtype", "bfloat16"), "no peak is known for bfloat16"),
        (("--estimate", "v100", "--device", "cpu"), "--estimate needs no device"),
        (("--granularity", "fine"), "'fine' is not auto, node, block, articulation or a share such as 1%"),
        (("--granularity", "100%"), "'100%' is not auto"),
    ],
)
def test_wrong_options(options: tuple[str, ...], message: str, pipeplan: Command) -> None:
    code, _, err = pipeplan("profile", "zoo:gpt-tiny,blocks=1", "-q", *options)
    assert code == 2
    assert message in err


def test_cuda_without_a_gpu_says_what_else_there_is(pipeplan: Command) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = pipeplan("profile", "zoo:gpt-tiny", "--device", "cuda")
    assert code == 2
    assert "torch sees no GPU here" in err
    assert "--estimate" in err


@pytest.fixture
def two(folder: Path, pipeplan: Command) -> None:
    for batch, name in ((4, "a.json"), (64, "large.json")):
        code, _, _ = pipeplan(
            "profile", "zoo:gpt-tiny", "--microbatch", str(batch), "--estimate", "v100", "-q", "-o", name
        )
        assert code == 0
    shutil.copy("a.json", "same.json")
    asked = ("--gpus", "2", "--mem", "40MB", "--algorithm", "contiguous", "--no-replicas")
    assert pipeplan("plan", "a.json", *asked, "-o", "plan.json")[0] == 0


@pytest.mark.usefixtures("two")
def test_diff_shows_what_moved_and_whether_a_plan_holds(pipeplan: Command) -> None:
    code, out, _ = pipeplan("diff", "a.json", "same.json", "--plan", "plan.json")
    assert code == 0
    assert "no layer differs" in out
    assert "rank correlation of the layers' times: 1.000" in out
    assert "the plan holds for B: period" in out
    assert "(+0.0%), same stages, same order, within memory" in out

    code, out, _ = pipeplan("diff", "a.json", "large.json", "--plan", "plan.json")
    assert code == 1
    assert "note: microbatches of 4 and 64 samples" in out
    assert "the plan does not hold for B:" in out
    assert "device 0 needs" in out

    code, out, _ = pipeplan("diff", "a.json", "large.json", "--json", "--plan", "plan.json")
    assert code == 1
    form = json.loads(out)
    assert form["plan"]["holds"] is False
    assert 15.9 < form["totals"][1]["saved_bytes"] / form["totals"][0]["saved_bytes"] <= 16
    assert [x["name"] for x in form["layers"]][-1] == "loss"

    renamed = json.loads(Path("same.json").read_text())
    for layer in renamed["layers"]:
        layer["name"] = f"module.{layer['name']}"
    del renamed["layers"][-1]  # without its loss
    Path("renamed.json").write_text(json.dumps(renamed))
    code, out, _ = pipeplan("diff", "a.json", "renamed.json", "--plan", "plan.json", "--match", "weights", "--json")
    assert code == 0
    form = json.loads(out)
    assert form["layers"][0]["names"] == ["embedding", "module.embedding"]
    assert form["layers"][-1]["names"] == ["loss", None]
    assert form["plan"]["holds"]
    out = pipeplan("diff", "a.json", "renamed.json", "--plan", "plan.json", "--match", "weights")[1]
    assert "note: B has other layers; its later stages begin with module.block" in out
    assert "has 7; match them by" in pipeplan("diff", "a.json", "renamed.json", "--match", "order")[2]
    code, _, err = pipeplan("diff", "large.json", "a.json", "--plan", "plan.json")
    assert code == 2
    assert "the plan was made from another profile than gpt-tiny" in err
