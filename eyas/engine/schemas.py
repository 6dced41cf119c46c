"""Clients' schemas and grammars in the forms that llguidance reads. Pure functions."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "allOf", "oneOf")
# JSON Schema's; others (password) are notes
_FORMAT = re.compile(
    "date|(date-)?time|duration|(idn-)?(email|hostname)|ipv[46]|[iu]ri(-reference)?|uri-template|"
    "uuid|(relative-)?json-pointer|regex"
)
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def plain_schema(schema: Any) -> Any:
    """An equivalent JSON schema without false uniqueItems and unknown formats; a oneOf of distinct
    constants becomes anyOf.
    """
    if isinstance(schema, list):
        return [plain_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: one for name, one in schema.items() if (name, one) != ("uniqueItems", False)}
    if isinstance(form := plain.get("format"), str) and not _FORMAT.fullmatch(form):
        del plain["format"]
    for name, one in plain.items():
        if name in _SCHEMAS:
            plain[name] = plain_schema(one)
        elif name in _MAPS and isinstance(one, dict):
            plain[name] = {key: plain_schema(each) for key, each in one.items()}
    if "anyOf" not in plain and _are_constants(plain.get("oneOf")):
        plain["anyOf"] = plain.pop("oneOf")
    return plain


def _are_constants(schemas: Any) -> bool:
    """Whether each schema allows listed values only, no value twice."""
    values: list[Any] = []
    for schema in schemas if isinstance(schemas, list) else [None]:
        if not isinstance(schema, dict):
            return False
        of_one = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(of_one, list):
            return False
        values += of_one
    # 1 is 1.0 in JSON, and true is no number
    different = {json.dumps(one, sort_keys=True).removesuffix(".0") for one in values}
    return len(different) == len(values)


def lark(grammar: str) -> str:
    """A grammar of Lark's form or llama.cpp's GBNF, in Lark's form. Raises ValueError."""
    try:
        return any_to_lark(_ESCAPED.sub(_character, grammar))
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    except Exception as error:  # llguidance has no class of its own for most errors
        raise ValueError(str(error)) from error


def _character(escape: re.Match[str]) -> str:
    """The character that an escape numbers: llguidance cuts the number short."""
    code = int(escape[1] or escape[2] or "110000", 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code < 0x110000 else escape[0]
