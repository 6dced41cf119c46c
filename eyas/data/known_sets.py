"""The registry of known sets of prompts, registry.yaml, and which of them a source is."""

from __future__ import annotations

import datetime
import functools
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import HttpUrl

from eyas import builtin
from eyas.data.hub_sets import hub_set
from eyas.data.sources import URL_SET, SourceConfig
from eyas.data.streams import public_url
from eyas.hub import HUB_ID
from eyas.settings import Settings

REGISTRY = Path(__file__).with_name("registry.yaml")
_PACKAGED_FILES = Path(builtin.__file__).parent.glob("*_prompts.jsonl.gz")
PACKAGED = (*builtin.PROMPTS, *map(str, _PACKAGED_FILES))
LONGEST_COMMON = 4  # letters of a folder's name, such as math, that says nothing
HUB_PAGE = re.compile(rf"https://huggingface\.co/datasets/({HUB_ID.pattern})(?:[@/].*)?")


class KnownSet(Settings):
    """An entry. source: where its facts were read; unverified: fields that were not."""

    id: str
    aliases: tuple[str, ...] = ()
    licence: str | None = None
    terms: tuple[str, ...] = ()
    prompts_by: str | None = None
    answers_by: str | None = None
    url: HttpUrl
    source: str
    checked: datetime.date
    unverified: tuple[str, ...] = ()
    credit: str = ""
    note: str = ""


@functools.cache
def registry() -> dict[str, KnownSet]:
    """The known sets by the `_set_key` of each of their names."""
    content = yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    entries = [KnownSet.model_validate(entry) for entry in content]
    return {_set_key(name): entry for entry in entries for name in (entry.id, *entry.aliases)}


def find(source: SourceConfig) -> KnownSet | None:
    """The registry's entry of a source, by its hub id or its name in the run file."""
    packaged = builtin.BUILTIN if source.path in PACKAGED else None
    named = hub_set(source.path)
    url = URL_SET.fullmatch(source.path) or HUB_PAGE.fullmatch(source.path)
    names = (named[0] if named else url and url[1], packaged, source.name)
    return _entry(names)


def _entry(names: Iterable[str | None]) -> KnownSet | None:
    return next((one for name in names if name and (one := registry().get(_set_key(name)))), None)


def named_like(source: SourceConfig) -> KnownSet | None:
    """The entry after which a file or one of its last two folders is called: its terms hold."""
    file, *folders = re.split(r"[/\\]+", public_url(source.path).rstrip("/"))[:-4:-1]
    names = (file.partition(".")[0], *(one for one in folders if len(one) > LONGEST_COMMON))
    return _entry(names)


def _set_key(name: str) -> str:
    name = unicodedata.normalize("NFKC", name).strip().casefold()
    return re.sub(r"[\s_.-]+", "-", name)
