from contextlib import nullcontext
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import Whole, whole_saved_bytes
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from pipeplan import zoo
from pipeplan.cost.saved import saved_bytes
from pipeplan.errors import BadInput
from pipeplan.partition.granularity import merge_articulation
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.runtime.model.contract import Samples
from pipeplan.runtime.model.network import final_outputs, tied_layers
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.saved import saved_values, sized_layers
from pipeplan.runtime.profiler.steps import MeasureOptions


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(functional.gelu(self.first(x)))


class UNet(nn.Module):
    """Two levels down, one skip over them, and the input used again at the end."""

    def __init__(self, channels=4):
        super().__init__()
        self.enter = nn.Conv2d(1, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.leave = nn.Conv2d(2 * channels + 1, 1, 3, padding=1)

    def forward(self, x):
        top = self.enter(x)
        low = self.middle(self.down(top))
        return self.leave(torch.cat((top, self.up(low), x), dim=1))


def traced(module, x):
    torch.manual_seed(0)
    network = trace_module(module, x)
    return network, network.structure(final_outputs(network, "cpu", False))


def names(network):
    return [layer.name for layer in network.layers]


def mean_square(output, target):
    return (output - target).square().mean()


def profile(module, x):
    def build(batch):
        return module, x, mean_square

    return measure_model(build, len(x), MeasureOptions(steps=1, warmup=0), name="model", date="today").chain


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("gpt-tiny,tied=true", 2), ("llama-tiny", 2), ("small-cnn", 2), ("resnet50,image=32", 2),
        ("gnmt,hidden=16,vocabulary=130,sequence=6", 2), ("awd-lm,hidden=24,embedding=16,vocabulary=130,sequence=6", 2),
    ],
)  # fmt: skip
def test_a_traced_model_computes_saves_and_holds_what_the_model_does(name, batch):
    model = zoo.load(name)
    layers, _, loss = model(batch)
    x, target = model.data(batch)(0, 0)
    for part in layers.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.0
    network, output = traced(Whole(layers), x)
    assert torch.equal(output, layers.train()(x))
    whole = network.with_loss(loss, target)
    sizes = tuple(sized_layers(whole, *saved_values(whole, "cpu")))
    dag = Chain("sizes", sizes, sum(y.nbytes for y in network.inputs), whole.edges())
    assert saved_bytes(dag, 0, len(dag)) == whole_saved_bytes(layers, x, target, loss)
    held = {id(p) for layer in network.layers for p in layer.module.parameters()}
    assert held == {id(p) for p in layers.parameters()}
    assert bool(tied_layers(x.module for x in network.layers)) == ("tied=true" in name or "awd" in name)


class Comparing(nn.Module):
    """A loss of torch broadcasts what it compares, of which the input is kept by a layer before, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return functional.mse_loss(self.last(self.first(x).tanh()), x)


def test_what_a_loss_only_seems_to_broadcast_is_kept_once():
    module, x = Comparing(), torch.randn(3, 4)
    network, _ = traced(module, x)
    assert not any("broadcast" in name for name in names(network))
    whole = network.with_loss(lambda output, _: output, x)
    sizes = tuple(sized_layers(whole, *saved_values(whole, "cpu")))
    dag = Chain("sizes", sizes, x.nbytes, whole.edges())
    assert saved_bytes(dag, 0, len(dag)) == whole_saved_bytes(module, x, None, lambda output, _: output)


def test_tied_weights_are_recorded_although_the_export_unties_names():
    layers, _, _ = zoo.load("gpt-tiny,tied=true,blocks=1")(2)
    network, _ = traced(Whole(layers), zoo.load("gpt-tiny").data(2)(0, 0)[0])
    assert [names(network)[i] for i in tied_layers(x.module for x in network.layers)[0]] == [
        "layers.embedding.tokens",
        "layers.head",
    ]


def test_a_residual_block_is_a_dag_whose_skip_crosses_the_cuts_inside():
    layers = nn.Sequential(nn.Linear(8, 8), Residual(8), nn.Linear(8, 2))
    chain = profile(layers, torch.ones(4, 8))
    assert chain.edges is None, "a Sequential stays a chain"
    chain = profile(Whole(layers), torch.ones(4, 8))
    assert [x.name.removeprefix("layers.") for x in chain.layers] == [
        "0", "1.first", "1.gelu", "1.second", "1.add", "2", "loss",
    ]  # fmt: skip
    assert chain.edges == ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6))
    tensor = 4 * 8 * 4
    assert chain.cut_bytes == (tensor, tensor, 2 * tensor, 2 * tensor, 2 * tensor, tensor, 4 * 2 * 4, 0)
    merged = merge_articulation(chain)
    assert [x.name.removeprefix("layers.") for x in merged.layers] == ["0", "1.first..layers.1.add", "2", "loss"]


def test_a_skip_keeps_its_bytes_in_every_cut_that_it_crosses():
    x = torch.randn(2, 1, 8, 8)
    module = UNet()
    chain = profile(module, x)
    assert [y.name for y in chain.layers] == ["input", "enter", "down", "middle", "up", "cat", "leave", "loss"]
    image, top, low, both = 2 * 8 * 8 * 4, 4 * 2 * 8 * 8 * 4, 4 * 2 * 4 * 4 * 4, 9 * 2 * 8 * 8 * 4
    assert chain.inputs == (0,), "what is read late comes from the data"
    assert chain.cut_bytes == (image, image, top, top + low, top + low, top + top, both, image, 0)
    travelling = image, image, image + top, image + top + low, image + top + low, image + top + top, both, image, 0
    assert replace(chain, inputs=None).cut_bytes == travelling, "as in files of before"
    assert torch.equal(traced(module, x)[1], module(x))
    plan = make_plan(Problem(chain, Platform.flat(2, 10**9, 10**9), replicas=False), "contiguous").plan
    cut = plan.allocation.stages[1].start
    sends = [op.duration_ns for op in plan.pattern.operations if op.kind == "SEND_F"]
    assert sends == [-(-chain.cut_bytes[cut] * 10**9 // 10**9)]


def hand_linearised(dag: Chain) -> Chain:
    """The same layers as a plain chain, each cut's bytes written down by hand from the picture of residual blocks."""
    tensor = dag.layers[0].output_bytes
    inside = {"first", "gelu", "second"}
    layers = []
    for layer in dag.layers:
        part = layer.name.split(".")[-1]
        layers.append(
            replace(
                layer,
                output_bytes=2 * tensor if part in inside else layer.output_bytes,
                saves=None,  # no two layers save the same tensor
            )
        )
    return replace(dag, layers=tuple(layers), edges=None)


