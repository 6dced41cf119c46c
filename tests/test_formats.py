"""Formats: every container gives the same values; whatever is damaged costs its own row, or all
after it as one, never more.
"""

import bz2
import contextlib
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

from eyas.data import formats, streams
from eyas.data.formats import format_of, values
from eyas.data.streams import TOO_LONG, StoreFile, Unreadable
from eyas.errors import InputError

pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
parquet = pytest.importorskip("pyarrow.parquet")

KEYS = frozenset({"id", "prompt", "text"})
THREE = [{"id": f"a-{number}", "prompt": f"Where is “{number}”?\nAnd, 𝄞?"} for number in range(3)]
MANY = [
    {"id": str(number), "prompt": f"{number} {random.Random(number).randbytes(40).hex()}"}
    for number in range(5000)
]


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


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


LINES = as_lines(THREE)


def read(data, name="set"):
    """(line, value) of each row; of a damaged one "!" and what is wrong."""
    stored = StoreFile(io.BytesIO(data if isinstance(data, bytes) else data.encode()), name)
    return [
        (line, f"!{value}" if isinstance(value, Unreadable) else value)
        for line, value in values(stored, name, KEYS)
    ]


def only_values(data, name="set"):
    return [value for _, value in read(data, name)]


# What is the same however it is written.

QUOTED = {"delimiter": ";", "quoting": csv.QUOTE_ALL}
MORE = {"n": "1", "answer": 'a "b", \\'}
TEXTS = {
    "lines": (LINES, "set", [1, 2, 3]),
    "lines, blank ones between": ("\n\n" + LINES.replace("\n", "\r\n \n"), "set", [3, 5, 7]),
    "lines without the last break": (LINES.removesuffix("\n"), "set", [1, 2, 3]),
    "csv": (as_csv(THREE), "set.csv", [2, 4, 6]),
    "csv, tabs": (as_csv(THREE, dialect="excel-tab"), "set.csv", [2, 4, 6]),
    "csv, semicolons, all quoted": (as_csv(THREE, **QUOTED), "set.csv", [2, 4, 6]),
    "csv, another header": (as_csv(THREE).replace("id,prompt", " ID,Prompt"), "set.csv", [2, 4, 6]),
    "csv, more columns": (as_csv([{**row, **MORE} for row in THREE]), "set.csv", [2, 4, 6]),
}
PACKINGS = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "gzip, two members": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: bytes(pyarrow.compress(data, codec="zstd", asbytes=True)),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", TEXTS)
def test_packings_and_texts(form, packing):
    text, name, lines = TEXTS[form]
    for encoding in ("utf-8", "utf-8-sig"):
        found = read(PACKINGS[packing](text.encode(encoding)), name)
        assert [line for line, _ in found] == lines
        for row, (_, value) in zip(THREE, found, strict=True):
            assert row.items() <= value.items()


def test_endings():
    kinds = {"a/b.jsonl.gz": "jsonl", "B.JSON": "json", "x.y.csv.zst": "csv"}
    kinds |= dict.fromkeys(("x", "a.gz", "a.b/c", "a.exe"), "")
    assert {name: formats.ending(name) for name in kinds} == kinds


