import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cases.held import LAYERS, SAVED_BYTES, peak_bytes
from cases.runtime import sized_chain, whole_saved_bytes
from cases.traced import tokens, transformer
from torch import nn

from pipeplan import zoo
from pipeplan.api.given.profiling import profile
from pipeplan.cost.saved import saved_bytes
from pipeplan.errors import BadInput, CodeFailed
from pipeplan.files.forms import read_json
from pipeplan.files.profiles import ProfileFile, chain_of, profile_text
from pipeplan.problem import SharedWeights
from pipeplan.runtime.device import Clock, ThreadClock, clock_of
from pipeplan.runtime.model import places
from pipeplan.runtime.model.network import chain_network, named_layers, shared_weights, tied_layers
from pipeplan.runtime.profiler import saved, steps
from pipeplan.runtime.profiler.measure import measure_model, profile_network
from pipeplan.runtime.profiler.steps import MeasureOptions


def profile_layers(layers, x, loss, options, target=None):
    """What each layer of a chain and its loss cost."""
    return profile_network(chain_network(layers, x), loss, options, target)[0]


class Recurrent(nn.Module):
    """An LSTM as a layer: its states stay inside."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def lstm(batch):
    layers = [Recurrent(16, 32), Recurrent(32, 32), nn.Linear(32, 8)]
    return layers, torch.randn(batch, 12, 16), nn.functional.mse_loss


def example(name, batch):
    """Layers, input, target, loss of a small model."""
    if name == "lstm":
        torch.manual_seed(0)
        layers, x, loss = lstm(batch)
        return nn.Sequential(*layers), x, torch.randn(batch, 12, 8), loss
    model = zoo.load(name)
    layers, _, loss = model(batch)
    x, target = model.data(batch)(0, 0)
    return layers, x, target, loss


MODELS = [("gpt-tiny", 4), ("gpt-tiny,tied=true", 2), ("small-cnn", 8), ("lstm", 8)]


@pytest.mark.parametrize(("name", "batch"), MODELS)
def test_saved_bytes_are_those_of_the_whole_model(name, batch):
    layers, x, target, loss = example(name, batch)
    chain = sized_chain(layers, x, loss, target)
    assert len(chain) == len(layers) + 1
    assert saved_bytes(chain, 0, len(chain)) == whole_saved_bytes(layers, x.clone(), target.clone(), loss)


ARCHITECTURES = [
    *("gpt2-small,blocks=2", "llama-7b,blocks=2", "vgg16", "resnet50", "densenet121", "awd-lm,sequence=8"),
    *("gnmt,sequence=4", "inception-v3-auxiliary"),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_bytes_of_every_zoo_model_are_those_of_the_whole(name):
    with torch.device("meta"):  # shapes alone decide, and nothing takes memory or time
        layers, x, loss = zoo.load(name)(2)
        _, target = zoo.load(name).data(2)(0, 0)
        chain = sized_chain(layers, x, loss, target)
        assert saved_bytes(chain, 0, len(chain)) == whole_saved_bytes(layers, x, target, loss)


def test_saved_bytes_of_resnet50_are_those_measured_in_a_real_run():
    with torch.device("meta"):
        model = zoo.load("resnet50,image=1000")
        layers, x, loss = model(8)
        chain = sized_chain(layers, x, loss, model.data(8)(0, 0)[1])
    assert saved_bytes(chain, 0, len(chain)) // 2**20 == 13_128
    assert saved_bytes(chain, 0, 1) > 3 * x.nbytes


@pytest.mark.parametrize("name", ["gpt-tiny,tied=true", "small-cnn"])
def test_saved_bytes_do_not_change_when_weights_move(name, monkeypatch):
    """A move to a GPU gives weights other storages, and the identities of the old ones go to tensors made since."""
    layers, x, target, loss = example(name, 2)
    expected = sized_chain(layers, x, loss, target)
    moves = []

    def move(modules, device):
        for owner in (owner for module in modules for owner in module.modules()):
            for tensor in owner.parameters(recurse=False):
                tensor.data = tensor.data.clone()
                moves.append(tensor.nbytes)
            for key, buffer in list(owner._buffers.items()):
                owner._buffers[key] = buffer.clone()

    monkeypatch.setattr(places, "place_all", move)
    monkeypatch.setattr(saved, "place_all", move)
    for _ in range(5):
        assert sized_chain(layers, x, loss, target) == expected
    assert moves


def step_times(layers, x, target, loss, steps):
    times = []
    for _ in range(steps):
        layers.zero_grad(set_to_none=True)
        start = time.thread_time_ns()
        loss(layers(x), target).backward()
        times.append(time.thread_time_ns() - start)
    return sorted(times)[steps // 2]


@pytest.mark.alone
@pytest.mark.parametrize("hold", ["all", "one"])
@pytest.mark.parametrize(("name", "batch"), [("gpt-tiny", 16), ("small-cnn", 32), ("lstm", 64)])
def test_layer_times_sum_to_the_whole_step_within_a_tenth(name, batch, hold):
    layers, x, target, loss = example(name, batch)
    threads = torch.get_num_threads()
    ratios = []
    for _ in range(200):  # other processes may disturb either side of a comparison for seconds, not for a minute
        measured = profile_layers(
            layers, x, loss, MeasureOptions(steps=7, warmup=2, hold=hold, clock=ThreadClock(), threads=1), target=target
        )
        torch.set_num_threads(1)
        whole = step_times(layers, x, target, loss, 7)
        torch.set_num_threads(threads)
        ratios.append(sum(m.layer.forward_ns + m.layer.backward_ns for m in measured) / whole)
        if 0.9 <= ratios[-1] <= 1.1:
            break
    assert any(0.9 <= ratio <= 1.1 for ratio in ratios), ratios
    assert torch.get_num_threads() == threads


def test_the_time_for_measuring_is_bounded_but_one_step_is_measured():
    layers, x, target, loss = example("gpt-tiny", 4)
    for hold in ("all", "one"):
        measured = profile_layers(
            layers, x, loss, MeasureOptions(steps=10**9, warmup=10**9, seconds=0.2, hold=hold), target=target
        )
        assert all(1 <= m.steps < 10**9 for m in measured), "all of them would take days"
        shortest = profile_layers(
            layers, x, loss, MeasureOptions(steps=5, warmup=5, seconds=0.0, hold=hold), target=target
        )
        assert [m.steps for m in shortest] == [1] * len(shortest)


class Passing(nn.Module):
    """A linear layer that notes its passes."""

    def __init__(self):
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 4), []

    def forward(self, x):
        self.passes.append("F")
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.passes.append("B"))
        return out


@pytest.mark.parametrize("hold", ["all", "one"])
def test_so_many_microbatches_are_held_between_forward_and_backward(hold):
    """Weights that an optimizer has stepped at rate 0 are no others to those that are held."""
    layer = Passing()
    options = MeasureOptions(
        steps=3, warmup=1, in_flight=3, hold=hold, optimizer=lambda own: torch.optim.AdamW(own, lr=0.0)
    )
    before = layer.linear.weight.detach().clone()
    options = replace(options, begun=layer.passes.clear)
    found = profile_layers(nn.Sequential(layer), torch.randn(2, 4), nn.functional.mse_loss, options)
    passes = "".join(layer.passes)
    assert passes.startswith("FFFBFBFBFB")
    assert passes.count("B") == 4
    assert [x.steps for x in found] == [3, 3]
    assert torch.equal(layer.linear.weight, before)
    with pytest.raises(BadInput, match="in flight: 0 isn't a number of microbatches"):
        profile_layers(nn.Sequential(layer), torch.randn(2, 4), nn.functional.mse_loss, replace(options, in_flight=0))


def test_saving_an_output_leaves_nothing_behind():
    """A hook that gives an output itself to autograd would make a cycle that nobody can free."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    alive = weakref.WeakSet()

    class Watched(nn.Module):
        def forward(self, x):
            out = layer(x)
            alive.add(out)
            return out

    sized_chain([Watched()], torch.randn(2, 4), lambda y, _: y.sum(), torch.zeros(1))
    gc.collect()
    assert not list(alive)


