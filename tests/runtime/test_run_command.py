"""``pipeplan run`` and ``pipeplan diff`` of a plan and its run, as typed."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.half import exploding
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of
from oracles.chrome_trace import shown

from pipeplan.check.bounds import any_bound
from pipeplan.cli import group
from pipeplan.cli.run import _announce
from pipeplan.errors import BadInput
from pipeplan.files.plans import load_plan, plan_text
from pipeplan.files.profiles import read_profile
from pipeplan.problem import Problem
from pipeplan.report.tables.run import Learnt, print_beside, print_run, smoothed, stays_below
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.measure.progress import StepProgress
from pipeplan.runtime.measure.report import DeviceMemory
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.scalars import Scalars
from pipeplan.runtime.training.state.checkpoint import newest

CPU = ("--device", "cpu")
MODEL = ["--model", "cases.runtime:dropping", "--data", "cases.runtime:vectors", "--lr", "0.01"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return written(tmp_path_factory.mktemp("plan") / "plan.json", weights="stash")


def written(path, **policy):
    made = plan_of(chain_of(runtime_cases.dropping, 4), [(0, 2, (0,)), (2, 5, (1,))], **policy)
    bound = any_bound(Problem(made.chain, made.platform, made.policy))
    path.write_text(plan_text(replace(made, lower_bounds=(bound,))))
    return str(path)


def run(*arguments):
    done = CliRunner().invoke(group, ["run", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_losses_are_put_beside_those_of_another_plan(plan, tmp_path):
    drained, larger = (written(tmp_path / name, accumulate=k) for name, k in (("one.json", 1), ("two.json", 2)))
    figures = json.loads(run(plan, *MODEL, "--steps", 20, "--against", drained, "--json").stdout)
    alone = json.loads(run(drained, *MODEL, "--steps", 20, "--json").stdout)
    one, other = figures["beside"]
    assert (one["plan"], other["plan"]) == ("stash", "flush")
    curves = [smoothed(losses, 2) for losses in (figures["losses"], alone["losses"])]
    assert [one["curve"], other["curve"]] == [pytest.approx(curve) for curve in curves]
    assert one["level"] == other["level"] == pytest.approx(max(curves[1][12:]))
    assert other["updates"] == stays_below(curves[1], other["level"]) <= 13
    assert other["seconds"] > 0
    with pytest.raises(BadInput, match="are of 1 microbatches of 4 samples and 2 microbatches of 4 samples; plan both"):
        run(plan, *MODEL, "--against", larger)
    done = CliRunner().invoke(group, ["run", plan, *MODEL, "--against", drained, "--evaluate"])
    assert "--against trains twice from the start" in done.output


def test_what_drains_needs_no_plan_of_its_own(plan):
    figures = json.loads(run(plan, *MODEL, "--steps", 4, "--against", "flush", "--json").stdout)
    assert [x["plan"] for x in figures["beside"]] == ["stash", "flush"]


def test_a_level_is_reached_where_the_curve_stays_below_it(capsys):
    curve = smoothed([4.0, 2.0, 2.0, 5.0, 1.0, 1.0], 2)
    assert curve == [4.0, 3.0, 2.0, 3.5, 3.0, 1.0]
    assert [stays_below(curve, x) for x in (0.5, 1.0, 3.2, 4.0)] == [None, 6, 5, 1]
    print_beside(Learnt("2bw", curve, 3.0, None, None), Learnt("flush", curve[::-1], 3.0, 1, 2.5))
    out = capsys.readouterr().out
    assert "           1   4.0000 ####################  1.0000 #####" in out
    assert out.endswith("  2bw: not in this run\n  flush: after update 1, 2.5 s by the measured period\n")


def test_a_run_its_trace_and_its_checkpoints(plan, tmp_path):
    trace, folder = tmp_path / "trace.json", tmp_path / "c"
    done = run(
        plan, *MODEL, "--steps", 20, "--trace", trace, "--checkpoint", folder, "--checkpoint-every", 8, "--json",
        "--optimizer", "AdamW,weight_decay=0.1", "--scheduler", "StepLR,step_size=4", "--vertical-sync",
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert figures["steps"] == 20
    assert [stage["versions"] for stage in figures["stages"]] == [2, 2]  # as many on both, with vertical sync
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["loss"] for line in lines] == pytest.approx(figures["losses"])
    assert newest(str(folder)).position.step == 20
    again = run(plan, *MODEL, "--steps", 3, "--checkpoint", folder, "--resume", "--evaluate", "--json")
    evaluated = json.loads(again.stdout)
    assert evaluated["mean_loss"] == pytest.approx(sum(evaluated["losses"]) / 3)
    alone = tmp_path / "alone.json"
    words = ["plan", "--resume-from", str(folder), "--gpus", "1", "-o", str(alone)]
    told = CliRunner().invoke(group, words, catch_exceptions=False).stdout
    assert "weights and optimizer state, to GPUs without them so far" in told
    done = run(alone, *MODEL, "--steps", 22, "--checkpoint", folder, "--resume", "--json", "--optimizer", "AdamW")
    assert len(json.loads(done.stdout)["losses"]) == 2 * len(figures["losses"]) // 20

    profile = tmp_path / "new.json"
    compared = CliRunner().invoke(
        group, ["diff", plan, str(trace), "--recalibrated", str(profile), "--json"], catch_exceptions=False
    )
    rows = {(row["kind"], row["stage"]): row["measured_ns"] for row in json.loads(compared.stdout)["operations"]}
    layers, first = read_profile(str(profile)).layers, figures["stages"][0]
    assert rows["F", 0] == first["forward_ns"]
    assert sum(layer.forward_ns for layer in layers[:2]) == first["forward_ns"] + first["data_ns"]
    assert sum(layer.backward_ns for layer in layers[2:]) == rows["B", 1]
    shown = CliRunner().invoke(group, ["diff", plan, str(trace)], catch_exceptions=False)
    assert "update" in shown.stdout


class Writer:
    """What TensorBoard's does, as far as it is told."""

    def __init__(self, folder):
        self.file = Path(folder, "events")
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.file.write_text(json.dumps(self.scalars))


