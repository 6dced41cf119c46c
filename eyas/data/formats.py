"""From a file to its values, each with the line on which it begins: JSON lines, CSV, Parquet, plain
text and logs. A format is one entry of FORMATS, recognised by the first bytes, else by the name.

A value that cannot be read is Unreadable; where everything after it is lost, one BrokenStream.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eyas.data.logs import LOG_LINE, looks_logged
from eyas.data.streams import (
    LIMIT,
    LOOK,
    PACKINGS,
    BrokenStream,
    FileValues,
    StoreFile,
    Unreadable,
    arrow,
    decompressed,
    is_encodable,
    numbered_lines,
    public_url,
    skip_mark,
)
from eyas.errors import InputError

Keys = frozenset[str] | None  # names of the columns that matter; None: all
OBJECT_LINE = re.compile(rb"^[ \t]*\{[ \t]*\"", re.M)
JSON_HEAD = re.compile(rb'\s*(?:\{|\[\s*(?:[\[{"\]]|$))')
# JSON over several lines, and no text that begins with a bracket
PRETTY = re.compile(rb'\s*[\[{]+\s*(?:\n|"\w+"\s*:)')
ARCHIVE = re.compile(rb"PK\x03\x04|.{257}ustar", re.S)
# Lines with a time first (nginx: after three words)
STAMPED = re.compile(
    rb"^(?:\S+ \S+ \S+ \[\d\d/\w{3}/\d+:|\[?\d{4}[-/]\d\d[-/]\d\d[T ]|\w{3} [ \d]\d )\d\d:\d\d:\d",
    re.M,
)
SOLID_LINE = re.compile(rb"^[ \t\r]*[^ \t\r\n]", re.M)
JSON_LINES, TEXT, LOG = "JSON lines", "plain text", "a log"
DELIMITERS = ",\t;|"
TWO_COLUMNS, NOT_UTF8 = "two columns of one name", "not UTF-8"
# Signs of Windows-1252 in people's texts: letters, quotes, dashes, money
WESTERN = re.compile("[\u00c0-\u00fe\u2018-\u201e\u2013\u2014\u2026\u20ac\xa0-\xbf\u0152\u0153]+")
MOST_FOREIGN = 0.001  # of rows: fewer are damage, more are another encoding
BATCH_BYTES, MAX_BATCH = 4 << 20, 1024  # of a batch of Parquet: decompressed bytes, rows

csv.field_size_limit(LIMIT)  # its default, 128 KiB, is less than some prompts


def _line_values(read: Callable[[bytes], Any]) -> Callable[[io.BufferedReader, Keys], FileValues]:

    def values(stream: io.BufferedReader, keys: Keys) -> FileValues:
        for number, line in numbered_lines(stream):
            if isinstance(line, Unreadable):
                yield number, line
            elif not line.isspace():
                yield number, read(line)

    return values


def parsed(line: bytes) -> Any:
    """The JSON value of a line, or Unreadable; BrokenStream for a last line that was cut."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        problem = NOT_UTF8
    except (ValueError, RecursionError):
        problem = "not JSON"
    is_cut = not line.endswith(b"\n") and line.lstrip()[:1] in (b"{", b"[")
    return BrokenStream(problem) if is_cut else Unreadable(problem)


def _plain_text(line: bytes) -> str | Unreadable:
    """JSON among texts is a row of another format, not a prompt."""
    if b"\0" in line:
        return Unreadable("not text")
    if OBJECT_LINE.match(line) or (
        line.lstrip().startswith(b"[") and isinstance(parsed(line), list)
    ):
        return Unreadable("JSON among plain texts")
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        return Unreadable(NOT_UTF8)


def _log_line(line: bytes) -> Any:
    if line.lstrip().startswith(b"{"):
        return parsed(line)
    return line.decode("utf-8", "replace").strip()


def _splitting_command(head: bytes) -> str:
    """How to make JSON lines of a file that is one JSON value; "" for JSON lines."""
    first, line_end, _ = head.lstrip().partition(b"\n")
    if first.strip() == b"{" and line_end:
        return "jq -c . FILE > FILE.jsonl"
    if not first.startswith(b"["):
        return ""
    items = parsed(first + b"\n")
    is_cut = isinstance(items, Unreadable) and not line_end and len(head) < LOOK
    # A list of messages is one conversation, and each line is another one.
    is_conversation = isinstance(items, list) and any(
        isinstance(item, dict) and {"role", "from"} & {*item} for item in items
    )
    return "" if is_cut or is_conversation else "jq -c '.[]' FILE > FILE.jsonl"