def test_chain_of_a_model():
    model = zoo.load("gpt-tiny,tied=true,blocks=2")
    chain = measure_model(
        model, 4, MeasureOptions(steps=7, warmup=1), name="tiny", date="2025-01-31", data=model.data(4)
    ).chain
    assert [layer.name for layer in chain.layers] == ["embedding", "block0", "block1", "norm", "head", "loss"]
    assert (chain.name, chain.microbatch, chain.dtype, chain.input_bytes) == ("tiny", 4, "float32", 4 * 64 * 8)
    assert chain.tied == ((0, 4),)
    assert chain.shared == (SharedWeights((0, 4), 128 * 64 * 4, 128 * 64),)
    assert chain.source.startswith("measured by pipeplan ")
    assert chain.source.endswith("2025-01-31")
    assert chain.device.endswith("1 thread")
    embedding, block, *_, norm, head, loss = chain.layers
    assert (embedding.parameters, embedding.weight_bytes) == ((128 + 64) * 64, (128 + 64) * 64 * 4)
    assert (head.parameters, head.weight_bytes) == (128 * 64, 128 * 64 * 4)
    assert (norm.output_bytes, head.output_bytes, loss.output_bytes) == (4 * 64 * 64 * 4, 4 * 64 * 128 * 4, 4)
    assert (loss.weight_bytes, loss.parameters, loss.optimizer_ns) == (0, 0, 0)
    assert all(x.forward_ns > 0 and x.backward_ns > 0 for x in chain.layers)
    assert all(x.optimizer_ns > 0 for x in chain.layers[:-1])
    assert block.saved_bytes > 4 * block.output_bytes
    assert norm.forward_ns < block.forward_ns


