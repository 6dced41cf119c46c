"""What the configs of draft heads mean, by each project that writes them. Tensor names and config
keys of other projects stand here, in `forms` and in `checkpoint` only.

A config that asks for another computation than our Head's is a fault, by name; one with several
possible meanings is an `Ambiguity`, which `eyas check` settles by replaying each meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import MismatchError
from eyas.model.arrays import BFLOAT16, FLOAT16, FLOAT32, Array
from eyas.model.config import HeadConfig

Form = Literal["eyas", "sglang", "vllm", "openvino"]
HEAD_JSON, CONFIG_JSON = "eyas_head.json", "config.json"
FORMAT = "eyas head 1"
SGLANG_ARCHITECTURE, VLLM_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Speculator"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MODEL, LAYER, SPECULATORS_LAYER = "model.", "midlayer.", "layers.0."
EMBED_TOKENS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
INPUT_NORM = "input_norm.weight"
FC_NORMS = tuple(f"fc_norm.{stream}.weight" for stream in range(3))
# what old transformers saved beside the weights: the config says it
INV_FREQ = "rotary_emb.inv_freq"
OLD_FC_NORM = "use_aux_norm"  # fc_norm as SGLang called it first, with these tensors
OLD_NORMS = {
    f"aux_norm_{place}.weight": norm
    for place, norm in zip(("low", "mid", "high"), FC_NORMS, strict=True)
}
MAPS = ("d2t", "t2d")
FLOATS = (FLOAT32, BFLOAT16, FLOAT16)

# Our keys in the others' configs, which they ignore.
LM_HEAD_SHA256 = "target_lm_head_sha256"
# the embeddings in the file are the target's, and these
EMBED_TOKENS_SHA256 = "target_embed_tokens_sha256"
FED_BACK = "norm_output_is_fed_back"  # what norm_output cannot say by itself: see FED_BACK_HINT
OWN_ROPE = "own_rope"

# Which layers `sliding_window` holds for, one by one.
LAYER_TYPES, SLIDING = "layer_types", "sliding_attention"

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
FLAGS: dict[str, tuple[str, ...]] = {  # and the weights that a flag brings with it
    "norm_before_residual": (),
    "norm_before_fc": (INPUT_NORM,),
    "fc_norm": FC_NORMS,
    "norm_output": (),
}
FLAG_OF = {name: flag for flag, names in FLAGS.items() for name in names}

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
        ("eagle_config", "transformer_layer_config", "rope_scaling", "rope_parameters", "taps"),
        dict,
    ),
    **dict.fromkeys(("architectures", LAYER_IDS), list),
}
# Values that change the result when they are another than this one (or absent).
FIXED = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "num_aux_hidden_states": 3,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    # ModelOpt's
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "eagle_decoder_type": "llama",
}
# Lists of layers of other projects: whether of inputs or outputs, nobody states.
OTHER_LAYER_IDS = ("target_layer_ids", "aux_hidden_state_layer_ids", "capture_layers")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as it lies on disk, unjudged: settings as in its JSON, tensors under EAGLE's names,
    embeddings apart.
    """

    form: Form
    settings: dict[str, Any]
    tensors: dict[str, Array]
    embed_tokens: Array | None
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
    def all_tensors(self) -> dict[str, Array]:
        """Every tensor of the file that is a head's, the embeddings last."""
        embed_tokens = {} if self.embed_tokens is None else {EMBED_TOKENS: self.embed_tokens}
        return self.tensors | embed_tokens

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
    """What a config leaves open, as a fault, and its meanings: who reads it so, and the keys that
    would say it.
    """

    fault: MismatchError
    meanings: Mapping[str, Mapping[str, Any]]


