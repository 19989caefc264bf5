"""Stored activations with newer weights, against formulas."""

import pytest

torch = pytest.importorskip("torch")

from itertools import pairwise

from cases.runtime import chain_cut, chain_pieces, spec, update_of
from oracles.newest_weights import Emulation, SelfAttention, States, add, mean_square, own_weights
from torch import nn

from pipeplan.errors import RunFailed
from pipeplan.runtime.measure.recorder import HeldBytes
from pipeplan.runtime.training.stage import StageModule
from pipeplan.runtime.training.weights.gradients import Gradients
from pipeplan.runtime.training.weights.versions import Versions, read_weights_themselves

MODELS = {
    "linear": ((6,), lambda: [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)]),
    "convolution": (
        (2, 6, 6),
        lambda: [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 3)],
    ),
    "batch normalisation": (
        (2, 5, 5),
        lambda: [nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5)],
    ),
    "layer normalisation": ((4, 6), lambda: [nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.LayerNorm(4)]),
    "attention": ((5, 8), lambda: [nn.LayerNorm(8), SelfAttention(8, 2), nn.Linear(8, 8), SelfAttention(8, 4)]),
    "lstm": ((5, 6), lambda: [States(nn.LSTM, 6, 7), States(nn.LSTM, 7, 4), nn.Linear(4, 3)]),
    "gru": ((5, 6), lambda: [States(nn.GRU, 6, 7), nn.LayerNorm(7), States(nn.GRU, 7, 4)]),
}
N = 3


def built(name, dtype=torch.float32):
    torch.manual_seed(7)
    shape, make = MODELS[name]
    modules = make()
    for module in modules:  # normalisations start at ones and zeros, which hide errors
        for p in module.parameters():
            p.data += 0.1 * torch.randn_like(p)
        module.to(dtype)
    return modules, [torch.randn(4, *shape, dtype=dtype) for _ in range(2 * N)]


def stage_of(modules, x, *, loss=None, passes, checkpoint=(), divisor=1, activations=None, index=1):
    layers = [module.train() for module in modules]
    gradients = Gradients(Versions(layers, passes, shared=True), flat=True)
    out = nn.Sequential(*layers).eval()(x)
    nn.Sequential(*layers).train()
    stage = StageModule(
        index=index,
        pieces=chain_pieces(layers, loss, checkpoint),
        cuts=(chain_cut(0, spec(x)), None if loss is not None else chain_cut(len(layers), spec(out))),
        gradients=gradients,
        activations=activations or HeldBytes(),
        divisor=divisor,
        reads_newest=True,
    )
    stage.update = update_of(gradients, "sgd", 0.5).update
    return stage


def moved(stage, modules, number):
    """Make version ``number`` by a gradient of noise; return the weights of each module then."""
    for gradient in stage.gradients.due:
        gradient.copy_(torch.randn_like(gradient) / 2)
    stage.update(number)
    stage.versions.install(number)
    return own_weights(modules)


def close(found, expected):
    """Equal to 16 units in the last place of the largest entry of all, above 1; in double precision to 1e-12."""
    found, expected = (x if isinstance(x, list) else [x] for x in (found, expected))
    largest = max(1.0, *(float(x.abs().max()) for x in expected))
    single = expected[0].dtype == torch.float32  # its rounding differs with the vector width of the processor
    least = 16 * torch.finfo(torch.float32).eps if single else 1e-12
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=least * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # oneDNN has an LSTM of its own for the first
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_old_activations_and_new_weights(name, dtype):
    """Two mini-batches; the microbatches of the second start with two versions, and end with a third."""
    modules, inputs = built(name, dtype)
    weights = [own_weights(modules)]
    emulation = Emulation(modules)
    stage = stage_of(modules, inputs[0], passes={0: N + 1, 1: 1 + N - 1, 2: 1}, divisor=N)
    outs, stored = [], []

    def forward(m, version):
        outs.append(stage.forward(m, version, inputs[m], None, m < N))
        expected, kept = emulation.forward(inputs[m], weights[version])
        close(outs[-1], expected)
        stored.append(kept)

    def backward(first, version):
        gradients = torch.randn(N, *outs[0].shape, dtype=dtype)
        entered = stage.backward(first + N - 1, version, gradients, N)
        total = [[torch.zeros_like(w) for w in own] for own in weights[0]]
        for place, m in enumerate(range(first, first + N)):
            into, found = emulation.backward(gradients[place], stored[m], weights[version])
            close(entered[place], into)
            for one, other in zip(total, found, strict=True):
                add(one, other)
        close(stage.gradients.due, [g for own in total for g in own])

    for m in range(N + 1):
        forward(m, 0)
    weights.append(moved(stage, modules, 1))
    assert not torch.equal(weights[0][0][0], weights[1][0][0])
    backward(0, 1)
    for m in range(N + 1, 2 * N):
        forward(m, 1)
    weights.append(moved(stage, modules, 2))
    backward(N, 2)
    assert stage.versions.most == 1


