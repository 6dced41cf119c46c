"""Shapes of targets and heads by config.json, and whether a head fits its target. Without torch.

A `tap` is an `after_layer` index: the residual stream behind decoder layer i (0-based). EAGLE-3
taps layers 1, n//2 - 1 and n - 4 (arXiv 2503.01840).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)

from eyas.errors import CorruptError, MismatchError, MissingInputError

RESTORE_CONFIG = "restore the file from its source"
Taps = tuple[int, int, int]
LEAST_LAYERS = 7  # a target's, for three distinct taps
# What JSON calls a number: neither a string of digits, nor true, nor NaN.
Size = Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class RopeConfig(BaseModel):
    """Rotary embedding: base and, for long contexts, how its frequencies are scaled.

    yarn: arXiv 2309.00071; cosines and sines are multiplied by attention_factor. longrope (arXiv
    2402.13753): each frequency is divided by its entry of factors. Heads have neither.
    """

    model_config = ConfigDict(frozen=True)

    theta: Positive = 10000.0
    kind: Literal["default", "llama3", "linear", "yarn", "longrope"] = "default"
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Size = 8192
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: Positive = 1.0
    factors: tuple[Positive, ...] = ()

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """Read a head's `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`."""
        rope = config.get("rope_parameters") or {}
        scaling = rope or config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        _refuse_kind(kind, HEAD_ROPES)
        theta = given(rope, "rope_theta", given(config, "rope_theta", 10000.0))
        return cls.of_target(with_context({**scaling, "rope_theta": theta}, config))

    @classmethod
    def of_target(cls, stated: Mapping[str, Any]) -> RopeConfig:
        """Read an entry of transformers 5's `rope_parameters`. Raises MismatchError for a scaling
        that our decoder does not compute, CorruptError.
        """
        kind = stated.get("rope_type", stated.get("type")) or "default"
        _refuse_kind(kind, (*HEAD_ROPES, "yarn", "longrope"))
        kept = {key: stated[key] for key in cls.model_fields if stated.get(key) is not None}
        kept |= {"theta": given(stated, "rope_theta", 10000.0), "kind": kind}
        if kind in HEAD_ROPES:
            kept.pop("attention_factor", None)  # unread
        elif "attention_factor" not in kept:
            kept["attention_factor"] = attention_factor(kind, stated)
        if kind == "longrope":
            kept["factors"] = stated.get("short_factor")
        try:
            return cls(**kept)
        except ValidationError as error:
            what = f"the rotary embedding in the config is none: {in_words(error)}"
            raise CorruptError(what, RESTORE_CONFIG) from error

    def to_hf(self) -> dict[str, Any]:
        """A head's `rope_theta` and `rope_scaling`, which every engine reads."""
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            names = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
            scaling |= self.model_dump(include=names)
        return {"rope_theta": self.theta, "rope_scaling": scaling}


HEAD_ROPES = ("default", "linear", "llama3")


def _refuse_kind(kind: object, known: Sequence[str]) -> None:
    if kind not in known:
        what = f"rope scaling {kind!r} is not supported"
        raise MismatchError(what, f"supported: {', '.join(known)}")


