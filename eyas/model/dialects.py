"""Heads as each project writes and reads them: one table. Other projects' names of tensors and keys
stand here, in `forms` (the writer) and in `checkpoint` (the reader) only.

A config that asks for another computation than our Head's is a fault, by name; one with several
possible meanings is an `Ambiguity`, which `eyas check` settles by replaying each. export/engines.py
says which engine reads what of a sound head.
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

MODEL, LAYER, SPECULATORS_LAYER = "model.", "midlayer.", "layers.0."
EMBED_TOKENS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MAPS = ("d2t", "t2d")
FLOATS = (FLOAT32, BFLOAT16, FLOAT16)
INV_FREQ = "rotary_emb.inv_freq"  # which old transformers saved: the config says it
INPUT_NORM = "input_norm.weight"
FC_NORMS = tuple(f"fc_norm.{stream}.weight" for stream in range(3))
FLAGS: dict[str, tuple[str, ...]] = {  # and the weights that a flag brings with it
    "norm_before_residual": (),
    "norm_before_fc": (INPUT_NORM,),
    "fc_norm": FC_NORMS,
    "norm_output": (),
}
OLD_FC_NORM = "use_aux_norm"  # fc_norm as SGLang called it first, with these tensors
OLD_NORMS = {
    f"aux_norm_{place}.weight": norm
    for place, norm in zip(("low", "mid", "high"), FC_NORMS, strict=True)
}

# Keys. At the top level the layers are listed by their inputs, in eagle_config by their outputs.
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Lists of layers of other projects: whether of inputs or outputs, nobody states.
OTHER_LAYER_IDS = ("target_layer_ids", "aux_hidden_state_layer_ids", "capture_layers")
LAYER_TYPES, SLIDING = "layer_types", "sliding_attention"  # where `sliding_window` holds
# Ours, which others ignore. The embeddings in the file are the target's, and these:
EMBED_TOKENS_SHA256 = "target_embed_tokens_sha256"
LM_HEAD_SHA256, OWN_ROPE = "target_lm_head_sha256", "own_rope"
FED_BACK = "norm_output_is_fed_back"  # what norm_output cannot say by itself
# Parts of a config that are JSON objects, or lists, in whichever section they stand.
SECTIONS: dict[str, type] = {
    **dict.fromkeys(
        ("eagle_config", "transformer_layer_config", "rope_scaling", "rope_parameters", "taps"),
        dict,
    ),
    **dict.fromkeys(("architectures", LAYER_IDS), list),
}
# The one value, or its absence, that our Head computes, and what another one would mean.
COMPUTED: dict[str, tuple[object, str]] = {
    "attention_bias": (False, "the attention's projections have a bias"),
    "mlp_bias": (False, "the MLP has a bias"),
    "bias": (False, "fc has a bias"),
    "quantization_config": (False, "the weights are quantised"),
    "parallel_drafting": (False, "all tokens are drafted in one forward"),
    "parallel_draft_step": (1, "several tokens are drafted in one forward"),
    "use_aux_hidden_state": (True, "the head reads one layer, as EAGLE-1 does"),
    "num_aux_hidden_states": (3, "fc has other inputs"),
    "num_hidden_layers": (1, "the head has other layers"),
    "hidden_act": ("silu", "the MLP is another one"),
    "logit_scale": (1.0, "the logits are scaled"),
    "partial_rotary_factor": (1.0, "only a part of each query is turned"),
    "use_input_layernorm_in_first_layer": (True, "the embedding is not normed"),
    "use_last_layernorm": (True, "lm_head's input is not normed"),
    "use_mtp_layernorm": (False, "there are more norms"),
    "eagle_decoder_type": ("llama", "the layer is not Llama's"),
}


@dataclass(frozen=True, slots=True)
class Project:
    """How a project's heads are known, and what they leave open.

    architecture: the class in config.json; layer: what the layer is called there, None: by any
    name. any_model: model_type is the target's. residual: where readers differ on an absent
    norm_before_residual, why, and whose it is on and off. fed_back: whether norm_output means
    EAGLE-3.1's fed-back norm; None: it may also mean the norm before lm_head.
    """

    title: str
    architecture: str
    layer: str | None = None
    any_model: bool = False
    residual: tuple[str, str, str] | None = None
    fed_back: bool | None = True


SGLANG_ARCHITECTURE, VLLM_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3Speculator"
SPECULATORS = Project(
    "speculators",
    VLLM_ARCHITECTURE,
    residual=(
        "vLLM takes that for true, speculators for false",
        "as vLLM reads it",
        "as speculators reads it",
    ),
)
# Who writes flat configs by which name. Others are refused: their layer is not Llama's
# (Eagle3DeepseekV2ForCausalLM).
PROJECTS = (
    Project("the EAGLE repository", "LlamaForCausalLM"),
    Project("SpecForge, SGLang, TorchSpec", SGLANG_ARCHITECTURE, LAYER, fed_back=None),
    Project(
        "ModelOpt, or a converted speculators head",
        SGLANG_ARCHITECTURE,
        SPECULATORS_LAYER,
        residual=(
            f"{SPECULATORS_LAYER}* in a {SGLANG_ARCHITECTURE} is ModelOpt's or a converted "
            "speculators head, trained with it; engines take its absence for false",
            "as ModelOpt trains",
            "as engines read it",
        ),
    ),
    Project("vLLM, AngelSlim", "Eagle3LlamaForCausalLM"),
    Project("NeMo", "LlamaEagle3DraftModel", any_model=True),
)


class Ambiguity(MismatchError):
    """What a config leaves open. meanings: who reads it so, and the keys that would say it."""

    def __init__(self, what: str, hint: str, meanings: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(what, hint)
        self.meanings = meanings


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head on disk, unjudged: settings as in its JSON, tensors under EAGLE's names, embeddings
    apart.
    """

    form: Form
    settings: dict[str, Any]
    tensors: dict[str, Array]
    embed_tokens: Array | None
    layer_name: str  # what the layer is called in the file: LAYER or SPECULATORS_LAYER

    @property
    def layer_settings(self) -> dict[str, Any]:
        """Where this form writes the decoder layer's shape."""
        inner = self.settings.get("transformer_layer_config") or {}
        return inner if self.form == "vllm" else self.settings

    @property
    def eagle_settings(self) -> dict[str, Any]:
        """What flat configs keep apart."""
        return self.settings.get("eagle_config") or {}

    @property
    def all_tensors(self) -> dict[str, Array]:
        """The head's tensors in the file, the embeddings last."""
        embed_tokens = {} if self.embed_tokens is None else {EMBED_TOKENS: self.embed_tokens}
        return self.tensors | embed_tokens

    @property
    def architecture(self) -> str:
        return str(next(iter(self.settings.get("architectures") or []), SGLANG_ARCHITECTURE))

    @property
    def project(self) -> Project | None:
        """Whose it is; None if unknown."""
        if self.form == "vllm":
            return SPECULATORS
        for one in PROJECTS:
            if one.architecture == self.architecture and one.layer in (None, self.layer_name):
                return one
        return None

    def stated(self, key: str) -> set[Any]:
        """The values that the config gives a key, in any of its places; null is no value."""
        rope = self.layer_settings.get("rope_parameters") or {}
        places = (self.settings, self.layer_settings, self.eagle_settings, rope)
        values = [place[key] for place in places if place.get(key) is not None]
        return {str(value) if isinstance(value, dict | list) else value for value in values}

    def is_set(self, flag: str) -> bool:
        return True in self.stated(flag)


