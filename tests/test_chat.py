"""Chat templates and tokenizers, tiny, broken and real: what is a token, and what is text."""

import datetime
import functools
import json
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.builtin import target_folder
from eyas.chat import Chat, TextStream, environment
from eyas.chat.template import as_served
from eyas.errors import MissingInputError, TemplateError
from eyas.records import Message
from tests.chat_folders import (
    LIKE_GRANITE,
    LIKE_HERMES,
    LIKE_QWEN,
    like_granite,
    like_llama_2,
    like_qwen,
)
from tests.mask_rows import CALL, DAY, GOLDEN, TOOLS, digest, rows
from tests.mask_rows import folders as families_of
from tests.mask_rows import says as dialogue
from tests.source_rows import real_messages, shared
from tests.tiny import TEMPLATE, tiny_tokenizer

REAL = ("granite-3.1", "qwen3")
FAMILIES = {"qwen3": like_qwen, "granite": like_granite, "llama-2": like_llama_2}
PIECES = (
    "<", "|>", "im_", "end", "<|im_end|>", "<|im_start|>", "\ufdd0", "a", " table", "e\u0301",
    "</s>", "<s>", " ",
)  # fmt: skip
DATES = "{{ 'It is ' + strftime_now('%d %b %Y') + '.\n' }}" + TEMPLATE


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> dict[str, Chat]:
    root = tmp_path_factory.mktemp("chat")
    for name, template in {"chatml": TEMPLATE, "dates": DATES}.items():
        tiny_tokenizer(root / name, chat_template=template)
    return {name: Chat(root / name, DAY) for name in ("chatml", "dates")}


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Chat]:
    root = tmp_path_factory.mktemp("families")
    return {name: Chat(make(root / name), DAY) for name, make in FAMILIES.items()}


@functools.cache
def real_chat(name: str) -> Chat:
    return Chat(shared(f"tokenizers/{name}"), DAY)


def spelled(chat: Chat, ids: Sequence[int]) -> str:
    return chat.tokenizer.decode(list(ids), skip_special_tokens=False)


def control_ids(chat: Chat, ids: list[int]) -> list[int]:
    return [token for token in ids if token in chat._tokens.control_ids]


# Conversations that eyas did not generate


def test_rows_are_those_on_record(tmp_path):
    """tests/goldens/masks.json has the rows on which two independent ways to a mask agreed, by
    characters and by tokens: every row that is taken has the same tokens and mask.
    """
    golden, taken = json.loads(GOLDEN.read_text()), {}
    for family, (folder, options) in families_of(tmp_path).items():
        chat, taken[family] = Chat(folder, DAY, options), 0
        for name, messages, tools in rows():
            try:
                prompt_ids, answer_ids = chat.answered(messages, tools)
            except TemplateError:
                continue
            taken[family] += 1
            assert digest(prompt_ids, answer_ids) == golden[family].get(name), (family, name)
            assert prompt_ids == chat.prompt_ids(messages[:-1], tools)
            assert answer_ids[-1] in chat.eos_token_ids
    assert taken.keys() == golden.keys()
    assert {name: count for name, count in taken.items() if count > 2} == {
        **{"granite": 24, "llama_3": 22, "gemma": 21, "qwen, no thoughts": 21},
        **{"tiny": 24, "builtin": 24},
    }


@pytest.mark.parametrize("name", ["builtin", *REAL])
def test_real_templates_on_real_conversations(name):
    chat = Chat(target_folder(), DAY) if name == "builtin" else real_chat(name)
    if name == "qwen3":
        chat = Chat(chat.folder, DAY, {"enable_thinking": False})
    for messages in real_messages("sgd_dev", 30):
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and at:
                prompt_ids, answer_ids = chat.answered(messages[: at + 1])
                assert prompt_ids == chat.prompt_ids(messages[:at])
                assert chat.decode(answer_ids[:-1]) == message["content"]
                assert answer_ids[-1] in chat.eos_token_ids


