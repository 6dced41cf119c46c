"""Sources: every shape gives the user's side alone, every path its files; a damaged row is reported
by its place, never quoted.
"""

import functools
import gzip
import hashlib
import http.server
import json
import os

import fsspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eyas.data.ledger import DamagedRow, SourceRow
from eyas.data.shapes import ASSISTANT_ROLES, is_transcript
from eyas.data.sources import (
    NOT_STATED,
    SourceConfig,
    content_identity,
    describe,
    read_source,
    source_files,
)
from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError
from eyas.privacy.pii import PrivacyConfig
from tests.source_rows import SAID_BY_ASSISTANT, json_lines, openai, served, sharegpt

TURNS = ("Where is the dog?", "And the cat?")


USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
SAID = SAID_BY_ASSISTANT
MESSAGES = openai(*TURNS)["messages"]
PARTS = [{"type": "text", "text": "Where is"}, {"type": "text", "text": "the dog?"}]
TOOL = {"role": "tool", "content": SAID}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
TOOLS = [{"type": "function", "function": {"name": "find"}}]
WILDCHAT = {
    **{"conversation_hash": "abc", "turn": 2, "toxic": False},
    "openai_moderation": [{"categories": {"hate": False}, "scores": [0.5, None]}],
    "conversation": [{**one, "language": "English", "redacted": False} for one in MESSAGES],
}
EMPTY_COLUMNS = {
    "messages": [{**USER, "from": None, "value": None}],
    "prompt": None,
    "system": None,
}


def node(parent, role, *parts):
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [*parts]}}
    return {"parent": parent, "message": message if role else None}


def of_chatgpt(role, **more):
    message = {**node(None, role, "private")["message"], **more}
    return {"current_node": "a", "mapping": {"a": {"message": message}}}


