"""Chat templates and masks, on tiny, broken and real tokenizers."""

import datetime
import functools
import gzip
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eyas.builtin import target_folder
from eyas.chat import Chat, MaskDisagreement, Turn
from eyas.chat.supervision import OPTIONS, supervised, token_kinds
from eyas.errors import MissingInputError, TemplateError
from eyas.records import Message
from eyas.train.loss import judged_positions
from tests.chat_folders import LIKE_GRANITE, LIKE_QWEN, like_granite, like_llama_2, like_qwen
from tests.template_faults import FAULTS, SOUND, Fault, caught
from tests.tiny import TEMPLATE, tiny_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
REAL = ("granite-3.1", "qwen3")
FAMILIES = {"qwen3": like_qwen, "granite": like_granite, "llama-2": like_llama_2}
PIECES = (
    "<",
    "|>",
    "im_",
    "end",
    "<|im_end|>",
    "<|im_start|>",
    "\ufdd0",
    "a",
    " table",
    "e\u0301",
    "</s>",
    "<s>",
    " ",
)
DAY = datetime.date(2026, 1, 2)
# The ways of the field: Llama 3 trims messages; Qwen3 opens the last answer with a thinking
# block; Llama 2 and Mistral put a space on both sides; Granite prints the date.
TRIMS = TEMPLATE.replace("message['content']", "message['content'] | trim")
THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif "
    "%}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPACES = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>' + "
    "message['content'] + '<|im_start|>' }}"
    "{% else %}{{ ' ' + message['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
DATES = "{{ 'It is ' + strftime_now('%d %b %Y') + '.\n' }}" + TEMPLATE
ALTERNATES = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + TEMPLATE
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder for each template."""
    root = tmp_path_factory.mktemp("chat")
    templates = {
        "chatml": TEMPLATE,
        "trims": TRIMS,
        "thinks": THINKS,
        "spaces": SPACES,
        "dates": DATES,
        "alternates": ALTERNATES,
    }
    for name, template in templates.items():
        tiny_tokenizer(root / name, chat_template=template)
    return {name: root / name for name in templates}


@pytest.fixture(scope="module")
def chats(folders: dict[str, Path]) -> dict[str, Chat]:
    return {name: Chat(folder, DAY) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chat]:
    root = tmp_path_factory.mktemp("families")
    return {name: Chat(make(root / name), DAY) for name, make in FAMILIES.items()}


@functools.cache
def real_chat(name: str) -> Chat:
    folder = DATA / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"no real tokenizer at {folder}")
    return Chat(folder, DAY)


def real_rows(count: int) -> list[list[Message]]:
    path = DATA / "sgd_dev.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no real conversations at {path}")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in itertools.islice(lines, count)]


def dialogue(*contents: str) -> list[Message]:
    """A conversation whose turns alternate, the user's first."""
    return [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]


def turns(chat: Chat, messages: list[Message], tools: Any = None) -> list[Turn]:
    """Every answer with the conversation before it."""
    ends = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return [chat.turn(messages[: at + 1], tools=tools) for at in ends]


def written(turn: Turn) -> list[int]:
    """The tokens under the mask."""
    return [token for token, kept in zip(turn.ids, turn.mask, strict=True) if kept]


def masked_text(chat: Chat, messages: list[Message], finish_reason: str = "stop") -> str:
    ids, mask = chat.answered(messages, finish_reason)
    return chat.decode(token for token, kept in zip(ids, mask, strict=True) if kept)