def with_context(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `rope_parameters` with the context that its scaling begins from, as transformers
    takes it: the config's own key, else the entry's, else the whole context.
    """
    key, whole = "original_max_position_embeddings", given(config, "max_position_embeddings", 2048)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, *HEAD_ROPES[:2]):
        return dict(rope)
    original = given(config, key, given(rope, key, whole))
    stated = {**rope, key: original}
    if kind != "llama3" and rope.get("factor") is None:
        stated["factor"] = whole / original
    return stated


def attention_factor(kind: str, stated: Mapping[str, Any]) -> float:
    """What the two papers multiply cosines and sines by, where a config does not say it."""
    factor = float(stated.get("factor") or 1.0)
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(
            1 + math.log(factor) / math.log(stated["original_max_position_embeddings"])
        )

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dims = stated.get("mscale"), stated.get("mscale_all_dim")
    return scale(mscale) / scale(all_dims) if mscale and all_dims else scale(1.0)


class DecoderConfig(BaseModel):
    """The shape of a Llama-family decoder: what targets and heads have in common."""

    model_config = ConfigDict(frozen=True)

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    vocab_size: Size
    rms_norm_eps: Positive
    max_position_embeddings: Size
    rope: RopeConfig

    @property
    def slot_width(self) -> int:
        """Numbers that a layer keeps of a token: a key and a value for each head."""
        return 2 * self.num_key_value_heads * self.head_dim


def whole_heads(config: DecoderConfig) -> None:
    """Raise ValueError for heads that our attention cannot have."""
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % key_heads:
        raise ValueError(f"{heads} attention heads cannot share {key_heads} key_value_heads")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}: the rotary embedding turns pairs")


class TargetShape(DecoderConfig):
    """What a head needs to know of any target. rope: its head's, the target's own where possible.

    The logits are lm_head's output times logit_scale, then logit_softcap * tanh(. / logit_softcap).
    family: model_type of the decoder; whole: of a model that it is a part of. in_blocks: a GGUF
    file whose matrices the native decoder multiplies as they are.
    """

    family: str
    whole: str | None = None
    tie_word_embeddings: StrictBool
    eos_token_ids: tuple[int, ...]
    dtype: str
    logit_scale: Positive = 1.0
    logit_softcap: float | None = None
    in_blocks: bool = False

    @property
    def model_type(self) -> str:
        """As config.json begins with it, and servers know the model."""
        return self.whole or self.family

    @property
    def head_width(self) -> int:
        """Of the MLP of a head for this target."""
        return self.intermediate_size

    @property
    def default_taps(self) -> Taps:
        self.refuse_few_layers()
        return (1, self.num_hidden_layers // 2 - 1, self.num_hidden_layers - 4)

    def refuse_few_layers(self) -> None:
        """Raise MismatchError for a target that has no three distinct taps."""
        if self.num_hidden_layers < LEAST_LAYERS:
            raise MismatchError(
                f"a target of {self.num_hidden_layers} layers has no three distinct taps",
                f"EAGLE-3 needs a target of {LEAST_LAYERS} layers or more",
            )


def given(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """What a config says, or the default where it says nothing or null. A 0 is a value."""
    value = config.get(key)
    return default if value is None else value


def head_dim_of(config: Mapping[str, Any]) -> Any:
    """As stated, or each head's share of the width; unchecked."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    are_sizes = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    return given(config, "head_dim", hidden // heads if are_sizes else None)


def end_token_ids(folder: str | Path, stated: Any) -> tuple[int, ...]:
    """The tokens that end an answer: generation_config.json's or, without them, the config's. A
    negative id means none. Raises CorruptError for what are no token ids.
    """
    if (Path(folder) / "generation_config.json").exists():
        stated = given(read_config(folder, "generation_config.json"), "eos_token_id", stated)
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(token) is int for token in ids):
        raise CorruptError(f"{folder}: eos_token_id is {stated!r:.64}: no token id", RESTORE_CONFIG)
    return tuple(token for token in ids if token >= 0)


def in_words(error: ValidationError) -> str:
    """Every field that pydantic refuses, with what it was given and why."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))} is {item['input']!r:.64}: {item['msg']}"
        if item["loc"]
        else item["msg"].removeprefix("Value error, ")
        for item in error.errors()
    )


# As deep as a tree can be (`rows.MAX_TREE_COLUMNS`): a node always sees its own path.
LEAST_WINDOW = 64
Window = Annotated[int, Field(strict=True, ge=LEAST_WINDOW)]

# The published heads for targets of 128,000 and more tokens (EAGLE-3, SpecForge) have these many.
MOST_DRAFT_TOKENS = 32_000


class HeadOptions(BaseModel):
    """What of a new head is chosen, and written into the checkpoint; the rest is its target's.

    The default norms, fc_norm and norm_output, are EAGLE-3.1's, which eyas, SGLang and vLLM read;
    llama.cpp and OpenVINO read a head without them (docs/decisions/training.md).
    draft_vocab_size: by default as many tokens as cover 99 % of the training answers
    (train/start.py), at most 32,000. sliding_window: the tokens that a draft attends to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft_vocab_size: int | None = Field(None, ge=1)
    train_lm_head: bool = Field(True, description="false: the target's rows stay")
    norm_before_residual: bool = Field(False, description="take the residual after hidden_norm")
    norm_before_fc: bool = Field(False, description="one norm of the three streams together")
    fc_norm: bool = Field(True, description="a norm of each stream; with norm_output EAGLE-3.1")
    norm_output: bool = Field(True, description="feed back the output after the norm")
    sliding_window: Window | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_place_of_the_default(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("norm_before_fc"):
            return {"fc_norm": False, **given}
        return given

    @model_validator(mode="after")
    def _one_norm_of_features(self) -> HeadOptions:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both set: no project says in which order"
            )
        return self


