"""Heads for targets of other architectures: what a new head and its export say, field by field,
beside SpecForge's published config for the same target (sgl-project/SpecForge,
configs/*eagle3*.json, read in November 2026). Where the two differ, the table says so and why.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from eyas.model import forms
from eyas.model.config import HeadConfig, HeadOptions
from eyas.operators.head import Head
from eyas.operators.shape import target_shape
from tests.tiny_batch import waves, wavy_head

# The targets' own config.json, without what no head depends on.
QWEN3_MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144}
QWEN3_MOE |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_MOE |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
QWEN3_MOE |= {"head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
QWEN3_MOE |= {"max_position_embeddings": 40960, "tie_word_embeddings": False}
QWEN3_MOE |= {"eos_token_id": 151645}
QWEN3_235B = QWEN3_MOE | {"hidden_size": 4096, "intermediate_size": 12288}
QWEN3_235B |= {"moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880}
GPT_OSS |= {"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}  # of one
GPT_OSS |= {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8}
GPT_OSS |= {"head_dim": 64, "vocab_size": 201088, "rms_norm_eps": 1e-5, "rope_theta": 150000}
GPT_OSS |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, **YARN, "truncate": False}}
GPT_OSS |= {"max_position_embeddings": 131072, "sliding_window": 128}
GPT_OSS |= {"tie_word_embeddings": False, "eos_token_id": 200002}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432}
DEEPSEEK_V3 |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
DEEPSEEK_V3 |= {"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_attention_heads": 128}
DEEPSEEK_V3 |= {"num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}
DEEPSEEK_V3 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V3 |= {"vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_V3 |= {"rope_scaling": {"type": "yarn", "factor": 40, **YARN, **MSCALE}}
DEEPSEEK_V3 |= {"max_position_embeddings": 163840, "tie_word_embeddings": False, "eos_token_id": 1}
# multimodal: the decoder's shape is a part of it, what is a default is left out
GEMMA3_TEXT = {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504}
GEMMA3_TEXT |= {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16}
GEMMA3_TEXT |= {"head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024}
GEMMA3_TEXT |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
VISION = {"model_type": "siglip_vision_model", "hidden_size": 1152}
GEMMA3 = {"model_type": "gemma3", "eos_token_id": [1, 106]}
GEMMA3 |= {"text_config": GEMMA3_TEXT, "vision_config": VISION}
SHORTER = "SpecForge writes the length that it trains at, ours is the target's"
WIDER = "a choice of SpecForge's; ours is what a token meets in the target"
OTHER_LAYERS = "SpecForge's departs from its own default"
LINEAR = {"rope_type": "linear", "factor": 8.0}
FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
FIELDS += ("head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_theta")
FIELDS += ("rope_scaling", "max_position_embeddings", "layers")
# SpecForge's value of each field where it is ours too, else (ours, SpecForge's, why).
FACTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Qwen3-30B-A3B": (
        QWEN3_MOE,
        # 12288 in its EAGLE-3.1 config; layers are the default of its code, and of SGLang's
        (2048, 6144, 32, 4, 128, 151936, 32000, 1e-6, 1000000.0, None,
         (40960, 2048, SHORTER), [1, 23, 44]),
    ),
    "Qwen3-235B-A22B": (
        QWEN3_235B,
        (4096, (12288, 24576, WIDER), 64, 4, 128, 151936, 32000, 1e-6, 1000000.0, None,
         40960, [1, 46, 90]),
    ),
    "gpt-oss-20b": (
        GPT_OSS,
        (2880, (11520, 17280, WIDER), 64, 8, 64, 201088, 32000, 1e-5,
         (150000.0, None, "no word of it in SpecForge's: engines take 10000"),
         None,  # the target has yarn; no head of either project does
         (131072, 4096, SHORTER), ([1, 11, 20], [1, 11, 21], OTHER_LAYERS)),
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        (7168, (18432, 40960, WIDER), 56, 8,  # 29568 in its config for R1
         (128, None, "the same: 7168 / 56"), 129280, 32000, (1e-6, 1e-5, "ours is the target's"),
         (10000.0, None, "the same: engines take 10000"), None,  # the target has yarn
         163840, [1, 29, 57]),
    ),
    "gemma-3-27b": (
        GEMMA3,
        (5376, 21504, 32, 16, 128, 262208,
         (32000, 262208, "SpecForge's takes the target's lm_head whole"), 1e-6, 1000000.0,
         (LINEAR, None, "ours is that of the target's full attention"),
         (131072, 4096, SHORTER), ([1, 30, 58], [1, 29, 61], OTHER_LAYERS)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_a_new_head_is_written_as_the_table_says(name, tmp_path):
    config, facts = FACTS[name][0], dict(zip(FIELDS, FACTS[name][1], strict=True))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = target_shape(tmp_path)
    written = forms._engine_settings(
        HeadConfig.for_target(shape, HeadOptions()), "sglang", "bfloat16", forms.Verifier()
    )
    ours = {field: written.get(field) for field in facts}
    ours["layers"] = written["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    for field, fact in facts.items():
        assert ours[field] == (fact[0] if isinstance(fact, tuple) else fact), field
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["model_type"] == "llama"
    assert written["target_hidden_size"] == written["hidden_size"]
    stated = config["eos_token_id"]
    assert shape.eos_token_ids == tuple(stated if isinstance(stated, list) else [stated])


def test_the_scale_of_a_targets_embeddings_is_none_of_its_head():
    """Gemma multiplies embeddings by the root of its width; engines give its head the matrix as it
    is stored, and so does training. A head norms what it is given, so the scale changes nothing.
    """
    head: Head = wavy_head()
    H = head.config.hidden_size
    embeds, hidden = waves(1, 5, H, seed=7), waves(1, 5, H, seed=8)
    plain, _ = head(embeds, hidden)
    scaled, _ = head(5376**0.5 * embeds, hidden)
    torch.testing.assert_close(plain, scaled, rtol=1e-3, atol=1e-3)