def setting_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """Settings that ask for another computation than our Head's, or are ambiguous."""
    if checkpoint.form == "eyas":
        unknown = sorted(checkpoint.settings.keys() - HeadConfig.model_fields.keys() - {"format"})
        hint = "a newer eyas wrote it: use that"
        return [MismatchError(f"{HEAD_JSON} has the unknown key {key!r}", hint) for key in unknown]
    return [*_flag_faults(checkpoint), *ambiguities(checkpoint), *_layer_faults(checkpoint)]


def _flag_faults(checkpoint: Checkpoint) -> Iterator[MismatchError]:
    for flag in FLAGS:
        values = checkpoint.stated(flag)
        if len(values) > 1 or not values <= {True, False}:
            what = f"{flag} is given as {' and '.join(map(repr, sorted(values, key=repr)))}"
            yield MismatchError(what, "write true or false, in one place")
    if checkpoint.is_set("norm_before_fc") and (
        checkpoint.is_set("fc_norm") or checkpoint.is_set(OLD_FC_NORM)
    ):
        what = "norm_before_fc and fc_norm are both set: no project says in which order"
        yield MismatchError(what, "leave the one that the head was trained with")


def _layer_faults(checkpoint: Checkpoint) -> Iterator[MismatchError]:
    for key, (value, meaning) in COMPUTED.items():
        for found in checkpoint.stated(key):
            if type(found) is bool is not type(value) or found != value:  # true is 1, no number
                what = f"{key} is {found!r:.64}: only {value!r} is supported ({meaning})"
                yield MismatchError(what, "train a head with it")
    for key in OTHER_LAYER_IDS:
        if checkpoint.stated(key) and not checkpoint.stated(LAYER_IDS):
            what = f"{key} lists the layers that the head reads: whether their inputs or outputs?"
            hint = f"write {LAYER_IDS} at the top level: there it means inputs"
            yield MismatchError(what, hint)
    settings, project = checkpoint.layer_settings, checkpoint.project
    if project is None:
        what = f"the head is a {checkpoint.architecture}: its layer is not known to be Llama's"
        known = ", ".join(dict.fromkeys(one.architecture for one in PROJECTS))
        yield MismatchError(what, f"known are {known} and speculators' form")
    model_type = settings.get("model_type", None if checkpoint.form == "vllm" else "llama")
    if model_type != "llama" and not (project and project.any_model):
        what = f"the layer's model_type is {model_type!r}: only 'llama' is supported"
        yield MismatchError(what, "train a Llama-shaped head")
    window, length = settings.get("sliding_window"), settings.get("max_position_embeddings") or 2048
    sees_all = isinstance(window, int) and isinstance(length, int) and window >= length
    if window and not sees_all and uses_window(settings) is None:
        what = (
            f"sliding_window is {window} of a context of {length}, and nothing says whether the "
            "head was trained with it: engines go by layer_types"
        )
        hint = f'write "{LAYER_TYPES}": ["{SLIDING}"] if it was, ["full_attention"] if not'
        yield MismatchError(what, hint)
    # Of W tokens, an output matrix of its own cannot be the embedding of V, whatever a config
    # copied from the target says; speculators ties by the outer config, and copies into the inner.
    is_tied = any(checkpoint.stated("tie_word_embeddings"))
    if LM_HEAD in checkpoint.tensors and "d2t" in checkpoint.tensors:
        is_tied = checkpoint.form == "vllm" and bool(checkpoint.settings.get("tie_word_embeddings"))
    if is_tied:
        what = "tie_word_embeddings is set (the output matrix is the embedding): not supported"
        yield MismatchError(what, "train a head without it")


