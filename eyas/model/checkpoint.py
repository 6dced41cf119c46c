"""Draft heads on disk, read in three forms.

    form     found by                  layer        tapped layers are written as
    eyas     eyas_head.json            midlayer.*   after_layer: outputs of these layers
    sglang   config.json, flat         midlayer.*   eagle_aux_hidden_state_layer_ids in
             (dialects.PROJECTS)                    eagle_config: outputs of these layers
    vllm     config.json with          layers.0.*   eagle_aux_hidden_state_layer_ids at top level:
             speculators_model_type                 the residual stream ENTERING layer i, so tap + 1

Either name of the layer is read in every form, with or without `model.` before it. A head becomes a
HeadConfig and its tensors under EAGLE's names; what our Head would compute otherwise than meant is
refused by name. `dialects` judges the config, `forms` writes.

Letters: H hidden size, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from eyas.errors import CorruptError, MismatchError
from eyas.model.arrays import Array, nonfinite
from eyas.model.config import (
    HeadConfig,
    RopeConfig,
    Taps,
    TargetShape,
    given,
    head_dim_of,
    in_words,
    read_config,
    refuse,
)
from eyas.model.dialects import (
    CONFIG_JSON,
    EMBED_TOKENS,
    EMBED_TOKENS_SHA256,
    FLAGS,
    FLOATS,
    FORMAT,
    HEAD_JSON,
    INV_FREQ,
    LAYER,
    LAYER_IDS,
    LM_HEAD,
    LM_HEAD_SHA256,
    MAPS,
    MODEL,
    OLD_FC_NORM,
    OLD_NORMS,
    OWN_ROPE,
    SECTIONS,
    SPECULATORS_LAYER,
    Checkpoint,
    Form,
    decisions,
    fed_back,
    setting_faults,
    uses_window,
)
from eyas.model.weights import array_sha256, read_arrays

ANEW = "train or download the head again"
RESTORE = "restore it from its source, or export the head again"

log = logging.getLogger(__name__)


def read_head(
    folder: str | Path, target: TargetShape | None = None
) -> tuple[HeadConfig, dict[str, Array]]:
    """A head of any form: its config, and its tensors by EAGLE's names in their stored dtype, d2t
    int64 and t2d bool.

    target: needed only by heads that do not say which layers they tap: they tap its default ones.
    The maps are always there. `embed_tokens.weight` [V, H] is there if the checkpoint holds
    embeddings of its own; `lm_head.weight` is not if the checkpoint, of a full vocabulary, has
    none: it is the target's. Raises MissingInputError, CorruptError, and MismatchError for whatever
    our Head would compute otherwise than meant.
    """
    checkpoint = open_checkpoint(folder)
    read = judged_head(folder, checkpoint, target)
    for decision in decisions(checkpoint):
        log.warning("%s: %s", folder, decision)
    return read


def judged_head(
    folder: str | Path, checkpoint: Checkpoint, target: TargetShape | None = None
) -> tuple[HeadConfig, dict[str, Array]]:
    """What `read_head` makes of an open checkpoint."""
    refuse(folder, setting_faults(checkpoint))
    config = head_config(checkpoint, target)
    tensors = own_tensors(checkpoint, config)
    values = [MismatchError(what, ANEW) for what in nonfinite(checkpoint.all_tensors)]
    refuse(folder, [*tensor_faults(config, tensors), *values, *embedding_faults(checkpoint)])
    maps = {"d2t": tensors["d2t"].astype(np.int64), "t2d": tensors["t2d"].astype(bool)}
    return config, {**tensors, **maps}


# Step by step; `check` goes the same way and collects what `read_head` raises


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Recognise a head's form and read it without judging. Raises MissingInputError, CorruptError,
    MismatchError.
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
        for name, tensor in read_arrays(folder, pickled=True).items()
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
    tensors = {
        LAYER + name.removeprefix(SPECULATORS_LAYER)
        if name.startswith(SPECULATORS_LAYER)
        else OLD_NORMS.get(name, name): tensor
        for name, tensor in stored.items()
    }
    if len(tensors) != len(stored):
        raise MismatchError(
            f"{folder} holds two layers, {LAYER}* and {SPECULATORS_LAYER}*", "delete the wrong one"
        )
    layer = LAYER if any(name.startswith(LAYER) for name in stored) else SPECULATORS_LAYER
    return Checkpoint(form, settings, tensors, embed_tokens, layer)


def check_sections(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Raise CorruptError for a part of a config that is not of its JSON type."""
    for key, kind in SECTIONS.items():
        found = settings.get(key)
        if found is not None and not isinstance(found, kind):
            what = (
                f"{folder}: {key} in the config is {found!r:.64}, not a JSON "
                f"{'list' if kind is list else 'object'}"
            )
            raise CorruptError(what, RESTORE)
        if isinstance(found, dict):
            check_sections(folder, found)