CHATGPT = {  # a second wording of the first question was left behind
    "current_node": "e",
    "mapping": {
        "root": node(None, None),
        "a": node("root", "system", ""),
        "b": node("a", "user", TURNS[0]),
        "other": node("a", "user", "left behind"),
        "c": node("b", "assistant", SAID),
        "d": node("c", "user", TURNS[1]),
        "e": node("d", "assistant", SAID),
    },
}
# A row, and its turns.
SHAPES = {
    "openai": (openai(*TURNS), TURNS),
    "openai, parts": (openai(PARTS), ("Where is\nthe dog?",)),
    "openai, no tools": ({"messages": [USER], "tools": [], "functions": None}, ("Hi",)),
    "two messages are one turn": (
        {"messages": [USER, SYSTEM | {"content": ""}, USER]},
        ("Hi\n\nHi",),
    ),
    "a dash for what is withheld": (openai("-", "Hi", " \u2014 "), ("Hi",)),
    "a wide space": ({"turns": ["\u3000", "Hi\u2028", "\u2028 -"]}, ("Hi",)),
    "a withheld half": ({"messages": [USER | {"content": "-"}, USER]}, ("Hi",)),
    "openai, no text": ({"messages": [USER, {"role": "assistant", "content": None}]}, ("Hi",)),
    "lmsys": ({"conversation": MESSAGES}, TURNS),
    "alpaca": ({"instruction": "Do.", "input": "", "output": SAID}, ("Do.",)),
    "alpaca, input": ({"instruction": "Do.", "input": "it", "output": SAID}, ("Do.\n\nit",)),
    "spec-bench": ({"category": "writing", "turns": list(TURNS), "reference": [SAID]}, TURNS),
    "prompt": ({"prompt": "Hi", "completion": SAID}, ("Hi",)),
    "prompt as messages": ({"prompt": MESSAGES[:3], "chosen": SAID}, TURNS),
    "query": ({"query": "Hi", "response": SAID}, ("Hi",)),
    "problem": ({"problem": "$1+1$?", "level": "1", "solution": SAID}, ("$1+1$?",)),
    "dolly": ({"instruction": "Do.", "context": "Dogs.", "response": SAID}, ("Do.\n\nDogs.",)),
    "wildchat": (WILDCHAT, TURNS),
    "claude": (
        {
            "chat_messages": [
                {"sender": "human", "text": TURNS[0]},
                {"sender": "assistant", "text": SAID},
                {"sender": "human", "text": "", "content": [{"type": "text", "text": TURNS[1]}]},
            ]
        },
        TURNS,
    ),
    "chatgpt": (CHATGPT, TURNS),
    "langchain": ({"messages": [{"type": "human", "content": "Hi"}]}, ("Hi",)),
    "parts of a page": ({"messages": [{"role": "user", "parts": PARTS}]}, ("Where is\nthe dog?",)),
    "batch": ({"custom_id": "7", "url": "/v1/chat/completions", "body": openai(*TURNS)}, TURNS),
    "batch, responses": ({"custom_id": "7", "body": {"model": "m", "input": "Hi"}}, ("Hi",)),
    "arena": ({"conversation_a": MESSAGES, "conversation_b": MESSAGES}, TURNS),
    "a table's cell holds JSON": ({"messages": json.dumps(MESSAGES)}, TURNS),
    "all columns in all rows": (EMPTY_COLUMNS, ("Hi",)),
    "a user's message by itself": ({"role": "prompter", "text": "Hi"}, ("Hi",)),
    "question": ({"question": "Hi", "answer": SAID}, ("Hi",)),
    "speakers": ({"text": "Hi", "author": "Twain", "type": "tool", "is_user": None}, ("Hi",)),
    "written by a model": ({"prompt": "Hi", "author": "gpt", "is_user": False}, ("Hi",)),
    "for a bot": ({"bot_id": "B1", "messages": MESSAGES}, TURNS),
    "text": ({"text": " Hi \n"}, ("Hi",)),
    "blank turns are left out": (openai("Hi", "  ", ""), ("Hi",)),
    "nobody says anything": (openai(), ()),
}
SHAREGPT = sharegpt(*TURNS)["conversations"]
WITH_SYSTEM = {
    "openai": ({"messages": [SYSTEM, *MESSAGES]}, TURNS),
    "sharegpt": ({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}, TURNS),
    "openai, beside": ({"system_message": "Be brief.", "messages": MESSAGES}, TURNS),
    "batch, Anthropic": (
        {"custom_id": "7", "params": {"system": "Be brief.", "messages": MESSAGES}},
        TURNS,
    ),
    "sharegpt, beside": ({"system": "Be brief.", "conversations": SHAREGPT}, TURNS),
    "system prompt": ({"system_prompt": "Be brief.", "question": "Hi", "response": SAID}, ("Hi",)),
}


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return SourceConfig(path=str(path), licence="CC0-1.0")


def read(source):
    return list(read_source(source))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_shapes(tmp_path, system):
    for name, (value, turns) in (WITH_SYSTEM if system else SHAPES).items():
        named = value if "custom_id" in value else {"id": 7, **value}
        source = write(tmp_path / "set.jsonl", json.dumps(named))
        expected = SourceRow("set", "CC0-1.0", "set.jsonl:1", "7", turns, system)
        assert read(source) == [expected], name


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, CALL, TOOL, USER]},
        {"messages": [USER, TOOL, USER]},
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "observation", "value": SAID},
            ]
        },
        {"messages": [USER], "tools": TOOLS},
        {"messages": [USER], "tools": json.dumps(TOOLS)},
        {"prompt": "Hi", "functions": TOOLS},
        of_chatgpt("assistant", recipient="python"),
    ],
)
def test_a_conversation_with_tools_is_dropped_for_that(tmp_path, row):
    (dropped,) = read(write(tmp_path / "set.jsonl", json.dumps(row)))
    assert dropped.drop.reason == "tools"


def test_an_overrule_needs_a_reason():
    assert SourceConfig(path="x", overrule={"unknown": "we wrote it"}).overrule
    with pytest.raises(ValidationError, match="needs a reason"):
        SourceConfig(path="x", overrule={"unknown": " "})


