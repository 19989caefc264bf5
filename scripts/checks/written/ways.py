"""Ways of writing a model: hooks, changes in place, parametrizations, types, scripts, gradients inside, draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils.checkpoint import checkpoint

from .architectures import Margin
from .row import Row, images, normal, numbers, vectors
from .sequences import Chained

mse, cross = functional.mse_loss, functional.cross_entropy


class Parts(nn.Module):
    """Three layers with a ``part`` between the first two, and ``change`` made when it is built."""

    def __init__(self, part: Any = None, change: Callable[[Any], Any] = lambda module: None) -> None:
        super().__init__()
        self.enter, self.part = nn.Linear(8, 8), nn.Tanh() if part is None else part()
        self.inner, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.inner(self.part(self.enter(x))).relu())


class Does(nn.Module):
    """A module that does what ``function(module, x)`` says."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **state: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def within(function: Callable[[Any, Tensor], Any], state: Callable[[], dict[str, Any]] = dict) -> Row:
    """Return the row of a model with a part that does ``function``."""
    return Row(lambda: Parts(lambda: Does(function, **state())), vectors(), mse)


def drawing(function: Callable[[Any, Tensor], Any]) -> Row:
    """Return that of one whose part draws random numbers."""
    return Row(lambda: Parts(lambda: Does(function)), vectors(), mse, draws=True)


def changed(change: Callable[[Any], Any]) -> Row:
    """Return that of a model that ``change`` was made to."""
    return Row(lambda: Parts(change=change), vectors(), mse)


# --- hooks --------------------------------------------------------------------------------------------------------


def _hooked_inside(module: Any, x: Tensor) -> Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y.tanh()


HOOKS = {
    "forward pre-hook": changed(lambda m: m.inner.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))),
    "forward hook": changed(lambda m: m.inner.register_forward_hook(lambda _, given, out: out + given[0])),
    "forward hook with keywords": changed(
        lambda m: m.inner.register_forward_hook(lambda _, given, more, out: out * 0.5, with_kwargs=True)
    ),
    "full backward hook": changed(
        lambda m: m.inner.register_full_backward_hook(lambda _, inwards, out: (inwards[0] * 0.5,))
    ),
    "full backward pre-hook": changed(
        lambda m: m.inner.register_full_backward_pre_hook(lambda _, out: (out[0].clamp(-0.01, 0.01),))
    ),
    "hook of a tensor": within(_hooked_inside),
    "hook of a weight": changed(lambda m: m.inner.weight.register_hook(lambda gradient: gradient * 0.5)),
    "hook of the model": changed(lambda m: m.register_forward_hook(lambda _, given, out: out * 2)),
    "hook of the state": changed(lambda m: m.register_state_dict_post_hook(lambda _, state, prefix, local: None)),
}


# --- in place ------------------------------------------------------------------------------------------------------


class Teaching(nn.Module):
    """A teacher that follows its pupil in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.pupil, self.teacher, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for a, b in zip(self.teacher.parameters(), self.pupil.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
            target = self.teacher(x)
        y = self.pupil(x)
        return self.head(y) + target


class Prototypes(nn.Module):
    """Prototypes that are brought to length 1 before each use."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.prototypes = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.copy_(functional.normalize(self.prototypes.weight, dim=1))
        return self.prototypes(functional.normalize(self.enter(x), dim=1))


def _filled(module: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 8)
    out[:, :4] = x[:, 4:]
    out[:, 4:] += x[:, :4] * 2
    return out


def _masked(module: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape)
    mask[:, :4] = 0
    return x * mask


def _through_view(module: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1, 2, 4)[:, 0].mul_(2)
    y.diagonal().add_(1)
    return y


def _put(module: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 3])), torch.zeros(2))
    y.masked_fill_(torch.eye(8)[: len(x)] > 0, 0.5)
    y.scatter_(1, torch.zeros(len(x), 1, dtype=torch.int64), 1.0)
    return y


def _averaged(module: Any, x: Tensor) -> Tensor:
    if module.training:
        with torch.no_grad():
            module.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            module.count += 1
    return x - module.mean


def _rebound(module: Any, x: Tensor) -> Tensor:
    module.mean = 0.9 * module.mean + 0.1 * x.detach().mean(0)
    return x - module.mean


