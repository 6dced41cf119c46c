"""A GGUF file as a target: a folder in the cache in Hugging Face's form, but for the weights, which
are read from the file itself (`checkpoint`).

    FILE.gguf  ->  config.json  generation_config.json  tokenizer.json  tokenizer_config.json
                   chat_template.jinja  source.gguf (a link to the file)

All of it comes from the file: its metadata say configuration, tokenizer and chat template. What
comes out is a target in its own right: a model that was quantised to 4 bits is not the model that
its publisher trained, and `config.json` says so (SOURCE). A template in FILE.jinja beside the file
comes before its own: files of base models have none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from eyas.artifact import cache_folder
from eyas.chat.template import Template
from eyas.errors import CorruptError, MismatchError, MissingInputError, TemplateError, template_hint
from eyas.gguf.configuration import configuration
from eyas.gguf.file import DAMAGED, PART, GgufFile, open_file, part_names
from eyas.gguf.tensors import check_types, weights
from eyas.gguf.tokenizer import named_tokens, tokenizer_of
from eyas.stores import storage_errors

SUFFIX = ".gguf"
LINK = "source.gguf"
TEMPLATE_SUFFIX = ".jinja"  # a chat template beside a file
IDENTITY_BYTES = 8 << 20  # read at either end, to tell whether a file is one that is known
FORM = "3"  # raise it when the same file gives another folder
MARKED = re.compile(r"<.+>|\[.+\]", re.S)  # what the text of a control token looks like


def is_gguf(place: str) -> bool:
    """Whether a name of a target is that of a GGUF file."""
    return place.endswith(SUFFIX) and "://" not in place


def target_folder(file: str | Path) -> Path:
    """The folder in the cache that holds a GGUF file as a Hugging Face model, made when it is first
    asked for.

    Raises MissingInputError, CorruptError (a cut file), MismatchError (an architecture,
    quantisation, tokenizer or rotary scaling that eyas does not read), TemplateError (no chat
    template), StorageFullError.
    """
    path = Path(file)
    if not path.is_file():
        raise MissingInputError(f"no file at {path}", "give the path of a GGUF file")
    if (first := part_names(path)[0]).is_file():
        path = first
    folder = cache_folder("gguf") / _identity(path)
    if folder.is_dir():
        _link(folder, path)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with storage_errors(str(folder)):
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
        try:
            write_folder(open_file(path), made)
            _link(made, path)
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _link(folder: Path, path: Path) -> None:
    """Let the folder lead to the file, wherever it lies now. A cache that cannot be written to
    keeps the link that it has.
    """
    link, place = folder / LINK, str(path.absolute())
    if link.is_symlink() and os.readlink(link) == place:
        return
    fresh = folder / f"{LINK}.{os.getpid()}-{threading.get_ident()}"
    with suppress(OSError):
        fresh.symlink_to(place)
        fresh.replace(link)


def is_of_file(folder: Path) -> bool:
    """Whether a target's folder was made from a GGUF file."""
    return (folder / LINK).is_symlink()


def linked_file(folder: Path) -> GgufFile:
    """The file that a folder was made from. Raises MismatchError where it was made from none,
    MissingInputError, CorruptError.
    """
    if not is_of_file(folder):
        raise MismatchError(
            f"{folder} is not made from a GGUF file",
            "dtype packed is for a target that is one: --target FILE.gguf",
        )
    path = Path(os.readlink(folder / LINK))
    if not path.is_file() or _identity(path) != folder.name:
        raise MissingInputError(
            f"the file {path} is no longer there, or another one",
            "give --target the path of the file once more",
        )
    return _opened(path, folder.name)


@lru_cache(maxsize=1)
def _opened(path: Path, identity: str) -> GgufFile:
    """Weights and fingerprint ask for one file one after the other: it is read once."""
    return open_file(path)


def _identity(path: Path) -> str:
    """Of a file, or of the parts of a model that are here, by the first one's path."""
    digest = hashlib.sha256()
    for part in part_names(path):
        if not part.is_file():
            continue
        size = part.stat().st_size
        digest.update(f"{FORM} {part.name} {size} ".encode())
        if part == path and (beside := template_beside(path)).is_file():
            digest.update(beside.read_bytes())
        with part.open("rb") as stream:
            digest.update(stream.read(IDENTITY_BYTES))
            stream.seek(max(0, size - IDENTITY_BYTES))
            digest.update(stream.read(IDENTITY_BYTES))
    return digest.hexdigest()[:16]


def write_folder(file: GgufFile, folder: Path) -> None:
    """Write everything of a target but its weights into an empty folder."""
    config, template = configuration(file), chat_template(file)
    check_types(file)
    for _ in weights(file):  # every tensor has a name and a shape that can be published
        pass
    found_ends = end_tokens(file, template)
    tokenizer, tokenizer_config = tokenizer_of(file, found_ends)
    texts = {
        "config.json": _json(
            config
            | {"eos_token_id": found_ends}
            | {
                f"{name}_token_id": file.of_tokenizer(f"{key}_token_id")
                for name, key in (("bos", "bos"), ("pad", "padding"))
            }
        ),
        "generation_config.json": _json({"eos_token_id": found_ends}),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _json(tokenizer_config),
        "chat_template.jinja": template,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def end_tokens(file: GgufFile, template: str) -> list[int]:
    """The tokens that end the target's output: those that the file states, and the one that its
    template writes behind an answer. Files of Gemma 3 and Phi state another end alone.
    """
    stated = [file.of_tokenizer(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    found = [number for number in stated if number is not None]
    places = {text: number for number, text in enumerate(file.of_tokenizer("tokens") or ())}
    if beyond := [number for number in found if number >= len(places)]:
        what = f"{file.path} ends answers at token {beyond[0]} of {len(places)} (eos_token_id)"
        raise CorruptError(what, DAMAGED)
    behind = _behind_an_answer(file, template)
    for length in range(len(behind), 0, -1):  # the longest token that it begins with
        if (number := places.get(behind[:length])) is not None:
            found += [number] if MARKED.fullmatch(behind[:length]) else []
            break
    return list(dict.fromkeys(found))


def _behind_an_answer(file: GgufFile, template: str) -> str:
    """What a template writes behind an answer's text; nothing where it refuses a plain question."""
    answer = "Hello, you."
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    with suppress(TemplateError):
        rendered = Template({"default": template}, named_tokens(file), str(file.path), None, {})
        return rendered.render(messages, False, None).rpartition(answer)[2].lstrip()
    return ""


def template_beside(path: Path) -> Path:
    """Where a template lies that comes before a file's own; of parts NAME.jinja."""
    match = PART.fullmatch(path.name)
    return (
        path.with_name(match["name"] + TEMPLATE_SUFFIX)
        if match
        else (path.with_suffix(TEMPLATE_SUFFIX))
    )


def chat_template(file: GgufFile) -> str:
    """The template beside the file, else the one in it. Raises TemplateError."""
    beside = template_beside(file.path)
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if not template:
        raise TemplateError(f"{file.path} has no chat template", template_hint(str(beside)))
    return str(template)


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"
