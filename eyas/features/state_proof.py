"""Proof that a server's states are the target's: our decoder computes the same samples.

Letters: T tokens, S the four streams, L layers, H the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.client import RequestFailure
from eyas.features.samples import SamplePlan
from eyas.model.config import TargetShape
from eyas.operators.decoder import TOLERANCE, HiddenStates, HookedDecoder

PROOF_SAMPLES = 4  # from the shortest to the longest
LAYERS_TOKENS = 32  # of the shortest sample, for the comparison with all layers
NUM_STREAMS = 4
# times TOLERANCE of the median token: single tokens of SmolLM2 in bfloat16 are off by two
# tolerances, another token's state by twelve
OUTLIER = 5


@dataclass(frozen=True, slots=True)
class StateRequest:
    """id: the sample's key."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateProof:
    """What a server must match. samples: with our states. layers_LTH: all layers' outputs for the
    first tokens of samples[0]. max_length: tokens of the longest.
    """

    shape: TargetShape
    dtype: torch.dtype
    samples: tuple[tuple[StateRequest, HiddenStates], ...]
    layers_LTH: Tensor
    max_length: int


def prove_by(decoder: HookedDecoder, dtype: str, plans: Sequence[SamplePlan]) -> StateProof:
    """Compute some samples here, from the shortest to the longest."""
    requests = (StateRequest(one.key, tuple(one.token_ids.tolist())) for one in plans)
    by_length = sorted(requests, key=lambda one: len(one.token_ids))
    last = len(by_length) - 1
    places = sorted({last * step // (PROOF_SAMPLES - 1) for step in range(PROOF_SAMPLES)})
    samples = []
    for place in places:
        states = decoder.states([by_length[place].token_ids])
        of_one = HiddenStates(states.aux_hidden[0].cpu(), states.last_hidden[0].cpu())
        samples.append((by_length[place], of_one))
    layers_LTH = decoder.layers(by_length[0].token_ids[:LAYERS_TOKENS]).cpu()
    longest = len(by_length[-1].token_ids)
    return StateProof(decoder.shape, getattr(torch, dtype), tuple(samples), layers_LTH, longest)


def compare(
    proof: StateProof,
    streams: Sequence[Tensor],
    finished: Callable[[Tensor], HiddenStates],
) -> None:
    """Compare a server's streams [T, S, H] of the proof's samples, and of the longest a second
    time, with ours. finished: makes HiddenStates of streams.
    Raises RequestFailure.
    """
    if (dtype := streams[0].dtype) != proof.dtype:
        raise unfit(
            f"computes in {name_of(dtype)}, and the settings say {name_of(proof.dtype)}: start "
            f"it with --dtype {name_of(proof.dtype)}, or set dtype={name_of(dtype)}"
        )
    layers_LTH = proof.layers_LTH.float()
    T, sizes = layers_LTH.shape[1], layers_LTH.norm(dim=-1) + 1e-6
    for number, layer in enumerate(stream_layers(proof.shape)):
        stream_TH = streams[0][:T, number].float()
        errors = ((layers_LTH - stream_TH).norm(dim=-1) / sizes).median(dim=-1).values
        nearest = int(errors.argmin())
        if errors[nearest] > TOLERANCE[dtype]:
            raise unfit(
                f"gives states of no layer of the target (stream {number + 1} of {NUM_STREAMS} "
                f"differs by {float(errors[nearest]):.0%} from the nearest, layer {nearest}): "
                "other weights, fine-tuned or quantised, or the embeddings (layer id 0)"
            )
        if nearest != layer:  # a shift by one can be less than the noise of a low precision
            raise unfit(
                f"gives the output of layer {nearest} (counted from 0) where layer {layer} is "
                f"wanted: shift its layer id by {layer - nearest:+d}"
            )
    samples, last = (*proof.samples, proof.samples[-1]), len(proof.samples)
    for number, ((_, ours), theirs) in enumerate(zip(samples, streams, strict=True)):
        errors_TS = relative_errors(finished(theirs), ours)
        wrong = (errors_TS > OUTLIER * TOLERANCE[dtype]).any(dim=-1).nonzero()
        if len(wrong):
            again = " when it is asked for the second time" if number == last else ""
            raise unfit(
                f"gives other states than the target from token {int(wrong[0])} of "
                f"{len(theirs)} on{again}: its chunked prefill or prefix cache loses or mixes "
                "them"
            )
        off = float(errors_TS.median(dim=0).values.max())
        if off > TOLERANCE[dtype]:
            raise unfit(
                f"gives states that are off by {off:.1%}, more than {name_of(dtype)}'s noise: "
                "its weights or its cache are of a lower precision"
            )


def stream_layers(shape: TargetShape) -> tuple[int, int, int, int]:
    """The layers (0-based) whose outputs the four streams are."""
    return (*shape.default_taps, shape.num_hidden_layers - 1)


def relative_errors(found: HiddenStates, expected: HiddenStates) -> Tensor:
    """[T, S]: of each token's state in each stream."""
    T, H = expected.last_hidden.shape
    ours, theirs = (
        torch.cat([one.aux_hidden, one.last_hidden], dim=-1).float().view(T, -1, H)
        for one in (expected, found)
    )
    errors: Tensor = (theirs - ours).norm(dim=-1)
    sizes: Tensor = ours.norm(dim=-1)
    return errors / (sizes + 1e-6)


def unfit(what: str) -> RequestFailure:
    """The failure of a server that is asked no more."""
    return RequestFailure("unfit", what)


def name_of(dtype: torch.dtype) -> str:
    """As settings write it."""
    return str(dtype).removeprefix("torch.")
