"""How runs end that something happens to: stopped, left by sys.exit, without numbers, by messages, under torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from queue import Empty
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from cases import runtime as runtime_cases
from cases.patience import SECONDS, fails_when_patient
from cases.runtime import chain_of, plan_of

from pipeplan.errors import RunFailed
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.engine.executor import OperationFailed
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.exchange.transport import PeerLost, exchanging
from pipeplan.runtime.lowering.instructions import Send, sentence
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes import own
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.processes.messages import Failure, failure_of, told
from pipeplan.runtime.processes.own import Gone, Ranks, inbox
from pipeplan.runtime.processes.own_processes import INTERFACES, is_here, is_stopped, listen_here
from pipeplan.runtime.training.state.checkpoint import newest

OPTIONS = {"steps": 6, "lr": 0.01}
LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")


def plan_on(stages, **options):
    return plan_of(chain_of(runtime_cases.healthy, 4), stages, **options)


@pytest.fixture(scope="module")
def two():
    return plan_on([(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


def model(name, data="cases.runtime:vectors"):
    return ModelSpec(f"cases.endings:{name}", data)


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="looks for sockets and states in /proc")
def test_a_stopped_rank_is_found_and_named_and_all_have_listened_to_this_machine_alone(two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(timeout_s):
        run_plan(two, model("stopping"), RunOptions(timeout_s=timeout_s, **OPTIONS))

    fails_when_patient(run, RunFailed, "rank 1 (has been|is) stopped .*in the forward of microbatch 4 on stage 1")
    found = [Path(f"listens-{rank}").read_text().split() for rank in range(2)]
    assert all(found), "gloo listens on every rank"
    assert all(address.startswith(LOOPBACK) for addresses in found for address in addresses)


def test_a_program_that_its_model_ends_is_a_failure(two, tmp_path):
    words = (
        r"^rank 1 failed in the forward of microbatch 4 on stage 1: it ended the program by sys.exit\(0\) \(.*:\d+\)"
    )
    with pytest.raises(RunFailed, match=words) as caught:
        run_plan(two, model("leaving"), RunOptions(**OPTIONS))
    assert caught.value.exit_code == 1


def test_a_program_that_ends_as_it_builds_its_model_is_a_failure_under_torchrun_too(monkeypatch):
    """There nobody else would notice: the rank's exit code is that of success."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in INTERFACES:
        monkeypatch.setenv(name, "lo")
    words = r"^rank 0 failed: cases.endings:leaving_at_once: it ended the program by sys.exit\(0\) \(.*endings.py:\d+\)"
    with pytest.raises(RunFailed, match=words):
        run_plan(plan_on([(0, 6, (0,))], weights="flush", accumulate=2), model("leaving_at_once"), RunOptions(1, 0.01))


def test_a_grid_by_messages_is_resumed_after_a_rank_was_killed(tmp_path):
    stages = [(0, 3, (0, 1)), (3, 6, (2, 3))]
    plan = under(plan_on(stages, weights="flush", accumulate=4), "message-driven", 2)
    healthy = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
    whole = run_plan(plan, healthy, RunOptions(**OPTIONS))
    with pytest.raises(RunFailed, match=r"^rank 3 died in .*: killed by SIGKILL"):
        run_plan(plan, model("killed_in_a_send"), RunOptions(checkpoint=tmp_path, every=2, **OPTIONS))
    kept = newest(str(tmp_path)).position.step
    rest = run_plan(plan, healthy, RunOptions(checkpoint=tmp_path, resume=True, every=2, **OPTIONS))
    assert rest.losses == whole.losses[4 * kept :]
    assert kept == 2


def test_a_loss_without_a_number_is_named_with_its_microbatch(two):
    words = r"^rank 1 failed in the forward of microbatch 5 on stage 1: the loss is nan"
    with pytest.raises(RunFailed, match=words):
        run_plan(two, ModelSpec("cases.runtime:healthy", "cases.endings:nan_from"), RunOptions(**OPTIONS))


