"""Layers by their formulas: a forward that returns what it stores, and a backward from that with any weights.

Nothing here uses autograd, so old activations can be put together with new weights by hand. Weights are in the order
of the torch module's parameters. ``EMULATED`` says which formulas are those of a module.
"""

import math

import torch
from torch import nn


class Linear:
    def __init__(self, module):
        pass

    def forward(self, x, weights):
        return x @ weights[0].T + weights[1], x

    def backward(self, gradient, x, weights):
        flat, into = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        return gradient @ weights[0], [flat.T @ into, flat.sum(0)]


class Conv2d:
    """Unfolded into one product for each sample; stride 1, no padding."""

    def __init__(self, module):
        self.size = module.kernel_size

    def forward(self, x, weights):
        columns = nn.functional.unfold(x, self.size)  # samples, inputs * kernel, places
        kernel = weights[0].reshape(len(weights[0]), -1)
        height, width = x.shape[2] - self.size[0] + 1, x.shape[3] - self.size[1] + 1
        out = (kernel @ columns).reshape(len(x), -1, height, width) + weights[1][:, None, None]
        return out, (columns, x.shape)

    def backward(self, gradient, stored, weights):
        columns, shape = stored
        flat = gradient.flatten(2)
        kernel = (flat @ columns.transpose(1, 2)).sum(0).reshape(weights[0].shape)
        into = weights[0].reshape(len(weights[0]), -1).T @ flat
        return nn.functional.fold(into, shape[2:], self.size), [kernel, flat.sum((0, 2))]


class Normal:
    """Over the batch (and places) of each channel, or over the features of each sample."""

    def __init__(self, module):
        self.eps = module.eps
        self.per_sample = isinstance(module, nn.LayerNorm)

    def axes(self, x):
        return (-1,) if self.per_sample else tuple(i for i in range(x.dim()) if i != 1)

    def scale(self, weight, x):
        return weight if self.per_sample else weight.reshape(-1, *[1] * (x.dim() - 2))

    def forward(self, x, weights):
        mean = x.mean(self.axes(x), keepdim=True)
        deviation = (x.var(self.axes(x), unbiased=False, keepdim=True) + self.eps).sqrt()
        normal = (x - mean) / deviation
        return normal * self.scale(weights[0], x) + self.scale(weights[1], x), (normal, deviation)

    def backward(self, gradient, stored, weights):
        normal, deviation = stored
        others = tuple(range(gradient.dim() - 1)) if self.per_sample else self.axes(gradient)
        scaled = gradient * self.scale(weights[0], gradient)
        axes = self.axes(gradient)
        inner = scaled - scaled.mean(axes, keepdim=True) - normal * (scaled * normal).mean(axes, keepdim=True)
        return inner / deviation, [(gradient * normal).sum(others), gradient.sum(others)]


