"""Settings from run files, options and Python arguments, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

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
        wrong = [
            f"{'.'.join(map(str, item['loc'])) or where}: {item['msg']}" for item in error.errors()
        ]
        known = ", ".join(kind.model_fields)
        raise ConfigError(
            f"{where} does not fit: " + "; ".join(wrong),
            f"change the field in the run file, by --set or as an argument; fields: {known}",
        ) from error
