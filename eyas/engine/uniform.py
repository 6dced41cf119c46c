"""Counter-based random numbers: the number of a token is a hash of the request's seed and the
token's index.

splitmix64, in Python's integers and in torch's int64, to the same bit: no state to keep, to move
with a request or to roll back, and a device draws what the host would have drawn. Knows no request.
"""

from __future__ import annotations

import secrets

import torch

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_UNIT = 2.0**-53


def fresh_seed() -> int:
    """A seed from the system's randomness."""
    return secrets.randbits(63)


def derived_seed(seed: int, sample: int) -> int:
    """The seed of the sample-th of n samples, as a signed 64-bit number; sample 0 keeps the
    request's own.
    """
    return seed if sample == 0 else _signed(_mix(_mix(seed ^ _STEP) + sample * _STEP))


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1), 53 bits, of token `index` under `seed`."""
    return (_mix(_mix(seed) + (index + 1) * _STEP) >> 11) * _UNIT


def uniforms(seed_B: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """fp64 [B]: `uniform` of int64 seeds and indices, on their device."""
    mixed_B = _mix_tensor(_mix_tensor(seed_B) + (index_B + 1) * _signed(_STEP))
    return _shifted(mixed_B, 11).double() * _UNIT


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> _SHIFTS[0])) * _FACTORS[0] & _MASK
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1] & _MASK
    return z ^ (z >> _SHIFTS[2])


def _mix_tensor(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, _SHIFTS[0])) * _signed(_FACTORS[0])
    z = (z ^ _shifted(z, _SHIFTS[1])) * _signed(_FACTORS[1])
    return z ^ _shifted(z, _SHIFTS[2])


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """The shift of an unsigned number: int64's own drags the sign along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(z: int) -> int:
    z &= _MASK
    return z - 2**64 if z >= 2**63 else z
