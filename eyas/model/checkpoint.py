"""Draft heads on disk, in three forms. The only file that knows the tensor names and config keys of other projects.

    form     found by                          layer        tapped layers are written as
    eyas     eyas_head.json                    midlayer.*   after_layer: outputs of these layers, in words
    sglang   config.json, flat                 midlayer.*   eagle_config.eagle_aux_hidden_state_layer_ids: outputs
             (SpecForge's form too)
    vllm     config.json with                  layers.0.*   eagle_aux_hidden_state_layer_ids at top level: the residual
             speculators_model_type                         stream ENTERING layer i, so our tap + 1

Whatever the form, a head is handed over as a HeadConfig and its tensors under EAGLE's names. What our Head would not
compute as its trainer meant it is refused by name and never dropped. Does not know the target's files or the Head.

Letters: H hidden size of the head, Ht of the target, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor

from eyas.errors import MismatchError
from eyas.model.config import DecoderConfig, HeadConfig, RopeConfig, Taps, TargetConfig, read_config
from eyas.model.weights import SINGLE, read_tensors

Form = Literal["eyas", "sglang", "vllm"]
HEAD_JSON, CONFIG_JSON = "eyas_head.json", "config.json"
FORMAT = "eyas head 1"
SGLANG_ARCHITECTURE, VLLM_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Speculator"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LM_HEAD_SHA256 = "target_lm_head_sha256"  # our key in the others' configs, which they ignore
EMBED_TOKENS, LAYER, SPECULATORS_LAYER = "embed_tokens.weight", "midlayer.", "layers.0."
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Variants of the architecture that published heads use and our Head does not compute, with what each would change.
VARIANTS = {
    "norm_before_residual": "the residual is taken after hidden_norm",
    "norm_before_fc": "the three features are normed together before fc",
    "fc_norm": "each of the three features is normed before fc",
    "use_aux_norm": "each of the three features is normed before fc",
    "norm_output": "the post-norm state is fed back",
    "attention_bias": "the attention's projections have a bias",
    "mlp_bias": "the MLP has a bias",
    "bias": "fc has a bias",
    "tie_word_embeddings": "the output matrix is the embedding",
    "quantization_config": "the weights are quantised",
    "sliding_window": "attention sees a window only",
    "parallel_drafting": "all tokens are drafted in one forward",
}
NORM_OUTPUT_HINT = (
    "if SpecForge wrote it, it means the norm before lm_head, which is always there: delete the key. "
    "SGLang, vLLM and speculators mean EAGLE-3.1's fed-back norm, which is not supported"
)
# Values that change the result when they are another than this one (or absent).
FIXED = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "num_aux_hidden_states": 3,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as it lies on disk, unjudged: settings as in its JSON, tensors under EAGLE's names, embeddings apart."""

    form: Form
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    embed_tokens: Tensor | None

    @property
    def layer_settings(self) -> dict[str, Any]:
        """Where this form writes the decoder layer's shape."""
        return self.settings.get("transformer_layer_config") or {} if self.form == "vllm" else self.settings


@dataclass(frozen=True, slots=True)
class Verifier:
    """What the vLLM form says of the target beside the head: its place, and a default for the length of drafts."""

    name_or_path: str | None = None
    architectures: tuple[str, ...] = ()
    embed_tokens: Tensor | None = None  # [V, Ht], written beside the head when given
    num_draft_steps: int = 4


