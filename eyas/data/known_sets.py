"""The registry of known sets of prompts (registry.yaml): licences and authors; and which of them a
source is, or is called after.
"""

from __future__ import annotations

import datetime
import functools
import re
import unicodedata
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, HttpUrl

from eyas import builtin
from eyas.data.hub_sets import hub_set
from eyas.data.shapes import SHAPES
from eyas.data.sources import URL_SET, SourceConfig
from eyas.data.streams import public_url
from eyas.hub import HUB_ID

REGISTRY = Path(__file__).with_name("registry.yaml")
_PACKAGED_FILES = Path(builtin.__file__).parent.glob("*_prompts.jsonl.gz")
PACKAGED = (*builtin.PROMPTS, *map(str, _PACKAGED_FILES))
PACKAGED_SET = "eyas-demo-prompts"
# What a file's name says besides the name of its set.
FILLERS = re.compile(
    "a|my|the|set|data|dataset|json|jsonl|csv|(un)?(clean|filter)(ed)?|raw|full|sft|chat|v[0-9]+|"
    "instruct|instructions|prompts|train|training|test|dev|valid|validation|eval|en|english|"
    "part|split|sample|subset|copy|final|new|[0-9]+k?"
)
SHAPE_NAMES = {shape.name for shape in SHAPES}
SHORTEST_WITHIN = 5  # characters of a name that counts with other words around it
HUB_PAGE = re.compile(rf"https://huggingface\.co/datasets/({HUB_ID.pattern})(?:[@/].*)?")


class KnownSet(BaseModel):
    """An entry of the registry. source: where its facts were read; unverified: fields not read
    there; columns: keys that rows of its published form have together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    aliases: tuple[str, ...] = ()
    columns: frozenset[str] = frozenset()
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
    """The known sets by each of their names, in one spelling."""
    entries = [
        KnownSet.model_validate(entry)
        for entry in yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    ]
    return {_set_key(name): entry for entry in entries for name in (entry.id, *entry.aliases)}


def find(source: SourceConfig) -> KnownSet | None:
    """The registry's entry of a source, by its hub id or its name in the run file. The name of a
    file fills in nothing: see `named_like`.
    """
    packaged = builtin.BUILTIN if source.path in PACKAGED else None
    named = hub_set(source.path)
    url = URL_SET.fullmatch(source.path) or HUB_PAGE.fullmatch(source.path)
    names = (named[0] if named else url and url[1], packaged, source.name)
    return next(
        (registry()[_set_key(name)] for name in names if name and _set_key(name) in registry()),
        None,
    )


def named_like(source: SourceConfig) -> dict[str, str]:
    """Ids of known sets that a source's name, file or folders are called after, each with what is
    called so. A file's name may have more words ("my_alpaca52k.jsonl"), unless the set's name is
    as short as "star"; a folder's may not. "sql_sharegpt.json" says how its rows are written.
    """
    *folders, file = ["", *re.split(r"[/\\]+", public_url(source.path).rstrip("/"))][-3:]
    file = file.partition(".")[0] if "." in file[1:] else file
    given = [one for one in (source.name, file) if one]
    bare = {
        one: "".join(word for word in _set_key(one).split("-") if not FILLERS.fullmatch(word))
        for one in (*given, *folders)
    }
    found: dict[str, str] = {}
    for name, entry in sorted(registry().items(), key=lambda item: -len(item[0])):
        last = name.rpartition("/")[2]
        if entry.id == PACKAGED_SET:
            continue
        called = [one for one, key in bare.items() if key == last.replace("-", "")]
        if len(last) >= SHORTEST_WITHIN:
            within = re.compile(rf"(?<![a-z]){last.replace('-', '-?')}(?![a-z])")
            # of alpaca-gpt4 and alpaca the longer one counts: it was found before
            called += [
                one
                for one in given
                if within.search(_set_key(one))
                and one not in found.values()
                and not (last in SHAPE_NAMES and one == file and _set_key(one).endswith(f"-{last}"))
            ]
        for one in called[:1]:
            found.setdefault(entry.id, one)
    return found


def _set_key(name: str) -> str:
    """One spelling of a set's name."""
    name = unicodedata.normalize("NFKC", name).strip().casefold()
    return re.sub(r"[\s_.-]+", "-", name)
