"""What a target's decoder computes, as one description: read from config.json by its family.

    for layer, kind in enumerate(config.layer_kinds):
        x = input_layernorm(h)
        x = attention(x), or for a "conv" layer  conv_out(C * conv(B * x))   of B, C, x = conv_in(x)
        h = h + residual_scale * attention_out_norm(x)
        x = mlp(post_attention_layernorm(h)), dense or the chosen experts'
        h = h + residual_scale * mlp_out_norm(x)
    logits = softcap(logit_scale * lm_head(norm(h)))

Norms of outputs are absent where norms are "before", those of inputs where they are "after". h
begins as embed_scale times the embedding. A mixture takes the num_experts_per_tok best of the
softmax of its router's logits, divided by their sum where `renormalises`, and adds up the experts'
outputs times these, in the experts' order; or as `routes_input` says. A short convolution (LFM2)
reads the `B * x` of the last conv_kernel tokens of a row's path, which lie in the cache where
attention keeps keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from eyas.errors import CorruptError, MismatchError
from eyas.families import (
    ACTIVATIONS,
    ALL_SLIDING,
    FAMILIES,
    Activation,
    Family,
    HeadNorm,
    NormPlacement,
)
from eyas.gguf.blocks import are_multiplied
from eyas.gguf.configuration import SOURCE
from eyas.gguf.folder import is_of_file
from eyas.model.config import (
    HEAD_ROPES,
    LEAST_WINDOW,
    RESTORE_CONFIG,
    Positive,
    RopeConfig,
    Size,
    TargetShape,
    end_token_ids,
    given,
    head_dim_of,
    in_words,
    read_config,
    whole_heads,
    with_context,
)

ELSEWHERE = (
    "answer prompts by a server that runs it (SGLang, vLLM); capture, train, eval --features and "
    "export take it through transformers, and check says which servers take the head"
)
MAX_HEAD_DIM, MAX_KERNEL = 256, 16  # limits of cpp/attention.h and cpp/model.h
MOST_PARTS = 4096  # layers, or experts of one: more may not fit in memory


class LayerKind(BaseModel):
    """What may differ from layer to layer.

    window: positions that attention sees, the row's own among them; chunk: those of its own run, of
    which one begins at each multiple; None is all. rope: its number among `rotations`; None turns
    nothing. scales: query_scale is for it. unit_heads: queries and keys are normed without weights
    (Llama 4). has_experts: of its MLP.
    """

    model_config = ConfigDict(frozen=True)

    mixer: Literal["attention", "conv"] = "attention"
    window: Size | None = None
    chunk: Size | None = None
    rope: int | None = 0
    scales: bool = True
    unit_heads: bool = False
    has_experts: bool = False


class Experts(BaseModel):
    """A mixture. bias, routes_input: see `Family`. shared_size: the width of an MLP that every
    token takes beside its experts.
    """

    model_config = ConfigDict(frozen=True)

    num_experts: Annotated[int, Field(strict=True, ge=1, le=MOST_PARTS)]
    num_experts_per_tok: Size
    intermediate_size: Size
    renormalises: bool
    bias: bool = False
    shared_size: Size | None = None
    routes_input: bool = False

    @model_validator(mode="after")
    def _has_as_many_as_it_chooses(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, of {self.num_experts} experts"
            )
        return self


class QueryScale(BaseModel):
    """A query at position p is multiplied by 1 + beta * log(1 + floor((p + first) / length))."""

    model_config = ConfigDict(frozen=True)

    beta: Positive
    length: Size
    first: int = 0

    def of(self, positions: np.ndarray) -> np.ndarray:
        """The factors of integer positions [...], float32."""
        turns = np.floor((positions + self.first).astype(np.float32) / np.float32(self.length))
        factors: np.ndarray = 1 + np.float32(self.beta) * np.log1p(turns)
        return factors


class TargetConfig(TargetShape):
    """A target that our own decoder runs.

    layers: one kind for each; () where all are plain. ropes: what kinds name, of rotary_dims
    channels of a head (the first ones, all by default); () is `rope` alone. qk_norm: by head, or
    over the width of all heads. attention_scale: of scores, 1 / sqrt(head_dim) by default;
    attention_softcap: cuts them as logit_softcap cuts logits.
    """

    attention_bias: StrictBool  # on q, k, v
    attention_out_bias: StrictBool
    mlp_bias: StrictBool
    qk_norm: HeadNorm = "none"
    norms: NormPlacement = "before"
    activation: Activation = "silu"
    layers: tuple[LayerKind, ...] = ()
    ropes: tuple[RopeConfig, ...] = ()
    rotary_dims: Size | None = None
    query_scale: QueryScale | None = None
    attention_scale: Positive | None = None
    attention_softcap: Positive | None = None
    sinks: bool = False
    embed_scale: Positive = 1.0
    residual_scale: Positive = 1.0
    experts: Experts | None = None
    conv_kernel: Size | None = None
    conv_bias: bool = False

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return self.layers or (LayerKind(),) * self.num_hidden_layers

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        return self.ropes or (self.rope,)

    @property
    def turned_dims(self) -> int:
        return self.rotary_dims or self.head_dim

    @property
    def score_scale(self) -> float:
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def head_width(self) -> int:
        """What a token meets: the experts that it is sent to together."""
        if self.experts is None:
            return self.intermediate_size
        at_work = self.experts.num_experts_per_tok * self.experts.intermediate_size
        return max(self.intermediate_size, at_work + (self.experts.shared_size or 0))

    @property
    def slot_width(self) -> int:
        """Numbers that a layer keeps of a token: keys and values, or a convolution's input."""
        kept = super().slot_width
        return max(kept, self.hidden_size) if self.conv_kernel else kept

    @model_validator(mode="after")
    def _has_whole_heads(self) -> Self:
        whole_heads(self)
        pairs, odd = divmod(self.turned_dims, 2)
        if odd or self.turned_dims > self.head_dim:
            raise ValueError(
                f"partial_rotary_factor turns {self.turned_dims} of a head's {self.head_dim} "
                "channels: the rotary embedding turns pairs"
            )
        for rope in self.rotations:
            if rope.kind == "longrope" and len(rope.factors) != pairs:
                raise ValueError(f"short_factor has {len(rope.factors)} entries for {pairs} pairs")
        return self

    @classmethod
    def from_folder(cls, folder: str | Path) -> TargetConfig:
        """Read config.json (and generation_config.json's end tokens). Raises MissingInputError,
        CorruptError, and MismatchError for a model we do not run.
        """
        whole = read_config(folder)
        config = text_config(whole)
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise MismatchError(
                f"{folder} is a {family!r} model; eyas' own engine runs "
                f"{', '.join(one.name for one in FAMILIES.values())}",
                ELSEWHERE,
            )
        try:
            read = cls(
                family=family,
                whole=whole.get("model_type"),
                eos_token_ids=end_token_ids(folder, config.get("eos_token_id")),
                dtype=dtype_of(config),
                in_blocks=is_of_file(Path(folder)) and are_multiplied(whole[SOURCE]["types"]),
                **description(config, FAMILIES[family]),
            )
            if whole.get("text_config") and (read.logit_scale, read.logit_softcap) != (1, None):
                raise Unsupported("has logits_scaling or final_logit_softcapping in text_config")
            return read
        except Unsupported as error:
            raise MismatchError(f"{folder} {error}", ELSEWHERE) from error
        except KeyError as error:
            if "text_config" in whole:  # only its library knows the defaults of such a part
                what = f"{folder}/config.json leaves {error} of its decoder to transformers"
                raise MismatchError(what, ELSEWHERE) from error
            raise CorruptError(f"{folder}/config.json lacks {error}", RESTORE_CONFIG) from error
        except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            why = in_words(error) if isinstance(error, ValidationError) else error
            what = f"{folder}/config.json does not describe a model: {why}"
            raise CorruptError(what, RESTORE_CONFIG) from error


