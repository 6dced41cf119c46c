"""The bytes of one file of a source: from any store, decompressed, as lines.

A failure of the store is an InputError. Damage in the data is a BrokenStream: the rows before it
are kept.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from eyas.errors import EyasError, InputError, extra

LOOK = 1 << 16  # bytes at the beginning of a file by which its format is recognised
LIMIT = 8 << 20  # bytes of one row: more than any conversation, little memory
TOO_LONG = f"too long to read (more than {LIMIT >> 20} MiB)"
WEB = re.compile(r"(?:\w+://[^/]*::)?https?://")
OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def public_url(url: str) -> str:
    """A URL without the password or the query that gives access."""
    if not WEB.match(url):
        return url
    return re.sub(r"://[^/@]*@", "://", url.split("?", 1)[0])


class Unreadable(ValueError):
    """What is wrong with a row, which it never quotes. reason: for the ledger."""

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class BrokenStream(Unreadable):
    """The rest of the file is lost."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "cut")


READING_REASONS = {  # reasons of rows that are not read, with their meaning
    "malformed": "could not be read: no JSON, no known shape, or not UTF-8",
    "cut": "a place where a file is cut or damaged; how many rows were lost there is not known",
    "tools": "its conversation has tools, which prompts do not hold",
    "flagged": "its publisher flags it as deleted, or as written by a machine",
}

# (line, or row of a Parquet file, from 1; value or Unreadable)
FileValues = Iterator[tuple[int, Any]]


class StoreFile(io.RawIOBase):
    """A file of a store. Any failure of the store is an InputError."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self.url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return _fill(buffer, lambda size: self._try(self._file.read, size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._try(self._file.seek, offset, whence))

    def tell(self) -> int:
        return int(self._try(self._file.tell))

    def _try(self, act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except EyasError:
            raise
        # Stores raise OSError, and what their HTTP clients raise.
        except Exception as error:
            reason = str(error).replace(self.url, public_url(self.url))
            what = f"{public_url(self.url)} cannot be read: {reason}"
            raise InputError(what, "try again; finished parts are kept") from error


class Decompressor(io.RawIOBase):
    """The content of a compressed stream, up to a BrokenStream where it is damaged."""

    def __init__(self, packed: Any, kind: str) -> None:
        self._packed, self._kind, self._broken = packed, kind, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return _fill(buffer, self._next)

    def _next(self, size: int) -> bytes:
        # Some decoders report a fault once. `read1` returns what came before it.
        if not self._broken:
            try:
                return bytes(self._packed.read1(size))
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                self._broken = True
        raise BrokenStream(f"the {self._kind} data are cut or damaged here; what follows is lost")


def _fill(buffer: Any, read: Callable[[int], bytes]) -> int:
    """Data before a fault are returned; the next call meets the fault again."""
    filled = 0
    while filled < len(buffer):
        try:
            data = read(len(buffer) - filled)
        except BrokenStream:
            if filled:
                break
            raise
        if not data:
            break
        buffer[filled : filled + len(data)] = data
        filled += len(data)
    return filled


def arrow(part: str, wanted_by: str) -> ModuleType:
    """The module `pyarrow` or `pyarrow.{part}`. Raises InputError without the extra."""
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as error:
        raise InputError(
            f"{wanted_by} files need pyarrow, which is not installed", extra("parquet")
        ) from error


def _zstd(raw: io.BufferedReader) -> Any:
    pyarrow = arrow("", "Zstandard")
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


# Name, ending, first bytes (a pattern) and reader.
PACKINGS: tuple[tuple[str, str, bytes, Callable[[io.BufferedReader], Any]], ...] = (
    ("gzip", "gz", b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    ("bzip2", "bz2", rb"BZh[1-9]1AY&SY", bz2.BZ2File),
    ("xz", "xz", b"\xfd7zXZ\x00", lzma.LZMAFile),
    ("Zstandard", "zst", rb"\x28\xb5\x2f\xfd", _zstd),
)


def decompressed(stored: StoreFile) -> io.BufferedReader:
    """The bytes of a file, decompressed if they begin like one of the PACKINGS."""
    raw: io.BufferedReader = io.BufferedReader(stored, LOOK)
    head = raw.peek(16)[:16]
    for kind, _, magic, unpack in PACKINGS:
        if re.match(magic, head):
            return io.BufferedReader(Decompressor(unpack(raw), kind), LOOK)
    return raw


def skip_mark(stream: io.BufferedReader) -> None:
    """Pass the byte order mark of UTF-8. Raises BrokenStream for the marks of other encodings."""
    head = stream.peek(4)
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    elif head.startswith(OTHER_MARKS):
        raise BrokenStream("the text is UTF-16 or UTF-32: convert it to UTF-8, e.g. with iconv")


def numbered_lines(stream: io.BufferedReader) -> Iterator[tuple[int, bytes | Unreadable]]:
    """The lines of a stream with their numbers, from 1. Of a line longer than LIMIT, which is
    Unreadable, no more is held; where the stream breaks, a BrokenStream is the last.
    """
    number = 1
    try:
        while text := stream.readline(LIMIT + 1):
            if len(text) <= LIMIT:
                yield number, text
            else:
                while text and not text.endswith(b"\n"):
                    text = stream.readline(LIMIT)
                yield number, Unreadable(TOO_LONG)
            number += 1
    except BrokenStream as error:
        yield number, error


def is_encodable(text: str) -> bool:
    """Whether a text has no lone surrogates, as escapes in JSON and invalid bytes leave them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
