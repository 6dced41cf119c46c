"""Tiny random targets of families that our own decoder does not run, in Hugging Face's form, made
from their configs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tests.tiny import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma": GemmaConfig(**SHAPE, **GROUPED),
    "gemma2": Gemma2Config(
        **SHAPE,
        **GROUPED,
        sliding_window=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": Gemma3TextConfig(**SHAPE, **GROUPED, sliding_window=16, query_pre_attn_scalar=8),
    "gpt_neox": GPTNeoXConfig(**SHAPE),
    "granite": GraniteConfig(
        **SHAPE,
        num_key_value_heads=2,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        tie_word_embeddings=False,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, **GROUPED, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE,
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        tie_word_embeddings=False,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=2,
    ),
    "phi": PhiConfig(**SHAPE),
}


def foreign_target(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random target of a family of CONFIGS to `folder` and return it."""
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        # ones and zeros would hide a forgotten norm or bias
        if "norm" in name or name.endswith("bias"):
            weight.data.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return Path(folder)
