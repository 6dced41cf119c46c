"""Raw conversation sets, read row by row: JSON or JSON lines, plain or gzip, at a local path or any fsspec URL.

Knows the shapes that such sets come in, and takes the user's side only: nothing an assistant said leaves this file. Knows
nothing of what makes a row unfit; a row it cannot read is reported by place, never quoted.
"""

from __future__ import annotations

import gzip
import io
import json
import posixpath
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fsspec.core import url_to_fs
from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import File, Manifest, file_identity
from eyas.data.rows import Damaged, Drop, Row
from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError

Turns = tuple[str, ...]

LIST_KEYS = ("messages", "conversations", "conversation", "turns")
TEXT_KEYS = ("prompt", "question", "text")
ID_KEYS = ("id", "conversation_id", "question_id", "prompt_id")
SHAPES = f"a list under {', '.join(LIST_KEYS)}, an instruction (and input), or a text under {', '.join(TEXT_KEYS)}"

USER_ROLES = frozenset({"user", "human", "prompter"})
SYSTEM_ROLES = frozenset({"system", "developer"})
OTHER_ROLES = frozenset(
    {"assistant", "gpt", "chatgpt", "bot", "model", "ai", "bard", "bing", "tool", "function", "function_call", "observation"}
)
# One text that holds both sides: a reserved token of some template, or a line by the assistant after one by the user.
TRANSCRIPT = re.compile(
    r"<\|\w+\|>|\[/INST\]"
    r"|^[#*> \t]*(?:human|user|instruction)[* \t]*:.*^[#*> \t]*(?:assistant|bot|response)[* \t]*:",
    re.I | re.M | re.S,
)
# An id is kept only if it looks like one: a set that uses e-mail addresses as ids is given others.
PLAIN_ID = re.compile(r"[\w.:/-]{1,100}")

CHUNK = 1 << 16  # characters
LOOK = 1 << 12  # bytes
DECODER = json.JSONDecoder()
SOLID = re.compile(r"\S")


class SourceConfig(BaseModel):
    """One file of conversations and the licence that allows training on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(description="local path or fsspec URL")
    licence: str = Field(min_length=1, description="SPDX identifier, e.g. CC-BY-4.0")
    name: str | None = Field(default=None, description="what prompts and ledger call it; the file's name without endings")

    @property
    def label(self) -> str:
        return self.name or posixpath.basename(self.path).split(".")[0] or self.path


class _Unreadable(ValueError):
    """A row without a shape known here; its message quotes nothing of the row."""


def describe(source: SourceConfig) -> Manifest:
    """A source as the input of an artifact: its identity is the hash of its bytes, wherever they lie.

    Raises MissingInputError, InputError.
    """
    with _reading(source.path):
        filesystem, path = _located(source.path)
        sha256 = file_identity(source.path)
        size = int(filesystem.size(path) or 0)
    files = {posixpath.basename(source.path): File(bytes=size, sha256=sha256)}
    return Manifest(
        stage="source", identity=sha256, config={"licence": source.licence}, counts={}, files=files, url=source.path
    )


def read_source(source: SourceConfig) -> Iterator[Row | Damaged]:
    """The rows of a source in order, one at a time; one that cannot be read comes as Damaged.

    Raises MissingInputError (no such file), EmptyInputError (no row in it), CorruptError (cut or broken gzip, a broken JSON
    array, or not one readable row), InputError (a URL that cannot be opened).
    """
    count, readable, first = 0, False, ""
    with _reading(source.path), _opened(source.path) as stream:
        for line, value in _values(stream, source.path):
            where = f"{posixpath.basename(source.path)}:{line}"
            count += 1
            try:
                if isinstance(value, _Unreadable):
                    raise value
                row = _row(value, source, where)
            except _Unreadable as error:
                first = first or f"line {line}: {error}"
                yield Damaged(source.label, where, Drop("malformed", str(error)))
            else:
                readable = True
                yield row
    if not count:
        raise EmptyInputError(f"{source.path} holds no row", "give a file of conversations or prompts")
    if not readable:
        raise CorruptError(
            f"not one of the {count} rows of {source.path} can be read; the first, {first}",
            f"give JSON lines or a JSON array of objects with {SHAPES}",
        )


# The file: bytes, then JSON values with the line that each begins on.


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what goes wrong while a file is read into the error that says so."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(f"no file at {path}", "check the path; relative paths start at the current folder") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptError(f"{path} is no complete gzip file: {error}", "fetch or compress it again") from error
    except (ImportError, OSError) as error:  # a store's package that is not installed; a folder; no permission; no network
        raise InputError(f"{path} cannot be read: {error}", "give one readable file per source") from error


def _located(path: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it."""
    try:
        filesystem, inner = url_to_fs(path)
    except ValueError as error:
        raise InputError(f"{path} cannot be opened: {error}", "use a local path, s3://, gs:// or https://") from error
    return filesystem, inner


@contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file, unpacked if they begin as gzip does, whatever its name says."""
    filesystem, inner = _located(path)
    with filesystem.open(inner, "rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        yield io.BufferedReader(gzip.GzipFile(fileobj=raw) if packed else raw)


def _values(stream: io.BufferedReader, path: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each row: items of an array, one indented object, or lines, found out by looking."""
    head = stream.peek(LOOK)[:LOOK].removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        yield from _items(stream, path)
    elif head.split(b"\n", 1)[0].strip() == b"{":
        yield 1, _parsed(stream.read())
    else:
        for line, text in enumerate(stream, start=1):
            if line == 1:
                text = text.removeprefix(b"\xef\xbb\xbf")
            if text.strip():
                yield line, _parsed(text)


