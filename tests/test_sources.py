"""Readers: every shape and container gives the same rows; what cannot be read is told by place and never quoted."""

import gzip
import json

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data import sources
from eyas.data.rows import Damaged, Row
from eyas.data.sources import SourceConfig, describe, read_source
from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError

SAID_BY_ASSISTANT = "SAID-BY-ASSISTANT"
TURNS = ("Where is the dog?", "And the cat?")


def openai(*turns, **more):
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": SAID_BY_ASSISTANT}]
    return {"messages": messages, **more}


SHAPES = {
    "openai": (openai(*TURNS), TURNS, None),
    "openai, system": (
        {"messages": [{"role": "system", "content": "Be brief."}, *openai(*TURNS)["messages"]]},
        TURNS,
        "Be brief.",
    ),
    "openai, parts": (
        openai([{"type": "text", "text": "Where is"}, {"type": "text", "text": "the dog?"}]),
        ("Where is\nthe dog?",),
        None,
    ),
    "openai, tool": (
        {
            "messages": [
                *openai(TURNS[0])["messages"],
                {"role": "tool", "content": SAID_BY_ASSISTANT},
                {"role": "user", "content": TURNS[1]},
            ]
        },
        TURNS,
        None,
    ),
    "openai, tool call": (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]},
        ("Hi",),
        None,
    ),
    "lmsys": ({"conversation": openai(*TURNS)["messages"]}, TURNS, None),
    "sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": TURNS[0]},
                {"from": "gpt", "value": SAID_BY_ASSISTANT},
                {"from": "human", "value": TURNS[1]},
            ]
        },
        TURNS,
        "Be brief.",
    ),
    "sharegpt, system beside": (
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}]},
        ("Hi",),
        "Be brief.",
    ),
    "alpaca": ({"instruction": "Translate.", "input": "", "output": SAID_BY_ASSISTANT}, ("Translate.",), None),
    "alpaca, input": (
        {"instruction": "Translate.", "input": "chat", "output": SAID_BY_ASSISTANT},
        ("Translate.\n\nchat",),
        None,
    ),
    "spec-bench": ({"category": "writing", "turns": list(TURNS), "reference": [SAID_BY_ASSISTANT]}, TURNS, None),
    "prompt": ({"prompt": "Hi", "completion": SAID_BY_ASSISTANT}, ("Hi",), None),
    "prompt as messages": ({"prompt": openai(*TURNS)["messages"][:3], "chosen": SAID_BY_ASSISTANT}, TURNS, None),
    "question": ({"question": "Hi", "answer": SAID_BY_ASSISTANT}, ("Hi",), None),
    "text": ({"text": " Hi \n"}, ("Hi",), None),
    "blank turns are left out": (openai("Hi", "  ", ""), ("Hi",), None),
    "nobody says anything": (openai(), (), None),
}


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return SourceConfig(path=str(path), licence="CC0-1.0")


def read(source):
    return list(read_source(source))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(tmp_path, name):
    value, turns, system = SHAPES[name]
    (row,) = read(write(tmp_path / "set.jsonl", json.dumps({"id": 7, **value})))
    assert row == Row(source="set", licence="CC0-1.0", where="set.jsonl:1", id="7", turns=turns, system=system)
    assert SAID_BY_ASSISTANT not in repr(row)


THREE = [openai(f"Question {number}?", id=f"a-{number}") for number in range(3)]
CONTAINERS = {
    "lines": ("".join(json.dumps(row) + "\n" for row in THREE), [1, 2, 3]),
    "lines, byte order mark": ("\ufeff" + "".join(json.dumps(row) + "\n" for row in THREE), [1, 2, 3]),
    "lines, blank ones between": ("\n\n" + "".join(json.dumps(row) + "\r\n\n" for row in THREE), [3, 5, 7]),
    "lines without the last break": ("\n".join(json.dumps(row) for row in THREE), [1, 2, 3]),
    "array": (json.dumps(THREE), [1, 1, 1]),
    "array, one row a line": ("[\n" + ",\n".join(json.dumps(row) for row in THREE) + "\n]\n", [2, 3, 4]),
    "array, byte order mark": ("\ufeff" + json.dumps(THREE), [1, 1, 1]),
    "array with a last comma": (json.dumps(THREE)[:-1] + ",]", [1, 1, 1]),
}


@pytest.mark.parametrize("chunk", [1 << 16, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(tmp_path, monkeypatch, name, packed, chunk):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    text, lines = CONTAINERS[name]
    data = gzip.compress(text.encode()) if packed else text.encode()
    rows = read(write(tmp_path / "set.json", data))  # the name says neither lines nor gzip: both are found by looking
    assert [(row.id, row.turns) for row in rows] == [(f"a-{number}", (f"Question {number}?",)) for number in range(3)]
    assert [row.where for row in rows] == [f"set.json:{line}" for line in lines]


def test_one_indented_object_is_one_row(tmp_path):
    (row,) = read(write(tmp_path / "one.json", json.dumps(THREE[0], indent=2)))
    assert row.turns == ("Question 0?",)


def test_any_fsspec_url():
    with fsspec.open("memory://raw/set.jsonl.gz", "wb") as stream:
        stream.write(gzip.compress(json.dumps(THREE[0]).encode()))
    source = SourceConfig(path="memory://raw/set.jsonl.gz", licence="MIT", name="mine")
    assert [row.source for row in read(source)] == ["mine"]
    made = describe(source)
    assert made.url == source.path
    assert made.files["set.jsonl.gz"].sha256 == made.identity


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=5), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_arrays_read_in_pieces_equal_arrays_read_at_once(tmp_path_factory, values, chunk, indent, ascii_only):
    path = tmp_path_factory.mktemp("array") / "set.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=ascii_only), encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK", chunk)
        with open(path, "rb") as stream:
            assert [value for _, value in sources._items(stream, "set.json")] == json.loads(json.dumps(values))