def setting_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """What in the settings asks for another computation than our Head's, or is ambiguous."""
    if checkpoint.form == "eyas":
        unknown = sorted(checkpoint.settings.keys() - HeadConfig.model_fields.keys() - {"format"})
        hint = "a newer eyas wrote it: use that"
        return [MismatchError(f"{HEAD_JSON} has the unknown key {key!r}", hint) for key in unknown]
    faults = flag_faults(checkpoint) + [one.fault for one in ambiguities(checkpoint)]
    for variant, meaning in VARIANTS.items():
        if any(checkpoint.stated(variant)):
            what = f"{variant} is set ({meaning}): not supported"
            faults.append(MismatchError(what, "train a head without it"))
    for key, value in FIXED.items():
        for found in checkpoint.stated(key):
            if type(found) is bool is not type(value) or found != value:  # true is 1, no number
                what = f"{key} is {found!r}: only {value!r} is supported"
                faults.append(MismatchError(what, "train a head with it"))
    for key in OTHER_LAYER_IDS:
        if checkpoint.stated(key) and not checkpoint.stated(LAYER_IDS):
            what = f"{key} lists the layers that the head reads: whether their inputs or outputs?"
            hint = f"write {LAYER_IDS} at the top level: there it means inputs"
            faults.append(MismatchError(what, hint))
    if not checkpoint.eagle_settings.get("use_aux_hidden_state", True):
        what = "use_aux_hidden_state is false: the head reads one layer"
        faults.append(MismatchError(what, "give an EAGLE-3 head"))
    return faults + layer_faults(checkpoint)


def layer_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """Faults of the layer as a whole: whose it is, what it attends to, what it shares."""
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
    if window and not sees_all and uses_window(settings) is None:
        what = (
            f"sliding_window is {window} of a context of {length}, and nothing says whether the "
            "head was trained with it: engines go by layer_types"
        )
        hint = f'write "{LAYER_TYPES}": ["{SLIDING}"] if it was, ["full_attention"] if not'
        faults.append(MismatchError(what, hint))
    # Of W tokens, an output matrix of its own cannot be the embedding of V, whatever a config
    # copied from the target says; speculators ties by the outer config, and copies into the inner.
    is_tied = any(checkpoint.stated("tie_word_embeddings"))
    if LM_HEAD in checkpoint.tensors and "d2t" in checkpoint.tensors:
        is_tied = checkpoint.form == "vllm" and bool(checkpoint.settings.get("tie_word_embeddings"))
    if is_tied:
        what = "tie_word_embeddings is set (the output matrix is the embedding): not supported"
        faults.append(MismatchError(what, "train a head without it"))
    return faults


def uses_window(settings: Mapping[str, Any]) -> bool | None:
    """Whether the layer attends to `sliding_window` positions only: by layer_types, which vLLM and
    transformers read, or by the flag that it replaced; None when neither is there.
    """
    kinds = settings.get(LAYER_TYPES)
    if isinstance(kinds, list) and kinds:
        return bool(kinds[0] == SLIDING)
    flag = settings.get("use_sliding_window")
    return None if flag is None else bool(flag)


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
    """What in a config can be meant in several ways; `head_config` still takes one of them."""
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
            "a converted speculators head, trained with it; engines take its absence for false"
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
    """A list of layers in eagle_config alone: readers agree on it only where it begins with 1."""
    outputs = checkpoint.eagle_settings.get(LAYER_IDS)
    is_list = isinstance(outputs, list) and all(isinstance(index, int) for index in outputs)
    if not outputs or not is_list or outputs[0] == 1 or checkpoint.settings.get(LAYER_IDS):
        return
    inputs = [index + 1 for index in outputs]
    what = (
        f"eagle_config lists the layers {outputs}: where such a list does not begin with 1, some "
        "read it as the outputs of these layers and some as their inputs"
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
    """Whether norm_output, when set, means the fed-back norm; None when nothing tells.

    SpecForge wrote it, by default true, for the norm before lm_head, with one architecture and one
    name of the layer; under others the key is EAGLE-3.1's.
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
    is_open = checkpoint.form == "sglang" and FED_BACK not in checkpoint.settings
    if not (is_open and True in checkpoint.stated("norm_output") and fed_back(checkpoint)):
        return []
    architecture = checkpoint.architecture
    why = f"it is a {architecture}"
    if architecture == SGLANG_ARCHITECTURE:
        why = f"SpecForge never writes {SPECULATORS_LAYER}*"
    return [f"norm_output is read as EAGLE-3.1's fed-back norm: {why}"]
