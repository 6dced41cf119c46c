"""Blocks of rows on disk, and the selection: which of the remaining rows are taken, and their ids.
What depends on other rows (duplicates, limits, match, ids) is decided on digests of them all.

    work/block-00000.npz     arrays over the remaining rows, in order: what decisions are made from
    work/block-00000.jsonl   a line per row in: {"row": ...} as the filters changed it, or
                             {"drop": ...}, its redacted line; written last: the block is finished

Letters: R remaining rows, known by their number in the order of the sources. B bands of a
signature, S beginnings of conversations.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.artifact import WORK, Artifact
from eyas.data.duplicates import (
    BANDS,
    NONE,
    HashArray,
    IndexArray,
    beginning_keys,
    beginnings,
    exact,
    near,
    signature,
    text_hash,
    text_key,
)
from eyas.data.ledger import DamagedRow, Drop, SourceRow
from eyas.data.match import CountArray, GramBlock, Profile, RowMask, sample, select_like
from eyas.privacy.findings import Finding, NameSearch

BLOCK_ROWS = 500
BLOCK_CHARACTERS = 4_000_000  # a block ends early at so many, for the memory

# Why a row is not taken ("": it is), with the beginning of its note; the index is stored.
NOTES = {
    "": "",
    "duplicate.exact": "the same as",
    "duplicate.near": "nearly the same as",
    "duplicate.beginning": "goes on in",
    "match": "others resemble the traffic more",
    "limit": "there are enough",
}
REASONS = tuple(NOTES)
TAKEN, EXACT, NEAR, BEGINNING, MATCH, LIMIT = range(len(REASONS))
SELECTION_REASONS = {  # heads of reasons, with their meaning
    "duplicate": "says the same as an earlier row, or nearly; or another row goes on from it",
    "match": "not drawn: others resemble the traffic more",
    "limit": "more than `max_prompts`, of its source or of all",
}
ID_DIGITS = 16  # of the text hash, in hex
NO_ID = 0
HASH_ID = re.compile(rf"[0-9a-f]{{{ID_DIGITS}}}")

BlockArrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows, across the end of a source."""

    number: int
    rows: tuple[SourceRow | DamagedRow, ...]


@dataclass(frozen=True, slots=True)
class BlockResult:
    """A cleaned block. lines: JSON, one per row in; arrays: by name, over the remaining rows."""

    number: int
    lines: bytes
    arrays: BlockArrays


def cut(rows: Iterable[SourceRow | DamagedRow]) -> Iterator[RowBlock]:
    """The rows as blocks. Where they are cut depends on the rows alone."""
    number, held, characters = 0, list[SourceRow | DamagedRow](), 0
    for row in rows:
        held.append(row)
        characters += row.all_characters if isinstance(row, SourceRow) else 0
        if len(held) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
            yield RowBlock(number, tuple(held))
            number, held, characters = number + 1, [], 0
    if held:
        yield RowBlock(number, tuple(held))


