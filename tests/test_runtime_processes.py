"""Runs as a user starts them, from a script: interrupted, killed, and under torchrun."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import runtime_cases  # noqa: E402
from runtime_cases import chain_of, plan_of  # noqa: E402

from pipeplan.errors import BadInput  # noqa: E402
from pipeplan.runtime.launch import run_plan  # noqa: E402
from pipeplan.runtime.model import ModelSpec  # noqa: E402

SECONDS = 60  # far more than anything here takes
pytestmark = pytest.mark.timeout(4 * SECONDS)


SCRIPT = """
import os, sys
sys.path.insert(0, os.environ["CASES"])
import runtime_cases
from pipeplan.errors import PipeplanError
from pipeplan.runtime.launch import run_plan
from pipeplan.runtime.model import ModelSpec

if __name__ == "__main__":
    chain = runtime_cases.chain_of(getattr(runtime_cases, sys.argv[1]), 4)
    plan = runtime_cases.plan_of(chain, [(0, 2, (0,)), (2, len(chain), (1,))], weights="2bw")
    try:
        report = run_plan(
            plan, ModelSpec("runtime_cases:" + sys.argv[1], "runtime_cases:vectors"), steps=int(sys.argv[2]), lr=0.01
        )
        if report is not None:
            print("loss", report.losses[-1])
    except PipeplanError as error:
        print("error:", error)
        sys.exit(1)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "training.py"
    path.write_text(SCRIPT)
    return path


def environment():
    return os.environ | {"CASES": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}


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


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes by pidfd")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_process_that_started_it(script, signum):
    """Ctrl-C reaches all of a terminal's processes; a kill only the first one."""
    with subprocess.Popen(
        [sys.executable, str(script), "announcing", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as parent:
        try:
            ranks = [int(parent.stdout.readline()) for _ in range(2)]
            if signum == signal.SIGINT:
                os.killpg(parent.pid, signum)
            else:
                parent.send_signal(signum)
            parent.wait(SECONDS)
            assert all(has_ended(rank, SECONDS) for rank in ranks)
            if signum == signal.SIGINT:
                assert "KeyboardInterrupt" in parent.stderr.read()
        finally:
            parent.kill()


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("announcing", 0, "loss "),
        ("raising", 1, "rank 1 failed in the forward of microbatch 4 on stage 1: ValueError: a bad microbatch"),
    ],
)
def test_under_torchrun_the_processes_are_the_ranks(script, model, code, words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, str(script), model, "10"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as launcher:
        try:
            out, err = launcher.communicate(timeout=2 * SECONDS)
        finally:
            launcher.terminate()  # it ends its processes, which a kill would leave behind
    assert launcher.returncode == code, err
    assert words in out
    assert out.count("loss") == int(code == 0)


def test_torchrun_must_start_as_many_processes_as_the_plan_has_devices(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    plan = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")
    with pytest.raises(BadInput, match="the plan uses 2 devices; torchrun started 3 processes"):
        run_plan(plan, ModelSpec("gpt-tiny"), steps=1, lr=0.01)