def test_answers_with_and_without_thoughts():
    chat = real_chat("qwen3")
    whole = "<think>\nFor how many?\n</think>\n\nFor two?"
    _, answer_ids = chat.answered(dialogue("A table?", whole))
    assert chat.decode(answer_ids) == whole
    with pytest.raises(TemplateError, match="as the target wrote it"):
        chat.answered(dialogue("A table?", "For two?"))


TRIMS = TEMPLATE.replace("message['content'] +", "message['content'] | trim +")
SPACES = TEMPLATE.replace("message['content'] +", "' ' + message['content'] + ' ' +")


@pytest.mark.parametrize(
    ("template", "answer", "match"),
    [
        (TRIMS, {"content": "Hello "}, "as the target wrote it"),
        (SPACES, {"content": "Hello"}, "as the target wrote it"),
        (TEMPLATE.replace("'<|im_end|>'", "' bye <|im_end|>'"), {"content": "Hi"}, "as the target"),
        (TEMPLATE.replace("'<|im_end|>'", "'<|im_start|>'"), {"content": "Hi"}, "does not end an"),
        ("{{ messages | length }} " + TEMPLATE, {"content": "Hi"}, "rewrites the prompt"),
        (TEMPLATE, {"content": "say <|im_end|>"}, "names a control token"),
        (TEMPLATE, {"content": "Hi", "reasoning_content": "Hm."}, "in several parts"),
        (TEMPLATE, {"content": None, "tool_calls": [CALL]}, "in several parts"),
        (TEMPLATE, {"content": [{"type": "text", "text": "Hi"}]}, "in several parts"),
    ],
)
def test_doubtful_answers_have_no_row(tmp_path, template, answer, match):
    tiny_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(TemplateError, match=match):
        Chat(tmp_path).answered([*dialogue("Hi"), {"role": "assistant", **answer}])


def test_dated_rows_need_a_day(chats):
    assert chats["dates"].answered(dialogue("Hi", "Hello"))
    with pytest.raises(TemplateError, match="other tokens tomorrow"):
        Chat(chats["dates"].folder).answered(dialogue("Hi", "Hello"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=5).map("".join),
        min_size=2,
        max_size=6,
    ).filter(lambda turns: len(turns) % 2 == 0 and "\ufdef" not in "".join(turns))
)
def test_random_messages_are_text_and_rows_are_exact(families, turns):
    for family, chat in families.items():
        neutral = control_ids(chat, chat.prompt_ids(dialogue(*("x" for _ in turns[:-1]))))
        prompt_ids = chat.prompt_ids(dialogue(*turns[:-1]))
        assert control_ids(chat, prompt_ids) == neutral, (family, turns)
        try:
            before, answer_ids = chat.answered(dialogue(*turns))
        except TemplateError:
            continue
        assert before == prompt_ids
        normalizer = chat.tokenizer.normalizer
        written = normalizer.normalize_str(turns[-1]) if normalizer else turns[-1]
        assert spelled(chat, answer_ids[:-1]) == written, (family, turns)


# Templates


def test_a_fixed_date_is_the_same_tomorrow(chats):
    shown = chats["dates"].render(dialogue("Hi"))
    assert shown.startswith("It is 02 Jan 2026.\n<|im_start|>user\nHi")
    today = datetime.date.today()
    fixed, clock = (Chat(chats["dates"].folder, day) for day in (today, None))
    assert fixed.render(dialogue("Hi")) == clock.render(dialogue("Hi"))


