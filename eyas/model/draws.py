"""How a request draws its next tokens, as the native library (`cpp/draw.h`) reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from eyas.errors import EyasError
from eyas.model.structs import STRUCTS

MOST_PLACES = 64  # tokens of a walk: a tree has so many columns


class DrawState(ctypes.Structure):
    """A request's sampling parameters (`engine/sampling.py`), and its state before its next token.

    num_drawn: the index of that token. Arrays, by their addresses: seen and counts int64
    [num_seen], biased int64 and biases float64 [num_biased], ends int64 [num_ends], all token ids
    below V; scored_ints int64 [MOST_PLACES, 1 + num_top] and scored_logits fp32 [MOST_PLACES, 2 +
    num_top], or 0 without log-probabilities. by_caller: the library draws nothing and gives the
    logits.
    """

    _fields_ = STRUCTS["DrawState"]._fields_


Draws = Sequence[DrawState | None]  # one a request; None: the best logit is the token


def draw_states(draws: Draws | None, count: int) -> ctypes.Array[ctypes.c_void_p]:
    """Their addresses [count], null for None."""
    given = [None] * count if draws is None else draws
    assert len(given) == count
    states = (None if draw is None else ctypes.addressof(draw) for draw in given)
    return (ctypes.c_void_p * count)(*states)


class Scores:
    """Where the library writes the log-probabilities of a walk's tokens."""

    def __init__(self, num_top: int, places: int = MOST_PLACES) -> None:
        self.ints = np.empty((places, 1 + num_top), dtype=np.int64)
        self.logits = np.empty((places, 2 + num_top), dtype=np.float32)


def no_best_logit(best: float) -> EyasError:
    """The error of logits whose maximum is no number."""
    return EyasError(
        f"the target's best logit is {best}",
        "check the target's weights and dtype: its numbers overflow",
    )