def test_epochs_are_whole_updates_and_told_to_tensorboard(plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    done = run(plan, *MODEL, "--epochs", 2, "--epoch-length", 3, "--json", "--log-dir", tmp_path / "new" / "logs")
    figures = json.loads(done.stdout)
    assert figures["microbatches"] == 6
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    told = json.loads((tmp_path / "new" / "logs" / "events").read_text())
    assert [x for x in told if x[0] == "loss"] == [["loss", line["loss"], line["step"]] for line in lines]
    times = [(step, ms) for name, ms, step in told if name == "ms per microbatch"]
    assert times == [(line["step"], line["period_ns"] / 1e6) for line in lines[1:]]
    rates = [(step, rate) for name, rate, step in told if name == "learning rate"]
    assert rates == [(line["step"], line["learning_rate"]) for line in lines] == [(step, 0.01) for step in range(1, 7)]
    memory = {name: (value, step) for name, value, step in told if name.startswith("memory")}
    held = figures["activations"][1]
    assert memory["memory in MB/activations of GPU 1"] == (held["measured_bytes"] / 1e6, 6)
    assert len(memory) == 4
    with closing(Scalars(tmp_path)) as scalars:
        scalars.hear(StepProgress(3, 9, 0.5, None, None, gradient_norm=1.5))
    assert json.loads((tmp_path / "events").read_text()) == [["loss", 0.5, 3], ["gradient norm", 1.5, 3]]
    with pytest.raises(BadInput, match="the data has no length; say --epoch-length"):
        run(plan, *MODEL, "--epochs", 2)
    with pytest.raises(BadInput, match=r"--log-dir: .* cannot be made: Not a directory|File exists"):
        run(plan, *MODEL, "--log-dir", f"{plan}/logs")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadInput, match=r"--log-dir: TensorBoard cannot be imported .*; pip install 'pipeplan\[tensor"):
        run(plan, *MODEL, "--log-dir", tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "nowhere/trace.json"], "there is no folder"),
        (["--schedule", "message-driven"], "the schedule drains every mini-batch, which is for weights flush"),
        (["--half", "bf16"], "its precision is fp32"), (["--loss-scale", "8"], "its precision is fp32"),
        (["--loss-scale-window", "8"], "its precision is fp32"), (["--coarsening", "all"], "no stage has replicas"),
        (["--bucket-size", "100"], "neither offloads optimizer state nor are sums cut into chunks"),
        (["--keep-checkpoints", "2"], "no folder is named"), (["--checkpoint-every", "2"], "no folder is named"),
        (["--resume"], "no folder is named"),
        (["--evaluate", "--checkpoint", "c", "--resume", "--checkpoint-every", "2"], "an evaluation changes nothing"),
    ],
)  # fmt: skip
def test_options_that_would_do_nothing_are_refused(plan, options, words):
    """Before any process starts, in one sentence."""
    with pytest.raises(BadInput, match=words):
        run(plan, *MODEL, *options)


def test_an_evaluation_is_not_compared_with_a_plan(plan, tmp_path):
    trace = tmp_path / "trace.json"
    assert "nothing was updated" in run(plan, *MODEL, "--steps", 2, "--evaluate", "--trace", trace).stdout
    with pytest.raises(BadInput, match="has no backwards"):
        CliRunner().invoke(group, ["diff", plan, str(trace)], catch_exceptions=False)


