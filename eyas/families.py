"""The architectures that our own decoder runs: one entry of FAMILIES each, by transformers' model
type. `model/architecture.py` reads a config.json by it, `model/arrangement.py` a checkpoint's
tensors, `gguf` ggml's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NormPlacement = Literal["before", "after", "both"]
HeadNorm = Literal["none", "head", "width"]
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
# config.json's names of activations; clamped_silu is gpt-oss', which calls it silu
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ALL_SLIDING = 0


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: what config.json does not say.

    name: of transformers' classes. defaults: of config.json, where they differ from Llama's.

    norms: before attention and MLP (Llama), after them (OLMo 2), or both (Gemma 2). norm_offset:
    added to the stored weights of every norm. qk_norm: norms of queries and keys, by head or over
    all heads. attention_bias, out_bias: q, k and v (o) always have a bias; None: config.json's
    `attention_bias`.

    sinks: a logit for each head that takes weight and has no value. window_period: which layers
    slide where config.json has a window and no `layer_types`: all but every n-th, ALL_SLIDING, or
    none (None). has_window_switch: `use_sliding_window` must be true. local_rope: layers that slide
    have a rotary embedding of their own. only_windows_turn: where config.json has a window, only
    layers that slide have a rotary embedding.

    interleaved_heads: a rotated pair is two neighbours; ours is one channel of each half. names:
    parts of published tensors' names, and ours. fused: matrices that hold several of ours in order.
    stacked: one tensor holds all experts of a layer, inputs first, gate and up as halves or by
    turns.

    long_rope: what a config calls su or yarn is longrope. scales_embeddings: by sqrt(hidden_size).
    experts_bias: the router and the experts have biases. routes_input: the chosen experts take
    their input times the sigmoid of the router's logit, and are added to an MLP of every token
    (Llama 4).

    gguf: ggml's name; None where eyas does not read its files. gguf_mark: metadata that only this
    family of the name has. gguf_names: parts of ggml's names that differ from Llama's, and the
    published ones, * for an expert's number. gguf_interleaved: ggml stores q and k interleaved,
    unlike the checkpoint. gguf_norm_offset: the file's norms include it. gguf_constants: of
    config.json, in no ggml file. gguf_defaults: of metadata that a file may lack.
    gguf_wide_queries: the model of so many layers scales queries by its width, not by a head's.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: NormPlacement = "before"
    norm_offset: float = 0.0
    qk_norm: HeadNorm = "none"
    attention_bias: bool | None = None
    out_bias: bool | None = False
    activation: Activation | None = None
    sinks: bool = False
    window_period: int | None = None
    has_window_switch: bool = False
    local_rope: bool = False
    only_windows_turn: bool = False
    interleaved_heads: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Literal["halves", "turns"] | None = None
    long_rope: bool = False
    scales_embeddings: bool = False
    experts_bias: bool = False
    routes_input: bool = False
    gguf: str | None = None
    gguf_mark: str | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: bool = False
    gguf_norm_offset: bool = False
    gguf_constants: Mapping[str, Any] = field(default_factory=dict)
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_wide_queries: int | None = None


# Ours, where a layer has more norms than Llama's two:
#   h += attention_out_norm(attention(input_layernorm(h)))
#   h += mlp_out_norm(mlp(post_attention_layernorm(h)))
OUT_NORMS = {
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_out_norm",
}
GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
QKV: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
}
GGUF_OUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_GEMMA = {**GGUF_OUT_NORMS, "ffn_norm": "pre_feedforward_layernorm"}


def of_parts(ggml: str, published: str) -> dict[str, str]:
    """Names of an MLP's three matrices."""
    return {ggml.format(part): published.format(part) for part in ("gate", "up", "down")}


GEMMA = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GRANITE = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
GGUF_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **of_parts("ffn_{}_exps", "mlp.experts.*.{}_proj"),
}

