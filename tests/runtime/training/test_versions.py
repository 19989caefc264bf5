import pytest

torch = pytest.importorskip("torch")

from cases.runtime import update_of
from torch import nn

from pipeplan.runtime.training.weights.gradients import Gradients
from pipeplan.runtime.training.weights.versions import Versions


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 3, bias=False)


def step(stage, module, version, x):
    """One pass of a version that counts once forward and once backward, without an update."""
    versions = stage.versions
    versions.install(version)
    out = module(x).pow(2).sum()
    versions.released(version)
    stage.gradients.attach(version)
    out.backward()
    stage.gradients.detach(version)
    versions.released(version)


def test_an_update_works_in_place_when_nothing_needs_the_old_version():
    module = linear()
    before = module.weight.untyped_storage().data_ptr()
    stage = update_of(Gradients(Versions([module], {0: 2, 1: 2})), "sgd", 0.1)
    versions = stage.versions
    x = torch.ones(1, 3)
    (gradient,) = torch.autograd.grad(module(x).pow(2).sum(), module.weight)
    expected = module.weight.detach().add(gradient, alpha=-0.1)  # one fused operation, as SGD's, where there is one
    step(stage, module, 0, x)
    stage.update(1)
    versions.install(1)
    assert torch.equal(module.weight, expected)
    assert module.weight.untyped_storage().data_ptr() == before
    assert versions.most == 1


def test_an_update_copies_what_is_still_needed_and_reuses_storage_later():
    module = linear()
    stage = update_of(Gradients(Versions([module], {0: 4, 1: 2, 2: 2})), "momentum", 0.1)
    versions = stage.versions
    x = torch.ones(1, 3)
    first = module.weight.detach().clone()
    seen = set()
    for made in range(1, 5):
        step(stage, module, max(made - 2, 0), x)
        stage.update(made)
        seen |= versions.storages()
        assert len(versions.storages()) == 2 - (made == 4)  # at the end nothing needs what came before
        if made == 1:
            versions.install(0)
            assert torch.equal(module.weight, first)
    assert len(seen) == 2
    assert versions.most == 2


def test_gradients_of_two_versions_add_up_in_one():
    module = linear()
    stage = update_of(Gradients(Versions([module], {0: 4, 1: 2})), "sgd", 1.0)
    x = torch.ones(1, 3)
    start = module.weight.detach().clone()
    step(stage, module, 0, x)
    stage.update(1)
    step(stage, module, 0, x)
    step(stage, module, 1, x)
    (total,) = stage.gradients.due
    one = torch.autograd.grad((x @ (w := start.clone().requires_grad_()).T).pow(2).sum(), w)[0]
    moved = (start - one).requires_grad_()
    other = torch.autograd.grad((x @ moved.T).pow(2).sum(), moved)[0]
    torch.testing.assert_close(total, one + other)


def test_tied_parameters_stay_tied_and_frozen_ones_stay():
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    tied[2].requires_grad_(False)
    frozen = tied[2].weight
    stage = update_of(Gradients(Versions([tied], {0: 4, 1: 2})), "adam", 0.1)
    versions = stage.versions
    step(stage, tied, 0, torch.ones(1, 3))
    stage.update(1)
    versions.install(1)
    assert tied[1].weight is tied[0].weight
    assert tied[2].weight is frozen
    versions.install(0)
    assert tied[1].weight is tied[0].weight
    assert len(versions.storages()) == 2


def test_recurrent_layers_use_the_version_that_is_installed():
    lstm = nn.LSTM(2, 2)
    stage = update_of(Gradients(Versions([lstm], {0: 4, 1: 2})), "sgd", 1.0)
    versions = stage.versions
    x = torch.ones(3, 1, 2)
    before = lstm(x)[0]
    versions.install(0)
    out = lstm(x)[0].sum()
    versions.released(0)
    stage.gradients.attach(0)
    out.backward()
    stage.gradients.detach(0)
    versions.released(0)
    stage.update(1)
    versions.install(1)
    after = lstm(x)[0]
    versions.install(0)
    assert torch.equal(lstm(x)[0], before)
    assert not torch.equal(after, before)


def test_parameters_without_gradient_are_not_decayed_into():
    module = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    idle = module[1].weight.detach().clone()
    stage = update_of(Gradients(Versions([module], {0: 2, 1: 0})), "momentum", 0.1)
    versions = stage.versions
    step(stage, module[0], 0, torch.ones(1, 2))
    stage.update(1)
    versions.install_newest()
    assert torch.equal(module[1].weight, idle)


def test_a_stage_without_parameters_updates_nothing():
    stage = update_of(Gradients(Versions([nn.ReLU()], {0: 2})), "sgd", 0.1)
    versions = stage.versions
    stage.update(1)
    assert stage.gradients.due == []
    assert versions.storages() == set()


def test_every_version_has_the_hooks_of_its_weight():
    module = linear()
    module.weight.register_hook(lambda gradient: gradient * 0)
    stage = update_of(Gradients(Versions([module], {0: 4, 1: 2, 2: 2})), "sgd", 0.1)
    versions = stage.versions
    first = module.weight.detach().clone()
    for made in (1, 2):
        step(stage, module, made - 1, torch.ones(1, 3))
        stage.update(made)
    versions.install(2)
    assert versions.most > 1
    assert torch.equal(module.weight, first)
