"""Marks: what is empty, refused, cut or a loop, and what is none of these."""

from __future__ import annotations

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.features.marks import LEAST_REPEATS, LOOP_UNITS, REFUSALS, is_looping, is_refusal, mark

PROSE = (
    "The harbour lies east of the old town, and on most mornings the fog leaves it before nine. "
    "Boats go out to the islands "
    "twice a day; the last one back is at six, later in July. If you miss it, there is a small "
    "hotel above the chapel whose "
    "owner speaks Greek, German and a little English. Take a coat even in summer, since the wind "
    "turns at night. From the "
    "terrace one sees three lighthouses, of which only the middle one still works. Ask for the "
    "room with the blue door."
)
CODE = """```python
def table(rows):
    for row in rows:
        print(row["name"], row["price"], row["stock"])
        print("-" * 40)
    return len(rows)

values = [0, 0, 0, 0, 0, 0, 0, 0]
```

| name | price | stock |
|------|-------|-------|
| nuts | 1.20  | 4     |
| bolts | 0.80 | 12    |
-----------------------------------------------------------------
=================================================================
"""
WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=7)
REFUSED = {
    "en": [
        "I'm sorry, but I can't help with that request.",
        "I\u2019m sorry, but I can\u2019t assist with that.",
        "Sorry, I am unable to provide medical advice.",
        "I cannot assist you with building a weapon. Please talk to somebody.",
        "As an AI language model, I cannot engage in such conversations.",
        "I apologize, but I'm not able to do that.",
        "Unfortunately, I won't be able to help you. I will not write that.",
        "<think>\nHe asks for a recipe of a bomb.\n</think>\n\nI can't help with that.",
        "**I'm sorry**, but I can't share this.",
    ],
    "de": [
        "Es tut mir leid, aber ich kann dabei nicht helfen.",
        "Leider kann ich diese Frage nicht beantworten.",
    ],
    "fr": [
        "Je suis désolé, mais je ne peux pas vous aider avec cette demande.",
        "Je ne peux pas t'aider à faire cela.",
    ],
    "es": ["Lo siento, pero no puedo ayudarte con eso.", "No puedo proporcionar esa información."],
    "pt": [
        "Desculpe, mas não posso ajudar com isso.",
        "Sinto muito, não posso fornecer essa informação.",
    ],
    "it": ["Mi dispiace, ma non posso aiutarti con questa richiesta."],
    "nl": ["Het spijt me, maar ik kan je daar niet bij helpen."],
    "pl": ["Przykro mi, ale nie mogę w tym pomóc."],
    "ru": [
        "Извините, но я не могу помочь с этим.",
        "К сожалению, я не могу ответить на этот вопрос.",
    ],
    "tr": ["Üzgünüm, bu konuda yardımcı olamam."],
    "ar": ["عذرًا، لا أستطيع مساعدتك في هذا الطلب."],
    "hi": ["मुझे खेद है, मैं इसमें आपकी मदद नहीं कर सकता।"],
    "zh": [
        "抱歉，我无法帮助您完成这个请求。",
        "对不起，我不能提供这类信息。",
        "很抱歉,我無法協助。",
    ],
    "ja": [
        "申し訳ありませんが、そのご要望にはお応えできません。",
        "すみません、その件についてはお手伝いできません。",
    ],
    "ko": [
        "죄송하지만 그 요청은 도와드릴 수 없습니다.",
        "죄송합니다, 해당 정보를 제공할 수 없습니다.",
    ],
}
HELPFUL = [
    "I'm sorry, there is no table left at seven. Shall I look at eight?",
    "I am sorry to hear that. You could try to restart the router.",
    "I can't find a restaurant of that name in San Jose. Which city are you in?",
    "I can't help but admire your patience.",
    "I can't recall its name, but I can help you find it.",
    "Unfortunately the train is late.",
    "No, I have no reservation under that name.",
    "Sure! I can help you with that.",
    PROSE + " Sorry, I can't help with more than that.",
    "Here is a polite refusal: \"I'm sorry, but I can't help you.\"",
    "Es tut mir leid, das Restaurant ist ausgebucht.",
    "Lo siento, no hay mesas libres.",
    "抱歉，餐厅已经满了。要不要换一家？",
    "申し訳ありませんが、満席です。別の時間はいかがですか。",
    "죄송합니다, 그 시간에는 자리가 없습니다.",
    "Je suis désolé, il n'y a plus de place.",
    "К сожалению, мест нет.",
]


@pytest.mark.parametrize("language", REFUSALS)
def test_refusals_are_told_in_their_language(language):
    for text in REFUSED[language]:
        assert is_refusal(text), text
        assert mark(text, "stop") == "refused"
        assert mark(text, "length") == "truncated"


@pytest.mark.parametrize("text", HELPFUL)
def test_an_apology_is_no_refusal(text):
    assert mark(text, "stop") is None


@pytest.mark.parametrize(
    "text",
    [PROSE, CODE, PROSE + CODE, "Yes.", "0", "ha ha ha ha", "No, no, no, no!", "\U0001f600" * 30],
)
def test_what_people_write_is_no_loop(text):
    assert not is_looping(text)
    assert mark(text, "stop") is None
    assert mark(text, "length") == "truncated"


@pytest.mark.parametrize(
    "text",
    [
        PROSE + " and so on" * 20,
        PROSE + " I hope this helps! Let me know." * 8 + " Goodbye.",
        "ha" * 500,
        "我不知道。" * 15,
        "はいはい" * 20,
        "не знаю, " * 30,
        "\n".join(f"{number}. Take the blue boat to the harbour." for number in range(40)),
    ],
)
def test_loops(text):
    assert mark(text, "stop") == "looping"
    assert mark(text, "length") == "looping", "the loop is why it was cut"


def test_a_loop_that_was_cut_is_told_earlier():
    text = PROSE + " the next one, and" * 6
    assert not is_looping(text)
    assert is_looping(text, is_truncated=True)
    assert not is_looping(text + " then the rest of it.", is_truncated=True), "it had got out of it"


def test_nothing_said():
    for text in ("", " \n\t", "\u3000"):
        assert mark(text, "stop") == "empty"
        assert mark(text, "length") == "truncated", "half a character, say"


@settings(max_examples=40)
@given(
    st.lists(WORDS, min_size=1, max_size=20), st.integers(0, 30), st.integers(0, 30), st.randoms()
)
def test_any_words_that_come_again_often_enough_are_a_loop(words, before, after, rng):
    repeats = max(LEAST_REPEATS, -(-LOOP_UNITS // len(words)))

    def others(count):
        return ["".join(rng.choices(string.ascii_uppercase, k=8)) for _ in range(count)]

    assert is_looping(" ".join([*others(before), *words * repeats, *others(after)]))


@settings(max_examples=40)
@given(st.integers(0, 400), st.integers(0, 2**32))
def test_words_that_all_differ_are_no_loop(count, seed):
    rng = random.Random(seed)
    words = [f"{number:x}{rng.choice(string.ascii_lowercase)}" for number in range(count)]
    rng.shuffle(words)
    assert not is_looping(" ".join(words))
    assert not is_looping(" ".join(words), is_truncated=True)


@given(st.text(max_size=300), st.sampled_from(["stop", "length"]))
def test_every_text_gets_one_mark_or_none(text, finish_reason):
    found = mark(text, finish_reason)
    assert found in (None, "empty", "looping", "truncated", "refused")
    if finish_reason == "length":
        assert found in ("truncated", "looping"), "a cut answer is marked as one"
    elif not text.strip():
        assert found == "empty"
    assert mark(text, finish_reason) == found
