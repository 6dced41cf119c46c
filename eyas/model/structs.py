"""The structs that Python and the C++ library pass to each other, read from `cpp/eyas.h`."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

HEADER = Path(__file__).parent / "cpp" / "eyas.h"
_NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "float": ctypes.c_float}
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_DECLARATION = re.compile(r"^  (?:const )?(\w+)([^;(]*);", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?:\[(\d+)\])?$")


def structs(header: str) -> dict[str, type[ctypes.Structure]]:
    """The structs of a header by their names, in its order."""
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(re.sub(r" *//[^\n]*", "", header)):
        fields = [
            (field, _kind(kind, declared, int(count or 0), found))
            for kind, names in _DECLARATION.findall(body)
            for declared in names.split(",")
            for field, count in _NAME.findall(declared.strip())
        ]
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def _kind(kind: str, declared: str, count: int, known: dict[str, Any]) -> Any:
    one = ctypes.c_void_p if "*" in declared else {**_NUMBERS, **known}[kind]
    return one * count if count else one


STRUCTS = structs(HEADER.read_text(encoding="utf-8"))


def check_sizes(sizes: list[int]) -> None:
    """Raises OSError unless a library's structs have these sizes, in the header's order."""
    expected = [ctypes.sizeof(struct) for struct in STRUCTS.values()]
    if sizes != expected:
        raise OSError(f"its structs take {sizes} bytes, Python's {expected}")
