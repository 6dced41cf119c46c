"""Draft heads on disk, in three forms. The only file that knows the tensor names and config keys of
other projects.

    form     found by                          layer        tapped layers are written as
    eyas     eyas_head.json                    midlayer.*   after_layer: outputs of these layers, in words
    sglang   config.json, flat                 midlayer.*   eagle_config.eagle_aux_hidden_state_layer_ids: outputs
             (see ARCHITECTURES for the rest)
    vllm     config.json with                  layers.0.*   eagle_aux_hidden_state_layer_ids at top level: the residual
             speculators_model_type                         stream ENTERING layer i, so our tap + 1

Either name of the layer is read in every form, with or without `model.` before it. Whatever the
form, a head is handed over as a HeadConfig and its tensors under EAGLE's names. What our Head would
not compute as its trainer meant it is refused by name and never dropped. Does not know the target's
files or the Head.

Letters: H hidden size of the head, Ht of the target, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from eyas.errors import CorruptError, MismatchError
from eyas.model.config import DecoderConfig, HeadConfig, RopeConfig, Taps, TargetShape, read_config
from eyas.model.weights import read_tensors, tensor_sha256, weight_files

log = logging.getLogger(__name__)

Form = Literal["eyas", "sglang", "vllm"]
HEAD_JSON, CONFIG_JSON = "eyas_head.json", "config.json"
FORMAT = "eyas head 1"
SGLANG_ARCHITECTURE, VLLM_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Speculator"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBED_TOKENS, LM_HEAD, LAYER, SPECULATORS_LAYER = (
    "embed_tokens.weight",
    "lm_head.weight",
    "midlayer.",
    "layers.0.",
)
MODEL, INPUT_NORM, FC_NORMS = (
    "model.",
    "input_norm.weight",
    tuple(f"fc_norm.{stream}.weight" for stream in range(3)),
)
FLAG_OF = {INPUT_NORM: "norm_before_fc", **dict.fromkeys(FC_NORMS, "fc_norm")}
# what old transformers saved beside the weights: the config says it
INV_FREQ = "rotary_emb.inv_freq"
OLD_FC_NORM = "use_aux_norm"  # fc_norm as SGLang called it first, with these tensors
OLD_NORMS = {
    f"aux_norm_{place}.weight": norm
    for place, norm in zip(("low", "mid", "high"), FC_NORMS, strict=True)
}
MAPS = ("d2t", "t2d")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Our keys in the others' configs, which they ignore.
LM_HEAD_SHA256 = "target_lm_head_sha256"
# the embeddings in the file are the target's, and these
EMBED_TOKENS_SHA256 = "target_embed_tokens_sha256"
FED_BACK = "norm_output_is_fed_back"  # what norm_output cannot say by itself: see FED_BACK_HINT
OWN_ROPE = "own_rope"

# Who writes flat configs by which name. Others are refused: their layer is not Llama's
# (Eagle3DeepseekV2ForCausalLM).
ARCHITECTURES = {
    "LlamaForCausalLM": "the EAGLE repository",
    SGLANG_ARCHITECTURE: "SpecForge, SGLang, ModelOpt, TorchSpec",
    "Eagle3LlamaForCausalLM": "vLLM, AngelSlim",
    "LlamaEagle3DraftModel": "NeMo",
}
# its config is the target's with changes, so model_type is the target's too
NEMO = "LlamaEagle3DraftModel"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

# Variants of the architecture that our Head does not compute, with what each would change.
VARIANTS = {
    "attention_bias": "the attention's projections have a bias",
    "mlp_bias": "the MLP has a bias",
    "bias": "fc has a bias",
    "quantization_config": "the weights are quantised",
    "parallel_drafting": "all tokens are drafted in one forward",
}
FED_BACK_HINT = (
    "SpecForge meant the norm before lm_head by it until September 2026, and EAGLE-3.1's fed-back "
    "norm since, as others do: "
    f'write "{FED_BACK}": false for the first, true for the second'
)
# Parts of a config that are JSON objects, or lists, in whichever section they stand.
SECTIONS: dict[str, type] = {
    **dict.fromkeys(
        ("eagle_config", "transformer_layer_config", "rope_scaling", "rope_parameters"), dict
    ),
    "architectures": list,
}
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
    """A head as it lies on disk, unjudged: settings as in its JSON, tensors under EAGLE's names,
    embeddings apart.
    """

    form: Form
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    embed_tokens: Tensor | None
    layer_name: str  # what the layer is called in the file: LAYER or SPECULATORS_LAYER

    @property
    def layer_settings(self) -> dict[str, Any]:
        """Where this form writes the decoder layer's shape."""
        return (
            self.settings.get("transformer_layer_config") or {}
            if self.form == "vllm"
            else self.settings
        )

    @property
    def eagle_settings(self) -> dict[str, Any]:
        """What flat configs keep apart."""
        return self.settings.get("eagle_config") or {}

    @property
    def architecture(self) -> str:
        """The class that a flat config names."""
        return str(next(iter(self.settings.get("architectures") or []), SGLANG_ARCHITECTURE))

    def stated(self, key: str) -> set[Any]:
        """The values that the config gives a key, in any of its places; null is no value."""
        rope = self.layer_settings.get("rope_parameters") or {}
        places = (self.settings, self.layer_settings, self.eagle_settings, rope)
        values = [place[key] for place in places if place.get(key) is not None]
        return {str(value) if isinstance(value, dict | list) else value for value in values}


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """What a config leaves open, as the fault that it is, and what can be meant by it: for each
    meaning, who reads it so and the keys that would say it."""

    fault: MismatchError
    meanings: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Verifier:
    """What the vLLM form says of the target beside the head: its place, and a default for the
    length of drafts.
    """

    name_or_path: str | None = None
    architectures: tuple[str, ...] = ()
    embed_tokens: Tensor | None = None  # [V, Ht], written beside the head when given
    num_draft_steps: int = 4


