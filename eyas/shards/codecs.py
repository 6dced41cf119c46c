"""Codecs: the hidden states of a sample as bytes, and back.

A sample has four layers of hidden states: three taps of T rows and the last of K rows, K <= T, at
`kept` positions.

    raw        plain
    lossless   the byte with sign and exponent by zstd-1, the others, which are noise, plain
    within4    the difference to the layer below, times a fixed weight (DPCM from decoded values:
               errors do not add up), in steps that make the root mean square of the error 4 % of
               each channel's size, by zstd-1; values beyond 127 steps (the giant activations of
               first tokens) are exact

Letters: T rows of a tap, K of the last hidden state, L the four layers, H hidden size.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

NUM_LAYERS = 4  # three taps and the last
LEVEL = 1  # of zstd: level 3 is larger and slower on this data
BLOCK = 1 << 17  # numbers that fit into a core's cache
MAX_STEPS, ESCAPE = 127, -128  # the code of an exact value
MEDIAN = 0.6745  # of |x| where x is normal of size 1; it ignores a few giants
LARGEST_MEDIAN = np.float32(1e30)  # beyond it a channel is exact
SIZED_ROWS = 1024  # for a channel's size

LayerStates = list[Tensor]
Floats = NDArray[np.float32]
Bits = NDArray[Any]  # uint16 or uint32: the patterns of bfloat16 or float32


@dataclass(frozen=True)
class Tables:
    """Step and weight of each layer and channel, float32 [L, H], rounded to bfloat16 as stored."""

    step: Floats
    weight: Floats

    @classmethod
    def of(cls, step: Floats, weight: Floats) -> Tables:
        return cls(_widened(_upper_half(step)), _widened(_upper_half(weight)))

    def to_text(self) -> str:
        halves = np.stack([_upper_half(self.step), _upper_half(self.weight)])
        return base64.b64encode(halves.tobytes()).decode()

    @classmethod
    def from_text(cls, text: str, hidden_size: int) -> Tables:
        """Raises ValueError."""
        halves = np.frombuffer(base64.b64decode(text, validate=True), dtype="<u2")
        step, weight = _widened(halves.reshape(2, NUM_LAYERS, hidden_size))
        return cls(step, weight)


class Codec(Protocol):
    def encode(self, layers: LayerStates, kept: Tensor) -> bytes:
        """layers: four [rows, H]; kept: bool [T], the tap rows with a last hidden state. Returns a
        multiple of 8 bytes.
        """

    def decode(self, data: memoryview, kept: Tensor) -> LayerStates:
        """Layers that share no memory with `data`. Raises ValueError or zstandard.ZstdError."""


def calibrate(name: CodecName, samples: Sequence[tuple[LayerStates, Tensor]]) -> Tables:
    """The tables of an inexact codec, from a split's first samples (layers, kept)."""
    rows = [
        torch.cat(parts).float() for parts in zip(*(layers for layers, _ in samples), strict=True)
    ]
    beside = torch.cat([layers[2][kept] for layers, kept in samples]).float()
    pairs = [(rows[0], rows[1]), (rows[1], rows[2]), (beside, rows[3])]
    sizes = [_size(one) for one in rows]
    weights = [np.zeros_like(sizes[0]), *(_slope(below, above) for below, above in pairs)]
    # a step's rounding error is step / sqrt(12)
    step = np.stack(sizes) * np.float32(CODECS[name].error * 12**0.5)
    return Tables.of(step, np.stack(weights))


