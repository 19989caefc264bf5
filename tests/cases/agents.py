"""Nodes on this machine, each with a folder and an agent of torchrun's; what its rank said, and how it ended."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.runtime.processes.own_processes import context_of
from pipeplan.runtime.processes.watchdog import SIGNALS

from .patience import SECONDS


@dataclass(frozen=True)
class Node:
    """One node: its folder and its agent's process."""

    number: int
    folder: Path
    agent: Any

    def said(self) -> str:
        """What its rank has said on standard error."""
        return (self.folder / "said").read_text()

    def codes(self) -> list[int]:
        """How its ranks have ended, one after the other."""
        return list(map(int, (self.folder / "codes").read_text().split()))

    def wait(self) -> None:
        """Wait until its agent has ended."""
        self.agent.join(SECONDS)
        assert self.agent.exitcode is not None, f"node {self.number} hangs; it said {self.said()}"


def unused_port() -> int:
    """Return a port that nobody listens at, of those that the system gives to nobody who asks for any one."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(given.read_text().split()[0]) if given.exists() else 32768
    for port in random.SystemRandom().sample(range(10_000, max(lowest, 20_000)), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("all ports are taken")


@contextmanager
def two_nodes(
    tmp_path: Path, arguments: Sequence[str], prepare: Callable[[int], None], restarts: int = 0
) -> Iterator[Any]:
    """Start two agents, each of one rank that runs ``pipeplan`` with ``arguments`` in its node's folder.

    ``prepare(number)`` is called in the folder first. The agents find each other as ``--rdzv-backend=c10d`` has it.
    """
    port, nodes = unused_port(), []
    try:
        for number in range(2):
            folder = tmp_path / f"node{number}"
            folder.mkdir()
            home = os.getcwd()
            os.chdir(folder)
            try:
                prepare(number)
            finally:
                os.chdir(home)
            agent = context_of().Process(target=_agent, args=(number, folder, port, list(arguments), restarts))
            agent.daemon = False
            agent.start()
            nodes.append(Node(number, folder, agent))
        yield nodes
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):  # nothing is left
                os.killpg(node.agent.pid, signal.SIGKILL)
            node.agent.join(SECONDS)


def one_node(folder: Path, ranks: int, arguments: Sequence[str]) -> Node:
    """Run ``pipeplan`` with ``arguments`` in some ranks of one agent's; return how they ended."""
    agent = context_of().Process(target=_agent, args=(0, folder, unused_port(), list(arguments), 0, 1, ranks))
    agent.daemon = False
    agent.start()
    node = Node(0, folder, agent)
    node.wait()
    return node


def _agent(number, folder, port, arguments, restarts, nodes=2, ranks=1):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a run that has started the server held them back
    os.chdir(folder)
    logging.disable(logging.CRITICAL)
    socket.getfqdn = lambda *_: "127.0.0.1"
    launch = LaunchConfig(
        min_nodes=nodes, max_nodes=nodes, nproc_per_node=ranks, run_id="nodes", start_method="fork",
        monitor_interval=0.05, max_restarts=restarts,
        rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", local_addr="127.0.0.1",
        rdzv_configs={"keep_alive_max_attempt": SECONDS // 5, "read_timeout": SECONDS},  # however busy the machine
    )  # fmt: skip
    try:
        elastic_launch(launch, _rank)(number, folder, arguments)
    except BaseException as error:
        (folder / "agent").write_text(repr(error))
        os._exit(1)
    os._exit(0)


def _rank(number, folder, arguments):
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    socket.gethostname = lambda: f"node{number}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.insert(0, str(folder))
    sys.argv = ["pipeplan", *arguments]
    leave = os._exit

    def noted(code):
        with (folder / "codes").open("a") as file:
            file.write(f"{code} ")
        os._exit = leave
        if code:  # else the agent waits for what this function returns
            leave(code)

    os._exit = noted
    from pipeplan.__main__ import main

    with suppress(SystemExit):
        main()
