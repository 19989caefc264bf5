"""A model whose gradient overflows, and plain training in mixed precision. Ranks import them by name."""

from __future__ import annotations

import torch
from cases.runtime import backwards, mean_square, vectors
from torch import nn

from pipeplan.runtime.training.update.optimizers import optimizer_maker

explosion = backwards(lambda gradient: gradient * float("inf"))


class Exploding(nn.Module):
    """A linear layer whose gradient is infinite for microbatches that begin with 64."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        out = self.linear(x)
        return explosion(out) if float(x[0, 0]) == 64 else out


def exploding(batch):
    torch.manual_seed(2)
    layers = [Exploding(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)]
    return layers, torch.zeros(batch, 16), mean_square


def exploding_vectors(index, seed):
    x, target = vectors(index, seed)
    if index in (4, 13):
        x[0, 0] = 64
    return x, target


def halved_serial(
    build, data, batch, *, dtype, steps, accumulate, optimizer, lr, scale, window, replicas=1, cut=0, scheduler=None,
    clip=None,
):  # fmt: skip
    """Train in mixed precision in one process; return (losses, state in full precision, skipped updates, last scale).

    Layers before ``cut`` have ``replicas``, whose gradients are added up in 32 bits in the order of the replicas.
    """
    layers, _, loss = build(batch)
    layers = layers if isinstance(layers, nn.Module) else nn.Sequential(*layers)
    layers.train()
    masters = [nn.Parameter(p.detach().clone()) for p in layers.parameters()]
    parts = reversed(list(enumerate(layers.children())))
    first = {p: i for i, layer in parts for p in layer.parameters()}
    counts = [replicas if first[p] < cut else 1 for p in layers.parameters()]
    layers.to(dtype)
    stepper = optimizer_maker(optimizer, lr)(masters)
    schedule = None if scheduler is None else scheduler(stepper)
    losses, skipped, good = [], [], 0
    for step in range(steps):
        parts = [
            [torch.zeros_like(p) for _ in range(count)] for p, count in zip(layers.parameters(), counts, strict=True)
        ]
        for m in range(step * accumulate, (step + 1) * accumulate):
            layers.zero_grad()
            x, target = data(m, 0)
            value = loss(layers(x.to(dtype) if x.is_floating_point() else x).float(), target)
            losses.append(float(value.detach()))
            value.backward(torch.tensor(scale / accumulate, dtype=torch.float64).to(value.dtype))
            for part, p in zip(parts, layers.parameters(), strict=True):
                part[m % len(part)] += p.grad
        largest = torch.finfo(dtype).max
        if any(not bool((x.abs() <= largest / len(part)).all()) for part in parts for x in part):
            skipped.append(step + 1)
            scale, good = scale / 2, 0
            continue
        for part, master in zip(parts, masters, strict=True):
            total = part[0].float()
            for x in part[1:]:
                total = total + x.float()
            master.grad = total.to(dtype).float() / scale
        if clip is not None:
            nn.utils.clip_grad_norm_(masters, clip)
        stepper.step()
        if schedule is not None:
            schedule.step()
        good += 1
        if window and good == window:
            scale, good = scale * 2, 0
        with torch.no_grad():
            for p, master in zip(layers.parameters(), masters, strict=True):
                p.copy_(master)
    state = dict(layers.state_dict())
    state.update(zip((name for name, _ in layers.named_parameters()), (x.detach() for x in masters), strict=True))
    return losses, state, tuple(skipped), scale
