"""Which layers keep copies of their weights for the backward, and which don't."""

import pytest

torch = pytest.importorskip("torch")

from oracles.newest_weights import SelfAttention, States
from torch import nn
from torch.nn.utils import parametrizations

from pipeplan.errors import BadInput, CodeFailed
from pipeplan.runtime.model.build.loading import load_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.network import TensorSpec
from pipeplan.runtime.model.trace.weight_copies import refuse_copies

FEATURES = TensorSpec((4, 6), torch.float32)
SEQUENCE = TensorSpec((4, 5, 6), torch.float32)
IMAGES = TensorSpec((4, 2, 6, 6), torch.float32)


class Scaled(nn.Module):
    """A scale learned as its logarithm: the backward needs its exponential."""

    def __init__(self):
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x * self.logarithm.exp()


class Masked(nn.Module):
    """Weights times a constant."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("mask", torch.ones(6, 6).tril())

    def forward(self, x):
        return x @ (self.weight * self.mask)


class Transposed(nn.Module):
    """Weights turned round and copied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return x @ self.weight.t().contiguous()


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x).float()


class Viewed(nn.Module):
    """Weights turned, cut and read twice, but never copied; constants of the weights' shape."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 6))
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x):
        first, second = self.weight.chunk(2)
        x = (x @ first.t() + self.shift.repeat(2)[:6]) @ second
        return x * torch.ones_like(self.shift) * self.shift


@pytest.mark.parametrize(
    ("layer", "spec", "copy"),
    [
        (parametrizations.weight_norm(nn.Linear(6, 3)), FEATURES, "float32 (3, 1)"),
        (parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), IMAGES, "float32 (18,)"),
        (parametrizations.orthogonal(nn.Linear(6, 6)), FEATURES, "float32 (6, 6)"),
        (Scaled(), FEATURES, "float32 (6,)"),
        (Masked(), FEATURES, "float32 (6, 6)"),
        (Transposed(), FEATURES, "float32 (6, 6)"),
        (Cast(), FEATURES, "bfloat16 (6, 6)"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_copies_are_found_and_nothing_is_left_changed(layer, spec, copy):
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(BadInput) as refused:
        refuse_copies("layer 3", "odd", layer, spec)
    message = str(refused.value)
    assert message.startswith("model: layer 3 (odd) keeps a copy of its weights, ")
    assert "let the plan recompute the layer, or choose weights stash" in message
    assert message.count("\n") == 0
    assert f"weights, {copy}, for" in message
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(6), nn.Softmax(-1)), FEATURES),
        (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), IMAGES),
        (nn.Sequential(nn.GroupNorm(1, 2), nn.ConvTranspose2d(2, 4, 3), nn.PReLU(), nn.MaxPool2d(2)), IMAGES),
        (SelfAttention(6, 2), SEQUENCE), (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), SEQUENCE),
        (States(nn.LSTM, 6, 7), SEQUENCE), (States(nn.GRU, 6, 7), SEQUENCE), (States(nn.RNN, 6, 7), SEQUENCE),
        (nn.RMSNorm(6), SEQUENCE), (nn.Bilinear(6, 6, 3), FEATURES), (Viewed(), FEATURES),
        (nn.Embedding(9, 6), TensorSpec((4, 5), torch.int64)), (Cast().requires_grad_(False), FEATURES),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)  # fmt: skip
def test_layers_that_read_their_weights_are_let_through(layer, spec):
    if isinstance(layer, nn.Bilinear):
        layer = Doubled(layer)
    refuse_copies("layer 0", "plain", layer, spec)


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


def test_a_layer_that_fails_is_named():
    with pytest.raises(CodeFailed, match=r"model: layer 1 \(narrow\): failed on float32 \(4, 6\): "):
        refuse_copies("layer 1", "narrow", nn.Linear(5, 5), FEATURES)


@pytest.mark.parametrize(
    "name",
    [
        "gpt-tiny", "llama-tiny", "small-cnn", "awd-lm,embedding=8,hidden=8,vocabulary=128,sequence=5",
        "gnmt,hidden=8,vocabulary=128,sequence=5",
    ],
)  # fmt: skip
def test_models_of_the_zoo_can_be_run(name):
    model = load_model(ModelSpec(name), 2, 0)
    for index, layer in enumerate(model.layers):
        refuse_copies(f"layer {index}", layer.name, layer.module, model.boundaries[index])
