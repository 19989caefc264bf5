"""Architectures of papers for images, graphs and numbers, written in torch alone as their users do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .row import BATCH, Row, images, normal, numbers


class ConvLSTM(nn.Module):
    """Convolutions with a state, over the frames of a film."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width, self.gates = width, nn.Conv2d(1 + width, 4 * width, 3, padding=1)
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, times, _, height, wide = x.shape
        state = cell = x.new_zeros(batch, self.width, height, wide)
        out = []
        for t in range(times):
            i, f, o, g = self.gates(torch.cat([x[:, t], state], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            out.append(self.leave(state))
        return torch.stack(out, 1)


class Denoiser(nn.Module):
    """A diffusion U-Net: time embedded, norms, attention in the middle, skips."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, width, 3, 2, 1), nn.ConvTranspose2d(width, width, 2, 2)
        self.norm, self.middle = nn.GroupNorm(2, width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.join = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(4) * 1.0)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        skip = self.enter(x) + time[:, :, None, None]
        y = functional.silu(self.norm(self.down(skip)))
        flat = y.flatten(2).transpose(1, 2)
        y = y + self.middle(flat, flat, flat)[0].transpose(1, 2).reshape(y.shape)
        return self.leave(self.join(torch.cat([self.up(y), skip], 1)))


class PointNet(nn.Module):
    """Points turned by a learnt matrix, and the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.matrix = nn.Linear(8, 9)
        self.features = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix(self.turn(x).max(2)[0]).view(-1, 3, 3) + torch.eye(3)
        return self.head(torch.max(self.features(torch.bmm(matrix, x)), 2)[0])


class Recommending(nn.Module):
    """DLRM: sparse features by tables, dense ones by layers, and all products of two."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum", sparse=sparse) for _ in range(3))
        self.dense, self.top = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8 + 6, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.dense(dense)
        found = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        row, column = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, torch.bmm(found, found.transpose(1, 2))[:, row, column]], 1))[:, 0]


class Quantized(nn.Module):
    """VQ-VAE: the nearest of a table, passed straight through, with its own losses."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.table, self.leave = nn.Conv2d(3, 8, 4, 4), nn.Embedding(16, 8), nn.ConvTranspose2d(8, 3, 4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.enter(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, 8)
        chosen = torch.cdist(flat, self.table.weight).argmin(1)
        q = self.table(chosen).view(z.shape[0], *z.shape[2:], 8).permute(0, 3, 1, 2)
        more = functional.mse_loss(q, z.detach()) + 0.25 * functional.mse_loss(z, q.detach())
        return {"loss": functional.mse_loss(self.leave(z + (q - z).detach()), x) + more}


class Variational(nn.Module):
    """A VAE whose noise is given."""

    def __init__(self, drawn: bool = False) -> None:
        super().__init__()
        self.enter, self.leave, self.drawn = nn.Linear(8, 8), nn.Linear(4, 8), drawn

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.enter(x).chunk(2, -1)
        noise = torch.randn_like(mean) if self.drawn else noise
        y = self.leave(mean + noise * (log / 2).exp())
        return functional.mse_loss(y, x) - (1 + log - mean**2 - log.exp()).mean() / 2, y


class GraphNet(nn.Module):
    """Two rounds of messages along the edges of a graph, given by keys."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.rounds = nn.Linear(4, 8), nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, (source, target) = self.enter(batch["nodes"]), batch["edges"]
        for step in self.rounds:
            messages = functional.relu(step(torch.cat([x[source], x[target]], -1)))
            x = x + torch.zeros_like(x).index_add(0, target, messages)
        return self.head(x)


class Attending(nn.Module):
    """GAT: softmax over the edges that enter a node, by scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.score, self.head = nn.Linear(4, 8), nn.Linear(16, 1), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(nodes)
        source, target = edges
        score = functional.leaky_relu(self.score(torch.cat([x[source], x[target]], -1)))[:, 0]
        top = torch.full((len(x),), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - top[target]).exp()
        total = torch.zeros(len(x)).index_add_(0, target, weight)
        out = torch.zeros_like(x)
        out.index_add_(0, target, (weight / total[target])[:, None] * x[source])
        return self.head(out)


class Capsules(nn.Module):
    """Routing by agreement, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.weight = nn.Linear(8, 12), nn.Parameter(torch.randn(3, 5, 4, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bic,iocd->biod", self.enter(x).view(-1, 3, 4), self.weight)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            v = torch.tanh((logits.softmax(2)[..., None] * votes).sum(1))
            logits += (votes.detach() * v.detach()[:, None]).sum(-1)
        return v.norm(dim=-1)


class Turned(nn.Module):
    """A spatial transformer: images sampled where a net says."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.features, self.head = nn.Linear(3 * 256, 6), nn.Conv2d(3, 4, 3, 2), nn.Linear(196, 5)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.where(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        x = functional.grid_sample(x, functional.affine_grid(theta, list(x.shape), False), align_corners=False)
        return self.head(self.features(x).relu().flatten(1))


class Twins(nn.Module):
    """One net for two inputs, and how far they are apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return functional.pairwise_distance(self.net(a), self.net(b))


class Balanced(nn.Module):
    """A deep equilibrium: iterated until nothing changes any more."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        z = torch.zeros_like(x)
        for _ in range(20):
            new = torch.tanh(self.inner(z) * 0.5 + x)
            if (new - z).abs().max() < 1e-2:
                break
            z = new
        return self.head(new)


class Halting(nn.Module):
    """Adaptive computation: as many steps as the sum of its halting asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.halt, self.head = nn.GRUCell(8, 8), nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state, out, left = torch.zeros_like(x), torch.zeros_like(x), torch.ones(len(x), 1)
        while left.max().item() > 0.05:
            state = self.step(x, state)
            p = self.halt(state).sigmoid().clamp(min=0.3) * left
            out, left = out + p * state, left - p
        return self.head(out)


class Margin(nn.Module):
    """ArcFace: classes as directions, with a margin, as a loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        cosine = functional.linear(functional.normalize(x), functional.normalize(self.weight)).clamp(-0.99, 0.99)
        margin = functional.one_hot(target, 5) * 0.2
        return functional.cross_entropy(8 * torch.cos(torch.acos(cosine) + margin), target)


class Hyper(nn.Module):
    """A net that makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.base = nn.Linear(8, 72), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(x.mean(0))
        weights = {"weight": made[:64].view(8, 8), "bias": made[64:]}
        return torch.func.functional_call(self.base, weights, (x,)) + self.base(x)


class Remembering(nn.Module):
    """A memory that is written and read by content."""

    def __init__(self) -> None:
        super().__init__()
        self.control, self.key, self.value, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("memory", torch.linspace(-1, 1, 32).view(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory.repeat(len(x), 1, 1)
        for _ in range(2):
            h = self.control(x).tanh()
            weight = torch.einsum("bd,bnd->bn", self.key(h), memory).softmax(-1)
            memory = memory + weight[..., None] * self.value(h)[:, None]
            x = torch.einsum("bn,bnd->bd", weight, memory)
        return self.head(x)


def _graph(g: torch.Generator) -> Any:
    target = torch.cat([torch.arange(6), numbers(g, 6, below=6)])
    return {"nodes": normal(g, 6, 4), "edges": torch.stack([numbers(g, 12, below=6), target])}


def _dlrm(g: torch.Generator) -> Any:
    return (normal(g, 4, 4), numbers(g, 4, 3, 5, below=50)), numbers(g, 4, below=2).float()


mse, cross = functional.mse_loss, functional.cross_entropy
two = functional.binary_cross_entropy_with_logits
vector = lambda g: (normal(g, 4, 8), normal(g, 4, 8))  # noqa: E731  # short
ROWS = {
    "convlstm": Row(ConvLSTM, lambda g: (normal(g, BATCH, 4, 1, 8, 8), normal(g, BATCH, 4, 1, 8, 8)), mse),
    "diffusion u-net": Row(
        Denoiser,
        lambda g: ((normal(g, BATCH, 3, 8, 8), torch.rand(BATCH, generator=g)), normal(g, BATCH, 3, 8, 8)),
        mse,
    ),
    "pointnet": Row(PointNet, lambda g: (normal(g, 4, 3, 20), numbers(g, 4, below=5)), cross),
    "dlrm": Row(lambda: Recommending(False), _dlrm, two),
    "dlrm, sparse": Row(lambda: Recommending(True), _dlrm, two),
    "vq-vae": Row(Quantized, lambda g: {"x": normal(g, BATCH, 3, 16, 16)}),
    "vae": Row(Variational, lambda g: {"x": normal(g, 4, 8), "noise": normal(g, 4, 4)}),
    "graph net": Row(GraphNet, lambda g: (({"batch": _graph(g)}), numbers(g, 6, below=3)), cross),
    "gat": Row(Attending, lambda g: (tuple(_graph(g).values()), numbers(g, 6, below=3)), cross),
    "capsules": Row(Capsules, lambda g: (normal(g, 4, 8), numbers(g, 4, below=5)), cross),
    "spatial transformer": Row(Turned, images(), cross),
    "siamese": Row(Twins, lambda g: ((normal(g, 4, 8), normal(g, 4, 8)), torch.rand(4, generator=g)), mse),
    "deep equilibrium": Row(Balanced, vector, mse),
    "adaptive computation": Row(Halting, vector, mse),
    "hypernetwork": Row(Hyper, vector, mse),
    "memory": Row(Remembering, vector, mse),
}  # fmt: skip