def test_the_mask_covers_the_answer_and_its_end_token_only(chats: dict[str, Chat]) -> None:
    chat = chats["chatml"]
    messages = dialogue("A table?", "For two.", "Yes.", "In San Jose.")
    ids, mask = chat.answered(messages)
    prompt = chat.prompt_ids(messages[:-1])
    assert ids[: len(prompt)] == prompt
    assert not any(mask[: len(prompt)])
    end = len(mask) - 2  # the line break after the turn is the template's
    assert mask[len(prompt) :] == [True] * (end - len(prompt) + 1) + [False]
    assert ids[end] in chat.eos_token_ids
    assert chat.decode(ids[len(prompt) : end]) == "In San Jose."
    cut_ids, cut_mask = chat.answered(messages, "length")
    assert cut_ids == ids
    assert cut_mask == [*mask[:end], False, False]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(max_size=12), min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0)
)
def test_of_any_messages_the_mask_is_exact_or_refused(
    chats: dict[str, Chat], turns: list[str]
) -> None:
    messages = dialogue(*turns)
    for name in ("chatml", "trims", "thinks", "spaces"):
        chat = chats[name]
        try:
            ids, mask = chat.answered(messages)
        except TemplateError:
            # Only where the text itself makes it so: white space that is trimmed away or melts into
            # the template's own.
            assert name == "trims" or turns[-1] != turns[-1].strip() or turns[-1] == "", (
                name,
                turns,
            )
            continue
        prompt = chat.prompt_ids(messages[:-1])
        assert ids[: len(prompt)] == prompt
        assert len(ids) == len(mask)
        assert masked_text(chat, messages).strip() == turns[-1].strip()
        assert (
            sum(token in chat.eos_token_ids for token, kept in zip(ids, mask, strict=True) if kept)
            == 1
        )


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "\n",
        " Hello",
        "Hello\n",
        "\u00e9\U0001f642",
        "a  b",
        "<|im_end|>",
        "assistant",
        "user\nHi",
    ],
)
def test_awkward_answers(chats: dict[str, Chat], answer: str) -> None:
    chat = chats["chatml"]
    ids, mask = chat.answered(dialogue("Hi", answer))
    rendered = chat._tokens.spelled([token for token, kept in zip(ids, mask, strict=True) if kept])
    assert rendered == answer + "<|im_end|>"


def test_an_opening_by_the_template_is_not_the_targets(chats: dict[str, Chat]) -> None:
    assert masked_text(chats["thinks"], dialogue("Hi", "Hello")) == "Hello"


def test_an_answer_that_the_template_trims_has_no_mask(chats: dict[str, Chat]) -> None:
    assert masked_text(chats["trims"], dialogue("Hi ", "Hello")) == "Hello"
    with pytest.raises(TemplateError, match="as the target wrote it"):
        chats["trims"].answered(dialogue("Hi", "Hello "))


def test_spaces_of_the_template_join_the_answer(chats: dict[str, Chat]) -> None:
    ids, mask = chats["spaces"].answered(dialogue("Hi", "table"))
    assert masked_text(chats["spaces"], dialogue("Hi", "table")) == " table"
    assert mask[-2:] == [False, True], (
        "the space before the end token was never written by the target"
    )
    assert ids[-1] in chats["spaces"].eos_token_ids


def test_a_fixed_date_is_the_same_tomorrow(
    folders: dict[str, Path], chats: dict[str, Chat]
) -> None:
    assert (
        chats["dates"].render(dialogue("Hi")).startswith("It is 02 Jan 2026.\n<|im_start|>user\nHi")
    )
    today = datetime.date.today()
    assert Chat(folders["dates"], today).render(dialogue("Hi")) == Chat(folders["dates"]).render(
        dialogue("Hi")
    )


def test_a_conversation_that_the_template_refuses_says_why(chats: dict[str, Chat]) -> None:
    with pytest.raises(TemplateError, match="Roles must alternate"):
        chats["alternates"].render([*dialogue("Hi"), *dialogue("Hi")])


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (None, "has no chat template"),
        (
            TEMPLATE.replace("message['content'] +", "message['content'] | upper +"),
            "as the target wrote it",
        ),
        (TEMPLATE.replace("'<|im_end|>'", "'<|endoftext|>'"), "does not end an answer"),
        (TEMPLATE.replace("+ '<|im_end|>'", "+ ' bye <|im_end|>'"), "does not end an answer"),
        ("{{ messages | length }} " + TEMPLATE, "rewrites the prompt"),
        (TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", ""), "its generation prompt lacks"),
        ("{% if messages %}" + TEMPLATE, "refuses a conversation"),
    ],
)
def test_a_template_that_cannot_be_trusted_is_refused_at_once(
    tmp_path: Path, template: str | None, what: str
) -> None:
    tiny_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(TemplateError, match=what) as raised:
        Chat(tmp_path)
    assert raised.value.hint


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="no folder"):
        Chat(tmp_path / "absent")
    with pytest.raises(MissingInputError, match="no tokenizer"):
        Chat(tmp_path)


