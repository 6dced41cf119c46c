"""The counterfactuals of `eyas check --why`: one table of what a trainer, converter or engine may
have done to a head. Each entry reads the head as if that had been done, and says what follows if
it accepts more so.

Letters: W draft vocabulary, V target vocabulary, H hidden size, D head dimension, X the layer's
input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.export.readings import HeadReading, HeadTensors, misreadings
from eyas.model.config import HeadConfig, RopeConfig, same_rotation
from eyas.model.dialects import FC_NORMS, INPUT_NORM, LAYER, LM_HEAD
from eyas.operators.rope import apply_rope, rotation
from eyas.operators.vocab import TargetVocabulary

Change = Callable[[HeadReading, TargetVocabulary], HeadReading | None]
OfTensors = Callable[[HeadConfig, HeadTensors], HeadTensors | None]
QUERY, KEY, VALUE, OUTPUT = (f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo")
GATE, UP = (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))
NORMS = {
    name: f"{LAYER}{name}.weight"
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
} | {"norm": "norm.weight"}
STREAMS = ("first", "second", "third")
BASES = (1e4, 1e5, 5e5, 1e6)
LONGEST = 2048  # tokens, at which trainers cut conversations by default
# of rows of the target's and of a head's lm_head that began as them; those of others: 0.2
LEAST_ALIKE = 0.5
ROWS_AT_ONCE = 1024

CONFIG = "correct config.json, or train with what it says"
FILE = "the file is written so: convert its tensors, or export it again with what wrote it mended"
TRAINER = "it was trained so, and no engine serves it so: mend the trainer and train again"
PRECISION = "serve it in bfloat16 or float32, whichever is not named here"


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """name: as what the head is read. says: what to do if it accepts more so.

    change: the reading, or None where this head has none.
    """

    name: str
    says: str
    change: Change


def counterfactuals(
    declared: HeadReading, vocabulary: TargetVocabulary, longest: int
) -> Iterator[HeadReading]:
    """The head as every entry reads it, one at a time, the common misreadings first.

    longest: tokens of the longest conversation that is replayed.
    """
    common = misreadings(declared.config, declared.tensors, vocabulary.config)
    known = [replace(one, says=CONFIG) for one in common]
    for entry in TABLE:
        found = (
            None
            if entry.name == WINDOW and longest <= LONGEST
            else entry.change(declared, vocabulary)
        )
        if found is not None and not any(same(found, one) for one in known):
            known.append(replace(found, name=entry.name, says=entry.says))
    yield from known


def same(one: HeadReading, other: HeadReading) -> bool:
    """Whether they are one reading under two names."""
    ways = [(it.config, it.later, it.embed_lag, it.dtype) for it in (one, other)]
    return one.tensors is other.tensors and ways[0] == ways[1]


# What an entry changes


def of_tensors(change: OfTensors) -> Change:
    """Tensors alone."""

    def changed(declared: HeadReading, _: TargetVocabulary) -> HeadReading | None:
        tensors = change(declared.config, declared.tensors)
        return None if tensors is None else replace(declared, tensors=declared.tensors | tensors)

    return changed


def of_run(**fields: object) -> Change:
    """How it is run (fields of `HeadReading`)."""
    return lambda declared, _: replace(declared, **fields)  # type: ignore[arg-type]


def exchanged(*pairs: tuple[str, str]) -> OfTensors:
    """Tensors under each other's names, where their shapes allow it."""

    def change(_: HeadConfig, tensors: HeadTensors) -> HeadTensors | None:
        if any(tensors[one].shape != tensors[other].shape for one, other in pairs):
            return None
        return {name: tensors[other] for pair in pairs for name, other in (pair, pair[::-1])}

    return change


def tapped(stream: int, by: int) -> Change:
    """One stream of another layer."""

    def change(declared: HeadReading, vocabulary: TargetVocabulary) -> HeadReading | None:
        taps = list(declared.config.taps)
        taps[stream] += by
        if not 0 <= taps[stream] < vocabulary.config.num_hidden_layers:
            return None
        return replace(declared, config=declared.config.model_copy(update={"taps": tuple(taps)}))

    return change


def turned_by(theta: float) -> Change:
    """A plain rotary embedding of another base."""

    def change(declared: HeadReading, _: TargetVocabulary) -> HeadReading | None:
        rope = RopeConfig(theta=theta)
        if same_rotation(rope, declared.config.rope):
            return None
        return replace(declared, config=declared.config.model_copy(update={"rope": rope}))

    return change


