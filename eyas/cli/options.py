"""Options that several commands share, and a stage's config: run file, then `--set`, then
options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from rich.markup import escape

from eyas.errors import ConfigError, MissingInputError
from eyas.settings import ConfigT, validated

NAME_WIDTH, HELP_WIDTH = 40, 57  # of 100 columns, with a space between and two margins

TargetOption = Annotated[
    str,
    typer.Option(
        "--target", "-t", help='folder of the target, a GGUF file, a hub id, or "smollm2"'
    ),
]
Prompts = Annotated[str | None, typer.Option(help='JSONL (.gz too), or "builtin"')]
Output = Annotated[str, typer.Option("--output", "-o", help="folder or URL of the result")]
RunFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="run file; its section of this stage's name is used"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="change one field, e.g. epochs=3"),
]


def read_run_file(path: Path) -> dict[str, Any]:
    """A YAML file as a dict. Raises MissingInputError, ConfigError."""
    if not path.is_file():
        raise MissingInputError(
            f"no run file at {path}", "check the path; runs/ in the repository has examples"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}", "mend the file") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds no sections", "write sections such as `train:` with fields below"
        )
    return content


def override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of nested `values` with each "a.b=c" put in; c is read as YAML (a list, true, null).
    Raises ConfigError.
    """
    changed = dict(values)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--set {assignment} has no form FIELD=VALUE", "write e.g. --set epochs=3"
            )
        *parents, field = name.strip().split(".")
        section = changed
        for parent in parents:
            inner = section.get(parent)
            if inner is not None and not isinstance(inner, dict):
                raise ConfigError(
                    f"--set {name}: {parent} is a value, not a section", "name the field itself"
                )
            section[parent] = section = dict(inner or {})
        try:
            section[field] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {assignment}: the value is not YAML", "quote it, e.g. --set 'name=\"a: b\"'"
            ) from error
    return changed


def run_section(stage: str, run_file: Path | None) -> dict[str, Any]:
    """A stage's section of the run file; empty without a file. Raises MissingInputError,
    ConfigError.
    """
    content = read_run_file(run_file) if run_file else {}
    if run_file and stage not in content:
        raise ConfigError(f"{run_file} has no section {stage!r}", f"it has: {', '.join(content)}")
    return content.get(stage) or {}


def stage_config(
    kind: type[ConfigT],
    stage: str,
    run_file: Path | None,
    overrides: Sequence[str] | None,
    **options: Any,
) -> ConfigT:
    """A stage's config: its section of the run file, then `--set`, then options that are given."""
    section = run_section(stage, run_file)
    given = {name: value for name, value in options.items() if value is not None}
    return validated(kind, {**override(section, overrides or ()), **given}, where=stage)


def settings(kind: type[BaseModel]) -> str:
    """The fields of a config with their defaults and meanings: a line each, a group per section."""
    groups = ["\n".join(lines) for lines in _groups(kind, "", None)]
    return escape("\n\n".join(["Settings, for --set and for a run file:", *groups]))


def _groups(kind: type[BaseModel], prefix: str, section: BaseModel | None) -> list[list[str]]:
    own, sections = [], []
    for name, field in kind.model_fields.items():
        default = (
            getattr(section, name) if section else field.get_default(call_default_factory=True)
        )
        if isinstance(default, BaseModel):
            sections += _groups(type(default), f"{prefix}{name}.", default)
            continue
        text = f"{prefix}{name}"
        if not field.is_required():
            text = _shortened(f"{text}={plain(default)}", NAME_WIDTH)
        own.append(f"{text:{NAME_WIDTH}} {_shortened(meaning(kind, name), HELP_WIDTH)}".rstrip())
    return [own, *sections] if own else sections


def meaning(kind: type[BaseModel], field: str) -> str:
    """A setting's description, else its text in the class's docstring (`field: text.`), else ""."""
    if said := kind.model_fields[field].description:
        return " ".join(said.split())
    text = " ".join((kind.__doc__ or "").split())
    found = re.search(rf"(?:^|[.:;,] ){field}: (.+?)(?:[.;] |\.$|$)", text)
    return found.group(1) if found else ""


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1].rstrip()}…"


def plain(value: Any) -> str:
    """A default as YAML on one line."""
    value = to_jsonable_python(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n...\n").strip()
