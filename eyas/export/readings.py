"""The ways in which a head can be read: as it declares itself, and as such heads are misread.

Pure functions. A reading is a change of the config, of the tensors, or of the tapped layers. The
weights that fit one reading draft badly by another.

Letters: H hidden size, W draft vocabulary, V target vocabulary, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from eyas.model.config import EAGLE_ROPE, HeadConfig, Taps, TargetConfig, same_rotation
from eyas.model.dialects import EMBED_TOKENS, FC_NORMS, INPUT_NORM, LAYER
from eyas.model.head import Head

DECLARED = "as declared"
USUAL_EPSILONS = (1e-6, 1e-5)

HeadTensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class HeadReading:
    """A way to read a head; `tensors` by EAGLE's names."""

    name: str
    config: HeadConfig
    tensors: HeadTensors


def assembled(reading: HeadReading) -> Head:
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


def misreadings(
    config: HeadConfig, tensors: HeadTensors, target: TargetConfig
) -> Iterator[HeadReading]:
    """The other ways to read a head: of layers, of flags, of its weights' order, of what it
    borrows; and with parts left out, as weights that are worse than none are no reading's."""
    yield from other_taps(config, tensors, target)
    yield from other_flags(config, tensors)
    yield from other_numbers(config, tensors, target)
    yield from other_orders(config, tensors)
    yield from exchanges(config, tensors)
    for name, part in {"attention": "self_attn.o_proj", "MLP": "mlp.down_proj"}.items():
        nothing = torch.zeros_like(tensors[f"{LAYER}{part}.weight"])
        yield HeadReading(
            f"without its {name}", config, tensors | {f"{LAYER}{part}.weight": nothing}
        )
    for name, rope in {
        "the target's rotary embedding": target.rope,
        "rope_theta 10000": EAGLE_ROPE,
    }.items():
        if not same_rotation(rope, config.rope):
            yield HeadReading(name, config.model_copy(update={"rope": rope}), tensors)
    if EMBED_TOKENS in tensors and not config.owns_embeddings:
        shared = {name: tensor for name, tensor in tensors.items() if name != EMBED_TOKENS}
        yield HeadReading("the target's embeddings", config, shared)


def other_taps(
    config: HeadConfig, tensors: HeadTensors, target: TargetConfig
) -> Iterator[HeadReading]:
    """Layers by another convention: what is listed as outputs taken for inputs, and the other way
    round.
    """
    n = target.num_hidden_layers
    one, two, three = config.taps
    ways: dict[str, Taps] = {
        "layers one earlier (outputs taken for inputs)": (one - 1, two - 1, three - 1),
        "layers one later (inputs taken for outputs)": (one + 1, two + 1, three + 1),
        "the target's default layers": target.default_taps,
    }
    for name, taps in ways.items():
        if taps != config.taps and taps[0] >= 0 and taps[2] < n:
            yield HeadReading(name, config.model_copy(update={"taps": taps}), tensors)


def other_flags(config: HeadConfig, tensors: HeadTensors) -> Iterator[HeadReading]:
    """Each flag that needs no weights the other way round; each norm before fc left out."""
    for flag in ("norm_before_residual", "norm_output"):
        is_set = getattr(config, flag)
        yield HeadReading(
            f"{flag} {'off' if is_set else 'on'}",
            config.model_copy(update={flag: not is_set}),
            tensors,
        )
    for flag, norms in {"norm_before_fc": (INPUT_NORM,), "fc_norm": FC_NORMS}.items():
        if getattr(config, flag):
            kept = {name: tensor for name, tensor in tensors.items() if name not in norms}
            yield HeadReading(f"{flag} off", config.model_copy(update={flag: False}), kept)


def other_numbers(
    config: HeadConfig, tensors: HeadTensors, target: TargetConfig
) -> Iterator[HeadReading]:
    """What no shape of a tensor shows: into how many heads the attention is split, and the epsilon
    of the norms.
    """
    D = config.head_dim
    for head_dim in dict.fromkeys((D // 2, 2 * D, target.head_dim)):
        heads, rest = divmod(config.num_attention_heads * D, head_dim)
        key_heads, key_rest = divmod(config.num_key_value_heads * D, head_dim)
        if head_dim != D and head_dim % 2 == 0 and not rest and not key_rest:
            split = {
                "num_attention_heads": heads,
                "num_key_value_heads": key_heads,
                "head_dim": head_dim,
            }
            name = f"{heads} heads of {head_dim}, {key_heads} key heads"
            yield HeadReading(name, config.model_copy(update=split), tensors)
    for epsilon in dict.fromkeys((target.rms_norm_eps, *USUAL_EPSILONS)):
        # a step of ten between usual ones draws the same tokens; the lint names any other
        if max(epsilon, config.rms_norm_eps) > 11 * min(epsilon, config.rms_norm_eps):
            changed = config.model_copy(update={"rms_norm_eps": epsilon})
            yield HeadReading(f"rms_norm_eps {epsilon:g}", changed, tensors)


def other_orders(config: HeadConfig, tensors: HeadTensors) -> Iterator[HeadReading]:
    """The same weights in another order than EAGLE's."""
    yield HeadReading(
        "feature first, embedding second", config, tensors | swapped_inputs(config, tensors)
    )
    for order in permutations(range(3)):
        if order != (0, 1, 2):
            yield HeadReading(
                f"streams in the order {order[0]} {order[1]} {order[2]}",
                config,
                tensors | reordered(tensors, order),
            )
    o_proj = tensors[f"{LAYER}self_attn.o_proj.weight"]
    if o_proj.shape[0] == o_proj.shape[1]:
        yield HeadReading(
            "o_proj transposed", config, tensors | {f"{LAYER}self_attn.o_proj.weight": o_proj.T}
        )
    yield HeadReading("rotary pairs side by side", config, tensors | paired(config, tensors))
    ids_W = tensors["d2t"]
    if (
        config.draft_vocab_size < config.vocab_size
        and len(set(ids_W.tolist())) == len(ids_W)
        and ids_W.min() >= 0
    ):
        offsets_W = ids_W - torch.arange(len(ids_W))
        t2d_V = torch.zeros_like(tensors["t2d"]).index_fill(0, ids_W, True)
        yield HeadReading("d2t as ids", config, tensors | {"d2t": offsets_W, "t2d": t2d_V})


def exchanges(config: HeadConfig, tensors: HeadTensors) -> Iterator[HeadReading]:
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
            yield HeadReading(name, config, tensors | exchanged(tensors, one, other))


def reordered(tensors: HeadTensors, order: Sequence[int]) -> HeadTensors:
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


def swapped_inputs(config: HeadConfig, tensors: HeadTensors) -> HeadTensors:
    """Queries, keys and values of [feature, embedding] instead of [embedding, feature]."""
    names = [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
    return {name: tensors[name].roll(config.hidden_size, 1) for name in names}


def exchanged(tensors: HeadTensors, one: str, other: str) -> HeadTensors:
    """Two tensors under each other's names."""
    return {one: tensors[other], other: tensors[one]}


def paired(config: HeadConfig, tensors: HeadTensors) -> HeadTensors:
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
