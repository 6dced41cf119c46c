"""The counterfactuals of `eyas check --why`: one table of what a trainer, converter or engine may
have done to a head. Each entry reads the head as if that had been done.

Letters: W draft vocabulary, V target vocabulary, H hidden size, D head dimension, X layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.export.readings import HeadReading, HeadTensors, misreadings
from eyas.model.config import RopeConfig, same_rotation
from eyas.model.dialects import FC_NORMS, INPUT_NORM, LAYER, LM_HEAD
from eyas.operators.rope import apply_rope, rotation
from eyas.operators.vocab import TargetVocabulary

# From the declared reading: `HeadReading`'s fields that differ, and of its tensors and config those
# that do. Nothing where the head has no such reading.
Change = Callable[[HeadReading, TargetVocabulary], dict[str, Any]]
QUERY, KEY, VALUE, OUTPUT = (f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo")
GATE, UP = (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
NORMS = {name: f"{LAYER}{name}.weight" for name in LAYER_NORMS} | {"norm": "norm.weight"}
LONGEST = 2048  # tokens, at which trainers cut conversations by default
# median cosine of lm_head's rows and the target's that they began as; of others it is some 0.2
LEAST_ALIKE = 0.5
ROWS_AT_ONCE = 1024

CONFIG = "correct config.json, or train with what it says"
FILE = "the file is written so: mend what wrote it and export again, or convert the tensors"
TRAINER = "it was trained so, and no engine serves it so: mend the trainer and train again"
PRECISION = "serve it in another precision"


def counterfactuals(declared: HeadReading, vocabulary: TargetVocabulary) -> Iterator[HeadReading]:
    """The head as every entry reads it, one at a time, the common misreadings first."""
    common = misreadings(declared.config, declared.tensors, vocabulary.config)
    found = [replace(one, says=CONFIG) for one in common]
    configs = [one.config for one in found if one.tensors is declared.tensors]
    for name, (says, change) in TABLE.items():
        fields = change(declared, vocabulary)
        if "config" in fields:
            fields["config"] = declared.config.model_copy(update=fields["config"])
        if "tensors" in fields:
            fields["tensors"] = declared.tensors | fields["tensors"]
        if fields and fields.get("config") not in configs:
            found.append(replace(declared, name=name, says=says, **fields))
    yield from found


# What an entry changes


def of_tensors(change: Callable[[HeadReading], HeadTensors]) -> Change:
    """Tensors that do not depend on the target."""
    return lambda declared, _: {"tensors": found} if (found := change(declared)) else {}


def tapped(stream: int, by: int) -> Change:
    """One stream of another layer."""

    def change(declared: HeadReading, vocabulary: TargetVocabulary) -> dict[str, Any]:
        taps = list(declared.config.taps)
        taps[stream] += by
        inside = 0 <= taps[stream] < vocabulary.config.num_hidden_layers
        return {"config": {"taps": tuple(taps)}} if inside else {}

    return change


def turned_by(theta: float) -> Change:
    """A plain rotary embedding of another base."""
    rope = RopeConfig(theta=theta)
    return lambda declared, _: (
        {} if same_rotation(rope, declared.config.rope) else {"config": {"rope": rope}}
    )


def streams(order: tuple[int, ...]) -> Change:
    """The three streams in another order, with their norms."""

    def change(declared: HeadReading) -> HeadTensors:
        tensors, found = declared.tensors, {}
        for name in {"fc.weight", INPUT_NORM} & tensors.keys():
            parts = tensors[name].chunk(3, dim=-1)
            found[name] = torch.cat([parts[one] for one in order], dim=-1)
        norms = [tensors[name] for name in FC_NORMS if name in tensors]
        return found | {n: norms[o] for n, o in zip(FC_NORMS, order, strict=True) if norms}

    return of_tensors(change)


def exchanged(one: str, other: str) -> Change:
    """Two tensors under each other's names."""
    return of_tensors(lambda it: {one: it.tensors[other], other: it.tensors[one]})


def weighed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """The weights of a norm, or without a name of every norm, changed."""
    return of_tensors(
        lambda declared: {
            one: change(weight)
            for one, weight in declared.tensors.items()
            if (one == name if name else weight.ndim == 1 and one.endswith(".weight"))
        }
    )


def in_heads(weight_RX: Tensor, declared: HeadReading) -> Tensor:
    """Rows of a projection [R, X] by head [R / D, D, X]."""
    return weight_RX.view(-1, declared.config.head_dim, weight_RX.shape[1])


def paired(*shape: int) -> Change:
    """Rows of each head in the order of `shape`, turned: rotary pairs as they may be stored."""

    def change(declared: HeadReading) -> HeadTensors:
        order = torch.arange(declared.config.head_dim).view(shape).T.flatten()
        names = QUERY, KEY
        return {n: in_heads(declared.tensors[n], declared)[:, order].flatten(0, 1) for n in names}

    return of_tensors(change)