def dtype_of(config: Mapping[str, Any]) -> Any:
    """The type in which a checkpoint is stored; float32 where a config says none."""
    stated = given(config, "dtype", config.get("torch_dtype"))
    name = stated.removeprefix("torch.") if isinstance(stated, str) else stated
    return "float32" if name in (None, "", "auto") else name


class Unsupported(Exception):
    """What our decoder does not compute: a sentence's rest."""


# In a config of a family without them in `defaults`, nothing reads these.
OF_SOME = {
    "attention_chunk_size",
    "attn_temperature_tuning",
    "interleave_moe_layer_step",
    "intermediate_size_mlp",
    "moe_layers",
    "use_qk_norm",
    "no_rope_layers",
    "no_rope_layer_interval",
    "position_embedding_type",
    "sliding_window_pattern",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "norm_topk_prob",
    "hidden_activation",
    "rope_local_base_freq",
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's part on the decoder of text, with what stands outside of it for the whole
    model, and the family's defaults, which are not for what is null.
    """
    text = config.get("text_config")
    merged = dict(config)
    if isinstance(text, dict):
        outer = "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"
        merged = text | {key: config[key] for key in outer if config.get(key) is not None}
    if (family := FAMILIES.get(str(merged.get("model_type")))) is None:
        return merged
    ignored = OF_SOME - family.defaults.keys()
    return {**family.defaults, **{key: merged[key] for key in merged.keys() - ignored}}


# What is computed with before TargetConfig has checked it.
NUMBERS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "intermediate_size",
    "attention_chunk_size",
)


def whole_number(config: Mapping[str, Any], name: str) -> int:
    """A whole number of 1 or more. Raises ValueError."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r:.64}: not a whole number of 1 or more")
    return value