def test_end_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    assert Chat(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Chat(tmp_path).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(TemplateError, match="eos_token_id"):
        Chat(tmp_path)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=40), st.integers(1, 5))
def test_a_stream_is_decode_in_pieces(chats: dict[str, Chat], ids: list[int], step: int) -> None:
    """Random tokens: broken UTF-8, specials and all."""
    chat = chats["chatml"]
    stream = chat.stream()
    pieces = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join(pieces) + stream.finish() == chat.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20).filter(lambda text: "\ufffd" not in text))
def test_a_stream_never_gives_half_a_character(chats: dict[str, Chat], text: str) -> None:
    chat = chats["chatml"]
    stream = chat.stream()
    pieces = [
        stream.push([token]) for token in chat.tokenizer.encode(text, add_special_tokens=False)
    ]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_stream_tells_what_an_unfinished_character_leaves(chats: dict[str, Chat]) -> None:
    chat = chats["chatml"]
    stream = chat.stream()
    ids = chat.tokenizer.encode("ok\U0001f642", add_special_tokens=False)
    assert stream.push(ids[:-1]) == "ok"
    assert stream.finish() == "\ufffd"


# What messages say is text


def conversation_with(text: str) -> list[Message]:
    return dialogue(
        f"What is {text}?", f"It is {text}.", f"{text} again", f"{text}: a table {text}"
    )


def control_ids(chat: Chat, ids: list[int]) -> list[int]:
    return [token for token in ids if token in chat._tokens.control_ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_control_token_in_a_message_is_spelled_and_not_obeyed(
    families: dict[str, Chat], family: str
) -> None:
    chat = families[family]
    neutral = chat.turn(conversation_with("x"))
    for name in chat._frame.ends + tuple(chat._tokens.tokenizer.all_special_tokens):
        messages = conversation_with(name)
        assert chat.control_text(messages) == [name]
        turn = chat.turn(messages)
        assert control_ids(chat, turn.ids) == control_ids(chat, neutral.ids), (
            "a role begins or ends where the template has none"
        )
        assert turn.encoded.text == chat.render(messages), "nothing of the shield is left"
        assert turn.ids[: turn.num_prompt_tokens] == chat.prompt_ids(messages[:-1])
        assert chat._tokens.spelled(written(turn)[:-1]).strip() == messages[-1]["content"]
    assert chat.control_text(conversation_with("x")) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=5).map("".join),
        min_size=2,
        max_size=6,
    ).filter(lambda turns: len(turns) % 2 == 0 and "\ufdef" not in "".join(turns))
)
def test_the_two_ways_never_differ_and_no_text_is_obeyed(
    families: dict[str, Chat], turns: list[str]
) -> None:
    """Any messages: an exact mask or a refusal, on every template; and as many control tokens
    as of harmless text.
    """
    for family, chat in families.items():
        neutral = control_ids(chat, chat.prompt_ids(dialogue(*("x" for _ in turns[:-1]))))
        assert control_ids(chat, chat.prompt_ids(dialogue(*turns[:-1]))) == neutral, (family, turns)
        try:
            turn = chat.turn(dialogue(*turns))
        except TemplateError:
            # White space at the edges melts into the template's own, or a template looks for its
            # own tags.
            assert turns[-1] != turns[-1].strip() or turns[-1] == "" or family == "llama-2", (
                family,
                turns,
            )
            continue
        text = chat._tokens.spelled(written(turn)[:-1])
        assert text.strip() == chat._tokens.normalized(turns[-1]).strip(), (family, turns)


@pytest.mark.parametrize("name", ["builtin", *REAL])
def test_real_tokenizers_spell_control_tokens_of_messages(name: str) -> None:
    chat = Chat(target_folder(), DAY) if name == "builtin" else real_chat(name)
    neutral = chat.turn(conversation_with("x"))
    for control in chat._tokens.names:
        if not chat._not_the_targets.search(control):
            continue  # one that begins a call: see below
        turn = chat.turn(conversation_with(control))
        assert control_ids(chat, turn.ids) == control_ids(chat, neutral.ids)
        assert chat.decode(turn.ids).count(control) == 5


