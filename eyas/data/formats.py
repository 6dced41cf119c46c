"""From a file to its values, each with the line on which it begins: JSON, JSON lines, CSV, Parquet
and plain text.

The format is recognised by content; the name decides only where the content could be several. Holds
one value and one buffer, however long the file. A value that cannot be read comes as Unreadable;
where everything after it is lost, that is one more Unreadable, the last. Knows no meaning of
values.

Arrays of JSON are split by this file and parsed by `json`, and CSV is read by `csv`:
docs/decisions/prompts-stage.md says why not by ijson and pyarrow.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from eyas.data.streams import (
    LIMIT,
    LOOK,
    PARQUET_MAGIC,
    TOO_LONG,
    BrokenStream,
    LineReader,
    StoreFile,
    Unreadable,
    arrow,
    as_utf8,
    decompressed,
)

FileValues = Iterator[tuple[int, Any]]  # (line or row of Parquet from 1, value or Unreadable)
TextFormat = Literal["array", "objects", "json lines", "csv", "lines", "paragraphs"]
# What single texts are: strings of JSON, lines, or what stands between blank lines.
TextUnit = Literal["strings", "lines", "paragraphs"]

PACKED_ENDINGS = frozenset({"gz", "bz2", "xz", "zst"})
ENDINGS: dict[str, TextFormat | Literal["parquet"]] = {
    "json": "json lines",
    "jsonl": "json lines",
    "ndjson": "json lines",
    "csv": "csv",
    "tsv": "csv",
    "txt": "lines",
    "text": "lines",
    "parquet": "parquet",
}

DECODER = json.JSONDecoder()
OBJECT_LINE = re.compile(rb"^[ \t]*\{[ \t]*\"", re.M)
SOLID_LINE = re.compile(rb"^[ \t\r]*[^ \t\r\n]", re.M)


def ending(name: str) -> str:
    """The format in a file's name, without compression: "jsonl" of "a.JSONL.gz"; "" if unknown."""
    parts = name.lower().rsplit("/", 1)[-1].split(".")[1:]
    while parts and parts[-1] in PACKED_ENDINGS:
        parts.pop()
    return parts[-1] if parts and parts[-1] in ENDINGS else ""


def values(
    file: StoreFile, name: str, keys: frozenset[str], texts: TextUnit | None = None
) -> FileValues:
    """The values of a file in order.

    keys: names of columns that matter: no other column of Parquet is read, and the header of a CSV
    file has one of them. texts: what single texts are, whatever the file looks like; without it
    JSON strings count only in a file that begins with one, since elsewhere they are pieces of
    broken objects. Raises InputError (the store fails, or pyarrow is needed and absent).
    """
    try:
        stream = decompressed(file)
        if stream.peek(4).startswith(PARQUET_MAGIC) or ending(name) == "parquet":
            file.seek(0)
            yield from parquet_rows(file, keys)
            return
        stream = as_utf8(stream)
        head = stream.peek(LOOK)[:LOOK]
    except BrokenStream as error:
        yield 1, error
        return
    format = texts if texts in ("lines", "paragraphs") else text_format(head, name, keys)
    rows = _READERS[format](stream, keys)
    yield from rows if texts or format in ("lines", "paragraphs") else _of_one_kind(rows)


def _of_one_kind(rows: FileValues) -> FileValues:
    """The rows, without texts among objects."""
    of_texts: bool | None = None
    for line, value in rows:
        of_texts = isinstance(value, str) if of_texts is None else of_texts
        yield line, value if of_texts or not isinstance(value, str) else Unreadable("not an object")


def text_format(head: bytes, name: str, keys: frozenset[str]) -> TextFormat:
    """The format of a text by its first bytes (UTF-8, no mark), then by its name."""
    start, named = head.lstrip(), ending(name)
    if start.startswith(b"{"):
        return "objects" if _spans_lines(start) else "json lines"
    if start.startswith(b"[") and (named == "json" or re.match(rb'\[\s*(?:[\[{"\]]|$)', start)):
        return "json lines" if _is_messages(start) else "array"
    if ENDINGS.get(named) == "json lines":
        return "json lines"
    if named in ("csv", "tsv"):
        return "csv"
    # A set of conversations whose first line is damaged must not be read as lines of text.
    objects, solid_lines = len(OBJECT_LINE.findall(head)), len(SOLID_LINE.findall(head))
    if 2 * objects > solid_lines or (start.startswith(b'"') and _is_json(start)):
        return "json lines"
    return "csv" if not named and dialect_of(head, keys).is_table else "lines"


