"""The Jinja environment that chat templates are written for: transformers' settings and functions.

A template may come from anywhere: it runs in Jinja's sandbox and changes nothing that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks the assistant's text: it stays."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Without names of Python's own."""

    def __init__(self, /, *given: Any, **fields: Any) -> None:
        values = dict(*given, **fields)
        for name in values:
            _check(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no field {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes what is special in HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace}
    return environment


_ENVIRONMENT = _environment()


@lru_cache
def compiled(source: str) -> Template:
    """Raises jinja2.TemplateSyntaxError."""
    return _ENVIRONMENT.from_string(source)
