"""Keeps consented prompts for the next head, in a process of its own. No text reaches a disk before
it is cleaned.

    server ── a line of JSON a prompt ─▶ stdin   clean as the stage `prompts` does, append, fsync
    server ◀── "kept", or why not ────── stdout

    FOLDER/prompts-00000.jsonl ...   {"messages": [system, user, ...]} or {"prompt": ...}; nothing that an assistant said
    FOLDER/prompts.yaml              a run file: `eyas prompts -c FOLDER/prompts.yaml -o OUT` reads the rest as a source

A prompt lies in pipes and memory only, until what the policy masks, replaces or drops is gone. The
server that ends, however it ends, ends this process too. A line that was cut by a crash is taken
off at the next start. When `max_bytes` is reached, nothing more is kept. Run as `python -m
eyas.serve.collection CONFIG`. Knows no server.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import yaml

from eyas.errors import ConfigError, EyasError
from eyas.serve.consent import LAST_WORDS_S, CollectConfig

PART_BYTES = 16 << 20
MOST_CHARACTERS = 200_000  # of a prompt; longer ones are not searched and not kept
RUN_FILE = "prompts.yaml"
KEPT, FULL, TOO_LONG, EMPTY = "kept", "full", "too_long", "empty"


class Cleaner(Protocol):
    """Texts of one prompt without personal data and secrets; or the type for which it is dropped."""

    def __call__(self, texts: Sequence[str]) -> list[str] | str: ...


class Collection:
    """The folder. One process writes it."""

    def __init__(self, config: CollectConfig, clean: Cleaner) -> None:
        """Makes the folder, writes the run file, mends the last part.

        Raises ConfigError for one that cannot be written, that another server writes, or that holds
        prompts of another licence or of other writers.
        """
        self._config, self._clean = config, clean
        self._folder = config.folder.absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = self._locked()
            self._write_run_file()
            self._size = sum(path.stat().st_size for path in self._parts())
            self._mend()
        except OSError as error:
            what = f"cannot collect into {config.folder}: {error.strerror}"
            raise ConfigError(what, "give a folder that can be written") from error

    def add(self, row: dict[str, Any]) -> str:
        """Keep a prompt, {"messages": [[role, text], ...]} or {"prompt": text}; KEPT, or in a word
        why not.
        """
        turns = row["messages"] if "messages" in row else [["user", row["prompt"]]]
        texts = [text for _, text in turns]
        if not any(role == "user" and text.strip() for role, text in turns):
            return EMPTY
        if sum(map(len, texts)) > MOST_CHARACTERS:
            return TOO_LONG
        cleaned = self._clean(texts)
        if isinstance(cleaned, str):
            return f"pii.{cleaned.lower()}"
        kept: dict[str, Any] = {"prompt": cleaned[0]}
        if "messages" in row:
            kept = {
                "messages": [
                    {"role": role, "content": text}
                    for (role, _), text in zip(turns, cleaned, strict=True)
                ]
            }
        return self._append(json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace") + b"\n")

    def _locked(self) -> TextIO:
        """A file that is locked as long as it is open; a process before this one may still keep
        what it was handed.
        """
        lock = (self._folder / ".lock").open("w")
        deadline = time.monotonic() + LAST_WORDS_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.close()
                    what = f"another server collects into {self._config.folder}"
                    raise ConfigError(what, "give each server a folder of its own") from None
                time.sleep(0.1)

    def _append(self, line: bytes) -> str:
        if self._size + len(line) > self._config.max_bytes:
            return FULL
        parts = self._parts()
        last = parts[-1] if parts else self._part(0)
        if parts and last.stat().st_size + len(line) > PART_BYTES:
            last = self._part(int(last.stem.rpartition("-")[2]) + 1)
        descriptor = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            whole = os.fstat(descriptor).st_size
            # no room: half a line would spoil the next one too
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, whole)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._size += len(line)
        return KEPT

    def _part(self, number: int) -> Path:
        return self._folder / f"prompts-{number:05d}.jsonl"

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob("prompts-[0-9][0-9][0-9][0-9][0-9].jsonl"))

    def _mend(self) -> None:
        """Take a line off that a crash has cut."""
        for path in self._parts()[-1:]:
            data = path.read_bytes()
            if data and not data.endswith(b"\n"):
                whole = data.rfind(b"\n") + 1
                os.truncate(path, whole)
                self._size -= len(data) - whole

    def _write_run_file(self) -> None:
        source = {
            "path": f"{glob.escape(str(self._folder))}/prompts-*.jsonl",
            "name": self._config.name,
            "licence": self._config.licence,
            "prompts_by": self._config.prompts_by,
        }
        text = yaml.safe_dump(
            {"prompts": {"sources": [source]}}, sort_keys=False, allow_unicode=True
        )
        there = self._folder / RUN_FILE
        if (
            self._parts()
            and there.is_file()
            and _terms(there.read_text(encoding="utf-8")) != _terms(text)
        ):
            what = (
                f"{self._config.folder} holds prompts under other terms: {RUN_FILE} has "
                "another "
                "licence or prompts_by"
            )
            raise ConfigError(what, "give those, or another folder")
        partial = self._folder / f".{RUN_FILE}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self._folder / RUN_FILE)


def _terms(run_file: str) -> list[tuple[Any, Any]]:
    """Licence and writers of the sources in a run file; nothing of one that cannot be read."""
    try:
        return [
            (source.get("licence"), source.get("prompts_by"))
            for source in yaml.safe_load(run_file)["prompts"]["sources"]
        ]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return []


def outcomes(collection: Collection, lines: Iterator[str]) -> Iterator[str]:
    """What became of each line. A bug of the search costs the prompt that it meets, and tells
    nothing of it.
    """
    for line in lines:
        try:
            yield collection.add(json.loads(line))
        except Exception as error:
            yield f"failed.{type(error).__name__}"


def main(config: str, lines: Iterator[str], told: TextIO) -> None:
    """Collect until the lines end; the first word told is "ready"."""
    # Presidio imports torch and transformers where they are installed, for recognisers that nobody
    # asked for: 400 MB.
    sys.modules.update(dict.fromkeys(("torch", "transformers")))  # type: ignore[arg-type]  # None: an import of it fails
    cleaning = importlib.import_module("eyas.serve.cleaning")  # after that
    collection = Collection(CollectConfig.model_validate_json(config), cleaning.cleaner())
    print("ready", file=told, flush=True)
    for outcome in outcomes(collection, lines):
        print(outcome, file=told, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.stdin, sys.stdout)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
