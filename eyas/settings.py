"""Settings from run files, options and Python arguments, validated."""

from __future__ import annotations

from collections.abc import Mapping
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
        # unknown fields first: a misspelt one is also a lacking one
        found = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        wrong = [_in_words(kind, item) for item in found]
        raise ConfigError(
            f"{where} does not fit: " + "; ".join(one for one, _ in wrong),
            f"change the field in its file, by --set or as an argument; {wrong[0][1]}",
        ) from error


def _in_words(kind: type[BaseModel], item: Any) -> tuple[str, str]:
    """What is wrong with a field, and which fields are known there."""
    *above, last = map(str, item["loc"] or ("",))
    section = ""
    for name in above:  # numbers of items and names in a dict are no fields
        kinds = get_args(field.annotation) if (field := kind.model_fields.get(name)) else ()
        for one in (field and field.annotation, *kinds):
            if isinstance(one, type) and issubclass(one, BaseModel):
                kind, section = one, f"{section}.{name}".strip(".")
                break
    says = "no such field" if item["type"] == "extra_forbidden" else item["msg"]
    fields = f"fields{section and f' of {section}'}: {', '.join(kind.model_fields)}"
    return ": ".join(filter(None, (".".join((*above, last)), says))), fields