def read_head(folder: str | Path, target: TargetConfig | None = None) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head of any form: its config, and its tensors by EAGLE's names in their stored dtype, d2t int64 and t2d bool.

    `target` is needed only by heads that do not say which layers they tap: those tap the target's default ones.
    Embeddings in the checkpoint are left out: they are the target's, and `check` compares them.
    Raises MissingInputError, CorruptError, and MismatchError for whatever our Head would compute otherwise than meant.
    """
    checkpoint = open_checkpoint(folder)
    refuse(folder, setting_faults(checkpoint))
    config = head_config(checkpoint, target)
    tensors = with_vocabulary_maps(config, checkpoint.tensors)
    refuse(folder, tensor_faults(config, tensors))
    maps = {"d2t": tensors["d2t"].to(torch.int64), "t2d": tensors["t2d"].to(torch.bool)}
    return config, {**tensors, **maps}


def write_head(
    config: HeadConfig, tensors: Mapping[str, Tensor], form: Form, verifier: Verifier | None = None
) -> dict[str, bytes]:
    """The files of a head in one form, by name; equal heads give equal bytes. tensors: by EAGLE's names, maps included.

    Weights keep their dtype. `verifier` is for the vLLM form. Raises MismatchError for a head that does not fit its
    config, and for taps that the form cannot say.
    """
    refuse("the head", tensor_faults(config, tensors))
    verifier = verifier or Verifier()
    written = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if form == "eyas":
        settings = {"format": FORMAT, **config.model_dump(mode="json"), "taps": {"after_layer": list(config.taps)}}
        return _files(HEAD_JSON, settings, written)
    if config.draft_vocab_size == config.vocab_size:  # vLLM fails on maps that map nothing
        written = {name: tensor for name, tensor in written.items() if name not in ("d2t", "t2d")}
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    if form == "sglang":
        return _files(CONFIG_JSON, _sglang_settings(config, dtype), written)
    written = {name.replace(LAYER, SPECULATORS_LAYER): tensor for name, tensor in written.items()}
    if verifier.embed_tokens is not None:
        written[EMBED_TOKENS] = verifier.embed_tokens.detach().cpu().contiguous()
    return _files(CONFIG_JSON, _vllm_settings(config, dtype, verifier), written)


# Reading, step by step; `check` goes the same way and collects what `read_head` raises


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Find out a head's form by looking, and read it without judging. Raises MissingInputError, CorruptError, MismatchError."""
    ours = (Path(folder) / HEAD_JSON).exists()
    settings = read_config(folder, HEAD_JSON if ours else CONFIG_JSON)
    if ours and settings.get("format") != FORMAT:
        raise MismatchError(
            f"{folder}/{HEAD_JSON} has format {settings.get('format')!r}, not {FORMAT!r}", "export the head again"
        )
    kind = settings.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise MismatchError(f"{folder} is a {kind!r} speculator", "give an EAGLE-3 head")
    stored = read_tensors(folder)
    if "fc.weight" not in stored or not any(name.startswith((LAYER, SPECULATORS_LAYER)) for name in stored):
        raise MismatchError(
            f"{folder} is no EAGLE-3 head: it has no fc.weight with {LAYER}* or {SPECULATORS_LAYER}* tensors",
            "give the folder of a head, not that of its target",
        )
    form: Form = "eyas" if ours else "vllm" if kind else "sglang"
    embed_tokens = stored.pop(EMBED_TOKENS, None)
    tensors = {_eagle_name(name): tensor for name, tensor in stored.items()}
    if len(tensors) != len(stored):
        raise MismatchError(f"{folder} holds two layers, {LAYER}* and {SPECULATORS_LAYER}*", "delete the wrong one")
    return Checkpoint(form, settings, tensors, embed_tokens)


def setting_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """Everything in the settings that asks for another computation than our Head's."""
    if checkpoint.form == "eyas":
        return []
    faults = []
    eagle = checkpoint.settings.get("eagle_config") or {}
    places = (checkpoint.settings, checkpoint.layer_settings, eagle)
    for flag, meaning in VARIANTS.items():
        if any(place.get(flag) for place in places):
            hint = NORM_OUTPUT_HINT if flag == "norm_output" else "train a head without it"
            faults.append(MismatchError(f"{flag} is set ({meaning}): not supported", hint))
    for key, value in FIXED.items():
        found = next((place[key] for place in places if place.get(key, value) not in (None, value)), value)
        if found != value:
            faults.append(MismatchError(f"{key} is {found!r}: only {value!r} is supported", "train a head with it"))
    if not eagle.get("use_aux_hidden_state", True):
        faults.append(MismatchError("use_aux_hidden_state is false: the head reads one layer", "give an EAGLE-3 head"))
    if checkpoint.form == "vllm" and checkpoint.settings.get("norm_before_residual") is None:
        faults.append(
            MismatchError(
                "norm_before_residual is not given: vLLM takes that for true, speculators for false",
                "write into config.json what the head was trained with",
            )
        )
    layer = checkpoint.layer_settings.get("model_type", None if checkpoint.form == "vllm" else "llama")
    if layer != "llama":
        faults.append(
            MismatchError(f"the layer's model_type is {layer!r}: only 'llama' is supported", "train a Llama-shaped head")
        )
    return faults


