"""Random numbers depend on seed, microbatch and layer, and on nothing else of a plan."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.runtime import chain_of, plan_of
from torch import nn

from pipeplan.errors import RunFailed
from pipeplan.plan import Stage
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.network import LayerCode
from pipeplan.runtime.model.pieces import pieces_of
from pipeplan.runtime.model.randomness import DATA, key_of
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.repeatable import Draws, begin_draws


def test_a_layer_draws_by_seed_microbatch_and_layer_in_any_order():
    dropout, x = nn.Dropout(0.5), torch.ones(64)

    def draw(draws, microbatch, layer):
        with draws.of(microbatch, layer):
            return dropout(x)

    passes = [(microbatch, layer) for microbatch in (0, 1, 10**9) for layer in (0, 1)]
    one, other = Draws(3), Draws(3)
    found = {key: draw(one, *key) for key in passes}
    assert all(torch.equal(draw(other, *key), found[key]) for key in reversed(passes))
    masks = {tuple(mask.tolist()) for mask in found.values()} | {tuple(draw(Draws(4), 0, 0).tolist())}
    assert len(masks) == len(passes) + 1


def test_draws_begin_as_torchs_own_seeding_has_them():
    torch.manual_seed(key_of(3, 7, DATA))
    expected = torch.rand(5)
    begin_draws(3, 7, DATA)
    assert torch.equal(torch.rand(5), expected)


def test_layers_that_draw_nothing_are_seeded_once():
    linear, draws = nn.Linear(4, 4), Draws(3)
    with draws.of(0, 0):
        linear(torch.ones(4))
    before = torch.get_rng_state()
    with draws.of(1, 0):
        linear(torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_whose_values_nobody_reads_runs_as_others_do():
    """As an LSTM's last state, of which a model has no use."""
    kept = LayerCode("kept", "kept", nn.Identity(), lambda _, x: (x + 1,), (0,), (1,))
    idle = LayerCode("idle", "idle", nn.Identity(), lambda _, x: (), (1,), ())
    (piece,) = pieces_of(0, [(kept,), (idle,)], (), (1,))
    seen = []
    (out,) = piece.run([torch.zeros(1)], None, lambda layer: nullcontext(seen.append(layer)))
    assert (out.item(), seen) == (1.0, [1, 1])


def test_any_plan_draws_what_one_process_draws_also_recomputed_and_resumed_on_another(tmp_path):
    """Dropout, and data that takes torch's own random numbers: the same losses and weights, bit for bit."""
    chain, model = chain_of(runtime_cases.dropping, 4), ModelSpec("cases.runtime:dropping", "cases.runtime:drawn")
    recomputed = [Stage(0, 3, (0,), ((0, 3),)), Stage(3, 5, (1,))]
    alone, parted, other = (
        plan_of(chain, stages, weights="flush", accumulate=2)
        for stages in ([(0, 5, (0,))], recomputed, [(0, 1, (0,)), (1, 5, (1,))])
    )
    options = {"lr": 0.05, "every": 2, "seed": 5}
    whole = run_plan(alone, model, RunOptions(steps=4, save=tmp_path / "one.pt", lr=0.05, seed=5))
    first = run_plan(parted, model, RunOptions(steps=2, checkpoint=tmp_path / "c", **options))
    rest = run_plan(
        other, model, RunOptions(steps=4, checkpoint=tmp_path / "c", resume=True, save=tmp_path / "two.pt", **options)
    )
    assert first.losses + rest.losses == whole.losses
    one, two = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    assert all(torch.equal(one[name], two[name]) for name in one)


class Late(nn.Module):
    """Draws from the second call on, or from Python's random numbers in each."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.calls = draw, 0

    def forward(self, x):
        self.calls += 1
        return x * self.draw(self.calls)


def piece_of(draw):
    """A late layer between two that draw."""
    modules = [nn.Dropout(0.5), Late(draw), nn.Dropout(0.5)]
    codes = [
        LayerCode(f"layer{i}", "", module, lambda module, x: (module(x),), (i,), (i + 1,))
        for i, module in enumerate(modules)
    ]
    (piece,) = pieces_of(0, [codes], (), (3,))
    return piece


def test_a_layer_that_begins_to_draw_late_is_refused():
    draws, piece, x = Draws(), piece_of(lambda calls: torch.rand(()) if calls > 1 else 1.0), torch.ones(64)
    draws.run(piece, 0, [x], None)
    with pytest.raises(
        RunFailed, match="layer1 drew no random numbers in its first microbatch and does in microbatch 1"
    ):
        draws.run(piece, 1, [x], None)


def test_a_layer_that_draws_from_python_and_numpy_draws_the_same_again_and_leaves_others_theirs():
    draws, piece = Draws(), piece_of(lambda _: random.random() + np.random.rand())
    begun = random.getstate()
    first = [draws.run(piece, m, [torch.ones(64)], None)[0] for m in (0, 1)]
    again = [draws.run(piece, m, [torch.ones(64)], None)[0] for m in (0, 1)]
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0].amax(), first[1].amax())
    assert random.getstate() == begun