def test_of_a_table_of_messages_the_first_ones_are_rows(tmp_path):
    rows = [
        {"role": "prompter", "text": "Alone?", "parent_id": None, "message_tree_id": "t"},
        {"role": "assistant", "text": SAID_BY_ASSISTANT, "parent_id": "t"},
        {"role": "prompter", "text": "And then?", "parent_id": "a"},
        {"role": "prompter", "text": "Gone.", "parent_id": "", "deleted": "True"},
        {"role": "prompter", "text": "Made up.", "parent_id": None, "synthetic": True},
        {"message_tree_id": "t", "prompt": {"role": "prompter", "text": "Hi", "replies": []}},
    ]
    first, *others = read(write(tmp_path / "set.jsonl", json_lines(rows)))
    assert (first.turns, first.id) == (("Alone?",), "t")
    assert [(row.drop.reason, row.drop.note) for row in others] == [
        ("malformed", "the row is a single message, and not the user's"),
        ("malformed", "the row is a single message, without what came before it"),
        ("flagged", "its publisher flags it as deleted"),
        ("flagged", "its publisher flags it as synthetic"),
        ("malformed", "a tree of messages: give the set's table of messages instead"),
    ]


# The shape given.


@pytest.mark.parametrize(
    ("shape", "turns"),
    [("openai", "A"), ("sharegpt", "B"), ("alpaca", "C"), ("prompt", "D"), (None, "A")],
)
def test_a_shape_that_is_given_holds(tmp_path, shape, turns):
    value = {**openai("A"), "conversations": [{"from": "human", "value": "B"}]}
    value |= {"instruction": "C", "question": "D"}
    source = write(tmp_path / "set.jsonl", json.dumps(value) + "\n" + json.dumps({"other": 1}))
    row, damaged = read(source.model_copy(update={"shape": shape}))
    assert row.turns == (turns,)
    assert isinstance(damaged, DamagedRow)


def test_plain_text(tmp_path):
    rows = read(write(tmp_path / "set.txt", "\n\nOne\n \n\nTwo, and\nmore"))
    assert [row.turns for row in rows] == [("One",), ("Two, and",), ("more",)]
    assert [row.where for row in rows][:2] == ["set.txt:3", "set.txt:6"]


def test_plain_strings_and_lists_of_messages(tmp_path):
    lists = "".join(json.dumps(openai(turn)["messages"]) + "\n" for turn in TURNS)
    for lines in (json_lines(TURNS), lists):
        rows = read(write(tmp_path / "set.json", lines))
        assert [row.turns for row in rows] == [(turn,) for turn in TURNS]
    stated = write(tmp_path / "set.json", f'"Hi"\n{GOOD}\n').model_copy(update={"shape": "strings"})
    assert [isinstance(row, DamagedRow) for row in read(stated)] == [False, True]


GOOD = json.dumps(openai("Fine."))
ROLES = '{"messages": [{"role": '
BROKEN_LINES = {
    "not JSON": [
        '{"messages": [{"role": "user", "content": "private',
        *('{"prompt": ' + "[" * 100_000, '{"prompt": ' + "9" * 5000 + "}"),
    ],
    # the first is a piece of something: the file is not one of texts
    "not an object": ['"private"', "17", "NaN"],
    "a message is not an object": [
        *("[1, 2]", '{"messages": ["private", {}]}', '{"messages": [null]}'),
    ],
    "does not say who speaks": [
        *('["private", "private"]', '{"conversation": ["private", "private"]}'),
    ],
    "no shape known here": ['{"private": "private"}', '{"prompt": null}'],
    "a text, not a list": ['{"messages": "[private"}'],
    "a message has no role known here": [
        '{"messages": [{"content": "private"}]}',
        ROLES + '"PRIVATE", "content": "private"}]}',
        ROLES + '["user"], "content": "private"}]}',
    ],
    "a message is not text": [
        ROLES + '"user", "content": {"private": 1}}]}',
        ROLES + '"user", "content": [{"type": "image_url", "url": "private"}]}]}',
        '{"prompt": NaN}',
    ],
    "a message has no content": ['{"messages": [{"role": "user", "body": "private"}]}'],
    "a batch's results": ['{"custom_id": "7", "response": {"body": {"choices": ["private"]}}}'],
    "no request for text": ['{"custom_id": "7", "url": "/v1/rerank", "body": {"prompt": "x"}}'],
    "it has images": [
        '{"prompt": "private", "image": "private.png"}',
        json.dumps(of_chatgpt("user", metadata={"attachments": [{"name": "private"}]})),
        ROLES + '"user", "content": "private", "attachments": [{"file_name": "private"}]}]}',
    ],
    "a bot says it": ['{"text": "private", "bot_id": "B1"}'],
    "under history": ['{"prompt": "private", "history": [["private", "private"]]}'],
    "a tree of messages": ['{"prompt": {"private": {"private": []}}}'],
    "half a character": ['{"prompt": "private \\ud83d"}'],
    "not the user's": [
        *('{"role": "assistant", "text": "private"}', '{"from": "gpt", "prompt": "private"}'),
        *('{"sender": "bot", "text": "private"}', '{"is_user": "False", "text": "private"}'),
    ],
    "text holds a whole conversation": [
        '{"text": "### Human: private\\n### Assistant: private"}',
        '{"text": "### Human: private### Assistant: private"}',
        '{"text": "USER: private ASSISTANT: private"}',
        '{"text": "<human>: private\\n<bot>: private"}',
        '{"text": "[|Human|]private\\n[|AI|]private"}',
        '{"text": "<start_of_turn>model\\nprivate"}',
    ],
    "prompt holds a whole conversation": [
        '{"prompt": "<s>[INST] private [/INST] private"}',
        '{"prompt": "<|user|>private<|model|>private"}',
        json.dumps({"prompt": "[{'content': 'private', 'role': 'user'}]"}),
        *(json.dumps({"prompt": json.dumps(one)}) for one in ([{"role": "private"}], ["private"])),
    ],
}


