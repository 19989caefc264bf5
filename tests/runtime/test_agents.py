"""Nodes with an agent of torchrun's each: what goes wrong on one ends both, and what is started again meets again."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.agents import two_nodes
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of

from pipeplan.check.bounds import any_bound
from pipeplan.files.plans import plan_text
from pipeplan.problem import Problem
from pipeplan.runtime.training.state.checkpoint import newest

ARGUMENTS = ["run", "plan.json", "--model", "own:healthy", "--data", "own:vectors", "--steps", "3", "--lr", "0.01"]


@pytest.fixture(scope="module")
def plan():
    found = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")
    return plan_text(replace(found, lower_bounds=(any_bound(Problem(found.chain, found.platform, found.policy)),)))


def test_a_plan_that_one_node_lacks_ends_both_with_one_sentence(plan, tmp_path):
    def prepare(number):
        if number == 0:
            Path("plan.json").write_text(plan)

    with two_nodes(tmp_path, ARGUMENTS, prepare) as nodes:
        for node in nodes:
            node.wait()
    words = "plan.json: cannot be read: No such file or directory"
    said = [node.said() for node in nodes]
    assert f"error: {words}\n" in said[1]
    assert "Traceback" not in said[0] + said[1]
    assert f" on node1: {words}\n" in said[0]
    assert [node.codes() for node in nodes] == [[2], [2]]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="lets a rank wait for a pipe")
def test_a_signal_before_all_have_met_ends_both_nodes_at_once(plan, tmp_path):
    def prepare(number):
        Path("plan.json").write_text(plan) if number == 0 else os.mkfifo("plan.json")

    with two_nodes(tmp_path, ARGUMENTS, prepare) as nodes:
        _once_read(tmp_path / "node1" / "plan.json")
        os.kill(nodes[1].agent.pid, signal.SIGTERM)
        for node in nodes:
            node.wait()
    assert [node.codes() for node in nodes] == [[143], [143]]
    assert "ended by SIGTERM" in nodes[1].said()
    assert " was ended by SIGTERM" in nodes[0].said()


def _once_read(pipe):
    """Wait until somebody has opened ``pipe`` to read."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        with suppress(OSError):  # nobody has
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    raise AssertionError("nobody reads the plan")


OWN = """
from pathlib import Path
from cases.runtime import healthy, vectors as plain
def vectors(index, seed):
    failed = Path(__file__).with_name("failed")
    if index == 4 and Path(__file__).parent.name == "node1" and not failed.exists():
        failed.touch()
        raise ValueError("once")
    return plain(index, seed)
"""


def test_ranks_on_two_nodes_that_torchrun_starts_again_meet_again_and_go_on(plan, tmp_path):
    """Only the agent whose rank failed counts that; the other one's ranks are started again for its sake."""
    folder = tmp_path / "checkpoints"

    def prepare(number):
        Path("plan.json").write_text(plan)
        Path("own.py").write_text(OWN)

    more = ["--checkpoint", str(folder), "--checkpoint-every", "1"]
    with two_nodes(tmp_path, [*ARGUMENTS, *more], prepare, restarts=2) as nodes:
        for node in nodes:
            node.wait()
    said = [node.said() for node in nodes]
    assert newest(folder).position.step == 3, said
    assert [node.codes()[-1] for node in nodes] == [0, 0]
    assert [(node.folder / "failed").exists() for node in nodes] == [False, True]
    failed = "error: rank 1 failed in the forward of microbatch 4 on stage 1: ValueError: once (own.py:8)\n"
    assert all(words.count(failed) == 1 for words in said)
    assert all(" is on node" in words and "; it writes the report, --save and --trace\n" in words for words in said)
