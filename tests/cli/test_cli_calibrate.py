from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cost.roofline import Constants, timed
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.files.profiles import profile_text, read_profile

torch = pytest.importorskip("torch")


def test_runs_are_fitted_and_the_accelerator_is_taken_again(pipeplan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for batch in (2, 64):
        words = ("zoo:gpt-tiny,blocks=2", "--microbatch", str(batch), "--estimate", "a100", "--name", f"of{batch}")
        assert pipeplan("profile", *words, "-q", "-o", f"{batch}.json")[0] == 0
    true = Constants(0.75, 0.9, 5000, 50_000, 25_000)
    rows = [("ms", "profile", "batch", "gb")]
    for name in ("2.json", "64.json"):
        chain = timed(read_profile(name), true)
        step = sum(x.optimizer_ns for x in chain.layers)
        once = sum(x.forward_ns + x.backward_ns for x in chain.layers)
        rows += [(str((count * once + step) / 1e6), name, str(count * chain.microbatch), "0.1") for count in (1, 4)]
    with open("runs.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    calibrating = ("calibrate", "2.json", "64.json", "--gpu", "a100", "--measured", "runs.csv")
    code, out, err = pipeplan(*calibrating, "-o", "mine.json")
    assert code == 0, err
    assert "4 measured times; error before:" in out
    assert "written to mine.json" in out
    mine = accelerator("mine.json")
    assert mine.constants().forward_host_ns == pytest.approx(50_000, rel=0.05)
    assert "adjusted to 4 measured times" in mine.source
    assert "4 measured times only adjust constants: a calibration needs 8" in out
    code, out, _ = pipeplan(
        "profile", "zoo:gpt-tiny,blocks=2", "--microbatch", "2", "--estimate", "mine.json", "-o", "n.json"
    )
    assert code == 0
    assert read_profile("n.json").layers[1].forward_ns == pytest.approx(
        timed(read_profile("2.json"), true).layers[1].forward_ns, rel=0.05
    )
    figures = json.loads(pipeplan(*calibrating, "--json")[1])
    assert figures["error_left_out"] < 0.02
    assert len(figures["runs"]) == len(figures["memory"]) == 4


def test_a_measured_profile_counts_layer_by_layer(pipeplan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("zoo:gpt-tiny,blocks=8", "--microbatch", "4", "--estimate", "a100", "-q", "-o", "estimate.json")
    assert pipeplan("profile", *words)[0] == 0
    chain = timed(read_profile("estimate.json"), Constants(0.75, 0.9, 5000, 50_000, 25_000))
    layers = tuple(replace(x, work=None) for x in chain.layers)
    Path("measured.json").write_text(profile_text(replace(chain, name="here", layers=layers, within=None)))
    code, out, err = pipeplan("calibrate", "estimate.json", "measured.json", "--gpu", "a100", "-o", "mine.json")
    assert code == 0, err
    assert "ranges  forward host" in out
    mine = accelerator("mine.json")
    assert mine.constants().forward_host_ns == pytest.approx(50_000, rel=0.02)
    assert mine.constants().backward_host_ns == pytest.approx(25_000, rel=0.02)
    assert mine.constants().compute_share == 0.8, "all of it waits for its host"
    assert mine.within == (1.0, 1.0)
    code, _, err = pipeplan("calibrate", "measured.json", "--gpu", "a100")
    assert (code, "or a measured PROFILE beside its estimate" in err) == (2, True)
    Path("other.json").write_text(profile_text(replace(chain, layers=layers, microbatch=8)))
    code, _, err = pipeplan("calibrate", "estimate.json", "other.json", "--gpu", "a100")
    assert (code, "give one estimate of the same layers in microbatches of 8" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time\n1\n", "'time' isn't a column; the first line names some of ms, gb"),
        ("batch\n1\n", "column ms is missing"),
        ("ms\n", "has 0 rows under its heads"),
        ("ms,batch\n1\n", "row 1: has 1 cells where the heads are 2"),
        ("ms\nfast\n", "row 1: ms: 'fast' isn't a positive number"),
        ("ms,batch\n1,many\n", "row 1: batch: 'many' isn't a positive number"),
        ("ms,barrier\n1,maybe\n", "row 1: barrier: 'maybe' is neither yes nor no"),
        ("ms,on\n1,0/x\n", "row 1: --on: 'x' in 0/x isn't a number"),
        ("ms,on\n1,0-9999/1\n", "row 1: has 10000 GPUs; there may be 4096"),
        ("ms,profile\n1,other\n", "row 1: profile: 'other' is none of"),
        ("ms\n1\n", "profile 'gpt2-small': its times are measured, or estimated by an older version"),
    ],
)
def test_wrong_rows_are_refused_with_their_place(pipeplan, tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.csv").write_text(text)
    profile = str(Path(__file__).parents[2] / "profiles" / "gpt2-small-b4-a100.json")
    code, _, err = pipeplan("calibrate", profile, "--gpu", "a100", "--measured", "runs.csv")
    assert (code, message in err) == (2, True), err
