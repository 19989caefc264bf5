"""Architectures of papers for texts and speech, written in torch alone as their users do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .row import BATCH, Row, normal, numbers, on_tokens, words


class Transducer(nn.Module):
    """RNN-T: an encoder, a predictor, a joint net, and the loss over all alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.tokens = nn.LSTM(4, 8, batch_first=True), nn.Embedding(6, 8)
        self.predictor, self.joint = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        heard = self.encoder(x)[0]
        before = self.predictor(functional.pad(self.tokens(labels), (0, 0, 1, 0)))[0]
        scores = self.joint((heard[:, :, None] + before[:, None]).tanh()).log_softmax(-1)
        said = scores[:, :, :-1].gather(-1, labels[:, None, :, None].expand(-1, x.shape[1], -1, 1)).squeeze(-1)
        alpha = torch.full((len(x), x.shape[1], labels.shape[1] + 1), -torch.inf)
        alpha[:, 0, 0] = 0
        for t in range(x.shape[1]):
            for u in range(labels.shape[1] + 1):
                ways = []
                if t > 0:
                    ways.append(alpha[:, t - 1, u].clone() + scores[:, t - 1, u, 0])
                if u > 0:
                    ways.append(alpha[:, t, u - 1].clone() + said[:, t, u - 1])
                if ways:
                    alpha[:, t, u] = torch.logsumexp(torch.stack(ways), 0)
        return {"loss": -(alpha[:, -1, -1] + scores[:, -1, -1, 0]).mean()}


class PackedLSTM(nn.Module):
    """An LSTM over sequences of their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.states = nn.Embedding(29, 8), nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 29)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.tokens(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.states(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return self.head(out)


class Written(nn.Module):
    """A recurrent net that writes its states into a tensor of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cell, self.head = nn.Embedding(29, 8), nn.GRUCell(8, 8), nn.Linear(8, 29)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        out, state = torch.zeros(x.shape), torch.zeros(len(x), 8)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out[:, t] = state
        return self.head(out)


class BooleanExperts(nn.Module):
    """Experts of which each takes the tokens that choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = choice == number
            if own.any():
                y[own] = expert(x[own]) * weight[own, None]
        return y


class InBlocks(nn.Module):
    """Tokens through blocks with a ``part`` in each."""

    def __init__(self, part: Any, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, width), nn.Linear(width, 29)
        self.norms, self.blocks = (nn.ModuleList(f() for _ in range(2)) for f in (lambda: nn.LayerNorm(width), part))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


class Tagger(nn.Module):
    """A CRF's likelihood over the tags that words get, inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.states, self.tags = nn.Embedding(29, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)
        self.crf = Chained(5)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        return self.crf(self.tags(self.states(self.tokens(x))[0]), tags)


class Chained(nn.Module):
    """A linear chain CRF's loss, which has weights of its own."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.steps, self.begin = nn.Parameter(torch.randn(tags, tags) * 0.1), nn.Parameter(torch.zeros(tags))

    def forward(self, scores: Tensor, tags: Tensor) -> Tensor:
        alpha = self.begin + scores[:, 0]
        for t in range(1, scores.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.steps, 1) + scores[:, t]
        own = scores.gather(-1, tags[..., None]).sum((1, 2)) + self.begin[tags[:, 0]]
        own = own + self.steps[tags[:, :-1], tags[:, 1:]].sum(1)
        return (torch.logsumexp(alpha, 1) - own).mean()


class Adaptive(nn.Module):
    """torch's adaptive softmax, whose clusters take what falls into them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = nn.Embedding(29, 16), nn.Linear(16, 16)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, 29, [5, 15])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        found = self.head(self.inner(self.tokens(x)).flatten(0, 1), target.flatten())
        return found.loss


class Aligned(nn.Module):
    """CTC as a module, with lengths of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.head, self.loss = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 6), nn.CTCLoss()

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        scores = self.head(self.states(x)[0]).log_softmax(-1).transpose(0, 1)
        return self.loss(scores, labels, torch.full((len(x),), x.shape[1]), lengths)


class Decoding(nn.Module):
    """torch's decoder layers with the mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.tokens, self.layers = nn.Embedding(29, 8), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x), src_key_padding_mask=x == 0))


def _spans(g: torch.Generator) -> Any:
    lengths = torch.tensor([8, int(numbers(g, 1, below=6)) + 2])
    return (numbers(g, BATCH, 8, below=29), lengths), numbers(g, BATCH, 8, below=29)


ROWS = {
    "rnn-t": Row(Transducer, lambda g: {"x": normal(g, BATCH, 5, 4), "labels": 1 + numbers(g, BATCH, 3, below=5)}),
    "packed lstm": Row(PackedLSTM, _spans, on_tokens),
    "hand-written rnn": Row(Written, words(), on_tokens),
    "boolean moe": Row(lambda: InBlocks(BooleanExperts), words(), on_tokens),
    "crf": Row(Tagger, lambda g: {"x": numbers(g, BATCH, 6, below=29), "tags": numbers(g, BATCH, 6, below=5)}),
    "adaptive softmax": Row(
        Adaptive, lambda g: {"x": numbers(g, BATCH, 8, below=29), "target": numbers(g, BATCH, 8, below=29)}
    ),
    "ctc": Row(
        Aligned,
        lambda g: {
            "x": normal(g, BATCH, 9, 4), "labels": 1 + numbers(g, BATCH, 3, below=5),
            "lengths": 1 + numbers(g, BATCH, below=3),
        },
    ),
    "padded transformer": Row(Decoding, words(), on_tokens),
}  # fmt: skip
