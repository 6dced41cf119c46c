"""The bytes of one file, as UTF-8: fetched from any store, unpacked, decoded by their byte order
mark, cut into lines.

Tells the store's failures (InputError: try again) from the data's (Broken: what follows is lost).
Knows no row.
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

LOOK = 1 << 16  # bytes of a file's beginning that can be looked at
LIMIT = 8 << 20  # bytes of one row: far beyond any conversation, small beside any memory

PARQUET_MAGIC = b"PAR1"
TOO_LONG = f"too long to read (more than {LIMIT >> 20} MiB)"
WEB = re.compile(r"(?:\w+://[^/]*::)?https?://")
UTF_16_32 = (  # the longer marks first: one begins like another
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def shown(url: str) -> str:
    """A URL as it may be written down: without what gives access, a password or the query of a
    signed one.
    """
    if not WEB.match(url):
        return url
    return re.sub(r"://[^/@]*@", "://", url.split("?", 1)[0])


class Unreadable(ValueError):
    """What is wrong with a row; says nothing of what the row holds."""


class Broken(Unreadable):
    """The file cannot be read beyond this place."""


class Stored(io.RawIOBase):
    """A file as its store gives it. What goes wrong there is an InputError, whichever exceptions
    the store has.
    """

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
        # stores share no class of errors: OSError, but also those of their HTTP clients
        except Exception as error:
            reason = str(error).replace(self._url, shown(self._url))
            raise InputError(
                f"{shown(self._url)} cannot be read: {reason}", "try again; finished parts are kept"
            ) from error


class Unpacked(io.RawIOBase):
    """What a compressed stream holds, up to where it is cut or damaged; reading on from there
    raises Broken.
    """

    def __init__(self, packed: Any, kind: str) -> None:
        self._packed, self._kind, self._broken = packed, kind, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return _fill(buffer, self._next)

    def _next(self, size: int) -> bytes:
        # A decoder says that it is at fault once, or for ever; a decoder behind a loop of reads
        # would lose what it had.
        if not self._broken:
            try:
                return bytes(self._packed.read1(size))
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                self._broken = True
        raise Broken(f"the {self._kind} data are cut or damaged here; what follows is lost")


class Transcoded(io.RawIOBase):
    """UTF-16 or UTF-32 as UTF-8. Half a character becomes bytes that are no UTF-8, so that its row
    alone is unreadable.
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
            raise Broken(f"not {self._encoding} from here on; what follows is lost")
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


class Lines:
    """The lines of a stream; None in place of one longer than LIMIT, of which no more than that is
    held.

    `line` is the number of the line that is being read, from 1; `quotes` counts the double quotes
    of the last one too long.
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


def unpacked(stored: Stored) -> io.BufferedReader:
    """The bytes of a file, unpacked if they begin as gzip, bzip2, xz or Zstandard do, whatever its
    name says.
    """
    raw: io.BufferedReader = io.BufferedReader(stored, LOOK)
    head = raw.peek(16)[:16]
    for kind, magic, unpack in PACKED:
        if re.match(magic, head):
            return io.BufferedReader(Unpacked(unpack(raw), kind), LOOK)
    return raw


def as_utf8(stream: io.BufferedReader) -> io.BufferedReader:
    """The same text in UTF-8 without a byte order mark, if it has one of UTF-8, UTF-16 or UTF-32.
    Raises Broken.
    """
    head = stream.peek(4)
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    for mark, encoding in UTF_16_32:
        if head.startswith(mark):
            stream.read(len(mark))
            return io.BufferedReader(Transcoded(stream, encoding), LOOK)
    return stream


def arrow(part: str, wanted_by: str) -> ModuleType:
    """The module `pyarrow` or `pyarrow.{part}`, loaded when a file asks for it. Raises InputError
    where it is absent.
    """
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as error:
        raise InputError(
            f"{wanted_by} files need pyarrow, which is not installed", "pip install 'eyas[parquet]'"
        ) from error


def _zstd(raw: io.BufferedReader) -> Any:
    pyarrow = arrow("", "Zstandard")
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


# What it is called, how it begins (a pattern) and what reads it.
PACKED: tuple[tuple[str, bytes, Callable[[io.BufferedReader], Any]], ...] = (
    ("gzip", b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    ("bzip2", rb"BZh[1-9]1AY&SY", bz2.BZ2File),
    ("xz", b"\xfd7zXZ\x00", lzma.LZMAFile),
    ("Zstandard", rb"\x28\xb5\x2f\xfd", _zstd),
)


def _fill(buffer: Any, read: Callable[[int], bytes]) -> int:
    """Fill a buffer by as many reads as it takes. What came before a fault is given; the next call
    meets the fault again.
    """
    filled = 0
    while filled < len(buffer):
        try:
            data = read(len(buffer) - filled)
        except Broken:
            if filled:
                break
            raise
        if not data:
            break
        buffer[filled : filled + len(data)] = data
        filled += len(data)
    return filled