# By config.json's model_type.
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", out_bias=None, gguf="llama", gguf_interleaved=True),
    "llama4_text": Family(
        "Llama4",
        defaults={
            "intermediate_size_mlp": 16384,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "moe_layers": None,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "no_rope_layers": None,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        out_bias=None,
        interleaved_heads=True,
        routes_input=True,
        names={"feed_forward.shared_expert": "mlp.shared", "feed_forward": "mlp"},
        stacked="halves",
        gguf="llama4",
        gguf_names={
            "ffn_gate_inp": "feed_forward.router",
            **of_parts("ffn_{}", "feed_forward.{}_proj"),
            **of_parts("ffn_{}_exps", "feed_forward.experts.*.{}_proj"),
            **of_parts("ffn_{}_shexp", "feed_forward.shared_expert.{}_proj"),
        },
    ),
    "mistral": Family(
        "Mistral",
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
        window_period=ALL_SLIDING,
        gguf="mistral3",
        gguf_interleaved=True,
    ),
    "ministral3": Family(
        "Ministral3",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "llama_4_scaling_beta": 0.1,
            },
        },
        window_period=ALL_SLIDING,
        gguf="mistral3",
        gguf_mark="attention.temperature_scale",
        gguf_interleaved=True,
    ),
    "mixtral": Family(
        "Mixtral",
        defaults={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        window_period=ALL_SLIDING,
        names={
            "block_sparse_moe.gate": "mlp.router",
            "block_sparse_moe.experts": "mlp.experts",
            "w1": "gate_proj",
            "w3": "up_proj",
            "w2": "down_proj",
        },
        gguf="llama",
        gguf_mark="expert_count",
        gguf_names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
            "ffn_up_exps": "block_sparse_moe.experts.*.w3",
            "ffn_down_exps": "block_sparse_moe.experts.*.w2",
        },
        gguf_interleaved=True,
    ),
    "qwen2": Family(
        "Qwen2",
        defaults={"max_position_embeddings": 32768},
        attention_bias=True,
        has_window_switch=True,
        gguf="qwen2",
    ),
    "qwen3": Family(
        "Qwen3",
        defaults={"head_dim": 128, "max_position_embeddings": 32768},
        qk_norm="head",
        out_bias=None,
        has_window_switch=True,
        gguf="qwen3",
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "max_position_embeddings": 32768,
        },
        qk_norm="head",
        out_bias=None,
        window_period=ALL_SLIDING,
        has_window_switch=True,
        names={"mlp.gate": "mlp.router"},
        gguf="qwen3moe",
        gguf_names=GGUF_EXPERTS,
        gguf_constants={"norm_topk_prob": True},
    ),
    "gemma2": Family(
        "Gemma2",
        defaults={
            **GEMMA,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        norms="both",
        norm_offset=1.0,
        scales_embeddings=True,
        out_bias=None,
        window_period=2,
        names=OUT_NORMS,
        gguf="gemma2",
        gguf_defaults={"attention.sliding_window": 4096},  # missing in its first files
        gguf_wide_queries=46,
        gguf_names=GGUF_GEMMA,
        gguf_norm_offset=True,
    ),
    "gemma3_text": Family(
        "Gemma3",
        defaults={
            **GEMMA,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        norms="both",
        norm_offset=1.0,
        scales_embeddings=True,
        qk_norm="head",
        out_bias=None,
        window_period=6,
        local_rope=True,
        names=OUT_NORMS,
        gguf="gemma3",
        gguf_defaults={"rope.freq_base_swa": 10000.0},
        gguf_wide_queries=62,
        gguf_names=GGUF_GEMMA,
        gguf_norm_offset=True,
    ),
    "phi3": Family(
        "Phi3",
        defaults={
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "rms_norm_eps": 1e-5,
        },
        window_period=ALL_SLIDING,
        long_rope=True,
        fused=QKV | GATE_UP,
        gguf="phi3",
        gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "smollm3": Family(
        "SmolLM3",
        defaults={
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "no_rope_layers": None,
        },
        out_bias=None,
        has_window_switch=True,
        gguf="smollm3",
        gguf_interleaved=True,
    ),
    "granite": Family(
        "Granite",
        defaults=GRANITE,
        out_bias=None,
        gguf="granite",
        gguf_interleaved=True,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        defaults={
            **GRANITE,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": "none",
        },
        out_bias=None,
        names={"shared_mlp": "mlp", "output_linear": "down_proj"},
        fused={"mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    "glm4": Family(
        "Glm4",
        defaults={
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-07,
        },
        norms="both",
        interleaved_heads=True,
        names={
            "post_self_attn_layernorm": "attention_out_norm",
            "post_mlp_layernorm": "mlp_out_norm",
        },
        fused=GATE_UP,
        gguf="glm4",
        gguf_names={
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "olmo2": Family(
        "Olmo2",
        defaults={"rms_norm_eps": 1e-5},
        norms="after",
        qk_norm="width",
        out_bias=None,
        names=OUT_NORMS,
        gguf="olmo2",
        gguf_names=GGUF_OUT_NORMS,
    ),
    "olmo3": Family(
        "Olmo3",
        defaults={"sliding_window": 4096, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
        norms="after",
        qk_norm="width",
        out_bias=None,
        window_period=4,
        local_rope=True,
        names=OUT_NORMS,
        gguf="olmo2",
        gguf_mark="attention.sliding_window",
        gguf_names=GGUF_OUT_NORMS,
    ),
    "exaone4": Family(
        "Exaone4",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        norms="after",
        qk_norm="head",
        window_period=4,
        only_windows_turn=True,
        names=OUT_NORMS,
        gguf="exaone4",
        gguf_names=GGUF_OUT_NORMS,
    ),
    "seed_oss": Family(
        "SeedOss",
        defaults={"head_dim": 128, "attention_bias": True, "max_position_embeddings": 524288},
        gguf="seed_oss",
        gguf_names={"post_attention_norm": "post_attention_layernorm"},
    ),
    "gpt_oss": Family(
        "GptOss",
        defaults={
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "head_dim": 64,
            "sliding_window": 128,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        out_bias=None,
        activation="clamped_silu",
        experts_bias=True,
        stacked="turns",
        sinks=True,
        window_period=2,
        gguf="gpt-oss",
        gguf_names={
            **GGUF_EXPERTS,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        },
        gguf_constants={"attention_bias": True},
    ),
    "lfm2": Family(
        "Lfm2",
        defaults={
            "tie_word_embeddings": True,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 128000,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
        },
        qk_norm="head",
        activation="silu",
        names={
            "model.embedding_norm": "model.norm",
            "operator_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w3": "mlp.up_proj",
            "feed_forward.w2": "mlp.down_proj",
        },
        gguf="lfm2",
        gguf_names={
            "token_embd_norm": "model.embedding_norm",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
        },
        gguf_constants={"block_auto_adjust_ff_dim": False},
    ),
}