def _spans_lines(start: bytes) -> bool:
    """Whether the first object has line breaks in it."""
    text = start.decode("utf-8", "replace")
    try:
        return "\n" in text[: DECODER.raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text.split("\n", 1)[0].strip() == "{"


def _is_messages(start: bytes) -> bool:
    """Whether the first line is a list of messages: then each line is one conversation."""
    line = start.split(b"\n", 1)[0]
    first = json.loads(line)[:1] if _is_json(line) else []
    return bool(first) and isinstance(first[0], dict) and ("role" in first[0] or "from" in first[0])


def _is_json(start: bytes) -> bool:
    return not isinstance(_parsed(start.split(b"\n", 1)[0]), Unreadable)


class LineCounter(Protocol):
    """A reader that knows the number of its current line."""

    @property
    def line(self) -> int: ...


def _until_broken(reader: LineCounter, rows: FileValues) -> FileValues:
    """The rows, and where the stream breaks one Unreadable at the current line."""
    try:
        yield from rows
    except BrokenStream as error:
        yield reader.line, error


# Text by lines.


def _json_lines(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    lines = LineReader(stream)
    return _until_broken(
        lines, ((lines.line, _parsed(text)) for text in lines if text is None or not text.isspace())
    )


def _parsed(text: bytes | None) -> Any:
    """The JSON value, or Unreadable."""
    if text is None:
        return Unreadable(TOO_LONG)
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return Unreadable("not UTF-8")
    except (ValueError, RecursionError):
        return Unreadable("not JSON")


def _text_lines(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    lines = LineReader(stream)
    return _until_broken(
        lines, ((lines.line, _text(text)) for text in lines if text is None or not text.isspace())
    )


def _paragraphs(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    lines = LineReader(stream)
    return _until_broken(lines, _joined(lines))


def _joined(lines: LineReader) -> FileValues:
    """Texts between blank lines."""
    first, text, too_long = 0, bytearray(), False
    for line in lines:
        if line is not None and line.isspace():
            if first:
                yield first, _text(None if too_long else bytes(text))
            first, text, too_long = 0, bytearray(), False
            continue
        first = first or lines.line
        too_long = too_long or line is None or len(text) + len(line) > LIMIT
        if line is None or too_long:
            text.clear()
        else:
            text += line
    if first:
        yield first, _text(None if too_long else bytes(text))


def _text(text: bytes | None) -> str | Unreadable:
    """A text, or Unreadable; JSON among texts is a row of another format, not a prompt."""
    if text is None:
        return Unreadable(TOO_LONG)
    if b"\0" in text:
        return Unreadable("not text")
    if OBJECT_LINE.match(text) or (
        text.lstrip().startswith(b"[") and isinstance(_parsed(text), list)
    ):
        return Unreadable("JSON among plain texts")
    try:
        return text.decode("utf-8").strip()
    except UnicodeDecodeError:
        return Unreadable("not UTF-8")


# JSON values that are not one a line.

CHUNK = 1 << 16  # bytes
SOLID = re.compile(r"\S")
BRACKET_OR_QUOTE = re.compile(r'[\[\]{}"]')
QUOTE_OR_ESCAPE = re.compile(r'["\\]')


def _array(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    reader = CharacterReader(stream)
    return _until_broken(reader, _items(reader))


def _items(reader: CharacterReader) -> FileValues:
    """The items of a JSON array. Raises BrokenStream at a broken item: where the next one begins
    cannot be known.
    """
    separator = reader.next()  # "["
    while separator != "]":
        reader.move(reader.at + 1)
        if reader.next() == "]":  # of an empty array, or after a last comma
            break
        line = reader.line
        yield line, reader.value()
        separator = reader.next()
        if separator not in ("]", ","):
            raise BrokenStream(
                "the JSON array has no end"
                if not separator
                else "the JSON array is broken here; the rest is lost"
            )
    reader.move(reader.at + 1)
    if reader.next():
        raise BrokenStream("text after the JSON array")


def _objects(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    """JSON values one after the other."""
    reader = CharacterReader(stream)
    return _until_broken(reader, ((reader.line, reader.value()) for _ in iter(reader.next, "")))


class CharacterReader:
    """A text read in chunks. at: place of the next character; line: its line."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.text, self.at, self.line = "", 0, 1
        self._stream = stream
        # An invalid byte becomes a lone surrogate, which nothing else in the text can be.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def more(self) -> bool:
        """Read on; False at the end. Raises BrokenStream once everything before it was given."""
        rest = self.text[self.at :]
        wanted = max(CHUNK, len(rest))  # doubling: a long item costs linear time
        pieces: list[str] = []
        while wanted > 0 or not any(pieces):  # a few bytes may be less than a character
            try:
                block = self._stream.read1(min(CHUNK, max(wanted, 1)))
            except BrokenStream:
                if not any(pieces):
                    raise
                break
            pieces.append(self._decoder.decode(block, final=not block))
            wanted -= len(block)
            if not block:
                break
        self.text, self.at = rest + "".join(pieces), 0
        return any(pieces)

    def move(self, to: int) -> None:
        """Pass the text up to a place."""
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def next(self) -> str:
        """The next character that is not white space, not passed yet; "" at the end."""
        while True:
            solid = SOLID.search(self.text, self.at)
            self.move(solid.start() if solid else len(self.text))
            if solid or not self.more():
                return solid.group() if solid else ""

    def value(self) -> Any:
        """Pass the JSON value that begins here and return it, or Unreadable. Reads on while the
        value is incomplete. Raises BrokenStream.
        """
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                # A number ends where the next sign is no part of one; all else ends by itself.
                if end < len(self.text) and (
                    self.text[end] in " \t\r\n,]" or not isinstance(value, int | float)
                ):
                    return self._passed(value, end)
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated") and error.pos + 16 < len(self.text):
                    # Text follows the fault, so it is not the end of what was read.
                    raise BrokenStream("not JSON here; the rest is lost") from error
            # Valid JSON all the same: a number of too many digits, brackets too deep.
            except (ValueError, RecursionError):
                self._skip()
                return Unreadable(
                    "not JSON that can be read: nested too deep, or a number too long"
                )
            if len(self.text) - self.at > LIMIT:
                self._skip()
                return Unreadable(TOO_LONG)
            if not self.more():
                try:
                    return self._passed(*DECODER.raw_decode(self.text, self.at))
                except ValueError as error:
                    raise BrokenStream("the JSON ends in the middle of a value") from error

    def _passed(self, value: Any, end: int) -> Any:
        too_long = end - self.at > LIMIT
        piece = self.text[self.at : end]
        self.move(end)
        if too_long:
            return Unreadable(TOO_LONG)
        return value if piece.isascii() or is_encodable(piece) else Unreadable("not UTF-8")

    def _skip(self) -> None:
        """Pass an object, list or string by its brackets and quotes, holding one chunk of it.
        Raises BrokenStream.
        """
        if self.text[self.at] not in '[{"':
            raise BrokenStream("a number too long; the rest is lost")
        depth, quoted = 0, False
        while True:
            sign = (QUOTE_OR_ESCAPE if quoted else BRACKET_OR_QUOTE).search(self.text, self.at)
            if sign is None or (sign.group() == "\\" and sign.end() == len(self.text)):
                self.move(sign.start() if sign else len(self.text))
                if not self.more():
                    raise BrokenStream("the JSON ends in the middle of a value")
                continue
            self.move(sign.end() + (sign.group() == "\\"))
            quoted ^= sign.group() == '"'
            depth += 0 if quoted else (sign.group() in "[{") - (sign.group() in "]}")
            if not quoted and depth == 0:
                return


def is_encodable(text: str) -> bool:
    """Whether a text has no lone surrogates, as escapes in JSON and invalid bytes leave them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# CSV. A row stands on its own: one whose fields do not fit the header is Unreadable, since its
# values may have moved into other columns.

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


def _csv(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    dialect = dialect_of(stream.peek(LOOK)[:LOOK], keys)
    lines = LineReader(stream)
    return _until_broken(lines, csv_rows(lines, dialect))


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


def parquet_rows(file: StoreFile, keys: frozenset[str]) -> FileValues:
    """The rows of a Parquet file by row group, only the columns in `keys`; a damaged group is one
    Unreadable.

    Raises InputError (pyarrow is not installed, or the store fails).
    """
    pyarrow, parquet = arrow("", "Parquet"), arrow("parquet", "Parquet")
    # Those of Arrow: those of the store are InputError already.
    faults = (OSError, pyarrow.ArrowException, UnicodeDecodeError)
    try:
        table = parquet.ParquetFile(
            pyarrow.PythonFile(file, mode="r"), page_checksum_verification=True
        )
        columns = [name for name in table.schema_arrow.names if name in keys]
    except faults:
        yield 1, Unreadable("the Parquet file is cut or damaged: it has no readable footer")
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
            yield line, Unreadable(problem)
        first += facts.num_rows


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


_READERS: dict[TextFormat, Callable[[io.BufferedReader, frozenset[str]], FileValues]] = {
    "array": _array,
    "objects": _objects,
    "json lines": _json_lines,
    "csv": _csv,
    "lines": _text_lines,
    "paragraphs": _paragraphs,
}