def test_an_older_version_can_be_used_while_newer_ones_exist():
    """As with vertical sync: forwards and backwards each with their own, gradients in one sum."""
    modules, inputs = built("linear")
    weights = [own_weights(modules)]
    emulation = Emulation(modules)
    stage = stage_of(modules, inputs[0], passes={0: 2, 1: 2, 2: 2})
    first = stage.forward(0, 0, inputs[0], None, False)
    weights.append(moved(stage, modules, 1))
    weights.append(moved(stage, modules, 2))
    second = stage.forward(1, 0, inputs[1], None, False)
    third = stage.forward(2, 2, inputs[2], None, False)
    assert stage.versions.most == 3
    total = [[torch.zeros_like(w) for w in own] for own in weights[0]]
    for m, (forward, backward, out) in enumerate([(0, 1, first), (0, 1, second), (2, 2, third)]):
        expected, stored = emulation.forward(inputs[m], weights[forward])
        close(out, expected)
        into, found = emulation.backward(torch.ones_like(out), stored, weights[backward])
        close(stage.backward(m, backward, torch.ones_like(out)), into)
        for one, other in zip(total, found, strict=True):
            add(one, other)
    close(stage.gradients.due, [g for own in total for g in own])


def test_a_mini_batch_on_one_stage_is_plain_training_to_the_bit():
    modules, inputs = built("linear")
    torch.manual_seed(7)
    plain = nn.Sequential(*MODELS["linear"][1]())
    plain.load_state_dict(nn.Sequential(*modules).state_dict())
    target = torch.randn(4, 3)
    stage = stage_of(modules, inputs[0], loss=nn.functional.mse_loss, passes={0: N + 1}, divisor=N, index=0)
    for m in range(N):
        stage.forward(m, 0, inputs[m], target, False)
    assert stage.backward(N - 1, 0, None, N) is None
    losses = [nn.functional.mse_loss(plain(inputs[m]), target) for m in range(N)]
    (sum(losses) / N).backward()
    for mine, theirs in zip(stage.gradients.due, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=0, atol=1e-7)
    assert [stage.losses[m] for m in range(N)] == [float(value.detach()) for value in losses]


def test_the_gradient_of_the_average_loss_comes_from_formulas_too():
    modules, inputs = built("batch normalisation")
    old = own_weights(modules)
    emulation = Emulation(modules)
    target = torch.randn(4, 5)
    stage = stage_of(modules, inputs[0], loss=nn.functional.mse_loss, passes={0: N, 1: 1}, divisor=N)
    for m in range(N):
        stage.forward(m, 0, inputs[m], target, False)
    new = moved(stage, modules, 1)
    entered = stage.backward(N - 1, 1, None, N)
    for m in range(N):
        out, stored = emulation.forward(inputs[m], old)
        value, gradient = mean_square(out, target)
        assert stage.losses[m] == pytest.approx(float(value), abs=1e-6)
        close(entered[m], emulation.backward(gradient / N, stored, new)[0])