class Attention:
    """Multi-head self-attention; weights: those of queries, keys and values in one, their bias, output, its bias."""

    def __init__(self, module):
        self.heads = module.heads

    def split(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, weights):
        into = x @ weights[0].T + weights[1]
        query, key, value = map(self.split, into.chunk(3, -1))
        chances = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]), -1)
        seen = (chances @ value).transpose(1, 2).reshape(x.shape)
        return seen @ weights[2].T + weights[3], (x, query, key, value, chances, seen)

    def backward(self, gradient, stored, weights):
        x, query, key, value, chances, seen = stored
        width = x.shape[-1]
        flat = gradient.reshape(-1, width)
        out = flat.T @ seen.reshape(-1, width)
        back = self.split(gradient @ weights[2])
        of_chances = back @ value.transpose(2, 3)
        logits = chances * (of_chances - (of_chances * chances).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
        parts = (logits @ key, logits.transpose(2, 3) @ query, chances.transpose(2, 3) @ back)
        into = torch.cat([part.transpose(1, 2).reshape(x.shape) for part in parts], -1)
        rows = into.reshape(-1, 3 * width)
        return into @ weights[0], [rows.T @ x.reshape(-1, width), rows.sum(0), out, flat.sum(0)]


class LSTM:
    def __init__(self, module):
        pass

    def forward(self, x, weights):
        h = c = x.new_zeros(len(x), weights[1].shape[1])
        stored = []
        for t in range(x.shape[1]):
            gates = x[:, t] @ weights[0].T + weights[2] + h @ weights[1].T + weights[3]
            i, f, g, o = gates.chunk(4, 1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            after = f * c + i * g
            stored.append((h, c, i, f, g, o, after))
            h, c = o * after.tanh(), after
        hidden = [step[5] * step[6].tanh() for step in stored]
        return torch.stack(hidden, 1), (x, stored)

    def backward(self, gradient, stored, weights):
        x, steps = stored
        found = [torch.zeros_like(w) for w in weights]
        back = torch.zeros_like(x)
        of_h = of_c = torch.zeros_like(steps[0][0])
        for t in reversed(range(x.shape[1])):
            h, c, i, f, g, o, after = steps[t]
            of_h = of_h + gradient[:, t]
            of_c = of_c + of_h * o * (1 - after.tanh() ** 2)
            gates = torch.cat(
                [
                    of_c * g * i * (1 - i),
                    of_c * c * f * (1 - f),
                    of_c * i * (1 - g**2),
                    of_h * after.tanh() * o * (1 - o),
                ],
                1,
            )
            add(found, [gates.T @ x[:, t], gates.T @ h, gates.sum(0), gates.sum(0)])
            back[:, t], of_h, of_c = gates @ weights[0], gates @ weights[1], of_c * f
        return back, found


class GRU:
    def __init__(self, module):
        pass

    def forward(self, x, weights):
        h = x.new_zeros(len(x), weights[1].shape[1])
        stored, hidden = [], []
        for t in range(x.shape[1]):
            r, z, n = (x[:, t] @ weights[0].T + weights[2]).chunk(3, 1)
            hr, hz, hn = (h @ weights[1].T + weights[3]).chunk(3, 1)
            r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
            n = (n + r * hn).tanh()
            stored.append((h, r, z, n, hn))
            h = (1 - z) * n + z * h
            hidden.append(h)
        return torch.stack(hidden, 1), (x, stored)

    def backward(self, gradient, stored, weights):
        x, steps = stored
        found = [torch.zeros_like(w) for w in weights]
        back = torch.zeros_like(x)
        of_h = torch.zeros_like(steps[0][0])
        for t in reversed(range(x.shape[1])):
            h, r, z, n, hn = steps[t]
            of_h = of_h + gradient[:, t]
            of_n = of_h * (1 - z) * (1 - n**2)
            of_z = of_h * (h - n) * z * (1 - z)
            of_r = of_n * hn * r * (1 - r)
            gates, inner = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
            add(found, [gates.T @ x[:, t], inner.T @ h, gates.sum(0), inner.sum(0)])
            back[:, t], of_h = gates @ weights[0], inner @ weights[1] + of_h * z
        return back, found


class Embedding:
    def __init__(self, module):
        pass

    def forward(self, x, weights):
        return weights[0][x], x

    def backward(self, gradient, x, weights):
        found = torch.zeros_like(weights[0])
        found.index_add_(0, x.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return None, [found]


class Plain:
    """A layer without weights, from its function and its derivative by input and output."""

    def __init__(self, function, derivative):
        self.function, self.derivative = function, derivative

    def __call__(self, module):
        return self

    def forward(self, x, weights):
        out = self.function(x)
        return out, (x, out)

    def backward(self, gradient, stored, weights):
        return self.derivative(gradient, *stored), []


class SelfAttention(nn.Module):
    """Torch's multi-head attention of a sequence on itself."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class States(nn.Module):
    """The states of a recurrent layer, over (batch, sequence, features)."""

    def __init__(self, kind, inputs, hidden):
        super().__init__()
        self.inner = kind(inputs, hidden, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


def of_states(module):
    return (LSTM if isinstance(module.inner, nn.LSTM) else GRU)(module)


EMULATED = {
    nn.Linear: Linear, nn.Conv2d: Conv2d, nn.BatchNorm1d: Normal, nn.BatchNorm2d: Normal, nn.LayerNorm: Normal,
    SelfAttention: Attention, States: of_states, nn.Embedding: Embedding,
    nn.ReLU: Plain(lambda x: x.clamp(min=0), lambda gradient, x, out: gradient * (x > 0)),
    nn.Tanh: Plain(torch.tanh, lambda gradient, x, out: gradient * (1 - out**2)),
    nn.Flatten: Plain(lambda x: x.flatten(1), lambda gradient, x, out: gradient.reshape(x.shape)),
}  # fmt: skip


def add(totals, found):
    for total, gradient in zip(totals, found, strict=True):
        total += gradient


def mean_square(out, target):
    """The loss and its gradient."""
    return ((out - target) ** 2).mean(), 2 * (out - target) / out.numel()


class Emulation:
    """Some layers of a model, by formulas. ``weights`` are lists for each layer, as ``own_weights`` gives them."""

    def __init__(self, modules):
        self.layers = [EMULATED[type(module)](module) for module in modules]

    @torch.no_grad()
    def forward(self, x, weights):
        """Return (output, what is stored)."""
        stored = []
        for layer, own in zip(self.layers, weights, strict=True):
            x, kept = layer.forward(x, own)
            stored.append(kept)
        return x, stored

    @torch.no_grad()
    def backward(self, gradient, stored, weights):
        """Return (gradient of the input, gradients of the weights), at ``weights`` and what was stored."""
        found = []
        for layer, kept, own in reversed(list(zip(self.layers, stored, weights, strict=True))):
            gradient, of_weights = layer.backward(gradient, kept, own)
            found.insert(0, of_weights)
        return gradient, found


def own_weights(modules):
    """Copies of the weights of each module."""
    return [[p.detach().clone() for p in module.parameters()] for module in modules]
