"""The bytes of one file as UTF-8: from any store, decompressed, decoded by their byte order mark,
split into lines.

Distinguishes failures of the store (InputError: try again) from damage in the data (BrokenStream:
the rest is lost). Knows no row.
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

from eyas.errors import EyasError, InputError

LOOK = 1 << 16  # bytes at the beginning of a file that its format is recognised by
LIMIT = 8 << 20  # bytes of one row: more than any conversation, little memory

PARQUET_MAGIC = b"PAR1"
TOO_LONG = f"too long to read (more than {LIMIT >> 20} MiB)"
WEB = re.compile(r"(?:\w+://[^/]*::)?https?://")
UTF_16_32 = (  # the longer marks first: UTF-32-LE begins like UTF-16-LE
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def public_url(url: str) -> str:
    """A URL without what gives access: a password, or the query of a signed URL."""
    if not WEB.match(url):
        return url
    return re.sub(r"://[^/@]*@", "://", url.split("?", 1)[0])


class Unreadable(ValueError):
    """What is wrong with a row. The message never quotes the row. reason: as the ledger counts."""

    reason = "malformed"


class BrokenStream(Unreadable):
    """A part of the file cannot be read, and how many rows it held is not known."""

    reason = "cut"


class Flagged(Unreadable):
    """A row that its publisher marks as deleted, or as written by a machine."""

    reason = "flagged"


# The values of a file: (line, or row of a Parquet file, from 1; value or Unreadable).
FileValues = Iterator[tuple[int, Any]]


class StoreFile(io.RawIOBase):
    """A file of a store. Any failure of the store is an InputError."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

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
        # Stores have no common class of errors: OSError, and those of their HTTP clients.
        except Exception as error:
            reason = str(error).replace(self._url, public_url(self._url))
            raise InputError(
                f"{public_url(self._url)} cannot be read: {reason}",
                "try again; finished parts are kept",
            ) from error


class Decompressor(io.RawIOBase):
    """The content of a compressed stream up to where it is cut or damaged; reading on raises
    BrokenStream.
    """

    def __init__(self, packed: Any, kind: str) -> None:
        self._packed, self._kind, self._broken = packed, kind, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return _fill(buffer, self._next)

    def _next(self, size: int) -> bytes:
        # Some decoders report a fault once, others at each read. `read1` returns what came before
        # the fault; a loop of reads would lose it.
        if not self._broken:
            try:
                return bytes(self._packed.read1(size))
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                self._broken = True
        raise BrokenStream(f"the {self._kind} data are cut or damaged here; what follows is lost")


class Utf8Transcoder(io.RawIOBase):
    """UTF-16 or UTF-32 as UTF-8. Half a character becomes invalid UTF-8, so that only its row is
    unreadable.
    """

    def __init__(self, stream: io.BufferedReader, encoding: str) -> None:
        self._stream, self._rest, self._encoding, self._broken = stream, b"", encoding, False
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return _fill(buffer, self._next)

    def _next(self, size: int) -> bytes:
        while not self._rest and not self._broken and (block := self._stream.read1(LOOK)):
            self._rest = self._encoded(block)
        if self._broken:
            raise BrokenStream(f"not {self._encoding} from here on; what follows is lost")
        if not self._rest:
            self._rest = self._encoded(b"", final=True)
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def _encoded(self, block: bytes, final: bool = False) -> bytes:
        try:
            return self._decoder.decode(block, final).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self._decoder.reset()
            self._broken = not final
            return b"\xff" if final else b""


class LineReader:
    """The lines of a stream; None for one longer than LIMIT, of which no more than that is held.

    line: number of the current line, from 1; quotes: double quotes in the last line that was too
    long.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self.line, self.quotes = 1, 0
        self._stream = stream

    def __iter__(self) -> Iterator[bytes | None]:
        readline = self._stream.readline
        while text := readline(LIMIT + 1):
            if len(text) > LIMIT:
                self._skip(text)
                yield None
            else:
                yield text
            self.line += 1

    def _skip(self, text: bytes) -> None:
        self.quotes = text.count(b'"')
        while text and not text.endswith(b"\n"):
            text = self._stream.readline(LIMIT)
            self.quotes += text.count(b'"')


def decompressed(stored: StoreFile) -> io.BufferedReader:
    """The bytes of a file, decompressed if they begin like gzip, bzip2, xz or Zstandard, whatever
    its name.
    """
    raw: io.BufferedReader = io.BufferedReader(stored, LOOK)
    head = raw.peek(16)[:16]
    for kind, magic, unpack in COMPRESSIONS:
        if re.match(magic, head):
            return io.BufferedReader(Decompressor(unpack(raw), kind), LOOK)
    return raw


def as_utf8(stream: io.BufferedReader) -> io.BufferedReader:
    """The same text in UTF-8, without its byte order mark of UTF-8, UTF-16 or UTF-32. Raises
    BrokenStream.
    """
    head = stream.peek(4)
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    for mark, encoding in UTF_16_32:
        if head.startswith(mark):
            stream.read(len(mark))
            return io.BufferedReader(Utf8Transcoder(stream, encoding), LOOK)
    return stream


def arrow(part: str, wanted_by: str) -> ModuleType:
    """The module `pyarrow` or `pyarrow.{part}`, an optional extra. Raises InputError without it."""
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as error:
        raise InputError(
            f"{wanted_by} files need pyarrow, which is not installed", "pip install 'eyas[parquet]'"
        ) from error


def _zstd(raw: io.BufferedReader) -> Any:
    pyarrow = arrow("", "Zstandard")
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


# Name, first bytes (a pattern) and reader.
COMPRESSIONS: tuple[tuple[str, bytes, Callable[[io.BufferedReader], Any]], ...] = (
    ("gzip", b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    ("bzip2", rb"BZh[1-9]1AY&SY", bz2.BZ2File),
    ("xz", b"\xfd7zXZ\x00", lzma.LZMAFile),
    ("Zstandard", rb"\x28\xb5\x2f\xfd", _zstd),
)


def _fill(buffer: Any, read: Callable[[int], bytes]) -> int:
    """Fill a buffer by as many reads as needed. Data before a fault are returned; the next call
    meets the fault again.
    """
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


def is_encodable(text: str) -> bool:
    """Whether a text has no lone surrogates, as escapes in JSON and invalid bytes leave them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