def block_lines(rows: Iterable[SourceRow | dict[str, Any]]) -> tuple[bytes, NDArray[np.uint32]]:
    """The lines of remaining rows and of dropped ones, given as `dropped_line`, and the bytes
    [start, end) of each that remains: [rows, 2].
    """
    lines: list[bytes] = []
    places: list[tuple[int, int]] = []
    size = 0
    for row in rows:
        value = {"row": asdict(row)} if isinstance(row, SourceRow) else {"drop": row}
        lines.append(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        if isinstance(row, SourceRow):
            places.append((size, size + len(lines[-1])))
        size += len(lines[-1])
    return b"".join(lines), np.array(places, dtype=np.uint32).reshape(-1, 2)


def row_digests(rows: Sequence[SourceRow]) -> BlockArrays:
    """Keys of the texts [R, 2], signatures [R, B], hashes of the rows' own ids [R]; keys of what
    rows go on from [S, 2], and the row of each [S].
    """
    keys = [text_key(text_hash(row)) for row in rows]
    bands = [signature(row) for row in rows]
    begun = [(key, row) for row, one in enumerate(rows) for key in beginning_keys(one)]
    ids = [NO_ID if row.id is None else id_hash(row.id) for row in rows]
    return {
        "text_key": np.array(keys, dtype=np.uint64).reshape(-1, 2),
        "bands": np.array(bands, dtype=np.uint64).reshape(-1, BANDS),
        "id": np.array(ids, dtype=np.uint64),
        "begun": np.array([key for key, _ in begun], dtype=np.uint64).reshape(-1, 2),
        "begun_by": np.array([row for _, row in begun], dtype=np.int64),
    }


def id_hash(id: str) -> int:
    """64 bits for an id, never NO_ID; its own digits, if it looks like a text hash."""
    if HASH_ID.fullmatch(id):
        return int(id, 16) or 1
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big") or 1


class BlockStore:
    """The finished blocks of an artifact."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    def has(self, number: int) -> bool:
        return self._artifact.exists(_file(number, "jsonl"))

    def write(self, result: BlockResult) -> None:
        """Store a finished block, its lines last."""
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **result.arrays)
        self._artifact.write(_file(result.number, "npz"), stream.getvalue())
        self._artifact.write(_file(result.number, "jsonl"), result.lines)

    def arrays(self, number: int, *names: str) -> BlockArrays:
        """Arrays of a finished block, by name; without names, all."""
        data = io.BytesIO(self._artifact.read(_file(number, "npz")))
        with np.load(data, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names or arrays.files}

    def lines(self, number: int) -> Iterator[SourceRow | dict[str, Any]]:
        """A finished block: each row that remains, the lines of the others."""
        for line in self._artifact.read(_file(number, "jsonl")).splitlines():
            value = json.loads(line)
            yield _row(value["row"]) if "row" in value else value["drop"]

    def row(self, number: int, start: int, end: int) -> SourceRow:
        """The row whose line is bytes [start, end) of a finished block."""
        line = self._artifact.read_range(_file(number, "jsonl"), start, end)
        return _row(json.loads(line)["row"])


def _file(number: int, kind: str) -> str:
    return f"{WORK}/block-{number:05d}.{kind}"


def _row(value: dict[str, Any]) -> SourceRow:
    parts = {name: tuple(value[name]) for name in ("turns", "compared")}
    parts["masked"] = tuple(Finding(**one) for one in value["masked"])
    parts["names"] = tuple(NameSearch(**one) for one in value["names"])
    return SourceRow(**{**value, **parts})


class RemainingRows:
    """The rows that remain in the first `count` blocks by number, and their digests: 300 bytes a
    row, and with `match` two for each n-gram.
    """

    def __init__(self, store: BlockStore, count: int) -> None:
        self.num_blocks = count
        self.store = store
        blocks = [store.arrays(number) for number in range(count)]
        self._ends = np.cumsum([len(one["id"]) for one in blocks])
        for number, one in enumerate(blocks):
            one["begun_by"] += self.first(number)
        names = blocks[0] if blocks else ()
        self.arrays = {name: np.concatenate([one[name] for one in blocks]) for name in names}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.num_blocks else 0

    def first(self, block: int) -> int:
        return int(self._ends[block - 1]) if block else 0

    def row(self, number: int) -> SourceRow:
        block = int(np.searchsorted(self._ends, number, side="right"))
        start, end = self.arrays["place"][number]
        return self.store.row(block, int(start), int(end))

    @property
    def grams(self) -> GramBlock:
        return GramBlock(*(self.arrays[name] for name in ("grams", "counts", "characters")))

    def profile(self, labels: Sequence[str], keep: RowMask) -> Profile:
        """The profile of the rows in `keep`. labels: names of the sources."""
        made = Profile()
        made.add(self.grams, keep)
        counts = np.bincount(self.arrays["source"][keep]).tolist()
        made.sources.update({labels[place]: count for place, count in enumerate(counts)})
        made.languages.update(self.arrays["language"][keep].tolist())
        return made


@dataclass(frozen=True)
class Selection:
    """The decision on each row.

    reason: [R], index in REASONS; same_as: [R], the earlier row that it repeats, or the one that
    goes on from it, or NONE; keeps_id: [R], whether it keeps the id of its source. Otherwise its id
    is the beginning of its text hash or, where that is taken, its name in `names`.
    """

    num_blocks: int
    reason: NDArray[np.uint8]
    same_as: IndexArray
    keeps_id: RowMask
    names: Mapping[int, str]

    def to_bytes(self) -> bytes:
        """For the disk."""
        stream = io.BytesIO()
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        parts["names"] = json.dumps([*self.names.items()])
        np.savez(stream, allow_pickle=False, **parts)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Selection:
        """The reverse of to_bytes."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            same_as, keeps_id = arrays["same_as"], arrays["keeps_id"]
            names = dict(json.loads(str(arrays["names"])))
            return cls(int(arrays["num_blocks"]), arrays["reason"], same_as, keeps_id, names)

    @functools.cached_property
    def taken(self) -> RowMask:
        return np.equal(self.reason, TAKEN)

    @property
    def unrepeated(self) -> RowMask:
        return ~np.isin(self.reason, (EXACT, NEAR, BEGINNING))

    @property
    def num_taken(self) -> int:
        return int(self.taken.sum())

    def drop(self, number: int, rows: RemainingRows) -> Drop | None:
        if not (reason := REASONS[self.reason[number]]):
            return None
        note = NOTES[reason]
        if self.same_as[number] != NONE:
            other = rows.row(int(self.same_as[number]))
            note = f"{note} {other.where} of {other.source}"
        return Drop(reason, note)

    def id(self, number: int, row: SourceRow) -> str:
        """The id of a row that is taken."""
        if self.keeps_id[number]:
            assert row.id is not None, "a row without an id keeps none"
            return row.id
        return self.names.get(number) or text_hash(row)[:ID_DIGITS]


@dataclass(frozen=True)
class SelectionRules:
    """What to take. near: a Jaccard; limits: by source, None for all of its rows; traffic: counts
    by bucket, of which `num_prompts` rows have the distribution; limit: of all rows.
    """

    near: float | None
    limits: Sequence[int | None]
    traffic: CountArray | None = None
    num_prompts: int | None = None
    limit: int | None = None
    seed: int = 0

    @property
    def draws(self) -> bool:
        """Whether rows are drawn, not taken from the first."""
        return self.traffic is not None or any(limit is not None for limit in self.limits)


def select(rows: RemainingRows, rules: SelectionRules) -> Selection:
    """Decide on every row."""
    if not len(rows):
        nothing = np.empty(0, np.int64)
        return Selection(rows.num_blocks, nothing.astype(np.uint8), nothing, nothing == 0, {})
    keys, sources = rows.arrays["text_key"], rows.arrays["source"]
    same_as = exact(keys)
    reason = np.where(same_as == NONE, TAKEN, EXACT).astype(np.uint8)
    longer = beginnings(keys, sources, rows.arrays["begun"], rows.arrays["begun_by"])
    is_beginning = (reason == TAKEN) & (longer != NONE)
    same_as = np.where(is_beginning, longer, same_as)
    reason[is_beginning] = BEGINNING
    if rules.near is not None:
        like = near(rows.arrays["bands"], rows.row, reason == TAKEN, rules.near)
        reason[like != NONE] = NEAR
        same_as = np.where(like == NONE, same_as, like)
    for source, limit in enumerate(rules.limits):
        if limit is not None:
            of_source = (reason == TAKEN) & (sources == source)
            weights = np.where(of_source, 0.0, -np.inf)
            reason[of_source & ~sample(weights, keys[:, 0], limit, rules.seed)] = LIMIT
    if rules.traffic is not None:
        limits = [one for one in (rules.num_prompts, rules.limit) if one is not None]
        pick = functools.partial(sample, keys=keys[:, 0], num=min(limits), seed=rules.seed)
        alive = reason == TAKEN
        reason[alive & ~select_like(rows.grams, alive, rules.traffic, pick)] = MATCH
    if rules.limit is not None:
        reason[np.flatnonzero(reason == TAKEN)[rules.limit :]] = LIMIT
    keeps_id, names = unique_names(rows.arrays["id"], keys, reason == TAKEN)
    return Selection(rows.num_blocks, reason, same_as, keeps_id, names)


def unique_names(
    ids: HashArray, text_keys: HashArray, taken: RowMask
) -> tuple[RowMask, dict[int, str]]:
    """Which taken rows keep their id, [R]: the first of each; names for those whose text hash
    begins like another name.
    """
    keeps = np.zeros(len(ids), np.bool_)
    with_id = np.flatnonzero(taken & (ids != NO_ID))
    keeps[with_id[np.unique(ids[with_id], return_index=True)[1]]] = True
    others = np.flatnonzero(taken & ~keeps)
    made = text_keys[others, 0]
    first = np.zeros(len(others), np.bool_)
    first[np.unique(made, return_index=True)[1]] = True
    clashing = others[~first | np.isin(made, ids[keeps])]
    used = set(ids[keeps].tolist()) if len(clashing) else set()
    names: dict[int, str] = {}
    for number in clashing.tolist():
        longer = "".join(f"{half:0{ID_DIGITS}x}" for half in text_keys[number].tolist())
        names[number] = next(
            name for count in itertools.count() if id_hash(name := f"{longer}.{count}") not in used
        )
        used.add(id_hash(names[number]))
    return keeps, names
