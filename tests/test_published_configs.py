"""config.json as models are published, older spellings among them, at tiny size: our reading of it
is that of transformers, logit for logit.

Keys are those of the models named; sizes, windows and numbers of layers are made small.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eyas.families import FAMILIES
from eyas.model.architecture import TargetConfig
from eyas.model.target import Target
from eyas.operators.foreign import auto_class
from tests.oracle.target import logits_of

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 320, "intermediate_size": 96, "pad_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip
PHI = {
    "model_type": "phi3", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096, "attention_bias": False, "eos_token_id": 32000,
}  # fmt: skip
GEMMA = {
    "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6, "sliding_window": 64,
}  # fmt: skip
LLAMA_4 = {
    **SMALL, "model_type": "llama4_text", "attention_chunk_size": 64, "attn_scale": 0.1,
    "floor_scale": 16, "head_dim": 16, "intermediate_size_mlp": 128, "num_experts_per_tok": 1,
    "num_local_experts": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "for_llm_compressor": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "image_size": 28, "intermediate_size": 32, "patch_size": 14,
    "num_attention_heads": 2, "num_hidden_layers": 1, "projector_input_dim": 32,
    "projector_output_dim": 32,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-4-Scout-17B-16E-Instruct": {  # its scaling has no part between long and short waves
        "model_type": "llama4", "eos_token_id": [7, 8], "vision_config": VISION,
        "text_config": {
            **LLAMA_4, "interleave_moe_layer_step": 1, "no_rope_layers": [], "use_qk_norm": True,
            "attn_temperature_tuning": True, "max_position_embeddings": 10485760,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64, "rope_type": "llama3",
            },
        },
    },
    "Llama-4-Maverick-17B-128E-Instruct": {
        "model_type": "llama4", "eos_token_id": [7, 8], "vision_config": VISION,
        "text_config": {
            **LLAMA_4, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0] * 2,
            "moe_layers": [1, 3, 5, 7], "use_qk_norm": False, "attn_temperature_tuning": False,
            "max_position_embeddings": 1048576, "rope_scaling": None,
        },
    },
    "Llama 4 without chunks, every layer turned": {
        "model_type": "llama4", "eos_token_id": 7, "vision_config": VISION,
        "text_config": {
            **LLAMA_4, "attention_chunk_size": None, "no_rope_layers": 8 * [1],
            "num_local_experts": 1,
        },
    },
    "Llama 4 without norms of heads, with YaRN": {
        **LLAMA_4, "attn_scale": 0.0, "max_position_embeddings": 512, "use_qk_norm": False,
        "rope_scaling": {
            "factor": 4.0, "original_max_position_embeddings": 128, "rope_type": "yarn",
        },
    },
    "gemma-3-1b-it": {
        **GEMMA, "model_type": "gemma3_text", "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "cache_implementation": "hybrid", "rope_scaling": None,
        "rope_local_base_freq": 10000, "rope_theta": 1000000, "max_position_embeddings": 32768,
        "sliding_window_pattern": 6, "eos_token_id": [1, 106],
    },
    "gemma-3-4b-it": {  # states little of its decoder
        "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {
            **SMALL, "head_dim": 16, "model_type": "gemma3_text", "sliding_window": 64,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": VISION,
    },
    "gemma-2-2b-it": {
        **GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "rope_theta": 10000.0,
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "sliding_window_size": 64,
    },
    "Phi-3-mini-4k-instruct": {
        **PHI, "max_position_embeddings": 4096, "sliding_window": 2047, "rope_scaling": None,
    },
    "Phi-4-mini-instruct": {
        **PHI, "partial_rotary_factor": 0.75, "max_position_embeddings": 131072,
        "sliding_window": 262144, "tie_word_embeddings": True,
        "rope_scaling": {
            "long_factor": [1, 1.5, 2, 3, 4, 5], "short_factor": [1, 1.1, 1.2, 1.3, 1.4, 1.5],
            "type": "longrope",
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 2, "head_dim": 16,
        "num_experts_per_tok": 2, "num_local_experts": 4, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 4, "swiglu_limit": 7.0,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "sliding_window": 128, "tie_word_embeddings": False,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False,
            "original_max_position_embeddings": 4096, "rope_type": "yarn",
        },
    },
    "Olmo-3-7B-Instruct": {
        "model_type": "olmo3", "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
        "layer_types": [*3 * ["sliding_attention"], "full_attention"] * 2, "sliding_window": 64,
        "rope_theta": 500000,
        "original_max_position_embeddings": 64, "rope_local_base_freq": 9.0,  # unread
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1,
            "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "YaRN of one kind of layers, without the context that it begins from": {
        "model_type": "olmo3", "max_position_embeddings": 512, "sliding_window": 64,
        "rms_norm_eps": 1e-6,
        "layer_types": [*3 * ["sliding_attention"], "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {
                "factor": 8.0, "rope_theta": 9e4, "rope_type": "yarn", "truncate": True,
            },
            "sliding_attention": {"rope_type": "default"},  # of OLMo 3's base
        },
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "layer_types": 8 * ["full_attention"], "sliding_window": None,
        "max_position_embeddings": 65536, "no_rope_layer_interval": 4, "rope_theta": 5e6,
        "no_rope_layers": [1, 1, 1, 0] * 2, "use_sliding_window": False, "rope_scaling": None,
    },
    "SmolLM3 with a window": {
        "model_type": "smollm3", "sliding_window": 64, "use_sliding_window": True,
    },
    "LFM2-1.2B": {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 64,
        "block_ff_dim": 600, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        "block_norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64,
        "eos_token_id": 7, "full_attn_idxs": [2, 5, 7], "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "num_heads": 4, "rope_theta": 1000000.0, "use_pos_enc": True,
        "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 0.1,  # unread
    },
    "GLM-4-9B-0414": {
        "model_type": "glm4", "attention_bias": False, "head_dim": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
    },
    "granite-3.1-2b-instruct": {
        "model_type": "granite", "attention_multiplier": 0.0625, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0, "residual_multiplier": 0.22, "rope_theta": 5e6,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 32, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None, "use_sliding_window": False,
    },
    "experts in every second layer but one": {
        "model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3],
        "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 3, "moe_layers": [0],  # unread
    },
    "Qwen2.5-7B-Instruct with YaRN": {
        "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072,
        "max_window_layers": 28, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
        "rope_scaling": {
            "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn",
        },
    },
    "OLMo 3 with another base": {  # of full attention alone
        "model_type": "olmo3", "max_position_embeddings": 512, "sliding_window": 64,
        "rope_theta": 1e4, "sliding_window_pattern": 3,  # unread
    },
    "Llama with keys of others": {
        "model_type": "llama", "attention_multiplier": 0.3, "attn_logit_softcapping": 4.0,
        "embedding_multiplier": 3.0, "final_logit_softcapping": 3.0, "logits_scaling": 3.0,
        "layer_types": 8 * ["sliding_attention"],
        "max_position_embeddings": 512, "no_rope_layers": 8 * [0], "query_pre_attn_scalar": 9,
        "position_embedding_type": "nope", "residual_multiplier": 0.3,
        "rope_scaling": {"attention_factor": 1.5, "factor": 4.0, "type": "linear"},
    },
    "Llama, rotary embedding in both forms": {
        "model_type": "llama", "max_position_embeddings": 512, "rope_theta": 5e5,
        "rope_parameters": {"rope_theta": 99.0, "rope_type": "default"},  # unread
        "rope_scaling": {"factor": 4.0, "llama_4_scaling_beta": 0.1, "rope_type": "yarn"},
    },
    "Gemma 3 in both forms": {
        **GEMMA, "model_type": "gemma3_text", "max_position_embeddings": 512,
        "attn_logit_softcapping": 3.0,  # unread
        "rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}},
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
    },
    "Ministral-8B-Instruct-2410": {
        "model_type": "mistral", "max_position_embeddings": 512, "sliding_window": 64,
        "head_dim": 16, "layer_types": ["full_attention", *3 * ["sliding_attention"]] * 2,
    },
    "YaRN with the context of the config, and a window that is not used": {
        "model_type": "qwen3", "max_position_embeddings": 512, "head_dim": 16,
        "original_max_position_embeddings": 64,
        "max_window_layers": 2, "sliding_window": 64, "use_sliding_window": False,
        "rope_scaling": {"factor": None, "rope_type": "yarn"},
    },
    "Llama 3's scaling without it": {
        "model_type": "llama", "max_position_embeddings": 512, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
        },
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 64,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    },
    "Mistral-Small-3.1-24B-Instruct-2503": {
        "model_type": "mistral3", "vision_config": {"model_type": "pixtral", **VISION},
        "tie_word_embeddings": False,
        "text_config": {
            **SMALL, "model_type": "mistral", "head_dim": 16, "rope_theta": 1e9,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": None,
        },
    },
    "EXAONE-4.0-32B": {
        "model_type": "exaone4", "head_dim": 16, "sliding_window": 64,
        "layer_types": [*3 * ["sliding_attention"], "full_attention"] * 2,
        "sliding_window_pattern": "LLLG", "max_position_embeddings": 131072,
        "rope_theta": 1000000,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name, tmp_path):
    stated = PUBLISHED[name]
    text = json.dumps(stated if "text_config" in stated else {**SMALL, **stated})
    (tmp_path / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(tmp_path)
    text_config = config.get_text_config(decoder=True)
    text_config.save_pretrained(tmp_path / "text")
    read = TargetConfig.from_folder(tmp_path)
    if text_config.model_type in FAMILIES:
        assert read.layer_kinds == TargetConfig.from_folder(tmp_path / "text").layer_kinds
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, attn_implementation="eager").float().eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15)
        else:
            weight.data.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)  # in place of the one that transformers rewrote
    tokens_BT = torch.randint(3, 320, (1, 150))
    with torch.no_grad():
        theirs = model(input_ids=tokens_BT, use_cache=False).logits
    ours = logits_of(Target.load(tmp_path, "float32"), tokens_BT)
    assert float((ours - theirs).abs().max()) < 3e-5 * float(theirs.abs().max())