def uses_window(settings: Mapping[str, Any]) -> bool | None:
    """Whether the layer attends to `sliding_window` positions only: by layer_types, which vLLM and
    transformers read, or by the flag that it replaced; None without either.
    """
    kinds = settings.get(LAYER_TYPES)
    if isinstance(kinds, list) and kinds:
        return bool(kinds[0] == SLIDING)
    flag = settings.get("use_sliding_window")
    return None if flag is None else bool(flag)


def ambiguities(checkpoint: Checkpoint) -> Iterator[Ambiguity]:
    """What in a config has several meanings; `head_config` still takes one of them."""
    if checkpoint.form == "eyas":
        return
    key, project = "norm_before_residual", checkpoint.project
    if project and project.residual and not checkpoint.stated(key):
        why, on, off = project.residual
        hint = "write into config.json what the head was trained with"
        meanings = {f"{key} on, {on}": {key: True}, f"{key} off, {off}": {key: False}}
        yield Ambiguity(f"{key} is not given: {why}", hint, meanings)
    if checkpoint.is_set("norm_output") and fed_back(checkpoint) is None:
        yield Ambiguity(
            f"norm_output is set by an unknown writer of {SGLANG_ARCHITECTURE}: it has two "
            "meanings",
            "SpecForge meant the norm before lm_head by it until September 2026, and EAGLE-3.1's "
            f'fed-back norm since, as others do: write "{FED_BACK}": false for the first, true for '
            "the second",
            {
                "norm_output before lm_head, as older SpecForge trains": {FED_BACK: False},
                "norm_output fed back, as SGLang and vLLM read it": {FED_BACK: True},
            },
        )
    outputs = checkpoint.eagle_settings.get(LAYER_IDS)
    is_list = isinstance(outputs, list) and all(isinstance(index, int) for index in outputs)
    # readers agree on a list in eagle_config alone only where it begins with 1
    if outputs and is_list and outputs[0] != 1 and not checkpoint.settings.get(LAYER_IDS):
        inputs = [index + 1 for index in outputs]
        yield Ambiguity(
            f"eagle_config lists the layers {outputs}: where such a list does not begin with 1, "
            "some read it as the outputs of these layers and some as their inputs",
            f"write {LAYER_IDS} at the top level too: there it means inputs, so {outputs} or "
            f"{inputs}",
            {
                f"layers {outputs} as inputs, as vLLM reads them": {LAYER_IDS: outputs},
                f"layers {outputs} as outputs, as SGLang's Llama, Qwen and Mistral read them": {
                    LAYER_IDS: inputs
                },
            },
        )


def fed_back(checkpoint: Checkpoint) -> bool | None:
    """Whether norm_output, when set, means the fed-back norm; None when nothing tells."""
    stated, project = checkpoint.settings.get(FED_BACK), checkpoint.project
    return bool(stated) if stated is not None else project.fed_back if project else True


def decisions(checkpoint: Checkpoint) -> list[str]:
    """What was decided where a config by itself leaves it open, and why."""
    project = checkpoint.project
    is_open = checkpoint.form == "sglang" and FED_BACK not in checkpoint.settings
    if not (is_open and project and project.fed_back and checkpoint.is_set("norm_output")):
        return []
    why = f"the head is of {project.title}, and SpecForge's is a {SGLANG_ARCHITECTURE} of {LAYER}*"
    return [f"norm_output is read as EAGLE-3.1's fed-back norm: {why}"]