@pytest.mark.parametrize("note", BROKEN_LINES)
def test_a_broken_line_harms_no_other(tmp_path, note):
    for line in BROKEN_LINES[note]:
        before, broken, after = read(write(tmp_path / "set.jsonl", f"{GOOD}\n{line}\n{GOOD}\n"))
        assert before.turns == after.turns == ("Fine.",)
        assert isinstance(broken, DamagedRow)
        assert (broken.where, broken.drop.reason) == ("set.jsonl:2", "malformed")
        assert note in broken.drop.note, line[:40]
        assert "private" not in repr(broken).lower()


@pytest.mark.parametrize(
    "text",
    [
        "Explain this: User: hi, is my name ok?",
        "What does an assistant do?\nAssistant: a job.",
        "a <| b |> c",
        *("In F#, match a with [|x|] -> x", 'Sort [{"role": "a"}]', "[1, 2]", '["a"] or "b"?'),
        *('[{"from": 1, "value": 2}]\nPlot [1]', '["Q"] What is ["\\x"]', '["a", "b"] or [3]?'),
    ],
)
def test_a_prompt_may_speak_of_assistants(tmp_path, text):
    held = {"prompt": text, "image": {"bytes": None}, "images": [None], "history": [[]]}
    (row,) = read(write(tmp_path / "set.jsonl", json.dumps(held)))
    assert row.turns == (text,)


def test_looking_for_both_sides_takes_linear_time():
    # every line begins what may end on every later line
    assert not is_transcript("User: hi\n" * 200_000)
    assert not is_transcript("<|" * 500_000 + "#" * 500_000)
    assert not is_transcript('["a"' + ', "a"' * 200_000)
    assert not is_transcript('[{"role": 1' + "} ] }" * 200_000)


@pytest.mark.parametrize(
    "lines",
    [
        ["Human: Hi?", f"Assistant: {SAID_BY_ASSISTANT}"],
        [f'{{"role": "assistant", "content": "{SAID_BY_ASSISTANT}"}}'],
        [f'["{SAID_BY_ASSISTANT}"]'],
    ],
)
def test_an_assistant_s_line_among_plain_texts(tmp_path, lines):
    rows = read(write(tmp_path / "set.txt", "\n".join(["What is this?", *lines])))
    assert rows[0].turns == ("What is this?",)
    assert isinstance(rows[-1], DamagedRow)
    assert SAID_BY_ASSISTANT not in repr(rows)


# What an assistant said never leaves the reader.

TEXTS = st.text(min_size=1, max_size=12)
ANSWERS = TEXTS.map(lambda text: f"{text}{SAID_BY_ASSISTANT}{text}")


