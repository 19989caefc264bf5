"""A folder with the checkpoints of a run, for the tests of what is done with such folders."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def plan():
    from cases.runtime import chain_of, healthy, plan_of

    return plan_of(chain_of(healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")


@pytest.fixture(scope="session")
def written(plan, tmp_path_factory):
    """A folder with checkpoints after updates 2 and 4 of two ranks."""
    from cases.saved_runs import MODEL, OPTIONS

    from pipeplan.runtime.launch import run_plan
    from pipeplan.runtime.options import RunOptions

    folder = tmp_path_factory.mktemp("written")
    run_plan(plan, MODEL, RunOptions(steps=4, checkpoint=folder, **OPTIONS))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "c"))


@pytest.fixture(scope="module")
def one_rank():
    """This process is the only rank there is."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
