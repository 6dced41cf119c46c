"""The architectures that people run, as one table: each a tiny target with random weights, and what
eyas does with it. docs/architectures.md is written from it (tests/test_architectures.py).

An architecture more is one entry, and one of eyas/families.py where our own engine runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from tests.tiny import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that greedy answers vary
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = 64  # tokens: the least that our engine takes
TIED = {"tie_word_embeddings": True}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, **TIED}
GEMMA_LAYERS = [*3 * ["sliding_attention"], "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA_4 = {
    **TIED,
    "sliding_window": WINDOW,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 3.0,
    "layer_types": GEMMA_LAYERS,
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
DELTA_NET = {  # of the linear layers, three of four
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DELTA_MOE = {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 48}
LATENT = {  # attention by a compressed state (MLA)
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
    "layer_types": [*3 * ["linear_attention"], "full_attention"] * 2,
}
VISION = {  # whatever a model calls its sizes
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
}
LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": 6 * [2.0]}
# Of a layer with a norm behind its MLP. Enlarged, or Gemma's scaled and tied embeddings outweigh
# random layers, and every answer repeats the prompt's last token.
LAST_NORM = "post_feedforward_layernorm.weight"


@dataclass(frozen=True)
class Architecture:
    """models: what people call it. config: the class of transformers, with settings over SHAPE.
    own: whether our own engine runs it; answers, captures and all else go without. text: the
    entry of the decoder in a model that sees images too; its settings have no SHAPE. refused: why
    no head can be trained for it, and a pattern of what generate or capture says.
    """

    models: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    own: bool = True
    text: str | None = None
    refused: tuple[str, str] | None = None

    def config_of(self, **overrides: Any) -> PreTrainedConfig:
        kind: type[PreTrainedConfig] = getattr(transformers, self.config)
        if self.text is None:
            return kind(**{**SHAPE, **self.settings, **overrides})
        decoder = ARCHITECTURES[self.text].config_of(**overrides).to_dict()
        return kind(**{"text_config": decoder, "eos_token_id": 2, **self.settings})


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama 2 and 3, SmolLM2", "LlamaConfig"),
    "llava": Architecture(
        "LLaVA 1.5, LLaVA-NeXT",
        "LlavaConfig",
        {"vision_config": {"model_type": "clip_vision_model", **VISION}},
        text="llama",
    ),
    "smolvlm": Architecture(
        "SmolVLM, Idefics3", "SmolVLMConfig", {"vision_config": VISION}, text="llama"
    ),
    "llama4": Architecture(
        "Llama 4 (text)",
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "floor_scale": 8,
        },
    ),
    "llama4_vision": Architecture(
        "Llama 4 Scout and Maverick (as published, with images)",
        "Llama4Config",
        {"vision_config": {**VISION, "projector_input_dim": 32, "projector_output_dim": 32}},
        text="llama4",
    ),
    "mistral": Architecture(
        "Mistral 7B v0.3, Nemo, Small", "MistralConfig", {"sliding_window": None}
    ),
    "mistral_window": Architecture(
        "Mistral 7B v0.1 (sliding window)", "MistralConfig", {"sliding_window": WINDOW}
    ),
    "ministral3": Architecture(
        "Ministral 3",
        "Ministral3Config",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e6,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "mistral3_vision": Architecture(
        "Mistral Small 3.1, Ministral 3 (as published, with images)",
        "Mistral3Config",
        {"vision_config": {"model_type": "pixtral", **VISION}},
        text="ministral3",
    ),
    "mixtral": Architecture("Mixtral", "MixtralConfig", LOCAL_EXPERTS),
    "qwen2": Architecture("Qwen2, Qwen2.5", "Qwen2Config"),
    "qwen3": Architecture("Qwen3", "Qwen3Config"),
    "qwen3_moe": Architecture("Qwen3 MoE (30B-A3B)", "Qwen3MoeConfig", EXPERTS),
    "qwen3_next": Architecture("Qwen3-Next", "Qwen3NextConfig", DELTA_MOE, own=False),
    "qwen3_5": Architecture("Qwen3.5 and 3.6 (text)", "Qwen3_5TextConfig", DELTA_NET, own=False),
    "qwen3_5_moe": Architecture(
        "Qwen3.5 and 3.6 MoE (35B-A3B, text)", "Qwen3_5MoeTextConfig", DELTA_MOE, own=False
    ),
    "qwen3_5_vision": Architecture(
        "Qwen3.5 and 3.6 (as published, with images)",
        "Qwen3_5Config",
        {"vision_config": VISION},
        text="qwen3_5",
        own=False,
    ),
    "gemma2": Architecture(
        "Gemma 2",
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Architecture(
        "Gemma 3 (text)", "Gemma3TextConfig", {**GEMMA, "layer_types": GEMMA_LAYERS}
    ),
    "gemma3_vision": Architecture(
        "Gemma 3 4B and larger (with images)",
        "Gemma3Config",
        {"vision_config": VISION, "mm_tokens_per_image": 4},
        text="gemma3",
    ),
    "gemma4": Architecture("Gemma 4 (text)", "Gemma4TextConfig", GEMMA_4, own=False),
    "gemma4_small": Architecture(
        "Gemma 4 E2B and E4B (text)",
        "Gemma4TextConfig",
        {**GEMMA_4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        own=False,
    ),
    "gemma4_moe": Architecture(
        "Gemma 4 26B-A4B (text)",
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
        own=False,
    ),
    "gemma4_vision": Architecture(
        "Gemma 4 (as published, with images)",
        "Gemma4Config",
        {"vision_config": VISION, "audio_config": None},
        text="gemma4",
        own=False,
    ),
    "phi3": Architecture("Phi-3", "Phi3Config", {"sliding_window": WINDOW}),
    "phi4_mini": Architecture(
        "Phi-4 mini (long rope)",
        "Phi3Config",
        {
            **TIED,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                **LONG_FACTORS,
            },
        },
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        "GptOssConfig",
        {
            **LOCAL_EXPERTS,
            "sliding_window": WINDOW,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
        },
    ),
    "glm4": Architecture("GLM-4 (9B, 32B)", "Glm4Config"),
    "glm4_moe": Architecture(
        "GLM-4.5 and later (MoE)", "Glm4MoeConfig", {**ROUTED, "use_qk_norm": True}, own=False
    ),
    "glm4_moe_lite": Architecture(
        "GLM-4.7 Flash", "Glm4MoeLiteConfig", {**LATENT, **ROUTED}, own=False
    ),
    "deepseek_v3": Architecture(
        "DeepSeek V3, R1, Kimi K2",
        "DeepseekV3Config",
        {**LATENT, **ROUTED, "n_group": 2, "topk_group": 1},
        own=False,
    ),
    "smollm3": Architecture("SmolLM3", "SmolLM3Config", TIED),
    "granite": Architecture("Granite 3", "GraniteConfig", GRANITE),
    "granite4": Architecture(
        "Granite 4 (dense)",
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "layer_types": 8 * ["full_attention"],
        },
    ),
    "granite4_hybrid": Architecture(
        "Granite 4 (hybrid, MoE)",
        "GraniteMoeHybridConfig",
        {**GRANITE, **MAMBA, **LOCAL_EXPERTS, "shared_intermediate_size": 96},
        own=False,
    ),
    "olmo3": Architecture("OLMo 3", "Olmo3Config", {"sliding_window": WINDOW}),
    "lfm2": Architecture(
        "LFM2",
        "Lfm2Config",
        {
            **TIED,
            "block_auto_adjust_ff_dim": False,
            "layer_types": [*2 * ["conv"], "full_attention", "conv"] * 2,
        },
    ),
    "lfm2_moe": Architecture(
        "LFM2 MoE (8B-A1B)",
        "Lfm2MoeConfig",
        {**TIED, **EXPERTS, "layer_types": [*2 * ["conv"], "full_attention", "conv"] * 2},
        own=False,
    ),
    "exaone4": Architecture(
        "EXAONE 4 32B (sliding window)", "Exaone4Config", {"sliding_window": WINDOW}
    ),
    "exaone4_full": Architecture(
        "EXAONE 4 1.2B",
        "Exaone4Config",
        {**TIED, "sliding_window": None, "layer_types": 8 * ["full_attention"]},
    ),
    "seed_oss": Architecture("Seed-OSS", "SeedOssConfig", {"attention_out_bias": True}),
    "gemma3n": Architecture(
        "Gemma 3n",
        "Gemma3nTextConfig",
        {
            **TIED,
            "vocab_size_per_layer_input": 320,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "num_kv_shared_layers": 3,
            "activation_sparsity_pattern": 8 * [0.0],
            "sliding_window": WINDOW,
            "layer_types": GEMMA_LAYERS,
        },
        own=False,
        refused=("its layers pass on four streams", "8 decoder layers, .* found 0"),
    ),
    "phi": Architecture("Phi-2", "PhiConfig", own=False, refused=2 * ("its lm_head has a bias",)),
    "gemma": Architecture("Gemma 1", "GemmaConfig", TIED, own=False),
    "gpt_neox": Architecture(
        "GPT-NeoX, Pythia", "GPTNeoXConfig", {"num_key_value_heads": 4}, own=False
    ),
    "opt": Architecture(
        "OPT",
        "OPTConfig",
        {**TIED, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
        own=False,
    ),
    "gpt2": Architecture(
        "GPT-2",
        "GPT2Config",
        {**TIED, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 512},
        own=False,
    ),
}


def save_architecture(folder: Path, name: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random target of ARCHITECTURES, with a tokenizer and a chat template, to `folder` and
    return it. In float32; overrides are of its config.
    """
    entry = ARCHITECTURES[name]
    config = entry.config_of(**overrides)
    kind = AutoModelForCausalLM if entry.text is None else AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = kind.from_config(config)
    for path, weight in [*model.named_parameters(), *model.named_buffers()]:
        # ones and zeros would hide a forgotten norm, bias, sink or scale
        named = "norm" in path or path.endswith(("bias", "sinks", "layer_scalar"))
        if named and weight.is_floating_point():
            weight.data.add_(0.1 * torch.randn_like(weight))
        if path.endswith(LAST_NORM):
            weight.data.add_(3.0)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return Path(folder)


def saved_architecture(root: Path, name: str) -> Path:
    """The target of this name, saved once below `root`: of a whole session of tests, this is
    tmp_path_factory.getbasetemp(). Tests do not change it.
    """
    folder = root / "architectures" / name
    return folder if folder.is_dir() else save_architecture(folder, name)
