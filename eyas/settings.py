"""Settings from run files, options and Python arguments, validated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Flag:
    """Marks a field that is a command-line option. names: as typed, if not the field's. panel: of
    the help. separator: of a list in one word.
    """

    names: str = ""
    panel: str | None = None
    separator: str = ""


class Settings(BaseModel):
    """A config that takes no unknown field and does not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def validated(kind: type[ConfigT], values: Mapping[str, Any], where: str) -> ConfigT:
    """`values` as a config. Raises ConfigError, which names each wrong field."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(_in_words(kind, item) for item in error.errors())
        beside, named = _section(kind, error.errors()[0]["loc"])
        raise ConfigError(
            f"{where} does not fit: {wrong}",
            "change the field in the run file, by --set or as an argument; fields"
            f"{named and f' of {named}'}: {', '.join(beside.model_fields)}",
        ) from error


def _in_words(kind: type[BaseModel], item: Any) -> str:
    """What is wrong with a field, and what a misspelt or misplaced one may mean."""
    place, says = ".".join(map(str, item["loc"])), str(item["msg"])
    if item["type"] == "extra_forbidden":
        name, fields = str(item["loc"][-1]), _section(kind, item["loc"])[0].model_fields
        inner = {one: _config(found.annotation) for one, found in fields.items()}
        like = difflib.get_close_matches(name, fields, 1)
        like += [f"{one}.{name}" for one, at in inner.items() if at and name in at.model_fields]
        says = "no such field" + (f", did you mean {like[0]}?" if like else "")
    return f"{place}: {says}" if place else says


def _section(kind: type[BaseModel], path: Sequence[int | str]) -> tuple[type[BaseModel], str]:
    """The config that holds the field at a path, and its name."""
    named = ""
    for name in map(str, path[:-1]):
        found = kind.model_fields.get(name)
        if found and (inner := _config(found.annotation)):
            kind, named = inner, f"{named}.{name}".lstrip(".")
    return kind, named


def _config(annotation: Any) -> type[BaseModel] | None:
    """The config that a field, or an item of it, is."""
    kinds = (annotation, *get_args(annotation))
    return next(
        (one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None
    )
