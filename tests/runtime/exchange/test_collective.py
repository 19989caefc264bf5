"""What ranks do together, in two processes."""

import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from cases.patience import SECONDS

from pipeplan.runtime.exchange.collective import clock_offset, this_machine
from pipeplan.runtime.processes.own_processes import context_of

LATE_NS = 5 * 10**9


def late_clock():
    return time.monotonic_ns() - LATE_NS


def tell_offset(rank, store, machines, pipe):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    offset = clock_offset(rank, machines[rank], late_clock if rank else time.monotonic_ns)
    pipe.send(offset)
    dist.barrier()
    dist.destroy_process_group()


def offsets(tmp_path, machines):
    context = context_of()
    found, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=tell_offset, args=(rank, tmp_path / "store", machines, theirs)))
        processes[-1].start()
        found.append(ours)
    try:
        assert all(pipe.poll(SECONDS) for pipe in found)
        return [pipe.recv() for pipe in found]
    finally:
        for process in processes:
            process.join(SECONDS)
            process.kill()


def test_clocks_of_different_machines_are_brought_together(tmp_path):
    here, there = offsets(tmp_path, ["one", "other"])
    assert here == 0
    assert there == pytest.approx(LATE_NS, abs=LATE_NS / 10)


def test_one_machine_has_one_clock(tmp_path):
    assert offsets(tmp_path, [this_machine()] * 2) == [0, 0]
