"""The memory: what followed one, two and three tokens most often in answers of the same target.

One file, `memory.safetensors`, mapped into memory and never read as a whole:

    keys_n      uint64 [M_n], ascending: n tokens of 21 bits, the last one lowest, n = 1, 2, 3
    next_n      int32 [M_n], the token that followed them most often
    share_n     uint8 [M_n], 255 times its count by all counts and one: few counts are not sure

Its metadata says of which vocabulary it is; what it was made of is in the manifest beside it. Knows
tokens and counts; no text. `features/memory.py` makes it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors.numpy import save

from eyas.engine.text import CHAIN, FIRST_ACCEPTANCE, LONGEST_CONTEXT, TextChain, kind_in_memory
from eyas.errors import CorruptError, MismatchError, MissingInputError

FILE = "memory.safetensors"
TOKEN_BITS = 21
LEAST_COUNT = 2  # of a context: what was said once is as good as a guess
_FORMAT = "1"
_TOKEN = (1 << TOKEN_BITS) - 1
_LEAST_PATH = 0.03  # a chain ends where hardly anything is expected of it any more
_DTYPES = {"U64": np.uint64, "I32": np.int32, "U8": np.uint8}


class TokenTable(Protocol):
    """What says which token has which id."""

    def get_vocab(self) -> dict[str, int]: ...


class TextMemory:
    """Looks up what follows the last tokens."""

    def __init__(self, arrays: dict[str, np.ndarray], vocab_size: int, digest: str) -> None:
        """arrays: by the names above. digest: of the vocabulary (`vocabulary_digest`)."""
        self.vocab_size, self._digest = vocab_size, digest
        # of a memoryview a number is read without the cost of an array's
        self._levels = [
            tuple(memoryview(arrays[f"{name}_{n}"].data) for name in ("keys", "next", "share"))
            for n in range(1, LONGEST_CONTEXT + 1)
        ]

    @classmethod
    def open(cls, folder: str | Path) -> TextMemory:
        """Raises MissingInputError, CorruptError."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise MissingInputError(
                f"{folder} holds no {FILE}", "make one of answers: eyas memory ANSWERS -o FOLDER"
            )
        try:
            with path.open("rb") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(start - 8))
            facts = header.pop("__metadata__")
            arrays = {
                name: np.memmap(
                    path,
                    _DTYPES[one["dtype"]],
                    "r",
                    start + one["data_offsets"][0],
                    tuple(one["shape"]),
                )
                if one["shape"] != [0]
                else np.empty(0, _DTYPES[one["dtype"]])
                for name, one in header.items()
            }
            if facts["format"] != _FORMAT:
                raise ValueError(f"format {facts['format']}")
            made = cls(arrays, int(facts["vocab_size"]), facts["vocabulary"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"{path} is no memory that can be read: {error}", "make it again"
            ) from error
        return made

    def check(self, vocab_size: int, tokenizer: TokenTable | None) -> None:
        """Raise MismatchError unless its tokens are these. Another model's answers are no error:
        they are drafts.
        """
        is_other = tokenizer is not None and vocabulary_digest(tokenizer) != self._digest
        if self.vocab_size != vocab_size or is_other:
            raise MismatchError(
                f"the memory has another vocabulary, of {self.vocab_size} tokens",
                "make one of this target's own answers (eyas memory), or leave it out",
            )

    def chain(self, tokens: Sequence[int]) -> TextChain | None:
        """What follows the last tokens most often, step by step."""
        known = list(tokens[-LONGEST_CONTEXT:])
        found, kinds, path = [], [], 1.0
        for depth in range(CHAIN):
            hit = self._next(known)
            if hit is None:
                break
            token, context, share = hit
            kind = kind_in_memory(context, share, not depth)
            path *= FIRST_ACCEPTANCE[kind // 2]
            if path < _LEAST_PATH:
                break
            found.append(token)
            kinds.append(kind)
            known = [*known[1 - LONGEST_CONTEXT :], token]
        return TextChain(found, kinds) if found else None

    def _next(self, known: list[int]) -> tuple[int, int, float] | None:
        """The token behind the longest context that it has, how long that is, and its share."""
        for n in range(min(len(known), LONGEST_CONTEXT), 0, -1):
            key = 0
            for token in known[len(known) - n :]:
                key = key << TOKEN_BITS | token
            keys, following, share = self._levels[n - 1]
            place = bisect_left(keys, key)
            if place < len(keys) and keys[place] == key:
                return following[place], n, share[place] / 255
        return None


def counted(answers: Iterable[Sequence[int] | np.ndarray], most: int) -> dict[str, np.ndarray]:
    """The arrays of a memory of these answers' tokens, `most` contexts at most of each length:
    those seen most often, of equally frequent ones the lower key.
    """
    rows = [np.asarray(tokens, dtype=np.int64) for tokens in answers]
    arrays: dict[str, np.ndarray] = {}
    for n in range(1, LONGEST_CONTEXT + 1):
        keys, following = _runs(rows, n)
        order = np.lexsort((following, keys))
        keys, following = keys[order], following[order]
        # each pair of context and token, and its count; then each context and its best pair
        first = np.flatnonzero(
            np.r_[True, (keys[1:] != keys[:-1]) | (np.diff(following) != 0)][: len(keys)]
        )
        counts = np.diff(np.r_[first, len(keys)])
        keys, following = keys[first], following[first]
        begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]][: len(keys)])
        totals = np.add.reduceat(counts, begins) if len(begins) else counts
        context = np.repeat(np.arange(len(begins)), np.diff(np.r_[begins, len(keys)]))
        best = np.lexsort((following, -counts, context))[begins]
        kept = np.flatnonzero(totals >= LEAST_COUNT)
        if len(kept) > most:
            kept = np.sort(kept[np.argsort(-totals[kept], kind="stable")[:most]])
        best = best[kept]
        share = 255 * counts[best] / (totals[kept] + 1)
        arrays[f"keys_{n}"] = keys[best].astype(np.uint64)
        arrays[f"next_{n}"] = following[best].astype(np.int32)
        arrays[f"share_{n}"] = share.astype(np.uint8)
    return arrays


def _runs(rows: Sequence[np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Every run of n tokens within an answer as a key, and the token behind it, int64."""
    keys, following = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for row in rows:
        if len(row) > n:
            key = np.zeros(len(row) - n, dtype=np.int64)
            for at in range(n):
                key = key << TOKEN_BITS | row[at : at + len(key)]
            keys.append(key)
            following.append(row[n:])
    return np.concatenate(keys), np.concatenate(following)


def vocabulary_digest(tokenizer: TokenTable) -> str:
    """16 hex digits over all tokens and their ids."""
    rows = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def packed(arrays: dict[str, np.ndarray], vocab_size: int, digest: str) -> bytes:
    """The file's bytes."""
    assert vocab_size <= _TOKEN, "a token has 21 bits"
    facts = {"format": _FORMAT, "vocab_size": str(vocab_size), "vocabulary": digest}
    data: bytes = save(arrays, facts)
    return data