def _csv_rows(stream: io.BufferedReader, keys: Keys) -> FileValues:
    """The rows below the header, as objects by column names in lower case.

    A row whose fields do not fit the header is Unreadable: values may have moved into other
    columns. Broken quoting costs the rest of the file: what an assistant wrote could be read as a
    prompt.
    """
    head = stream.peek(LOOK)[:LOOK].decode("utf-8", "replace").split("\n", 1)[0]
    reader = csv.reader(_csv_lines(stream), delimiter=_delimiter(head, keys), strict=True)
    header: list[str] = []
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader, None)
        except (csv.Error, Unreadable) as error:
            lost = "the quoting is broken here; the rest is lost"
            yield first, BrokenStream(str(error) if isinstance(error, Unreadable) else lost)
            return
        if fields is None:
            return
        if fields and header:
            yield first, _csv_row(header, fields)
        header = header or [name.strip().lower() for name in fields]
        if len(set(header)) < len(header):
            yield first, BrokenStream(TWO_COLUMNS)
            return


def _csv_lines(stream: io.BufferedReader) -> Iterator[str]:
    for _, line in numbered_lines(stream):
        if isinstance(line, Unreadable):
            raise line
        yield line.decode("utf-8", "surrogateescape")


def _delimiter(header: str, keys: Keys) -> str:
    """The one that gives the most columns of `keys`, then the most columns."""

    def fit(delimiter: str) -> tuple[int, int]:
        names = [name.strip(' "\r').lower() for name in header.split(delimiter)]
        return len({*names} & (keys or frozenset())), len(names)

    return max(DELIMITERS, key=fit)


def _csv_row(header: list[str], fields: list[str]) -> dict[str, str] | Unreadable:
    if len(fields) != len(header):
        return Unreadable(f"{len(fields)} fields, but {len(header)} columns")
    text = "".join(fields)
    if "\0" in text:
        return Unreadable("not text")
    if not is_encodable(text):
        return Unreadable(NOT_UTF8)
    return dict(zip(header, fields, strict=True))


def _parquet_rows(file: io.RawIOBase, keys: Keys) -> FileValues:
    """The rows by row group, with the columns in `keys`, named as in CSV; a damaged group is one
    BrokenStream. Raises InputError (pyarrow is not installed, or the store fails).
    """
    pyarrow, parquet = arrow("", "Parquet"), arrow("parquet", "Parquet")
    faults = (OSError, pyarrow.ArrowException, UnicodeDecodeError)
    try:
        table = parquet.ParquetFile(
            pyarrow.PythonFile(file, mode="r"), page_checksum_verification=True
        )
        names = table.schema_arrow.names
        lower = {name: name.strip().lower() for name in names}
        columns = [name for name in names if keys is None or lower[name] in keys]
    except faults:
        yield 1, BrokenStream("the Parquet file is cut or damaged: it has no readable footer")
        return
    if len({lower[name] for name in columns}) < len(columns):
        yield 1, BrokenStream(TWO_COLUMNS)
        return
    first = 1
    for group in range(table.num_row_groups):
        facts = table.metadata.row_group(group)
        mean = facts.total_byte_size / max(facts.num_rows, 1)
        batch_rows = int(min(max(BATCH_BYTES / max(mean, 1), 1), MAX_BATCH))
        line = first
        try:
            for batch in table.iter_batches(batch_rows, [group], columns, use_threads=False):
                for row in _batch_rows(batch.rename_columns([lower[name] for name in columns])):
                    yield line, row
                    line += 1
        except faults:
            lost = first + facts.num_rows - line
            problem = f"row group {group} of the Parquet file is damaged: {lost} rows are lost"
            yield line, BrokenStream(problem)
        first += facts.num_rows


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | Unreadable]:
    """One at a time only if one of them is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                row = batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                row = Unreadable(NOT_UTF8)
            yield row


def _are(line: re.Pattern[bytes], head: bytes, least: int = 1) -> bool:
    """Whether most lines begin so: single ones may be damaged, or text."""
    count = len(line.findall(head))
    return count >= least and 2 * count > len(SOLID_LINE.findall(head))


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write rows in a file. begins: whether the first bytes show it, whatever the name;
    is_text: `read` takes the decompressed text, otherwise the file as it is stored.
    """

    name: str
    endings: tuple[str, ...]
    begins: Callable[[bytes], bool]
    read: Callable[[Any, Keys], FileValues]
    is_text: bool = True


# In the order in which the first bytes are looked at; the last one takes all other files.
FORMATS = (
    Format("Parquet", ("parquet",), lambda head: head[:4] == b"PAR1", _parquet_rows, is_text=False),
    Format(
        LOG,
        (),
        lambda head: bool(LOG_LINE.search(head)) or _are(STAMPED, head, 3),
        _line_values(_log_line),
    ),
    Format(
        JSON_LINES,
        ("json", "jsonl", "ndjson"),
        lambda head: bool(JSON_HEAD.match(head)) or _are(OBJECT_LINE, head),
        _line_values(parsed),
    ),
    Format("CSV", ("csv", "tsv"), lambda head: False, _csv_rows),
    Format(TEXT, ("txt", "text"), lambda head: False, _line_values(_plain_text)),
)
BY_NAME = {one.name: one for one in FORMATS}
ENDINGS = {ending: one for one in FORMATS for ending in one.endings}


