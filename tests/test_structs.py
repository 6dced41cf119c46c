"""The structs that Python and the native library pass to each other."""

from __future__ import annotations

import ctypes

import pytest

from eyas.model.library import library, unavailable
from eyas.model.structs import STRUCTS, check_sizes, structs

HEADER = """
// struct None { int64_t of; };
struct Inner {
  int64_t first, second;  // two numbers
  const float *third, *fourth[3];
};

struct Outer {
  Inner inner;
  const float* const* many;
  float factor,
      other;
  double last;

  bool has(int64_t column) const { return column > 0; }
};
"""


def test_a_header_is_read_as_a_compiler_does():
    inner, outer = structs(HEADER).values()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    assert [name for name, *_ in inner._fields_] == ["first", "second", "third", "fourth"]
    assert [kind for _, kind in inner._fields_] == [integer, integer, pointer, pointer * 3]
    assert [name for name, *_ in outer._fields_] == ["inner", "many", "factor", "other", "last"]
    assert ctypes.sizeof(outer) == ctypes.sizeof(inner) + 8 + 8 + 8
    with pytest.raises(KeyError, match="short"):
        structs("struct One {\n  short number;\n};")


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_the_library_has_the_sizes_of_python():
    sizes = (ctypes.c_int64 * 100)()
    found = sizes[: library().eyas_sizes(sizes, 100)]
    check_sizes(found)
    assert len(found) == len(STRUCTS) > 15
    for wrong in (found[:-1], [*found, 8], [found[0] + 8, *found[1:]]):
        with pytest.raises(OSError, match="structs"):
            check_sizes(wrong)
