"""A folder with a run's checkpoints after updates 2 and 4, and what is said where the newer one isn't taken."""

import random
import shutil
import time
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases.runtime import chain_of, healthy, plan_of

from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.lowering.lowered_run import Position
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.agreement import one_run
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import ABOUT, FileSum, begin, file_of, finish, newest
from pipeplan.runtime.training.state.written import TrainingState
from pipeplan.runtime.training.update.optimizers import parse_choice

MODEL = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
OPTIONS = {"lr": 0.01, "every": 2, "optimizer": parse_choice("SGD,momentum=0.9", "here")}
FILES = [ABOUT, "rank-00000.pt", "rank-00001.pt"]
LAST = "step-00000004"


def passed_over(folder):
    """What is said about the newest checkpoint, which isn't taken; the one before it is."""
    heard = []
    found = newest(folder, heard.append)
    assert found.position.step == 2
    assert len(heard) == 1
    assert heard[0].startswith(str(folder / LAST))
    return heard[0].removeprefix(str(folder / LAST)).removeprefix("/")


def state_of(rates=None, **model):
    return TrainingState(model, {}, torch.get_rng_state(), rates)


@pytest.fixture(scope="session")
def plan():
    return plan_of(chain_of(healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


@pytest.fixture(scope="session")
def written(plan, tmp_path_factory):
    """A folder with checkpoints after updates 2 and 4 of two ranks."""
    folder = tmp_path_factory.mktemp("written")
    run_plan(plan, MODEL, RunOptions(steps=4, checkpoint=folder, **OPTIONS))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "c"))


@pytest.fixture
def made(tmp_path):
    """A folder with checkpoints after updates 2 and 4 of two ranks, of bytes that mean nothing."""
    made = tmp_path / "c"
    for step in (2, 4):
        appear(made, step)
    return made


def appear(folder, step, ranks=2, size=500, plan=None, seed=7):
    """Let a checkpoint appear in a folder, with so many bytes of each rank."""
    partial, files = begin(folder, step), []
    for rank in range(ranks):
        data = random.Random(10 * step + rank).randbytes(size)
        (partial / file_of(rank)).write_bytes(data)
        files.append(FileSum(size, zlib.crc32(data)))
    finish(partial, Position(step, 4 * step), "healthy", seed, files, plan)


@pytest.fixture(scope="module")
def one_rank():
    """This process is the only rank there is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hold(folder, pipe):
    """Have a folder of checkpoints for ever, and say so."""
    with one_run(folder):
        pipe.send("held")
        time.sleep(10**6)
