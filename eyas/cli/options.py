"""Options of several commands, options that are fields of a stage's config, and that config: run
file, then `--set`, then options.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from rich.markup import escape

from eyas.errors import ConfigError, MissingInputError
from eyas.settings import ConfigT, Flag, validated

NAME_WIDTH, HELP_WIDTH = 40, 57  # of 100 columns

TargetOption = Annotated[
    str,
    typer.Option(
        "--target", "-t", help='folder of the target, a GGUF file, a hub id, or "smollm2"'
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="end with a line of JSON, on a terminal too")]
JsonAlone = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
_OUTPUT = typer.Option("--output", "-o", help="folder or URL of the result")
Output = Annotated[str, _OUTPUT]
OutputIfAny = Annotated[str | None, _OUTPUT]
HeadArgument = Annotated[
    str, typer.Argument(help='output of `eyas train`, a head of any form, a hub id, or "smollm2"')
]
RunFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="run file; this stage's section is used"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="change one field, e.g. epochs=3"),
]


def print_json(facts: Mapping[str, Any], is_asked: bool) -> None:
    """Print the facts as a line of JSON; on a terminal only if asked."""
    if is_asked or not sys.stdout.isatty():
        print(json.dumps(facts))


class _UniqueKeys(yaml.SafeLoader):
    """Without keys that stand twice, of which PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen:
                what = f"{key.value!r} stands twice"
                raise yaml.MarkedYAMLError(problem=what, problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


def read_run_file(path: Path) -> dict[str, Any]:
    """A YAML file as a dict. Raises MissingInputError, ConfigError."""
    if not path.is_file():
        raise MissingInputError(
            f"no run file at {path}", "check the path; runs/ in the repository has examples"
        )
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}", "correct the file") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} has no sections", "write sections such as `train:` with fields below"
        )
    return content


def override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of nested `values` with each "a.b=c" in it; c is YAML. Raises ConfigError."""
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--set {assignment} has no form FIELD=VALUE", "write e.g. --set epochs=3"
            )
        try:
            values = with_value(values, name.strip(), yaml.load(text, _UniqueKeys))
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {assignment}: the value is not YAML", "quote it, e.g. --set 'name=\"a: b\"'"
            ) from error
    return dict(values)


def with_value(
    values: Mapping[str, Any], path: str, value: Any, option: str = ""
) -> dict[str, Any]:
    """A copy of nested `values` with `value` at "a.b". option: for errors. Raises ConfigError."""
    inner = changed = dict(values)
    *sections, last = path.split(".")
    for depth, name in enumerate(sections, start=1):
        section = inner.get(name) or {}
        if not isinstance(section, dict):
            raise ConfigError(
                f"{option or f'--set {path}'}: {'.'.join(sections[:depth])} is a value, not a "
                "section",
                "write a section, or leave one of the two out",
            )
        inner[name] = dict(section)
        inner = inner[name]
    inner[last] = value
    return changed


@dataclass(frozen=True, slots=True)
class StageOptions:
    """A stage's settings on a command line. flags: values by the field's path."""

    run_file: Path | None = None
    overrides: Sequence[str] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def section(self, stage: str) -> dict[str, Any]:
        """A stage's section of the run file, or {}. Raises MissingInputError, ConfigError."""
        if self.run_file is None:
            return {}
        content = read_run_file(self.run_file)
        section = content.get(stage, "")
        if not isinstance(section, dict | None):
            what = f"{self.run_file} has no section {stage!r} with fields"
            raise ConfigError(what, f"it has: {', '.join(map(str, content))}")
        return section or {}

    def config(self, kind: type[ConfigT], stage: str, **options: Any) -> ConfigT:
        """A stage's config: section of the run file, `--set`, `options` by path (None: not given),
        flags; the last wins.
        """
        values = override(self.section(stage), self.overrides or ())
        typed = {path: f"--{path.partition('.')[0]}" for path in options}
        typed |= {path: name for path, _, name, _ in _options(kind)}
        for path, value in {**options, **self.flags}.items():
            values = values if value is None else with_value(values, path, value, typed[path])
        return validated(kind, values, where=stage)


def with_flags(kind: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command's parameter `stated` (StageOptions) becomes an option for each field
    of `kind` with a Flag, --config and --set.
    """
    options = list(_options(kind))
    shared = {"run_file": RunFile, "overrides": Overrides}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            flags = {}
            for path, flag, _, parameter in options:
                value = given.pop(parameter.name)
                if flag.separator and value is not None:  # a space stands for any white space
                    value = [one for one in value.split(flag.separator.strip() or None) if one]
                if value is not None:
                    flags[path] = value
            general = {name: given.pop(name) for name in shared}
            command(**given, stated=StageOptions(**general, flags=flags))

        parameters = []
        for one in inspect.signature(command, eval_str=True).parameters.values():
            if one.name == "stated":
                parameters += [parameter for *_, parameter in options]
                parameters += [_parameter(*one) for one in shared.items()]
            else:
                parameters.append(one.replace(kind=Parameter.KEYWORD_ONLY))
        # typer reads these
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapped

    return decorate


def _parameter(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _options(config: type[BaseModel]) -> Iterator[tuple[str, Flag, str, Parameter]]:
    for path, found, default, text in _fields(config):
        for flag in found.metadata:
            if not isinstance(flag, Flag):
                continue
            kind, shown = found.annotation, default
            if get_origin(kind) is UnionType:
                (kind,) = set(get_args(kind)) - {NoneType}
            if get_origin(kind) not in (list, tuple):
                kind = kind if kind in (int, float, bool) else str
            elif flag.separator:
                kind, shown = str, flag.separator.join(map(str, default))
            else:
                kind, shown = list[str], "or several"
            names = flag.names or f"--{path.rpartition('.')[2].replace('_', '-')}"
            note = f"{text} ({shown})" if shown else text
            option = typer.Option(*names.split(), help=note, rich_help_panel=flag.panel)
            parameter = _parameter(path.replace(".", "_"), Annotated[kind | None, option])
            yield path, flag, names.split()[0], parameter


def _fields(
    kind: type[BaseModel], prefix: str = "", section: BaseModel | None = None
) -> Iterator[tuple[str, FieldInfo, Any, str]]:
    """Path, field, default and meaning of every setting; sections last."""
    sections = []
    for name, found in kind.model_fields.items():
        default = found.get_default(call_default_factory=True)
        default = default if section is None else getattr(section, name)
        if isinstance(default, BaseModel):
            sections.append((type(default), f"{prefix}{name}.", default))
        else:
            yield f"{prefix}{name}", found, default, meaning(kind, name)
    for one in sections:
        yield from _fields(*one)


def settings(kind: type[BaseModel]) -> str:
    """A config's fields with defaults and meanings: a line each, a group per section."""
    groups: dict[str, list[str]] = {}
    for path, found, default, text in _fields(kind):
        shown = path if found.is_required() else f"{path}={plain(default)}"
        line = f"{_shortened(shown, NAME_WIDTH):{NAME_WIDTH}} {_shortened(text, HELP_WIDTH)}"
        groups.setdefault(path.rpartition(".")[0], []).append(line.rstrip())
    texts = ["Settings, for --set and for a run file:", *map("\n".join, groups.values())]
    return escape("\n\n".join(texts))


def meaning(kind: type[BaseModel], field: str) -> str:
    """A setting's description, or its text in the class's docstring (`field: text.`), or ""."""
    if description := kind.model_fields[field].description:
        return " ".join(description.split())
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