def queries_at(by: int) -> Change:
    """Queries so many positions after their keys."""

    def change(declared: HeadReading) -> HeadTensors:
        queries_hXD = in_heads(declared.tensors[QUERY].float(), declared).transpose(1, 2)
        turn = rotation(declared.config.rope, declared.config.head_dim, torch.tensor(by))
        return {QUERY: apply_rope(queries_hXD, *turn).transpose(1, 2).flatten(0, 1)}

    return of_tensors(change)


def mapped(declared: HeadReading, ids_W: Tensor) -> dict[str, Any]:
    """d2t and t2d of other target ids."""
    d2t = ids_W - torch.arange(len(ids_W))
    if torch.equal(d2t, declared.tensors["d2t"]):
        return {}
    t2d = torch.zeros_like(declared.tensors["t2d"]).index_fill(0, ids_W, True)
    return {"tensors": {"d2t": d2t, "t2d": t2d}}


def rows_alike(declared: HeadReading, vocabulary: TargetVocabulary) -> dict[str, Any]:
    """The map by what the rows of lm_head began as: the target's rows that are most alike."""
    rows_VH = F.normalize(vocabulary.lm_head.float())
    parts = torch.split(F.normalize(declared.tensors[LM_HEAD].float()), ROWS_AT_ONCE)
    best = [(part @ rows_VH.T).max(-1) for part in parts]
    alike_W, ids_W = (torch.cat(of) for of in zip(*best, strict=True))
    return mapped(declared, ids_W) if alike_W.median() >= LEAST_ALIKE else {}


def target_rows(declared: HeadReading, vocabulary: TargetVocabulary) -> dict[str, Any]:
    """The target's own rows for lm_head."""
    own, d2t = declared.tensors[LM_HEAD].float(), declared.tensors["d2t"]
    rows_WH = vocabulary.lm_head[d2t + torch.arange(len(d2t))]
    return {} if torch.equal(rows_WH, own) else {"tensors": {LM_HEAD: rows_WH}}


TABLE: dict[str, tuple[str, Change]] = {
    **{
        f"the {word} layer one {where}": (CONFIG, tapped(stream, by))
        for stream, word in enumerate(("first", "second", "third"))
        for where, by in (("earlier", -1), ("later", 1))
    },
    **{
        f"the streams in the order {' '.join(str(one + 1) for one in order)}": (
            FILE,
            streams(order),
        )
        for order in permutations(range(3))
        if order != (0, 1, 2)
    },
    "the feature before the embedding": (
        FILE,
        of_tensors(
            lambda it: {
                name: it.tensors[name].roll(it.config.hidden_size, dims=1)
                for name in (QUERY, KEY, VALUE)
            }
        ),
    ),
    "the embedding of the feature's own token": (TRAINER, lambda *_: {"embed_lag": 1}),
    "features one token later": (TRAINER, lambda *_: {"later": 1}),
    "features one token earlier": (TRAINER, lambda *_: {"later": -1}),
    "queries one position on": (TRAINER, queries_at(1)),
    "queries one position back": (TRAINER, queries_at(-1)),
    "rotary pairs side by side": (FILE, paired(-1, 2)),
    "rotary pairs converted twice": (FILE, paired(2, -1)),
    **{f"rope_theta {base:g}": (CONFIG, turned_by(base)) for base in (1e5, 5e5, 1e6)},
    f"a context cut at {LONGEST:,} tokens": (
        "serve it with this sliding_window, or train on longer text",
        lambda *_: {"config": {"sliding_window": LONGEST}},
    ),
    **{
        f"{one} and {other} exchanged": (FILE, exchanged(NORMS[one], NORMS[other]))
        for one, other in combinations(NORMS, 2)
    },
    **{
        f"{name} without its weights": (FILE, weighed(tensor, torch.ones_like))
        for name, tensor in NORMS.items()
    },
    "norm weights counted from 1": (FILE, weighed("", lambda weight: weight + 1)),
    "norm weights with 1 too many": (FILE, weighed("", lambda weight: weight - 1)),
    "gate_proj and up_proj exchanged": (FILE, exchanged(GATE, UP)),
    "k_proj and v_proj exchanged": (FILE, exchanged(KEY, VALUE)),
    "square matrices transposed": (
        FILE,
        of_tensors(
            lambda it: {
                n: w.T for n, w in it.tensors.items() if w.ndim == 2 and w.shape == w.T.shape
            }
        ),
    ),
    "d2t as identity": (
        FILE,
        lambda it, _: mapped(it, torch.arange(it.config.draft_vocab_size)),
    ),
    "d2t by the rows of lm_head": (FILE, rows_alike),
    "the target's lm_head": (FILE, target_rows),
    "float16": (PRECISION, lambda *_: {"dtype": torch.float16, "is_loss": True}),
    "bfloat16": (PRECISION, lambda *_: {"dtype": torch.bfloat16, "is_loss": True}),
}
