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
from cases.nodes import has_ended
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of

from pipeplan.check.bounds import any_bound
from pipeplan.files.plans import plan_text
from pipeplan.problem import Problem
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import newest

ARGUMENTS = ["run", "plan.json", "--model", "own:healthy", "--data", "own:vectors", "--steps", "3", "--lr", "0.01"]


@pytest.fixture(scope="module")
def stages():
    return plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


@pytest.fixture(scope="module")
def plan(stages):
    bound = any_bound(Problem(stages.chain, stages.platform, stages.policy))
    return plan_text(replace(stages, lower_bounds=(bound,)))


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
    return _once(lambda: os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


def _once(look):
    """Wait until ``look`` raises no OSError; return what it gives."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        with suppress(OSError):
            return look()
        time.sleep(0.01)
    raise AssertionError("it doesn't happen")


TELLING = """
import os
from pathlib import Path
from cases.runtime import healthy, vectors as plain
def vectors(index, seed):
    if index == 20:
        Path("half").write_text(str(os.getpid()))
        os.rename("half", "trains")
    return plain(index, seed)
"""


@pytest.mark.parametrize("whom", ["agent", "rank"])
def test_a_signal_leaves_a_checkpoint(whom, stages, plan, tmp_path):
    """The agent passes it on to its ranks; a scheduler may send it to a rank alone."""
    folder = tmp_path / "checkpoints"

    def prepare(number):
        Path("plan.json").write_text(plan)
        Path("own.py").write_text(TELLING)

    arguments = [*ARGUMENTS, "--steps", "100000", "--checkpoint", str(folder)]
    with two_nodes(tmp_path, arguments, prepare) as nodes:
        ranks = [int(_once((node.folder / "trains").read_text)) for node in nodes]
        os.kill(nodes[1].agent.pid if whom == "agent" else ranks[1], signal.SIGTERM)
        for node in nodes:
            node.wait()
        assert all(has_ended(rank, SECONDS) for rank in ranks)
        assert all(code for node in nodes for code in node.codes())
    found = newest(str(folder))
    assert found is not None
    assert 0 < found.position.step < 100000
    said = f"stopped after update {found.position.step}; its checkpoint is in {folder}"
    assert any(said in node.said() for node in nodes)
    options = RunOptions(steps=found.position.step + 2, lr=0.01, checkpoint=folder, resume=True)
    assert run_plan(stages, ModelSpec("cases.runtime:healthy", "cases.runtime:vectors"), options).losses
    assert newest(str(folder)).position.step == found.position.step + 2


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
