"""Runs on GPUs in software: every mode equals CPUs, no two uses of memory race, and no host waits where it need not."""

import json
import re

import pytest

torch = pytest.importorskip("torch")

from cases import on_gpu
from cases.soft_runs import FAULTS, MODES, Soft
from softgpu.build import NotBuilt, environment

from pipeplan.files.profiles import read_profile
from scripts.checks.gpu_faults import PLANTS, WITHIN, told

SETTLED = ("executor.py:pause", "executor.py:agree", "exchange/links.py:send", "repeatable.py:_apart")


@pytest.fixture(scope="module")
def soft(tmp_path_factory):
    """The process that trains on GPUs in software; none where nothing compiles them."""
    folder = tmp_path_factory.mktemp("softgpu")
    try:
        found = Soft(folder, environment(2, folder))
    except NotBuilt as error:
        pytest.skip(str(error))
    yield found
    found.close()


@pytest.mark.parametrize(("name", "late_us"), [*((name, 200) for name in MODES), ("zb1p", 0)])  # races are at any speed
def test_every_mode_equals_cpus(soft, name, late_us):
    found = soft.run(name, delay_us=late_us)
    assert found["told"] == []
    assert found["differences"]
    assert max(found["differences"].values()) <= WITHIN
    assert found["ranks"]
    waits = [
        (what, where)
        for rank in found["ranks"]
        for kind, what, where in rank["heard"]
        if kind == "wait" and "executor.py:carry_out" in where and not any(x in where for x in SETTLED)
    ]
    assert [x for x in waits if MODES[name]().model != "exploding" or "forward" not in x[1]] == []


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_gpus_own_fault_is_told_of_its_rank(soft, name, gpus):
    """Late, and in one sentence, although whoever frees memory of such a GPU dies: torch's own passes do at times."""
    (told,) = soft.run(name, devices=gpus, delay_us=200)["told"]
    by_itself = "failed in or before .*: CUDA error: Target 100 is out of bounds"
    aborted = "died in .*: killed by SIGABRT; torch ends a process so whose GPU has failed"
    assert re.match(f"rank 1 ({by_itself}|{aborted})", told)


# --- what the device itself sees ---

ALONE = """
import torch
one, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
event = torch.cuda.Event()
torch.cuda.synchronize()
"""
SEEN = {
    "reads what is not there": (
        "with torch.cuda.stream(side): b = one * 2\n"
        "b + 1",
        "aten::add in the default stream reads what aten::mul in stream 1 may still write",
    ),
    "gives back what is read": (
        "with torch.cuda.stream(side): b = one * 2; event.record()\n"
        "torch.cuda.current_stream().wait_event(event); b + 1; del b",
        "memory of stream 1 is given back, which aten::add in the default stream may still read",
    ),
    "touches pinned memory": (
        "pinned = torch.empty(1000, pin_memory=True); pinned.copy_(one, non_blocking=True); pinned[0].item()",
        "the host touches pinned memory that the device may still use",
    ),
    "touches a GPU's memory": (
        "import ctypes; ctypes.c_float.from_address(one.data_ptr()).value", "the host touches memory of a GPU"
    ),
    "uses a second GPU": ("torch.ones(3, device='cuda:1')", "this process of GPU 0 uses GPU 1"),
    "reads too early, late": (
        "torch.cuda.current_stream().wait_stream(side); b = one + 1; event.record(); side.wait_event(event)\n"
        "with torch.cuda.stream(side): b.record_stream(side); c = b + 1\n"
        "del b; torch.cuda.current_stream().wait_stream(side); c.record_stream(torch.cuda.current_stream())\n"
        "assert (c * 1).sum().item() == 3000; del c; torch.cuda.synchronize()",
        None,
    ),
    "asks for too much": ("torch.empty(1 << 40, device='cuda')", "CUDA out of memory"),
    "fails late": (
        "torch.nn.functional.embedding(torch.tensor([99], device='cuda'), torch.ones(10, 4, device='cuda'))\n"
        "print('issued', flush=True); torch.cuda.synchronize()",
        "(?s)issued.*CUDA error: index out of range",
    ),
    "frees after a fault": (
        "torch.nn.functional.embedding(torch.tensor([99], device='cuda'), torch.ones(10, 4, device='cuda'))\n"
        "try: torch.cuda.synchronize()\nexcept torch.AcceleratorError: del one",
        "softgpu: freed after index out of range",
    ),
    "mixes devices": ("one + torch.ones(1000)", "Expected all tensors to be on the same device"),
}  # fmt: skip


@pytest.mark.parametrize("case", SEEN)
def test_what_a_process_does_wrong_is_told(soft, case):
    code, says = SEEN[case]
    found = soft.run(ALONE + code, devices=2, delay_us=200)
    if says is None:
        assert found == {"code": 0, "printed": ""}
    else:
        assert re.search(says, found["printed"])


# --- planted faults ---


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_left_out_is_told(soft, name):
    plant = PLANTS[name]
    assert re.search(plant.told, told(soft, plant.mode, plant.file, plant.text()))


# --- what a GPU is asked beside runs: to step, to be profiled, to be looked at ---


def printed(soft, code):
    """What ``code`` prints as JSON in a process with a GPU."""
    found = soft.run(code, devices=1)
    assert found["code"] == 0, found["printed"]
    return json.loads(found["printed"])


STEP = """
import json, torch
from torch import nn
from pipeplan.runtime.training.update.optimizers import optimizer_maker, parse_choice

found = {}
for name in ("sgd", "momentum", "adam", "AdamW,weight_decay=0.1", "Adam,foreach=True"):
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


def test_an_update_takes_no_memory_that_plans_dont_count_but_where_it_is_said_so(soft):
    """Beside the weights' own."""
    found = printed(soft, STEP)
    much, fused = found.pop("Adam,foreach=True")
    assert much >= 0.5
    assert not fused
    assert [name for name, (share, fused) in found.items() if share > 0.01 or not fused] == []


COMMANDS = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pipeplan.cli import main

found = []
for line in LINES:
    sys.argv = ["pipeplan", *line]
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        try:
            main()
        except SystemExit as ended:
            assert ended.code == 0, printed.getvalue()
    found.append(printed.getvalue())
print(json.dumps(found))
"""


def test_reading_is_measured_beside_a_gpu_and_its_plans_say_who_waits_for_it(soft, tmp_path):
    """On a CPU it is part of two layers. One process, which has found the GPU, carries out all commands."""
    there, here = str(tmp_path / "gpu.json"), str(tmp_path / "cpu.json")
    asked = ("profile", "cases.on_gpu:linears", "--data", "cases.on_gpu:read_slowly", "--steps", "2")
    lines = [
        [*asked, "--seconds", "4", "-o", there],
        ["plan", there, "--gpus", "2", "--mem", "1GB", "--effort", "quick"],
        [*asked, "--device", "cpu", "-o", here],
        ["doctor"],
    ]  # fmt: skip
    profiled, planned, _, doctor = printed(soft, f"LINES = {lines!r}\n{COMMANDS}")
    assert "a microbatch, beside the GPU" in profiled
    chain = read_profile(there)
    assert chain.device == "GPU in software"
    assert chain.reading_ns >= on_gpu.SLOW_S * 1e9
    assert max(layer.forward_ns for layer in chain.layers) < on_gpu.SLOW_S * 1e9
    assert "waits for its data: reading a microbatch takes" in planned
    chain = read_profile(here)
    assert on_gpu.SLOW_S * 1e9 <= chain.reading_ns <= min(chain.layers[0].forward_ns, chain.layers[-1].forward_ns)
    assert "GPU in software" in doctor
