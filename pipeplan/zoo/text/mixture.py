"""Mixtures of experts: Llama's blocks whose tokens each go to a few of many feed-forward parts.

Sources, and of the sizes the ``config.json`` published with the weights: Jiang et al., Mixtral of Experts (2024); Yang
et al., Qwen3 Technical Report (2025); DeepSeek-AI, DeepSeek-V3 Technical Report (2024), without the module of
multi-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from ...errors import BadInput
from ..data import text_of
from ..model import Loss, Model
from .llama import Block, LlamaConfig, gated, linear
from .llama import network as llama


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """Sizes of a mixture: a Llama's, ``experts`` of ``expert_width`` each, of which every token goes to ``chosen``.

    The first ``dense`` blocks have none, and ``shared`` experts take all tokens. ``width`` is of a head (0: as hidden
    units are shared evenly), with ``head_norms`` of queries and keys. With ``latent`` numbers of keys and values, and
    ``query_latent`` of queries, attention is DeepSeek's: heads have ``width`` numbers, and ``rotary`` with positions.
    ``biased`` routers choose by sigmoids and a bias. ``expert_ranks`` have each a part of the experts, and the fullest
    of them ``imbalance`` times as many tokens as they have on average.
    """

    experts: int = 8
    chosen: int = 2
    expert_width: int = 0
    shared: int = 0
    dense: int = 0
    width: int = 0
    head_norms: bool = False
    latent: int = 0
    query_latent: int = 0
    rotary: int = 0
    biased: bool = False
    expert_ranks: int = 1
    imbalance: float = 1.0


class Experts(nn.Module):
    """A rank's experts, and the router to all of them; products of all experts are one each."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.group, self.chosen = config.group, config.chosen
        self.imbalance = min(config.imbalance, config.expert_ranks)
        count, rest = divmod(config.experts, config.expert_ranks)
        if rest or not config.chosen <= config.experts:
            raise BadInput(f"experts: {config.expert_ranks} ranks don't share {config.experts} evenly")
        if config.tensor > 1 and not config.sequence_parallel:
            raise BadInput("tensor: experts go with sequence parallelism (--sequence-parallel), as in Megatron-LM")
        if not config.imbalance >= 1:
            raise BadInput(f"imbalance: {config.imbalance} must be at least 1: the fullest GPU's tokens over the mean")
        self.router = linear(config.hidden, config.experts)
        self.bias = nn.Parameter(torch.zeros(config.experts)) if config.biased else None
        self.widen = nn.Parameter(torch.empty(count, config.hidden, 2 * config.expert_width).normal_(std=0.02))
        self.narrow = nn.Parameter(torch.empty(count, config.expert_width, config.hidden).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what their experts make of each token (batch, sequence, hidden)."""
        rows = x.flatten(0, 1)
        scores = self.router(rows)
        scores = scores.softmax(-1) if self.bias is None else scores.sigmoid()
        chosen = (scores if self.bias is None else scores + self.bias).topk(self.chosen, -1).indices
        shares = scores.gather(-1, chosen)
        shares = shares / shares.sum(-1, keepdim=True)
        order = chosen.flatten().argsort()
        numbers = torch.arange(len(self.widen), device=x.device)
        ends = torch.searchsorted(chosen.flatten()[order], numbers, right=True).int()
        sent = rows[order // self.chosen]
        here = self.group.traded(sent, length=ceil(len(sent) * self.imbalance))
        gate, up = _products(here, self.widen, ends).chunk(2, -1)
        taken = functional.pad(shares.flatten()[order], (0, len(here) - len(sent)))  # which go along with their rows
        made = _products(gated(gate, up, taken.unsqueeze(-1).to(gate.dtype)), self.narrow, ends)
        back = self.group.traded(made, length=len(sent)).to(rows.dtype)
        summed: Tensor = _Summed.apply(back, order // self.chosen, len(rows))  # type: ignore[no-untyped-call]  # torch's
        return summed.view_as(x)


class _Summed(torch.autograd.Function):
    """The sums of the ``rows`` that come back for each of so many tokens, of which only the ``places`` are kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(tokens, rows.shape[1]).index_add_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.saved_tensors[0]], None, None


