"""Which sizes has a transformers model, as closed formulas need them?"""

from __future__ import annotations

from typing import Any

from ....errors import BadInput
from ....zoo.sizes import Llama, Transformer
from .hugging_face import named

GPTS = ("gpt2",)  # types of models with two matrices in the feed-forward part, biases and a table of positions
GATED = ("llama", "mistral", "qwen2")  # and with three, and neither


def sizes_of(text: str) -> Transformer:
    """Return the sizes of the decoder that ``hf:`` and ``text`` name; BadInput for no GPT or Llama."""
    config = named(text).config
    found = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = getattr(found, "model_type", "")
    if kind not in (*GPTS, *GATED):
        raise BadInput(f"--model: hf:{text} is {kind or 'something'}, no GPT or Llama; say its sizes, or profile it")
    heads = int(found.num_attention_heads)
    if (getattr(found, "head_dim", None) or found.hidden_size // heads) * heads != found.hidden_size:
        raise BadInput(f"--model: hf:{text} has heads of {found.head_dim}, not the hidden size by their number")
    common: dict[str, Any] = {
        "layers": int(found.num_hidden_layers),
        "hidden": int(found.hidden_size),
        "heads": heads,
        "sequence": int(found.max_position_embeddings),
        "vocabulary": int(found.vocab_size),
        "tied": bool(found.tie_word_embeddings),
    }
    if kind in GPTS:
        return Transformer(**common)
    groups = int(getattr(found, "num_key_value_heads", None) or heads)
    return Llama(**common, groups=groups, feed_forward=int(found.intermediate_size))