def test_mixed_precision_with_offloading(tmp_path):
    chain = chain_of(exploding, 4, dtype=torch.bfloat16)
    made = plan_of(chain, [(0, 4, (0, 1)), (4, 6, (2,))], weights="flush", accumulate=2, optimizer="adam")
    policy = replace(made.policy, precision="mixed", offload=True, bucket_parameters=100)
    bound = any_bound(Problem(made.chain, made.platform, policy))
    path = tmp_path / "plan.json"
    path.write_text(plan_text(replace(made, policy=policy, lower_bounds=(bound,))))
    model = ["--model", "cases.half:exploding", "--data", "cases.half:exploding_vectors", "--lr", "0.01"]
    options = ["--steps", 4, "--coarsening", 2, "--loss-scale", 1024, "--loss-scale-window", 1]
    trace = tmp_path / "trace.json"
    done = run(path, *model, *options, "--trace", trace)
    assert "loss scale 4096 at the end; updates skipped for overflow: 1" in done.stdout
    said = r"GPU 2: weights, gradients and optimizer at most [\d.]+ \w?B measured, [\d.]+ \w?B predicted; in host"
    assert re.search(said, " ".join(done.stdout.split()))
    seen = shown(trace.read_text())
    sums = {name for name, slices in seen.slices.items() if any("REDUCE" in called for _, _, called in slices)}
    assert {name.rstrip(" 0123456789") for name in sums} == {f"GPU {d} (rank {d}), sums of gradients" for d in (0, 1)}
    agreed = {called for _, _, called in seen.slices["GPU 2 (rank 2)"] if called.startswith("AGREE")}
    assert agreed == {f"AGREE{v}" for v in range(1, 5)}
    assert len(seen.arrows) == 2 * 8  # one cut, both ways, four updates of two microbatches
    figures = json.loads(run(path, *model, *options, "--half", "fp16", "--json").stdout)
    assert figures["skipped"] == [3]
    first, _, last = figures["states"]
    assert last["measured_bytes"] == last["planned_bytes"] == 4 * 272 + 16 * 100
    assert last["measured_host_bytes"] == last["planned_host_bytes"] == 12 * 272
    assert 0 < first["measured_bytes"] - first["planned_bytes"] <= 2 * 200 * 2  # what is summed twice, two chunks
    assert figures["loss_scale"] == 4096
    assert "2R1" not in run(path, *model, "--dry-run").stdout
    assert "0R1 A1 0U1" in run(path, *model, "--dry-run").stdout
    for wrong in (["--coarsening", "0"], ["--coarsening", "some"], ["--bucket-size", "0"], ["--half", "fp8"]):
        failed = CliRunner().invoke(group, ["run", str(path), *model, *wrong])
        assert failed.exit_code == 2, failed.output


def test_the_device_is_named_and_a_profile_of_a_cpu_stays_there(plan):
    losses = [json.loads(run(plan, *MODEL, "--steps", 4, "--json", *x).stdout)["losses"] for x in ((), CPU)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("processes", "shared"), [(None, False), ("4", True), ("2", False)])
def test_ranks_that_share_the_gpus_of_their_node_are_told_of(plan, processes, shared, monkeypatch, capsys):
    """Under torchrun a node's processes count, wherever the plan's other ranks are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if processes is not None:
        for name, value in {"LOCAL_WORLD_SIZE": processes, "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
    _announce(load_plan(plan), ModelSpec(*MODEL[1:4:2]), RunOptions(steps=2, lr=0.01, device="cuda"), as_json=False)
    assert ("4 ranks share 2 GPUs: what they" in capsys.readouterr().err) == shared


def test_a_run_on_gpus_tells_of_their_memory_and_exchanges(plan, capsys):
    loaded = load_plan(plan)
    report = run_plan(loaded, ModelSpec(MODEL[1], MODEL[3]), RunOptions(steps=2, lr=0.01))
    memory = DeviceMemory(1, 1, 3 * 10**9, 4 * 10**9, reserved_bytes=5 * 10**9, used_bytes=6 * 10**9, retries=2)
    print_run(
        loaded, replace(report, memory=(memory,), exchange="staged", sums="staged", hardware=("GPU X",) * 2), width=120
    )
    out = capsys.readouterr().out
    assert "ran on GPU X; ranks shared GPUs, so tensors travelled through host memory" in out
    assert (
        "GPU 1: 4 GB allocated at most, 3 GB predicted; torch held 5 GB, in use with CUDA's context and "
        "exchanges were 6 GB; memory was short 2 times"
    ) in " ".join(out.split())
    print_run(loaded, replace(report, exchange="staged", sums="nccl", hardware=("GPU X",) * 2), width=120)
    assert "threads received, so messages travelled through host memory, and sums over NCCL" in capsys.readouterr().out
    print_run(loaded, report, width=120)
    assert "ran on" not in capsys.readouterr().out


def test_what_a_terminals_end_stops_leaves_its_trace_and_no_traceback(plan, tmp_path):
    """It reaches all of its processes, multiprocessing's own among them."""
    trace = tmp_path / "trace.json"
    words = [*MODEL, "--steps", "1000000", "--trace", str(trace)]
    roots = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    with subprocess.Popen(
        [sys.executable, "-m", "pipeplan", "run", plan, *words], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)}, start_new_session=True,
    ) as command:  # fmt: skip
        said = ""
        while not re.search(r"^update \d+ of", said, re.MULTILINE) and (line := command.stderr.readline()):
            said += line
        os.killpg(command.pid, signal.SIGHUP)
        rest = command.communicate(timeout=SECONDS)[1]
    assert command.returncode == 130, said + rest
    assert re.search(r"error: stopped after update \d+\n\Z", rest), rest
    assert not re.search(r"Traceback|Warning|resource_tracker", said + rest)
    assert shown(trace.read_text()).slices["GPU 1 (rank 1)"]