STAMPS = (
    "2026/11/22 10:00:00 [error] 7#7: *1 open() failed\n",
    "Nov  2 10:00:00 host sshd[7]: Hi\n",
)
STAMPS += ('::1 - ann [22/Nov/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 612\n',)
KINDS = {
    "plain text": [
        *(
            ("[INST] Hi", "a.txt"),
            ("[INST] Hi", "a"),
            ("{curly} words", "a.txt"),
            ('["a"] is what?\nHo', "a.txt"),
            ('"Hi," she said\nHo', "a.txt"),
            ("", "a"),
        ),
        *(("Hi, you\nHo, you", "a"), ("prompt,answer\nHi,Ho", "a.txt")),
        (STAMPS[0] + STAMPS[1] + "ERROR: no such table. Why?\n", "a.txt"),
    ],
    "JSON lines": [
        *(("{curly} words", "a"), ("broken\n" + LINES, "a"), ("Hi", "a.jsonl"), (LINES, "a.txt")),
        (json.dumps(THREE, indent=1), "a.txt"),
    ],
    "CSV": [
        ('"prompt"\n"Hi"', "a.csv"),
        ("time,prompt\n" + 3 * "2026-11-22 10:00:00,Hi\n", "a.csv"),
        ('prompt,answer\n"Why?\n[2026-11-22 10:00:00] ERROR disk full",Full', "a.csv"),
    ],
    "Parquet": [("PAR1", "a.txt")],
    "a log": [
        ("ready\n(APIServer pid=7) INFO 11-22 10:00:00 [x.py:1] Started", "a.txt"),
        ("[2026-11-22 10:00:00] {}", "a.jsonl"),
        *(("Loading\n" + 3 * stamp, "a.txt") for stamp in STAMPS),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_file_is(kind):
    for text, name in KINDS[kind]:
        assert format_of(text.encode(), name).name == kind, (text, name)


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (json.dumps(THREE), "jq -c '.[]'"),
        (json.dumps(THREE, indent=1), "jq -c '.[]'"),
        (json.dumps(THREE[0], indent=1), "jq -c ."),
    ],
)
def test_a_json_document_is_refused_with_how_to_split_it(data, command):
    with pytest.raises(InputError, match="is one JSON document") as raised:
        read(data, "set.json")
    assert command in raised.value.hint
    assert only_values('[{"role": "user"}, {"role": "x"}]\n') == [[{"role": "user"}, {"role": "x"}]]


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=8)


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4),
    st.sampled_from(",;\t|"),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
)
def test_csv_comes_back_as_it_was_written(cells, delimiter, quoting):
    rows = [dict(zip(("prompt", "text", "other"), row, strict=True)) for row in cells]
    assert only_values(as_csv(rows, delimiter=delimiter, quoting=quoting), "set.csv") == rows


# What is damaged.

BAD_BYTE, BAD = b"caf\xe9", "!not UTF-8"
NO_UTF_8 = "!the text is UTF-16 or UTF-32: convert it to UTF-8, e.g. with iconv"
LOST = "!the quoting is broken here; the rest is lost"
AB = {"prompt": "a", "text": "b"}
DAMAGED = [  # of a file, and what comes out of it
    ("set", LINES.encode() + b'{"prompt": "caf\xe9"}\n' + LINES.encode(), [*THREE, BAD, *THREE]),
    ("set.csv", b"prompt\n" + BAD_BYTE + b"\nfine", [BAD, {"prompt": "fine"}]),
    ("set.txt", BAD_BYTE + b"\nfine", [BAD, "fine"]),
    ("set.txt", b"zero\0zero\nfine", ["!not text", "fine"]),
    ("set.csv", b"prompt\nzero\0zero\nfine", ["!not text", {"prompt": "fine"}]),
    ("set", LINES.encode("utf-16"), [NO_UTF_8]),
    ("set", LINES.encode("utf-32"), [NO_UTF_8]),
    ("set.csv", b"prompt,text\na,b\nc\n", [AB, "!1 fields, but 2 columns"]),
    ("set.csv", b"prompt,text\nc,c,c\na,b\n", ["!3 fields, but 2 columns", AB]),
    ("set.csv", b'prompt,text\na,b\n"c"c, said by an assistant\nd,e\n', [AB, LOST]),
    ("set.csv", b'prompt,text\na,b\n"c,c\nd,e\n', [AB, LOST]),
    ("set.csv", b"prompt,text,Prompt\na,b,c\n", ["!two columns of one name"]),
]


@pytest.mark.parametrize(("file", "data", "found"), DAMAGED)
def test_damage_costs_its_row_or_the_rest(file, data, found):
    assert only_values(data, file) == found


