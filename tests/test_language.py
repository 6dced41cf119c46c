"""Language: told from prose, left open where there is none, and no row dropped on a guess."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.filters import in_languages, row_language
from eyas.data.ledger import Drop, SourceRow
from eyas.errors import ConfigError
from eyas.language import UNKNOWN, language
from tests.source_rows import row

PROMPTS = {
    "en": "Write a short story about a dragon who is afraid of fire.",
    "de": "Was ist der Unterschied zwischen einem Vertrag und einer Vereinbarung?",
    "fr": "Quelle est la différence entre une liste et un tuple en Python ?",
    "es": "¿Cuál es la capital de Francia y cuántos habitantes tiene?",
    "it": "Scrivi una breve poesia sull'autunno e sulle foglie che cadono.",
    "pt": "Como faço para cozinhar arroz sem que ele fique grudado na panela?",
    "nl": "Schrijf een kort gedicht over de herfst en de vallende bladeren.",
    "pl": "Jak ugotować ryż, żeby się nie skleił?",
    "ru": "Напиши, пожалуйста, короткое стихотворение о том, как падают листья.",
    "zh": "请写一首关于秋天的短诗，要有落叶。",
    "ja": "秋についての短い詩を書いてください。",
    "ko": "가을에 관한 짧은 시를 써 주세요.",
    "ar": "اكتب قصيدة قصيرة عن الخريف وعن الأوراق التي تسقط.",
}
CODE = (
    "for (int i = 0; i < names.length; i++) {\n    print(names[i]);\n    while (is_open(file)) "
    "read(file);\n}\n"
)
NOTHING = ["", "?", "ok", "你好", "0x1f 0x2e 0x3d 0x4c 0x5b", "1+1=?", "12 34 56 78 90 12 34"]
NOTHING += ["https://example.org/where/is/the/end", f"```\n{CODE}```", CODE]


@pytest.mark.parametrize("code", PROMPTS)
def test_the_language_is_told(code):
    assert language(PROMPTS[code]) == code
    assert row_language(row(PROMPTS[code], "OK")) == code


@pytest.mark.parametrize("code", ["en", "de", "zh"])
@pytest.mark.parametrize(
    "mixed", ["{}\n```python\n{}```", "```\n{1}```\n{0}", "{}\n{}", "{}\n```\n{} cut short"]
)
def test_code_does_not_hide_it(code, mixed):
    assert language(mixed.format(PROMPTS[code], CODE)) == code


def test_neither_commands_nor_capitals_hide_it():
    assert language("With arjun, how do I do this: Scan a URL for GET parameters?") == "en"
    assert language(PROMPTS["en"].upper()) == "en"


@pytest.mark.parametrize("text", NOTHING)
def test_where_nothing_is_said_it_is_left_open(text):
    assert language(text) == UNKNOWN
    assert in_languages(["de"])(row(text)) == row(text)


def test_only_what_is_asked_for_is_kept():
    keep = in_languages(["en", "de"])
    found = {code: keep(row(text)) for code, text in PROMPTS.items()}
    assert {code for code, result in found.items() if isinstance(result, SourceRow)} == {"en", "de"}
    assert found["fr"] == Drop("language", "it is in 'fr'")


@given(st.text(st.characters()))
def test_any_text_has_a_language_or_none(text):
    assert language(text).isalpha()


@pytest.mark.parametrize("code", ["english", "pcm", "zxx"])
def test_an_unknown_code_is_refused(code):
    with pytest.raises(ConfigError, match=code):
        in_languages(["en", code])