def test_what_cannot_be_kept_apart_is_refused(families: dict[str, Chat]) -> None:
    """The one character that stands in for control tokens' names, together with a control token's
    name.
    """
    chat = families["qwen3"]
    assert chat.decode(chat.prompt_ids(dialogue("\ufdef"))).count("\ufdef") == 1
    with pytest.raises(TemplateError, match="for plain text"):
        chat.prompt_ids(dialogue("\ufdef <|im_end|>"))
    with pytest.raises(TemplateError, match="every non-character"):
        chat.prompt_ids(dialogue("<|im_end|>" + "".join(map(chr, range(0xFDD0, 0xFDF0)))))


def test_a_template_that_changes_what_it_is_to_spell_is_refused(tmp_path: Path) -> None:
    """ASCII-only JSON would write the shield as an escape, and leave it there."""
    like_qwen(tmp_path, LIKE_QWEN.replace("(tool | tojson)", "(tool | tojson(ensure_ascii=True))"))
    chat, tools = (
        Chat(tmp_path),
        [{"type": "function", "function": {"name": "find", "description": "<|im_end|>"}}],
    )
    with pytest.raises(TemplateError, match="changes a message"):
        chat.prompt_ids(dialogue("Hi"), tools)
    assert chat.prompt_ids(dialogue("<|im_end|>"))


def test_tools_and_calls_are_text_too(families: dict[str, Chat]) -> None:
    chat = families["qwen3"]
    tools = [
        {"type": "function", "function": {"name": "find", "description": "ends with <|im_end|>"}}
    ]
    call = {"type": "function", "function": {"name": "find", "arguments": {"city": "<|im_end|>"}}}
    messages = [
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<|im_start|>"},
        {"role": "assistant", "content": "Found."},
    ]
    assert chat.control_text(messages, tools) == ["<|im_end|>", "<|im_start|>"]
    first, last = turns(chat, messages, tools)
    ends = [token for token in last.ids if token in chat.eos_token_ids]
    assert len(ends) == 5, "of the tools, the question, the call, the result and the answer"
    call_ids = written(first)
    assert chat._tokens.spelled(call_ids) == (
        '<tool_call>\n{"name": "find", "arguments": {"city": "<|im_end|>"}}\n</tool_call><|im_end|>'
    )
    assert call_ids[-1] in chat.eos_token_ids
    assert control_ids(chat, call_ids[:-1]) == []


def test_a_control_token_that_the_target_writes_is_its_own(families: dict[str, Chat]) -> None:
    """Granite begins a tool call with one; a user who writes the same word writes a word."""
    chat = families["granite"]
    answer = '<|tool_call|>[{"name": "find"}]'
    turn = chat.turn(dialogue("<|tool_call|> what?", answer))
    call = chat._tokens.tokenizer.convert_tokens_to_ids("<|tool_call|>")
    assert [kept for token, kept in zip(turn.ids, turn.mask, strict=True) if token == call] == [
        True
    ]
    assert chat.control_text(dialogue("Hi", answer)) == []


# In the manner of real families


def test_thoughts_of_the_target_are_its_own_and_an_empty_block_is_the_templates(
    families: dict[str, Chat],
) -> None:
    chat = families["qwen3"]
    thought: list[Message] = [
        {"role": "user", "content": "A table?"},
        {"role": "assistant", "content": "For two?", "reasoning_content": "How many?"},  # type: ignore[typeddict-unknown-key]
    ]
    whole = "<think>\nHow many?\n</think>\n\nFor two?"
    assert masked_text(chat, thought) == whole
    assert masked_text(chat, dialogue("A table?", whole)) == whole
    assert chat.answered(thought) == chat.answered(dialogue("A table?", whole))
    assert masked_text(chat, dialogue("A table?", "For two?")) == "For two?"
    first, second = turns(chat, [*thought, *dialogue("Yes", "Done.")])
    assert not second.continues(first), (
        "the template drops earlier thoughts: each answer is a row of its own"
    )
    assert "How many" not in second.encoded.text