class Ticking(Clock):
    """Every mark is 1 after the last one."""

    now = 0

    def mark(self):
        self.now += 1
        return self.now


@pytest.mark.parametrize("hold", ["all", "one"])
def test_a_block_is_timed_as_one_and_sized_as_its_layers_are(hold):
    def profiled(granularity):
        module, _, loss = transformer(2)
        asked = {"steps": 2, "warmup": 1, "hold": hold, "split_backward": True, "granularity": granularity}
        return profile(module, tokens(0, 0)[0], loss, clock=Ticking(), data=tokens, **asked)

    whole, parts = profiled("block").chain, profiled("node")
    merged = parts.merged("block").chain
    assert len(whole) == len(merged) < len(parts.chain)
    first, *middle, last = whole.layers
    assert [first.forward_ns, last.forward_ns] == [2, 2]  # with reading
    assert {(x.forward_ns, x.backward_ns) for x in middle} == {(1, 1)}
    assert max(x.forward_ns for x in merged.layers) > 5
    times = {"forward_ns": 0, "backward_ns": 0, "backward_weight_ns": 0, "optimizer_ns": 0}
    assert [replace(x, **times) for x in whole.layers] == [replace(x, **times) for x in merged.layers]


@pytest.mark.parametrize("hold", ["all", "one"])
def test_reading_is_part_of_the_forwards_of_the_first_layer_and_of_the_loss(hold):
    clock = Ticking()

    def read():
        clock.now += 500

    options = MeasureOptions(steps=2, warmup=1, hold=hold, clock=clock, read=read)
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    measured = measure_model(
        lambda batch: (layers, torch.randn(batch, 4), nn.functional.mse_loss), 3, options, name="m", date="today"
    )
    assert measured.chain.reading_ns == 501
    assert [layer.forward_ns for layer in measured.chain.layers] == [502, 1, 1, 502]
    assert [layer.backward_ns for layer in measured.chain.layers] == [1] * 4
    assert chain_of(read_json(profile_text(measured.chain), ProfileFile, "here"), "here") == measured.chain


def test_a_device_whose_clocks_rise_is_warmed_up_until_they_stay(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: now[0]))
    took = []
    for warm in steps._rounds(MeasureOptions(steps=2, warmup=3), None, 1.0):
        took.append((warm, max(0.1 - 0.002 * len(took), 0.02)))
        now[0] += took[-1][1]
    assert {step for warm, step in took if not warm} == {0.02}
    assert sum(step for warm, step in took if warm) >= 1


