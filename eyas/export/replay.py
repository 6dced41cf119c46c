"""A head replayed on answered text, read as it says and in every way in which such heads are
misread: a number for each.

Knows the ways. Does not know forms, nor how acceptance is counted (chain). A reading is a change of
the config, of the tensors, or of the layers that are tapped; the weights that fit one reading draft
badly by another, so the reading that the checkpoint declares ought to be the best. WARNING and
ERROR say how much better another must be to count. A checkpoint that can be meant in several ways
is declared in all of them, and the best is taken for what is meant.

Letters: H hidden size, W draft vocabulary, V target vocabulary, D head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.export.answers import Answered
from eyas.model.batch import Batch
from eyas.model.chain import measure
from eyas.model.config import EAGLE_ROPE, HeadConfig, Taps, same_rotation
from eyas.model.dialects import EMBED_TOKENS, FC_NORMS, INPUT_NORM, LAYER
from eyas.model.head import Head
from eyas.model.target import Target
from eyas.model.vocab import TargetVocabulary
from eyas.tau import RoundCounts

DECLARED = "as declared"
NUM_DRAFT_STEPS = 4
PART = 8  # answers in one forward, of about one length
# From these on, another reading that accepts more counts. Sound heads: the best of all others
# accepts 4 to 10 % less.
Bar = tuple[float, float, float]  # drafts a place, share of the declared reading's, standard errors
WARNING: Bar = (0.03, 0.02, 1.5)
ERROR: Bar = (0.06, 0.05, 3.0)
# of the declared reading: below it a head drafts nothing worth its time, and the engine warns as
# well
LEAST_TAU = 1.3
# of the declared reading's drafts after PART answers: one below it is measured no further
LEFT_BEHIND = 0.5

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Reading:
    """A way to read a head; `tensors` by EAGLE's names."""

    name: str
    config: HeadConfig
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a reading's chain of NUM_DRAFT_STEPS accepted: tau over rounds, and the drafts accepted
    [answers] from every place of each answer, rounds or not, with the places [answers]. One that
    was left behind has the first answers only."""

    reading: str
    tau: float
    accepted: list[int]
    places: list[int]

    @property
    def accepted_drafts(self) -> float:
        """Mean over all places."""
        return sum(self.accepted) / sum(self.places)

    def gain(self, other: Replayed) -> Bar:
        """What this reading accepts more than another of the same answers: drafts a place, share of
        its, standard errors.

        Answers are the sample, places of one answer are not independent: the ratio estimator's
        error (Cochran 1977, 6.4). Over this one's answers, which the other must have.
        """
        other = replace(
            other,
            accepted=other.accepted[: len(self.places)],
            places=other.places[: len(self.places)],
        )
        differences = [one - two for one, two in zip(self.accepted, other.accepted, strict=True)]
        mean = sum(differences) / sum(self.places)
        spread = sum(
            (d - mean * n) ** 2 for d, n in zip(differences, self.places, strict=True)
        ) ** 0.5 / sum(self.places)
        return mean, mean / max(other.accepted_drafts, 1e-9), mean / max(spread, 1e-9)


@dataclass(frozen=True, slots=True)
class Features:
    """One answer's features, as a batch takes them."""

    key: str
    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor

    def cut(self) -> Features:
        """Without the padding of its neighbours."""
        T = len(self.token_ids)
        return replace(self, aux_hidden=self.aux_hidden[:T], last_hidden=self.last_hidden[:T])


def replay(
    meanings: Sequence[Reading], target: Target, answers: Sequence[Answered]
) -> list[Replayed]:
    """Every reading's acceptance on the answers: the meaning that accepts most, the other meanings,
    and its misreadings.

    meanings: what the checkpoint declares, DECLARED, or each of the ways in which that can be
    meant. tensors: as `read_head` gives them, lm_head too.
    """
    vocabulary = TargetVocabulary(
        target.config, target.embed_tokens.float(), target.lm_head.float(), target.lm_head_sha256
    )
    ways = [way for one in meanings for way in (one, *other_taps(one.config, one.tensors, target))]
    layers = sorted({tap for way in ways for tap in way.config.taps})
    parts = [
        Part.of(target, part, layers)
        for part in batched(sorted(answers, key=lambda one: len(one.token_ids)), PART)
    ]
    measured = [(one, acceptance(one, parts, vocabulary)) for one in meanings]
    meant, declared = max(measured, key=lambda pair: pair[1].accepted_drafts)
    replayed = [declared, *(one for _, one in measured if one is not declared)]
    for reading in misreadings(meant.config, meant.tensors, target):
        if reading.tensors is not meant.tensors or reading.config not in [
            one.config for one in meanings
        ]:
            replayed.append(acceptance(reading, parts, vocabulary, declared))
    return replayed


