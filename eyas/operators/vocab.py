"""The vocabularies of target and draft, the target's embedding and output matrices, and the shape
of any target.

For a target that our own decoder does not run, transformers builds the model without memory, only
to name its parts: nothing is run and no layer is loaded.

Letters: V target vocabulary, W draft vocabulary, Ht target hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from eyas.errors import ConfigError, MismatchError
from eyas.model.architecture import TargetConfig
from eyas.model.arrangement import arranged, published_names
from eyas.model.arrays import Array, refuse_nonfinite
from eyas.model.config import RopeConfig, TargetShape, end_token_ids, read_config
from eyas.model.weights import array_sha256, read_arrays, read_shapes
from eyas.operators.tensors import tensor_of

# Of `TargetVocabulary.best`:
COLUMNS_AT_ONCE, BLOCK = 8192, 16  # tokens: of a product, and of what is looked at as one
# How far below the best a logit in bf16 may be, of 1 + itself: each of the two may be off by 2^-9,
# twice that is to be sure.
SHORT_OF_BEST = 2**-7
MOST_BLOCKS = 8  # for each row; more are equal logits, as of a hidden state of zeros
# SpecForge's head for DeepSeek-V3 has 8 key and value heads, as Llama 3 and Qwen3 have
MLA_HEAD_DIM, MLA_KEY_VALUE_HEADS = 128, 8
NORM_EPSILONS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "layernorm_epsilon",
)
MATRIX_ALONE = "a head is trained against lm_head's matrix, a scale and a soft cap alone"
ANOTHER = (
    "eyas captures decoder-only language models that the installed transformers knows, "
    "without code of their own"
)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Scores or logits cut softly, as Gemma 2 does: cap * tanh(x / cap)."""
    return x if cap is None else cap * torch.tanh(x / cap)


