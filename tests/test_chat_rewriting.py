"""Templates whose rendered answers do not follow the prompt that their servers give the target:
each answer's row is that prompt and what the target wrote, or there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.chat import Chat, Turn
from eyas.chat.turn import as_served
from eyas.errors import TemplateError
from tests.chat_folders import (
    LIKE_COMMAND_R,
    LIKE_GEMMA_4,
    LIKE_GPT_OSS,
    LIKE_HERMES,
    LIKE_MINIMAX,
    LIKE_QWEN,
    LIKE_QWQ,
    LIKE_R1,
    like_glm,
    like_gpt_oss,
    like_qwen,
)

TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds a table."}}]
ARGUMENTS = {"city": "San Jos\u00e9", "people": 2}
THOUGHTS = "Three times ten, and three times seven."
MAKERS: dict[str, tuple[Callable[..., Path], str | None]] = {
    "r1": (like_qwen, LIKE_R1),
    "qwq": (like_qwen, LIKE_QWQ),
    "minimax": (like_qwen, LIKE_MINIMAX),
    "gemma 4": (like_qwen, LIKE_GEMMA_4),
    "gpt-oss": (like_gpt_oss, LIKE_GPT_OSS),
    "hermes": (like_qwen, LIKE_HERMES),
    "command-r": (like_qwen, LIKE_COMMAND_R),
    "qwen3": (like_qwen, LIKE_QWEN),
}
PIECES = (
    *("<think>", "<think>\n", "</think>", "\n</think>\n\n", "\n", " ", "a", " table", "e\u0301"),
    *("<|im_end|>", "<|im_start|>", "<|end|>", "<|channel|>final<|message|>", "<|user|>", "<tool_"),
)
OPEN = ("r1", "qwq", "minimax")  # prompts that end in thoughts which the target goes on with


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chat]:
    root = tmp_path_factory.mktemp("rewriting")
    made = {
        name: Chat(make(root / name.replace(" ", ""), template))
        for name, (make, template) in MAKERS.items()
    }
    return {**made, "glm": Chat(like_glm(root / "glm"))}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str = "find", arguments: Any = ARGUMENTS) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


def written(chat: Chat, turn: Turn) -> str:
    """What is under the mask, control tokens by name; it follows the prompt's own tokens."""
    assert not any(turn.mask[: turn.num_prompt_tokens])
    kept = [token for token, own in zip(turn.ids, turn.mask, strict=True) if own]
    return chat._tokens.spelled(kept)


def rows(chat: Chat, messages: Sequence[Any], tools: Any = None) -> list[str]:
    """What each answer's row masks, after a look at its beginning: the tokens that a server's
    prompt has at that turn.
    """
    found = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            turn = chat.turn(messages[: at + 1], tools=tools)
            prompt = chat.prompt_ids(messages[:at], tools)
            assert turn.ids[: turn.num_prompt_tokens] == prompt
            assert chat._tokens.spelled(prompt) == chat.render(messages[:at], True, tools)
            found.append(written(chat, turn))
    return found


@pytest.mark.parametrize("name", OPEN)
def test_an_answer_goes_on_where_the_prompt_begins_the_thoughts(
    chats: dict[str, Chat], name: str
) -> None:
    """Also an answer in which a client has put the block's beginning back."""
    chat, first = chats[name], f"{THOUGHTS}\n</think>\n\n51."
    messages = [
        user("17 times 3?"),
        answer(first),
        user("times 2?"),
        answer("<think>\n51 * 2\n</think>\n\n102."),
    ]
    assert rows(chat, messages) == [f"{first}<|im_end|>", "51 * 2\n</think>\n\n102.<|im_end|>"]
    second = chat.turn(messages)
    assert THOUGHTS not in second.encoded.text, "a server's template drops earlier thoughts"
    assert second.encoded.text.count("<think>\n") == 1
    assert second.encoded.text.startswith(chat.render(messages[:-1], True))


@pytest.mark.parametrize("name", OPEN)
def test_an_answer_whose_thoughts_are_lost_has_no_row(chats: dict[str, Chat], name: str) -> None:
    """The target wrote thoughts first: a row without them holds what it never wrote there."""
    for lost in (
        answer("51."),
        answer(f"<think> {THOUGHTS}</think>51."),
        answer(None, tool_calls=[call()]),
    ):
        with pytest.raises(TemplateError, match="this answer has none") as raised:
            chats[name].turn([user("17 times 3?"), lost])
        assert "closing tag in `content`" in raised.value.hint


@pytest.mark.parametrize("name", OPEN)
def test_a_cut_answer_may_end_in_its_thoughts(chats: dict[str, Chat], name: str) -> None:
    messages = [user("17 times 3?"), answer(THOUGHTS)]
    assert written(chats[name], chats[name].turn(messages, "length")) == THOUGHTS
    with pytest.raises(TemplateError, match="this answer has none"):
        chats[name].turn(messages)