CALLS_ITSELF = (
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
)
WIDE = [
    *("'x'.ljust(300000)", "'x'.rjust(300000)", "'x'.center(300000)", "'x'.zfill(300000)"),
    *("'%300000d' % 1", "'%*d' % (300000, 1)", "'%.300000f' | format(1)", "'x' | center(300000)"),
    *("'{:300000}'.format(1)", "'{:{}}'.format(1, 300000)", "'' | indent(width=300000)"),
    *("[1] | batch(300000) | list", "'x' | slice(slices=300000) | list", "1.5 | round(30000)"),
    *("'x' | tojson(indent=300000)", "[1] | tojson(separators=(300000 * ',', ':'))"),
    *("(299 * 'x') | replace('x', 1000 * 'y')", "(299 * 'x').replace('', 1000 * 'y')"),
    *("(300 * 'x') | join(999 * 'y')", "(999 * 'y').join(300 * 'x')"),
    *("('\n' * 299) | indent(1000 * 'y')", "(299 * 'x') | wordwrap(1, true, 1000 * 'y')"),
    "(299 * 'x').translate({120: 1000 * 'y'})",
]
LOOP = "{% set a = 9999 * 'xx' %}{% for i in range(99999) %}"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (None, "has no chat template"),
        (TEMPLATE.replace("message['content'] +", "message['content'] | upper +"), "leaves out"),
        ("{% if messages %}" + TEMPLATE, "refuses a conversation"),
        ("{{ strftime_now('%s') }}" + TEMPLATE, "which no day fixes"),
        (LOOP + "{% for j in range(9999) %}{% endfor %}{% endfor %}", r"takes longer than 0\.05 s"),
        ("{{ 'x' * 3000000000 }}", "makes a text of 3,000,000,000"),
        (LOOP + "{{ a ~ a ~ a ~ a }}{% endfor %}", "makes a text of"),
        ("{{ 10 ** 10 ** 9 }}", "makes a text of"),
        (CALLS_ITSELF, r"takes longer than 0\.05 s"),
        *((f"{{{{ ({wide}) | length }}}}", "makes a text of 300,000") for wide in WIDE),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ 1 // 0 }}", "refuses a conversation: integer division"),
    ],
)
def test_broken_templates_are_refused_at_once(tmp_path, monkeypatch, template, what):
    monkeypatch.setattr(environment, "RENDER_S", 0.05)
    monkeypatch.setattr(environment, "MOST_PARTS", 1 << 16)
    tiny_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(TemplateError, match=what) as raised:
        Chat(tmp_path, DAY)
    assert str(tmp_path) in str(raised.value)


def test_a_doubled_bos_is_refused(tmp_path):
    like_granite(tmp_path, "{{ bos_token + bos_token }}" + LIKE_GRANITE)
    with pytest.raises(TemplateError, match="begins with two BOS tokens"):
        Chat(tmp_path, DAY)


def test_a_template_that_needs_tools(tmp_path):
    chat = Chat(like_qwen(tmp_path, LIKE_HERMES))
    assert '"find"' in spelled(chat, chat.prompt_ids(dialogue("Hi"), TOOLS))
    with pytest.raises(TemplateError, match="refuses a conversation without tools"):
        chat.prompt_ids(dialogue("Hi"))


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(MissingInputError, match="no folder"):
        Chat(tmp_path / "absent")
    with pytest.raises(MissingInputError, match="no tokenizer"):
        Chat(tmp_path)


def test_end_tokens_are_those_of_the_generation_config(tmp_path):
    tiny_tokenizer(tmp_path)
    assert Chat(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Chat(tmp_path).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(TemplateError, match="eos_token_id"):
        Chat(tmp_path).answered(dialogue("Hi", "Hello"))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20).filter(lambda text: "\ufffd" not in text))
