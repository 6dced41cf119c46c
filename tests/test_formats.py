"""Formats: every container gives the same values; whatever is damaged costs its own row, or all
after it as one, never more.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tracemalloc
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.data import formats, streams, tables
from eyas.data.formats import values
from eyas.data.streams import TOO_LONG, StoreFile, Unreadable
from eyas.errors import InputError

pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
parquet = pytest.importorskip("pyarrow.parquet")

KEYS = frozenset({"id", "prompt", "text"})
THREE = [{"id": f"a-{number}", "prompt": f"Where is “{number}”?\nAnd, 𝄞?"} for number in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in THREE)


def read(data, name="set", texts=None):
    """(line, value) of each row, what is wrong with a row as a text beginning with "!"."""
    stored = StoreFile(io.BytesIO(data if isinstance(data, bytes) else data.encode()), name)
    return [
        (line, f"!{value}" if isinstance(value, Unreadable) else value)
        for line, value in values(stored, name, KEYS, texts)
    ]


def only_values(data, name="set", texts=None):
    return [value for _, value in read(data, name, texts)]


def as_csv(rows, **dialect):
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), **dialect)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def as_parquet(rows, **options):
    stream = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), stream, **options)
    return stream.getvalue()


# What is the same however it is written.

TEXTS = {
    "lines": (LINES, [1, 2, 3]),
    "lines, blank ones between": ("\n\n" + LINES.replace("\n", "\r\n \n"), [3, 5, 7]),
    "lines without the last break": (LINES.removesuffix("\n"), [1, 2, 3]),
    "array": (json.dumps(THREE), [1, 1, 1]),
    "array, one row a line": (
        "[\n" + ",\n".join(json.dumps(row) for row in THREE) + "\n]\n",
        [2, 3, 4],
    ),
    "array, indented": (json.dumps(THREE, indent=2, ensure_ascii=False), [2, 6, 10]),
    "array with a last comma": (json.dumps(THREE)[:-1] + ",]", [1, 1, 1]),
    "objects, indented": ("\n".join(json.dumps(row, indent=1) for row in THREE), [1, 5, 9]),
    "objects of several lines": (
        "\n".join(
            f'{{"id": "{row["id"]}",\n"prompt": {json.dumps(row["prompt"])}}}' for row in THREE
        ),
        [1, 3, 5],
    ),
    "csv": (as_csv(THREE), [2, 4, 6]),
    "csv, tabs": (as_csv(THREE, dialect="excel-tab"), [2, 4, 6]),
    "csv, semicolons, all quoted": (as_csv(THREE, delimiter=";", quoting=csv.QUOTE_ALL), [2, 4, 6]),
    "csv, another header": (as_csv(THREE).replace("id,prompt", " ID,Prompt"), [2, 4, 6]),
    "csv, more columns": (
        as_csv([{**row, "n": "1", "answer": 'a "b", \\'} for row in THREE]),
        [2, 4, 6],
    ),
}
PACKINGS = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "gzip, two members": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: bytes(pyarrow.compress(data, codec="zstd", asbytes=True)),
}


def wanted(row, value):
    return {key: value[key] for key in row} == row


@pytest.mark.parametrize("name", TEXTS)
def test_texts(monkeypatch, name):
    text, lines = TEXTS[name]
    for chunk in (1 << 16, 3, 1):
        monkeypatch.setattr(formats, "CHUNK", chunk)
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
            found = read(text.encode(encoding))  # the name says nothing
            assert [line for line, _ in found] == lines, (encoding, chunk)
            assert all(wanted(row, value) for row, (_, value) in zip(THREE, found, strict=True))


@pytest.mark.parametrize("packing", PACKINGS)
def test_packings(packing):
    for name in ("lines", "array", "csv"):
        text, lines = TEXTS[name]
        packed = PACKINGS[packing](text.encode("utf-16"))
        found = read(packed, "set.txt" if name == "lines" else "set")
        assert [line for line, _ in found] == lines, name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a/b.jsonl.gz", "jsonl"),
        ("B.JSON", "json"),
        ("x.y.csv.zst", "csv"),
        ("x", ""),
        ("a.gz", ""),
        ("a.b/c", ""),
        ("a.exe", ""),
    ],
)
def test_endings(name, kind):
    assert formats.ending(name) == kind


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("[INST] Hi", "a.txt", "lines"),
        ("[INST] Hi", "a", "lines"),
        ("{curly} words", "a.txt", "json lines"),  # on the safe side
        ('"Hi," she said\nHo', "a.txt", "lines"),
        ('"Hi"\n"Ho"', "a", "json lines"),
        ('"prompt"\n"Hi"', "a.csv", "csv"),
        ("Hi, you\nHo, you", "a", "lines"),
        ("prompt,answer\nHi,Ho", "a", "csv"),
        ("prompt,answer\nHi,Ho", "a.txt", "lines"),
        ("broken\n" + LINES, "a", "json lines"),
        ("Hi", "a.jsonl", "json lines"),
        ("[1, 2]", "a.json", "array"),
        ("", "a", "lines"),
    ],
)
def test_what_a_file_is(text, name, kind):
    assert formats.text_format(text.encode(), name, KEYS) == kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def half(value):
    """Whether a JSON text has half a character in it that no escape hides."""
    return not streams.is_encodable(json.dumps(value, ensure_ascii=False))


@given(st.lists(JSON, max_size=5), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_arrays_read_in_pieces_equal_arrays_read_at_once(items, chunk, indent, ascii_only):
    data = json.dumps(items, indent=indent, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK", chunk)
        found = only_values(data, "set.json", "strings")
    assert found == [
        "!not UTF-8" if not ascii_only and half(item) else item
        for item in json.loads(json.dumps(items))
    ]


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=8)


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4),
    st.sampled_from(",;\t|"),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    st.booleans(),
)
def test_csv_comes_back_as_it_was_written(cells, delimiter, quoting, doubled):
    """All but white space at a line's end, which some writers leave unquoted."""
    rows = [dict(zip(("prompt", "text", "other"), row, strict=True)) for row in cells]
    escape = {} if doubled else {"doublequote": False, "escapechar": "\\"}
    data = as_csv(rows, delimiter=delimiter, quoting=quoting, **escape)
    plain = tables.CsvDialect(delimiter, escape=not doubled)
    found = tables.csv_rows(streams.LineReader(io.BufferedReader(io.BytesIO(data.encode()))), plain)
    assert [row for _, row in found] == rows
    assert tables.dialect_of(data.encode(), KEYS).delimiter == delimiter


