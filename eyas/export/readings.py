"""The ways in which a head can be read: as it declares itself, and as published heads are misread.

The weights that fit one reading draft badly by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.model.config import EAGLE_ROPE, HeadConfig, Taps, TargetShape, same_rotation
from eyas.model.dialects import EMBED_TOKENS, FC_NORMS, INPUT_NORM

DECLARED = "as declared"

HeadTensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class HeadReading:
    """A way to read a head; `tensors` by EAGLE's names.

    says: what to do where it is the right one. later: slot t takes the feature of token t + later.
    embed_lag: as in `operators.chain`. dtype: what it is computed in. is_loss: what counts is that
    it accepts less.
    """

    name: str
    config: HeadConfig
    tensors: HeadTensors
    says: str = ""
    later: int = 0
    embed_lag: int = 0
    dtype: torch.dtype = torch.float32
    is_loss: bool = False


def misreadings(
    config: HeadConfig, tensors: HeadTensors, target: TargetShape
) -> Iterator[HeadReading]:
    """The other ways to read a head: of layers, flags, rotary embedding, embeddings and d2t."""
    yield from other_taps(config, tensors, target)
    yield from other_flags(config, tensors)
    for name, rope in {
        "the target's rotary embedding": target.rope,
        "rope_theta 10000": EAGLE_ROPE,
    }.items():
        if not same_rotation(rope, config.rope):
            yield HeadReading(name, config.model_copy(update={"rope": rope}), tensors)
    if EMBED_TOKENS in tensors:
        shared = {name: tensor for name, tensor in tensors.items() if name != EMBED_TOKENS}
        yield HeadReading("the target's embeddings", config, shared)
    ids_W = tensors["d2t"]
    if (
        config.draft_vocab_size < config.vocab_size
        and len(set(ids_W.tolist())) == len(ids_W)
        and ids_W.min() >= 0
    ):
        offsets_W = ids_W - torch.arange(len(ids_W))
        t2d_V = torch.zeros_like(tensors["t2d"]).index_fill(0, ids_W, True)
        yield HeadReading("d2t as ids", config, tensors | {"d2t": offsets_W, "t2d": t2d_V})


def other_taps(
    config: HeadConfig, tensors: HeadTensors, target: TargetShape
) -> Iterator[HeadReading]:
    """Layers by another convention: listed outputs taken for inputs, and the other way round."""
    one, two, three = config.taps
    ways: dict[str, Taps] = {
        "layers one earlier (outputs taken for inputs)": (one - 1, two - 1, three - 1),
        "layers one later (inputs taken for outputs)": (one + 1, two + 1, three + 1),
        "the target's default layers": target.default_taps,
    }
    for name, taps in ways.items():
        if taps != config.taps and taps[0] >= 0 and taps[2] < target.num_hidden_layers:
            yield HeadReading(name, config.model_copy(update={"taps": taps}), tensors)


def other_flags(config: HeadConfig, tensors: HeadTensors) -> Iterator[HeadReading]:
    """Each flag that needs no weights the other way round; each norm before fc left out."""
    for flag in ("norm_before_residual", "norm_output"):
        is_set = getattr(config, flag)
        name = f"{flag} {'off' if is_set else 'on'}"
        yield HeadReading(name, config.model_copy(update={flag: not is_set}), tensors)
    for flag, norms in {"norm_before_fc": (INPUT_NORM,), "fc_norm": FC_NORMS}.items():
        if getattr(config, flag):
            kept = {name: tensor for name, tensor in tensors.items() if name not in norms}
            yield HeadReading(f"{flag} off", config.model_copy(update={flag: False}), kept)
