"""The Jinja environment of chat templates: transformers' settings and functions. A template may
come from anywhere: it runs in Jinja's sandbox, with bounds of time and size, and changes no input.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text, which stays as it is."""

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
        super().__init__()
        for name, value in dict(*given, **fields).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no field {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own `tojson` escapes what is special in HTML
    made = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # a part may have the indent once for each level
    _refuse_long(max(map(_width, (indent, *(separators or ())))) * sys.getrecursionlimit())
    return _together(made.iterencode(value) if indent or separators else [made.encode(value)])


RENDER_S = 3.0  # seconds of this thread's work
MOST_PARTS = 1 << 25  # characters of a text, or entries of a list
_render = threading.local()  # until: when this thread's render has to be over


class TooMuch(TemplateRuntimeError):
    """What a template does without end, as the end of a sentence."""


class _Generator(CodeGenerator):
    """Python of a template in which loops check the clock, and `~` the size of its text."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(turn))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        joined = nodes.EnvironmentAttribute("joined")
        self.visit(nodes.Call(joined, node.nodes, [], None, None), frame)


# Filters and methods whose result is as long as a number in their arguments; and those that may put
# an argument after each character.
PADDING = {"ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "generate_lorem_ipsum"}
PADDING |= {"batch", "slice", "round"}
GROWING = {"indent", "join", "replace", "translate", "wordwrap"}
# Widths and precisions of a format: after % and a name, or in braces after a colon.
PERCENT, BRACES = re.compile(r"%(?:\([^)]*\)+)?([-+ #\d.*]*)"), re.compile(r"\{[^{}]*:([^{}]*)")


class _Bounded(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def turn(self) -> None:
        if time.thread_time() > _render.until:
            raise TooMuch(f"takes longer than {RENDER_S:g} s")

    def joined(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _refuse_long(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str):
                _refuse_format(PERCENT, left, right if isinstance(right, tuple) else (right,))
            return super().call_binop(context, operator, left, right)
        sizes = [len(one) if isinstance(one, Sized) else one for one in (left, right)]
        if operator == "**" or isinstance(left, Sized) or isinstance(right, Sized):
            with suppress(TypeError):
                _refuse_long(sum(sizes) if operator == "+" else math.prod(sizes))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *given: Any, **named: Any) -> Any:
        self.turn()  # a macro may call itself
        name, own = getattr(called, "__name__", ""), getattr(called, "__self__", "")
        values = [*given, *named.values()]
        if name == "join" and values:  # the text comes between
            values[0], own = own, values[0]
        _refuse_growth(name, own, values)
        if name in ("format", "format_map"):
            text = getattr(getattr(called, "__wrapped__", None), "__self__", "")
            text = str(text).replace("{{", "").replace("}}", "}")
            _refuse_format(BRACES, text, values)
        return super().call(context, called, *given, **named)


def _refuse_format(specs: re.Pattern[str], text: str, values: Iterable[Any]) -> None:
    # widths are in the text, or among the values where it has `*` or nested braces
    found = " ".join(specs.findall(text))
    widths = [*map(int, re.findall(r"\d+", found))]
    if "*" in found or (specs is BRACES and re.search(r"\{[^{}]*\{", text)):
        widths += [value for value in values if isinstance(value, int)]
    _refuse_long(max(widths, default=0))


def _width(value: Any, number: int | None = None) -> int:
    """Of a text, of the widest in a mapping, or what a number says; number: in its place."""
    if isinstance(value, Mapping):
        return max((_width(one, number) for one in value.values()), default=0)
    if isinstance(value, str):
        return len(value)
    return number if number is not None else value if isinstance(value, int) else 0


def _refuse_growth(name: str, value: Any, given: Iterable[Any]) -> None:
    widest = max(map(_width, given), default=0)
    if name in PADDING:
        _refuse_long(widest * (10 if name == "round" else 1))
    elif name == "join" and isinstance(value, Iterable):
        _refuse_long(sum(_width(one, number=20) + widest for one in value))
    elif name in GROWING:
        _refuse_long((1 + len(str(value))) * widest)


def _bounded_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(made, "jinja_pass_arg"))  # such a filter gets Jinja's context first

    @wraps(made)
    def bounded(*given: Any, **named: Any) -> Any:
        context, (value, *values) = given[:first], given[first:]
        if name == "format":
            _refuse_format(PERCENT, str(value), (*values, *named.values()))
        else:
            value = list(value) if isinstance(value, Iterator) else value
            _refuse_growth(name, value, (*values, *named.values()))
        return made(*context, value, *values, **named)

    return bounded


def _refuse_long(size: float) -> None:
    if size > MOST_PARTS:
        raise TooMuch(f"makes a text of {size:,} characters, or a list of so many entries")


_ENVIRONMENT = _Bounded(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
_FILTERS = _ENVIRONMENT.filters
_FILTERS["tojson"] = _as_json
for _name in {"format", *PADDING, *GROWING} & _FILTERS.keys():
    _FILTERS[_name] = _bounded_filter(_name, _FILTERS[_name])
_ENVIRONMENT.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace}
_compiled = lru_cache(_ENVIRONMENT.from_string)


def unset_names(source: str) -> set[str]:
    """The variables that a template reads and does not set; none where it cannot be read."""
    try:
        return meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
    except TemplateError:
        return set()


def rendered(source: str, variables: Mapping[str, Any]) -> str:
    """A template's text. Raises TooMuch, and what mistakes in a template raise."""
    template = _compiled(source)
    _render.until = time.thread_time() + RENDER_S
    return _together(template.generate(variables))


def _together(pieces: Iterable[str]) -> str:
    parts, size = [], 0
    for part in pieces:
        parts.append(part)
        size += len(part)
        _refuse_long(size)
    return "".join(parts)