class HeadConfig(DecoderConfig):
    """A draft head in our own form (`eyas_head.json` beside the tensors).

    `vocab_size` is the target's V; `draft_vocab_size` is W. `taps` are after_layer indices. The
    flags are variants of the layer that published heads are trained with. sliding_window: positions
    that attention sees, p - window + 1 .. p, as in vLLM and transformers; None is all.
    """

    draft_vocab_size: Size
    target_hidden_size: Size
    taps: Taps
    target_lm_head_sha256: StrictStr = ""
    norm_before_residual: StrictBool = False  # the residual is taken after hidden_norm
    norm_before_fc: StrictBool = False  # input_norm over the three features together
    fc_norm: StrictBool = False  # fc_norm.{0,1,2} over each of the three features
    norm_output: StrictBool = False  # what is fed back is the output after `norm`
    # it was trained with another rotary embedding than its target's, and says so
    own_rope: StrictBool = False
    train_lm_head: StrictBool = True  # else lm_head is the target's rows as they were
    sliding_window: Window | None = None

    @model_validator(mode="after")
    def _fits_our_layer(self) -> Self:
        whole_heads(self)
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size is {self.hidden_size} on a target of {self.target_hidden_size}: a "
                "head of another width than its target's is not supported"
            )
        return self

    @classmethod
    def for_target(
        cls, target: TargetShape, options: HeadOptions, taps: Taps | None = None
    ) -> HeadConfig:
        """A new head: one layer of the target's own shape. Without a draft_vocab_size it has the
        largest that the default can be.
        """
        shape = target.model_dump(include=set(DecoderConfig.model_fields)) | options.model_dump()
        shape |= {
            "rope": target.rope,
            "intermediate_size": target.head_width,
            "num_hidden_layers": 1,
            "target_hidden_size": target.hidden_size,
            "draft_vocab_size": options.draft_vocab_size
            or min(target.vocab_size, MOST_DRAFT_TOKENS),
        }
        return cls(**shape, taps=taps or target.default_taps)


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """A folder's config as a dict; a byte order mark is no fault. Raises MissingInputError,
    CorruptError, MismatchError.
    """
    path = Path(folder) / name
    if path.with_name("adapter_config.json").exists():
        what = f"{folder} holds an adapter (adapter_config.json), which not every loader adds"
        raise MismatchError(what, "merge it into its model, and move that file")
    hint = "give a folder in Hugging Face's form (config.json, *.safetensors)"
    if not path.exists():
        raise MissingInputError(f"{folder} has no {name}", hint)
    if not path.is_file():
        raise CorruptError(f"{path} is no file", hint)
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is not JSON: {error}", RESTORE_CONFIG) from error
    if not isinstance(config, dict):
        raise CorruptError(f"{path} is not a JSON object", RESTORE_CONFIG)
    return config


# What a config without rope_theta means to EAGLE's trainer and to every engine.
EAGLE_ROPE = RopeConfig()


def check_head(config: HeadConfig, target: TargetShape, target_lm_head_sha256: str) -> None:
    """Raise one MismatchError that names all of `match_faults`, if there are any."""
    refuse("the head does not fit this target", match_faults(config, target, target_lm_head_sha256))


def refuse(what: object, faults: Sequence[MismatchError]) -> None:
    """Raise one MismatchError that names all faults, if there are any."""
    if faults:
        raise MismatchError(f"{what}: " + "; ".join(fault.what for fault in faults), faults[0].hint)


def match_faults(
    config: HeadConfig, target: TargetShape, target_lm_head_sha256: str
) -> list[MismatchError]:
    """Everything about the head that cannot be right on this target."""
    faults = shape_faults(config, target)
    trained_with = config.target_lm_head_sha256
    if trained_with and trained_with != target_lm_head_sha256:
        what = f"the head was trained against the lm_head {trained_with[:12]}, this target's is "
        hint = "give the target that the features were captured from, or capture and train again"
        faults.append(MismatchError(what + target_lm_head_sha256[:12], hint))
    return faults + rope_faults(config, target)


def shape_faults(config: HeadConfig, target: TargetShape) -> list[MismatchError]:
    """Where the head cannot be run on this target at all."""
    V, H, last = config.vocab_size, config.target_hidden_size, max(config.taps)
    faults = {
        f"the head's target has a vocabulary of {V}, this one {target.vocab_size}": (
            target.vocab_size != V
        ),
        f"the head's target has hidden size {H}, this one {target.hidden_size}": (
            target.hidden_size != H
        ),
        f"the head taps layer {last}, the target has {target.num_hidden_layers} layers": (
            target.num_hidden_layers <= last
        ),
    }
    hint = "serve the head with the target that it was trained on"
    return [MismatchError(what, hint) for what, is_wrong in faults.items() if is_wrong]


def rope_faults(config: HeadConfig, target: TargetShape) -> list[MismatchError]:
    """A head with another rotary embedding than its target, unless it says `own_rope`. A plain base
    of 10000 passes: heads without rope_theta, EAGLE's own too, were trained with it.
    """
    if (
        config.own_rope
        or same_rotation(config.rope, target.rope)
        or same_rotation(config.rope, EAGLE_ROPE)
    ):
        return []
    what = (
        f"rotary embedding differs: the head's is {spelled(config.rope)}, the target's "
        f"{spelled(target.rope)}"
    )
    hint = (
        "write what the head was trained with into its config, as rope_theta and rope_scaling; if "
        'it was trained with just this, write "own_rope": true'
    )
    return [MismatchError(what, hint)]


def same_rotation(one: RopeConfig, other: RopeConfig) -> bool:
    """Whether two turn alike: a scaling that is not in use, or scales by 1, does not count."""
    one, other = (
        RopeConfig(theta=rope.theta) if rope.factor == 1.0 else rope for rope in (one, other)
    )
    return one.to_hf() == other.to_hf()


def spelled(rope: RopeConfig) -> str:
    """As its config.json would say it."""
    scaling = rope.to_hf()["rope_scaling"]
    return f"rope_theta {rope.theta:g}" + (f" with rope_scaling {scaling}" if scaling else "")