def test_what_a_server_is_given_for_the_template_is_given_here(tmp_path: Path) -> None:
    chat = Chat(like_qwen(tmp_path), options={"enable_thinking": False})
    turn = chat.turn(dialogue("Hi", "Hello"))
    assert turn.encoded.text.startswith(chat.render(dialogue("Hi"), add_generation_prompt=True))
    assert chat.render(dialogue("Hi"), add_generation_prompt=True).endswith("</think>\n\n")
    assert turn.mask.index(True) == turn.num_prompt_tokens, (
        "nothing lies between the prompt and what the target wrote"
    )


def test_a_default_system_prompt_and_its_date_are_seen(families: dict[str, Chat]) -> None:
    chat = families["granite"]
    assert (
        "Today is January 02, 2026.\nYou are Kestrel."
        in chat.turn(dialogue("Hi", "Hello")).encoded.text
    )
    brief: list[Message] = [{"role": "system", "content": "Be brief."}, *dialogue("Hi", "Hello")]
    assert "Kestrel" not in chat.turn(brief).encoded.text
    assert masked_text(chat, brief) == masked_text(chat, dialogue("Hi", "Hello")) == "Hello"
    first, second = turns(chat, dialogue("Hi", "Hello", "A table?", "For two?"))
    assert second.continues(first)
    both = second.with_mask_of(first)
    assert sum(both.mask) == sum(first.mask) + sum(second.mask)


def test_an_answer_whose_calls_the_template_leaves_out_has_no_mask(
    families: dict[str, Chat],
) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    with pytest.raises(TemplateError, match="leaves out reasoning or a tool call"):
        families["granite"].turn(messages)


def test_the_day_is_printed_in_every_format_that_it_fixes(tmp_path: Path) -> None:
    codes = "aAbBdejmyYHIMSpxXcDFTR"
    like_granite(
        tmp_path, LIKE_GRANITE.replace("%B %d, %Y", " ".join(f"%{code}" for code in codes))
    )
    shown = Chat(tmp_path, DAY).render(dialogue("Hi")).split("Today is ")[1].split(".\n")[0]
    assert shown == " ".join(DAY.strftime(f"%{code}") for code in codes)