def description(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """A family's config as TargetConfig's fields. Raises KeyError, ValueError, Unsupported."""
    quantised = config.get("quantization_config")
    if quantised and (method := quantised.get("quant_method")) != "mxfp4":
        raise Unsupported(
            f"is quantised by {method!r}; eyas' own engine runs GGUF files, gpt-oss' MXFP4 and "
            "weights that are not quantised"
        )
    for name in NUMBERS:
        if config.get(name) is not None:
            whole_number(config, name)
    if config["num_hidden_layers"] > MOST_PARTS:
        raise ValueError(
            f"num_hidden_layers is {config['num_hidden_layers']}: no model has so many"
        )
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    head_dim, length = head_dim_of(config), given(config, "max_position_embeddings", 2048)
    for what, size, most in (
        ("heads", head_dim, MAX_HEAD_DIM),
        ("convolutions", config.get("conv_L_cache"), MAX_KERNEL),
    ):
        if isinstance(size, int) and size > most:
            raise Unsupported(f"has {what} of {size}; eyas' engine runs {most} at most")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise Unsupported("attends to later tokens")
    rotations, dims = rotations_of(config, family, head_dim)
    if isinstance(length, int) and rotations[0].kind == "longrope":
        # its second set of factors, for longer contexts, is not used
        length = min(length, rotations[0].original_max_position_embeddings)
    scalar = config.get("query_pre_attn_scalar")
    bias = given(config, "attention_bias", False)
    eps = "norm_eps" if "norm_eps" in family.defaults else "rms_norm_eps"
    out_bias = bias if family.out_bias is None else family.out_bias
    is_plain = rotations[0].kind in HEAD_ROPES and dims == head_dim  # heads can have it too
    plain = rotations[0] if is_plain else None
    kinds = layer_kinds(config, family, len(rotations), length)
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp_width(config),
        "num_hidden_layers": count,
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": given(config, "num_key_value_heads", config["num_attention_heads"]),
        "head_dim": head_dim,
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": given(config, eps, 1e-6),
        "max_position_embeddings": length,
        "rope": plain or RopeConfig(theta=rotations[0].theta),
        "tie_word_embeddings": given(config, "tie_word_embeddings", False),
        "attention_bias": bias if family.attention_bias is None else family.attention_bias,
        "attention_out_bias": given(config, "attention_out_bias", out_bias),
        "mlp_bias": given(config, "mlp_bias", False),
        "qk_norm": family.qk_norm,
        "norms": family.norms,
        "activation": activation_of(config, family),
        "layers": () if set(kinds) == {LayerKind()} else kinds,
        "ropes": () if len(rotations) == 1 and plain else rotations,
        "rotary_dims": None if dims == head_dim else dims,
        "query_scale": query_scale(config, family, rotations[0]),
        "attention_scale": given(config, "attention_multiplier", scalar and scalar**-0.5),
        "attention_softcap": config.get("attn_logit_softcapping"),
        "sinks": family.sinks,
        "embed_scale": math.sqrt(hidden)
        if family.scales_embeddings
        else float(given(config, "embedding_multiplier", 1.0)),
        "residual_scale": given(config, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / given(config, "logits_scaling", 1.0),
        "logit_softcap": config.get("final_logit_softcapping"),
        "experts": experts_of(config, family) if any(kind.has_experts for kind in kinds) else None,
        "conv_kernel": config["conv_L_cache"] if any(k.mixer == "conv" for k in kinds) else None,
        "conv_bias": given(config, "conv_bias", False),
    }


FULL, SLIDES, IN_CHUNKS = "full_attention", "sliding_attention", "chunked_attention"


def layer_kinds(
    config: Mapping[str, Any], family: Family, num_rotations: int, length: int
) -> tuple[LayerKind, ...]:
    """One for each layer. Raises Unsupported for layers of another kind."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    if family.has_window_switch and not config.get("use_sliding_window", False):
        window = None
    interval = "no_rope_layer_interval"
    turned = config.get("no_rope_layers") or [
        (layer + 1) % whole_number(config, interval) if interval in config else 1
        for layer in range(count)
    ]
    if config.get("position_embedding_type", "rope") != "rope":
        turned = [0] * count
    # a Mistral with layer_types: Ministral
    has_types = family.window_period != ALL_SLIDING or family.name == "Mistral"
    own = config.get("layer_types") if has_types else None
    stated = own or _stated_types(config, family, turned)
    if len(stated) != count:
        raise ValueError(f"layer_types has {len(stated)} entries for {count} layers")
    may_slide = family.has_window_switch or family.window_period is not None
    if window is None and may_slide and SLIDES in (stated if own or family.window_period else ()):
        raise Unsupported("has layer_types that slide, and no sliding_window in use")
    size = config.get("attention_chunk_size")
    window, chunk = (None if one is not None and one >= length else one for one in (window, size))
    if window is not None and window < LEAST_WINDOW:
        raise Unsupported(f"attends to {window} positions; trees need {LEAST_WINDOW} or more")
    if family.only_windows_turn and config.get("sliding_window") is not None:
        turned = [kind == SLIDES for kind in stated]
    slides = window is None or may_slide
    known = {FULL, "attention", "conv", *[IN_CHUNKS] * (size is not None), *[SLIDES] * slides}
    kinds = []
    for layer, kind in enumerate(stated):
        if kind not in known:
            raise Unsupported(f"has layers of the kind {kind!r}, unlike {family.name}")
        kinds.append(
            LayerKind(
                mixer="conv" if kind == "conv" else "attention",
                window=window if kind == SLIDES else None,
                chunk=chunk if kind == IN_CHUNKS else None,
                rope=(num_rotations - 1 if kind == SLIDES else 0) if turned[layer] else None,
                scales=not turned[layer] or "attn_temperature_tuning" not in config,
                unit_heads=bool(turned[layer] and config.get("use_qk_norm")),
                has_experts=has_experts(config, layer),
            )
        )
    return tuple(kinds)


def _stated_types(config: Mapping[str, Any], family: Family, turned: Sequence[object]) -> list[str]:
    layers = range(len(turned))
    if (indices := config.get("full_attn_idxs")) is not None:
        return [FULL if layer in indices else "conv" for layer in layers]
    if config.get("attention_chunk_size") is not None:
        return [IN_CHUNKS if turns else FULL for turns in turned]
    if family.window_period == ALL_SLIDING:
        return [SLIDES for _ in turned]
    if "no_rope_layers" in config:
        return [FULL if turns else SLIDES for turns in turned]
    if family.window_period is None:
        first = config.get("max_window_layers", 28) if family.has_window_switch else len(turned)
        return [SLIDES if layer >= first else FULL for layer in layers]
    period = given(config, "sliding_window_pattern", family.window_period)
    return [SLIDES if (layer + 1) % period else FULL for layer in layers]


def rotations_of(
    config: Mapping[str, Any], family: Family, head_dim: int
) -> tuple[tuple[RopeConfig, ...], int]:
    """Rotary embeddings, full attention's first, and the channels turned. Raises Unsupported."""
    stated = _stated_rope(config, family)
    by_kind = {key: value for key, value in stated.items() if isinstance(value, dict)}
    if stated and bool(by_kind) != family.local_rope:
        raise Unsupported(f"has rope_parameters of another form than {family.name}'s")
    full = dict(stated)
    if family.local_rope:
        scaling = config.get("rope_scaling") or {}
        full = by_kind.get(FULL, {}) | scaling
        if not given(full, "truncate", True) or (scaling and "rope_type" not in scaling):
            raise Unsupported("has rope_scaling with truncate false or without rope_type")
    full.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if family.long_rope and full.get("rope_type", full.get("type")) in ("su", "yarn"):
        full["rope_type"] = "longrope"
    if family.local_rope:  # transformers looks there for the whole context
        config = {key: one for key, one in config.items() if not key.startswith("original_max")}
    full = with_context(full, config)
    share = given(full, "partial_rotary_factor", given(config, "partial_rotary_factor", 1.0))
    dims = int(head_dim * share)
    if share != 1 and "partial_rotary_factor" not in family.defaults:
        raise Unsupported(f"has partial_rotary_factor {share}, which {family.name} ignores")
    try:
        first = RopeConfig.of_target(full)
        if config.get("use_qk_norm") and first.attention_factor != 1:
            raise Unsupported("norms heads behind a rotary embedding that changes their length")
        if not family.local_rope:
            return (first,), dims
        theta = config.get("rope_local_base_freq", family.defaults["rope_theta"])
        local = {"rope_theta": theta, **(by_kind.get(SLIDES) or {})}
        return (first, RopeConfig.of_target(with_context(local, config))), dims
    except MismatchError as error:
        raise Unsupported(f"has a {error.what}") from error


def _stated_rope(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    usual, named = family.defaults.get("rope_scaling"), config.get("rope_parameters")
    scaling = config.get("rope_scaling") or usual
    if family.local_rope or (scaling == usual and named is not None):
        return dict(named or {})
    return dict(scaling or {})


def query_scale(config: Mapping[str, Any], family: Family, rope: RopeConfig) -> QueryScale | None:
    """Ministral's, stated by its rotary embedding, or Llama 4's."""
    beta = _stated_rope(config, family).get("llama_4_scaling_beta")
    if beta and family.name == "Ministral3":
        return QueryScale(beta=beta, length=rope.original_max_position_embeddings)
    if config.get("attn_temperature_tuning") and config["attn_scale"] != 0:
        return QueryScale(beta=config["attn_scale"], length=config["floor_scale"], first=1)
    return None


def activation_of(config: Mapping[str, Any], family: Family) -> Activation:
    """Of the MLP. Raises Unsupported."""
    stated = given(config, "hidden_activation", given(config, "hidden_act", "silu"))
    if stated not in ACTIVATIONS:
        raise Unsupported(f"has the activation {stated!r}, which eyas' engine does not compute")
    if (given(config, "swiglu_alpha", 1.702), given(config, "swiglu_limit", 7)) != (1.702, 7):
        raise Unsupported("has a swiglu_alpha or swiglu_limit that eyas does not compute")
    return family.activation or ACTIVATIONS[stated]


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the MLP of a layer is a mixture."""
    if not given(config, "num_local_experts", given(config, "num_experts", 0)):
        return False
    if config.get("moe_layers") is not None:
        return layer in config["moe_layers"]
    name = "interleave_moe_layer_step"
    if name not in config:
        name = "decoder_sparse_step"
        config = {**config, name: given(config, name, 1)}  # null in some of Qwen's
    step = whole_number(config, name)
    return layer not in given(config, "mlp_only_layers", []) and (layer + 1) % step == 0


def experts_of(config: Mapping[str, Any], family: Family) -> Experts:
    """The mixture of experts of a config that has one. Raises Unsupported."""
    if given(config, "shared_intermediate_size", 0):
        raise Unsupported("has experts beside a shared MLP, which eyas' engine does not run")
    width = given(config, "moe_intermediate_size", config["intermediate_size"])
    return Experts(
        num_experts=given(config, "num_local_experts", config.get("num_experts")),
        num_experts_per_tok=config["num_experts_per_tok"],
        intermediate_size=width,
        renormalises=not family.routes_input and given(config, "norm_topk_prob", True),
        bias=family.experts_bias,
        shared_size=width if family.routes_input else None,
        routes_input=family.routes_input,
    )


def mlp_width(config: Mapping[str, Any]) -> int:
    """The width of the dense MLP. LFM2 states a number that it is derived from."""
    width = given(config, "shared_intermediate_size", config.get("block_ff_dim"))
    width = given(config, "intermediate_size_mlp", width)
    width = config["intermediate_size"] if width is None else width
    if not config.get("block_auto_adjust_ff_dim", False):
        return int(width)
    width = int(given(config, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = given(config, "block_multiple_of", 256)
    return int(multiple * -(-width // multiple))
