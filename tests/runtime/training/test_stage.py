import pytest

torch = pytest.importorskip("torch")

from copy import deepcopy
from dataclasses import replace

from cases.runtime import Whole, built, chain_of, sized_chain, stage_of, zoo_chain
from torch import nn
from torch.nn import functional

from pipeplan import zoo
from pipeplan.cost import memory_model
from pipeplan.cost.roofline import with_offloaded
from pipeplan.cost.saved import for_weights_bytes, saved_bytes
from pipeplan.errors import RunFailed
from pipeplan.plan import Stage
from pipeplan.runtime.device import CPU
from pipeplan.runtime.measure.recorder import HeldBytes
from pipeplan.runtime.model.trace.traced import traced_model
from pipeplan.runtime.training.held import Waiting
from pipeplan.runtime.training.repeatable import begin_draws
from pipeplan.runtime.training.split_stage import SplitStage
from pipeplan.runtime.training.stage import StageModule
from pipeplan.runtime.training.weights.gradients import Gradients
from pipeplan.runtime.training.weights.versions import Versions


def small_net():
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        nn.Linear(8, 4),
    ]


@pytest.fixture(scope="module")
def chain():
    return zoo_chain("gpt-tiny", 2)


SEGMENTS = [(), ((0, 4),), ((0, 5),), ((0, 1), (1, 2), (2, 4)), ((1, 3),), ((4, 5),), ((1, 2), (3, 5))]