def _parsed(text: bytes) -> Any:
    """The JSON value, or what is wrong with it."""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return _Unreadable("not UTF-8")
    except (ValueError, RecursionError):
        return _Unreadable("not JSON")


class _Characters:
    """A text read in chunks; `at` is the place of its next character and `line` that character's line."""

    def __init__(self, stream: IO[str]) -> None:
        self.text, self.at, self.line = "", 0, 1
        self._stream = stream

    def more(self) -> bool:
        """Read on; False at the end."""
        rest = self.text[self.at :]
        chunk = self._stream.read(max(CHUNK, len(rest)))  # doubling: a long item costs linear time
        self.text, self.at = rest + chunk, 0
        return bool(chunk)

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
        """The JSON value that begins here, passed; reads on for as long as it is only cut. Raises ValueError."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                problem = ValueError("the array has no end")
                # A number ends where the next sign is no part of one; all else ends by itself.
                if end < len(self.text) and (self.text[end] in " \t\r\n,]" or not isinstance(value, int | float)):
                    self.move(end)
                    return value
            except json.JSONDecodeError as error:
                problem = error
                if not error.msg.startswith("Unterminated") and error.pos + 16 < len(self.text):
                    raise  # broken where more text stands, so not by the end of what was read
            if not self.more():
                raise problem


def _items(stream: io.BufferedReader, path: str) -> Iterator[tuple[int, Any]]:
    """Items of a JSON array, holding one chunk and one item. What follows a broken item cannot be told: CorruptError."""
    characters = _Characters(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
    try:
        separator = characters.next()  # "["
        while separator != "]":
            characters.move(characters.at + 1)
            if characters.next() == "]":  # of an empty array, or after a last comma
                break
            line = characters.line
            yield line, characters.value()
            separator = characters.next()
            if separator not in ("]", ","):
                raise ValueError("no comma between two rows")
        characters.move(characters.at + 1)
        if characters.next():
            raise ValueError("text after the array")
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"the JSON array in {path} is broken at line {characters.line} or after it",
            "mend it, or give JSON lines, where one bad row harms no other",
        ) from error


# The row: who said what.


def _row(value: Any, source: SourceConfig, where: str) -> Row:
    if not isinstance(value, dict):
        raise _Unreadable("not an object")
    turns, system = _said(value)
    try:
        "".join((*turns, system or "")).encode()
    except UnicodeEncodeError as error:
        raise _Unreadable("half a character (a lone surrogate)") from error
    return Row(
        source=source.label,
        licence=source.licence,
        where=where,
        id=_given_id(value),
        turns=tuple(turn.strip() for turn in turns if turn.strip()),
        system=system.strip() or None if system else None,
    )


def _said(value: dict[str, Any]) -> tuple[Turns, str | None]:
    """What the user said, turn by turn, and the system prompt, in whichever shape the row has."""
    for key in LIST_KEYS:
        if isinstance(value.get(key), list):
            return _conversation(value[key], value.get("system"))
    if value.get("instruction") is not None:
        parts = (_text(value["instruction"]), _text(value.get("input")))
        return ("\n\n".join(part for part in parts if part.strip()),), _text(value.get("system"))
    for key in TEXT_KEYS:
        if isinstance(value.get(key), list):
            return _conversation(value[key], value.get("system"))
        if value.get(key) is not None:
            text = _text(value[key])
            if TRANSCRIPT.search(text):
                raise _Unreadable(f"{key} holds a whole conversation, assistant included")
            return (text,), _text(value.get("system"))
    raise _Unreadable(f"no shape known here: none of {', '.join((*LIST_KEYS, 'instruction', *TEXT_KEYS))}")


def _conversation(items: list[Any], system: Any) -> tuple[Turns, str | None]:
    """Turns of user and system of a list of messages (OpenAI's or ShareGPT's), or of a list of the user's texts."""
    if items and all(isinstance(item, str) for item in items):
        return tuple(items), _text(system)
    turns: list[str] = []
    systems = [_text(system)]
    for item in items:
        if not isinstance(item, dict):
            raise _Unreadable("a message is not an object")
        role = item.get("role", item.get("from"))
        text = item.get("content", item.get("value"))
        if not isinstance(role, str) or role.lower() not in USER_ROLES | SYSTEM_ROLES | OTHER_ROLES:
            raise _Unreadable("a message has no role known here")
        if role.lower() in USER_ROLES:
            turns.append(_text(text))
        elif role.lower() in SYSTEM_ROLES:
            systems.append(_text(text))
    return tuple(turns), "\n\n".join(text for text in systems if text)


def _text(content: Any) -> str:
    """A message's text: a string, nothing, or OpenAI's list of parts, all of them text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "\n".join(part["text"] for part in content)
    raise _Unreadable("a message is not text")


def _given_id(value: dict[str, Any]) -> str | None:
    for key in ID_KEYS:
        if isinstance(value.get(key), str | int) and PLAIN_ID.fullmatch(str(value[key])):
            return str(value[key])
    return None