def head_config(checkpoint: Checkpoint, target: TargetShape | None = None) -> HeadConfig:
    """The settings of any form as ours. Raises MismatchError for what is missing or unclear."""
    settings, layer = checkpoint.settings, checkpoint.layer_settings
    try:
        if checkpoint.form == "eyas":
            return HeadConfig.model_validate({**settings, "taps": settings["taps"]["after_layer"]})
        return HeadConfig(
            hidden_size=layer["hidden_size"],
            intermediate_size=layer["intermediate_size"],
            num_hidden_layers=1,
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=given(layer, "num_key_value_heads", layer["num_attention_heads"]),
            head_dim=head_dim_of(layer),
            vocab_size=layer["vocab_size"],
            rms_norm_eps=given(layer, "rms_norm_eps", 1e-6),
            max_position_embeddings=given(layer, "max_position_embeddings", 2048),
            rope=RopeConfig.from_hf(layer),
            draft_vocab_size=given(settings, "draft_vocab_size", layer["vocab_size"]),
            target_hidden_size=given(settings, "target_hidden_size", layer["hidden_size"]),
            taps=_read_taps(settings, target),
            target_lm_head_sha256=given(settings, LM_HEAD_SHA256, ""),
            norm_before_residual=checkpoint.is_set("norm_before_residual"),
            norm_before_fc=checkpoint.is_set("norm_before_fc"),
            fc_norm=checkpoint.is_set("fc_norm") or checkpoint.is_set(OLD_FC_NORM),
            norm_output=checkpoint.is_set("norm_output") and fed_back(checkpoint) is True,
            own_rope=given(settings, OWN_ROPE, False),
            sliding_window=(layer.get("sliding_window") or None) if uses_window(layer) else None,
        )
    except KeyError as error:
        raise MismatchError(f"the head's config lacks {error}", RESTORE) from error
    except ValidationError as error:
        raise MismatchError(
            f"the head's config does not fit: {in_words(error)}", RESTORE
        ) from error


def _read_taps(settings: Mapping[str, Any], target: TargetShape | None) -> Taps:
    entering = settings.get(LAYER_IDS)
    outputs = (settings.get("eagle_config") or {}).get(LAYER_IDS)
    for listed in (entering, outputs):
        if not all(type(index) is int for index in listed or ()):
            raise MismatchError(
                f"{LAYER_IDS} is {listed!r:.64}: three numbers of layers are needed",
                RESTORE,
            )
    readings = {tuple(index - 1 for index in entering)} if entering else set()
    if outputs:
        as_inputs = tuple(index - 1 for index in outputs)
        if outputs[0] > 1 and not entering:
            readings.add(as_inputs)  # one of two: see `ambiguities`
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


def own_tensors(checkpoint: Checkpoint, config: HeadConfig) -> dict[str, Array]:
    """The head's own tensors: without embeddings that are the target's, and with maps that the file
    leaves out: both when W == V (identity), t2d when there is d2t.
    """
    V, W = config.vocab_size, config.draft_vocab_size
    tensors = dict(checkpoint.tensors)
    if "d2t" not in tensors and "t2d" not in tensors and W == V:
        tensors["d2t"] = np.zeros(W, np.int64)
    if "t2d" not in tensors and "d2t" in tensors and not map_faults(tensors["d2t"], None, V, W):
        tensors["t2d"] = np.zeros(V, bool)
        tensors["t2d"][np.arange(W) + tensors["d2t"]] = True
    if checkpoint.embed_tokens is not None and not checkpoint.settings.get(EMBED_TOKENS_SHA256):
        tensors[EMBED_TOKENS] = checkpoint.embed_tokens
    return tensors