@pytest.mark.parametrize("packing", ["gzip", "bzip2", "xz", "zstd"])
@pytest.mark.parametrize("form", ["lines", "csv"])
def test_a_cut_keeps_the_rows_before_it(form, packing):
    data = {"lines": as_lines(MANY), "csv": as_csv(MANY)}[form].encode()
    whole = PACKINGS[packing](data)
    # bzip2's blocks are longer than this
    packed = (whole if packing == "bzip2" else b"") + whole[: len(whole) * 9 // 10]
    *rows, (line, last) = read(packed, f"set.{'csv' if form == 'csv' else 'jsonl'}")
    kind = "Zstandard" if packing == "zstd" else packing
    assert last == f"!the {kind} data are cut or damaged here; what follows is lost"
    assert len(rows) >= 3000
    assert [row for _, row in rows] == MANY[: len(rows)] or packing == "bzip2"
    assert line == len(rows) + 1 + (form == "csv")


def test_damage_within_gzip():
    data = as_lines(MANY).encode()
    wrong_sum = bytearray(gzip.compress(data))
    wrong_sum[-8] ^= 1
    for packed in (bytes(wrong_sum), gzip.compress(data) + b"junk after it"):
        *rows, last = only_values(packed)
        assert (rows, last[:5]) == (MANY, "!the ")
    assert only_values(gzip.compress(data) + b"\0" * 100) == MANY  # padding, as tapes have it


# What is too long.

LONG = "x" * 5000


TOO = f"!{TOO_LONG}"
ROWS = f'{{"prompt": "a"}}\n{{"prompt": "{LONG}"}}\n{{"prompt": "b"}}'


@pytest.mark.parametrize(
    ("data", "name", "found"),
    [
        (ROWS, "set.jsonl", [(1, {"prompt": "a"}), (2, TOO), (3, {"prompt": "b"})]),
        (f"a\n{LONG}\nb", "set.txt", [(1, "a"), (2, TOO), (3, "b")]),
        (f"prompt\na\n{LONG}\nb\n", "set.csv", [(2, {"prompt": "a"}), (3, TOO)]),
    ],
)
def test_a_row_too_long(monkeypatch, data, name, found):
    monkeypatch.setattr(streams, "LIMIT", 1000)
    assert read(data, name) == found


class Endless(io.RawIOBase):
    def __init__(self, head, repeated, tail, count):
        self._parts = iter([head, *([repeated] * count), tail])
        self._rest = b""

    def readable(self):
        return True

    def read(self, size=-1):
        while not self._rest:
            try:
                self._rest = next(self._parts)
            except StopIteration:
                return b""
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


@pytest.mark.parametrize(
    ("head", "tail", "begin"),
    [
        (b'{"prompt": "', b'"}\n{"prompt": "b"}\n', formats.BY_NAME["JSON lines"]),
        (b"", b"\nb\n", formats.BY_NAME["plain text"]),
        (b'prompt\n"', b'"\nb\n', formats.BY_NAME["CSV"]),
    ],
)
def test_memory_stays_within_a_few_limits(monkeypatch, head, tail, begin):
    monkeypatch.setattr(streams, "LIMIT", 1 << 20)
    stream = io.BufferedReader(StoreFile(Endless(head, b"x" * 65536, tail, 1000), "set"))
    tracemalloc.start()
    try:
        found = [value for _, value in begin.read(stream, KEYS)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(found[0]) == TOO_LONG
    assert len(found) == (1 if begin.name == "CSV" else 2)
    assert peak < 16 << 20  # of 64 MB


# Parquet.


def test_parquet_gives_the_columns_that_matter(monkeypatch):
    rows = [{**row, "answer": "not this"} for row in THREE]
    assert read(as_parquet(rows)) == list(enumerate(THREE, start=1))
    assert only_values(as_parquet([{"answer": "not this"}])) == [{}]
    no_footer = "!the Parquet file is cut or damaged: it has no readable footer"
    for data in (b"broken", as_parquet(rows)[:-50], as_parquet(rows).replace(b"mpt", b"m\xfft")):
        assert only_values(data, "set.parquet") == [no_footer]
    monkeypatch.setattr(formats, "BATCH_BYTES", 1000)
    assert only_values(as_parquet(MANY, row_group_size=700)) == MANY


def test_columns_are_named_alike_in_csv_and_parquet():
    rows = [{"Prompt ": "Hi", "ID": "1"}]
    for data, name in ((as_csv(rows), "a.csv"), (as_parquet(rows), "a.parquet")):
        assert only_values(data, name) == [{"prompt": "Hi", "id": "1"}]
    twice = as_parquet([{"Prompt": "Hi", "prompt": "Ho"}])
    assert only_values(twice) == ["!two columns of one name"]


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_a_file_in_windows_1252_is_named_as_one(name):
    texts = ["Où est le café ?", "It’s 5 €", "plain", "Größe…"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    data = "".join(f"{one}\n" for one in (lines if name == "a.jsonl" else ["text", *texts]))
    assert len(read(data, name)) >= 4
    with pytest.raises(InputError, match="looks like Windows-1252") as raised:
        read(data.encode("cp1252"), name)
    assert "iconv" in raised.value.hint
    mixed = data.encode() + data.encode("cp1252")  # damaged, and not of another encoding
    assert "!not UTF-8" in [value for _, value in read(mixed, name)]


def test_a_damaged_row_group_costs_itself():
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    data = as_parquet(MANY, row_group_size=1000, **plain)
    place = data.index(b"1500 ")
    found = read(data[:place] + b"\xff" + data[place + 1 :])
    broken = [(line, value) for line, value in found if isinstance(value, str)]
    assert broken == [(1001, "!row group 1 of the Parquet file is damaged: 1000 rows are lost")]
    assert [value for _, value in found if not isinstance(value, str)] == MANY[:1000] + MANY[2000:]
    assert found[-1][0] == 5000


def test_a_text_of_parquet_that_is_no_utf_8():
    places = pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0")
    buffers = [None, places, pyarrow.py_buffer(b"a\xffb")]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers)
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
        if self.tell() > 1 << 17:
            raise RuntimeError("connection reset")
        return super().read(min(size, 1 << 14))


@pytest.mark.parametrize("form", ["lines", "gzip", "parquet"])
def test_a_store_that_fails_is_no_damage(form):
    """The rows that it keeps back are there: the stage has to stop."""
    lines = as_lines(MANY).encode()
    data = {
        "lines": lines,
        "gzip": gzip.compress(lines, 0),
        "parquet": as_parquet(MANY, compression="none", use_dictionary=False),
    }[form]
    with pytest.raises(InputError, match="connection reset"):
        list(values(StoreFile(Failing(data), "set"), "set", KEYS))


WHOLE = {
    "lines": LINES.encode() * 3,
    "csv": as_csv(THREE * 3).encode(),
    "text": b"One\nTwo\n\nThree\n" * 3,
    "gzip": gzip.compress(LINES.encode() * 3),
    "zlib at odds": gzip.compress(LINES.encode())[:10] + zlib.compress(LINES.encode()),
    "bzip2": bz2.compress(LINES.encode() * 3),
    "xz": lzma.compress(LINES.encode() * 3),
    "zstd": PACKINGS["zstd"](LINES.encode() * 3),
    "parquet": as_parquet(THREE * 3, row_group_size=2),
}
JUNK = st.sampled_from(
    [*(bytes([sign]) for sign in b'\0"\n[]{}\\,'), b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80"]
) | st.binary(max_size=20)


@given(
    st.sampled_from(sorted(WHOLE)),
    st.lists(st.tuples(st.integers(0), st.integers(0, 40), JUNK), max_size=3),
    st.booleans(),
)
@settings(max_examples=300)
@example("gzip", [(30, 1, b"")], False)
@example("gzip", [(1, 0, b"\n")], False)  # a text that begins with a line of U+001F, a blank
def test_no_damage_is_a_crash(name, damages, small):
    data, found = WHOLE[name], []
    for place, count, junk in damages:
        place %= len(data) + 1
        data = data[:place] + junk + data[place + count :]
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(streams, "LIMIT", 60)
        with contextlib.suppress(InputError):  # one JSON document
            found = read(data, {"csv": "set.csv", "text": "set.txt"}.get(name, "set"))
    assert all(line >= 1 for line, _ in found)
    if not damages and not small and name != "zlib at odds":
        assert not [value for _, value in found if str(value).startswith("!")]


@given(st.sampled_from(["lines", "text"]), st.data())
def test_a_line_of_junk_costs_at_most_itself(name, data):
    lines = [f'{{"prompt": "{number}"}}' if name == "lines" else f"{number}" for number in range(6)]
    place = data.draw(st.integers(1, 5))
    junk = data.draw(st.binary(min_size=1, max_size=20).map(lambda junk: junk.replace(b"\n", b"")))
    all_lines = [line.encode() for line in lines]
    all_lines.insert(place, junk)
    found = read(b"\n".join(all_lines), {"text": "set.txt", "lines": "set.jsonl"}[name])
    good = [value for line, value in found if line != place + 1]
    assert good == [line if name == "text" else json.loads(line) for line in lines]
    assert len(found) - len(good) <= 1