def _size(rows: Tensor) -> Floats:
    """The standard deviation of each channel, never zero: [n, H] -> [H]."""
    if not len(rows):
        return np.ones(rows.shape[1], np.float32)
    some = rows[:: max(1, len(rows) // SIZED_ROWS)].nan_to_num().abs().T.contiguous().numpy()
    median = np.minimum(np.median(some, axis=1, overwrite_input=True), LARGEST_MEDIAN)
    size = (median / MEDIAN).astype(np.float32)
    typical = max(float(np.median(size)), 1e-6)
    sizes: Floats = np.where(size > 1e-3 * typical, size, np.float32(typical))
    return sizes


def _slope(below: Tensor, above: Tensor) -> Floats:
    """Least squares of `above` on `below`, without giants: [n, H], [n, H] -> [H]."""
    if not len(above):
        return np.zeros(above.shape[1], np.float32)
    limits = (6 * torch.from_numpy(_size(rows)) for rows in (below, above))
    pairs = zip((below, above), limits, strict=True)
    x, y = (rows.nan_to_num().clamp(-limit, limit) for rows, limit in pairs)
    slope: Floats = ((x * y).sum(0) / x.square().sum(0).clamp(min=1e-12)).numpy()
    return slope


class Raw:
    """Two tensors: the taps side by side, then the last hidden state."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, _: Tables | None = None) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype

    def encode(self, layers: LayerStates, kept: Tensor) -> bytes:
        return padded(_bits(torch.cat(layers[:3], dim=1)).tobytes() + _bits(layers[3]).tobytes())

    def decode(self, data: memoryview, kept: Tensor) -> LayerStates:
        T, K, H = len(kept), int(kept.sum()), self._hidden_size
        numbers = torch.frombuffer(bytearray(data), dtype=self._dtype)
        aux_hidden = numbers[: 3 * T * H].view(T, 3, H)
        return [*aux_hidden.unbind(1), numbers[3 * T * H : (3 * T + K) * H].view(K, H)]


class Lossless:
    """The highest byte of each number (sign and exponent) compressed, the others plain."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, _: Tables | None = None) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype

    def encode(self, layers: LayerStates, kept: Tensor) -> bytes:
        parts: list[bytes] = []
        for layer in layers:
            planes = _bits(layer).view(np.uint8).reshape(-1, self._dtype.itemsize)
            parts += [squeeze(planes[:, -1]), planes[:, :-1].tobytes()]
        return join_parts(parts)

    def decode(self, data: memoryview, kept: Tensor) -> LayerStates:
        layers, parts, H = [], split_parts(data, 2 * NUM_LAYERS), self._hidden_size
        for rows in _rows(kept):
            high, low = expand(next(parts), rows * H), np.frombuffer(next(parts), dtype=np.uint8)
            layers.append(_tensor(self._joined(high, low).reshape(rows, H), self._dtype))
        return layers

    def _joined(self, high: NDArray[np.uint8], low: NDArray[np.uint8]) -> Bits:
        if self._dtype == torch.bfloat16:  # by shifts, five times as fast as by strides
            bits = np.left_shift(high, 8, dtype=np.uint16)
            return np.bitwise_or(bits, low, out=bits)
        planes = np.empty((len(high), self._dtype.itemsize), np.uint8)
        planes[:, -1], planes[:, :-1] = high, low.reshape(len(high), self._dtype.itemsize - 1)
        return planes.view(f"<u{self._dtype.itemsize}").reshape(-1)


class Within:
    """Steps of the difference to the layer below, compressed."""

    def __init__(self, _: int, dtype: torch.dtype, tables: Tables | None) -> None:
        assert tables is not None
        self._dtype, self._step, self._weight = dtype, tables.step, tables.weight
        self._per_step = 1 / tables.step

    def encode(self, layers: LayerStates, kept: Tensor) -> bytes:
        parts: list[bytes] = []
        below: Floats | None = None
        # giants and NaN are kept exactly
        with np.errstate(invalid="ignore", over="ignore"):
            for number, layer in enumerate(layers):
                below = below[kept.numpy()] if number == 3 and below is not None else below
                values: Floats = layer.detach().float().numpy()
                codes, exact, below = self._encode(number, values, below)
                parts += [squeeze(codes), exact]
        return join_parts(parts)

    def _encode(
        self, number: int, values: Floats, below: Floats | None
    ) -> tuple[NDArray[np.int8], bytes, Floats]:
        """Codes [rows, H], the bytes of exact values, and what `decode` makes of both."""
        codes, decoded = np.empty(values.shape, np.int8), np.empty_like(values)
        for block in _blocks(*values.shape):
            expected = None if below is None else below[block] * self._weight[number]
            rest = values[block] if expected is None else values[block] - expected
            steps = np.rint(rest * self._per_step[number])
            steps[~(np.abs(steps) <= MAX_STEPS)] = ESCAPE
            codes[block] = steps
            made = steps * self._step[number]
            decoded[block] = made if expected is None else expected + made
        escaped = codes == ESCAPE
        decoded[escaped] = values[escaped]
        exact = _bits(torch.from_numpy(values[escaped]).to(self._dtype)).tobytes()
        return codes, exact, decoded

    def decode(self, data: memoryview, kept: Tensor) -> LayerStates:
        layers, parts, below = [], split_parts(data, 2 * NUM_LAYERS), None
        H = self._step.shape[1]
        for number, rows in enumerate(_rows(kept)):
            codes = expand(next(parts), rows * H).view(np.int8).reshape(rows, H)
            exact = np.frombuffer(next(parts), dtype=f"<u{self._dtype.itemsize}")
            if number == 3 and below is not None and rows < len(below):
                below = below[kept.numpy()]
            with np.errstate(invalid="ignore", over="ignore"):
                out, below = self._decode(number, codes, exact, below)
            layers.append(_tensor(out, self._dtype))
        return layers

    def _decode(
        self, number: int, codes: NDArray[np.int8], exact: Bits, below: Floats | None
    ) -> tuple[Bits, Floats]:
        """A layer as stored, and in float32 for the layer above."""
        decoded = np.empty(codes.shape, np.float32)
        out: Bits = np.empty(codes.shape, f"<u{self._dtype.itemsize}")
        is_half = out.dtype == np.uint16
        for block in _blocks(*codes.shape):
            np.multiply(codes[block], self._step[number], out=decoded[block], dtype=np.float32)
            if below is not None:
                decoded[block] += below[block] * self._weight[number]
            out[block] = _upper_half(decoded[block]) if is_half else decoded[block].view(np.uint32)
        if len(exact):
            escaped = codes == ESCAPE
            out[escaped] = exact
            decoded[escaped] = _widened(exact) if is_half else exact.view(np.float32)
        return out, decoded


# another codec is a name here and an entry below
CodecName = Literal["raw", "lossless", "within4"]


@dataclass(frozen=True, slots=True)
class CodecKind:
    """make: (hidden_size, dtype, tables) -> Codec. share: bytes / raw bytes on the built-in target
    (benchmarks/codecs.py). error: root mean square / a channel's size; 0 is exact, without tables.
    """

    make: Callable[[int, torch.dtype, Tables | None], Codec]
    share: float
    error: float = 0.0


CODECS: dict[CodecName, CodecKind] = {
    "raw": CodecKind(Raw, 1.0),
    "lossless": CodecKind(Lossless, 0.71),
    "within4": CodecKind(Within, 0.28, error=0.04),
}


def padded(data: bytes) -> bytes:
    """With zeros up to a multiple of 8."""
    return data + bytes(-len(data) % 8)


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Parts after their lengths, `padded`."""
    lengths = np.array([len(part) for part in parts], dtype="<u4").tobytes()
    return padded(b"".join([lengths, *parts]))


def split_parts(data: memoryview, count: int) -> Iterator[memoryview]:
    """Raises ValueError if lengths and bytes do not fit."""
    at = 4 * count
    if len(data) < at:
        raise ValueError("a sample has fewer bytes than the lengths of its parts take")
    lengths = np.frombuffer(data[:at], dtype="<u4")
    if at + int(lengths.sum(dtype=np.int64)) > len(data):
        raise ValueError("the lengths of a sample's parts do not fit its bytes")
    for length in lengths.tolist():
        yield data[at : at + length]
        at += length


class _Zstd(threading.local):
    """Contexts are not shared by threads, and making one costs as much as a use."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def squeeze(plane: NDArray[np.uint8] | NDArray[np.int8]) -> bytes:
    """zstd, with the size in the frame."""
    return _zstd.compressor.compress(np.ascontiguousarray(plane).view(np.uint8).data)


def expand(part: memoryview, size: int) -> NDArray[np.uint8]:
    """Raises ValueError, zstandard.ZstdError."""
    plane = np.frombuffer(_zstd.decompressor.decompress(part), dtype=np.uint8)
    if len(plane) != size:
        raise ValueError(f"a compressed plane has {len(plane)} bytes in place of {size}")
    return plane


def _rows(kept: Tensor) -> tuple[int, int, int, int]:
    T = len(kept)
    return T, T, T, int(kept.sum())


def _blocks(rows: int, hidden_size: int) -> Iterator[slice]:
    size = max(1, BLOCK // max(hidden_size, 1))
    return (slice(at, min(at + size, rows)) for at in range(0, rows, size))


def _bits(x: Tensor) -> Bits:
    kind = torch.uint16 if x.dtype == torch.bfloat16 else torch.uint32
    bits: Bits = x.detach().contiguous().view(kind).numpy()
    return bits


def _tensor(bits: Bits, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits).view(dtype)


def _upper_half(x: Floats) -> Bits:
    """float32 -> bfloat16, halves away from zero: two operations fewer than to even."""
    bits = np.ascontiguousarray(x).view(np.uint32) + np.uint32(0x8000)
    halves: Bits = np.right_shift(bits, 16, out=bits).astype("<u2")
    return halves


def _widened(bits: Bits) -> Floats:
    floats: Floats = np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    return floats