@pytest.mark.parametrize("early", [(), (0, 1)])
@pytest.mark.parametrize("checkpoint", SEGMENTS)
def test_gradients_and_statistics_equal_plain_training(checkpoint, early):
    """Also of microbatches that are recomputed ``early``, before any backward."""
    inputs = [torch.randn(6, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    target = torch.zeros(6, 4)
    plain, layers = nn.Sequential(*small_net()), small_net()
    stage = stage_of(layers, inputs[0], loss=nn.functional.mse_loss, checkpoint=checkpoint, divisor=3)
    ends = []
    for m, x in enumerate(inputs):  # the three are in flight together, in both runs
        leaf = value = x.clone().requires_grad_()
        for made, layer in enumerate(plain, start=1):
            begin_draws(0, m, made)
            value = layer(value)
        ends.append((leaf, nn.functional.mse_loss(value, target)))
    for _, value in ends:
        (value / 3).backward()
    for m, x in enumerate(inputs):
        stage.forward(m, 0, x, target, counted=m < 2)
    for m in early:
        stage.recompute(m, 0)
    for m, (leaf, value) in enumerate(ends):
        gradient = stage.backward(m, 0, None)
        torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=0)
        assert stage.losses[m] == float(value.detach())
    gradients = stage.gradients.due
    for mine, theirs in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=0, atol=1e-7)
    for mine, theirs in zip(nn.Sequential(*layers).buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("checkpoint", [(), ((0, 4),), ((1, 3),), ((0, 1), (2, 5))])
def test_a_backward_in_two_parts_is_a_whole_one_to_the_bit(checkpoint, index):
    """The first stage leaves its first layer that trains to the second part; recomputed layers run again once.

    The last microbatch's could be run in two parts, and is run whole.
    """
    target, runs = torch.zeros(6, 4), []
    inputs = [torch.randn(6, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    options = {"loss": nn.functional.mse_loss, "checkpoint": checkpoint, "divisor": 3, "index": index}
    for kind in (StageModule, SplitStage):
        layers = small_net()
        stage, given = stage_of(layers, inputs[0], kind=kind, **options), []
        for m, x in enumerate(inputs):
            stage.forward(m, 0, x, target, counted=True)
        if kind is SplitStage:
            stage.recompute(1, 0)
        for m in range(2):
            given.append(stage.backward_inputs(m, 0, None) if kind is SplitStage else stage.backward(m, 0, None))
        if kind is SplitStage:
            early = [gradient for gradient in stage.gradients.due if gradient is not None]
            assert {gradient.dim() for gradient in early} <= {1}  # of norms
            held = stage._activations.held_bytes
            for m in range(2):
                stage.backward_weights(m, 0)
                assert stage._activations.held_bytes < held
                held = stage._activations.held_bytes
        given.append(stage.backward(2, 0, None))
        assert stage._activations.held_bytes == 0
        runs.append((given, stage.gradients.due, list(nn.Sequential(*layers).buffers())))
    for one, other in zip(*runs, strict=True):
        assert [x is None or torch.equal(x, y) for x, y in zip(one, other, strict=True)] == [True] * len(one)


@pytest.mark.parametrize(
    ("start", "stop", "checkpoint"),
    [(0, 3, ()), (1, 4, ()), (1, 4, ((1, 4),)), (1, 5, ((1, 2), (3, 5))), (2, 8, ((3, 5),)), (3, 8, ((3, 8),))],
)
@pytest.mark.parametrize(("in_flight", "early"), [(1, 0), (3, 0), (3, 2)])
def test_accounted_bytes_are_those_of_the_memory_model(chain, start, stop, checkpoint, in_flight, early):
    """Of microbatches some of which have been recomputed ``early``."""
    layers, loss, data = built("gpt-tiny", 2, 0)
    x, target = data(0, 0)
    for layer in layers[:start]:
        x = layer(x).detach()
    own = list(layers[start:stop])
    out = x
    for layer in own:
        out = layer(out).detach()
    activations = HeldBytes()
    with_loss = stop == len(chain)
    stage = stage_of(
        own,
        x,
        loss=loss if with_loss else None,
        checkpoint=checkpoint,
        start=start,
        index=int(start > 0),
        out=out,
        activations=activations,
    )
    for m in range(in_flight):
        stage.forward(m, 0, x.clone(), target.clone() if with_loss else None, counted=True)
    for m in range(early):
        stage.recompute(m, 0)
    kept, peak, _ = memory_model.activations(chain, start, stop, checkpoint)
    recomputed = memory_model.recomputed_bytes(chain, checkpoint)
    if early:
        assert activations.held_bytes == activations.peak_bytes == in_flight * kept + early * recomputed
    for m in range(in_flight):
        stage.backward(m, 0, None if with_loss else torch.zeros_like(out))
    least = memory_model.held_bytes(kept, peak, in_flight)
    assert activations.peak_bytes == max(least, in_flight * kept + early * recomputed)
    assert activations.held_bytes == 0


class WeightsAlone(nn.Module):
    """What depends on weights alone, in more than one operation, meets what enters in every way; views are cut, too."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(5, 8), nn.Parameter(torch.randn(3, 8))
        self.mix, self.three, self.leave = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 24), nn.Linear(16, 8)

    def forward(self, x):
        mixing = torch.softmax(self.mix.tanh(), -1)
        y = (self.tokens(x) + self.places) @ mixing
        q, k, v = self.three(y).view(-1, 3, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 3, 8)
        y = self.leave(torch.cat((y, self.tokens(x)), dim=-1)) + self.places.sin()
        return (y * mixing[0]) @ self.tokens.weight.T


def weights_alone(batch):
    torch.manual_seed(2)
    return WeightsAlone(), torch.zeros(batch, 3, dtype=torch.int64), functional.mse_loss


def weights_alone_data(batch):
    return lambda index, seed: (torch.arange(3 * batch).view(batch, 3) % 5, torch.ones(batch, 3, 5))


def tied_gpt(batch):
    layers, x, loss = zoo.load("gpt-tiny,tied=true,blocks=1")(batch)
    return Whole(layers), x, loss


@pytest.mark.parametrize(
    ("build", "data"), [(weights_alone, weights_alone_data), (tied_gpt, zoo.load("gpt-tiny,tied=true,blocks=1").data)]
)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_traced_stage_holds_what_its_profile_says_wherever_it_is_cut(build, data, parts):
    """Backwards in two ``parts``, too, whose gradients are those of whole ones."""
    chain = chain_of(build, 2, data=data(2), split=True)
    module, example, loss = build(2)
    x, target = data(2)(0, 0)
    plain = loss(module(x), target)
    plain.backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    model = traced_model(module, example, loss, data(2), torch.device("cpu"))
    for first in range(1, len(chain) - 1):
        bounds = [0, first, min(first + 3, len(chain) - 1), len(chain)]
        held, made, runs = [HeldBytes() for _ in range(3)], None, []
        for index, activations in enumerate(held):
            stage = Stage(bounds[index], bounds[index + 1], (index,))
            run = (StageModule if parts == 1 else SplitStage)(
                index,
                model.pieces(stage),
                (model.cut(stage.start), None if index == 2 else model.cut(stage.stop)),
                Gradients(Versions(model.modules(stage), {0: 9})),
                activations,
                1,
                data=model.read_by(stage),
                trained=model.trained,
            )
            made = run.forward(0, 0, made, target.clone(), counted=True, inputs=(x.clone(),))
            assert activations.held_bytes == saved_bytes(chain, stage.start, stage.stop)
            runs.append((run, stage))
        assert torch.equal(made, plain.detach())
        gradient = None
        for (run, stage), activations in zip(reversed(runs), reversed(held), strict=True):
            between, more = for_weights_bytes(chain, stage.start, stage.stop)
            if parts == 1:
                gradient = run.backward(0, 0, gradient)
            else:
                gradient = run.backward_inputs(0, 0, gradient)
                assert activations.held_bytes <= between
                assert activations.peak_bytes <= saved_bytes(chain, stage.start, stage.stop) + more
        for run, _ in runs:
            if parts == 2:
                run.backward_weights(0, 0)
            assert run._activations.held_bytes == 0
        found = dict.fromkeys(wanted, 0)
        for run, _ in runs:
            mine = dict(zip(map(id, run.versions._leaves[0]), run.gradients.due, strict=True))
            for name, p in module.named_parameters():
                found[name] = found[name] + mine.get(id(p), 0)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [StageModule, SplitStage])
def test_what_waits_in_host_memory_is_back_for_its_backward(kind):
    """Nothing else differs. What layers keep, or read, is there, and that of two on the device, as is planned."""
    torch.manual_seed(0)
    normed = nn.Sequential(nn.LayerNorm(32), nn.GELU())
    layers = [nn.Linear(8, 32), normed, nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5)), nn.BatchNorm1d(8)]
    x, target, runs = torch.randn(4, 8), torch.randn(4, 8), []
    sizes = replace(sized_chain(deepcopy(layers), x, functional.mse_loss, target), offloaded=10**9)
    planned = with_offloaded(sizes).layers
    again = tuple((i, i + 1) for i, layer in enumerate(planned) if layer.again_bytes)
    assert 0 < len(again) < len(planned)
    for waits in (False, True):
        activations = HeldBytes()
        waiting = Waiting(CPU, activations) if waits else None
        about = {"loss": functional.mse_loss, "checkpoint": again, "activations": activations, "waiting": waiting}
        stage = stage_of(deepcopy(layers), x, kind=kind, **about)
        for m in range(3):
            stage.forward(m, 0, x * (m + 1), target.clone(), counted=True)
        if waiting is not None:
            waiting.settle()
            assert waiting.held_bytes == activations.most_at_home == 3 * sum(layer.host_bytes for layer in planned)
            assert activations.held_bytes == 0
        given = []
        for m in range(3):
            given.append(stage.backward(m, 0, None) if kind is StageModule else stage.backward_inputs(m, 0, None))
        for m in range(3) if kind is SplitStage else ():
            stage.backward_weights(m, 0)
        assert activations.held_bytes == 0 == (0 if waiting is None else waiting.held_bytes)
        if waits and kind is StageModule:
            assert 0 < activations.peak_bytes <= max(layer.on_its_way_bytes for layer in planned)
        runs.append([stage.losses, *map(torch.Tensor.tolist, [*given, *stage.gradients.due])])
    assert runs[0] == runs[1]


def test_what_changes_on_its_way_to_host_memory_is_refused():
    waiting, x = Waiting(CPU, HeldBytes()), torch.randn(4, 4)
    stage = stage_of([nn.Tanh(), nn.ReLU(inplace=True), nn.Tanh()], x, out=x, checkpoint=((1, 2),), waiting=waiting)
    with pytest.raises(RunFailed, match="was changed in place while it went to host memory; let the plan keep"):
        stage.forward(0, 0, x, None, counted=True)


def test_an_input_that_no_operation_saves_is_not_kept():
    activations = HeldBytes()
    x = torch.randn(4, 4)
    stage = stage_of([nn.ReLU()], x, out=x, activations=activations)
    stage.forward(0, 0, x, None, counted=True)
    assert activations.held_bytes == x.nbytes  # the output, which the backward of ReLU reads
    assert torch.equal(stage.backward(0, 0, torch.ones(4, 4)), (x > 0).float())


def test_a_stage_that_trains_nothing_passes_gradients_on():
    x = torch.randn(4, 4)
    stage = stage_of([nn.Flatten(), nn.Identity()], x, out=x)
    stage.forward(0, 0, x, None, counted=False)
    assert torch.equal(stage.backward(0, 0, torch.full((4, 4), 2.0)), torch.full((4, 4), 2.0))


def test_the_first_stage_returns_no_gradient_and_takes_whole_numbers():
    embedding = nn.Embedding(5, 2)
    x = torch.tensor([[1, 2]])
    stage = stage_of([embedding], x, index=0, out=torch.zeros(1, 2, 2), checkpoint=((0, 1),))
    stage.forward(0, 0, x, None, counted=True)
    assert stage.backward(0, 0, torch.ones(1, 2, 2)) is None
    (gradient,) = stage.gradients.due
    assert gradient[:, 0].tolist() == [0, 1, 1, 0, 0]


class Detaching(nn.Module):
    def forward(self, x):
        return x.detach() + torch.zeros(1, requires_grad=True)


def test_a_layer_that_passes_no_gradient_on_is_named():
    x = torch.zeros(2, 2)
    stage = stage_of([Detaching()], x, out=x)
    stage.forward(0, 0, x, None, counted=False)
    with pytest.raises(RunFailed, match="no gradient comes back to the input of Detaching"):
        stage.backward(0, 0, x)


def test_unexpected_shapes_are_refused_before_they_are_sent():
    x = torch.zeros(4, 8)
    stage = stage_of([nn.Linear(8, 4)], x, out=torch.zeros(4, 4))
    with pytest.raises(RunFailed, match=r"gets float32 \(3, 8\) for microbatch 7"):
        stage.forward(7, 0, x[:3], None, counted=False)
    stage = stage_of([nn.Linear(8, 4)], x, out=torch.zeros(4, 5))
    with pytest.raises(RunFailed, match=r"puts out float32 \(4, 4\) for microbatch 7; .*float32 \(4, 5\)"):
        stage.forward(7, 0, x, None, counted=False)