def test_gpus_are_such_devices_and_cpus_are_not(monkeypatch):
    """Of a network and of one layer alone, but for later layers, before which the device was at work."""
    assert clock_of(torch.device("cuda", 0)).warm_s >= 1
    assert Clock().warm_s == ThreadClock().warm_s == 0
    monkeypatch.setattr(Clock, "warm_s", 2.5)
    asked = []

    def rounds(options, seconds, warm_s):
        asked.append(warm_s)
        yield from (True, False)

    monkeypatch.setattr(steps, "_rounds", rounds)
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    for hold in ("all", "one"):
        options = MeasureOptions(1, hold=hold, clock=Clock())
        profile_layers(layers, x, lambda y, _: y.square().mean(), options)
    assert asked == [2.5, 2.5, 0, 0]


def test_default_optimizer_leaves_the_weights_and_another_moves_them():
    def weights(**options):
        layers, x, target, loss = example("gpt-tiny", 2)
        before = [p.detach().clone() for p in layers.parameters()]
        measured = profile_layers(layers, x, loss, MeasureOptions(steps=2, warmup=0, **options), target=target)
        changed = [not torch.equal(a, b) for a, b in zip(before, layers.parameters(), strict=True)]
        assert all(m.layer.optimizer_ns > 0 for m in measured[:-1])
        return changed

    assert not any(weights())
    assert all(weights(optimizer=torch.optim.Adam))


def test_split_backward_tells_weight_gradients_from_input_gradients():
    wide = nn.Linear(256, 256)
    layers = [wide, nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 256).requires_grad_(False)]
    x = torch.randn(512, 256)
    shares = []
    for _ in range(6):
        measured = profile_layers(
            layers, x, lambda y, _: y.square().mean(), MeasureOptions(5, split_backward=True, clock=ThreadClock())
        )
        first, relu, second, frozen, loss = (m.layer for m in measured)
        assert first.backward_weight_ns == first.backward_ns  # the network's input needs no gradient
        assert [relu.backward_weight_ns, frozen.backward_weight_ns, loss.backward_weight_ns] == [0, 0, 0]
        shares.append(second.backward_weight_ns / second.backward_ns)
        if 0.3 < shares[-1] < 0.7:  # two products of the same size
            break
    assert any(0.3 < share < 0.7 for share in shares), shares
    unsplit = profile_layers(layers, x, lambda y, _: y.square().mean(), MeasureOptions(steps=1, warmup=0))
    assert all(m.layer.backward_weight_ns is None for m in unsplit)


def test_frozen_layers_at_the_start_have_no_backward():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
    layers[2].requires_grad_(True)
    measured = profile_layers(layers, torch.randn(2, 8), lambda y, _: y.sum(), MeasureOptions(steps=1, warmup=0))
    assert [m.layer.backward_ns > 0 for m in measured] == [False, False, True, True]
    assert [m.layer.optimizer_ns > 0 for m in measured] == [False, False, True, False]
    assert measured[0].layer.weight_bytes == (64 + 8) * 4
    assert measured[0].layer.saved_bytes == 0


def test_tied_layers_pair_each_holder_with_the_next():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    assert tied_layers([a, b, a, b, a]) == ((0, 2), (1, 3), (2, 4))
    assert tied_layers([a, b]) == ()
    size = sum(p.nbytes for p in a.parameters()), sum(p.numel() for p in a.parameters())
    assert shared_weights([a, nn.Sequential(a, b), b]) == (
        SharedWeights((0, 1), *size), SharedWeights((1, 2), *size),
    )  # fmt: skip