def ending(name: str) -> str:
    """The format in a file's name: "jsonl" of "a.JSONL.gz"; "" if unknown."""
    parts = name.lower().rsplit("/", 1)[-1].split(".")[1:]
    while parts and parts[-1] in {packed for _, packed, _, _ in PACKINGS}:
        parts.pop()
    return parts[-1] if parts and parts[-1] in ENDINGS else ""


@dataclass(frozen=True, slots=True)
class FileLook:
    """What the beginning of a file shows: its format, and the keys of its first rows."""

    format: str
    columns: frozenset[str]

    @property
    def is_log(self) -> bool:
        return self.format == LOG or looks_logged(self.columns)


def format_of(head: bytes, name: str, is_log: bool = False) -> Format:
    """The format of a file by its first bytes, then by its name; is_log: its lines are of a log."""
    named = ENDINGS.get(ending(name))
    found = next((one for one in FORMATS if one.begins(head)), named or FORMATS[-1])
    if found is BY_NAME[LOG] and named is BY_NAME["CSV"]:  # a line of a log in a cell
        found = named
    if found is BY_NAME[JSON_LINES] and named is BY_NAME[TEXT] and not PRETTY.match(head):
        found = found if _are(OBJECT_LINE, head) else named
    return BY_NAME[LOG] if is_log and found.name in (JSON_LINES, TEXT) else found


def values(
    file: StoreFile, name: str, keys: Keys, is_log: bool = False, is_text: bool = False
) -> FileValues:
    """The values of a file in order. keys: the columns of Parquet to read; is_text: a log's lines
    are texts.

    JSON strings count only in a file that begins with one: elsewhere they are pieces of objects.
    Raises InputError (the store fails, pyarrow is absent, or the file is one JSON document).
    """
    try:
        stream, found = _opened(file, name, is_log)
    except BrokenStream as error:
        yield 1, error
        return
    if is_text and found.name == LOG:
        found = BY_NAME[TEXT]
    of_texts: bool | None = None
    count, foreign = 0, 0
    for line, value in found.read(stream, keys):
        count += 1
        foreign += type(value) is Unreadable and value.args == (NOT_UTF8,)
        if found.name == JSON_LINES:
            of_texts = isinstance(value, str) if of_texts is None else of_texts
            if isinstance(value, str) and not of_texts:
                value = Unreadable("not an object")
        yield line, value
    if found.is_text and foreign >= 2 and foreign > MOST_FOREIGN * count and _is_western(file):
        what = f"{public_url(file.url)} is not UTF-8: it looks like Windows-1252"
        raise InputError(what, "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW, and give that one")


def _is_western(file: StoreFile) -> bool:
    """Whether all lines that are not UTF-8 are of Windows-1252, and all others ASCII."""
    file.seek(0)
    for _, line in numbered_lines(decompressed(file)):
        if isinstance(line, Unreadable) or line.isascii():
            continue
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            text = line.decode("cp1252", "replace")
            if not WESTERN.fullmatch("".join(sign for sign in text if not sign.isascii())):
                return False
        else:
            return False
    return True


def _opened(file: StoreFile, name: str, is_log: bool) -> tuple[Any, Format]:
    """Raises BrokenStream, InputError (one JSON document, an archive)."""
    head = file.read(LOOK)
    file.seek(0)
    found = format_of(head, name)
    if not found.is_text:
        return file, found
    stream = decompressed(file)
    skip_mark(stream)
    head = stream.peek(LOOK)[:LOOK]
    if ARCHIVE.match(head):
        what = f"{public_url(file.url)} is an archive (zip, tar, xlsx)"
        raise InputError(what, "unpack it and give the folder, or save the sheet as CSV")
    found = format_of(head, name, is_log)
    if found.name == JSON_LINES and (command := _splitting_command(head)):
        what = f"{public_url(file.url)} is one JSON document, not JSON lines"
        raise InputError(what, f"write it as lines: `{command}`")
    return stream, found


def look(file: StoreFile, name: str, num_rows: int) -> FileLook:
    """The format of a file, and the keys that half of its first rows have. Raises as `values`."""
    try:
        stream, found = _opened(file, name, False)
    except BrokenStream:
        return FileLook("", frozenset())
    rows: list[Any] = [value for _, value in itertools.islice(found.read(stream, None), num_rows)]
    objects = [row for row in rows if isinstance(row, dict)]
    counts = Counter(str(key) for row in objects for key in row)
    common = frozenset(key for key, count in counts.items() if 2 * count >= len(objects))
    return FileLook(found.name, common)
