"""Rows of tables as objects by column: CSV in any dialect, and Parquet by row groups.

A row stands on its own: one whose fields do not fit the header is Unreadable, since its values may
have moved into other columns. CSV is read by `csv`: docs/decisions/prompts-stage.md says why not by
pyarrow. Knows no meaning of a column.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from eyas.data.streams import (
    LIMIT,
    LOOK,
    TOO_LONG,
    BrokenStream,
    FileValues,
    LineReader,
    StoreFile,
    Unreadable,
    arrow,
    is_encodable,
)

DELIMITERS = ",\t;|"
SAMPLE = 50  # rows by which a dialect is judged

# The limit is that of a whole row: the default of the module, 128 KiB, is less than some prompts.
csv.field_size_limit(LIMIT)


class CsvReader(Protocol):
    """The type of csv.reader, which the module does not name."""

    line_num: int

    def __next__(self) -> list[str]: ...

    def __iter__(self) -> Iterator[list[str]]: ...


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """How a CSV file is written. escape: quotes in quotes are `\\"`, not `""`; is_table: a known
    column beside others; spans_lines: a field has line breaks.
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


def dialect_of(head: bytes, keys: frozenset[str]) -> CsvDialect:
    """The dialect in which the first rows fit their header best; a header with columns of `keys`
    comes first.
    """
    text = head.decode("utf-8", "surrogateescape")
    # The last line of a full head is cut.
    whole = text if len(head) < LOOK else text[: text.rfind("\n") + 1] or text
    # `csv` accepts escaped quotes too easily: only where they occur.
    escapes = (False, True) if '\\"' in whole else (False,)
    delimiters = [
        delimiter for delimiter in DELIMITERS if delimiter in whole.split("\n", 1)[0]
    ] or [","]
    candidates = [CsvDialect(delimiter, escape) for delimiter in delimiters for escape in escapes]
    candidates += [
        CsvDialect(delimiter, quoted=False) for delimiter in delimiters if delimiter == "\t"
    ]
    fits = [_fit(dialect, whole, keys) for dialect in candidates]
    best = max(range(len(candidates)), key=lambda index: fits[index][:3])
    known, columns, fitting, spans_lines = fits[best]
    return replace(
        candidates[best],
        is_table=known > 0 and columns > 1 and fitting > 0,
        spans_lines=spans_lines,
    )


def _fit(dialect: CsvDialect, text: str, keys: frozenset[str]) -> tuple[int, int, float, bool]:
    """(known columns, columns, share of sampled rows that fit the header, whether one of these has
    several lines).
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


def csv_rows(lines: LineReader, dialect: CsvDialect) -> FileValues:
    """The rows below the header, as objects by column names in lower case.

    Broken quoting costs its own line. In a file with line breaks in quotes it costs the rest: where
    a field ends is unknown, and what an assistant wrote in one column could be read as another.
    Raises BrokenStream.
    """
    feed = CsvFeed(lines)
    header: list[str] = []
    spans_lines = dialect.spans_lines
    rows = dialect.rows(feed)
    while True:
        feed.begin()
        try:
            fields = next(rows, None)
        except BrokenStream:
            raise
        except (csv.Error, Unreadable) as error:
            if not header or (spans_lines and not feed.is_one_line):
                of_header = "" if header else "of the header "
                problem = f"the quoting {of_header}is broken here; the rest is lost"
                yield feed.start, Unreadable(problem)
                return
            if not isinstance(error, Unreadable):
                error = Unreadable("not CSV: the quoting is broken")
            yield feed.start, error
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
    if not is_encodable(text):
        return Unreadable("not UTF-8")
    return dict(zip(header, fields, strict=True))


class CsvFeed:
    """Lines as text for csv.reader. taken: the lines of the current row, with their numbers."""

    def __init__(self, lines: LineReader) -> None:
        self.taken: list[tuple[int, str | None]] = []
        # The row that failed is one line too long to read, and its quotes pair up.
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
        """Read all lines of the row but the first once more, as rows of their own."""
        self._again.extendleft(reversed(self.taken[1:]))

    def __iter__(self) -> CsvFeed:
        return self

    def __next__(self) -> str:
        if self._again:
            number, text = self._again.popleft()
        else:
            line = next(self._waiting)
            number = self._lines.line
            text = None if line is None else line.decode("utf-8", "surrogateescape")
        self.taken.append((number, text))
        self._length += len(text or "")
        if text is None or self._length > LIMIT:
            self.is_one_line = text is None and len(self.taken) == 1 and self._lines.quotes % 2 == 0
            raise Unreadable(TOO_LONG)
        return text


# Parquet.

BATCH_BYTES, MAX_BATCH = 4 << 20, 1024  # decompressed bytes, rows


def parquet_rows(file: StoreFile, keys: frozenset[str] | None) -> FileValues:
    """The rows of a Parquet file by row group, only the columns in `keys` (None: all); a damaged
    group is one Unreadable.

    Raises InputError (pyarrow is not installed, or the store fails).
    """
    pyarrow, parquet = arrow("", "Parquet"), arrow("parquet", "Parquet")
    # Those of Arrow: those of the store are InputError already.
    faults = (OSError, pyarrow.ArrowException, UnicodeDecodeError)
    try:
        table = parquet.ParquetFile(
            pyarrow.PythonFile(file, mode="r"), page_checksum_verification=True
        )
        names = table.schema_arrow.names
        columns = [name for name in names if keys is None or name in keys]
    except faults:
        yield 1, BrokenStream("the Parquet file is cut or damaged: it has no readable footer")
        return
    first = 1
    for group in range(table.num_row_groups):
        facts = table.metadata.row_group(group)
        mean = facts.total_byte_size / max(facts.num_rows, 1)
        batch_rows = int(min(max(BATCH_BYTES / max(mean, 1), 1), MAX_BATCH))
        line = first
        try:
            for batch in table.iter_batches(batch_rows, [group], columns, use_threads=False):
                for row in _batch_rows(batch):
                    yield line, row
                    line += 1
        except faults:
            lost = first + facts.num_rows - line
            problem = f"row group {group} of the Parquet file is damaged: {lost} rows are lost"
            yield line, BrokenStream(problem)
        first += facts.num_rows


def parquet_columns(file: StoreFile) -> list[str]:
    """The names of the columns; none, if the file is damaged. Raises InputError as
    `parquet_rows`.
    """
    pyarrow, parquet = arrow("", "Parquet"), arrow("parquet", "Parquet")
    try:
        return list(parquet.read_schema(pyarrow.PythonFile(file, mode="r")).names)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError):
        return []


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | Unreadable]:
    """The rows of a batch; one at a time only if one of them is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                row = batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                row = Unreadable("not UTF-8")
            yield row
