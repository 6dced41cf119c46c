"""Rows of tables, as objects by column: CSV in whichever dialect, and Parquet by row groups. Knows
no meaning of a column.

A table's row stands on its own: one whose fields do not fit the header is Unreadable, since its
values may have moved into the columns of others.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from eyas.data.streams import LIMIT, LOOK, TOO_LONG, Broken, Lines, Stored, Unreadable, arrow

Rows = Iterator[tuple[int, Any]]  # (line, or row of a Parquet file, from 1; object or Unreadable)

DELIMITERS = ",\t;|"
SAMPLE = 50  # rows by which a dialect is judged
BATCH_BYTES, MAX_BATCH = 4 << 20, 1024  # of a Parquet file, unpacked; rows


class CsvReader(Protocol):
    """What csv.reader gives; the module does not name its class."""

    line_num: int

    def __next__(self) -> list[str]: ...

    def __iter__(self) -> Iterator[list[str]]: ...


# the limit here is that of a whole row; the module's own, 128 KiB, is less than some prompts
csv.field_size_limit(LIMIT)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a CSV file is written. escape: quotes in quotes are `\\"`, not `""`. is_table: a known
    column beside others.
    """

    delimiter: str = ","
    escape: bool = False
    quoted: bool = True
    is_table: bool = False
    spans_lines: bool = False

    def rows(self, lines: Iterable[str]) -> CsvReader:
        """The fields of each row. Raises csv.Error where the quoting is broken."""
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            doublequote=not self.escape,
            escapechar="\\" if self.escape else None,
            quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            strict=True,
        )


def dialect_of(head: bytes, keys: frozenset[str]) -> Dialect:
    """The dialect in which the head's first rows fit their header best, one that names columns of
    `keys` before all others.
    """
    text = head.decode("utf-8", "surrogateescape")
    # the last line is cut
    whole = text if len(head) < LOOK else text[: text.rfind("\n") + 1] or text
    # Python is lenient where quotes are escaped: not without need
    escapes = (False, True) if '\\"' in whole else (False,)
    delimiters = [
        delimiter for delimiter in DELIMITERS if delimiter in whole.split("\n", 1)[0]
    ] or [","]
    candidates = [Dialect(delimiter, escape) for delimiter in delimiters for escape in escapes]
    candidates += [
        Dialect(delimiter, quoted=False) for delimiter in delimiters if delimiter == "\t"
    ]
    fits = [_fit(dialect, whole, keys) for dialect in candidates]
    best = max(range(len(candidates)), key=lambda index: fits[index][:3])
    known, columns, fitting, spans_lines = fits[best]
    return replace(
        candidates[best],
        is_table=known > 0 and columns > 1 and fitting > 0,
        spans_lines=spans_lines,
    )


def _fit(dialect: Dialect, text: str, keys: frozenset[str]) -> tuple[int, int, float, bool]:
    """(known columns, columns, share of the sample's rows that fit the header, whether a row that
    fits has several lines).
    """
    rows, line = dialect.rows(io.StringIO(text, newline="\n")), 0
    known = columns = count = fitting = 0
    spans_lines = False
    try:
        header = _names(next(rows, []))
        known, columns, line = len(keys.intersection(header)), len(header), rows.line_num
        for fields in itertools.islice(rows, SAMPLE):
            if fields:
                count += 1
                fitting += len(fields) == columns
                spans_lines = spans_lines or (len(fields) == columns and rows.line_num > line + 1)
            line = rows.line_num
    except csv.Error:
        count += 1
    return known, columns, fitting / max(count, 1), spans_lines


def _names(header: list[str]) -> list[str]:
    return [name.strip().lower() for name in header]