def _out(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(module.mean, 0.5, out=module.mean)
        module.mean.data += x.data.mean(0)
    return x + module.mean


IN_PLACE = {
    "in place: relu": Row(lambda: Parts(lambda: nn.ReLU(inplace=True)), vectors(), mse),
    "in place: slices of zeros": within(_filled),
    "in place: a mask of ones": within(_masked),
    "in place: through views": within(_through_view),
    "in place: put, fill, scatter": within(_put),
    "in place: an average": within(
        _averaged, lambda: {"mean": torch.zeros(8), "count": torch.zeros((), dtype=torch.int64)}
    ),
    "in place: a buffer assigned": within(_rebound, lambda: {"mean": torch.zeros(8)}),
    "in place: out=": within(_out, lambda: {"mean": torch.zeros(8)}),
    "in place: a teacher": Row(Teaching, vectors(), mse),
    "in place: prototypes": Row(Prototypes, vectors(), mse),
    "in place: residual": within(lambda m, x: x.mul(2).add_(x).tanh_()),
}  # fmt: skip


# --- weights made of others, types, and how it is run -----------------------------------------------------------------


def _half(module: Any, x: Tensor) -> Tensor:
    return module.linear(x.bfloat16()).float()


def _autocast(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = module.linear(x)
    return y.float()


def _double(module: Any, x: Tensor) -> Tensor:
    return module.linear(x.double()).float()


class Spectral(nn.Module):
    """Fourier layers: weights that are complex numbers, applied to modes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.modes = nn.ParameterList(nn.Parameter(torch.randn(5, dtype=torch.cfloat)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for modes in self.modes:
            x = torch.fft.irfft(torch.fft.rfft(x) * modes, n=8).relu() + x
        return self.leave(x)


class Rotating(nn.Module):
    """A complex net throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.cfloat) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.flip(1))
        for layer in self.layers:
            z = layer(z)
            z = z / (1 + z.abs())
        return z.abs()


class FakeQuantized(nn.Module):
    """Quantisation-aware training by torch's own fake quantisation."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.inner, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inputs = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        scale = weight.detach().abs().max() / 127
        weight = weight + (torch.round(weight / scale) * scale - weight).detach()
        return self.leave(functional.linear(self.inputs(x), weight, self.inner.bias))


class Recomputing(nn.Module):
    """Blocks that are recomputed by ``torch.utils.checkpoint``."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.enter, self.reentrant = nn.Linear(8, 8), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@torch.jit.script
def _scripted_function(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x.tanh()


class Straight(torch.autograd.Function):
    """The sign, whose gradient is passed straight through."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # as everybody writes it
        return gradient.clamp(-1, 1)


def _linear(dtype: torch.dtype = torch.float32) -> Callable[[], dict[str, Any]]:
    return lambda: {"linear": nn.Linear(8, 8, dtype=dtype)}


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))


class Tags(Chained):
    """A CRF over five tags, as a loss."""

    def __init__(self) -> None:
        super().__init__(5)


class Behind(nn.Module):
    """A model around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Scaled(nn.Module):
    """A parametrization: a weight is its original times a learnt scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


WEIGHTS = {
    "weight norm": changed(lambda m: parametrizations.weight_norm(m.inner)),
    "weight norm, the old one": changed(lambda m: weight_norm(m.inner)),
    "spectral norm": changed(lambda m: parametrizations.spectral_norm(m.inner)),
    "spectral norm, the old one": changed(lambda m: nn.utils.spectral_norm(m.inner)),
    "orthogonal": changed(lambda m: parametrizations.orthogonal(m.inner)),
    "parametrized": changed(lambda m: nn.utils.parametrize.register_parametrization(m.inner, "weight", Scaled())),
    "pruned": changed(lambda m: prune.l1_unstructured(m.inner, "weight", 0.5)),
    "tied": changed(lambda m: setattr(m.leave, "weight", m.enter.weight)),
    "frozen": changed(lambda m: m.inner.requires_grad_(False)),
    "quantisation-aware": Row(FakeQuantized, vectors(), mse),
    "complex weights": Row(Spectral, vectors(), mse),
    "complex throughout": Row(Rotating, vectors(), mse),
    "double": Row(lambda: Parts().double(), lambda g: tuple(x.double() for x in vectors()(g)), mse),
    "double part": within(_double, _linear(torch.float64)),
    "half part": within(_half, _linear(torch.bfloat16)),
    "autocast part": within(_autocast, _linear()),
    "sparse embedding": Row(lambda: Looking(), lambda g: (numbers(g, 4, below=29), normal(g, 4, 8)), mse),
    "lazy": Row(lambda: Behind(_lazy()), images(), cross),
    "scripted part": Row(
        lambda: Parts(lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))), vectors(), mse
    ),
    "scripted function": within(lambda m, x: _scripted_function(x)),
    "scripted model": Row(lambda: torch.jit.script(Plain()), vectors(), mse),
    "traced part": Row(lambda: Parts(lambda: torch.jit.trace(nn.Linear(8, 8), torch.zeros(4, 8))), vectors(), mse),
    "compiled model": Row(lambda: torch.compile(Parts()), vectors(), mse),
    "compiled part": Row(lambda: Parts(lambda: torch.compile(nn.Linear(8, 8))), vectors(), mse),
    "compiled function": within(lambda m, x: torch.compile(lambda y: y.tanh() * 2)(x)),
    "checkpointed": Row(lambda: Recomputing(False), vectors(), mse),
    "checkpointed, reentrant": Row(lambda: Recomputing(True), vectors(), mse),
    "gradient of its own": within(lambda m, x: Straight.apply(x)),
    "loss with weights": Row(lambda: Parts(), lambda g: (normal(g, 4, 8), numbers(g, 4, below=5)), Margin),
    "loss with weights: crf": Row(
        lambda: Behind(nn.Embedding(29, 5)), lambda g: (numbers(g, 2, 6, below=29), numbers(g, 2, 6, below=5)),
        Tags,
    ),
}  # fmt: skip


class Looking(nn.Module):
    """A table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.parts = nn.Embedding(29, 8, sparse=True), Parts()

    def forward(self, x: Tensor) -> Any:
        return self.parts(self.table(x))


class Plain(nn.Module):
    """Two layers, as a script can have them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x).relu())


# --- gradients and values inside ------------------------------------------------------------------------------------


class Penalised(nn.Module):
    """A critic's gradient for its input, as a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.critic = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.enter(x)
        mixed = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return {"loss": self.critic(x).mean() + (gradient.norm(dim=1) - 1).square().mean()}


class Hamiltonian(nn.Module):
    """Forces as gradients of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            force = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        return torch.cat([force[:, 4:], -force[:, :4]], 1)


class Adapting(nn.Module):
    """MAML: a step of its own before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        weights = dict(self.head.named_parameters())
        inner = functional.mse_loss(torch.func.functional_call(self.head, weights, (x,)), x)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        after = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), gradients, strict=True)}
        return torch.func.functional_call(self.head, after, (x,))


