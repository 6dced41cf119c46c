"""Chat templates and masks, on tiny, broken and real tokenizers."""

import datetime
import gzip
import itertools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eyas.chat import Chat
from eyas.errors import MissingInputError, TemplateError
from eyas.records import Message
from tests.tiny import TEMPLATE, tiny_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
REAL = ("granite-3.1", "qwen3")
DAY = datetime.date(2026, 1, 2)
# The ways of the field: Llama 3 trims what was said; Qwen3 opens the last answer with a thinking block; Llama 2 and
# Mistral put a space on both sides; Granite prints the date.
TRIMS = TEMPLATE.replace("message['content']", "message['content'] | trim")
THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPACES = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>' + message['content'] + '<|im_start|>' }}"
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


def said(*contents: str) -> list[Message]:
    """A conversation whose turns alternate, the user's first."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def masked_text(chat: Chat, messages: list[Message], finish_reason: str = "stop") -> str:
    ids, mask = chat.answered(messages, finish_reason)
    return chat.decode(token for token, kept in zip(ids, mask, strict=True) if kept)


def test_the_mask_covers_the_answer_and_its_end_token_only(chats: dict[str, Chat]) -> None:
    chat = chats["chatml"]
    messages = said("A table?", "For two.", "Yes.", "In San Jose.")
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
@given(st.lists(st.text(max_size=12), min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0))
def test_whatever_was_said_the_mask_is_exact_or_refused(chats: dict[str, Chat], turns: list[str]) -> None:
    messages = said(*turns)
    for name in ("chatml", "trims", "thinks", "spaces"):
        chat = chats[name]
        try:
            ids, mask = chat.answered(messages)
        except TemplateError:
            # Only where the text itself makes it so: white space that is trimmed away or melts into the template's own.
            assert name == "trims" or turns[-1] != turns[-1].strip() or turns[-1] == "", (name, turns)
            continue
        prompt = chat.prompt_ids(messages[:-1])
        assert ids[: len(prompt)] == prompt
        assert len(ids) == len(mask)
        assert masked_text(chat, messages).strip() == turns[-1].strip()
        assert sum(token in chat.eos_token_ids for token, kept in zip(ids, mask, strict=True) if kept) == 1


@pytest.mark.parametrize(
    "answer", ["", "\n", " Hello", "Hello\n", "\u00e9\U0001f642", "a  b", "<|im_end|>", "assistant", "user\nHi"]
)
def test_awkward_answers(chats: dict[str, Chat], answer: str) -> None:
    chat = chats["chatml"]
    ids, mask = chat.answered(said("Hi", answer))
    rendered = chat._tokens.spelled([token for token, kept in zip(ids, mask, strict=True) if kept])
    assert rendered == answer + "<|im_end|>"


def test_an_opening_by_the_template_is_not_the_targets(chats: dict[str, Chat]) -> None:
    assert masked_text(chats["thinks"], said("Hi", "Hello")) == "Hello"


def test_an_answer_that_the_template_trims_has_no_mask(chats: dict[str, Chat]) -> None:
    assert masked_text(chats["trims"], said("Hi ", "Hello")) == "Hello"
    with pytest.raises(TemplateError, match="as the target wrote it"):
        chats["trims"].answered(said("Hi", "Hello "))


def test_spaces_of_the_template_join_the_answer(chats: dict[str, Chat]) -> None:
    ids, mask = chats["spaces"].answered(said("Hi", "table"))
    assert masked_text(chats["spaces"], said("Hi", "table")) == " table"
    assert mask[-2:] == [False, True], "the space before the end token was never written by the target"
    assert ids[-1] in chats["spaces"].eos_token_ids


def test_a_fixed_date_is_the_same_tomorrow(folders: dict[str, Path], chats: dict[str, Chat]) -> None:
    assert chats["dates"].render(said("Hi")).startswith("It is 02 Jan 2026.\n<|im_start|>user\nHi")
    today = datetime.date.today()
    assert Chat(folders["dates"], today).render(said("Hi")) == Chat(folders["dates"]).render(said("Hi"))


def test_a_conversation_that_the_template_refuses_says_why(chats: dict[str, Chat]) -> None:
    with pytest.raises(TemplateError, match="Roles must alternate"):
        chats["alternates"].render([*said("Hi"), *said("Hi")])


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (None, "has no chat template"),
        (TEMPLATE.replace("message['content'] +", "message['content'] | upper +"), "as the target wrote it"),
        (TEMPLATE.replace("'<|im_end|>'", "'<|endoftext|>'"), "does not end an answer"),
        (TEMPLATE.replace("+ '<|im_end|>'", "+ ' bye <|im_end|>'"), "does not end an answer"),
        ("{{ messages | length }} " + TEMPLATE, "as the target wrote it"),
        (TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", ""), "its generation prompt lacks"),
        ("{% if messages %}" + TEMPLATE, "refuses a conversation"),
    ],
)
def test_a_template_that_cannot_be_trusted_is_refused_at_once(tmp_path: Path, template: str | None, what: str) -> None:
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
    pieces = [stream.push([token]) for token in chat._encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_stream_tells_what_an_unfinished_character_leaves(chats: dict[str, Chat]) -> None:
    chat = chats["chatml"]
    stream = chat.stream()
    ids = chat._encode("ok\U0001f642")
    assert stream.push(ids[:-1]) == "ok"
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("name", REAL)
def test_real_templates_render_as_transformers_does(name: str) -> None:
    chat = real_chat(name)
    plain = AutoTokenizer.from_pretrained(chat.folder)
    today = Chat(chat.folder, datetime.date.today())
    for messages in real_rows(6):
        for last in range(1, len(messages) + 1):
            expected = plain.apply_chat_template(messages[:last], tokenize=True, add_generation_prompt=True)["input_ids"]
            assert today.prompt_ids(messages[:last]) == expected


@pytest.mark.parametrize("name", REAL)
def test_real_templates_give_exact_masks_on_real_conversations(name: str) -> None:
    """Every assistant turn of 60 dialogues: prompt, answer, end token, and what the template adds."""
    chat = real_chat(name)
    num_turns = 0
    for messages in real_rows(60):
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
    assert num_turns > 300


def test_a_real_thinking_answer_is_the_targets_whole() -> None:
    chat = real_chat("qwen3")
    answer = "<think>\nThey want a table.\n</think>\n\nFor how many?"
    assert masked_text(chat, said("A table?", answer)) == answer
    assert masked_text(chat, said("A table?", answer, "Two", answer)) == answer
    assert "They want" not in chat.render(said("A table?", answer, "Two")), "the template drops earlier thoughts"


def test_a_target_folder_can_be_moved(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["chatml"], tmp_path / "moved")
    assert Chat(tmp_path / "moved").prompt_ids(said("Hi")) == Chat(folders["chatml"]).prompt_ids(said("Hi"))
