"""What is decided about devices, with GPUs made up where this machine has none."""

import pytest

torch = pytest.importorskip("torch")

import os
import platform as host
import resource
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from cases import runtime as runtime_cases
from cases.forked import forked
from cases.measured import replayed, script_of
from cases.runtime import chain_of, plan_of
from torch import nn
from torch._subclasses import FakeTensorMode

from pipeplan.errors import BadInput, RunFailed
from pipeplan.plan import Schedule
from pipeplan.problem import Chain, Policy
from pipeplan.runtime import device as module
from pipeplan.runtime import surroundings
from pipeplan.runtime.device import (
    CPU,
    exchange_of,
    freed_kept,
    gpu_of,
    group_timeout,
    kind_of,
    moved,
    on_host,
    own_device,
    peak_bytes,
    place,
    random_state,
    set_random_state,
    sharing,
    watch_last,
)
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.measure.report import make_report
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.network import chain_network, final_outputs
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import device_name


@pytest.fixture
def gpus(monkeypatch):
    """Let torch see two GPUs; gives the list of those that were made current."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_auto_takes_a_gpu_if_there_is_one_and_the_profile_is_not_of_a_cpu(gpus, monkeypatch):
    def kind(choice, device):
        return kind_of(choice, Chain("net", (), 0, device=device))

    assert kind("auto", "") == "cuda"
    assert kind("auto", "NVIDIA H200") == "cuda"
    assert kind("auto", "V100 (estimated)") == "cuda"
    assert kind("auto", device_name("cpu", 1)) == kind("auto", device_name("cpu", 16)) == "cpu"
    assert kind("auto", f"{device_name('cpu', 2)}, CPU time") == "cpu"
    assert kind("cuda", device_name("cpu", 1)) == "cuda"
    assert kind("cpu", "NVIDIA H200") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kind("auto", "") == kind("cpu", "NVIDIA H200") == kind("auto", device_name("cpu", 1)) == "cpu"
    with pytest.raises(
        BadInput, match=r"^the plan is for NVIDIA H200, and --device is auto: torch sees no GPU here; --d"
    ):
        kind("auto", "NVIDIA H200")
    monkeypatch.setattr(surroundings, "_driven", lambda: ["NVIDIA H200"] * 8)
    with pytest.raises(
        BadInput, match=r"the driver has 8 \(NVIDIA H200\), torch .* CUDA_VISIBLE_DEVICES; --device cpu"
    ):
        kind("auto", "NVIDIA H200")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_any_process_starts():
    plan = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")
    with pytest.raises(BadInput, match="--device cuda: torch sees no GPU here; --device cpu runs on the CPU"):
        run_plan(plan, ModelSpec("gpt-tiny"), RunOptions(steps=1, lr=0.01, device="cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_check_of_gpus_says_that_there_is_none(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "checks" / "cuda"
    done = forked(script, tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cuda: torch sees no GPU here; --device cpu rehearses the checks\n"
    assert not (tmp_path / "out").exists()


def test_processes_of_a_machine_go_round_its_gpus(gpus):
    assert own_device("cpu", 3) == CPU
    assert gpus == []
    assert [own_device("cuda", k).index for k in range(5)] == [0, 1, 0, 1, 0]
    assert [device.index for device in gpus] == [0, 1, 0, 1, 0]


def test_ranks_that_share_gpus_are_told_of(gpus):
    assert sharing("cuda", 4) == "4 ranks share 2 GPUs: what they exchange travels through host memory"
    assert sharing("cuda", 2) is None
    assert sharing("cpu", 4, True) is None
    assert sharing("cuda", 2, True).startswith("messages come in any order, so threads receive them")


@pytest.mark.parametrize(
    ("everybodys", "exchange"),
    [
        ([None, None], "gloo"),
        ([("a", "1")], "nccl"),
        ([("a", "1"), ("a", "2"), ("b", "1")], "nccl"),
        ([("a", "1"), ("a", "2"), ("b", "1"), ("b", "1")], "staged"),
    ],
)
def test_nccl_is_for_gpus_that_nobody_shares(monkeypatch, everybodys, exchange):
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: True)
    devices = [None if x is None else SimpleNamespace(type="cuda", machine=x[0], uuid=x[1]) for x in everybodys]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: device)
    gpus = [gpu_of(CPU, "a") if x is None else gpu_of(x, x.machine) for x in devices]
    assert exchange_of(gpus) == exchange


def test_ranks_with_and_without_a_gpu_do_not_run_together():
    with pytest.raises(RunFailed, match="rank 1 sees no GPU, others do"):
        exchange_of(["a 1", None, "a 2"])


def test_random_state_holds_the_gpus_too(monkeypatch):
    states = {0: torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device.index: state}))
    gpu = torch.device("cuda", 0)
    torch.manual_seed(3)
    state = random_state(gpu)
    expected = torch.rand(2)
    torch.manual_seed(4)
    states[0] = torch.zeros(16, dtype=torch.uint8)
    set_random_state(state, gpu)
    assert torch.equal(torch.rand(2), expected)
    assert states[0].tolist() == list(range(16))
    states[0] = torch.zeros(16, dtype=torch.uint8)
    set_random_state(state, CPU)  # of a checkpoint that was written on a GPU
    assert torch.equal(torch.rand(2), expected)
    assert not states[0].any()
    set_random_state(random_state(CPU), gpu)  # and the other way round
    assert not states[0].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves tensors to a GPU")
def test_placed_modules_keep_their_tied_weights():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weight = other.weight = one.weight
    place([one, other], torch.device("cuda", 0))
    assert one.weight is other.weight is weight
    assert weight.device.type == "cuda"


def test_placed_modules_keep_the_buffers_that_they_share():
    """A norm that is called twice has its statistics once, on the meta device as on a GPU."""
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other._buffers.update(one._buffers)
    place([one, nn.Sequential(other)], torch.device("meta"))
    for name in one._buffers:
        assert one._buffers[name] is other._buffers[name]
        assert one._buffers[name].device.type == "meta"


@pytest.mark.parametrize("release", [True, False])
def test_layers_that_are_measured_keep_the_buffers_that_they_share(release):
    """Whether all of them stand on the device or one after the other, on one that is made up here."""

    class Counter(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    with FakeTensorMode():
        count = torch.zeros(2)
        layers = [nn.Sequential(Counter(count), Counter(count)), Counter(count)]
        network = chain_network(layers, torch.zeros(2, device="meta"))
        where = []
        for layer in layers:
            layer.register_forward_hook(lambda *_: where.append({b.device.type for x in layers for b in x.buffers()}))
        final_outputs(network, "meta", release)
        left = {buffer for layer in layers for part in layer.modules() for buffer in part._buffers.values()}
    assert where == ([{"meta", "cpu"}] * 2 if release else [{"meta"}] * 2)
    assert [buffer.device.type for buffer in left] == (["cpu"] if release else ["meta"]), "one buffer is left"
    assert (count in left) == release


def test_weights_over_one_memory_are_refused_where_they_would_come_apart():
    weight = torch.zeros(4, 4)
    first, second, over = (nn.Linear(4, 2, bias=False) for _ in range(3))
    first.weight, second.weight = nn.Parameter(weight[:2]), nn.Parameter(weight[2:])
    over.weight = nn.Parameter(weight[1:3])
    place([first, second, over], CPU)
    with pytest.raises(BadInput, match="the weights weight and weight are two over one memory"):
        place([first, over], torch.device("meta"))
    place([first, second], torch.device("meta"))  # side by side
    assert second.weight.device.type == "meta"


def test_memory_of_gpus_is_told_as_allocated_reserved_and_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
    for name, value in {"max_memory_allocated": 20, "max_memory_reserved": 30, "memory_reserved": 25}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 3})
    found = peak_bytes(torch.device("cuda"))
    assert found == (20, 30, 15, 3), "allocated, reserved, others, retries"
    script = script_of(Policy("flush", accumulate=4), Schedule("flush", 4), 3)
    one, other = replayed(script, 1)
    (memory,) = make_report(script, [replace(one, gpu=found), other]).memory
    assert (memory.device, memory.measured_bytes, memory.reserved_bytes, memory.used_bytes) == (0, 20, 30, 45)
    assert memory.planned_bytes > 0
    assert peak_bytes(CPU) is None


def test_torchs_watchdog_comes_after_our_own(monkeypatch):
    for name in module.NCCL:
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    watch_last(CPU)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    watch_last(torch.device("cuda", 0))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1", "the user's"
    minute = timedelta(minutes=1)
    assert group_timeout(minute, "gloo") == minute < group_timeout(minute, "nccl")


@pytest.mark.skipif(host.libc_ver()[0] != "glibc", reason="it is glibc that gives freed memory back")
def test_freed_memory_is_not_fetched_from_the_system_again():
    def pages_of_a_round():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        freed, kept = torch.ones(3 * 10**6), torch.ones(10**6)
        del freed
        torch.ones(3 * 10**6)
        del kept
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with freed_kept():
        for _ in range(20):  # until it has found room for all
            pages_of_a_round()
        assert sum(pages_of_a_round() for _ in range(5)) < 1000
        held = resident_bytes()
    assert resident_bytes() < held - 10**7, "given back at the end, whatever the size of a page"


def test_what_is_on_the_device_is_not_copied():
    x = torch.zeros(2)
    assert moved(x, CPU) is x
    assert on_host(x) is x
    assert moved(x, torch.device("meta")).device.type == "meta"


def test_the_server_that_ranks_are_forked_from_asks_nothing_of_cuda() -> None:
    """What has been asked of it before a fork is of no use behind it."""
    code = """
import torch

def asked(*_, **__): raise AssertionError("before a fork")

for name in ("_lazy_init", "init", "device_count", "is_available", "current_device"):
    setattr(torch.cuda, name, asked)
import pipeplan.runtime.processes.preloaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