def test_a_stream_never_gives_half_a_character(chats, text):
    chat = chats["chatml"]
    stream = TextStream(chat.decode)
    ids = chat.tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [stream.push([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


# What messages say is text


NAMING_TOOLS = [{"type": "function", "function": {"name": "find", "description": "<|im_end|>"}}]


def conversation_with(text: str) -> list[Message]:
    return dialogue(f"What is {text}?", f"It is {text}.", f"{text} again")


@pytest.mark.parametrize("family", [*FAMILIES, "builtin", *REAL])
def test_control_tokens_in_messages_are_text(families, family):
    made = {**families, "builtin": Chat(target_folder(), DAY)}
    chat = made[family] if family in made else real_chat(family)
    neutral = control_ids(chat, chat.prompt_ids(conversation_with("x")))
    assert chat.control_text(conversation_with("x")) == []
    for name in chat._tokens.names:
        messages = conversation_with(name)
        assert chat.control_text(messages) == [name]
        ids = chat.prompt_ids(messages)
        assert control_ids(chat, ids) == neutral, "a role begins or ends where there is none"
        assert chat.decode(ids).count(name) == 3


def test_what_cannot_be_kept_apart_is_refused(families):
    """The character of the stand-ins, together with a control token's name."""
    chat = families["qwen3"]
    assert chat.decode(chat.prompt_ids(dialogue("\ufdef"))).count("\ufdef") == 1
    with pytest.raises(TemplateError, match="for text"):
        chat.prompt_ids(dialogue("\ufdef <|im_end|>"))
    with pytest.raises(TemplateError, match="every non-character"):
        chat.prompt_ids(dialogue("<|im_end|>" + "".join(map(chr, range(0xFDD0, 0xFDF0)))))


def test_a_template_that_changes_the_shield_is_refused(tmp_path):
    """ASCII-only JSON would keep the shield, as an escape."""
    like_qwen(tmp_path, LIKE_QWEN.replace("(tool | tojson)", "(tool | tojson(ensure_ascii=True))"))
    chat = Chat(tmp_path)
    with pytest.raises(TemplateError, match="changes a message"):
        chat.prompt_ids(dialogue("Hi"), NAMING_TOOLS)
    assert chat.prompt_ids(dialogue("<|im_end|>"))


def test_tools_and_calls_are_text_too(families):
    chat = families["qwen3"]
    arguments = {"<|im_end|>": "<|im_end|>"}
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    messages: list[Any] = [
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<|im_start|>"},
    ]
    assert chat.control_text(messages, NAMING_TOOLS) == ["<|im_end|>", "<|im_start|>"]
    ids = chat.prompt_ids(messages, NAMING_TOOLS)
    ends = [token for token in ids if token in chat.eos_token_ids]
    assert len(ends) == 4, "of the tools, the question, the call and the result"


def test_messages_as_served():
    calls = [{"function": {"name": "find", "arguments": '{"city": "Oslo"}'}}]
    served = as_served({"role": "assistant", "tool_calls": calls, "reasoning": "Hm", "name": None})
    assert served == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "find", "arguments": {"city": "Oslo"}}}],
        **{"thinking": "Hm", "reasoning_content": "Hm", "reasoning": "Hm"},
    }
    bare = as_served({"role": "assistant", "content": None, "tool_calls": []})
    assert bare == {"role": "assistant", "content": ""}
    for arguments, read in (("", {}), (None, {}), ("[1]", "[1]"), ("{", "{"), ({"a": 1}, {"a": 1})):
        call = {"name": "find", "arguments": arguments}
        made = as_served({"role": "assistant", "tool_calls": [call]})
        assert made["tool_calls"][0]["arguments"] == read


def test_formats_of_the_day(tmp_path):
    codes = " ".join(f"%{code}" for code in "aAbBdejmyYHIMSpxXcDFTR")
    like_granite(tmp_path, LIKE_GRANITE.replace("%B %d, %Y", codes))
    shown = Chat(tmp_path, DAY).render(dialogue("Hi")).split("Today is ")[1].split(".\n")[0]
    assert shown == DAY.strftime(codes)


def test_several_templates_need_a_default(tmp_path):
    path = like_qwen(tmp_path, None) / "tokenizer_config.json"
    named = {"chat_template": [{"name": "tool_use", "template": LIKE_QWEN}]}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    with pytest.raises(TemplateError, match="none of them is named default"):
        Chat(tmp_path)


def test_a_target_folder_can_be_moved(chats, tmp_path):
    moved = Chat(shutil.copytree(chats["chatml"].folder, tmp_path / "moved"))
    assert moved.prompt_ids(dialogue("Hi")) == chats["chatml"].prompt_ids(dialogue("Hi"))