class Sloped(nn.Module):
    """The gradient of a function by ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        slope = torch.func.vmap(torch.func.grad(lambda row: self.inner(row).tanh().sum()))(x)
        return self.leave(x + slope)


class Ragged(nn.Module):
    """Nested tensors between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))
        rows = self.inner(rows)
        return self.leave(rows.values())


def _numpy(module: Any, x: Tensor) -> Tensor:
    order = np.argsort(x.detach().numpy().sum(1))
    return x[torch.from_numpy(order.copy())].cumsum(0)


INSIDE = {
    "gradient penalty": Row(Penalised, lambda g: {"x": normal(g, 4, 8)}),
    "hamiltonian": Row(Hamiltonian, vectors(), mse),
    "maml": Row(Adapting, vectors(), mse),
    "torch.func": Row(Sloped, vectors(), mse),
    "vmap": within(lambda m, x: torch.vmap(lambda row: m.linear(row).softmax(0))(x), _linear()),
    "nested tensors": Row(Ragged, vectors(), mse),
    "branch on values": within(lambda m, x: m.linear(x) if x.mean() > 0 else m.linear(x) * 2, _linear()),
    "values as numbers": within(lambda m, x: x / float(x.detach().abs().max())),
    "numpy inside": within(_numpy),
    "unique, topk, sort": within(lambda m, x: x.sort(1)[0] + x.topk(1)[0] + len(x.detach().unique())),
}


# --- draws ----------------------------------------------------------------------------------------------------------

DRAWS = {
    "draws: dropout": drawing(lambda m, x: functional.dropout(x, 0.3)),
    "draws: noise": drawing(lambda m, x: x + 0.1 * torch.randn_like(x)),
    "draws: gumbel": drawing(lambda m, x: functional.gumbel_softmax(x, hard=True)),
    "draws: rrelu": drawing(lambda m, x: functional.rrelu(x, training=True)),
    "draws: choice": drawing(lambda m, x: x * torch.multinomial(x.detach().softmax(1), 1)),
    "draws: order": drawing(lambda m, x: x[torch.randperm(len(x))]),
    "draws: in place": drawing(lambda m, x: x + torch.empty_like(x).uniform_(-0.1, 0.1)),
    "draws: python": drawing(lambda m, x: x * (1 + random.random())),
    "draws: numpy": drawing(lambda m, x: x + torch.from_numpy(np.random.rand(8)).float()),
    "draws: depth": drawing(lambda m, x: x if torch.rand(()).item() < 0.5 else x.tanh()),
}

ROWS = HOOKS | IN_PLACE | WEIGHTS | INSIDE | DRAWS