def head_config(checkpoint: Checkpoint, target: TargetConfig | None = None) -> HeadConfig:
    """The settings of any form as ours. Raises MismatchError when they lack something or cannot be understood."""
    settings, layer = checkpoint.settings, checkpoint.layer_settings
    try:
        if checkpoint.form == "eyas":
            return HeadConfig.model_validate({**settings, "taps": settings["taps"]["after_layer"]})
        heads = layer["num_attention_heads"]
        return HeadConfig(
            hidden_size=layer["hidden_size"],
            intermediate_size=layer["intermediate_size"],
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=layer.get("num_key_value_heads") or heads,
            head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
            vocab_size=layer["vocab_size"],
            rms_norm_eps=layer.get("rms_norm_eps") or 1e-6,
            max_position_embeddings=layer.get("max_position_embeddings") or 2048,
            rope=RopeConfig.from_hf(layer),
            draft_vocab_size=settings.get("draft_vocab_size") or layer["vocab_size"],
            target_hidden_size=settings.get("target_hidden_size") or layer["hidden_size"],
            taps=_read_taps(settings, target),
            target_lm_head_sha256=settings.get(LM_HEAD_SHA256) or "",
        )
    except (KeyError, TypeError) as error:
        raise MismatchError(
            f"the head's config lacks {error}", "restore it from its source, or export the head again"
        ) from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise MismatchError(f"the head's config does not fit: {wrong}", "restore it from its source") from error


def with_vocabulary_maps(config: HeadConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the maps that a checkpoint may leave out: both when W == V (identity), t2d when there is d2t."""
    V, W = config.vocab_size, config.draft_vocab_size
    complete = dict(tensors)
    if "d2t" not in complete and "t2d" not in complete and W == V:
        complete["d2t"] = torch.zeros(W, dtype=torch.int64)
    if "t2d" not in complete and "d2t" in complete and not map_faults(complete["d2t"], None, V, W):
        complete["t2d"] = torch.zeros(V, dtype=torch.bool)
        complete["t2d"][torch.arange(W) + complete["d2t"]] = True
    return complete


def tensor_faults(config: HeadConfig, tensors: Mapping[str, Tensor]) -> list[MismatchError]:
    """Every tensor that is missing, unknown, of another shape or kind, and maps that are no map."""
    faults = []
    if config.hidden_size != config.target_hidden_size:
        faults.append(
            MismatchError(
                f"hidden size {config.hidden_size} on a target of {config.target_hidden_size} would need embeddings of its own",
                "train a head of the target's hidden size",
            )
        )
    expected = expected_shapes(config)
    source = "restore the checkpoint from its source, or export the head again"
    faults += [MismatchError(f"the tensor {name} is missing", source) for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            faults.append(
                MismatchError(
                    f"the tensor {name} is none of an EAGLE-3 head's", "it belongs to a variant that is not supported"
                )
            )
        elif tuple(tensor.shape) != expected[name]:
            faults.append(
                MismatchError(f"{name} has shape {tuple(tensor.shape)}, the config asks for {expected[name]}", source)
            )
        elif name not in ("d2t", "t2d") and tensor.dtype not in FLOATS:
            faults.append(
                MismatchError(f"{name} is {tensor.dtype}: a plain float is needed", "give a head that is not quantised")
            )
    if "d2t" in tensors:
        faults += map_faults(tensors["d2t"], tensors.get("t2d"), config.vocab_size, config.draft_vocab_size)
    return faults


def map_faults(d2t: Tensor, t2d: Tensor | None, V: int, W: int) -> list[MismatchError]:
    """What is wrong with the offsets d2t [W], and with the mask t2d [V] if given. A map need not be monotone."""
    if d2t.shape != (W,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        return [
            MismatchError(
                f"d2t is {d2t.dtype} {tuple(d2t.shape)}: whole offsets [{W}] are needed", "make it from the counts again"
            )
        ]
    if W == V and d2t.any():
        return [MismatchError("d2t is not the identity although W == V: engines ignore it then", "reorder lm_head instead")]
    ids_W = torch.arange(W) + d2t.cpu()
    if ((ids_W < 0) | (ids_W >= V)).any():
        hint = "d2t holds offsets, not ids: target id = draft id + d2t[draft id]"
        return [MismatchError(f"d2t leads to ids {ids_W.min()} to {ids_W.max()}, out of the target's 0 to {V - 1}", hint)]
    num_ids = len(set(ids_W.tolist()))
    if num_ids != W:
        return [MismatchError(f"d2t leads {W - num_ids} draft tokens to a token taken already", "make it again")]
    mask_V = torch.zeros(V, dtype=torch.bool)
    mask_V[ids_W] = True
    if t2d is not None and (t2d.shape != (V,) or not torch.equal(t2d.cpu().to(torch.bool), mask_V)):
        return [MismatchError("t2d is not the mask of the ids that d2t leads to", "delete t2d: it is made from d2t")]
    return []


def expected_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a head, by EAGLE's name."""
    H, V, W = config.hidden_size, config.vocab_size, config.draft_vocab_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    intermediate = config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * config.target_hidden_size)}
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"{LAYER}{norm}.weight"] = (H,)
    for name, shape in {"q": (q, 2 * H), "k": (kv, 2 * H), "v": (kv, 2 * H), "o": (H, q)}.items():
        shapes[f"{LAYER}self_attn.{name}_proj.weight"] = shape
    for name, shape in {"gate": (intermediate, H), "up": (intermediate, H), "down": (H, intermediate)}.items():
        shapes[f"{LAYER}mlp.{name}_proj.weight"] = shape
    return shapes | {"norm.weight": (H,), "lm_head.weight": (W, H), "d2t": (W,), "t2d": (V,)}