def draft_vocabulary(counts_V: Tensor, draft_vocab_size: int) -> tuple[Tensor, Tensor]:
    """Keep the `draft_vocab_size` most counted tokens, of equal counts the lower id; ids ascending.

    counts_V: int64 [V]. Returns d2t_offset int64 [W] (target id = draft id + d2t_offset[draft id])
    and t2d_mask bool [V]. Raises ConfigError when the target has fewer tokens than are asked for.
    """
    V, W = len(counts_V), draft_vocab_size
    if not 0 < W <= V:
        raise ConfigError(
            f"a draft vocabulary of {W} tokens does not fit a target of {V}", f"choose 1 to {V}"
        )
    kept_W = counts_V.sort(descending=True, stable=True).indices[:W].sort().values
    t2d_mask = torch.zeros(V, dtype=torch.bool)
    t2d_mask[kept_W] = True
    return kept_W - torch.arange(W), t2d_mask


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """What a head borrows from its target: embed_tokens [V, Ht] and lm_head [V, Ht], both frozen.

    lm_head includes the scale of the logits; lm_head_sha256 is of what is stored. short_lm_head:
    lm_head in bf16, where that is exact, on a CPU that multiplies it.
    """

    config: TargetShape
    embed_tokens: Tensor
    lm_head: Tensor
    lm_head_sha256: str
    short_lm_head: Tensor | None = None

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> TargetVocabulary:
        """Read the two matrices of a Hugging Face folder, and none of its layers.

        Raises MissingInputError, CorruptError, MismatchError.
        """
        config = target_shape(folder)
        arrays = (
            own_matrices(folder, config)
            if isinstance(config, TargetConfig)
            else transformers_matrices(folder, config)
        )
        matrices = {"embed_tokens": arrays[0], "lm_head": arrays[1]}
        if arrays[0] is arrays[1]:
            del matrices["lm_head"]
        refuse_nonfinite(folder, matrices)
        sha256 = array_sha256(arrays[1])
        embed_tokens, stored = map(tensor_of, arrays)
        lm_head, short = stored.to(dtype), None
        if config.logit_scale != 1.0:
            lm_head = lm_head * config.logit_scale
        elif stored.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            short = stored
        return cls(config, embed_tokens.to(dtype), lm_head, sha256, short)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """What the target says after last hidden states [R, Ht]: its logits [R, V]."""
        return self.capped(hidden_RH.to(self.lm_head.dtype) @ self.lm_head.T)

    def capped(self, logits: Tensor) -> Tensor:
        """lm_head's output with the soft cap of Gemma 2, which changes no argmax."""
        return capped(logits, self.config.logit_softcap)

    def best(self, hidden_RH: Tensor) -> Tensor:
        """The argmax of the target's logits in lm_head's precision, int64 [R]; of equal logits the
        smallest id wins.

        hidden_RH: last hidden states as stored. Where these and lm_head are bf16, on a CPU,
        products in bf16 find the tokens that can be the best, and only their logits are computed
        in full: a quarter of the time.
        """
        if self.short_lm_head is not None and hidden_RH.dtype == torch.bfloat16:
            row_N, block_N = self._blocks_of_best(hidden_RH, self.short_lm_head)
            if len(row_N) <= MOST_BLOCKS * len(hidden_RH):
                return self._best_of(hidden_RH.to(self.lm_head.dtype), row_N, block_N)
        hidden_RH = hidden_RH.to(self.lm_head.dtype)
        best_R = hidden_RH.new_full((len(hidden_RH),), -math.inf)
        choice_R = torch.zeros(len(hidden_RH), dtype=torch.int64, device=hidden_RH.device)
        for first in range(0, len(self.lm_head), COLUMNS_AT_ONCE):
            part_CH = self.lm_head[first : first + COLUMNS_AT_ONCE]
            values_R, places_R = (hidden_RH @ part_CH.T).max(-1)
            choice_R = torch.where(values_R > best_R, places_R + first, choice_R)
            best_R = torch.maximum(values_R, best_R)
        return choice_R

    @staticmethod
    def _blocks_of_best(hidden_RH: Tensor, short_VH: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs of row and block of BLOCK tokens that can hold the row's best token, int64 [N]
        each.

        Sums of a bf16 product are float32: a logit is off by its own rounding, 2^-9 of it.
        """
        by_column, most = hidden_RH.T.contiguous(), []
        for part_CH in torch.split(short_VH, COLUMNS_AT_ONCE):
            logits_CR = F.pad(
                part_CH @ by_column, (0, 0, 0, -len(part_CH) % BLOCK), value=-math.inf
            )
            most.append(logits_CR.view(-1, BLOCK, len(hidden_RH)).amax(1))
        most_DR = torch.cat(most).float()
        most_R = most_DR.amax(0)
        block_N, row_N = (
            (most_DR >= most_R - SHORT_OF_BEST * (1 + most_R.abs())).nonzero().unbind(1)
        )
        return row_N, block_N

    def _best_of(self, hidden_RH: Tensor, row_N: Tensor, block_N: Tensor) -> Tensor:
        """As `best`, among these blocks of each row; D tokens of a block."""
        V, R = len(self.lm_head), len(hidden_RH)
        # a last block that is not whole repeats the last token
        ids_ND = (block_N[:, None] * BLOCK + torch.arange(BLOCK)).clamp(max=V - 1)
        logits_ND = torch.bmm(self.lm_head[ids_ND], hidden_RH[row_N].unsqueeze(2)).squeeze(2)
        best_N, place_N = logits_ND.max(-1)
        best_R = best_N.new_full((R,), -math.inf).scatter_reduce(0, row_N, best_N, "amax")
        ids_N = ids_ND.gather(1, place_N.unsqueeze(1)).squeeze(1)
        ids_N = ids_N.where(best_N == best_R[row_N], V)
        return ids_N.new_full((R,), V).scatter_reduce(0, row_N, ids_N, "amin")

    def to(self, device: str) -> TargetVocabulary:
        """The same on another device."""
        return replace(
            self,
            embed_tokens=self.embed_tokens.to(device),
            lm_head=self.lm_head.to(device),
            short_lm_head=self.short_lm_head if device == "cpu" else None,
        )


def own_matrices(folder: str | Path, config: TargetConfig) -> tuple[Array, Array]:
    """embed_tokens and lm_head [V, Ht], as stored, of a target that our own decoder runs."""
    embed_name = "model.embed_tokens.weight"
    head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
    found = read_arrays(folder, published_names(embed_name) | published_names(head_name))
    tensors = arranged(config, found)
    if not {embed_name, head_name} <= tensors.keys():
        raise MismatchError(
            f"{folder} lacks {embed_name} or {head_name}", "restore the checkpoint from its source"
        )
    return tensors[embed_name], tensors[head_name]


# Any target, through transformers


def target_shape(folder: str | Path) -> TargetShape:
    """A target's shape: a TargetConfig where our own decoder runs it. Raises MissingInputError,
    CorruptError, MismatchError.
    """
    try:
        return TargetConfig.from_folder(folder)
    except MismatchError:
        return shape_of(transformers_config(folder), folder)


def transformers_config(folder: str | Path) -> Any:
    """transformers' config of a folder, with nothing downloaded and no code of the model's own run.
    Raises MismatchError.
    """
    stated = read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError, StrictDataclassError) as error:
        what = (
            f"{folder} is a {stated.get('model_type')!r} model, which the installed "
            "transformers does not load"
        )
        raise MismatchError(f"{what}: {first_line(error)}", ANOTHER) from error
    auto_class(config)
    return config


def auto_class(config: Any) -> Any:
    """What of transformers loads such a model; of one that sees images too, the decoder is used.
    Raises MismatchError for what is no language model.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise MismatchError(
        f"transformers has no language model of the {config.model_type!r} kind", ANOTHER
    )


def shape_of(config: Any, folder: str | Path) -> TargetShape:
    """The shape in a transformers config. Raises MismatchError for what is no decoder of layers."""
    text = usual_layer(config.get_text_config(decoder=True))
    given: dict[str, Any] = {
        name: getattr(text, name, None)
        for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    }
    if not all(isinstance(size, int) for size in given.values()):
        lacking = ", ".join(name for name, size in given.items() if not isinstance(size, int))
        raise MismatchError(
            f"{folder}: the config of a {config.model_type!r} model tells no {lacking}", ANOTHER
        )
    hidden: int = given["hidden_size"]
    ends = getattr(config, "eos_token_id", None)  # Gemma 3's are not in the part for text
    return TargetShape(
        **given,
        **head_attention(text, hidden),
        family=config.model_type,
        intermediate_size=mlp_width(text, hidden),
        rms_norm_eps=next(
            (eps for name in NORM_EPSILONS if (eps := getattr(text, name, None)) is not None), 1e-6
        ),
        max_position_embeddings=_number(text, "max_position_embeddings") or 2048,
        rope=head_rope(getattr(text, "rope_parameters", None)),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=end_token_ids(folder, text.eos_token_id if ends is None else ends),
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        logit_scale=logit_scale(text),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
    )


def usual_layer(text: Any) -> Any:
    """The config of the kind of layer that the target has most of: Gemma 4's full attention has
    heads of another size than its windows.
    """
    if not getattr(text, "is_heterogeneous", False):
        return text
    sizes = "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
    kinds = [tuple(getattr(one, size, None) for size in sizes) for one in text.per_layer_config]
    return text.per_layer_config[kinds.index(max(kinds, key=kinds.count))]


def head_attention(text: Any, hidden: int) -> dict[str, int]:
    """Attention heads of a draft head for such a target: the target's own.

    A draft head has no compressed state as in MLA (DeepSeek, Kimi), where the target's numbers
    would mean 128 pairs of keys and values a token: it gets heads of the size of the target's
    values, as many as fill the width, and MLA_KEY_VALUE_HEADS.
    """
    if getattr(text, "kv_lora_rank", None):
        size = _number(text, "v_head_dim") or MLA_HEAD_DIM
        heads = max(1, hidden // size)
        keys = math.gcd(heads, MLA_KEY_VALUE_HEADS)
        return {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": size}
    heads = getattr(text, "num_attention_heads", None) or max(1, hidden // 64)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": _number(text, "num_key_value_heads") or heads,
        "head_dim": _number(text, "head_dim") or hidden // heads,
    }


def mlp_width(text: Any, hidden: int) -> int:
    """The MLP of a draft head for such a target: its dense MLP's, or what its experts have together
    for one token, whichever is more.

    gpt-oss and Mixtral write an expert's width where others write the dense one.
    """
    dense = _number(text, "intermediate_size") or 4 * hidden
    expert = _number(text, "moe_intermediate_size") or dense
    at_work = _number(text, "num_experts_per_tok") or 0
    return max(dense, expert * (at_work + (_number(text, "n_shared_experts") or 0)))


def head_rope(parameters: Any) -> RopeConfig:
    """The rotary embedding of a head: the target's own, or its base alone where heads lack more.

    parameters: transformers' `rope_parameters`; of several kinds of layers, full attention's.
    """
    if not parameters:
        return RopeConfig()
    by_kind = [value for value in parameters.values() if isinstance(value, dict)]
    own = parameters.get("full_attention") or (by_kind[0] if by_kind else parameters)
    if own.get("partial_rotary_factor") in (None, 1):
        try:
            return RopeConfig.from_hf({"rope_parameters": own})
        except MismatchError:
            pass
    theta = own.get("rope_theta")
    return RopeConfig(theta=theta) if theta else RopeConfig()


def logit_scale(text: Any) -> float:
    """The factor of lm_head's output: Cohere's `logit_scale` over Granite's `logits_scaling`."""
    return float(getattr(text, "logit_scale", None) or 1.0) / float(
        getattr(text, "logits_scaling", None) or 1.0
    )


def transformers_matrices(folder: str | Path, shape: TargetShape) -> tuple[Array, Array]:
    """embed_tokens and lm_head [V, Ht] as stored. Raises what `matrix_names` raises."""
    embed_name, head_name = matrix_names(folder, shape)
    tensors = read_arrays(folder, {embed_name, head_name})
    return tensors[embed_name], tensors[head_name]


def matrix_names(folder: str | Path, shape: TargetShape) -> tuple[str, str]:
    """What a checkpoint calls embed_tokens and lm_head; no tensor is read. Raises MismatchError,
    MissingInputError, CorruptError.

    They are found by their shape and the model's own names for them; transformers may rename
    tensors while it loads them, so one of the two names may differ.
    """
    wanted = (shape.vocab_size, shape.hidden_size)
    found = sorted(name for name, size in read_shapes(folder).items() if size == wanted)
    embed_name, head_name = _names(transformers_config(folder))
    if embed_name not in found and len(rest := [name for name in found if name != head_name]) == 1:
        embed_name = rest[0]
    if shape.tie_word_embeddings and embed_name in found:
        head_name = embed_name
    if head_name not in found and len(rest := [name for name in found if name != embed_name]) == 1:
        head_name = rest[0]
    if not {embed_name, head_name} <= set(found):
        raise MismatchError(
            f"{folder} has no recognisable embeddings and lm_head of {wanted}: the model calls "
            f"them {embed_name} and {head_name}, tensors of this shape are "
            f"{', '.join(found) or 'not there'}",
            "save the model by the installed transformers (save_pretrained), or restore the "
            "checkpoint from its source",
        )
    return embed_name, head_name


def _names(config: Any) -> tuple[str, str]:
    """What the model calls its embeddings and its lm_head. Raises MismatchError for one without, or
    with a bias.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    owners = {id(module): name for name, module in model.named_modules()}
    found = [
        owners.get(id(module))
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    if None in found:
        raise MismatchError(f"{type(model).__name__} has no embeddings or no lm_head", ANOTHER)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise MismatchError(f"{type(model).__name__}: its lm_head has a bias", MATRIX_ALONE)
    return f"{found[0]}.weight", f"{found[1]}.weight"


def first_line(error: Exception) -> str:
    """What an exception of another library says, in brief."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _number(text: Any, name: str) -> int | None:
    """A whole number of a config; some keep a list with one for each layer."""
    value = getattr(text, name, None)
    return max(value) if isinstance(value, list) else value
