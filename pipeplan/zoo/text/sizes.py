"""Sizes of published transformers, without torch: what closed formulas and the zoo build from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a GPT: ``layers`` blocks between an embedding and a head, which share their table when ``tied``."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tied: bool = True

    @property
    def block_parameters(self) -> int:
        """Parameters of one layer: 12 h^2 in four matrices, 13 h in their biases and two norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def table_parameters(self) -> int:
        """Parameters of the token table, and of a head of its own."""
        return self.vocabulary * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token and position tables."""
        return self.table_parameters + self.sequence * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Parameters of the last norm."""
        return 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, a shared table once."""
        head = 0 if self.tied else self.table_parameters
        return self.layers * self.block_parameters + self.embedding_parameters + self.norm_parameters + head


@dataclass(frozen=True, slots=True)
class Llama(Transformer):
    """Sizes of a Llama: no biases, positions or dropout; gated ``feed_forward`` parts of three matrices, and ``groups``
    heads of keys and values."""

    tied: bool = False
    groups: int = 1
    feed_forward: int = 0
    rotary_base: float = 10_000.0

    @property
    def block_parameters(self) -> int:
        """Parameters of one layer: 2 h^2 + 2 h k of attention, 3 h f of the feed-forward part, 2 h in two norms."""
        keys = self.groups * self.hidden // self.heads
        return self.hidden * (2 * self.hidden + 2 * keys + 3 * self.feed_forward + 2)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token table."""
        return self.table_parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of the last norm."""
        return self.hidden


TRANSFORMERS = {
    "gpt-tiny": Transformer(4, 64, 4, 64, 128, tied=False),
    "gpt2-small": Transformer(12, 768, 12, 1024, 50257),
    "gpt2-medium": Transformer(24, 1024, 16, 1024, 50257),
    "gpt2-large": Transformer(36, 1280, 20, 1024, 50257),
    "gpt2-xl": Transformer(48, 1600, 25, 1024, 50257),
    "gpt3-175b": Transformer(96, 12288, 96, 2048, 50257),  # Brown et al. (2020), Table 2.1
    "myelin-12b": Transformer(48, 4512, 24, 512, 51200),  # Myelin, Table I
    "myelin-24b": Transformer(48, 6336, 36, 512, 51200),
    "myelin-50b": Transformer(96, 6528, 48, 512, 51200),
    "myelin-100b": Transformer(96, 9360, 60, 512, 51200),
    "llama-tiny": Llama(4, 64, 4, 64, 128, groups=2, feed_forward=176),
    "llama-7b": Llama(32, 4096, 32, 2048, 32_000, groups=32, feed_forward=11008),
    "llama3-8b": Llama(32, 4096, 32, 8192, 128_256, groups=8, feed_forward=14336, rotary_base=500_000.0),
    "llama3-70b": Llama(80, 8192, 64, 8192, 128_256, groups=8, feed_forward=28672, rotary_base=500_000.0),
    "llama3-405b": Llama(126, 16384, 128, 8192, 128_256, groups=8, feed_forward=53248, rotary_base=500_000.0),
}
