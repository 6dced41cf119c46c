"""From a file to its values, each with the line on which it begins: JSON, JSON lines, CSV, Parquet
and plain text.

The format is recognised by content; the name decides only where the content could be several. Holds
one value and one buffer, however long the file. A value that cannot be read comes as Unreadable;
where everything after it is lost, that is one more Unreadable, the last. Knows no meaning of
values.

Arrays of JSON are split by this file and parsed by `json`: docs/decisions/prompts-stage.md says why
not by ijson.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, Protocol

from eyas.data.streams import (
    LIMIT,
    LOOK,
    PARQUET_MAGIC,
    TOO_LONG,
    BrokenStream,
    FileValues,
    LineReader,
    StoreFile,
    Unreadable,
    as_utf8,
    decompressed,
    is_encodable,
)
from eyas.data.tables import csv_rows, dialect_of, parquet_columns, parquet_rows

TextFormat = Literal["array", "objects", "json lines", "csv", "lines", "paragraphs", "log"]
# What single texts are: strings of JSON, lines, what stands between blank lines, or lines of a log
# among which some are JSON.
TextUnit = Literal["strings", "lines", "paragraphs", "log"]

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

    keys: names of columns that matter: no other column of Parquet is read, unless it is a log, in
    which any may hold consent; and the header of a CSV file has one of them. texts: what single
    texts are, whatever the file looks like; without it
    JSON strings count only in a file that begins with one, since elsewhere they are pieces of
    broken objects. Raises InputError (the store fails, or pyarrow is needed and absent).
    """
    try:
        stream = decompressed(file)
        if stream.peek(4).startswith(PARQUET_MAGIC) or ending(name) == "parquet":
            file.seek(0)
            yield from parquet_rows(file, None if texts == "log" else keys)
            return
        stream = as_utf8(stream)
        head = stream.peek(LOOK)[:LOOK]
    except BrokenStream as error:
        yield 1, error
        return
    format = texts if texts in ("lines", "paragraphs") else text_format(head, name, keys)
    if texts == "log" and format not in ("array", "objects") and ending(name) not in ("csv", "tsv"):
        format = "log"
    rows = _READERS[format](stream, keys)
    yield from rows if texts or format in ("lines", "paragraphs") else _of_one_kind(rows)


def columns(file: StoreFile, name: str, keys: frozenset[str], num_rows: int) -> frozenset[str]:
    """The columns of a file, or the keys that half of its first rows have. keys, raises: as
    `values`.
    """
    head = file.read(len(PARQUET_MAGIC))
    file.seek(0)
    if head == PARQUET_MAGIC:
        return frozenset(parquet_columns(file))
    first = itertools.islice(values(file, name, keys), num_rows)
    rows = [row for _, row in first if isinstance(row, dict)]
    counts = Counter(str(key) for row in rows for key in row)
    return frozenset(key for key, count in counts.items() if 2 * count >= len(rows))


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
        lines,
        ((lines.line, _line_value(text)) for text in lines if text is None or not text.isspace()),
    )


def _line_value(text: bytes | None) -> Any:
    """The JSON value, or Unreadable; a last line that stops in the middle of a value is where the
    file was cut.
    """
    value = _parsed(text)
    is_cut = text is not None and not text.endswith(b"\n") and text.lstrip()[:1] in (b"{", b"[")
    if is_cut and isinstance(value, Unreadable):
        return BrokenStream(str(value))
    return value


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
    return _until_broken(lines, _with_words((lines.line, _text(text)) for text in lines))


def _log_lines(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    """Lines of a log: an object where one begins the line, else the text."""
    lines = LineReader(stream)
    return _until_broken(
        lines,
        ((lines.line, _log_value(text)) for text in lines if text is None or not text.isspace()),
    )


def _log_value(text: bytes | None) -> Any:
    if text is None or text.lstrip().startswith(b"{"):
        return _line_value(text)
    return text.decode("utf-8", "replace").strip()


def _paragraphs(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    lines = LineReader(stream)
    return _until_broken(lines, _with_words(_joined(lines)))


def _with_words(texts: FileValues) -> FileValues:
    """Those that are more than blanks, of which Unicode knows more than bytes.isspace does."""
    return (row for row in texts if row[1] != "")


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


def _csv(stream: io.BufferedReader, keys: frozenset[str]) -> FileValues:
    dialect = dialect_of(stream.peek(LOOK)[:LOOK], keys)
    lines = LineReader(stream)
    return _until_broken(lines, csv_rows(lines, dialect))


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


_READERS: dict[TextFormat, Callable[[io.BufferedReader, frozenset[str]], FileValues]] = {
    "array": _array,
    "objects": _objects,
    "json lines": _json_lines,
    "csv": _csv,
    "lines": _text_lines,
    "paragraphs": _paragraphs,
    "log": _log_lines,
}