# What is damaged.


def test_a_bad_byte_costs_its_row():
    bad = [
        json.dumps({"prompt": "caf\xe9"}, ensure_ascii=False).encode("latin-1"),
        b"prompt\ncaf\xe9\nfine",
        b"caf\xe9\nfine",
    ]
    assert only_values(LINES.encode() + bad[0] + b"\n" + LINES.encode()) == [
        *THREE,
        "!not UTF-8",
        *THREE,
    ]
    array = b"[" + bad[0] + b"," + LINES.splitlines()[0].encode() + b"]"
    assert only_values(array) == ["!not UTF-8", THREE[0]]
    assert only_values(bad[1], "set.csv") == ["!not UTF-8", {"prompt": "fine"}]
    assert only_values(bad[2], "set.txt") == ["!not UTF-8", "fine"]
    assert only_values(b"zero\0zero\nfine", "set.txt") == ["!not text", "fine"]
    assert only_values(b"prompt\nzero\0zero\nfine", "set.csv") == ["!not text", {"prompt": "fine"}]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_half_a_character_of_utf_16_costs_its_row(encoding):
    mark, half_a_character = "\ufeff".encode(encoding), "\ud800".encode(encoding, "surrogatepass")
    first, *rest = LINES.splitlines(keepends=True)
    data = mark + first.encode(encoding) + half_a_character + "".join(rest).encode(encoding)
    assert only_values(data) == [THREE[0], "!not UTF-8", THREE[2]]
    assert only_values((mark + LINES.encode(encoding))[:-3]) == [*THREE[:2], "!not UTF-8"]