ASKING = """
import os, sys, threading
import torch.distributed as dist
os.environ["RANK"] = "0"
store = dist.TCPStore("127.0.0.1", int(sys.argv.pop()), None, False)
asked = threading.Event()
def ask():
    while True:
        store.check(["failure"])
        asked.set()
threading.Thread(target=ask, daemon=True).start()
asked.wait()
from pipeplan.__main__ import main
main()
"""


def test_a_rank_that_ends_well_does_so_whatever_its_threads_wait_for():
    """Python ends threads of its own by what C++ takes for an error: they ask the store until the end."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    command = [sys.executable, "-c", ASKING, "--version", str(store.port)]
    rank = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert rank.returncode == 0
    assert rank.stdout.startswith("pipeplan, version"), "what was written comes out"


# --- who is named ---------------------------------------------------------------------------------------------------


def test_ranks_that_nothing_was_heard_of_are_named():
    """Under torchrun, where the store is all that ranks have of each other."""
    store = dist.HashStore()
    lost = Failure(0, "lost", "rank 0 lost another rank")
    first = told(lost, store, 3, 0.1)
    assert first.message == "rank 1 doesn't answer; rank 2 doesn't answer: rank 0 lost another rank"
    assert told(Failure(2, "lost", "rank 2 lost another rank"), store, 3, 0.1) == first


def test_of_silent_ranks_those_are_named_that_somebody_lost():
    """Rank 0 waits for rank 1, which waits for rank 2, which has lost rank 3."""
    store = dist.HashStore()
    store.set("failed/1", "[2]")
    lost = told(Failure(2, "lost", "rank 2 lost another rank", peers=(3,)), store, 4, 0.1)
    assert lost.message == "rank 3 doesn't answer: rank 2 lost another rank"


def test_a_reason_comes_before_a_loss():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    reason = Failure(1, "failed", "rank 1 failed")
    assert told(reason, store, 2, 0.1) == reason
    assert told(Failure(0, "lost", "rank 0 lost another rank"), store, 2, 0.1) == reason
    assert json.loads(store.get("failure"))["rank"] == 1


def test_a_store_that_has_gone_tells_nothing():
    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("connection reset")

    failure = Failure(1, "failed", "rank 1 failed")
    assert told(failure, Gone(), 2, 0.1) is failure


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("[tcp/pair.cc:534] Connection closed by peer [::1]:1\nframe #0: x", "Connection closed by peer [::1]:1"),
        (
            "NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.27\n"
            "ncclInvalidUsage: This usually reflects invalid usage.\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 81000\n",
            "NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.27: "
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 81000",
        ),
    ],
)
def test_what_gloo_and_nccl_raise_is_told_in_one_line(raised, words):
    with pytest.raises(PeerLost) as caught, exchanging("the send", 1):
        raise RuntimeError(raised)
    assert str(caught.value) == f"the send: {words}"


NCCLS = """NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL version 2.28
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure """


@pytest.mark.parametrize(
    ("raised", "words", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "CUDA out of memory", "--reserve"),
        (dist.DistBackendError(f"{NCCLS}2 'out of memory'"), "NCCL.*: Cuda failure 2 'out of memory'", "--reserve"),
        (dist.DistBackendError(f"{NCCLS}710 'device-side assert'"), "NCCL.*: Cuda failure 710", "CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_a_gpu_that_is_full_or_fails_within_nccl_is_no_loss_of_a_rank(raised, words, advice):
    with pytest.raises(RuntimeError) as caught, exchanging("the send", 1):
        raise raised
    failure = failure_of(1, caught.value)
    assert failure.kind == "failed"
    assert re.search(f"{words}.*{advice}", failure.message)


FAULT = """CUDA error: device-side assert triggered
Search for `cudaErrorAssert' in https://docs.nvidia.com for more information."""


@pytest.mark.parametrize("within", [exchanging("a send", 1), nullcontext()])
def test_a_fault_of_the_own_gpu_is_no_loss_of_a_rank_and_was_made_before_it_shows(within):
    send = Send("B", 2, 7, 1)
    with pytest.raises(torch.AcceleratorError) as caught, within:
        raise torch.AcceleratorError(FAULT)
    failed = OperationFailed(send)
    failed.__cause__ = caught.value
    failure = failure_of(2, failed)
    assert failure.kind == "failed"
    assert failure.message == (
        f"rank 2 failed in or before {sentence(send)}: CUDA error: device-side assert triggered; "
        "a GPU reports its errors late, CUDA_LAUNCH_BLOCKING=1 shows where they are made"
    )


LOST = Failure(0, "lost", "rank 0 lost another rank", peers=(1,))


@pytest.mark.parametrize(
    ("on_gpus", "timeout_s", "other", "named"),
    [
        (True, 0, None, "^rank 0 doesn't answer .*rank 1 died .*SIGABRT"),
        (True, SECONDS, None, "^rank 1 died .*SIGABRT; torch ends a process so whose GPU has failed"),
        (True, SECONDS, LOST, "^rank 1 died .*SIGABRT; torch ends a process so whose GPU has failed"),
        (False, SECONDS, None, "^rank 1 died"),
    ],
)
def test_a_rank_that_torchs_watchdog_ends_has_waited_for_another_if_nobody_has_gone_on(
    on_gpus, timeout_s, other, named, monkeypatch
):
    """On GPUs it aborts the process that waits, not the one that hangs; but also one whose own GPU has failed."""
    monkeypatch.setattr(own, "GRACE_S", 0.05)
    pipes, ends = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(2)), strict=True)
    if other is not None:
        ends[0].send(other)
    ends[1].close()
    hangs, aborted = SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=0, exitcode=-6, join=lambda: None)
    with pytest.raises(RunFailed, match=named):
        Ranks(None, [hangs, aborted], pipes, [-1, -1], timeout_s, on_gpus, lambda _: None).outcome()


def test_addresses_of_this_machine(monkeypatch):
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert not is_here("192.0.2.1")
    assert not is_here("no.such.host.invalid")
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    listen_here()
    assert {os.environ[name] for name in INTERFACES} == {"lo"} or not os.path.exists("/sys/class/net/lo")
    monkeypatch.setenv(INTERFACES[0], "eth7")
    listen_here()
    assert os.environ[INTERFACES[0]] == "eth7"


def test_half_a_message_keeps_nobody_waiting():
    readers, writers = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(2)), strict=True)
    news = inbox(readers)
    os.write(writers[0].fileno(), b"\0\0\1\0half")  # 4 of 256 bytes
    writers[1].send("whole")
    assert news.get(timeout=SECONDS) == (1, "whole")
    with pytest.raises(Empty):
        news.get(timeout=0.1)
    writers[0].close()
    number, message = news.get(timeout=SECONDS)
    assert (number, type(message)) == (0, Gone)
    writers[1].close()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for states in /proc")
def test_a_stopped_process_is_told_from_others():
    assert not is_stopped(os.getpid())
    assert not is_stopped(None)
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert is_stopped(process.pid)
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)
            assert not is_stopped(process.pid)
        finally:
            process.kill()


LEAVES = """
import multiprocessing, threading, time
from multiprocessing import resource_tracker
from pipeplan.runtime.processes.own_processes import leave
kept, unregister = multiprocessing.get_context("spawn").Lock(), resource_tracker.unregister
begun = threading.Event()
def slowly(*what):
    begun.set()
    time.sleep(0.5)
    unregister(*what)
resource_tracker.unregister = slowly
threading.Thread(target=leave, args=(0,)).start()
begun.wait()
leave(0)
"""


def test_of_two_threads_that_leave_none_leaves_a_semaphore_to_be_told_of():
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True, timeout=300)
    assert (done.stdout, done.stderr) == ("", "")
