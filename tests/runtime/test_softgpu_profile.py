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


def command(gpu, *arguments):
    """What a command prints on both streams, in a process with a GPU."""
    own = {**gpu, "PYTHONPATH": f"{Path(__file__).parent}:{gpu['PYTHONPATH']}"}
    asked = [sys.executable, "-m", "pipeplan", *map(str, arguments)]
    done = subprocess.run(asked, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_reading_is_measured_beside_a_gpu_and_its_plans_say_who_waits_for_it(gpu, tmp_path):
    """On a CPU it is part of two layers."""
    path, asked = tmp_path / "gpu.json", ("cases.on_gpu:linears", "--data", f"{__name__}:read_slowly", "--steps", "2")
    told = command(gpu, "profile", *asked, "--seconds", "4", "-o", path)
    assert "a microbatch, beside the GPU" in told
    chain = read_profile(str(path))
    assert chain.device == "GPU in software"
    assert chain.reading_ns >= SLOW_S * 1e9
    assert max(layer.forward_ns for layer in chain.layers) < SLOW_S * 1e9
    told = command(gpu, "plan", path, "--gpus", "2", "--mem", "1GB", "--effort", "quick")
    assert "waits for its data: reading a microbatch takes" in told
    command(gpu, "profile", *asked, "--device", "cpu", "-o", path)
    chain = read_profile(str(path))
    assert SLOW_S * 1e9 <= chain.reading_ns <= min(chain.layers[0].forward_ns, chain.layers[-1].forward_ns)


def test_doctor_finds_the_gpu(gpu):
    assert "GPU in software" in command(gpu, "doctor")