@st.composite
def conversations(draw):
    users = draw(st.lists(TEXTS, min_size=1, max_size=3))
    answers = draw(st.lists(ANSWERS, min_size=len(users), max_size=len(users)))
    pairs = list(zip(users, answers, strict=True))
    messages = [
        {"role": role, "content": said}
        for pair in pairs
        for role, said in zip(("user", "assistant"), pair, strict=True)
    ]
    names = {"user": "human", "assistant": "gpt"}
    from_value = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    tree = {"text": users[0], "replies": [{"text": answers[0], "role": "assistant"}]}
    answer = {"role": "assistant", "text": answers[0]}
    shapes = [
        {"messages": messages},
        {"conversation": messages, "language": "English"},
        {"conversations": from_value},
        {"conversation": [text for pair in pairs for text in pair]},
        {"instruction": users[0], "input": users[-1], "output": answers[0]},
        {"prompt": users[0], "chosen": answers[0], "rejected": answers[-1]},
        {"prompt": messages[:-1], "completion": messages[-1:]},
        {"question": users[0], "answer": answers[0]},
        {"turns": users, "reference": answers},
        {"message_tree_id": "t", "prompt": tree},
        answer,
        {"message_tree_id": "t", "message_id": "m", "parent_id": None, **answer},
        messages,
    ]
    return draw(st.sampled_from(shapes))


DAMAGES = st.lists(
    st.one_of(
        st.tuples(st.just("overwrite"), st.integers(0), st.integers(0, 255)),
        st.tuples(st.just("break the line"), st.integers(0), st.just(0)),
        st.tuples(st.just("cut"), st.integers(0), st.just(0)),
    ),
    max_size=3,
)


def damaged(data, damages):
    data = bytearray(data)
    for kind, place, byte in damages:
        # the first sign stays: what begins as no object is plain text
        place = 1 + place % max(len(data) - 1, 1)
        if kind == "overwrite" and place < len(data):
            data[place] = byte
        elif kind == "break the line":
            data[place:place] = b"\n"
        elif kind == "cut":
            del data[place:]
    return bytes(data)


def all_of(source):
    rows = []
    try:
        rows.extend(read_source(source))
    except InputError as error:
        rows.append(error)
    return rows


@given(
    TEXTS,
    ANSWERS,
    st.sampled_from(["prompt", "text", "instruction", "turns"]),
    st.sampled_from(["Human", "### User", "**user**"]),
)
def test_a_text_of_both_sides_is_no_prompt(tmp_path_factory, user, answer, key, name):
    text = f"{name}: {user}\n\nAssistant: {answer}"
    data = json.dumps({key: [text] if key == "turns" else text})
    source = write(tmp_path_factory.getbasetemp() / "text.jsonl", data)
    assert SAID_BY_ASSISTANT not in repr(all_of(source))


def hides_its_role(line):
    """Whether damage renamed the key `role` of a message: nobody can tell then who said it."""
    try:
        row = json.loads(line.decode(errors="replace"))
    except ValueError:
        return False
    others = [row[key] for key in row if key not in ("role", "from")] if type(row) is dict else []
    return any(isinstance(one, str) and one.lower() in ASSISTANT_ROLES for one in others)


@given(st.lists(conversations(), min_size=1, max_size=4), DAMAGES)
@settings(max_examples=300)
def test_nothing_an_assistant_said_comes_out(tmp_path_factory, values, damages):
    data = damaged(json_lines(values).encode(), damages)
    assume(not any(map(hides_its_role, data.splitlines())))
    source = write(tmp_path_factory.getbasetemp() / "damaged.json", data)
    assert SAID_BY_ASSISTANT not in repr(all_of(source))


