"""`acceptance` and `budget` in the native library: for the few candidates of a round, where array
operations take longer than the arithmetic. Knows how the arrays are handed over, and nothing else:
the plain versions are there.

Letters: B requests, C candidates of each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from eyas.model.native import address, library
from eyas.model.rows import Proposals


def calibrate(
    proposals: Proposals,
    table: np.ndarray,
    bins: tuple[int, int, float],
    greedy: list[bool],
    log_odds: list[float],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """conditional and paths float64 [B, C], cells int64 [B, C] in the table float64 [2 * D * S];
    bins: D, S, bins a unit.
    """
    B, C = proposals.scores.shape
    depths, size, per_unit = bins
    inputs = (
        np.ascontiguousarray(proposals.scores),
        np.ascontiguousarray(proposals.parents),
        np.ascontiguousarray(proposals.depths),
        table,
        np.array(greedy, dtype=np.uint8),
        np.array(log_odds),
    )
    conditional, paths, cells = np.empty((B, C)), np.empty((B, C)), np.empty((B, C), dtype=np.int64)
    ints = (ctypes.c_int64 * 4)(B, C, depths, size)
    library().eyas_calibrate(ints, per_unit, _pointers(*inputs, conditional, paths, cells))
    return conditional, paths, cells


def choose(
    paths: np.ndarray, ms_of_nodes: np.ndarray, sizes: tuple[int, int], fixed_ms: float, rate: float
) -> tuple[np.ndarray, int, float, float]:
    """kept bool [B, C], their number, the tokens expected and the ms; sizes: num_tokens, max_nodes
    of a request.
    """
    B, C = paths.shape
    num_tokens, max_nodes = sizes
    kept, expected = np.empty((B, C), dtype=bool), np.empty(2)
    ints = (ctypes.c_int64 * 5)(B, C, len(ms_of_nodes) - 1, max_nodes, num_tokens)
    pointers = _pointers(paths, np.ascontiguousarray(ms_of_nodes), kept, expected[:1], expected[1:])
    count: int = library().eyas_choose(ints, fixed_ms, rate, pointers)
    tokens, ms = expected.tolist()
    return kept, count, tokens, ms


def judge(
    proposals: Proposals, conditional: np.ndarray, emitted: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """judged and drawn bool [B, C]; and for each request how many more were drawn than expected."""
    B, C = proposals.tokens.shape
    judged, drawn, surplus = np.empty((B, C), dtype=bool), np.empty((B, C), dtype=bool), np.empty(B)
    inputs = (
        np.ascontiguousarray(proposals.tokens),
        np.ascontiguousarray(proposals.parents),
        np.array([token for row in emitted for token in row], dtype=np.int64),
        np.array(list(map(len, emitted)), dtype=np.int64),
        conditional,
    )
    library().eyas_judge((ctypes.c_int64 * 2)(B, C), _pointers(*inputs, judged, drawn, surplus))
    return judged, drawn, surplus.tolist()


def _pointers(*arrays: np.ndarray) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*map(address, arrays))