@pytest.mark.parametrize("checkpoint", [((0, 5),), ((1, 3),)])
def test_recomputed_layers_run_again_with_the_new_weights(checkpoint):
    """What is stored there is the segment's input; a stored segment before or after it keeps its own activations."""
    modules, inputs = built("linear")
    old = own_weights(modules)
    activations = HeldBytes()
    stage = stage_of(modules, inputs[0], passes={0: N, 1: 1}, checkpoint=checkpoint, activations=activations)
    for m in range(N):
        out = stage.forward(m, 0, inputs[m], None, True)
    new = moved(stage, modules, 1)
    gradients = torch.randn(N, *out.shape)
    entered = stage.backward(N - 1, 1, gradients, N)
    assert activations.held_bytes == 0
    cuts = sorted({0, len(modules), *(cut for segment in checkpoint for cut in segment)})
    parts = list(pairwise(cuts))
    for m in range(N):
        x, stored = inputs[m], []
        for start, stop in parts:
            again = Emulation(modules[start:stop]).forward(x, new[start:stop])[1]
            x, kept = Emulation(modules[start:stop]).forward(x, old[start:stop])
            stored.append(again if (start, stop) in checkpoint else kept)
        gradient = gradients[m]
        for (start, stop), kept in reversed(list(zip(parts, stored, strict=True))):
            gradient, _ = Emulation(modules[start:stop]).backward(gradient, kept, new[start:stop])
        close(entered[m], gradient)


class ChangesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        out = self.linear(x).tanh()
        out.add_(1.0)  # the derivative of tanh needs it as it was
        return out


def test_activations_changed_in_place_are_noticed():
    x = torch.zeros(2, 4)
    stage = stage_of([ChangesInPlace()], x, passes={0: 2})
    out = stage.forward(0, 0, x, None, False)
    with pytest.raises(RunFailed, match=r"a tensor of shape \(2, 4\) that a backward needs was changed in place"):
        stage.backward(0, 0, torch.ones_like(out))


def test_stored_activations_are_the_same_bytes_as_without_renewal():
    found = []
    for reads_newest in (True, False):
        modules, inputs = built("attention")
        activations = HeldBytes()
        stage = stage_of(modules, inputs[0], passes={0: 2}, activations=activations)
        stage._reads_newest = reads_newest
        out = stage.forward(0, 0, inputs[0], None, True)
        found.append(activations.held_bytes)
        stage.backward(0, 0, torch.ones_like(out))
        assert activations.held_bytes == 0
    assert found[0] == found[1] > 0


def test_tied_weights_are_read_anew_at_both_places_and_frozen_ones_stay():
    torch.manual_seed(0)
    first, middle, last = (nn.Linear(4, 4, bias=False) for _ in range(3))
    last.weight = first.weight
    middle.weight.requires_grad_(False)
    stage = stage_of([first, middle, last], torch.zeros(2, 4), passes={0: 1, 1: 1})
    x, gradient = torch.randn(2, 4), torch.randn(2, 4)
    old, frozen = first.weight.detach().clone(), middle.weight.detach().clone()
    stage.forward(0, 0, x, None, True)
    stage.gradients.due[0] = torch.randn(4, 4)
    stage.update(1)
    entered = stage.backward(0, 1, gradient)
    new = first.weight.detach()
    assert last.weight is first.weight
    assert torch.equal(middle.weight, frozen)
    assert not torch.equal(new, old)
    back = gradient @ new @ frozen
    close(entered, back @ new)
    close(stage.gradients.due, [back.T @ x + gradient.T @ (x @ old.T @ frozen.T)])


class Peeking(nn.LSTM):
    """Tells whether cuDNN may be used in its forward, which may fail."""

    def forward(self, x):
        assert x.dim() == 3
        self.allowed = torch.backends.cudnn.enabled
        return super().forward(x)


def test_recurrent_layers_do_without_packed_weights():
    layer = nn.Sequential(Peeking(2, 2))
    read_weights_themselves([layer])
    assert torch.backends.cudnn.enabled
    layer(torch.zeros(1, 1, 2))
    assert layer[0].allowed is False
    assert torch.backends.cudnn.enabled
    with pytest.raises(AssertionError):
        layer(torch.zeros(2))
    assert torch.backends.cudnn.enabled


def test_weights_in_one_storage_are_told_apart():
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    both = torch.randn(6, 3)
    first.weight.data, second.weight.data = both[:3], both[3:]
    modules = [first, second]
    old = own_weights(modules)
    stage = stage_of(modules, torch.zeros(2, 3), passes={0: 1, 1: 1})
    x = torch.randn(2, 3)
    out = stage.forward(0, 0, x, None, False)
    new = moved(stage, modules, 1)
    entered = stage.backward(0, 1, torch.ones_like(out))
    close(entered, torch.ones_like(out) @ new[1][0] @ new[0][0])
    expected = [(torch.ones_like(out) @ new[1][0]).T @ x, torch.ones_like(out).T @ (x @ old[0][0].T)]
    close(stage.gradients.due, expected)