@pytest.mark.parametrize("given_id", ["a b", "ana@example.com", "x" * 101, None, 1.5, ["a"]])
def test_what_does_not_look_like_an_id_is_not_taken_for_one(tmp_path, given_id):
    (row,) = read(write(tmp_path / "set.jsonl", json.dumps(openai("Hi", id=given_id))))
    assert row.id is None


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", EmptyInputError, "holds no row"),
        (b" \n\n", EmptyInputError, "holds no row"),
        (b"prompt,answer\n", CorruptError, "not one of the 1 rows"),
        (b"<html>\n<body>", CorruptError, "not one of the 2 rows"),
        ("prompts".encode("utf-16"), CorruptError, "convert it to UTF-8"),
        (gzip.compress(GOOD.encode() * 50)[:-9], CorruptError, "the gzip data are cut or damaged"),
        (b"\x1f\x8b broken", CorruptError, "the gzip data are cut or damaged"),
        (gzip.compress(b""), EmptyInputError, "holds no row"),
        (f"[{GOOD}, {GOOD}]".encode(), InputError, "is one JSON document"),
        (f"[\n{GOOD},\n{GOOD}]".encode(), InputError, "is one JSON document"),
        (json.dumps(json.loads(GOOD), indent=1).encode(), InputError, "is one JSON document"),
        (b"PAR1 broken", CorruptError, "no readable footer"),
        (b"PK\x03\x04" + b"\x00" * 60, InputError, "is an archive"),
        (gzip.compress(b"a.jsonl".ljust(257, b"\0") + b"ustar"), InputError, "is an archive"),
        (b"\x00" * 300, CorruptError, "not JSON"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error(tmp_path, data, error, says):
    with pytest.raises(error, match=says) as raised:
        read(write(tmp_path / "set.jsonl", data))
    assert raised.value.hint
    assert str(tmp_path / "set.jsonl") in raised.value.what


# The files of a source.


class Website(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_a_website(tmp_path):
    pytest.importorskip("aiohttp", reason="the extra `http` is not installed")
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(f"{GOOD}\n".encode() * 3))
    with served(functools.partial(Website, directory=str(tmp_path))) as url:
        source = SourceConfig(path=f"{url}/set.jsonl.gz?signature=secret")
        rows, made = read(source), describe(source)
        with pytest.raises(MissingInputError) as raised:
            read(SourceConfig(path=f"{url}/none.jsonl?signature=secret"))
    assert [(row.source, row.where) for row in rows] == [
        ("set", f"set.jsonl.gz:{line}") for line in (1, 2, 3)
    ]
    assert made.url == f"{url}/set.jsonl.gz"
    assert "secret" not in f"{rows} {made} {raised.value}"


NAMES = ("a.jsonl", "b/a.jsonl.gz", "b/c/d.csv", "b.txt")
BESIDE = ("README.md", ".hidden.jsonl", "b/_SUCCESS", "picture.png", "b/_old/x.jsonl")
BESIDE += ("b/.git/y.jsonl",)


def several(write_file):
    for name in (*NAMES, *BESIDE):
        text = (
            f'prompt,answer\n"{name}","{SAID_BY_ASSISTANT}"\n'
            if name.endswith("csv")
            else json.dumps({"prompt": name})
        )
        data = (name if name.endswith("txt") else text).encode()
        write_file(name, gzip.compress(data) if name.endswith("gz") else data)


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    if request.param == "memory":
        root = f"memory://{tmp_path.name}"
        several(lambda name, data: fsspec.filesystem("memory").pipe(f"{root}/{name}", data))
        return root

    def write_file(name, data):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    several(write_file)
    return str(tmp_path / "set")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", sorted(NAMES)),
        ("/", sorted(NAMES)),
        ("/b", ["a.jsonl.gz", "c/d.csv"]),
        ("/*.jsonl", ["a.jsonl"]),
        ("/**/*.csv", ["d.csv"]),
        ("/b/**/*.[cj]s*", ["a.jsonl.gz", "c/d.csv"]),
        ("/[ab].*", ["a.jsonl", "b.txt"]),
    ],
)
def test_folders_and_globs(folder, pattern, names):
    source = SourceConfig(path=folder + pattern, name="set")
    rows = [row for row in read(source) if "_old" not in row.turns[0]]
    assert [row.where.rsplit(":")[0] for row in rows] == names
    assert all(row.turns[0].endswith(name) for row, name in zip(rows, names, strict=True))
    assert SAID_BY_ASSISTANT not in repr(rows)
    found = [file.url for file in source_files(source)]
    assert [row.turns for path in found for row in read(SourceConfig(path=path))] == [
        row.turns for row in read(source)
    ]


