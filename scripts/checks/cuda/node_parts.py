"""Checks of several nodes, each of which starts this with its number: exactness, folders, resuming, failures.

The folder is one that all nodes share. All go through the same parts, and meet in each; node 0 judges.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from checked_models import MODELS
from checking import LOOSE, LR, STRAIGHT, Check, Outcome, Part, against_serial, apart, figures_of, importing, must

from pipeplan.files.plans import plan_text

WAIT_S = 900  # for what node 0 makes, and for a run to end
PORTS = 16  # beside the first one, one for each run


@dataclass(frozen=True)
class Nodes:
    """``count`` nodes of which this is ``number``; torchrun on node 0 listens at ``address``, from ``port`` on."""

    count: int
    number: int
    address: str
    port: int

    def of(self, check: Check) -> int:
        """The ranks of all nodes."""
        return self.count * max(check.gpus, 1)


@dataclass(frozen=True)
class Ended:
    """How torchrun ended on this node."""

    code: int
    out: str
    said: str

    @property
    def errors(self) -> list[str]:
        """The sentences of its ranks."""
        return [line for line in self.said.splitlines() if "error: " in line]


def run(check: Check, nodes: Nodes, turn: int, steps: int, running: Sequence[Any] = (), data: str = "gpt") -> Ended:
    """Run the nodes' plan, all nodes together; ``turn`` tells runs apart."""
    model, _ = MODELS["gpt"]
    plan = check.folder / "nodes.plan.json"
    if nodes.number == 0 and not plan.exists():
        whole = plan.with_suffix(".tmp")
        whole.write_text(plan_text(check.plan("gpt", nodes.of(check), STRAIGHT)))
        whole.replace(plan)
    until = time.monotonic() + WAIT_S
    while not plan.exists():
        must(time.monotonic() < until, f"{plan} never came: is the folder one that the nodes share?")
        time.sleep(0.2)
    launcher = [
        *("-m", "torch.distributed.run", f"--nnodes={nodes.count}", f"--nproc-per-node={max(check.gpus, 1)}"),
        *(f"--node-rank={nodes.number}", f"--master-addr={nodes.address}"),
        f"--master-port={nodes.port + turn % PORTS}",
    ]
    words = ["-m", "pipeplan", "run", plan, "--model", model, "--data", f"checked_models:{data}", "--steps", steps]
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, [*words, "--lr", LR, "--device", check.kind, "--json", *running])],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=importing(),
    )
    with (check.folder / f"commands.node{nodes.number}.log").open("a") as log:
        log.write(f"{' '.join(map(str, words))}\n{done.stderr}[{done.returncode}]\n")
    return Ended(done.returncode, done.stdout, done.stderr)


def good(ended: Ended) -> Ended:
    """Return a run that ended well."""
    must(ended.code == 0, f"torchrun ended with {ended.code}: {ended.said[-1500:]}")
    return ended


def exact(check: Check, nodes: Nodes) -> Outcome:
    """Do the nodes train together as one process does?"""
    saved = check.folder / "trained.pt"
    ended = good(run(check, nodes, 0, 6, ["--save", saved]))
    if nodes.number:
        return Outcome("node 0 judges")
    report = json.loads(ended.out)
    words, figures = against_serial(check, "gpt", report["losses"], saved)
    return Outcome(f"{words}; by {report['exchange']}", figures_of(report) | figures)


def apart_folders(check: Check, nodes: Nodes) -> Outcome:
    """Is a checkpoint folder refused that each node has for itself?"""
    with tempfile.TemporaryDirectory() as place:
        ended = run(check, nodes, 1, 2, ["--checkpoint", place])
    sentence = ended.errors[0] if ended.errors else ended.said[-1500:]
    must(ended.code != 0 and "isn't one folder for all" in sentence, sentence)
    return Outcome(f"refused: {sentence}")


def resumed(check: Check, nodes: Nodes) -> Outcome:
    """Do the nodes go on from a shared checkpoint with the losses of an unbroken run?"""
    place = check.folder / f"checkpoints-{nodes.port}"
    unbroken = good(run(check, nodes, 2, 6))
    first = good(run(check, nodes, 3, 3, ["--checkpoint", place]))
    rest = good(run(check, nodes, 4, 6, ["--checkpoint", place, "--resume"]))
    if nodes.number:
        return Outcome("node 0 judges")
    whole, begun, ended = (json.loads(x.out)["losses"] for x in (unbroken, first, rest))
    error = apart(begun + ended, whole)
    must(error < LOOSE, f"after a break losses differ by {error:.1e}")
    return Outcome(f"after a break losses are the same but for {error:.1e}", {"difference": error})


def killed(check: Check, nodes: Nodes) -> Outcome:
    """Does a rank that dies end all nodes?"""
    begin = time.monotonic()
    ended = run(check, nodes, 5, 1000, data="dying")
    must(ended.code != 0, "the run ended well")
    seconds = time.monotonic() - begin
    sentence = ended.errors[0] if ended.errors else "torchrun tells of the signal"
    return Outcome(f"all over after {seconds:.0f} s: {sentence}", {"seconds": seconds, "errors": ended.errors})


def parts_of(nodes: Nodes) -> dict[str, Part]:
    """Return the parts of this node."""
    own: dict[str, tuple[Callable[[Check, Nodes], Outcome], str]] = {
        "nodes_exact": (exact, "Do the nodes train together as one process does?"),
        "nodes_folders": (apart_folders, "Is a folder refused that each node has for itself?"),
        "nodes_resumed": (resumed, "Do the nodes resume from a shared checkpoint?"),
        "nodes_killed": (killed, "Does a rank that dies end all nodes?"),
    }
    return {
        f"{name}.node{nodes.number}": Part(partial(part, nodes=nodes), question, WAIT_S)
        for name, (part, question) in own.items()
    }


def nodes_from(count: int, number: int, master: str) -> Nodes:
    """Return what the command line says."""
    address, _, port = master.partition(":")
    return Nodes(count, number, address, int(port or 29500))
