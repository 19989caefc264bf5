"""Runs as a user starts them, from a script: interrupted and killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cases.nodes import has_ended
from cases.patience import SECONDS
from cases.runtime import chain_of, plan_of

from pipeplan.check.bounds import any_bound
from pipeplan.errors import BadInput
from pipeplan.files.plans import plan_text
from pipeplan.problem import Problem
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes import rendezvous
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import newest

SCRIPT = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.environ["CASES"])
from pipeplan.errors import PipeplanError
from pipeplan.files.plans import load_plan
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.engine.job import RunOptions

if __name__ == "__main__":
    plan = load_plan(str(Path(__file__).with_name("plan.json")))
    for line in sys.stdin:
        folder = Path(line.strip()) if line.strip() else None
        options = RunOptions(steps=100000, lr=0.01, checkpoint=folder, resume=folder is not None)
        try:
            run_plan(plan, ModelSpec(sys.argv[1], "cases.runtime:vectors"), options)
        except PipeplanError as error:
            print(f"exit code {error.exit_code}: {error}", flush=True)
        except KeyboardInterrupt:
            print("KeyboardInterrupt", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    """Give, for a model by name, the words that train it in two stages: a script, which reads a plan, and the model."""

    def words(model):
        plan = two_stages(model)
        bound = any_bound(Problem(plan.chain, plan.platform, plan.policy))
        (tmp_path / "plan.json").write_text(plan_text(replace(plan, lower_bounds=(bound,))))
        path = tmp_path / "training.py"
        path.write_text(SCRIPT)
        return str(path), model

    return words


def two_stages(model):
    module, _, name = model.rpartition(":")
    chain = chain_of(getattr(import_module(module), name), 4)
    return plan_of(chain, [(0, 2, (0,)), (2, len(chain), (1,))], weights="2bw")


def resumed(model, folder, more):
    """Go on from the newest checkpoint for so many updates, in processes of this one; return the last one's number."""
    found = newest(str(folder))
    options = RunOptions(steps=found.position.step + more, lr=0.01, checkpoint=folder, resume=True)
    assert run_plan(two_stages(model), ModelSpec(model, "cases.runtime:vectors"), options).losses
    return newest(str(folder)).position.step


def environment():
    return os.environ | {"CASES": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def announced(parent):
    """The numbers of the two ranks, once both train."""
    return [int(parent.stdout.readline()) for _ in range(2)]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes by pidfd")
def test_signals_leave_a_checkpoint_if_asked_and_no_rank_outlives_the_process_that_started_it(script, tmp_path):
    """Ctrl-C reaches all of a terminal's processes; a scheduler's signal, and a kill, only the first one."""
    with subprocess.Popen(
        [sys.executable, *script("cases.runtime:announcing")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as parent:

        def ended_by(signum, whom, folder=""):
            print(folder, file=parent.stdin, flush=True)
            ranks = announced(parent)
            os.killpg(parent.pid, signum) if whom == "all" else parent.send_signal(signum)
            said = parent.stdout.readline()
            assert all(has_ended(rank, SECONDS) for rank in ranks)
            return said

        try:
            for signum, whom in ((signal.SIGINT, "all"), (signal.SIGTERM, "parent")):
                folder = tmp_path / whom
                said = ended_by(signum, whom, folder)
                step = newest(str(folder)).position.step
                assert said.startswith(f"exit code 130: stopped after update {step}; its checkpoint is in {folder}")
                assert resumed("cases.runtime:announcing", folder, 2) == step + 2
            assert ended_by(signal.SIGINT, "all") == "KeyboardInterrupt\n"
            assert ended_by(signal.SIGKILL, "parent") == ""
        finally:
            parent.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes by pidfd")
def test_no_rank_is_left_by_an_interrupt_while_they_are_started(monkeypatch):
    begin, begun = BaseProcess.start, []

    def interrupted(process):
        begin(process)
        begun.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", interrupted)
    threading.Thread(target=time.sleep, args=(SECONDS,), daemon=True).start()  # may take the signal instead
    plan = two_stages("cases.runtime:healthy")
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, ModelSpec("cases.runtime:healthy", "cases.runtime:vectors"), RunOptions(steps=10**6, lr=0.01))
    assert len(begun) == 2
    assert all(has_ended(rank, SECONDS) for rank in begun)


def test_torchrun_must_start_as_many_processes_as_the_plan_has_devices(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "TELL_S", 0.1)  # nobody else is there
    plan = two_stages("cases.runtime:healthy")
    with pytest.raises(BadInput, match="the plan uses 2 devices; torchrun started 3 processes"):
        run_plan(plan, ModelSpec("gpt-tiny"), RunOptions(steps=1, lr=0.01))
