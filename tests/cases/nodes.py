"""Nodes of a cluster on this machine: processes as torchrun starts them, each with a host name of its own."""

from __future__ import annotations

import os
import select
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeplan.errors import PipeplanError
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.processes.own_processes import context_of

from .patience import SECONDS


def on_nodes(*runs: tuple[Any, ...], folders: Sequence[Path] = ()) -> list[Any]:
    """Let each of ``runs``, the arguments of :func:`run_plan`, be a rank on a node of its own.

    Return what each gave: a report, or (exit code, message). They work in ``folders``, if there are any. A store of
    ours plays that of torchrun's agent.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, processes, pipes = context_of(), [], []
    try:
        for rank, run in enumerate(runs):
            ours, theirs = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(len(runs)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            folder = folders[rank] if folders else os.getcwd()
            processes.append(context.Process(target=_be_node, args=(environment, folder, run, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.poll(SECONDS), "a rank hangs"
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be_node(environment, folder, run, pipe):
    os.environ.update(environment)
    rank = int(environment["RANK"])
    socket.gethostname = lambda: f"node{rank}"
    os.chdir(folder)
    try:
        pipe.send(run_plan(*run))
    except PipeplanError as error:
        pipe.send((error.exit_code, str(error)))
    except BaseException:
        pipe.send(traceback.format_exc())


def has_ended(process, seconds):
    """Wait for a process that is not a child of ours."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)
