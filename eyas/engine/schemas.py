"""Clients' schemas and grammars in the forms that llguidance reads. Pure functions."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def plain_schema(schema: Any) -> Any:
    """An equivalent JSON schema without false uniqueItems; a oneOf of distinct constants becomes
    anyOf.
    """
    if not isinstance(schema, dict):
        return schema
    plain = {name: one for name, one in schema.items() if (name, one) != ("uniqueItems", False)}
    for name in plain.keys() & {*_MAPS, *_LISTS, *_SCHEMAS}:
        one = plain[name]
        if name in _MAPS and isinstance(one, dict):
            plain[name] = {key: plain_schema(each) for key, each in one.items()}
        elif name in _LISTS and isinstance(one, list):
            plain[name] = [plain_schema(each) for each in one]
        elif name in _SCHEMAS:
            plain[name] = plain_schema(one)
    if "anyOf" not in plain and _are_constants(plain.get("oneOf")):
        plain["anyOf"] = plain.pop("oneOf")
    return plain


def _are_constants(schemas: Any) -> bool:
    """Whether each schema allows listed values only, no value twice."""
    values: list[Any] = []
    for schema in schemas if isinstance(schemas, list) else [None]:
        if not isinstance(schema, dict):
            return False
        listed = schema.get("enum")
        of_one = [schema["const"]] if "const" in schema else listed
        if not isinstance(of_one, list):
            return False
        values += of_one
    # 1 is 1.0 in JSON, and true is no number
    return len({json.dumps(one, sort_keys=True).removesuffix(".0") for one in values}) == len(
        values
    )


def lark(grammar: str) -> str:
    """A grammar of Lark's form or llama.cpp's GBNF, in Lark's form. A rule of characters alone
    matches the longest text. Raises ValueError.
    """
    try:
        return any_to_lark(_ESCAPED.sub(_character, grammar))
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    except Exception as error:  # llguidance has no class of its own for most errors
        raise ValueError(str(error)) from error


def _character(escape: re.Match[str]) -> str:
    """The character that an escape numbers: llguidance cuts the number short."""
    code = escape[1] or escape[2]
    if code is None or not 0x7F < int(code, 16) < 0x110000:
        return f"\\x{int(code, 16):02x}" if code and int(code, 16) < 0x80 else escape[0]
    return chr(int(code, 16))
