"""LSTM stacks: a language model of the size of AWD-LSTM, and a translator built like GNMT; one layer per LSTM.

Sources: Merity et al., Regularizing and Optimizing LSTM Language Models (2018), the sizes without the regularisation;
Wu et al., Google's Neural Machine Translation System (2016), in the eight-layer form that PipeDream profiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ..data import text_of, upper_case_of
from ..model import Factory, Loss, Model, chain, network, token_loss


class Recurrent(nn.Module):
    """One LSTM over (batch, sequence, features); its states start at zero and stay inside."""

    def __init__(self, inputs: int, hidden: int, both_ways: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=both_ways)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states for ``x``."""
        out: Tensor = self.lstm(x)[0]
        return out


@dataclass(frozen=True)
class LanguageConfig:
    """Sizes of the language model: the last of ``depth`` LSTMs returns to the ``embedding`` size, so it can be tied."""

    depth: int = 3
    embedding: int = 400
    hidden: int = 1150
    vocabulary: int = 10_000
    sequence: int = 70
    tied: bool = True


def language_network(config: LanguageConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, lstm0, .., head`` and the loss."""

    def factories() -> Iterator[tuple[str, Factory]]:
        yield "embedding", partial(_embedding, config.vocabulary, config.embedding)
        for index in range(config.depth):
            inputs = config.hidden if index else config.embedding
            last = index == config.depth - 1
            yield f"lstm{index}", partial(Recurrent, inputs, config.embedding if last else config.hidden)
        yield "head", partial(nn.Linear, config.embedding, config.vocabulary)

    layers = chain(factories(), seed)
    if config.tied:
        layers.head.weight = layers.embedding.weight  # type: ignore[union-attr]
    return layers, token_loss


@dataclass(frozen=True)
class TranslationConfig:
    """Sizes of the translator: ``encoder`` and ``decoder`` LSTMs; source and target are ``sequence`` tokens each."""

    encoder: int = 4
    decoder: int = 4
    hidden: int = 1024
    vocabulary: int = 32_320
    sequence: int = 50


class Encoder(nn.Module):
    """An LSTM on the source, in front of the target, which passes by. The first one runs both ways.

    The states of its two directions take turns in time, so that source and target have one width; the second joins
    them.
    """

    def __init__(self, hidden: int, sequence: int, index: int) -> None:
        super().__init__()
        self.length = 2 * sequence if index == 1 else sequence
        self.index = index
        self.recurrent = Recurrent(2 * hidden if index == 1 else hidden, hidden, both_ways=index == 0)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 2 * sequence, hidden), of the second (batch, 3 * sequence, hidden), to what the next one reads;
        from the third layer on with a residual sum."""
        source, target = x[:, : self.length], x[:, self.length :]
        if self.index == 0:
            states = self.recurrent(source).reshape(len(x), 2 * self.length, -1)
        elif self.index == 1:
            states = self.recurrent(source.reshape(len(x), self.length // 2, -1))
        else:
            states = source + self.recurrent(source)
        return torch.cat((states, target), dim=1)


class FirstDecoder(nn.Module):
    """The LSTM on the target whose states attend to the encoded source (additive attention, Bahdanau et al. 2015)."""

    def __init__(self, hidden: int, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.recurrent = Recurrent(hidden, hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 2 * sequence, hidden) to states and context side by side, (batch, sequence, 2 * hidden)."""
        source, target = x[:, : self.sequence], x[:, self.sequence :]
        states = self.recurrent(target)
        energy = torch.tanh(self.query(states).unsqueeze(2) + self.key(source).unsqueeze(1))
        context = self.score(energy).squeeze(3).softmax(dim=2) @ source
        return torch.cat((states, context), dim=2)


class Decoder(nn.Module):
    """An LSTM on states and context; the context passes by, unless this is the ``last`` decoder."""

    def __init__(self, hidden: int, residual: bool, last: bool) -> None:
        super().__init__()
        self.residual = residual
        self.last = last
        self.recurrent = Recurrent(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, 2 * hidden) to the same shape, or to (batch, sequence, hidden) if last."""
        before, context = x.chunk(2, dim=2)
        states = self.recurrent(x)
        if self.residual:
            states = states + before
        return states if self.last else torch.cat((states, context), dim=2)


def translation_network(config: TranslationConfig) -> Iterator[tuple[str, Factory]]:
    """Yield the layers ``embedding, encoder0, .., decoder0, .., head``.

    Source and target travel in one tensor: half of what the encoder's cuts carry is the embedded target.
    """
    if config.encoder < 2 or config.decoder < 2:
        raise BadInput(f"encoder, decoder: {config.encoder} and {config.decoder} layers; each needs at least 2")
    hidden, sequence = config.hidden, config.sequence
    yield "embedding", partial(_embedding, config.vocabulary, hidden)
    for index in range(config.encoder):
        yield f"encoder{index}", partial(Encoder, hidden, sequence, index)
    yield "decoder0", partial(FirstDecoder, hidden, sequence)
    for index in range(1, config.decoder):
        yield f"decoder{index}", partial(Decoder, hidden, index >= 2, index == config.decoder - 1)
    yield "head", partial(nn.Linear, hidden, config.vocabulary)


def _embedding(vocabulary: int, width: int) -> nn.Embedding:
    table = nn.Embedding(vocabulary, width)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    return table


MODELS: dict[str, Model[Any]] = {
    "awd-lm": Model(LanguageConfig(), language_network, text_of),
    "gnmt": Model(TranslationConfig(), partial(network, translation_network, token_loss), upper_case_of),
}