@pytest.fixture(scope="module")
def residual_dag():
    blocks = nn.Sequential(nn.Linear(16, 16), *(Residual(16) for _ in range(4)), nn.Linear(16, 16))
    dag = profile(Whole(blocks), torch.ones(8, 16))
    times = [(7, 13), (5, 11), (2, 3), (5, 11), (1, 1)]  # of a linear layer, then of a block's four parts
    return replace(
        dag,
        layers=tuple(
            replace(x, forward_ns=1000 * times[0 if i == 0 else 1 + (i - 1) % 4][0], optimizer_ns=0,
                    backward_ns=1000 * times[0 if i == 0 else 1 + (i - 1) % 4][1], saved_bytes=x.saved_bytes)
            for i, x in enumerate(dag.layers)
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("gpus", "bandwidth"), [(2, 10**6), (3, 10**8), (4, 10**10), (4, 10**6)])
def test_a_residual_dag_and_its_hand_linearised_chain_give_the_same_plan(residual_dag, gpus, bandwidth):
    dag, chain = residual_dag, hand_linearised(residual_dag)
    assert chain.cut_bytes[1:-1] == dag.cut_bytes[1:-1]
    for checkpointing, replicas in (("none", False), ("none", True)):
        plans = [
            make_plan(
                Problem(x, Platform.flat(gpus, 10**6, bandwidth), Policy(), replicas, checkpointing), "contiguous"
            ).plan
            for x in (dag, chain)
        ]
        assert plans[0].allocation == plans[1].allocation
        assert plans[0].pattern == plans[1].pattern


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        z = self.b(x)
        y += z
        y[:, 0] = 0
        return self.c(y.relu_())


def test_an_operation_in_place_stays_with_the_layer_that_made_the_tensor():
    x = torch.randn(3, 4)
    module = InPlace()
    network, output = traced(module, x)
    assert torch.equal(output, module(x))
    assert names(network) == ["a..relu", "c"]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.ones(4, 4).tril()
        y = self.first(x) * mask
        return self.second(y.t().contiguous().t()) * mask


def test_constants_and_whole_views_cross_no_cut():
    x = torch.randn(4, 4)
    module = Masked()
    assert torch.equal(traced(module, x)[1], module(x))
    chain = profile(module, x)
    assert all(cut == 64 for cut in chain.cut_bytes[1:-2])


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens, scale):
        states, (last, _) = self.lstm(tokens)
        one, other = states.chunk(2, dim=1)
        return {"logits": self.head(one + other) * scale, "last": last, "name": "several"}


def test_several_inputs_and_outputs_in_a_structure():
    inputs = (torch.randn(2, 6, 4), torch.randn(2, 1, 1))
    module = Several()
    network, output = traced(module, inputs)
    expected = module(*inputs)
    assert output["name"] == "several"
    assert torch.equal(output["logits"], expected["logits"])
    assert torch.equal(output["last"], expected["last"])
    assert names(network) == ["input scale", "input tokens", "lstm", "chunk0", "chunk1", "add", "head", "mul"]

    def build(batch):
        return module, inputs, lambda output, target: (output["logits"] - target).square().mean() + output["last"].sum()

    data = (inputs, torch.zeros(2, 3, 2))
    chain = measure_model(
        build, 2, MeasureOptions(steps=1, warmup=0), name="several", date="today", data=lambda index, seed: data
    ).chain
    assert chain.input_bytes == sum(x.nbytes for x in inputs)
    lstm = [x.name for x in chain.layers].index("lstm")
    assert chain.layers[lstm].output_bytes == (2 * 6 * 4 + 2 * 4) * 4, "states and the last state, which the loss reads"


