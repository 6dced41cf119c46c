"""A GGUF file as a target: a folder in Hugging Face's form in the cache, whose weights stay in the
file (`checkpoint`). A template FILE.jinja beside the file replaces its own; base models have none.

    FILE.gguf  ->  config.json  generation_config.json  tokenizer.json  tokenizer_config.json
                   chat_template.jinja  source.gguf (a link to the file)
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
IDENTITY_BYTES = 8 << 20  # hashed at either end of a file
FORM = "3"  # raise it when the same file gives another folder
MARKED = re.compile(r"<.+>|\[.+\]", re.S)  # texts of control tokens


def is_gguf(place: str) -> bool:
    """Whether a target's name is that of a GGUF file."""
    return place.endswith(SUFFIX) and "://" not in place


def target_folder(file: str | Path) -> Path:
    """The folder in the cache that holds a GGUF file as a Hugging Face model, made on first use.

    Raises MissingInputError, CorruptError (a cut file), MismatchError (an unknown architecture,
    quantisation, tokenizer or rotary scaling), TemplateError (no chat template), StorageFullError.
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
    # a cache that cannot be written to keeps its link
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
    """The file that a folder was made from. Raises MismatchError if it was made from none,
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
    return open_file(path)  # weights and fingerprint of one target share it


def _identity(path: Path) -> str:
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
    for _ in weights(file):  # refuse names and shapes that cannot be published
        pass
    ends = {"eos_token_id": end_tokens(file, template)}
    tokenizer, tokenizer_config = tokenizer_of(file, ends["eos_token_id"])
    config |= ends
    for name, key in (("bos", "bos"), ("pad", "padding")):
        config[f"{name}_token_id"] = file.of_tokenizer(f"{key}_token_id")
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json(ends),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _json(tokenizer_config),
        "chat_template.jinja": template,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def end_tokens(file: GgufFile, template: str) -> list[int]:
    """The tokens that end the target's output: those of the metadata, and the one that the template
    writes after an answer (Gemma 3 and Phi do not state it).
    """
    stated = [file.of_tokenizer(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    found = [number for number in stated if number is not None]
    places = {text: number for number, text in enumerate(file.of_tokenizer("tokens") or ())}
    if beyond := [number for number in found if number >= len(places)]:
        what = f"{file.path} ends answers at token {beyond[0]} of {len(places)} (eos_token_id)"
        raise CorruptError(what, DAMAGED)
    answer, after = "Hello, you.", ""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    with suppress(TemplateError):  # a template that refuses a plain question
        rendered = Template({"default": template}, named_tokens(file), str(file.path), None, {})
        after = rendered.render(messages, False, None).rpartition(answer)[2].lstrip()
    for length in range(len(after), 0, -1):  # the longest token that it begins with
        if (number := places.get(after[:length])) is not None:
            found += [number] if MARKED.fullmatch(after[:length]) else []
            break
    return list(dict.fromkeys(found))


def template_beside(path: Path) -> Path:
    """Where a template lies that replaces a file's own; of parts NAME.jinja."""
    match = PART.fullmatch(path.name)
    return path.with_name(f"{match['name']}.jinja") if match else path.with_suffix(".jinja")


def chat_template(file: GgufFile) -> str:
    """The template beside the file, else the file's own. Raises TemplateError."""
    beside = template_beside(file.path)
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if not template:
        raise TemplateError(f"{file.path} has no chat template", template_hint(str(beside)))
    return str(template)


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"
