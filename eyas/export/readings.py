"""The readings of a head: as it declares itself, and as published heads are misread, one fault at a
time. Only the right reading drafts well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.model.config import EAGLE_ROPE, HeadConfig, Taps, same_rotation
from eyas.model.dialects import EMBED_TOKENS, FLAGS, LAYER, LM_HEAD
from eyas.operators.vocab import TargetVocabulary

DECLARED = "as declared"
# median cosine of lm_head's rows and the target's rows that they started as; else it is near 0.2
LEAST_ALIKE = 0.5
ROWS_AT_ONCE = 1024
CONFIG = "correct config.json, or train with what it says"
FILE = "the file is written so: mend what wrote it and export again, or convert the tensors"

HeadTensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class HeadReading:
    """A way to read a head. tensors: by EAGLE's names. hint: what to do if it is the right one."""

    name: str
    config: HeadConfig
    tensors: HeadTensors
    hint: str = CONFIG


def misreadings(
    config: HeadConfig, tensors: HeadTensors, vocabulary: TargetVocabulary
) -> Iterator[HeadReading]:
    """Other readings of layers, flags, rotary embedding, embeddings and d2t."""

    def other(name: str, **changes: object) -> HeadReading:
        return HeadReading(name, config.model_copy(update=changes), tensors)

    target, ids_W = vocabulary.config, tensors["d2t"]
    one, two, three = config.taps
    layers: dict[str, Taps] = {
        "layers one earlier (outputs taken for inputs)": (one - 1, two - 1, three - 1),
        "layers one later (inputs taken for outputs)": (one + 1, two + 1, three + 1),
        "the target's default layers": target.default_taps,
    }
    for name, taps in layers.items():
        if taps != config.taps and taps[0] >= 0 and taps[2] < target.num_hidden_layers:
            yield other(name, taps=taps)
    for flag, norms in FLAGS.items():  # a flag without weights is turned on as well as off
        if (is_set := getattr(config, flag)) or not norms:
            changed = config.model_copy(update={flag: not is_set})
            kept = {name: weight for name, weight in tensors.items() if name not in norms}
            name = f"{flag} {'off' if is_set else 'on'}"
            yield HeadReading(name, changed, kept if norms else tensors)
    ropes = {"the target's rotary embedding": target.rope, "rope_theta 10000": EAGLE_ROPE}
    for name, rope in ropes.items():
        if not same_rotation(rope, config.rope):
            yield other(name, rope=rope)
    if EMBED_TOKENS in tensors:
        shared = {name: tensor for name, tensor in tensors.items() if name != EMBED_TOKENS}
        yield HeadReading("the target's embeddings", config, shared)
    is_injective = len(set(ids_W.tolist())) == len(ids_W) and ids_W.min() >= 0
    if config.draft_vocab_size < config.vocab_size and is_injective:
        yield HeadReading("d2t as ids", config, tensors | mapped(tensors, ids_W))


def other_files(
    config: HeadConfig, tensors: HeadTensors, vocabulary: TargetVocabulary
) -> Iterator[HeadReading]:
    """Tensors written otherwise: the layer's two inputs swapped; d2t by the target's rows most like
    lm_head's [W, H]; the target's own rows, which engines take if draft_vocab_size is null.
    """
    names = [f"{LAYER}self_attn.{letter}_proj.weight" for letter in "qkv"]
    turned = {name: tensors[name].roll(config.hidden_size, dims=1) for name in names}
    yield HeadReading("the feature before the embedding", config, tensors | turned, FILE)
    own, rows_VH = tensors[LM_HEAD].float(), F.normalize(vocabulary.lm_head.float())
    best = [(part @ rows_VH.T).max(-1) for part in torch.split(F.normalize(own), ROWS_AT_ONCE)]
    alike_W, alike_ids_W = (torch.cat(of) for of in zip(*best, strict=True))
    found = mapped(tensors, alike_ids_W)
    if alike_W.median() >= LEAST_ALIKE and not torch.equal(found["d2t"], tensors["d2t"]):
        yield HeadReading("d2t by the rows of lm_head", config, tensors | found, FILE)
    lent_WH = vocabulary.lm_head[tensors["d2t"] + torch.arange(len(own))]
    if not torch.equal(lent_WH, own):
        yield HeadReading("the target's lm_head", config, tensors | {LM_HEAD: lent_WH}, FILE)


def mapped(tensors: HeadTensors, ids_W: Tensor) -> HeadTensors:
    """d2t and t2d of other target ids."""
    t2d = torch.zeros_like(tensors["t2d"]).index_fill(0, ids_W, True)
    return {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": t2d}