def test_thoughts_beside_the_answer_are_taken_where_the_template_writes_them(
    chats: dict[str, Chat],
) -> None:
    messages = [user("17 times 3?"), answer("51.", reasoning_content=THOUGHTS)]
    assert rows(chats["minimax"], messages) == [f"{THOUGHTS}\n</think>\n\n51.<|im_end|>"]
    called = [user("A table?"), answer(None, reasoning="I look.", tool_calls=[call()])]
    [row] = rows(chats["minimax"], called)
    assert row.startswith("I look.\n</think>\n\n<tool_call>")
    assert row.endswith("</tool_call><|im_end|>")
    with pytest.raises(TemplateError, match="leaves out the reasoning"):
        chats["r1"].turn(messages)


def test_a_closed_block_of_thoughts_is_put_back_before_the_answer(chats: dict[str, Chat]) -> None:
    """Also with a call; thoughts in an answer to such a prompt are no answer to it."""
    chat = chats["gemma 4"]
    messages = [user("A table?"), answer("For two?"), user("Yes"), answer("Done.\n")]
    assert rows(chat, messages) == ["For two?<|im_end|>", "Done.\n<|im_end|>"]
    assert chat.turn(messages).encoded.text.endswith("<think>\n\n</think>\n\nDone.\n<|im_end|>\n")
    [row, _] = rows(chat, [user("A?"), answer(None, tool_calls=[call()]), result("-"), answer("-")])
    assert row == f"<tool_call>{json.dumps(call()['function'], ensure_ascii=False)}" + (
        "</tool_call><|im_end|>"
    )
    with pytest.raises(TemplateError, match="rewrites the prompt once this answer follows"):
        chat.turn([user("17 times 3?"), answer(f"{THOUGHTS}\n</think>\n\n51.")])
    off = chats["r1"].with_options({"thinking": False})
    assert rows(off, messages) == rows(chat, messages)


def test_channels_that_the_target_opens_are_its_own(chats: dict[str, Chat]) -> None:
    """With thoughts all is the target's; without, the channel's name is the template's. A user who
    writes a channel's name writes words.
    """
    chat = chats["gpt-oss"]
    thought = [user("17 times 3? <|channel|>"), answer("51.", reasoning_content=THOUGHTS)]
    [row] = rows_of_text(chat, thought)
    assert row == (
        f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant"
        "<|channel|>final<|message|>51.<|return|>"
    )
    plain = [user("A table?"), answer("For two?"), user("Yes"), answer("Done.")]
    assert rows(chat, plain) == ["For two?<|return|>", "Done.<|return|>"]
    called = [user("A?"), answer(None, tool_calls=[call()], thinking="I look.")]
    assert rows(chat, called) == [
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=find"
        f"<|channel|>commentary<|message|>{json.dumps(ARGUMENTS, ensure_ascii=False)}<|call|>"
    ]
    assert rows(chat, [user("A?"), answer(None, tool_calls=[call()])]) == [
        " to=find<|channel|>commentary<|message|>"
        f"{json.dumps(ARGUMENTS, ensure_ascii=False)}<|call|>"
    ]


def rows_of_text(chat: Chat, messages: Sequence[Any]) -> list[str]:
    """`rows` of messages that hold a control token's name: their prompt is not spelled alike."""
    return [written(chat, chat.turn(messages))]


def test_a_template_that_needs_tools_is_taken_with_them(chats: dict[str, Chat]) -> None:
    """Hermes breaks the line after a tool's result once an answer follows: the server did not."""
    for name in ("hermes", "command-r"):
        chat = chats[name]
        messages = [
            user("A table?"),
            answer(None, tool_calls=[call()]),
            result("seven"),
            answer("Yes, at seven."),
        ]
        first, second = rows(chat, messages, TOOLS)
        assert json.dumps(call()["function"], ensure_ascii=False) in first
        assert first.endswith("<|im_end|>")
        assert second == "Yes, at seven.<|im_end|>"
        with pytest.raises(TemplateError, match="a conversation without tools") as raised:
            chat.turn([user("Hi"), answer("Hello")])
        assert "without tools into that folder" in raised.value.hint
    moved = chats["command-r"].turn([user("Hi"), answer("Hello")], tools=TOOLS).encoded.text
    assert moved.endswith("Write an action.<|im_end|><|im_start|>assistant\nHello<|im_end|>")


def test_the_next_turns_role_token_ends_an_answer_where_nothing_else_does(
    chats: dict[str, Chat],
) -> None:
    chat = chats["glm"]
    messages = [
        user("A table?"),
        answer(None, tool_calls=[call()]),
        result("seven"),
        answer("At seven."),
        user("Good"),
        answer("Done."),
    ]
    first, second, third = rows(chat, messages)
    assert first.endswith("</tool_call><|observation|>")
    assert (second, third) == ("At seven.<|user|>", "Done.<|user|>")
    earlier, later = chat.turn(messages[:4]), chat.turn(messages)
    assert later.continues(earlier), "one sample of both: the token is in the next prompt too"