def tensor_faults(config: HeadConfig, tensors: Mapping[str, Array]) -> list[MismatchError]:
    """Every tensor that is missing, unknown, of another shape or kind, and maps that are no map."""
    V, W, H = config.vocab_size, config.draft_vocab_size, config.hidden_size
    expected = expected_shapes(config)
    # what a head may have of its own or use of its target's
    optional = {EMBED_TOKENS: (V, H), **({LM_HEAD: (V, H)} if W == V else {})}
    known = expected | optional
    faults = [
        MismatchError(f"the tensor {name} is missing", RESTORE)
        for name in expected
        if name not in tensors and name not in optional
    ]
    flag_of = {name: flag for flag, names in FLAGS.items() for name in names}
    for name, tensor in tensors.items():
        if name in flag_of and name not in known:
            flag = flag_of[name]
            what = f"the tensor {name} is there although {flag} is not set"
            hint = f'write "{flag}": true if the head was trained with it, or delete the tensor'
        elif name not in known:
            what = f"the tensor {name} is none of an EAGLE-3 head's"
            hint = "it belongs to a variant that is not supported"
        elif tuple(tensor.shape) != known[name]:
            what = f"{name} has shape {tuple(tensor.shape)}, the config asks for {known[name]}"
            hint = RESTORE
        elif name not in MAPS and tensor.dtype not in FLOATS:
            what = f"{name} is {tensor.dtype}: a plain float is needed"
            hint = "give a head that is not quantised"
        else:
            continue
        faults.append(MismatchError(what, hint))
    if "d2t" in tensors:
        faults += map_faults(tensors["d2t"], tensors.get("t2d"), V, W)
    return faults


def embedding_faults(checkpoint: Checkpoint) -> list[MismatchError]:
    """Embeddings that are not those that the config says they are."""
    said = checkpoint.settings.get(EMBED_TOKENS_SHA256)
    if checkpoint.embed_tokens is None or said in (None, array_sha256(checkpoint.embed_tokens)):
        return []
    what = f"{EMBED_TOKENS} are not the embeddings that the config names by {EMBED_TOKENS_SHA256}"
    hint = (
        f"restore the file, or delete {EMBED_TOKENS_SHA256} if the head was trained with "
        "embeddings of its own"
    )
    return [MismatchError(what, hint)]


def map_faults(d2t: Array, t2d: Array | None, V: int, W: int) -> list[MismatchError]:
    """What is wrong with the offsets d2t [W], in any order, and with the mask t2d [V] if given."""
    if d2t.shape != (W,) or d2t.dtype.kind not in "iu":
        what = f"d2t is {d2t.dtype} {tuple(d2t.shape)}: whole offsets [{W}] are needed"
        return [MismatchError(what, "make it from the counts again")]
    if W == V and d2t.any():
        what = "d2t is not the identity although W == V: engines ignore it then"
        return [MismatchError(what, "reorder lm_head instead")]
    ids_W = np.arange(W) + d2t.astype(np.int64)
    if ((ids_W < 0) | (ids_W >= V)).any():
        what = f"d2t leads to ids {ids_W.min()} to {ids_W.max()}, out of the target's 0 to {V - 1}"
        hint = "d2t holds offsets, not ids: target id = draft id + d2t[draft id]"
        return [MismatchError(what, hint)]
    num_ids = len(set(ids_W.tolist()))
    if num_ids != W:
        what = f"d2t leads {W - num_ids} draft tokens to a token taken already"
        return [MismatchError(what, "make it again")]
    mask_V = np.zeros(V, bool)
    mask_V[ids_W] = True
    if t2d is not None and not np.array_equal(t2d.astype(bool), mask_V):
        what = "t2d is not the mask of the ids that d2t leads to"
        return [MismatchError(what, "delete t2d: it is made from d2t")]
    return []


def expected_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a head, by EAGLE's name."""
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    V, W, D = config.vocab_size, config.draft_vocab_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H)}
    for flag, names in FLAGS.items():  # together they norm the three streams
        if getattr(config, flag) and names:
            shapes |= dict.fromkeys(names, (3 * H // len(names),))
    layer = {
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (H,)),
        "self_attn.q_proj": (q, 2 * H),
        "self_attn.k_proj": (kv, 2 * H),
        "self_attn.v_proj": (kv, 2 * H),
        "self_attn.o_proj": (H, q),
        "mlp.gate_proj": (I, H),
        "mlp.up_proj": (I, H),
        "mlp.down_proj": (H, I),
    }
    shapes |= {f"{LAYER}{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (H,), LM_HEAD: (W, H), "d2t": (W,), "t2d": (V,)}