def acceptance(
    reading: Reading,
    parts: Sequence[Part],
    vocabulary: TargetVocabulary,
    declared: Replayed | None = None,
) -> Replayed:
    """What a reading accepts on the answers, or on the first of them if it is left far behind the
    declared one.
    """
    head, tally = assembled(reading), RoundCounts(NUM_DRAFT_STEPS)
    accepted: list[int] = []
    places: list[int] = []
    for part in parts:
        of_row, places_of_row = Counter[int](), Counter[int]()
        for row, matches in measure(
            head, vocabulary, part.batch(reading.config.taps), NUM_DRAFT_STEPS
        ).spans:
            tally.add_answer(matches)
            of_row[row] += sum(matches)
            places_of_row[row] += len(matches)
        accepted += [of_row[row] for row in places_of_row]
        places += places_of_row.values()
        if declared is not None and sum(accepted) < LEFT_BEHIND * sum(
            declared.accepted[: len(accepted)]
        ):
            break
    return Replayed(reading.name, tally.tau, accepted, places)


@dataclass(frozen=True, slots=True)
class Part:
    """Answers of about one length, and the target's hidden states over them: hidden [B, T, H] by
    layer, all in one forward.
    """

    answers: Sequence[Answered]
    hidden: Mapping[int, Tensor]
    last_hidden: Tensor

    @classmethod
    def of(cls, target: Target, answers: Sequence[Answered], layers: Sequence[int]) -> Part:
        """Run the target; float32."""
        tokens_BT = pad_sequence([torch.tensor(one.token_ids) for one in answers], batch_first=True)
        hidden, last_hidden = target.features(tokens_BT.to(target.device), tuple(layers))
        by_layer = hidden.float().cpu().chunk(len(layers), dim=-1)
        return cls(answers, dict(zip(layers, by_layer, strict=True)), last_hidden.float().cpu())

    def batch(self, taps: Taps) -> Batch:
        """As the head with these taps sees it."""
        aux_hidden = torch.cat([self.hidden[tap] for tap in taps], dim=-1)
        samples = [
            Features(
                str(row),
                torch.tensor(one.token_ids),
                torch.tensor(one.mask),
                aux_hidden[row],
                self.last_hidden[row],
            )
            for row, one in enumerate(self.answers)
        ]
        return Batch.of([sample.cut() for sample in samples])


def batched(answers: Sequence[Answered], size: int) -> Iterator[Sequence[Answered]]:
    """Answers, so many at a time."""
    yield from (answers[at : at + size] for at in range(0, len(answers), size))


def assembled(reading: Reading) -> Head:
    """A head of these weights, float32."""
    head = Head(reading.config)
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in reading.tensors.items()
    }
    embed_tokens = tensors.pop(EMBED_TOKENS, None)
    if reading.config.owns_embeddings and embed_tokens is not None:
        tensors["embed_tokens"] = embed_tokens
    head.load_state_dict(tensors)
    if not reading.config.owns_embeddings:
        head.embed_tokens = embed_tokens
    return head


def misreadings(config: HeadConfig, tensors: Tensors, target: Target) -> Iterator[Reading]:
    """The other ways to read a head: of layers, of flags, of its weights' order, of what it
    borrows; and with parts left out, as weights that are worse than none are no reading's."""
    yield from other_taps(config, tensors, target)
    yield from other_flags(config, tensors)
    yield from other_orders(config, tensors)
    yield from exchanges(config, tensors)
    for name, part in {"attention": "self_attn.o_proj", "MLP": "mlp.down_proj"}.items():
        nothing = torch.zeros_like(tensors[f"{LAYER}{part}.weight"])
        yield Reading(f"without its {name}", config, tensors | {f"{LAYER}{part}.weight": nothing})
    for name, rope in {
        "the target's rotary embedding": target.config.rope,
        "rope_theta 10000": EAGLE_ROPE,
    }.items():
        if not same_rotation(rope, config.rope):
            yield Reading(name, config.model_copy(update={"rope": rope}), tensors)
    if EMBED_TOKENS in tensors and not config.owns_embeddings:
        shared = {name: tensor for name, tensor in tensors.items() if name != EMBED_TOKENS}
        yield Reading("the target's embeddings", config, shared)


def other_taps(config: HeadConfig, tensors: Tensors, target: Target) -> Iterator[Reading]:
    """Layers by another convention: what is listed as outputs taken for inputs, and the other way
    round.
    """
    n = target.config.num_hidden_layers
    one, two, three = config.taps
    ways: dict[str, Taps] = {
        "layers one earlier (outputs taken for inputs)": (one - 1, two - 1, three - 1),
        "layers one later (inputs taken for outputs)": (one + 1, two + 1, three + 1),
        "the target's default layers": target.config.default_taps,
    }
    for name, taps in ways.items():
        if taps != config.taps and taps[0] >= 0 and taps[2] < n:
            yield Reading(name, config.model_copy(update={"taps": taps}), tensors)


