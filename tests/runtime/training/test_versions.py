import pytest

torch = pytest.importorskip("torch")

from collections import Counter

from torch import nn

from pipeplan.runtime.training.update.optimizers import optimizer_maker
from pipeplan.runtime.training.weights.versions import Versions


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 3, bias=False)


def step(versions, module, version, x):
    """One pass of a version that counts once forward and once backward, without an update."""
    versions.install(version)
    out = module(x).pow(2).sum()
    versions.released(version)
    versions.attach_gradient(version)
    out.backward()
    versions.detach_gradient(version)
    versions.released(version)


def test_an_update_works_in_place_when_nothing_needs_the_old_version():
    module = linear()
    before = module.weight.untyped_storage().data_ptr()
    versions = Versions([module], Counter({0: 2, 1: 2}), optimizer_maker("sgd", 0.1))
    x = torch.ones(1, 3)
    (gradient,) = torch.autograd.grad(module(x).pow(2).sum(), module.weight)
    expected = module.weight.detach().add(gradient, alpha=-0.1)  # one fused operation, as SGD's, where there is one
    step(versions, module, 0, x)
    versions.update(1)
    versions.install(1)
    assert torch.equal(module.weight, expected)
    assert module.weight.untyped_storage().data_ptr() == before
    assert versions.most == 1


def test_an_update_copies_what_is_still_needed_and_reuses_storage_later():
    module = linear()
    versions = Versions([module], Counter({0: 4, 1: 2, 2: 2}), optimizer_maker("momentum", 0.1))
    x = torch.ones(1, 3)
    first = module.weight.detach().clone()
    seen = set()
    for made in range(1, 5):
        step(versions, module, max(made - 2, 0), x)
        versions.update(made)
        seen |= versions.storages()
        assert len(versions.storages()) == 2 - (made == 4)  # at the end nothing needs what came before
        if made == 1:
            versions.install(0)
            assert torch.equal(module.weight, first)
    assert len(seen) == 2
    assert versions.most == 2


def test_gradients_of_two_versions_add_up_in_one():
    module = linear()
    versions = Versions([module], Counter({0: 4, 1: 2}), optimizer_maker("sgd", 1.0))
    x = torch.ones(1, 3)
    start = module.weight.detach().clone()
    step(versions, module, 0, x)
    versions.update(1)
    step(versions, module, 0, x)
    step(versions, module, 1, x)
    (total,) = versions.gradients()
    one = torch.autograd.grad((x @ (w := start.clone().requires_grad_()).T).pow(2).sum(), w)[0]
    moved = (start - one).requires_grad_()
    other = torch.autograd.grad((x @ moved.T).pow(2).sum(), moved)[0]
    torch.testing.assert_close(total, one + other)


def test_tied_parameters_stay_tied_and_frozen_ones_stay():
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    tied[2].requires_grad_(False)
    frozen = tied[2].weight
    versions = Versions([tied], Counter({0: 4, 1: 2}), optimizer_maker("adam", 0.1))
    step(versions, tied, 0, torch.ones(1, 3))
    versions.update(1)
    versions.install(1)
    assert tied[1].weight is tied[0].weight
    assert tied[2].weight is frozen
    versions.install(0)
    assert tied[1].weight is tied[0].weight
    assert len(versions.storages()) == 2


def test_recurrent_layers_use_the_version_that_is_installed():
    lstm = nn.LSTM(2, 2)
    versions = Versions([lstm], Counter({0: 4, 1: 2}), optimizer_maker("sgd", 1.0))
    x = torch.ones(3, 1, 2)
    before = lstm(x)[0]
    versions.install(0)
    out = lstm(x)[0].sum()
    versions.released(0)
    versions.attach_gradient(0)
    out.backward()
    versions.detach_gradient(0)
    versions.released(0)
    versions.update(1)
    versions.install(1)
    after = lstm(x)[0]
    versions.install(0)
    assert torch.equal(lstm(x)[0], before)
    assert not torch.equal(after, before)


def test_parameters_without_gradient_are_not_decayed_into():
    module = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    idle = module[1].weight.detach().clone()
    versions = Versions([module], Counter({0: 2, 1: 0}), optimizer_maker("momentum", 0.1))
    step(versions, module[0], 0, torch.ones(1, 2))
    versions.update(1)
    versions.install_newest()
    assert torch.equal(module[1].weight, idle)


def test_a_stage_without_parameters_updates_nothing():
    versions = Versions([nn.ReLU()], Counter({0: 2}), optimizer_maker("sgd", 0.1))
    versions.update(1)
    assert versions.gradients() == []
    assert versions.storages() == set()


def test_every_version_has_the_hooks_of_its_weight():
    module = linear()
    module.weight.register_hook(lambda gradient: gradient * 0)
    versions = Versions([module], Counter({0: 4, 1: 2, 2: 2}), optimizer_maker("sgd", 0.1))
    first = module.weight.detach().clone()
    for made in (1, 2):
        step(versions, module, made - 1, torch.ones(1, 3))
        versions.update(made)
    versions.install(2)
    assert versions.most > 1
    assert torch.equal(module.weight, first)
