"""What GPUs in software are asked beside runs: to step, to be profiled, to be looked at."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import vectors
from softgpu.build import NotBuilt, environment

from pipeplan.files.profiles import read_profile


@pytest.fixture(scope="module")
def gpu():
    """The environment of processes that have one GPU."""
    try:
        return environment(1)
    except NotBuilt as error:
        pytest.skip(str(error))


def answer(gpu, code, *arguments):
    """What ``code`` prints as JSON in a process with a GPU."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=gpu, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


STEP = """
import json, sys, torch
from torch import nn
from pipeplan.runtime.training.update.optimizers import optimizer_maker, parse_choice

found = {}
for name in sys.argv[1:]:
    make = optimizer_maker(name if name.islower() else parse_choice(name, ""), 0.1)
    weights = [nn.Parameter(torch.ones(1 << 18, device="cuda")) for _ in range(4)]
    optimizer, peaks = make([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.2}]), []
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    found[name] = peaks[-1] / (4 << 20), optimizer.param_groups[1]["fused"]
print(json.dumps(found))
"""


def test_an_update_takes_no_memory_that_plans_dont_count_but_where_it_is_said_so(gpu):
    """Beside the weights' own."""
    found = answer(gpu, STEP, "sgd", "momentum", "adam", "AdamW,weight_decay=0.1", "Adam,foreach=True")
    much, fused = found.pop("Adam,foreach=True")
    assert much >= 0.5
    assert not fused
    assert [name for name, (share, fused) in found.items() if share > 0.01 or not fused] == []


SLOW_S = 0.5  # longer than a layer takes on a busy machine


def read_slowly(index, seed):
    """Vectors that a disk gives in its own time."""
    time.sleep(SLOW_S)
    return vectors(index, seed)


COMMANDS = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pipeplan.cli import main

found = []
for line in json.loads(sys.argv.pop()):
    sys.argv[1:] = line
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        try:
            main()
        except SystemExit as ended:
            assert ended.code == 0, printed.getvalue()
    found.append(printed.getvalue())
print(json.dumps(found))
"""


def test_reading_is_measured_beside_a_gpu_and_its_plans_say_who_waits_for_it(gpu, tmp_path):
    """On a CPU it is part of two layers. One process, which has found the GPU, carries out all commands."""
    own = {**gpu, "PYTHONPATH": f"{Path(__file__).parent}:{gpu['PYTHONPATH']}"}
    there, here = str(tmp_path / "gpu.json"), str(tmp_path / "cpu.json")
    asked = ("profile", "cases.on_gpu:linears", "--data", f"{__name__}:read_slowly", "--steps", "2")
    profiled, planned, _, doctor = answer(own, COMMANDS, json.dumps([
        [*asked, "--seconds", "4", "-o", there],
        ["plan", there, "--gpus", "2", "--mem", "1GB", "--effort", "quick"],
        [*asked, "--device", "cpu", "-o", here],
        ["doctor"],
    ]))  # fmt: skip
    assert "a microbatch, beside the GPU" in profiled
    chain = read_profile(there)
    assert chain.device == "GPU in software"
    assert chain.reading_ns >= SLOW_S * 1e9
    assert max(layer.forward_ns for layer in chain.layers) < SLOW_S * 1e9
    assert "waits for its data: reading a microbatch takes" in planned
    chain = read_profile(here)
    assert SLOW_S * 1e9 <= chain.reading_ns <= min(chain.layers[0].forward_ns, chain.layers[-1].forward_ns)
    assert "GPU in software" in doctor