def test_what_no_utf_32_can_be_ends_the_file():
    data = LINES.encode("utf-32")
    place = LINES.index("\n") + 10
    broken = data[: 4 * place] + b"\xff\xff\xff\xff" + data[4 * place :]
    assert only_values(broken)[-1] == "!not utf-32-le from here on; what follows is lost"


MANY = [
    {"id": str(number), "prompt": f"{number} {random.Random(number).randbytes(40).hex()}"}
    for number in range(5000)
]


@pytest.mark.parametrize("packing", ["gzip", "bzip2", "xz", "zstd"])
@pytest.mark.parametrize("form", ["lines", "array", "csv"])
def test_a_cut_keeps_the_rows_before_it(form, packing):
    data = {
        "lines": "".join(json.dumps(row) + "\n" for row in MANY),
        "array": json.dumps(MANY),
        "csv": as_csv(MANY),
    }[form]
    whole = PACKINGS[packing](data.encode())
    # bzip2's blocks are longer than this
    packed = (whole if packing == "bzip2" else b"") + whole[: len(whole) * 9 // 10]
    *rows, (line, last) = read(packed if form != "array" else whole[: len(whole) * 9 // 10])
    assert (
        last
        == f"!the {'Zstandard' if packing == 'zstd' else packing} data are cut or damaged here; "
        "what follows is lost"
    )
    assert len(rows) >= 3000 or (form, packing) == ("array", "bzip2")
    header = form == "csv"
    assert [row for _, row in rows] == MANY[: len(rows)] or packing == "bzip2"
    assert [line for line, _ in rows] == [
        1 if form == "array" else number + 1 + header for number in range(len(rows))
    ]
    assert line == (1 if form == "array" else len(rows) + 1 + header)


def test_damage_within_gzip():
    data = "".join(json.dumps(row) + "\n" for row in MANY).encode()
    wrong_sum = bytearray(gzip.compress(data))
    wrong_sum[-8] ^= 1
    *rows, last = only_values(bytes(wrong_sum))
    assert (rows, last[:5]) == (MANY, "!the ")
    *rows, last = only_values(gzip.compress(data) + b"junk after it")
    assert (rows, last[:5]) == (MANY, "!the ")
    assert only_values(gzip.compress(data) + b"\0" * 100) == MANY  # padding, as tapes have it


BROKEN_ARRAYS = {
    "no end": (f"[{json.dumps(THREE[0])}", 1, "the JSON array has no end"),
    "cut": (
        f"[{json.dumps(THREE[0])},\n{json.dumps(THREE[1])[:-5]}",
        2,
        "the JSON ends in the middle of a value",
    ),
    "no comma": (
        f"[{json.dumps(THREE[0])} {json.dumps(THREE[1])}]",
        1,
        "the JSON array is broken here; the rest is lost",
    ),
    "broken item": (
        f"[{json.dumps(THREE[0])},\n\n{{broken}}, {json.dumps(THREE)}]",
        3,
        "not JSON here; the rest is lost",
    ),
    "text after it": (f"[{json.dumps(THREE[0])}]\n{LINES}", 2, "text after the JSON array"),
    "endless number": (
        f"[{json.dumps(THREE[0])},\n{'9' * 5000}, 1]",
        2,
        "a number too long; the rest is lost",
    ),
    "objects": (
        json.dumps(THREE[0], indent=1) + "\n{broken}" + LINES,
        5,
        "not JSON here; the rest is lost",
    ),
}


@pytest.mark.parametrize("chunk", [1 << 16, 7])
@pytest.mark.parametrize("name", BROKEN_ARRAYS)
def test_a_broken_array_keeps_the_rows_before_the_break(monkeypatch, name, chunk):
    monkeypatch.setattr(formats, "CHUNK", chunk)
    data, line, says = BROKEN_ARRAYS[name]
    (_, first), (place, last) = read(data)
    assert (first, place, last) == (THREE[0], line, f"!{says}")


@pytest.mark.parametrize(
    "item",
    [
        "[" * 100_000 + '"]", \\"' + "]" * 100_000,
        '{"prompt": %s}' % ("9" * 5000),
        '["\\\\", {"a": "]"}, ' + "9" * 5000 + "]",
    ],
)
@pytest.mark.parametrize("chunk", [1 << 16, 1000])
def test_an_item_that_is_json_but_too_much_costs_itself(monkeypatch, item, chunk):
    monkeypatch.setattr(formats, "CHUNK", chunk)
    item = item.replace('"]", \\"', '"]"')
    first, second = only_values(f"[{item}, {json.dumps(THREE[0])}]")
    assert first.startswith("!not JSON that can be read")
    assert second == THREE[0]


CSV = {
    "fewer fields": ("prompt,text\na,b\nc\nd,e\n", ["!1 fields, but 2 columns"]),
    "more fields": ("prompt,text\na,b\nc,c,c\nd,e\n", ["!3 fields, but 2 columns"]),
    "text after a quote": ('prompt,text\na,b\n"c"c,c\nd,e\n', ["!not CSV: the quoting is broken"]),
    "a quote that never ends": (
        'prompt,text\na,b\n"c,c\nd,e\n',
        ["!not CSV: the quoting is broken"],
    ),
    "a quote that ends in the next row": (
        'prompt,text\na,b\n"c,c\nd,"e"\n',
        ["!not CSV: the quoting is broken"],
    ),
}


@pytest.mark.parametrize("name", CSV)
def test_a_broken_row_of_csv_harms_no_other(name):
    data, broken = CSV[name]
    rows = [{"prompt": "a", "text": "b"}, *broken, {"prompt": "d", "text": "e"}]
    assert read(data, "set.csv") == list(enumerate(rows, start=2))


def test_a_header_that_cannot_be_read_ends_the_file():
    assert read('"prompt"x,text\na,b\nc,d\n', "set.csv") == [
        (1, "!the quoting of the header is broken here; the rest is lost")
    ]
    assert read("prompt,text,Prompt\na,b,c\n", "set.csv") == [(1, "!two columns of one name")]


def test_where_fields_span_lines_broken_quotes_end_the_file():
    """For what follows could be a piece of any column."""
    data = 'prompt,text\na,"b\nb"\nc,"d\nd, said by an assistant"d\ne,f\n'
    assert read(data, "set.csv") == [
        (2, {"prompt": "a", "text": "b\nb"}),
        (4, "!the quoting is broken here; the rest is lost"),
    ]


# What is too long.

LONG = "x" * 5000


@pytest.fixture
def _small_limit(monkeypatch):
    for module in (formats, streams, tables):
        monkeypatch.setattr(module, "LIMIT", 1000)


@pytest.mark.usefixtures("_small_limit")
@pytest.mark.parametrize(
    ("data", "name", "lines"),
    [
        (f'{{"prompt": "a"}}\n{{"prompt": "{LONG}"}}\n{{"prompt": "b"}}', "set.jsonl", [1, 2, 3]),
        (
            f'[{{"prompt": "a"}},\n{{"prompt": "{LONG}"}},\n{{"prompt": "b"}}]',
            "set.json",
            [1, 2, 3],
        ),
        (
            f'[{{"prompt": "a"}},\n[[{{"prompt": "]\\\\\\"}}{LONG}"}}]],\n{{"prompt": "b"}}]',
            "set.json",
            [1, 2, 3],
        ),
        (f"prompt\na\n{LONG}\nb\n", "set.csv", [2, 3, 4]),
        (f'prompt\na\n"{LONG}"\nb\n', "set.csv", [2, 3, 4]),
        (f'prompt,text\na,"\n"\n"{LONG}",c\nb,\n', "set.csv", [2, 4, 5]),
        (f"a\n{LONG}\nb", "set.txt", [1, 2, 3]),
    ],
)
def test_a_row_too_long_costs_itself(data, name, lines):
    found = read(data, name)
    assert [line for line, _ in found] == lines
    assert found[1][1] == f"!{TOO_LONG}"
    assert all("a" in str(found[0][1]) and "b" in str(found[2][1]) for _ in found)


@pytest.mark.usefixtures("_small_limit")
def test_a_field_too_long_over_many_lines():
    lines = "".join(f"{number},c\n" for number in range(400))
    found = read(f'prompt,text\na,b\n"{lines}', "set.csv")
    assert found[1] == (3, f"!{TOO_LONG}")
    assert len(found) == 401  # the rows after the quote are rows of their own again
    ends = read(f'prompt,text\na,"b\nb"\nc,"{lines}"\n', "set.csv")
    assert ends[1:] == [(4, "!the quoting is broken here; the rest is lost")]


@pytest.mark.usefixtures("_small_limit")
def test_a_paragraph_too_long():
    data = "a\n\n" + ("x" * 90 + "\n") * 20 + "\nb\n"
    assert read(data, "set.txt", "paragraphs") == [(1, "a"), (3, f"!{TOO_LONG}"), (24, "b")]


class Endless(io.RawIOBase):
    """Bytes without end, or so many that they may not be held."""

    def __init__(self, head, repeated, tail, count):
        self._parts = iter([head, *([repeated] * count), tail])
        self._rest = b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self._rest:
            try:
                self._rest = next(self._parts)
            except StopIteration:
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


@pytest.mark.parametrize(
    ("head", "tail", "name"),
    [
        (b'{"prompt": "', b'"}\n{"prompt": "b"}\n', "set.jsonl"),
        (b'[{"prompt": "', b'"}, {"prompt": "b"}]', "set.json"),
        (b'prompt\n"', b'"\nb\n', "set.csv"),
        (b"", b"\nb\n", "set.txt"),
    ],
)
def test_memory_stays_within_a_few_limits(monkeypatch, head, tail, name):
    for module in (formats, streams, tables):
        monkeypatch.setattr(module, "LIMIT", 1 << 20)
    stored = StoreFile(Endless(head, b"x" * 65536, tail, 1000), name)
    tracemalloc.start()
    try:
        (_, first), (_, second) = values(stored, name, KEYS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(first) == TOO_LONG
    assert "b" in str(second)
    assert peak < 16 << 20  # of 64 MB


# Parquet.


def test_parquet_gives_the_columns_that_matter():
    rows = [{**row, "answer": "not this"} for row in THREE]
    assert read(as_parquet(rows)) == list(enumerate(THREE, start=1))
    assert only_values(as_parquet([{"answer": "not this"}])) == [{}]
    no_footer = "!the Parquet file is cut or damaged: it has no readable footer"
    assert only_values(b"broken", "set.parquet") == [no_footer]
    assert only_values(as_parquet(rows)[:-50]) == [no_footer]
    assert only_values(as_parquet(rows).replace(b"prompt", b"pr\xffmpt")) == [no_footer]


def test_parquet_is_read_in_batches(monkeypatch):
    monkeypatch.setattr(tables, "BATCH_BYTES", 1000)
    assert only_values(as_parquet(MANY, row_group_size=700)) == MANY


def test_a_damaged_row_group_costs_itself():
    data = as_parquet(
        MANY,
        row_group_size=1000,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    place = data.index(b"1500 ")
    found = read(data[:place] + b"\xff" + data[place + 1 :])
    broken = [(line, value) for line, value in found if isinstance(value, str)]
    assert broken == [(1001, "!row group 1 of the Parquet file is damaged: 1000 rows are lost")]
    assert [value for _, value in found if not isinstance(value, str)] == MANY[:1000] + MANY[2000:]
    assert found[-1][0] == 5000


def test_a_text_of_parquet_that_is_no_utf_8():
    texts = pyarrow.Array.from_buffers(
        pyarrow.string(),
        3,
        [
            None,
            pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"),
            pyarrow.py_buffer(b"a\xffb"),
        ],
    )
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"prompt": texts}), stream)
    assert only_values(stream.getvalue()) == [{"prompt": "a"}, "!not UTF-8", {"prompt": "b"}]


def test_without_pyarrow(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(streams.importlib, "import_module", absent)
    for packing in (as_parquet(THREE), PACKINGS["zstd"](LINES.encode())):
        with pytest.raises(InputError, match="need pyarrow") as raised:
            read(packing)
        assert "pip install" in raised.value.hint


# Stores that fail, and damage at random.


class Failing(io.BytesIO):
    def read(self, size=-1):
        if self.tell() > 1 << 15:
            raise RuntimeError("connection reset")
        return super().read(min(size, 1 << 14))


@pytest.mark.parametrize("form", ["lines", "gzip", "parquet", "array"])
def test_a_store_that_fails_is_no_damage(form):
    """The rows that it keeps back are there: the stage has to stop and try again, not to go on
    without them.
    """
    lines = "".join(json.dumps(row) + "\n" for row in MANY).encode()
    data = {
        "lines": lines,
        "gzip": gzip.compress(lines, 0),
        "array": json.dumps(MANY).encode(),
        "parquet": as_parquet(MANY, compression="none", use_dictionary=False),
    }[form]
    with pytest.raises(InputError, match="connection reset"):
        list(values(StoreFile(Failing(data), "set"), "set", KEYS))


WHOLE = {
    "lines": LINES.encode() * 3,
    "array": json.dumps(THREE * 3).encode(),
    "indented": json.dumps(THREE * 3, indent=1).encode(),
    "csv": as_csv(THREE * 3).encode(),
    "text": b"One\nTwo\n\nThree\n" * 3,
    "utf-16": LINES.encode("utf-16"),
    "gzip": gzip.compress(LINES.encode() * 3),
    "zlib at odds": gzip.compress(LINES.encode())[:10] + zlib.compress(LINES.encode()),
    "bzip2": bz2.compress(LINES.encode() * 3),
    "xz": lzma.compress(LINES.encode() * 3),
    "zstd": PACKINGS["zstd"](LINES.encode() * 3),
    "parquet": as_parquet(THREE * 3, row_group_size=2),
}
JUNK = st.sampled_from(
    [
        b"\0",
        b'"',
        b"\n",
        b"[",
        b"]",
        b"{",
        b"}",
        b"\\",
        b",",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
    ]
) | st.binary(max_size=20)


@given(
    st.sampled_from(sorted(WHOLE)),
    st.lists(st.tuples(st.integers(0), st.integers(0, 40), JUNK), max_size=3),
    st.booleans(),
)
@settings(max_examples=400)
@example("gzip", [(30, 1, b"")], False)
@example("gzip", [(1, 0, b"\n")], False)  # a text that begins with a line of U+001F, a blank
def test_no_damage_is_a_crash(name, damages, small):
    data = WHOLE[name]
    for place, count, junk in damages:
        place %= len(data) + 1
        data = data[:place] + junk + data[place + count :]
    with pytest.MonkeyPatch.context() as patch:
        for module in (formats, streams, tables) if small else ():
            patch.setattr(module, "LIMIT", 60)
        found = read(data, {"csv": "set.csv", "text": "set.txt"}.get(name, "set"))
    assert all(line >= 1 and value != "" for line, value in found)
    if not damages and not small and name != "zlib at odds":
        assert not [value for _, value in found if str(value).startswith("!")]


@given(st.sampled_from(["lines", "csv", "text"]), st.data())
def test_a_line_of_junk_costs_at_most_itself(name, data):
    """In files whose rows are lines; no row is lost or made up."""
    lines = [f'{{"prompt": "{number}"}}' if name == "lines" else f"{number}" for number in range(6)]
    place = data.draw(st.integers(1, 5))
    junk = data.draw(st.binary(min_size=1, max_size=20).map(lambda junk: junk.replace(b"\n", b"")))
    all_lines = [line.encode() for line in lines]
    all_lines.insert(place, junk)
    head = b"prompt\n" if name == "csv" else b""
    found = read(
        head + b"\n".join(all_lines),
        {"csv": "set.csv", "text": "set.txt", "lines": "set.jsonl"}[name],
    )
    good = [value for line, value in found if line != place + 1 + bool(head)]
    assert good == [
        {"prompt": line} if name == "csv" else line if name == "text" else json.loads(line)
        for line in lines
    ]
    assert len(found) - len(good) <= 1