def read_head(
    folder: str | Path, target: TargetShape | None = None
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head of any form: its config, and its tensors by EAGLE's names in their stored dtype, d2t
    int64 and t2d bool.

    `target` is needed only by heads that do not say which layers they tap: those tap the target's
    default ones. The maps are always there. `embed_tokens.weight` [V, H] is there if the checkpoint
    holds embeddings and does not say that they are the target's; `lm_head.weight` is not if the
    checkpoint, of a full vocabulary, has none: it is the target's. Raises MissingInputError,
    CorruptError, and MismatchError for whatever our Head would compute otherwise than meant.
    """
    checkpoint = open_checkpoint(folder)
    read = judged_head(folder, checkpoint, target)
    for decision in decisions(checkpoint):
        log.warning("%s: %s", folder, decision)
    return read


def judged_head(
    folder: str | Path, checkpoint: Checkpoint, target: TargetShape | None = None
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """What `read_head` makes of a checkpoint that is open."""
    refuse(folder, setting_faults(checkpoint))
    config = head_config(checkpoint, target)
    tensors = own_tensors(checkpoint, config)
    refuse(folder, [*tensor_faults(config, tensors), *embedding_faults(checkpoint)])
    maps = {"d2t": tensors["d2t"].to(torch.int64), "t2d": tensors["t2d"].to(torch.bool)}
    return config, {**tensors, **maps}


def write_head(
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    form: Form,
    verifier: Verifier | None = None,
    max_shard_bytes: int | None = None,
) -> dict[str, bytes]:
    """The files of a head in one form, by name; equal heads give equal bytes. tensors: by EAGLE's
    names, maps included.

    Weights keep their dtype. `verifier` is for the engines' forms; max_shard_bytes as in
    `weight_files`. Raises MismatchError for a head that does not fit its config, and for what the
    form cannot say.
    """
    refuse("the head", tensor_faults(config, tensors))
    refuse("the head", form_faults(config, tensors, form))
    verifier = verifier or Verifier()
    written = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if form == "eyas":
        usual = {
            name: field.default
            for name, field in HeadConfig.model_fields.items()
            if isinstance(field.default, bool)
        }
        stated = {
            key: value
            for key, value in config.model_dump(mode="json").items()
            if value is not usual.get(key)
        }
        stated["taps"] = {"after_layer": list(config.taps)}
        return _settings_file(HEAD_JSON, {"format": FORMAT, **stated}) | weight_files(
            written, max_shard_bytes
        )
    if config.draft_vocab_size == config.vocab_size:  # vLLM fails on maps that map nothing
        written = {name: tensor for name, tensor in written.items() if name not in MAPS}
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    settings = (
        _sglang_settings(config, dtype)
        if form == "sglang"
        else _vllm_settings(config, dtype, verifier)
    )
    if LM_HEAD not in written:
        # SGLang takes the target's lm_head then, and random numbers otherwise
        settings["draft_vocab_size"] = None
    if EMBED_TOKENS not in written and verifier.embed_tokens is not None:
        written[EMBED_TOKENS] = verifier.embed_tokens.detach().cpu().contiguous()
        settings[EMBED_TOKENS_SHA256] = tensor_sha256(verifier.embed_tokens)
    if form == "vllm":
        written = {
            name.replace(LAYER, SPECULATORS_LAYER): tensor for name, tensor in written.items()
        }
    return _settings_file(CONFIG_JSON, settings) | weight_files(written, max_shard_bytes)


def form_faults(
    config: HeadConfig, tensors: Mapping[str, Tensor], form: Form
) -> list[MismatchError]:
    """What of a sound head a form, or the engine that it is for, has no word for."""
    faults = []
    if form == "sglang" and config.norm_before_residual:
        what = (
            "norm_before_residual is set: SGLang does not read it, and would take the residual "
            "before the norm"
        )
        faults.append(MismatchError(what, "export for vLLM only, or train a head without it"))
    if form == "sglang" and config.taps[0] != 1:  # the default taps of every target begin with 1
        what = (
            f"taps {config.taps} cannot be written for SGLang: it has two readings of a list "
            "that does not begin with 1"
        )
        faults.append(MismatchError(what, "train on the default taps, or export for vLLM only"))
    if form == "sglang" and EMBED_TOKENS in tensors and not config.owns_embeddings:
        what = "the head has embeddings of its own: SGLang uses the target's in their place"
        faults.append(MismatchError(what, "export for vLLM only"))
    if form == "vllm" and LM_HEAD not in tensors:
        what = "the head uses its target's lm_head: speculators' form needs one in the file"
        faults.append(MismatchError(what, "export for SGLang only"))
    return faults


# Reading, step by step; `check` goes the same way and collects what `read_head` raises


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Find out a head's form by looking, and read it without judging. Raises MissingInputError,
    CorruptError, MismatchError.
    """
    ours = (Path(folder) / HEAD_JSON).exists()
    settings = read_config(folder, HEAD_JSON if ours else CONFIG_JSON)
    check_sections(folder, settings)
    if ours and settings.get("format") != FORMAT:
        raise MismatchError(
            f"{folder}/{HEAD_JSON} has format {settings.get('format')!r}, not {FORMAT!r}",
            "export the head again",
        )
    kind = settings.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise MismatchError(f"{folder} is a {kind!r} speculator", "give an EAGLE-3 head")
    found = {
        name: tensor
        for name, tensor in read_tensors(folder, pickled=True).items()
        if not name.endswith(INV_FREQ)
    }
    stored = {name.removeprefix(MODEL): tensor for name, tensor in found.items()}
    if len(stored) != len(found):
        raise MismatchError(
            f"{folder} holds tensors both with and without {MODEL!r}", "delete the wrong ones"
        )
    if "fc.weight" not in stored or not any(
        name.startswith((LAYER, SPECULATORS_LAYER)) for name in stored
    ):
        raise MismatchError(
            f"{folder} is no EAGLE-3 head: it has no fc.weight with {LAYER}* or "
            f"{SPECULATORS_LAYER}* tensors",
            "give the folder of a head, not that of its target",
        )
    form: Form = "eyas" if ours else "vllm" if kind else "sglang"
    embed_tokens = stored.pop(EMBED_TOKENS, None)
    tensors = {_eagle_name(name): tensor for name, tensor in stored.items()}
    if len(tensors) != len(stored):
        raise MismatchError(
            f"{folder} holds two layers, {LAYER}* and {SPECULATORS_LAYER}*", "delete the wrong one"
        )
    is_midlayer = any(name.startswith(LAYER) for name in stored)
    return Checkpoint(
        form, settings, tensors, embed_tokens, LAYER if is_midlayer else SPECULATORS_LAYER
    )


def check_sections(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Raise CorruptError for a part of a config that is not of its JSON type: nothing below it
    could be read.
    """
    for key, kind in SECTIONS.items():
        found = settings.get(key)
        if found is not None and not isinstance(found, kind):
            what = (
                f"{folder}: {key} in the config is {found!r:.64}, not a JSON "
                f"{'list' if kind is list else 'object'}"
            )
            raise CorruptError(what, "restore it from its source, or export the head again")
        if isinstance(found, dict):
            check_sections(folder, found)


def setting_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """Everything in the settings that asks for another computation than our Head's, or that can be
    read in two ways.
    """
    if checkpoint.form == "eyas":
        unknown = sorted(checkpoint.settings.keys() - HeadConfig.model_fields.keys() - {"format"})
        return [
            MismatchError(
                f"{HEAD_JSON} has the unknown key {key!r}", "a newer eyas wrote it: use that"
            )
            for key in unknown
        ]
    faults = [
        *flag_faults(checkpoint),
        *(open_to_two.fault for open_to_two in ambiguities(checkpoint)),
    ]
    for variant, meaning in VARIANTS.items():
        if any(checkpoint.stated(variant)):
            faults.append(
                MismatchError(
                    f"{variant} is set ({meaning}): not supported", "train a head without it"
                )
            )
    for key, value in FIXED.items():
        faults += [
            MismatchError(
                f"{key} is {found!r}: only {value!r} is supported", "train a head with it"
            )
            for found in checkpoint.stated(key) - {value}
        ]
    if not checkpoint.eagle_settings.get("use_aux_hidden_state", True):
        faults.append(
            MismatchError(
                "use_aux_hidden_state is false: the head reads one layer", "give an EAGLE-3 head"
            )
        )
    return faults + layer_faults(checkpoint)


def layer_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """What the settings say of the layer as a whole: whose it is, what it attends to, what it
    shares.
    """
    faults = []
    settings, architecture = checkpoint.layer_settings, checkpoint.architecture
    if checkpoint.form == "sglang" and architecture not in ARCHITECTURES:
        what = f"the head is a {architecture}: its layer is not known to be Llama's"
        faults.append(
            MismatchError(what, f"known are {', '.join(ARCHITECTURES)} and speculators' form")
        )
    model_type = settings.get("model_type", None if checkpoint.form == "vllm" else "llama")
    if model_type != "llama" and not (checkpoint.form == "sglang" and architecture == NEMO):
        what = f"the layer's model_type is {model_type!r}: only 'llama' is supported"
        faults.append(MismatchError(what, "train a Llama-shaped head"))
    window, length = settings.get("sliding_window"), settings.get("max_position_embeddings") or 2048
    sees_all = isinstance(window, int) and isinstance(length, int) and window >= length
    if window and not sees_all and settings.get("use_sliding_window", True):
        what = (
            f"sliding_window is {window} of a context of {length} (attention sees a window "
            "only): not supported"
        )
        faults.append(MismatchError(what, "train a head without it"))
    # Of W tokens, an output matrix of its own cannot be the embedding of V, whatever a config
    # copied from the target says.
    is_own = (
        checkpoint.form == "sglang"
        and LM_HEAD in checkpoint.tensors
        and "d2t" in checkpoint.tensors
    )
    if any(checkpoint.stated("tie_word_embeddings")) and not is_own:
        what = "tie_word_embeddings is set (the output matrix is the embedding): not supported"
        faults.append(MismatchError(what, "train a head without it"))
    return faults


def flag_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """Norm flags that contradict each other, or that cannot be known from what is there."""
    faults = []
    for flag in FLAGS:
        values = checkpoint.stated(flag)
        if len(values) > 1 or not values <= {True, False}:
            what = f"{flag} is given as {' and '.join(map(repr, sorted(values, key=repr)))}"
            faults.append(MismatchError(what, "write true or false, in one place"))
    flags = {flag: True in checkpoint.stated(flag) for flag in FLAGS}
    if flags["norm_before_fc"] and (flags["fc_norm"] or True in checkpoint.stated(OLD_FC_NORM)):
        what = "norm_before_fc and fc_norm are both set: no project says in which order"
        faults.append(MismatchError(what, "leave the one that the head was trained with"))
    return faults


def ambiguities(checkpoint: Checkpoint) -> list[Ambiguity]:
    """Everything in a config that can be meant in several ways; `head_config` takes one of them all
    the same.
    """
    if checkpoint.form == "eyas":
        return []
    return [
        *residual_ambiguity(checkpoint),
        *norm_output_ambiguity(checkpoint),
        *layers_ambiguity(checkpoint),
    ]


def residual_ambiguity(checkpoint: Checkpoint) -> Iterator[Ambiguity]:
    """A config that is silent on norm_before_residual where readers differ."""
    if checkpoint.stated("norm_before_residual"):
        return
    key, hint = "norm_before_residual", "write into config.json what the head was trained with"
    if checkpoint.form == "vllm":
        what = f"{key} is not given: vLLM takes that for true, speculators for false"
        meanings = {
            f"{key} on, as vLLM reads it": {key: True},
            f"{key} off, as speculators reads it": {key: False},
        }
        yield Ambiguity(MismatchError(what, hint), meanings)
    elif (
        checkpoint.architecture == SGLANG_ARCHITECTURE
        and checkpoint.layer_name == SPECULATORS_LAYER
    ):
        what = (
            f"{key} is not given: {SPECULATORS_LAYER}* in a {SGLANG_ARCHITECTURE} is ModelOpt's or "
            "a "
            "converted speculators head, trained with it; engines take its absence for false"
        )
        meanings = {
            f"{key} on, as ModelOpt trains": {key: True},
            f"{key} off, as engines read it": {key: False},
        }
        yield Ambiguity(MismatchError(what, hint), meanings)


def norm_output_ambiguity(checkpoint: Checkpoint) -> Iterator[Ambiguity]:
    """norm_output in a config that may be SpecForge's."""
    if True not in checkpoint.stated("norm_output") or fed_back(checkpoint) is not None:
        return
    what = f"norm_output is set by an unknown writer of {SGLANG_ARCHITECTURE}: it has two meanings"
    meanings = {
        "norm_output before lm_head, as older SpecForge trains": {FED_BACK: False},
        "norm_output fed back, as SGLang and vLLM read it": {FED_BACK: True},
    }
    yield Ambiguity(MismatchError(what, FED_BACK_HINT), meanings)


def layers_ambiguity(checkpoint: Checkpoint) -> Iterator[Ambiguity]:
    """A list of layers in eagle_config alone, which readers agree on only where it begins with 1."""
    outputs = checkpoint.eagle_settings.get(LAYER_IDS)
    is_list = isinstance(outputs, list) and all(isinstance(index, int) for index in outputs)
    if not outputs or not is_list or outputs[0] == 1 or checkpoint.settings.get(LAYER_IDS):
        return
    inputs = [index + 1 for index in outputs]
    what = (
        f"eagle_config lists the layers {outputs}: where such a list does not begin with 1, some "
        "read it as "
        "the outputs of these layers and some as their inputs"
    )
    hint = (
        f"write {LAYER_IDS} at the top level too: there it means inputs, so {outputs} or {inputs}"
    )
    meanings = {
        f"layers {outputs} as inputs, as vLLM reads them": {LAYER_IDS: outputs},
        f"layers {outputs} as outputs, as SGLang's Llama, Qwen and Mistral read them": {
            LAYER_IDS: inputs
        },
    }
    yield Ambiguity(MismatchError(what, hint), meanings)


def fed_back(checkpoint: Checkpoint) -> bool | None:
    """Whether norm_output means the fed-back norm, when it is set; None when nothing tells.

    SpecForge wrote it, and true by default, for the norm before lm_head. It writes one architecture
    and one name of the layer, so under others the key is EAGLE-3.1's.
    """
    stated = checkpoint.settings.get(FED_BACK)
    if stated is not None:
        return bool(stated)
    may_be_specforge = (
        checkpoint.architecture == SGLANG_ARCHITECTURE and checkpoint.layer_name == LAYER
    )
    return None if checkpoint.form == "sglang" and may_be_specforge else True


def decisions(checkpoint: Checkpoint) -> list[str]:
    """What was decided where a config by itself leaves it open, and why."""
    decided = []
    is_open = checkpoint.form == "sglang" and FED_BACK not in checkpoint.settings
    if is_open and True in checkpoint.stated("norm_output") and fed_back(checkpoint):
        is_named = checkpoint.architecture != SGLANG_ARCHITECTURE
        why = (
            f"it is a {checkpoint.architecture}"
            if is_named
            else f"SpecForge never writes {SPECULATORS_LAYER}*"
        )
        decided.append(f"norm_output is read as EAGLE-3.1's fed-back norm: {why}")
    return decided


def head_config(checkpoint: Checkpoint, target: TargetShape | None = None) -> HeadConfig:
    """The settings of any form as ours. Raises MismatchError when they lack something or cannot be
    understood.
    """
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
            norm_before_residual=True in checkpoint.stated("norm_before_residual"),
            norm_before_fc=True in checkpoint.stated("norm_before_fc"),
            fc_norm=True in checkpoint.stated("fc_norm") | checkpoint.stated(OLD_FC_NORM),
            norm_output=True in checkpoint.stated("norm_output") and fed_back(checkpoint) is True,
            own_rope=settings.get(OWN_ROPE) or False,
        )
    except (KeyError, TypeError, ArithmeticError) as error:
        raise MismatchError(
            f"the head's config lacks {error}",
            "restore it from its source, or export the head again",
        ) from error
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise MismatchError(
            f"the head's config does not fit: {wrong}", "restore it from its source"
        ) from error


def own_tensors(checkpoint: Checkpoint, config: HeadConfig) -> dict[str, Tensor]:
    """What is the head's: its tensors with the maps, and with embeddings unless the file says that
    they are the target's.
    """
    tensors = with_vocabulary_maps(config, checkpoint.tensors)
    if checkpoint.embed_tokens is not None and not checkpoint.settings.get(EMBED_TOKENS_SHA256):
        tensors[EMBED_TOKENS] = checkpoint.embed_tokens
    return tensors


def with_vocabulary_maps(config: HeadConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the maps that a checkpoint may leave out: both when W == V (identity), t2d
    when there is d2t.
    """
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
    if config.owns_embeddings and EMBED_TOKENS not in tensors:
        faults.append(
            MismatchError(
                f"hidden size {config.hidden_size} on a target of {config.target_hidden_size} "
                "needs embeddings of its own: "
                f"{EMBED_TOKENS} is missing",
                "restore the checkpoint from its source, or train a head of the target's hidden "
                "size",
            )
        )
    expected, optional = expected_shapes(config), optional_shapes(config)
    source = "restore the checkpoint from its source, or export the head again"
    missing = expected.keys() - tensors.keys() - optional.keys()
    faults += [
        MismatchError(f"the tensor {name} is missing", source)
        for name in expected
        if name in missing
    ]
    known = expected | optional
    for name, tensor in tensors.items():
        if name in FLAG_OF and name not in known:
            what = f"the tensor {name} is there although {FLAG_OF[name]} is not set"
            hint = (
                f'write "{FLAG_OF[name]}": true if the head was trained with it, or delete the '
                "tensor"
            )
            faults.append(MismatchError(what, hint))
        elif name not in known:
            what = f"the tensor {name} is none of an EAGLE-3 head's"
            faults.append(MismatchError(what, "it belongs to a variant that is not supported"))
        elif tuple(tensor.shape) != known[name]:
            faults.append(
                MismatchError(
                    f"{name} has shape {tuple(tensor.shape)}, the config asks for {known[name]}",
                    source,
                )
            )
        elif name not in MAPS and tensor.dtype not in FLOATS:
            faults.append(
                MismatchError(
                    f"{name} is {tensor.dtype}: a plain float is needed",
                    "give a head that is not quantised",
                )
            )
    if "d2t" in tensors:
        faults += map_faults(
            tensors["d2t"], tensors.get("t2d"), config.vocab_size, config.draft_vocab_size
        )
    return faults


def embedding_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """Embeddings that are not those that the config says they are."""
    said = checkpoint.settings.get(EMBED_TOKENS_SHA256)
    if checkpoint.embed_tokens is None or said in (None, tensor_sha256(checkpoint.embed_tokens)):
        return []
    what = f"{EMBED_TOKENS} are not the embeddings that the config names by {EMBED_TOKENS_SHA256}"
    hint = (
        f"restore the file, or delete {EMBED_TOKENS_SHA256} if the head was trained with "
        "embeddings of its own"
    )
    return [MismatchError(what, hint)]


def map_faults(d2t: Tensor, t2d: Tensor | None, V: int, W: int) -> list[MismatchError]:
    """What is wrong with the offsets d2t [W], and with the mask t2d [V] if given. A map need not be
    monotone.
    """
    if d2t.shape != (W,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        return [
            MismatchError(
                f"d2t is {d2t.dtype} {tuple(d2t.shape)}: whole offsets [{W}] are needed",
                "make it from the counts again",
            )
        ]
    if W == V and d2t.any():
        return [
            MismatchError(
                "d2t is not the identity although W == V: engines ignore it then",
                "reorder lm_head instead",
            )
        ]
    ids_W = torch.arange(W) + d2t.cpu()
    if ((ids_W < 0) | (ids_W >= V)).any():
        hint = "d2t holds offsets, not ids: target id = draft id + d2t[draft id]"
        return [
            MismatchError(
                f"d2t leads to ids {ids_W.min()} to {ids_W.max()}, out of the target's 0 to "
                f"{V - 1}",
                hint,
            )
        ]
    num_ids = len(set(ids_W.tolist()))
    if num_ids != W:
        return [
            MismatchError(
                f"d2t leads {W - num_ids} draft tokens to a token taken already", "make it again"
            )
        ]
    mask_V = torch.zeros(V, dtype=torch.bool)
    mask_V[ids_W] = True
    if t2d is not None and (t2d.shape != (V,) or not torch.equal(t2d.cpu().to(torch.bool), mask_V)):
        return [
            MismatchError(
                "t2d is not the mask of the ids that d2t leads to",
                "delete t2d: it is made from d2t",
            )
        ]
    return []


def expected_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a head, by EAGLE's name."""
    H, Ht, V, W = (
        config.hidden_size,
        config.target_hidden_size,
        config.vocab_size,
        config.draft_vocab_size,
    )
    q, kv = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    intermediate = config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * Ht)}
    if config.norm_before_fc:
        shapes[INPUT_NORM] = (3 * Ht,)
    if config.fc_norm:
        shapes |= dict.fromkeys(FC_NORMS, (Ht,))
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"{LAYER}{norm}.weight"] = (H,)
    for name, shape in {"q": (q, 2 * H), "k": (kv, 2 * H), "v": (kv, 2 * H), "o": (H, q)}.items():
        shapes[f"{LAYER}self_attn.{name}_proj.weight"] = shape
    for name, shape in {
        "gate": (intermediate, H),
        "up": (intermediate, H),
        "down": (H, intermediate),
    }.items():
        shapes[f"{LAYER}mlp.{name}_proj.weight"] = shape
    return shapes | {"norm.weight": (H,), LM_HEAD: (W, H), "d2t": (W,), "t2d": (V,)}