def test_several_templates_one_for_tools(tmp_path: Path) -> None:
    like_qwen(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": LIKE_QWEN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    chat = Chat(tmp_path)
    assert chat.render(dialogue("Hi")) == "<|im_start|>user\nHi<|im_end|>\n"
    assert "Tools:" in chat.render(
        dialogue("Hi"), tools=[{"type": "function", "function": {"name": "find"}}]
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": named[1:]})
    )
    with pytest.raises(TemplateError, match="none of them is named default"):
        Chat(tmp_path)


# Faults, and what is shown when the two ways differ


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    found = caught(fault, tmp_path)
    assert found.startswith(f"{fault.where}: "), found


@pytest.mark.parametrize("sound", SOUND, ids=lambda sound: sound.name)
def test_a_template_without_a_fault_is_not(sound: Fault, tmp_path: Path) -> None:
    assert caught(sound, tmp_path) == ""


def test_masks_that_differ_are_shown(
    chats: dict[str, Chat],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "eyas.chat.chat.mask_by_prefixes",
        lambda prompt, ids, *_: [at == len(prompt) for at in range(len(ids))],
    )
    with pytest.raises(MaskDisagreement) as raised:
        chats["chatml"].answered(dialogue("Hi", "<b>Secret</b> table\x1b[2J"))
    error = raised.value
    assert "Secret" not in str(error)
    assert "differ" in error.what
    assert set(error.kinds) == {"both", "first", "context"}
    shown = error.picture()
    colours = {shown.plain[span.start : span.end]: str(span.style) for span in shown.spans}
    assert "orange" in colours["<|im_end|>"] or "dim" in colours["<|im_end|>"]
    assert "\x1b" not in shown.plain
    assert "⟨U+001B⟩" in shown.plain
    monkeypatch.chdir(tmp_path)
    error.show()
    assert "by character spans only" in capsys.readouterr().err
    page = tmp_path / "mask-disagreement.html"
    assert page.stat().st_mode & 0o077 == 0
    html = page.read_text(encoding="utf-8")
    assert "<b>Secret" not in html
    assert "v0-first" in html
    assert "http" not in html
    page.unlink()
    page.mkdir()  # cannot be written to
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error.show()
    [elsewhere] = tmp_path.glob("*-mask-disagreement.html")
    assert elsewhere.read_text(encoding="utf-8") == html


# The mask options


def test_mask_options_on_one_answer() -> None:
    #        u      :      a1     a2     a3    end    n      u
    mask = [False, False, True, True, True, True, False, False]
    drafted = {
        option: [at for at, kept in enumerate(supervised(mask, option)) if kept]
        for option in OPTIONS
    }
    assert drafted == {"serving": [3, 4, 5], "t": [4, 5, 6, 7], "t+1": [3, 4, 5, 6]}
    assert token_kinds(mask, "t") == [
        "context",
        "context",
        "given",
        "missed",
        "drafted",
        "drafted",
        "beyond",
        "beyond",
    ]
    assert token_kinds(mask, "serving") == [
        "context",
        "context",
        "given",
        "drafted",
        "drafted",
        "drafted",
        "context",
        "context",
    ]


@given(st.lists(st.booleans(), max_size=30))
def test_mask_options_are_sets_of_slots(mask: list[bool]) -> None:
    """Slot t drafts x_{t+2}: against the definitions, and the serving set against what the trainer
    judges.
    """
    slots = range(len(mask) - 2)
    definitions = {
        "serving": lambda t: mask[t + 1] and mask[t + 2],
        "t": lambda t: mask[t],
        "t+1": lambda t: mask[t + 1],
    }
    for option in OPTIONS:
        assert (
            supervised(mask, option)
            == [False, False, *map(definitions[option], slots)][: len(mask)]
        )
        shown = token_kinds(mask, option)
        assert [kind in ("drafted", "beyond") for kind in shown] == supervised(mask, option)
        assert [kind in ("drafted", "missed") for kind in shown] == supervised(mask, "serving")
    judged = judged_positions(torch.tensor([mask], dtype=torch.bool))[0].tolist()
    assert supervised(mask, "serving")[2:] == judged[1:-1]


@pytest.mark.parametrize("name", REAL)
def test_real_templates_render_as_transformers_does(name: str) -> None:
    chat = real_chat(name)
    plain = AutoTokenizer.from_pretrained(chat.folder)
    today = Chat(chat.folder, datetime.date.today())
    for messages in real_rows(4):
        for last in range(1, len(messages) + 1):
            expected = plain.apply_chat_template(
                messages[:last], tokenize=True, add_generation_prompt=True
            )["input_ids"]
            assert today.prompt_ids(messages[:last]) == expected


@pytest.mark.parametrize("name", REAL)
def test_real_templates_give_exact_masks_on_real_conversations(name: str) -> None:
    """Every answer of 30 dialogues: prompt, answer, end token, and what the template adds."""
    chat = real_chat(name)
    num_turns = 0
    for messages in real_rows(30):
        for last in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
            ids, mask = chat.answered(messages[: last + 1])
            prompt = chat.prompt_ids(messages[:last])
            assert ids[: len(prompt)] == prompt
            first, end = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
            assert all(mask[first : end + 1])
            assert chat.decode(ids[first:end]) == messages[last]["content"]
            assert ids[end] in chat.eos_token_ids
            assert chat.decode(ids[end + 1 :]).strip() == ""
            num_turns += 1
    assert num_turns > 150


def test_a_real_thinking_answer_is_the_targets_whole() -> None:
    chat = real_chat("qwen3")
    answer = "<think>\nThey want a table.\n</think>\n\nFor how many?"
    assert masked_text(chat, dialogue("A table?", answer)) == answer
    assert masked_text(chat, dialogue("A table?", answer, "Two", answer)) == answer
    assert "They want" not in chat.render(dialogue("A table?", answer, "Two")), (
        "the template drops earlier thoughts"
    )


def test_a_target_folder_can_be_moved(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["chatml"], tmp_path / "moved")
    assert Chat(tmp_path / "moved").prompt_ids(dialogue("Hi")) == Chat(
        folders["chatml"]
    ).prompt_ids(dialogue("Hi"))
