"""Runs on GPUs in software: every mode equals CPUs, no two uses of memory race, and no host waits where it need not."""

import re

import pytest

torch = pytest.importorskip("torch")

from cases.soft_runs import FAULTS, MODES, Soft
from softgpu.build import NotBuilt, environment

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