def _products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the products of ``rows``, those of each expert up to its end, with its weights."""
    if rows.dtype == torch.bfloat16 or not (rows.is_meta or isinstance(rows, FakeTensor)):
        return functional.grouped_mm(rows, weights, offs=ends)
    each = -(-len(rows) // len(weights))  # there shapes alone count, and other types have no kernel
    padded = functional.pad(rows, (0, 0, 0, each * len(weights) - len(rows)))
    return torch.bmm(padded.view(len(weights), each, -1), weights).flatten(0, 1)[: len(rows)]


class Mixed(Block):
    """A block of a mixture: attention of its kind, and experts behind the first dense blocks."""

    def __init__(self, config: MixtureConfig, index: int) -> None:
        self.config, self.sparse = config, index >= config.dense
        super().__init__(config)
        if self.sparse:
            self.experts = Experts(config)

    def add_attention(self, config: MixtureConfig, width: int = 0) -> None:
        """Add the weights of attention with norms of heads, or by latent numbers."""
        if not config.latent:
            super().add_attention(config, config.width)
            norms = [nn.RMSNorm(self.width, eps=config.epsilon) for _ in range(2 * config.head_norms)]
            self.norms = nn.ModuleList(norms)
            return
        heads, self.width = self.group.share(config.heads, "heads"), config.width + config.rotary
        self.query_down = linear(config.hidden, config.query_latent)
        self.query_norm = nn.RMSNorm(config.query_latent, eps=config.epsilon)
        part, every = self.group.parted, config.heads
        self.query_up = part(linear(config.query_latent, every * self.width), 0, heads * self.width)
        self.key_down = linear(config.hidden, config.latent + config.rotary)
        self.key_norm = nn.RMSNorm(config.latent, eps=config.epsilon)
        self.key_up = part(linear(config.latent, every * 2 * config.width), 0, heads * 2 * config.width)
        self.project = part(linear(every * config.width, config.hidden), 1, heads * config.width)
        self.add_angles(config, config.rotary)

    def add_feed_forward(self, hidden: int, width: int) -> None:
        """Add the weights of the part that all tokens go through, if there is one."""
        width = self.config.shared * self.config.expert_width if self.sparse else width
        if width:
            super().add_feed_forward(hidden, width)

    def normed(self, heads: Tensor, which: int) -> Tensor:
        """Return queries (0) or keys (1), normed if they are to be."""
        normed: Tensor = self.norms[which](heads) if len(self.norms) else heads
        return normed

    def attended(self, x: Tensor) -> Tensor:
        """Return what attention makes of ``x``; latent numbers, and what turns with positions, are made once for all
        heads."""
        plain = self.config.width
        if not self.config.latent:
            return super().attended(x)
        (query,) = self.group.products(self.query_norm(self.query_down(x)), [self.query_up])
        down = self.key_down(x)
        latent, turned = down[..., : self.config.latent], down[..., self.config.latent :]
        (made,) = self.group.products(self.key_norm(latent), [self.key_up])
        heads = self.heads(query)
        key, value = made.view(*made.shape[:2], -1, 2 * plain).chunk(2, -1)
        turned = self.rotated(self.group.given(turned).unsqueeze(2)).expand(-1, -1, key.shape[2], -1)
        query = torch.cat((heads[..., :plain], self.rotated(heads[..., plain:])), -1)
        return self.projected(query, torch.cat((key, turned), -1), value)

    def fed(self, x: Tensor) -> Tensor:
        """Return what the block's experts make of ``x``, and the part that all tokens go through."""
        if not self.sparse:
            return super().fed(x)
        routed: Tensor = self.experts(x)
        return routed + super().fed(x) if self.config.shared else routed


def network(config: MixtureConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss."""
    return llama(config, seed, lambda index: Mixed(config, index))


QWEN3: dict[str, Any] = {
    "head_norms": True,
    "width": 128,
    "experts": 128,
    "chosen": 8,
    "rotary_base": 1e6,
    "epsilon": 1e-6,
}
MODELS = {
    name: Model(MixtureConfig(*sizes, **more), network, text_of)
    for name, sizes, more in (
        ("mixtral-8x7b", (32, 4096, 32, 8, 14336, 32_000, 4096), {"expert_width": 14336, "rotary_base": 1e6}),
        ("qwen3-30b-a3b", (48, 2048, 32, 4, 6144, 151_936, 4096), {**QWEN3, "expert_width": 768}),
        ("qwen3-235b-a22b", (94, 4096, 64, 4, 12288, 151_936, 4096), {**QWEN3, "expert_width": 1536}),
        (
            "deepseek-v3",
            (61, 7168, 128, 128, 18432, 129_280, 4096),
            {"expert_width": 2048, "experts": 256, "chosen": 8, "shared": 1, "dense": 3, "width": 128, "latent": 512,
             "query_latent": 1536, "rotary": 64, "biased": True, "epsilon": 1e-6},
        ),
    )
}  # fmt: skip