def test_the_identity_is_that_of_the_contents(tmp_path):
    """Not of the place or the names; their order counts, since it is that of the rows."""
    identities = []
    for place, names in (("here", ("a", "b")), ("there", ("x", "y")), ("turned", ("b", "a"))):
        folder = tmp_path / place
        folder.mkdir()
        for name, text in zip(names, ("One", "Two"), strict=True):
            (folder / f"{name}.txt").write_text(text)
        made = describe(SourceConfig(path=str(folder)))
        identities.append(made.identity)
        assert sorted(made.files) == sorted(f"{name}.txt" for name in names)
        assert all(file.bytes == 3 for file in made.files.values())
    assert identities[0] == identities[1] != identities[2]
    one = hashlib.sha256(b"One").hexdigest()
    alone = describe(SourceConfig(path=str(tmp_path / "here" / "a.txt")))
    assert content_identity([one]) == one == alone.identity


def test_what_is_stated_goes_into_the_manifest(tmp_path):
    stated = {
        "licence": "MIT",
        "prompts_by": "human",
        "answers_by": "gpt-4",
        "overrule": {"unknown": "asked them"},
        "fictional": True,
        "personal": PrivacyConfig(actions={"person": "drop"}).model_dump(mode="json"),
    }
    path = write(tmp_path / "set.jsonl", GOOD).path
    assert describe(SourceConfig(path=path, **stated)).config == stated
    none = dict.fromkeys(("licence", "prompts_by", "answers_by", "personal"))
    assert describe(SourceConfig(path=path)).config == {**none, "overrule": {}, "fictional": False}
    assert [row.licence for row in read(SourceConfig(path=path))] == [NOT_STATED]


def test_a_file_that_is_damaged_as_a_whole_harms_no_other(tmp_path):
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.jsonl.gz", b"\x1f\x8b broken")
    write(tmp_path / "c.jsonl", b"")
    write(tmp_path / "d.jsonl", GOOD)
    first, broken, last = read(SourceConfig(path=str(tmp_path)))
    assert first.turns == last.turns == ("Fine.",)
    assert broken.where == "b.jsonl.gz:1"
    write(tmp_path / "cache-1.arrow", "of another program")
    assert len(read(SourceConfig(path=str(tmp_path)))) == 3


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("none.jsonl", MissingInputError),
        ("*.jsonl", MissingInputError),
        (".", EmptyInputError),
        ("nowhere://x/y.jsonl", InputError),
        ("saved", InputError),
        ("memory://none", MissingInputError),
        ("memory://none/*.jsonl", MissingInputError),
    ],
)
def test_a_source_that_is_not_there(tmp_path, path, error):
    source = SourceConfig(path=path if "://" in path else str(tmp_path / path), licence="MIT")
    if path == "saved":
        (tmp_path / path).mkdir()
        for name in ("data.arrow", "state.json"):
            (tmp_path / path / name).touch()
    for reading in (describe, read):
        with pytest.raises(error) as raised:
            reading(source)
        assert raised.value.hint
        assert raised.value.exit_code == 2


def test_a_path_that_could_be_an_id_of_the_hub_is_looked_for_here_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("owner")
    write(tmp_path / "owner" / "name", GOOD)
    assert [row.where for row in read(SourceConfig(path="owner/name"))] == ["name:1"]
    # and nobody is asked for it
    with pytest.raises(MissingInputError, match="no file at data/missing"):
        read(SourceConfig(path="data/missing.jsonl"))


def test_subsets_and_splits_are_the_hub_s(tmp_path):
    with pytest.raises(InputError, match="no subsets or splits"):
        read(SourceConfig(path=str(tmp_path), split="test"))


def test_the_name_is_made_from_the_path():
    labels = {
        **{"a/b.jsonl.gz": "b", "s3://bucket/set.json": "set", "x": "x", ".hidden": ".hidden"},
        **{"data/*.jsonl.gz": "data", "data/chats/**/*.jsonl": "chats", "data/chats/": "chats"},
        **{"*.jsonl": "*.jsonl", "s3://my.bucket": "my.bucket", "owner/set@v1": "owner/set"},
        "https://me:secret@host.org/set.jsonl?signature=secret": "set",
        "zip://*.jsonl::data/all.zip": "all",
        "hf://datasets/owner/set/data/train.jsonl": "owner/set",
    }
    assert {path: SourceConfig(path=path).label for path in labels} == labels
    assert {SourceConfig(path=path, name="mine").label for path in labels} == {"mine"}