def windowed(declared: HeadReading, _: TargetVocabulary) -> HeadReading | None:
    """The last LONGEST tokens are all that attention sees."""
    if (declared.config.sliding_window or LONGEST + 1) <= LONGEST:
        return None
    config = declared.config.model_copy(update={"sliding_window": LONGEST})
    return replace(declared, config=config)


def streams(order: Sequence[int], names: Sequence[str] = ("fc.weight", *FC_NORMS)) -> OfTensors:
    """The three streams in another order; names: of the tensors that have an order."""

    def change(_: HeadConfig, tensors: HeadTensors) -> HeadTensors | None:
        found: HeadTensors = {}
        for name in ("fc.weight", INPUT_NORM):
            if name in tensors and "fc.weight" in names:
                parts = tensors[name].chunk(3, dim=-1)
                found[name] = torch.cat([parts[one] for one in order], dim=-1)
        if set(FC_NORMS) <= tensors.keys():
            found |= {
                name: tensors[FC_NORMS[one]]
                for name, one in zip(FC_NORMS, order, strict=True)
                if name in names
            }
        return found or None

    return change


def feature_first(_: HeadConfig, tensors: HeadTensors) -> HeadTensors:
    """The layer's input as [feature, embedding]."""
    return {
        name: tensors[name].roll(tensors[name].shape[1] // 2, dims=1)
        for name in (QUERY, KEY, VALUE)
    }


def weighed(name: str, change: Callable[[Tensor], Tensor]) -> OfTensors:
    """The weights of a norm, or of every one, changed."""

    def changed(_: HeadConfig, tensors: HeadTensors) -> HeadTensors:
        names = [one for one in tensors if one.endswith("norm.weight") or one in FC_NORMS]
        return {one: change(tensors[one]) for one in ([NORMS[name]] if name else names)}

    return changed


def by_head(weight: Tensor, config: HeadConfig) -> Tensor:
    """Rows of a projection as [heads, D, X]."""
    return weight.view(-1, config.head_dim, weight.shape[-1])


def pairs_side_by_side(config: HeadConfig, tensors: HeadTensors) -> HeadTensors:
    """Rotary pairs as (0, 1), (2, 3), ... in the file, as GPT-J and Meta's Llama have them."""
    order = torch.arange(config.head_dim).view(-1, 2).T.flatten()
    return {name: by_head(tensors[name], config)[:, order].flatten(0, 1) for name in (QUERY, KEY)}


def pairs_taken_apart(config: HeadConfig, tensors: HeadTensors) -> HeadTensors:
    """Rotary pairs that were converted once too often."""
    order = torch.arange(config.head_dim).view(2, -1).T.flatten()
    return {name: by_head(tensors[name], config)[:, order].flatten(0, 1) for name in (QUERY, KEY)}


def queries_on(by: int) -> OfTensors:
    """Queries so many positions after their keys."""

    def change(config: HeadConfig, tensors: HeadTensors) -> HeadTensors:
        by_head_hXD = by_head(tensors[QUERY].float(), config).transpose(1, 2)
        turn = rotation(config.rope, config.head_dim, torch.tensor(abs(by)))
        cos, sin = turn[0], turn[1] if by > 0 else -turn[1]
        return {QUERY: apply_rope(by_head_hXD, cos, sin).transpose(1, 2).flatten(0, 1)}

    return change


def queries_in_turn(config: HeadConfig, tensors: HeadTensors) -> HeadTensors | None:
    """Heads of queries dealt to the heads of keys in turn, not in groups."""
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    if key_heads in (1, heads):
        return None
    order = torch.arange(heads).view(-1, key_heads).T.flatten()
    outputs = by_head(tensors[OUTPUT].T, config)[order].flatten(0, 1).T
    return {QUERY: by_head(tensors[QUERY], config)[order].flatten(0, 1), OUTPUT: outputs}


def transposed(_: HeadConfig, tensors: HeadTensors) -> HeadTensors | None:
    """Matrices that are square, and so load either way."""
    square = {
        name: one for name, one in tensors.items() if one.ndim == 2 and one.shape[0] == len(one.T)
    }
    return {name: one.T for name, one in square.items()} or None


def mapped(ids_W: Tensor, vocab_size: int) -> HeadTensors:
    """d2t and t2d of target ids."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids_W, True)
    return {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": mask_V}


def identity(config: HeadConfig, tensors: HeadTensors) -> HeadTensors | None:
    """The target's first W tokens."""
    if not tensors["d2t"].any():
        return None
    return mapped(torch.arange(config.draft_vocab_size), config.vocab_size)


def rows_alike(declared: HeadReading, vocabulary: TargetVocabulary) -> HeadReading | None:
    """The map by what rows of lm_head began as: of the target's, the most alike."""
    rows_VH = F.normalize(vocabulary.lm_head.float())
    best = [
        (F.normalize(part.float()) @ rows_VH.T).max(-1)
        for part in torch.split(declared.tensors[LM_HEAD], ROWS_AT_ONCE)
    ]
    alike_W, ids_W = (torch.cat(parts) for parts in zip(*best, strict=True))
    stated_W = declared.tensors["d2t"] + torch.arange(len(ids_W))
    if torch.equal(ids_W, stated_W) or alike_W.median() < LEAST_ALIKE:
        return None
    tensors = mapped(ids_W, declared.config.vocab_size)
    return replace(declared, tensors=declared.tensors | tensors)


def target_rows(declared: HeadReading, vocabulary: TargetVocabulary) -> HeadReading | None:
    """The target's own rows for lm_head."""
    ids_W = declared.tensors["d2t"] + torch.arange(len(declared.tensors["d2t"]))
    rows_WH = vocabulary.lm_head[ids_W]
    if torch.equal(rows_WH, declared.tensors[LM_HEAD].float()):
        return None
    return replace(declared, tensors=declared.tensors | {LM_HEAD: rows_WH})


WINDOW = f"a context cut at {LONGEST:,} tokens"
TABLE: tuple[Counterfactual, ...] = (
    *(
        Counterfactual(f"the {STREAMS[stream]} layer one {word}", CONFIG, tapped(stream, by))
        for stream in range(3)
        for word, by in (("earlier", -1), ("later", 1))
    ),
    *(
        Counterfactual(
            f"the streams in the order {' '.join(str(one + 1) for one in order)}",
            FILE,
            of_tensors(streams(order)),
        )
        for order in permutations(range(3))
        if order != (0, 1, 2)
    ),
    *(
        Counterfactual(
            f"the norms of the streams in the order {' '.join(str(one + 1) for one in order)}",
            FILE,
            of_tensors(streams(order, FC_NORMS)),
        )
        for order in permutations(range(3))
        if order != (0, 1, 2)
    ),
    Counterfactual("the feature before the embedding", FILE, of_tensors(feature_first)),
    Counterfactual("the embedding of the feature's own token", TRAINER, of_run(embed_lag=1)),
    Counterfactual("features one token later", TRAINER, of_run(later=1)),
    Counterfactual("features one token earlier", TRAINER, of_run(later=-1)),
    Counterfactual("queries one position on", TRAINER, of_tensors(queries_on(1))),
    Counterfactual("queries one position back", TRAINER, of_tensors(queries_on(-1))),
    Counterfactual("rotary pairs side by side", FILE, of_tensors(pairs_side_by_side)),
    Counterfactual("rotary pairs converted twice", FILE, of_tensors(pairs_taken_apart)),
    *(Counterfactual(f"rope_theta {base:g}", CONFIG, turned_by(base)) for base in BASES),
    Counterfactual(WINDOW, "serve it with this sliding_window, or train on longer text", windowed),
    *(
        Counterfactual(
            f"{one} and {other} exchanged", FILE, of_tensors(exchanged((NORMS[one], NORMS[other])))
        )
        for one, other in combinations(NORMS, 2)
    ),
    *(
        Counterfactual(
            f"{name} without its weights", FILE, of_tensors(weighed(name, torch.ones_like))
        )
        for name in NORMS
    ),
    Counterfactual("norm weights counted from 1", FILE, of_tensors(weighed("", lambda w: w + 1))),
    Counterfactual("norm weights with 1 too many", FILE, of_tensors(weighed("", lambda w: w - 1))),
    Counterfactual("gate_proj and up_proj exchanged", FILE, of_tensors(exchanged((GATE, UP)))),
    Counterfactual("k_proj and v_proj exchanged", FILE, of_tensors(exchanged((KEY, VALUE)))),
    Counterfactual("heads of queries in turn", FILE, of_tensors(queries_in_turn)),
    Counterfactual("square matrices transposed", FILE, of_tensors(transposed)),
    Counterfactual("d2t as identity", FILE, of_tensors(identity)),
    Counterfactual("d2t by the rows of lm_head", FILE, rows_alike),
    Counterfactual("the target's lm_head", FILE, target_rows),
    Counterfactual("float16", PRECISION, of_run(dtype=torch.float16, is_loss=True)),
    Counterfactual("bfloat16", PRECISION, of_run(dtype=torch.bfloat16, is_loss=True)),
)