GOOD = json.dumps(openai("Fine."))
BROKEN_LINES = {
    '{"messages": [{"role": "user", "content": "private': "not JSON",
    '"private"': "not an object",
    "[1, 2]": "not an object",
    '{"private": "private"}': "no shape known here",
    '{"messages": ["private", {}]}': "a message is not an object",
    '{"messages": [{"content": "private"}]}': "a message has no role known here",
    '{"messages": [{"role": "PRIVATE", "content": "private"}]}': "a message has no role known here",
    '{"messages": [{"role": "user", "content": {"private": 1}}]}': "a message is not text",
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "url": "private"}]}]}': "a message is not text",
    '{"prompt": "private \\ud83d"}': "half a character",
    '{"prompt": ' + "[" * 100_000: "not JSON",
    '{"text": "### Human: private\\n### Assistant: private"}': "text holds a whole conversation",
    '{"prompt": "<s>[INST] private [/INST] private"}': "prompt holds a whole conversation",
    '{"prompt": "<|user|>private<|model|>private"}': "prompt holds a whole conversation",
}


@pytest.mark.parametrize("line", BROKEN_LINES, ids=lambda line: line[:40])
def test_a_broken_line_harms_no_other(tmp_path, line):
    before, broken, after = read(write(tmp_path / "set.jsonl", f"{GOOD}\n{line}\n{GOOD}\n"))
    assert before.turns == after.turns == ("Fine.",)
    assert isinstance(broken, Damaged)
    assert broken.where == "set.jsonl:2"
    assert broken.drop.reason == "malformed"
    assert BROKEN_LINES[line] in broken.drop.note
    assert "private" not in repr(broken).lower()


def test_bytes_that_are_no_text(tmp_path):
    rows = read(write(tmp_path / "set.jsonl", GOOD.encode() + b'\n{"text": "caf\xe9"}\n'))
    assert rows[1].drop.note == "not UTF-8"


@pytest.mark.parametrize(
    "text", ["Explain this: User: hi, is my name ok?", "What does an assistant do?\nAssistant: a job.", "a <| b |> c"]
)
def test_a_prompt_may_speak_of_assistants(tmp_path, text):
    (row,) = read(write(tmp_path / "set.jsonl", json.dumps({"prompt": text})))
    assert row.turns == (text,)


@pytest.mark.parametrize("given_id", ["a b", "ana@example.com", "x" * 101, None, 1.5, ["a"]])
def test_what_does_not_look_like_an_id_is_not_taken_for_one(tmp_path, given_id):
    (row,) = read(write(tmp_path / "set.jsonl", json.dumps(openai("Hi", id=given_id))))
    assert row.id is None


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", EmptyInputError, "holds no row"),
        (b" \n\n", EmptyInputError, "holds no row"),
        (b"[]", EmptyInputError, "holds no row"),
        (b"<html>\n<body>", CorruptError, "not one of the 2 rows"),
        ("prompts".encode("utf-16"), CorruptError, "not UTF-8"),
        (gzip.compress(GOOD.encode() * 50)[:-9], CorruptError, "no complete gzip file"),
        (b"\x1f\x8b broken", CorruptError, "no complete gzip file"),
        (f"[{GOOD}, {GOOD}".encode(), CorruptError, "the JSON array"),
        (f"[{GOOD} {GOOD}]".encode(), CorruptError, "the JSON array"),
        (f"[{GOOD},\n{GOOD[:-2]}, {GOOD}]".encode(), CorruptError, "line 2"),
        (f"[{GOOD}]\n[{GOOD}]".encode(), CorruptError, "the JSON array"),
        (b"[" + GOOD.encode().replace(b"Fine", b"Fin\xe9") + b"]", CorruptError, "the JSON array"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error(tmp_path, data, error, says):
    with pytest.raises(error, match=says) as raised:
        read(write(tmp_path / "set.jsonl", data))
    assert raised.value.hint
    assert str(tmp_path / "set.jsonl") in raised.value.what


def test_a_broken_item_ends_the_reading_at_once(tmp_path):
    rest = ", ".join([GOOD] * 3000)
    source = write(tmp_path / "set.json", f"[{GOOD}, {{broken}}, {rest}]")
    with pytest.raises(CorruptError, match="line 1"):
        read(source)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("none.jsonl", MissingInputError),
        (".", InputError),
        ("nowhere://x/y.jsonl", InputError),
        ("memory://none", MissingInputError),
    ],
)
def test_a_source_that_is_not_there(tmp_path, path, error):
    source = SourceConfig(path=path if "://" in path else str(tmp_path / path), licence="MIT")
    for reading in (describe, read):
        with pytest.raises(error) as raised:
            reading(source)
        assert raised.value.hint
        assert raised.value.exit_code == 2


def test_the_name_is_the_file_s_without_endings():
    labels = [SourceConfig(path=path, licence="MIT").label for path in ("a/b.jsonl.gz", "s3://bucket/set.json", "x")]
    assert labels == ["b", "set", "x"]
