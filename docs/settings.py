"""The page of settings, generated from the models that check them.

python docs/settings.py     write docs/settings.md
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from eyas.cli.gpus import GpusConfig
from eyas.cli.main import COMMANDS
from eyas.cli.options import meaning, plain

PAGE = Path(__file__).with_name("settings.md")
INTRODUCTION = """# Settings

All settings of all stages, written from the code by `python docs/settings.py`. A run file has a
section for each stage; `-s name=value` changes one setting of a command; `eyas.train(...)` and
`eyas.evaluate(...)` take settings as arguments. A dot separates a section from its setting:
`-s batches.tokens=4096`, `batches={"tokens": 4096}`. `[]` marks a setting of each entry of a list;
entries of the same kind are listed once. Copy [runs/example.yaml](../runs/example.yaml) to begin a
run file.
"""
HEAD = "\n| setting | default | values | meaning |\n|---|---|---|---|\n"
TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false"}
BOUNDS = (("minimum", "from"), ("exclusiveMinimum", "above"))
BOUNDS += (("maximum", "to"), ("exclusiveMaximum", "below"))


def values(schema: dict[str, Any]) -> str:
    """What a setting may be, by its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(values(one) for one in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "$ref" in schema or "allOf" in schema:
        return "a section"
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list: {values(items)}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"by name: {values(inner)}" if isinstance(inner, dict) else "a section"
    bounds = [f"{word} {schema[name]:g}" for name, word in BOUNDS if name in schema]
    return " ".join([TYPES.get(str(kind), str(kind or "any")), *bounds])


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for one in get_args(annotation) for found in models_in(one)]


def rows(
    kind: type[BaseModel],
    seen: set[type[BaseModel]],
    prefix: str = "",
    default: BaseModel | None = None,
) -> Iterator[str]:
    """A line for each setting, those of sections behind them. seen: models of entries that have
    their lines already.
    """
    page, inner = kind.model_json_schema(), []
    for name, field in kind.model_fields.items():
        given = field.get_default(call_default_factory=True)
        given = getattr(default, name) if default is not None else given
        if isinstance(given, BaseModel):
            inner += list(rows(type(given), seen, f"{prefix}{name}.", given))
            continue
        shown = "" if field.is_required() and default is None else f"`{plain(given)}`"
        schema = page["properties"][field.alias or name]
        named = page.get("$defs", {}).get(schema.get("$ref", "").rpartition("/")[2], {})
        schema = named if "enum" in named else schema
        cells = f"`{prefix}{name}`", shown, values(schema), meaning(kind, name)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        of_each = "[]" if "list" in values(schema) or "by name" in values(schema) else ""
        for one in models_in(field.annotation):
            if one not in seen:
                seen.add(one)
                inner += list(rows(one, seen, f"{prefix}{name}{of_each}."))
    yield from inner


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, line in COMMANDS.items():
        config = getattr(importlib.import_module(f"eyas.cli.{name}"), "CONFIG", None)
        if config is not None:
            parts.append(
                f"\n## `eyas {name}`\n\n{line}\n{HEAD}" + "\n".join(rows(config, set())) + "\n"
            )
    gpus = "\n".join(rows(GpusConfig, set(), "gpus."))
    return "".join([*parts, f"\n## The GPUs of a run file\n\n[On GPUs](gpu.md)\n{HEAD}{gpus}\n"])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(json.dumps({"settings": page().count("\n| `")}))