def test_names():
    assert [name for name, _ in named_layers([nn.ReLU(), nn.Linear(2, 2)])] == ["relu0", "linear1"]
    shared = nn.ReLU()
    assert [name for name, _ in named_layers(nn.Sequential(shared, nn.Linear(2, 2), shared))] == [
        "relu0",
        "linear1",
        "relu2",
    ]


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (nn.functional.cross_entropy, (4, 6)),
        (nn.functional.mse_loss, (4, 6)),
        (lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()), (4, 3, 6)),
        (nn.functional.cross_entropy, (4, 6, 3)),
    ],
)
def test_a_target_is_made_up_for_common_losses(loss, shape):
    layers = [nn.Linear(shape[-1], shape[-1])]
    measured = profile_layers(layers, torch.randn(shape), loss, MeasureOptions(steps=1, warmup=0))
    assert measured[-1].layer.backward_ns > 0


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Stops(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x.detach() * self.scale


def total(y, _):
    return y.sum()


STRAY = torch.ones(4, requires_grad=True)


def stray_loss(output, target):
    return (output * STRAY).sum()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda b: [nn.Linear(4, 4)], "expected .layers, example_input, loss., got a list"),
        (lambda b: (nn.Linear(4, 4), "text", total), "example_input: a str holds no tensor"),
        (lambda b: ("layers", torch.ones(b, 4), total), "expected an nn.Sequential or a list.* got a str"),
        (lambda b: ([], torch.ones(b, 4), total), "the list is empty"),
        (lambda b: ([nn.Linear(4, 4), torch.relu], torch.ones(b, 4), total), r"layers\[1\]: a builtin.* is not an nn"),
        (lambda b: ([nn.Linear(4, 4)], [torch.ones(b, 4)], total), "example_input is a list, not one tensor"),
        (lambda b: ([nn.Linear(4, 4)], torch.ones(b, 4), None), "gave no loss; that is for a model as one module"),
        (lambda b: ([nn.Linear(4, 4)], torch.ones(b, 4), 3), "loss is a int, which cannot be called"),
        (lambda b: Pair(), "returned a model and no example input; return .model, example_input., or name a data"),
        (
            lambda b, c: None,
            r"build: <lambda>\(b, c\) \(.*test_profiler.py:\d+\) is called as <lambda>\(batch\), with the",
        ),
        (lambda b: (Pair(), torch.ones(b, 4)), r"Pair \(.*test_profiler.py:\d+\) returned a tuple without a loss"),
        (
            lambda b: ([nn.Linear(4, 4)], torch.ones(b, 4), stray_loss),
            r"trains a tensor of shape \(4,\) that neither has",
        ),
        (lambda b: ([nn.Linear(4, 4), Pair()], torch.ones(b, 4), total), r"layers\[1\] \(pair1\) returned a tuple"),
        (lambda b: ([nn.Linear(4, 4), nn.Linear(3, 4)], torch.ones(b, 4), total), r"layers\[1\] .* failed on .*2, 4"),
        (lambda b: ([nn.Linear(4, 4), nn.ReLU(inplace=True)], torch.ones(b, 4), total), r"layers\[1\] .* in-place"),
        (lambda b: ([nn.ReLU(inplace=True), nn.Linear(4, 4)], torch.ones(b, 4), total), r"layers\[0\] .* in place"),
        (lambda b: ([nn.Linear(4, 4), Stops()], torch.ones(b, 4), total), r"layers\[1\] .*no gradient comes back"),
        (lambda b: ([nn.Linear(4, 4)], torch.ones(b, 4), lambda y, t: y), "name a data.index, seed. by --data"),
        (lambda b: ([nn.ReLU()], torch.ones(b, 4), total), "name a data.index, seed. by --data"),
    ],
)
def test_wrong_models_are_refused(build, message):
    with pytest.raises((BadInput, CodeFailed), match=message):
        measure_model(build, 2, MeasureOptions(steps=1, warmup=0), name="wrong", date="today")


@pytest.mark.parametrize(
    ("layers", "loss", "message"),
    [
        ([nn.Linear(4, 4)], lambda y, t: y, r"loss returned a tensor of shape \(2, 4\), not a scalar"),
        ([nn.Linear(4, 4)], lambda y, t: 0.0, "loss returned a float, not a scalar"),
        ([nn.ReLU()], total, "anything that can be trained"),
        ([nn.Linear(4, 4)], nn.functional.cross_entropy, r"loss failed on \(2, 4\) against \(2, 3\)"),
    ],
)
def test_wrong_losses_are_refused(layers, loss, message):
    with pytest.raises((BadInput, CodeFailed), match=message):
        profile_layers(layers, torch.ones(2, 4), loss, MeasureOptions(steps=1, warmup=0), target=torch.ones(2, 3))


def test_steps_must_be_positive():
    with pytest.raises(BadInput, match="steps: 0"):
        profile_layers([nn.Linear(4, 4)], torch.ones(2, 4), total, MeasureOptions(steps=0))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the most that a process held in /proc")
def test_one_layer_at_a_time_needs_the_memory_of_one_layer():
    """Each of twelve saves 34 MB; held one at a time, the process peaks far below where it does with all of them."""
    everything, one = peak_bytes("all"), peak_bytes("one")
    assert everything - one > (LAYERS - 5) * SAVED_BYTES
