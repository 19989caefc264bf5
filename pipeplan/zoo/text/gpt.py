"""GPT-2 style decoders: embedding, blocks, final norm and head, each one layer of the chain.

Source of the architecture: Radford et al., Language Models are Unsupervised Multitask Learners (2019). Sizes of the
large ones: Myelin, Table I.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BadInput
from ..data import text_of
from ..model import Loss, Model
from .rank_part import Parted, PartEmbedding, decoder
from .sizes import TRANSFORMERS, Llama


@dataclass(frozen=True)
class GPTConfig(Parted):
    """Sizes of a GPT: ``sequence`` is the length trained on, ``positions`` (0: ``sequence``) the longest possible.

    ``tied`` shares the token embedding with the head, as published; plans for weights stash and latest cannot cut
    between tied layers. ``dropout`` is off by default: its masks depend on how a run is split. ``attention`` is
    ``fused``, or ``unfused``: scores, softmax, dropout and their product with the values as kernels of their own, or
    ``again``: those, which the backward runs again (selective recomputation; Korthikanti et al. 2022, section 5).
    ``loss`` is one of :data:`.token_losses.TOKEN_LOSSES`. Without ``causal`` tokens also see those behind them, as in
    an encoder.
    """

    blocks: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    positions: int = 0
    tied: bool = True
    dropout: float = 0.0
    attention: str = "fused"
    loss: str = "same"
    causal: bool = True


class Again(torch.autograd.Function):
    """A function of some tensors of which these alone are saved; the backward runs it again, with the same dropout.

    Not within :func:`storing`: there it is the function itself.
    """

    stores = False

    @classmethod
    def plainly(cls, function: Callable[..., Tensor], *inputs: Tensor) -> Any:
        """Call it, as a trace that has it as one operation does where it runs."""
        return function(*inputs) if cls.stores else _APPLY(cls)(function, *inputs)

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run it."""
        ctx.save_for_backward(*inputs)
        ctx.function, ctx.devices = function, [x.device for x in inputs[:1] if x.is_cuda]
        ctx.states = torch.get_rng_state(), *map(torch.cuda.get_rng_state, ctx.devices)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Run it again, and back."""
        needs = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad(), torch.random.fork_rng(ctx.devices):
            torch.set_rng_state(ctx.states[0])
            for state, device in zip(ctx.states[1:], ctx.devices, strict=True):
                torch.cuda.set_rng_state(state, device)
            out = ctx.function(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], gradients))
        return None, *(next(found) if need else None for need in needs)


_APPLY = partial(torch._C._FunctionBase.__dict__["apply"].__get__, None)  # which no trace replaces


def storing(run: Callable[..., Any], *given: Any) -> Any:
    """Return what ``run`` makes of what is ``given`` where what :class:`Again` makes is saved as all else is."""
    before, Again.stores = Again.stores, True
    try:
        return run(*given)
    finally:
        Again.stores = before


class Embedding(nn.Module):
    """Token numbers (batch, sequence) to the sum of token and position vectors (batch, sequence, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = PartEmbedding(config.vocabulary, config.hidden, config.group)
        self.positions = nn.Embedding(config.positions or config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        config.group.parted(self.tokens, 0, config.group.rows(config.vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ``tokens``."""
        looked_up = self.tokens(tokens)
        places = torch.arange(looked_up.shape[1], device=tokens.device)
        out: Tensor = self.dropout(looked_up + self.positions(places))
        return out


class Block(nn.Module):
    """Pre-norm causal self-attention and a GELU feed-forward part four times as wide, each with a residual sum."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.hidden % config.heads:
            raise BadInput(f"hidden: {config.hidden} is not a multiple of heads: {config.heads}")
        if config.attention not in ("fused", "unfused", "again"):
            raise BadInput(f"attention: {config.attention!r} is neither fused, nor unfused, nor again")
        if config.attention != "fused" and (config.context > 1 or not config.causal):
            what = "context: ranks share the sequences" if config.causal else "causal: tokens see all others"
            raise BadInput(f"{what} of fused attention; say attention=fused")
        self.group = config.group
        if self.group.place is not None and config.dropout and config.attention != "fused":
            raise BadInput("dropout: of the scores of attention each rank would draw the same; say attention=fused")
        self.heads = self.group.share(config.heads, "heads")
        width, inner = self.heads * (config.hidden // config.heads), self.group.share(4 * config.hidden, "columns")
        self.how, self.causal = config.attention, config.causal
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = nn.Linear(config.hidden, 3 * config.hidden)
        self.project = nn.Linear(config.hidden, config.hidden)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.widen = nn.Linear(config.hidden, 4 * config.hidden)
        self.narrow = nn.Linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        residual_std = 0.02 / (2 * config.blocks) ** 0.5
        for linear in (self.attention, self.project, self.widen, self.narrow):
            into_residual = linear in (self.project, self.narrow)
            nn.init.normal_(linear.weight, std=residual_std if into_residual else 0.02)
            nn.init.zeros_(linear.bias)
        self.group.parted(self.attention, 0, 3 * width, blocks=3)
        self.group.parted(self.project, 1, width)
        self.group.parted(self.widen, 0, inner)
        self.group.parted(self.narrow, 1, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, sequence, hidden) after the block."""
        (made,) = self.group.products(self.norm1(x), [self.attention])
        batch, sequence, _ = made.shape
        heads = made.view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        if self.how == "again" and not Again.stores:
            attended = Again.apply(self._unfused, query, key, value)  # type: ignore[no-untyped-call]  # torch's
        elif self.how != "fused":
            attended = self._unfused(query, key, value)
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.dropout(self.group.added(attended.transpose(1, 2).reshape(batch, sequence, -1), self.project))
        (widened,) = self.group.products(self.norm2(x), [self.widen])
        out: Tensor = x + self.dropout(self.group.added(functional.gelu(widened, approximate="tanh"), self.narrow))
        return out

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of (batch, heads, sequence, width) with all scores kept: four kernels, the mask added in the first.

        As Megatron-LM has it without flash attention: dropout also of the scores.
        """
        batch, heads, sequence, width = query.shape
        later = torch.full((sequence, sequence), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
        flat = (batch * heads, sequence, width)
        scores = torch.baddbmm(later, query.reshape(flat), key.reshape(flat).transpose(1, 2), alpha=width**-0.5)
        return torch.bmm(self.dropout(scores.softmax(-1)), value.reshape(flat)).view(query.shape)


def network(config: GPTConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss."""
    norm = partial(nn.LayerNorm, config.hidden)
    return decoder(config, seed, partial(Embedding, config), lambda _: Block(config), norm)


def _model(name: str) -> Model[GPTConfig]:
    """Return the model whose sizes :data:`~pipeplan.zoo.text.sizes.TRANSFORMERS` has under ``name``."""
    sizes = TRANSFORMERS[name]
    longest = 0 if name == "gpt-tiny" else sizes.sequence
    config = GPTConfig(sizes.layers, sizes.hidden, sizes.heads, sizes.vocabulary, sizes.sequence, longest, sizes.tied)
    return Model(config, network, text_of)


MODELS = {name: _model(name) for name, sizes in TRANSFORMERS.items() if not isinstance(sizes, Llama)}