@pytest.mark.parametrize("empty", [{"content": None}, {}, {"content": ""}])
def test_calls_without_content_are_an_empty_text_as_in_servers(
    chats: dict[str, Chat], empty: dict[str, Any]
) -> None:
    """vLLM and SGLang hand templates an empty text, and arguments as objects."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        called = {"role": "assistant", **empty, "tool_calls": [call(arguments=arguments)]}
        messages = [user("A table?"), called, result("seven"), answer("At seven.")]
        given = json.dumps(messages)
        assert rows(chats["qwen3"], messages, TOOLS) == [
            '<tool_call>\n{"name": "find", "arguments": {"city": "San Jos\u00e9", "people": 2}}\n'
            "</tool_call><|im_end|>",
            "At seven.<|im_end|>",
        ]
        assert json.dumps(messages) == given, "messages stay as they were"


def test_a_message_as_servers_hand_it_to_a_template() -> None:
    assert as_served({"role": "user"}, ()) == {"role": "user", "content": ""}
    nothing = {"role": "assistant", "content": "Hi", "tool_calls": [], "reasoning_content": None}
    assert as_served(nothing, ("reasoning",)) == {"role": "assistant", "content": "Hi"}
    assert as_served(answer("Hi", thinking="Hm"), ("reasoning_content", "reasoning")) == answer(
        "Hi", reasoning_content="Hm", reasoning="Hm"
    )
    for arguments, served in (("", {}), (None, {}), ("[1]", "[1]"), ("no JSON", "no JSON")):
        [one] = as_served(answer(None, tool_calls=[call(arguments=arguments)]), ())["tool_calls"]
        assert one["function"]["arguments"] == served


def test_an_answer_with_a_call_left_out_has_no_row(tmp_path: Path) -> None:
    """The second of two calls of one function: its name alone stands there, of the first."""
    only_first = LIKE_QWEN.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    chat = Chat(like_qwen(tmp_path, only_first))
    calls = [call(), call(arguments={"city": "Rome", "people": 3})]
    with pytest.raises(TemplateError, match="leaves out reasoning or a tool call"):
        chat.turn([user("Tables?"), answer(None, tool_calls=calls)])
    assert chat.turn([user("Tables?"), answer(None, tool_calls=calls[:1])])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(PIECES) | st.text(max_size=3), min_size=1, max_size=5).map(
            "".join
        ),
        min_size=2,
        max_size=4,
    ).filter(lambda texts: len(texts) % 2 == 0)
)
def test_of_any_messages_the_row_is_exact_or_refused(
    chats: dict[str, Chat], texts: list[str]
) -> None:
    """Tags of thoughts, halves of them and control tokens in messages, in every family."""
    messages = [(user, answer)[at % 2](text) for at, text in enumerate(texts)]
    for name, chat in chats.items():
        tools = TOOLS if name in ("hermes", "command-r") else None
        if name in OPEN:
            messages[-1] = answer(f"Hm.\n</think>\n\n{texts[-1]}")
        try:
            turn = chat.turn(messages, tools=tools)
        except TemplateError:
            continue
        assert turn.ids[: turn.num_prompt_tokens] == chat.prompt_ids(messages[:-1], tools)
        body, end = written(chat, turn), turn.ids[len(turn.mask) - turn.mask[::-1].index(True) - 1]
        assert end in chat.eos_token_ids
        ended = body.removesuffix(chat._tokens.spelled([end]))
        said = messages[-1]["content"]
        assert ended.strip() in (said.strip(), chat._tokens.normalized(said).strip()), name


def test_reasoning_that_the_content_repeats_is_not_there_for_that(tmp_path: Path) -> None:
    chat = Chat(like_qwen(tmp_path, LIKE_GEMMA_4))
    with pytest.raises(TemplateError, match="leaves out reasoning"):
        chat.turn([user("17 times 3?"), answer("It is 51, so 51.", reasoning_content="51")])


def test_white_space_behind_an_answer_with_reasoning_has_no_row(tmp_path: Path) -> None:
    """Whose it is cannot be found in two ways, as nothing else stands there."""
    breaks = LIKE_QWEN.replace(
        "{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}",
        "{{- ' <|im_end|>\\n' }}{% endif %}{% endfor %}",
    )
    assert breaks != LIKE_QWEN
    chat = Chat(like_qwen(tmp_path, breaks))
    assert chat.turn([user("17 times 3?"), answer("51.")])
    with pytest.raises(TemplateError, match="white space of its own"):
        chat.turn([user("17 times 3?"), answer("51.", reasoning_content=THOUGHTS)])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        # the prompt of another role, and words that answers lack, are no thoughts
        (("assistant\\n<think>\\n", "user\\n<think>\\n"), "rewrites the prompt"),
        (("<think>\\n' }}", "I think:\\n' }}"), "rewrites the prompt"),
        (("(message.content.split('</think>') | last)", "'Hm.'"), "as the target wrote it"),
        (("+ '<|im_end|>' }}{% endif %}{% endfor %}", "}}{% endif %}{% endfor %}"), "does not end"),
    ],
)
def test_a_faulty_template_with_thoughts_is_refused_at_once(
    tmp_path: Path, change: tuple[str, str], what: str
) -> None:
    assert change[0] in LIKE_R1
    like_qwen(tmp_path, LIKE_R1.replace(*change))
    with pytest.raises(TemplateError, match=what):
        Chat(tmp_path)
