"""Tokens to text in any portions, the bytes of tokens, calls out of words."""

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.chat import Chat, TextStream
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import CallReader, whole_calls
from tests.tiny import tiny_target

TOKENS = st.lists(st.integers(0, 319), max_size=150)
CUTS = st.lists(st.integers(0, 150), max_size=20)
CALL = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Chat(tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def tokenizer(chat):
    return Tokenizer(chat)


def portions(sequence, cuts):
    edges = [0, *sorted(min(cut, len(sequence)) for cut in cuts), len(sequence)]
    return [sequence[start:end] for start, end in itertools.pairwise(edges)]


def streamed(tokenizer, tokens, cuts):
    stream = tokenizer.stream()
    return "".join(map(stream.push, portions(tokens, cuts))) + stream.finish()


def read(text, cuts):
    reader = CallReader()
    parts = [part for portion in portions(text, cuts) for part in reader.push(portion)]
    return reader, whole_calls(parts + reader.finish())


@given(tokens=TOKENS, cuts=CUTS)
def test_streamed_text_is_decode(chat, tokenizer, tokens, cuts):
    assert streamed(tokenizer, tokens, cuts) == chat.decode(tokens)


@given(values=st.lists(st.integers(128, 255), max_size=120), cuts=CUTS)
def test_streamed_bytes_are_decode(tokenizer, chat, values, cuts):
    of_bytes = {tokenizer.piece(token): token for token in range(3, 320)}
    tokens = [of_bytes[bytes([value])] for value in values]
    assert streamed(tokenizer, tokens, cuts) == chat.decode(tokens)


def test_broken_bytes_do_not_pile_up():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    stream = TextStream(decode)
    text = "".join(stream.push([0x80]) for _ in range(5000)) + stream.finish()
    assert text == "\N{REPLACEMENT CHARACTER}" * 5000
    assert longest < 100


@given(text=st.text())
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer, text):
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text))) == text.encode()


def test_least_tokens_is_a_lower_bound(tokenizer):
    text = "The address is 71 North Street." * 20
    assert tokenizer.least_tokens(len(text)) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens(10**6) > 1000


@given(
    cuts=CUTS, words=st.sampled_from(["", "I will. ", " <tool ", "a\n\n"]), calls=st.integers(0, 3)
)
def test_words_and_calls_are_separated(cuts, words, calls):
    _, parts = read(words + CALL * calls, cuts)
    texts = [part for part in parts if isinstance(part, str)]
    assert "".join(texts) == (words.rstrip() if calls else words)
    found = [part for part in parts if not isinstance(part, str)]
    assert [(call.name, json.loads(call.arguments)) for call in found] == [
        ("f", {"a": "</tool_call>"})
    ] * calls


@given(cuts=CUTS, length=st.integers(0, 200))
def test_a_cut_call_is_a_part_of_a_call(cuts, length):
    text, begun = f"I will. {CALL}", CALL.index("{", CALL.index("{") + 1)
    reader, parts = read(text[:length], cuts)
    words = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if not isinstance(part, str)]
    if length <= len("I will. ") + begun:
        assert (words, calls, reader.num_calls) == (text[:length], [], 0)
    else:
        (call,) = calls
        assert (words, call.name) == ("I will.", "f")
        assert '{"a": "</tool_call>"}'.startswith(call.arguments)
        assert text.startswith(call.arguments, len("I will. ") + begun)


NO_NAMES = [f'{{"name": "{name}", "arguments": {{}}}}' for name in (r"\x", r"\ud8", "a\tb")]


def test_broken_json_between_tags():
    for block, words, arguments in (
        ('{"name": "f", "arguments": {"a": 1}', " x", '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1', " x", '{"a": 1'),
        ('{"name": "f", "arguments": {"a": "b}\n', "", '{"a": "b}\\n</tool_call> x'),
        ('{"name": "f", "arguments": {"a":\n"b\n\tc"}}', " x", '{"a":\n"b\\n\\tc"}'),
        *((bad, f"<tool_call>{bad}</tool_call> x", None) for bad in NO_NAMES),
        ('{"arguments": {"a": "\\ud800"}, "name": "f"}', " x", '{"a": "?"}'),
        ('{"a": "b}\n', '<tool_call>{"a": "b}\n</tool_call> x', None),
    ):
        parts = read(f"<tool_call>{block}</tool_call> x", [])[1]
        assert "".join(part for part in parts if isinstance(part, str)) == words
        calls = [part.arguments for part in parts if not isinstance(part, str)]
        assert calls == ([] if arguments is None else [arguments])


@given(text=st.text(alphabet='<tool_cal>/{}" \n', max_size=60), cuts=CUTS)
def test_text_without_a_call_is_all_shown(text, cuts):
    reader, parts = read(text, cuts)
    assert reader.num_calls == 0
    assert "".join(parts) == text


@given(cuts=CUTS, count=st.integers(1, 3))
def test_a_tag_may_hold_a_list_of_calls(cuts, count):
    calls = [{"name": f"f{number}", "arguments": {"a": [number]}} for number in range(count)]
    text = f"<tool_call>{json.dumps(calls)}</tool_call>"
    _, parts = read(text, cuts)
    found = [(part.name, json.loads(part.arguments)) for part in parts if part]
    assert found == [(one["name"], one["arguments"]) for one in calls]


@pytest.mark.parametrize(
    "block", ["[]", "{}", '[{"name": "f"}, 7]', '[[{"name": "f"}]]', '"f"', "[" * 5000]
)
def test_a_list_that_is_no_calls_is_text(block):
    text = f"<tool_call>{block}</tool_call>"
    assert "".join(read(text, [])[1]) == text


@pytest.mark.parametrize("begun", ["", '"', '{"name": "', '{"name": "f", "arguments": {"a": "'])
def test_each_character_of_a_block_is_read_once(begun):
    """Four times the text takes four times the time, not sixteen times."""

    def seconds(number):
        reader = CallReader()
        reader.push(f"<tool_call>{begun}")
        start = time.process_time()
        for _ in range(number):
            reader.push('"word" ')
        return time.process_time() - start

    ratios = [seconds(4000) / seconds(1000) for _ in range(3)]
    assert min(ratios) < 8