def test_keyword_inputs():
    module = Several()
    inputs = {"tokens": torch.randn(2, 6, 4), "scale": torch.ones(2, 1, 1)}
    assert torch.equal(traced(module, inputs)[1]["logits"], module(**inputs)["logits"])


class Lookup(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Spoils(nn.Module):
    def forward(self, x):
        return x.add_(1) * 2


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.weight


class Late(nn.Module):
    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros(3))
        return x + self.late


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.one, self.other, (x,))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("near", torch.eye(2).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.near, x)


class Two(nn.Module):
    def forward(self, x, y):
        return x + y


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Sparse(), "near is a sparse tensor, which no layer may have; make it dense"),
        (Two(), r"Two \(.*test_trace.py:\d+\) takes x, y and is given 1 argument: missing a required argument: 'y'"),
        (Late(), "Late makes its weight late in its forward, where no optimizer knows it; make it in __init__"),
        (Conditional(), "Conditional cannot be traced: torch.cond, scan and while_loop need torch.compile; an if or"),
        (Lookup(), r"Lookup cannot be traced: .*nn.Sequential"),
        (Spoils(), "changes the network's input x in place"),
        (Fixed(), "returns a constant or a parameter"),
    ],
)
def test_what_cannot_be_traced_is_said_with_what_to_do(module, message):
    with pytest.raises(BadInput, match=message):
        trace_module(module, torch.ones(2, 3))


def test_one_at_a_time_measures_a_dag_too():
    x = torch.randn(2, 1, 8, 8)

    def build(batch):
        return UNet(), x, mean_square

    one = measure_model(build, 2, MeasureOptions(steps=2, warmup=1, hold="one"), name="unet", date="today")
    whole = measure_model(build, 2, MeasureOptions(steps=2, warmup=1, hold="all"), name="unet", date="today")
    assert one.one_at_a_time
    assert not whole.one_at_a_time
    assert "one layer at a time" in one.chain.source
    assert one.chain.edges == whole.chain.edges

    def sizes(chain: Chain) -> list[Layer]:
        return [replace(x, forward_ns=0, backward_ns=0, optimizer_ns=0) for x in chain.layers]

    assert sizes(one.chain) == sizes(whole.chain)
    assert [x.backward_ns > 0 for x in one.chain.layers] == [x.backward_ns > 0 for x in whole.chain.layers]


class Placing(nn.Module):
    """Names devices wherever torch lets it: by place, by word, and for a whole region."""

    def __init__(self, region):
        super().__init__()
        self.linear, self.region = nn.Linear(4, 4), region

    def forward(self, x):
        mask = torch.ones(4, dtype=torch.bool).to(x.device, x.dtype)
        ramp = torch.arange(4, device=x.device).to(x.device)
        with torch.autocast(x.device.type, torch.bfloat16) if self.region else nullcontext():
            x = self.linear(x)
        return torch.relu(x.to(x.device, torch.float32) * mask + ramp)


@pytest.mark.parametrize(("device", "region"), [("meta", False), ("cuda:1", True)])
def test_every_device_that_a_trace_names_is_that_of_the_run(device, region):
    network = trace_module(Placing(region), torch.zeros(2, 4), device)
    named = []
    for part in (part for layer in network.layers for part in layer.module.modules()):
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            leaves = pytree.tree_leaves((list(node.args), dict(node.kwargs)))
            named += [str(x) for x in leaves if isinstance(x, torch.device)]
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                named.append(node.args[0])
    assert set(named) == ({"cuda:1", "cuda"} if region else {"meta"})
    if device == "meta":
        values = {0: torch.zeros(2, 4, device="meta")}
        for layer in network.layers:
            values |= dict(zip(layer.makes, layer.module.to("meta")(*(values[v] for v in layer.reads)), strict=True))
        assert {x.device.type for x in values.values()} == {"meta"}


class Adapting(nn.Module):
    """It makes what nobody reads, and scales a weight in evaluation."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if not self.training:
            with torch.no_grad():
                self.last.weight.div_(2)
        x = self.first(x)
        x.exp().sin()
        return self.last(x)


def test_what_nobody_reads_is_no_layer():
    assert [code.name for code in trace_module(Adapting(), torch.zeros(2, 4)).layers] == ["first", "last"]


def test_a_weight_that_an_evaluation_changes_is_refused():
    with pytest.raises(BadInput, match=r"weight last\.weight in its evaluation, which every microbatch would do again"):
        trace_module(Adapting(), torch.zeros(2, 4), training=False)


def test_data_keep_no_more_memory_than_their_own():
    tokens = torch.arange(12).reshape(3, 4)
    samples = Samples(lambda index, seed: tokens, lambda _, given: ((given[:, :-1],), {"target": given[:, 1:]}))
    (x,), target = samples(0, 0)
    assert [y.untyped_storage().nbytes() for y in (x, target["target"])] == [x.nbytes] * 2
    assert torch.equal(target["target"], tokens[:, 1:])
