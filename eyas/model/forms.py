"""Draft heads on disk, written in four forms: our own, SGLang's, vLLM's (see `checkpoint`), and
OpenVINO's, which is SGLang's with the target's embeddings beside the head. Equal heads give equal
bytes.

Letters: H hidden size, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.model.arrays import Array
from eyas.model.checkpoint import tensor_faults
from eyas.model.config import DecoderConfig, HeadConfig, refuse
from eyas.model.dialects import (
    COMPUTED,
    CONFIG_JSON,
    EMBED_TOKENS,
    EMBED_TOKENS_SHA256,
    FED_BACK,
    FLAGS,
    FORMAT,
    HEAD_JSON,
    LAYER,
    LAYER_IDS,
    LAYER_TYPES,
    LM_HEAD,
    LM_HEAD_SHA256,
    MAPS,
    OWN_ROPE,
    SGLANG_ARCHITECTURE,
    SLIDING,
    SPECULATORS_LAYER,
    VLLM_ARCHITECTURE,
    Form,
)
from eyas.model.weights import array_sha256, weight_files


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target as the vLLM form names it, and the default length of drafts."""

    name_or_path: str | None = None
    architectures: tuple[str, ...] = ()
    embed_tokens: Array | None = None  # [V, H], written beside the head when given
    num_draft_steps: int = 4


def write_head(
    config: HeadConfig,
    tensors: Mapping[str, Array],
    form: Form,
    verifier: Verifier | None = None,
    max_shard_bytes: int | None = None,
) -> dict[str, bytes]:
    """The files of a head in one form, by name. tensors: by EAGLE's names, maps included.

    Weights keep their dtype. verifier: for the engines' forms. max_shard_bytes: as in
    `weight_files`. Raises MismatchError for a head that does not fit its config.
    """
    refuse("the head", tensor_faults(config, tensors))
    verifier, written = verifier or Verifier(), dict(tensors)
    if form == "eyas":
        fields = HeadConfig.model_fields.items()
        usual = {name: field.default for name, field in fields if isinstance(field.default, bool)}
        stated = {
            key: value
            for key, value in config.model_dump(mode="json").items()
            if value is not usual.get(key)
        }
        settings = {"format": FORMAT, **stated, "taps": {"after_layer": list(config.taps)}}
        return _settings_file(HEAD_JSON, settings) | weight_files(written, max_shard_bytes)
    if config.draft_vocab_size == config.vocab_size:  # vLLM fails on maps that map nothing
        written = {name: tensor for name, tensor in written.items() if name not in MAPS}
    if form == "vllm":
        written = {name.replace(LAYER, SPECULATORS_LAYER): one for name, one in written.items()}
    settings = _engine_settings(config, form, str(tensors["fc.weight"].dtype), verifier)
    if LM_HEAD not in written:
        # SGLang takes the target's lm_head then, and random numbers otherwise
        settings["draft_vocab_size"] = None
    if EMBED_TOKENS not in written and verifier.embed_tokens is not None:
        written[EMBED_TOKENS] = verifier.embed_tokens
        settings[EMBED_TOKENS_SHA256] = array_sha256(verifier.embed_tokens)
    return _settings_file(CONFIG_JSON, settings) | weight_files(written, max_shard_bytes)


def _layer_keys(config: HeadConfig) -> dict[str, Any]:
    shape = config.model_dump(include=set(DecoderConfig.model_fields) - {"rope"})
    fixed = {key: COMPUTED[key][0] for key in ("hidden_act", "attention_bias", "mlp_bias")}
    fixed = {"model_type": "llama", **fixed, "tie_word_embeddings": False}
    window = {}
    if config.sliding_window is not None:
        # vLLM reads it from this list; SGLang only from `--speculative-draft-window-size`
        window = {
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
            LAYER_TYPES: [SLIDING],
        }
    return {**fixed, **shape, **config.rope.to_hf(), **window}


def _engine_settings(
    config: HeadConfig, form: Form, dtype: str, verifier: Verifier
) -> dict[str, Any]:
    """config.json, flat or in speculators' form.

    The flat one lists layers as outputs, as SpecForge does: every SGLang reads this alike if the
    first is 1. norm_output is left out unless it is on: its absence means the same to SGLang and
    SpecForge.
    """
    flags = config.model_dump(include=FLAGS.keys() - {"norm_output"})
    own_rope = {OWN_ROPE: True} if config.own_rope else {}
    lm_head = {LM_HEAD_SHA256: config.target_lm_head_sha256}
    if form != "vllm":
        eagle = {LAYER_IDS: list(config.taps), "use_aux_hidden_state": True}
        if config.norm_before_fc:
            eagle["norm_before_fc"] = True  # SGLang and NVIDIA's heads keep it here
        return {
            "architectures": [SGLANG_ARCHITECTURE],
            **_layer_keys(config),
            "torch_dtype": dtype,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "eagle_config": eagle,
            **flags,
            **({"norm_output": True, FED_BACK: True} if config.norm_output else {}),
            **own_rope,
            **lm_head,
        }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": verifier.num_draft_steps,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [VLLM_ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,  # the head's own
        LAYER_IDS: [tap + 1 for tap in config.taps],
        **flags,
        "norm_output": config.norm_output,
        **own_rope,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
        "transformer_layer_config": {**_layer_keys(config), "torch_dtype": dtype},
        **lm_head,
    }


def _settings_file(name: str, settings: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: (json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode()}
