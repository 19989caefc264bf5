"""Checkpoints of a run of two ranks after updates 2 and 4, and what is said when the newer one isn't taken."""

import torch

from pipeplan.runtime.model.spec import ModelSpec
from pipeplan.runtime.training.checkpoint import ABOUT, newest
from pipeplan.runtime.training.optimizers import parse_choice
from pipeplan.runtime.training.saved_state import TrainingState

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
