"""Models of transformers beyond those that hf: names do, or with inputs that it doesn't make up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .row import BATCH, Row, normal, numbers

TEXT = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
          "image_size": 32, "patch_size": 8}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3_NEXT = TEXT | EXPERTS | {
    "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def made(kind: str, config: str, **entries: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of class ``kind`` without chance."""

    def make() -> nn.Module:
        import transformers

        found = getattr(transformers, config)(**entries)
        for part in (found, *(x for x in vars(found).values() if hasattr(x, "to_dict"))):
            for key, value in vars(part).items():
                if isinstance(value, float) and ("drop" in key or "jitter" in key):
                    setattr(part, key, 0.0)
        model: nn.Module = getattr(transformers, kind)(found)
        return model

    return make


def tokens(g: torch.Generator) -> dict[str, torch.Tensor]:
    """Return tokens which are their own labels."""
    found = numbers(g, BATCH, 16, below=97)
    return {"input_ids": found, "labels": found.clone()}


def speech(g: torch.Generator) -> dict[str, torch.Tensor]:
    """Return waves, and characters of which fewer than all are known."""
    labels = numbers(g, BATCH, 4, below=28) + 1
    labels[0, 3] = -100
    return {"input_values": normal(g, BATCH, 400), "labels": labels}


def boxes(g: torch.Generator) -> dict[str, Any]:
    """Return images with boxes of classes in them."""
    found = [
        {"class_labels": numbers(g, 2, below=3), "boxes": torch.rand(2, 4, generator=g) * 0.3 + 0.3}
        for _ in range(BATCH)
    ]
    return {"pixel_values": normal(g, BATCH, 3, 64, 64), "labels": found}


def captions(g: torch.Generator) -> dict[str, Any]:
    """Return images and the words that belong to them."""
    return {
        "input_ids": numbers(g, BATCH, 8, below=97),
        "pixel_values": normal(g, BATCH, 3, 32, 32),
        "return_loss": True,
    }


def series(g: torch.Generator) -> dict[str, Any]:
    """Return time series and how they go on."""
    return {"past_values": normal(g, BATCH, 32, 3), "future_values": normal(g, BATCH, 8, 3)}


def masked_images(g: torch.Generator) -> dict[str, Any]:
    """Return images, and the noise that says what of them is masked."""
    return {"pixel_values": normal(g, BATCH, 3, 32, 32), "noise": torch.rand(BATCH, 16, generator=g)}


DEEPSEEK = TEXT | {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "num_key_value_heads": 4,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 97,
      "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
WAVES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 32,
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "layerdrop": 0.0,
    "mask_time_prob": 0.0, "ctc_loss_reduction": "mean", "do_stable_layer_norm": False,
}  # fmt: skip
CLIP = {"text_config": TEXT | {"eos_token_id": 1, "bos_token_id": 0}, "vision_config": VISION, "projection_dim": 16}
DETR = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "d_model": 32, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_queries": 5, "num_labels": 3,
}  # fmt: skip


def detr() -> nn.Module:
    """Return DETR with a small ResNet below."""
    import transformers

    below = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1],
                                      layer_type="basic", out_features=["stage4"])  # fmt: skip
    return made("DetrForObjectDetection", "DetrConfig", **DETR, backbone_config=below)()


ROWS = {
    "gemma": Row(made("GemmaForCausalLM", "GemmaConfig", **TEXT, head_dim=8), tokens),
    "gemma3": Row(made("Gemma3ForCausalLM", "Gemma3TextConfig", **TEXT, head_dim=8), tokens),
    "phi": Row(made("PhiForCausalLM", "PhiConfig", **TEXT), tokens),
    "qwen2-moe": Row(
        made("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **TEXT, **EXPERTS, shared_expert_intermediate_size=16), tokens
    ),
    "deepseek-v3": Row(made("DeepseekV3ForCausalLM", "DeepseekV3Config", **DEEPSEEK), tokens),
    "olmoe": Row(made("OlmoeForCausalLM", "OlmoeConfig", **TEXT, num_experts=4, num_experts_per_tok=2), tokens),
    "gpt-oss": Row(
        made("GptOssForCausalLM", "GptOssConfig", **TEXT, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        tokens,
    ),
    "mamba2": Row(
        made("Mamba2ForCausalLM", "Mamba2Config", num_hidden_layers=2, hidden_size=32, vocab_size=97, state_size=8,
             num_heads=8, head_dim=8, n_groups=2, chunk_size=8), tokens,
    ),
    "rwkv": Row(
        made("RwkvForCausalLM", "RwkvConfig", num_hidden_layers=2, hidden_size=32, vocab_size=97, context_length=32),
        tokens,
    ),
    "xlnet": Row(
        made("XLNetLMHeadModel", "XLNetConfig", n_layer=2, d_model=32, n_head=4, d_inner=64, vocab_size=97), tokens
    ),
    "umt5": Row(made("UMT5ForConditionalGeneration", "UMT5Config", **T5), tokens),
    "funnel": Row(
        made("FunnelForMaskedLM", "FunnelConfig", block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4,
             d_head=8, d_inner=64, vocab_size=97), tokens,
    ),
    "clip": Row(made("CLIPModel", "CLIPConfig", **CLIP), captions),
    "vit-mae": Row(
        made("ViTMAEForPreTraining", "ViTMAEConfig", **VISION, decoder_hidden_size=16, decoder_num_hidden_layers=1,
             decoder_intermediate_size=32, decoder_num_attention_heads=4), masked_images,
    ),
    "detr": Row(detr, boxes),
    "switch": Row(
        made("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", **T5, num_experts=4,
             num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_decoder_layers=2), tokens,
    ),
    "wav2vec2": Row(made("Wav2Vec2ForCTC", "Wav2Vec2Config", **WAVES), speech),
    "patchtst": Row(
        made("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=3, context_length=32, prediction_length=8,
             patch_length=8, patch_stride=8, num_hidden_layers=2, d_model=32, num_attention_heads=4, ffn_dim=64),
        series,
    ),
    "qwen3-next": Row(made("Qwen3NextForCausalLM", "Qwen3NextConfig", **QWEN3_NEXT), tokens),
}  # fmt: skip
