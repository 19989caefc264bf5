"""What few like blocks tell of a model is what all of them do, byte for byte; where they can't, all are estimated."""

import time
from functools import partial
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipeplan.api import questions
from pipeplan.api.given.profiling import profile
from pipeplan.deadline import Deadline
from pipeplan.errors import PipeplanError
from pipeplan.files.profiles import profile_text
from pipeplan.planner.periodic.incumbent import Status
from pipeplan.runtime.profiler import estimate

WITH_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers isn't installed")


class Block(nn.Module):
    def __init__(self, index=0, width=8):
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x, mask):
        return x + self.down(torch.relu(self.up(x))) * mask


class Net(nn.Module):
    """Blocks that all read a mask that is computed before them; ``kind`` says what is odd about them."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        turns = kind == "by turns"
        self.blocks = nn.ModuleList(Block(i, 16 if turns and i % 2 else 8) for i in range(10 if turns else 6))
        self.more = nn.ModuleList(Block() for _ in range(5 if kind == "two lists" else 0))
        if kind == "other width":
            self.blocks[5] = Block(5, 16)
        if kind == "tied":
            self.blocks[2].up.weight = self.last_but_one = self.blocks[5].up.weight

    def forward(self, x):
        x = self.first(x)
        mask, seen = x.sigmoid(), []
        for block in self.blocks:
            x = block(x, mask) + 1.0  # an operation between the blocks
            seen.append(x)
            if self.kind == "skips" and len(seen) > 3:
                x = x + seen[-4]
        encoded = x.tanh()
        for block in self.more:  # reads what all blocks before have made, too
            x = block(x, encoded)
        return self.last(x + seen[2] if self.kind == "read late" else x)


class Whole(PipeplanError):
    """Nothing is told from few blocks, so all would be estimated now."""


def told(real, *about):
    found = real(*about)
    if found is None:
        raise Whole
    return found


def both(monkeypatch, make):
    """Return the profile by like blocks and the whole one."""
    monkeypatch.setattr(estimate, "_by_like_blocks", partial(told, estimate._by_like_blocks))
    few = make()
    monkeypatch.setattr(estimate, "_by_like_blocks", lambda *a: None)
    whole = make()
    assert few.measured.host_bound == whole.measured.host_bound
    assert few.notes == whole.notes
    assert [x.layer for x in few.measured.layers] == [x.layer for x in whole.measured.layers]
    return profile_text(few.chain), profile_text(whole.chain)


def profiled(kind):
    inputs, split = torch.randn(2, 4, 8), kind == "other width"
    return profile(Net(kind), inputs, lambda y, t: y.square().mean(), gpu="a100", split_backward=split)


@pytest.mark.parametrize("kind", ["by turns", "other width", "two lists"])
def test_few_blocks_of_an_own_model_tell_all(monkeypatch, kind):
    few, whole = both(monkeypatch, lambda: profiled(kind))
    assert few == whole


@pytest.mark.parametrize("kind", ["skips", "read late", "tied"])
def test_nothing_is_told_from_few_blocks_that_others_reach_into(monkeypatch, kind):
    with pytest.raises(Whole):
        both(monkeypatch, lambda: profiled(kind))


@pytest.mark.parametrize("name", ["zoo:llama3-8b,blocks=5,sequence=64", "zoo:resnet50"])
def test_few_blocks_of_a_zoo_model_tell_all(monkeypatch, name):
    few, whole = both(monkeypatch, lambda: profile(name, gpu="a100", microbatch=1))
    assert few == whole


@WITH_TRANSFORMERS
def test_few_blocks_of_a_transformers_model_tell_all(monkeypatch):
    name = "hf:GPT2LMHeadModel,n_layer=5,n_embd=16,n_head=2,vocab_size=29,sequence=8"
    few, whole = both(monkeypatch, lambda: profile(name, gpu="h100", microbatch=1, dtype="bfloat16"))
    assert few == whole


def test_the_time_limit_leaves_out_what_an_estimate_takes(monkeypatch):
    def slow(*about):
        time.sleep(0.1)
        return profile(nn.Linear(8, 3), torch.randn(1, 8), lambda y, t: y.square().mean(), gpu="a100")

    monkeypatch.setattr(questions, "as_profile", slow)
    limit = Deadline.within(1000)
    *_, after = questions.given_profiles("zoo:gpt-tiny", {"gpu": "a100"}, [1], Status(), limit)
    assert after.remaining_s() - limit.remaining_s() > 0.09
    monkeypatch.setattr(questions, "is_name", lambda given: False)
    assert questions.given_profiles("file.json", {}, [1], Status(), limit)[-1] is limit