def optional_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shape of what a head may have of its own or use of its target's."""
    V, H = config.vocab_size, config.hidden_size
    lm_head = {LM_HEAD: (V, H)} if config.draft_vocab_size == V else {}
    return {EMBED_TOKENS: (V, H), **lm_head}


def refuse(what: object, faults: Sequence[MismatchError]) -> None:
    """Raise one MismatchError that names all faults, if there are any."""
    if faults:
        raise MismatchError(f"{what}: " + "; ".join(fault.what for fault in faults), faults[0].hint)


# Layers


def _read_taps(settings: Mapping[str, Any], target: TargetShape | None) -> Taps:
    entering = settings.get(LAYER_IDS)
    outputs = (settings.get("eagle_config") or {}).get(LAYER_IDS)
    readings = {tuple(index - 1 for index in entering)} if entering else set()
    if outputs:
        as_inputs = tuple(index - 1 for index in outputs)
        if outputs[0] > 1 and not entering:
            readings.add(as_inputs)  # one of two: see layers_ambiguity
        elif outputs[0] == 1 or as_inputs not in readings:
            readings.add(tuple(outputs))
    if not readings:
        if target is None:
            raise MismatchError(
                "the head does not say which layers it taps",
                "name its target: the default layers depend on it",
            )
        return target.default_taps
    if len(readings) > 1:
        raise MismatchError(
            f"the two lists of layers disagree: outputs of {' and '.join(map(str, readings))}",
            "delete the wrong one",
        )
    taps = readings.pop()
    if len(taps) != 3 or taps[0] < 0 or not taps[0] < taps[1] < taps[2]:
        raise MismatchError(
            f"the head taps the outputs of layers {taps}", "three layers, ascending, are supported"
        )
    return (taps[0], taps[1], taps[2])


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
    """Layers are listed as outputs, as SpecForge does: read alike by every SGLang as long as the
    first is 1 (form_faults).

    No norm_output unless it is on: left out, it means the same to SGLang (not fed back) and to
    SpecForge.
    """
    eagle = {LAYER_IDS: list(config.taps), "use_aux_hidden_state": True}
    if config.norm_before_fc:
        eagle["norm_before_fc"] = True  # SGLang and NVIDIA's heads keep it here
    fed_back = {"norm_output": True, FED_BACK: True} if config.norm_output else {}
    return {
        "architectures": [SGLANG_ARCHITECTURE],
        **_layer_keys(config),
        "torch_dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": eagle,
        **_flags(config),
        **fed_back,
        **_own_rope(config),
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
        # null means the head's own
        "target_hidden_size": config.target_hidden_size if config.owns_embeddings else None,
        LAYER_IDS: [tap + 1 for tap in config.taps],
        **_flags(config),
        "norm_output": config.norm_output,
        **_own_rope(config),
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
        LM_HEAD_SHA256: config.target_lm_head_sha256,
    }


def _flags(config: HeadConfig) -> dict[str, bool]:
    return config.model_dump(include={"norm_before_residual", "norm_before_fc", "fc_norm"})


def _own_rope(config: HeadConfig) -> dict[str, bool]:
    return {OWN_ROPE: True} if config.own_rope else {}


def _settings_file(name: str, settings: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: (json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode()}


def _eagle_name(name: str) -> str:
    """EAGLE's name of a tensor that others call otherwise."""
    if name.startswith(SPECULATORS_LAYER):
        return LAYER + name.removeprefix(SPECULATORS_LAYER)
    return OLD_NORMS.get(name, name)
