"""From a file to its values, each with the line on which it begins: JSON, JSON lines, CSV, Parquet
and plain text.

Which of them a file is, is found out by looking; its name decides only where the contents could be
several. Holds one value and one buffer, however long the file. A value that cannot be read comes as
Unreadable; where all that follows is lost, that is one more, the last. Knows nothing of what the
values mean.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

from eyas.data.streams import (
    LIMIT,
    LOOK,
    PARQUET_MAGIC,
    TOO_LONG,
    Broken,
    Lines,
    Stored,
    Unreadable,
    as_utf8,
    unpacked,
)
from eyas.data.tables import csv_rows, dialect_of, parquet_rows

Values = Iterator[tuple[int, Any]]  # (line from 1, value or Unreadable)
Kind = Literal["array", "objects", "json lines", "csv", "lines", "paragraphs"]
# JSON's; of a plain text, its lines or what stands between blank ones
Texts = Literal["strings", "lines", "paragraphs"]

PACKED_ENDINGS = frozenset({"gz", "bz2", "xz", "zst"})
ENDINGS: dict[str, Kind | Literal["parquet"]] = {
    "json": "json lines",
    "jsonl": "json lines",
    "ndjson": "json lines",
    "csv": "csv",
    "tsv": "csv",
    "txt": "lines",
    "text": "lines",
    "parquet": "parquet",
}

CHUNK = 1 << 16  # bytes
DECODER = json.JSONDecoder()
SOLID = re.compile(r"\S")
OBJECT_LINE = re.compile(rb"^[ \t]*\{[ \t]*\"", re.M)
SOLID_LINE = re.compile(rb"^[ \t\r]*[^ \t\r\n]", re.M)
BRACKET_OR_QUOTE = re.compile(r'[\[\]{}"]')
QUOTE_OR_ESCAPE = re.compile(r'["\\]')


def ending(name: str) -> str:
    """What a file's name ends in, but for a compression: "jsonl" of "a.JSONL.gz"; "" if no such
    format is known.
    """
    parts = name.lower().rsplit("/", 1)[-1].split(".")[1:]
    while parts and parts[-1] in PACKED_ENDINGS:
        parts.pop()
    return parts[-1] if parts and parts[-1] in ENDINGS else ""


def values(stored: Stored, name: str, keys: frozenset[str], texts: Texts | None = None) -> Values:
    """The values of a file in order. `texts` says what its texts are, whatever it looks like.

    JSON texts by themselves count if `texts` says so or the file begins with one: elsewhere they
    are pieces of broken objects. keys: the names of columns that matter: no other column of a
    Parquet file is read, and a CSV's header has one of them. Raises InputError (the store fails, or
    pyarrow is needed and absent).
    """
    try:
        stream = unpacked(stored)
        if stream.peek(4).startswith(PARQUET_MAGIC) or ending(name) == "parquet":
            stored.seek(0)
            yield from parquet_rows(stored, keys)
            return
        stream = as_utf8(stream)
        head = stream.peek(LOOK)[:LOOK]
    except Broken as error:
        yield 1, error
        return
    kind = texts if texts in ("lines", "paragraphs") else looked(head, name, keys)
    rows = _READERS[kind](stream, keys)
    yield from rows if texts or kind in ("lines", "paragraphs") else _of_one_kind(rows)


def _of_one_kind(rows: Values) -> Values:
    """The rows, without texts among objects."""
    of_texts: bool | None = None
    for line, value in rows:
        of_texts = isinstance(value, str) if of_texts is None else of_texts
        yield line, value if of_texts or not isinstance(value, str) else Unreadable("not an object")


def looked(head: bytes, name: str, keys: frozenset[str]) -> Kind:
    """What a text is by its first bytes (UTF-8, no mark), and by its name where these leave it
    open.
    """
    start, named = head.lstrip(), ending(name)
    if start.startswith(b"{"):
        return "objects" if _spans_lines(start) else "json lines"
    if start.startswith(b"[") and (named == "json" or re.match(rb'\[\s*(?:[\[{"\]]|$)', start)):
        return "json lines" if _is_messages(start) else "array"
    if ENDINGS.get(named) == "json lines":
        return "json lines"
    if named in ("csv", "tsv"):
        return "csv"
    # In a set of conversations whose first line is damaged, no line is a prompt.
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
    """Whether the first line is by itself a list of messages, so that each line is one."""
    line = start.split(b"\n", 1)[0]
    first = json.loads(line)[:1] if _is_json(line) else []
    return bool(first) and isinstance(first[0], dict) and ("role" in first[0] or "from" in first[0])


def _is_json(start: bytes) -> bool:
    return not isinstance(_parsed(start.split(b"\n", 1)[0]), Unreadable)


class _Cursor(Protocol):
    @property
    def line(self) -> int: ...


def _until_broken(cursor: _Cursor, rows: Values) -> Values:
    """The rows, and where the stream breaks one Unreadable at the line that was being read."""
    try:
        yield from rows
    except Broken as error:
        yield cursor.line, error


# Text by lines.


def _json_lines(stream: io.BufferedReader, keys: frozenset[str]) -> Values:
    lines = Lines(stream)
    return _until_broken(
        lines, ((lines.line, _parsed(text)) for text in lines if text is None or not text.isspace())
    )


def _parsed(text: bytes | None) -> Any:
    """The JSON value, or what is wrong with it."""
    if text is None:
        return Unreadable(TOO_LONG)
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return Unreadable("not UTF-8")
    except (ValueError, RecursionError):
        return Unreadable("not JSON")


def _csv(stream: io.BufferedReader, keys: frozenset[str]) -> Values:
    dialect = dialect_of(stream.peek(LOOK)[:LOOK], keys)
    lines = Lines(stream)
    return _until_broken(lines, csv_rows(lines, dialect))


def _text_lines(stream: io.BufferedReader, keys: frozenset[str]) -> Values:
    lines = Lines(stream)
    return _until_broken(
        lines, ((lines.line, _prompt(text)) for text in lines if text is None or not text.isspace())
    )


def _paragraphs(stream: io.BufferedReader, keys: frozenset[str]) -> Values:
    lines = Lines(stream)
    return _until_broken(lines, _joined(lines))


def _joined(lines: Lines) -> Values:
    """Texts between blank lines."""
    first, text, too_long = 0, bytearray(), False
    for line in lines:
        if line is not None and line.isspace():
            if first:
                yield first, _prompt(None if too_long else bytes(text))
            first, text, too_long = 0, bytearray(), False
            continue
        first = first or lines.line
        too_long = too_long or line is None or len(text) + len(line) > LIMIT
        if line is None or too_long:
            text.clear()
        else:
            text += line
    if first:
        yield first, _prompt(None if too_long else bytes(text))


def _prompt(text: bytes | None) -> str | Unreadable:
    """A text, or why it is none; an object among texts, broken or not, is no prompt but a row of
    some other format.
    """
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


def _array(stream: io.BufferedReader, keys: frozenset[str]) -> Values:
    characters = _Characters(stream)
    return _until_broken(characters, _items(characters))


def _objects(stream: io.BufferedReader, keys: frozenset[str]) -> Values:
    characters = _Characters(stream)
    return _until_broken(characters, _sequence(characters))


def _items(characters: _Characters) -> Values:
    """Items of a JSON array. What follows a broken item cannot be told: Broken."""
    separator = characters.next()  # "["
    while separator != "]":
        characters.move(characters.at + 1)
        if characters.next() == "]":  # of an empty array, or after a last comma
            break
        line = characters.line
        yield line, characters.value()
        separator = characters.next()
        if separator not in ("]", ","):
            raise Broken(
                "the JSON array has no end"
                if not separator
                else "the JSON array is broken here; the rest is lost"
            )
    characters.move(characters.at + 1)
    if characters.next():
        raise Broken("text after the JSON array")


def _sequence(characters: _Characters) -> Values:
    """JSON values one after the other."""
    while characters.next():
        line = characters.line
        yield line, characters.value()


class _Characters:
    """A text read in chunks; `at` is the place of its next character and `line` that character's
    line.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self.text, self.at, self.line = "", 0, 1
        self._stream = stream
        # A byte that is no UTF-8 becomes half a character, which nothing else in the text can be.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def more(self) -> bool:
        """Read on; False at the end. Raises Broken once all before the break was given."""
        rest = self.text[self.at :]
        wanted = max(CHUNK, len(rest))  # doubling: a long item costs linear time
        pieces: list[str] = []
        while wanted > 0 or not any(pieces):  # a few bytes may be less than a character
            try:
                block = self._stream.read1(min(CHUNK, max(wanted, 1)))
            except Broken:
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
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def next(self) -> str:
        """The next character that is no white space, not passed yet; "" at the end."""
        while True:
            solid = SOLID.search(self.text, self.at)
            self.move(solid.start() if solid else len(self.text))
            if solid or not self.more():
                return solid.group() if solid else ""

    def value(self) -> Any:
        """The JSON value that begins here, or Unreadable, passed; reads on for as long as it is
        only cut. Raises Broken.
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
                    # Broken where more text stands, so not by the end of what was read.
                    raise Broken("not JSON here; the rest is lost") from error
            # a number of too many digits, brackets too deep: JSON all the same
            except (ValueError, RecursionError):
                self._skip()
                return Unreadable(
                    "not JSON that can be read: nested too deep, or a number too long"
                )
            if len(self.text) - self.at > LIMIT:
                self._skip()
                return Unreadable(TOO_LONG)
            if not self.more():
                return self._last()

    def _last(self) -> Any:
        """The value at the very end of the text."""
        try:
            value, end = DECODER.raw_decode(self.text, self.at)
        except ValueError as error:
            raise Broken("the JSON ends in the middle of a value") from error
        return self._passed(value, end)

    def _passed(self, value: Any, end: int) -> Any:
        too_long = end - self.at > LIMIT
        piece = self.text[self.at : end]
        self.move(end)
        if too_long:
            return Unreadable(TOO_LONG)
        return value if piece.isascii() or is_whole(piece) else Unreadable("not UTF-8")

    def _skip(self) -> None:
        """Pass an object, list or text by its brackets and quotes, holding a chunk of it. Raises
        Broken.
        """
        if self.text[self.at] not in '[{"':
            raise Broken("a number too long; the rest is lost")
        depth, quoted = 0, False
        while True:
            sign = (QUOTE_OR_ESCAPE if quoted else BRACKET_OR_QUOTE).search(self.text, self.at)
            if sign is None or (sign.group() == "\\" and sign.end() == len(self.text)):
                self.move(sign.start() if sign else len(self.text))
                if not self.more():
                    raise Broken("the JSON ends in the middle of a value")
                continue
            self.move(sign.end() + (sign.group() == "\\"))
            quoted ^= sign.group() == '"'
            depth += 0 if quoted else (sign.group() in "[{") - (sign.group() in "]}")
            if not quoted and depth == 0:
                return


def is_whole(text: str) -> bool:
    """Whether a text has no half characters, as escapes in JSON and bytes that are no UTF-8 leave
    them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_READERS: dict[Kind, Callable[[io.BufferedReader, frozenset[str]], Values]] = {
    "array": _array,
    "objects": _objects,
    "json lines": _json_lines,
    "csv": _csv,
    "lines": _text_lines,
    "paragraphs": _paragraphs,
}