def refuse(what: object, faults: Sequence[MismatchError]) -> None:
    """Raise one MismatchError that names all faults, if there are any."""
    if faults:
        raise MismatchError(f"{what}: " + "; ".join(fault.what for fault in faults), faults[0].hint)


# Layers


def _read_taps(settings: Mapping[str, Any], target: TargetConfig | None) -> Taps:
    entering = settings.get(LAYER_IDS)
    outputs = (settings.get("eagle_config") or {}).get(LAYER_IDS)
    readings = {tuple(index - 1 for index in entering)} if entering else set()
    if outputs:
        if outputs[0] != 1:
            raise MismatchError(
                f"eagle_config lists the layers {outputs}: where such a list does not begin with 1, some read it as "
                "the outputs of these layers and some as their inputs",
                "if the head was trained on outputs 1, n//2 - 1 and n - 4 (n layers), write just these",
            )
        readings.add(tuple(outputs))
    if not readings:
        if target is None:
            raise MismatchError(
                "the head does not say which layers it taps", "name its target: the default layers depend on it"
            )
        return target.default_taps
    if len(readings) > 1:
        raise MismatchError(
            f"the two lists of layers disagree: outputs of {' and '.join(map(str, readings))}", "delete the wrong one"
        )
    taps = readings.pop()
    if len(taps) != 3 or taps[0] < 0 or not taps[0] < taps[1] < taps[2]:
        raise MismatchError(f"the head taps the outputs of layers {taps}", "three layers, ascending, are supported")
    return (taps[0], taps[1], taps[2])


def _sglang_layer_ids(taps: Taps) -> list[int]:
    """Outputs of layers, as SpecForge lists them: read alike by every SGLang as long as the first is 1.

    The default taps of every target begin with 1.
    """
    if taps[0] != 1:
        raise MismatchError(
            f"taps {taps} cannot be written for SGLang: it has two readings of a list that does not begin with 1",
            "train on the default taps, or export for vLLM only",
        )
    return list(taps)


# Writing


def _layer_keys(config: HeadConfig) -> dict[str, Any]:
    """The decoder layer's shape under Hugging Face's keys."""
    shape = config.model_dump(include=set(DecoderConfig.model_fields) - {"rope"})
    fixed = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return {**fixed, **shape, **config.rope.to_hf()}


def _sglang_settings(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """No norm_output: left out, it means the same to SGLang (not fed back) and to SpecForge (a norm before lm_head)."""
    return {
        "architectures": [SGLANG_ARCHITECTURE],
        **_layer_keys(config),
        "torch_dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {LAYER_IDS: _sglang_layer_ids(config.taps), "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        LM_HEAD_SHA256: config.target_lm_head_sha256,
    }


def _vllm_settings(config: HeadConfig, dtype: str, verifier: Verifier) -> dict[str, Any]:
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
        "target_hidden_size": None,  # null means the head's own
        LAYER_IDS: [tap + 1 for tap in config.taps],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": {**_layer_keys(config), "torch_dtype": dtype},
        LM_HEAD_SHA256: config.target_lm_head_sha256,
    }


def _files(name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    weights = safetensors.torch.save(dict(sorted(tensors.items())), metadata={"format": "pt"})
    return {name: (json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode(), SINGLE: weights}


def _eagle_name(name: str) -> str:
    return LAYER + name.removeprefix(SPECULATORS_LAYER) if name.startswith(SPECULATORS_LAYER) else name
