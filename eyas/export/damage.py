"""Weights of a head held against each other: what training does not leave behind, and a converter
that lost a part does.

Knows names and shapes of EAGLE's tensors. Does not know configs or targets. Every limit is far from
what trained heads show: of 41, some of them after few steps, the least ratio of a matrix to random
numbers was 1.20 (the least median 1.48), the least scale to the median 0.40, the least median
spread of norms 0.09.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

import torch
from torch import Tensor

from eyas.export.finding import Finding
from eyas.model.dialects import LAYER

# between the least and the greatest weight of a norm that was trained: some steps of bfloat16 at 1
MOVED = 2**-5
LEAST_SHARE = 1 / 100  # of a matrix's root mean square to the median's
# trainers may begin there
FROM_ZERO = {f"{LAYER}{name}.weight": 1 / 10_000 for name in ("self_attn.o_proj", "mlp.down_proj")}
# at most of random numbers, at least of what was trained: see `above_random`
RANDOM, STRUCTURED = 1.08, 1.3
LEAST_SIZE = 128  # of a matrix whose largest singular value says anything
ITERATIONS = 24
AGAIN = "restore the checkpoint from its source, or convert or train it again"


def damage_findings(weights: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Norms that were never loaded, matrices out of scale, matrices of random numbers. weights:
    finite, by EAGLE's names.
    """
    yield from norm_findings(
        {name: weight for name, weight in weights.items() if weight.ndim == 1 and "norm" in name}
    )
    scales, above = {}, {}
    for name in weights:
        if weights[name].ndim == 2 and own(name):
            matrix = weights[name].float()
            scales[name] = float(matrix.square().mean().sqrt())
            if scales[name] and min(matrix.shape) >= LEAST_SIZE:
                above[name] = above_random(matrix)
    for name, scale in scales.items():
        usual = median(scales.values())
        if 0 < scale < FROM_ZERO.get(name, LEAST_SHARE) * usual:
            what = (
                f"{name} is next to nothing: its root mean square is {scale:.2g}, that of the "
                f"matrices {usual:.2g}"
            )
            yield Finding("warning", what, AGAIN)
    for name, ratio in above.items():
        if ratio < RANDOM and median(above.values()) >= STRUCTURED:
            what = (
                f"{name} looks like random numbers: nothing in it stands out as in the other "
                "matrices"
            )
            yield Finding("warning", what, AGAIN)


def own(name: str) -> bool:
    """Whether a matrix is the head's alone: not the output matrix or embeddings, which may be
    another's at another scale.
    """
    return name.startswith(LAYER) or name == "fc.weight"


def norm_findings(norms: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Norms whose weights are all the same, as they begin, where others have moved."""
    moved = {name: float(norm.max() - norm.min()) for name, norm in norms.items()}
    others = [spread for spread in moved.values() if spread]
    if not others or median(others) < MOVED:
        return
    for name, spread in moved.items():
        if not spread:
            what = (
                f"the weights of {name} are all {float(norms[name][0]):g}, as before training; "
                "those of other norms are not"
            )
            yield Finding("warning", what, AGAIN)


def above_random(matrix: Tensor) -> float:
    """The largest singular value over that of as large a matrix of independent numbers of its
    spread, s (sqrt m + sqrt n).

    Geman 1980, "A limit theorem for the norm of random matrices". By power iteration from a fixed
    start.
    """
    m, n = matrix.shape
    vector = torch.randn(n, generator=torch.Generator().manual_seed(0))
    for _ in range(ITERATIONS):
        vector = matrix.T @ (matrix @ vector)
        vector /= vector.norm()
    largest, spread = float((matrix @ vector).norm()), max(float(matrix.std()), 1e-30)
    return largest / (spread * float(m**0.5 + n**0.5))