def other_flags(config: HeadConfig, tensors: Tensors) -> Iterator[Reading]:
    """Each flag that needs no weights the other way round; each norm before fc left out."""
    for flag in ("norm_before_residual", "norm_output"):
        is_set = getattr(config, flag)
        yield Reading(
            f"{flag} {'off' if is_set else 'on'}",
            config.model_copy(update={flag: not is_set}),
            tensors,
        )
    for flag, norms in {"norm_before_fc": (INPUT_NORM,), "fc_norm": FC_NORMS}.items():
        if getattr(config, flag):
            kept = {name: tensor for name, tensor in tensors.items() if name not in norms}
            yield Reading(f"{flag} off", config.model_copy(update={flag: False}), kept)


def other_orders(config: HeadConfig, tensors: Tensors) -> Iterator[Reading]:
    """The same weights in another order than EAGLE's."""
    yield Reading(
        "feature first, embedding second", config, tensors | swapped_inputs(config, tensors)
    )
    for order in permutations(range(3)):
        if order != (0, 1, 2):
            yield Reading(
                f"streams in the order {order[0]} {order[1]} {order[2]}",
                config,
                tensors | reordered(tensors, order),
            )
    o_proj = tensors[f"{LAYER}self_attn.o_proj.weight"]
    if o_proj.shape[0] == o_proj.shape[1]:
        yield Reading(
            "o_proj transposed", config, tensors | {f"{LAYER}self_attn.o_proj.weight": o_proj.T}
        )
    yield Reading("rotary pairs side by side", config, tensors | paired(config, tensors))
    ids_W = tensors["d2t"]
    if (
        config.draft_vocab_size < config.vocab_size
        and len(set(ids_W.tolist())) == len(ids_W)
        and ids_W.min() >= 0
    ):
        offsets_W = ids_W - torch.arange(len(ids_W))
        t2d_V = torch.zeros_like(tensors["t2d"]).index_fill(0, ids_W, True)
        yield Reading("d2t as ids", config, tensors | {"d2t": offsets_W, "t2d": t2d_V})


def exchanges(config: HeadConfig, tensors: Tensors) -> Iterator[Reading]:
    """Two weights of the layer under each other's names, where both have one shape."""
    ways = {
        "hidden_norm for input_layernorm": ("hidden_norm", "input_layernorm"),
        "gate_proj for up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "q_proj for k_proj": ("self_attn.q_proj", "self_attn.k_proj"),
        "k_proj for v_proj": ("self_attn.k_proj", "self_attn.v_proj"),
    }
    for name, pair in ways.items():
        one, other = (f"{LAYER}{part}.weight" for part in pair)
        if tensors[one].shape == tensors[other].shape:
            yield Reading(name, config, tensors | exchanged(tensors, one, other))


def reordered(tensors: Tensors, order: Sequence[int]) -> Tensors:
    """What takes the three features one by one, for a reader that concatenates them in another
    order.
    """
    columns = tensors["fc.weight"].chunk(3, dim=1)
    changed = {"fc.weight": torch.cat([columns[stream] for stream in order], 1)}
    if INPUT_NORM in tensors:
        parts = tensors[INPUT_NORM].chunk(3)
        changed[INPUT_NORM] = torch.cat([parts[stream] for stream in order])
    return changed | {
        name: tensors[FC_NORMS[stream]]
        for name, stream in zip(FC_NORMS, order, strict=True)
        if name in tensors
    }


def swapped_inputs(config: HeadConfig, tensors: Tensors) -> Tensors:
    """Queries, keys and values of [feature, embedding] instead of [embedding, feature]."""
    names = [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
    return {name: tensors[name].roll(config.hidden_size, 1) for name in names}


def exchanged(tensors: Tensors, one: str, other: str) -> Tensors:
    """Two tensors under each other's names."""
    return {one: tensors[other], other: tensors[one]}


def paired(config: HeadConfig, tensors: Tensors) -> Tensors:
    """Queries and keys of a checkpoint whose rotary pairs lie side by side (Meta's order), in
    Hugging Face's halves.
    """
    half = config.head_dim // 2
    weights = {name: tensors[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qk"}
    return {
        f"{LAYER}self_attn.{name}_proj.weight": weight.view(-1, half, 2, weight.shape[1])
        .transpose(1, 2)
        .reshape(weight.shape)
        for name, weight in weights.items()
    }