def csv_rows(lines: Lines, dialect: Dialect) -> Rows:
    """The rows below the header, which is the first row, by its names in lower case.

    Broken quoting costs its own line. In a file with line breaks in quotes it costs the rest:
    nobody can tell where a field ends, and what an assistant wrote in one column could be taken for
    another. Raises Broken.
    """
    feed = _Feed(lines)
    header: list[str] = []
    spans_lines = dialect.spans_lines
    rows = dialect.rows(feed)
    while True:
        feed.begin()
        try:
            fields = next(rows, None)
        except Broken:
            raise
        except (csv.Error, Unreadable) as error:
            if not header or (spans_lines and not feed.is_one_line):
                yield (
                    feed.start,
                    Unreadable(
                        f"the quoting {'' if header else 'of the header '}is broken here; the rest "
                        "is lost"
                    ),
                )
                return
            yield (
                feed.start,
                error
                if isinstance(error, Unreadable)
                else Unreadable("not CSV: the quoting is broken"),
            )
            feed.give_back()
            rows = dialect.rows(feed)
            continue
        if fields is None:
            return
        spans_lines = spans_lines or len(feed.taken) > 1
        if fields and header:
            yield feed.start, _object(header, fields)
        header = header or _names(fields)
        if len(set(header)) < len(header):
            yield feed.start, Unreadable("two columns of one name")
            return


def _object(header: list[str], fields: list[str]) -> dict[str, str] | Unreadable:
    if len(fields) != len(header):
        return Unreadable(f"{len(fields)} fields, but {len(header)} columns")
    text = "".join(fields)
    if "\0" in text:
        return Unreadable("not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Unreadable("not UTF-8")
    return dict(zip(header, fields, strict=True))


class _Feed:
    """Lines as text for the CSV reader. `taken` are those of the row that is being read, each with
    its number.
    """

    def __init__(self, lines: Lines) -> None:
        self.taken: list[tuple[int, str | None]] = []
        # the row that failed is one line too long to read, and its quotes pair up
        self.is_one_line = False
        self._lines, self._waiting = lines, iter(lines)
        self._again: deque[tuple[int, str | None]] = deque()
        self._length = 0

    @property
    def start(self) -> int:
        """The line on which the row begins."""
        return self.taken[0][0] if self.taken else self._lines.line

    def begin(self) -> None:
        """Begin a row."""
        self.taken, self._length, self.is_one_line = [], 0, False

    def give_back(self) -> None:
        """Have all lines but the first read once more, as rows of their own."""
        self._again.extendleft(reversed(self.taken[1:]))

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        number, text = self._again.popleft() if self._again else self._read()
        self.taken.append((number, text))
        self._length += len(text or "")
        if text is None or self._length > LIMIT:
            self.is_one_line = text is None and len(self.taken) == 1 and self._lines.quotes % 2 == 0
            raise Unreadable(TOO_LONG)
        return text

    def _read(self) -> tuple[int, str | None]:
        text = next(self._waiting)
        return self._lines.line, None if text is None else text.decode("utf-8", "surrogateescape")


def parquet_rows(stored: Stored, keys: frozenset[str]) -> Rows:
    """The rows of a Parquet file by row group, with no other columns than `keys`; a damaged group
    is one Unreadable.

    Raises InputError (pyarrow is not installed, or the store fails).
    """
    pyarrow, parquet = arrow("", "Parquet"), arrow("parquet", "Parquet")
    # Arrow's own; the store's are InputError by now
    faults = (OSError, pyarrow.ArrowException, UnicodeDecodeError)
    try:
        file = parquet.ParquetFile(
            pyarrow.PythonFile(stored, mode="r"), page_checksum_verification=True
        )
        columns = [name for name in file.schema_arrow.names if name in keys]
    except faults:
        yield 1, Unreadable("the Parquet file is cut or damaged: it has no readable footer")
        return
    first = 1
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        line = first
        try:
            for batch in file.iter_batches(
                _batch_size(file, group), [group], columns, use_threads=False
            ):
                for row in _objects(batch):
                    yield line, row
                    line += 1
        except faults:
            yield (
                line,
                Unreadable(
                    f"row group {group} of the Parquet file is damaged: {first + num_rows - line} "
                    "rows are lost"
                ),
            )
        first += num_rows


def _batch_size(file: Any, group: int) -> int:
    """Rows that hold a few megabytes, going by the group's mean."""
    facts = file.metadata.row_group(group)
    mean = facts.total_byte_size / max(facts.num_rows, 1)
    return int(min(max(BATCH_BYTES / max(mean, 1), 1), MAX_BATCH))


def _objects(batch: Any) -> Iterator[dict[str, Any] | Unreadable]:
    """The rows of a batch; by themselves only where one of them cannot be had."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                row = batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                row = Unreadable("not UTF-8")
            yield row
