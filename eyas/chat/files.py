"""A target's tokenizer and chat templates from its folder, in Hugging Face's form.

All rules of tokenizer.json are kept, as in training; transformers 5 drops those that some classes
(GPT2Tokenizer, LlamaTokenizer) do not know.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from eyas.errors import MissingInputError, extra, refuse_pointer


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """named: special tokens by their names in templates (bos_token, ...). templates: by name, the
    one for conversations is "default".
    """

    backend: Tokenizer
    named: Mapping[str, str]
    templates: Mapping[str, str]


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Raises MissingInputError: no folder, no tokenizer in it, or one that cannot be read."""
    if not folder.is_dir():
        hint = "give a target's folder in Hugging Face's form"
        raise MissingInputError(f"no folder at {folder}", hint)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    try:
        files = _read(folder) if has_tokenizer else _converted(folder)
    except MissingInputError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower
        refuse_pointer(folder / "tokenizer.json")
        raise _unreadable(folder, str(error).partition("\n")[0]) from error
    files.backend.no_truncation()
    files.backend.no_padding()
    return files


def _unreadable(folder: Path, why: str) -> MissingInputError:
    return MissingInputError(
        f"{folder} has no tokenizer that can be read: {why}",
        "put the target's tokenizer files beside its weights",
    )


def _converted(folder: Path) -> TokenizerFiles:
    older = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
    if not older:
        raise _unreadable(folder, "it holds no tokenizer.json")
    if find_spec("transformers") is None:
        raise MissingInputError(
            f"{folder} holds {older[0]} and no tokenizer.json",
            f"{extra('train')}, whose transformers converts it",
        )
    auto = importlib.import_module("transformers").AutoTokenizer
    tokenizer = auto.from_pretrained(folder, local_files_only=True)
    if not tokenizer.is_fast:
        raise MissingInputError(f"{folder} has no fast tokenizer", "add its tokenizer.json")
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    return TokenizerFiles(tokenizer.backend_tokenizer, tokenizer.special_tokens_map, templates)


def _read(folder: Path) -> TokenizerFiles:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = _json(folder / "tokenizer_config.json")
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if "added_tokens_decoder" in config:
        numbered = {int(number): one for number, one in config["added_tokens_decoder"].items()}
        listed = [_token(numbered[number]) for number in sorted(numbered)]
        added |= {token.content: token for token in listed}
    else:  # an older folder
        config |= _json(folder / "special_tokens_map.json")
        numbers = _json(folder / "added_tokens.json")
        for name in sorted(numbers, key=numbers.__getitem__):
            added.setdefault(name, AddedToken(name))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    by_name = config | (extra if isinstance(extra, dict) else {})
    named = {
        name: _token(value, special=True)
        for name, value in by_name.items()
        if (name.endswith("_token") or name in extra) and isinstance(value, str | dict)
    }
    for token in named.values():
        added.setdefault(token.content, token).special = True
    for one in extra if isinstance(extra, list) else []:
        token = _token(one, special=True)
        added.setdefault(token.content, token)
    backend.add_tokens(list(added.values()))
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    names = {name: token.content for name, token in named.items()}
    return TokenizerFiles(backend, names, _templates(folder, config.get("chat_template")))


def _json(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return read


def _token(value: str | Mapping[str, Any], special: bool = False) -> AddedToken:
    """A token in config files: its name, or its name with its flags."""
    fields = {"content": value} if isinstance(value, str) else dict(value)
    fields.pop("__type", None)
    return AddedToken(**{"special": special, **fields})


def _templates(folder: Path, configured: Any) -> dict[str, str]:
    """By name. Files replace those of tokenizer_config.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if isinstance(configured, list):
        return {one["name"]: one["template"] for one in configured}
    return {"default": configured} if isinstance(configured, str) else configured or {}
