"""Where names are searched for: prose by language, and never in code, whatever stands around it."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.code import code_spans
from eyas.language import CODE_ONLY, UNKNOWN
from eyas.privacy.detector import Detector
from eyas.privacy.findings import mask
from eyas.privacy.passages import _words, passages
from eyas.privacy.pii import PrivacyConfig

ENGLISH = [
    "My name is Susan Miller.",
    "mr. elliott flew to oslo on friday morning",
    "Thanks, Sarah!\nCan you call me back?",
    "John Smith\n12 Main Street\nSpringfield 62704",
    "Dear Sarah,\nplease send the report to Tom.",
]
OTHER = {
    "Mein Kunde hat die Rechnung nicht bezahlt": "de",
    "Kannst du mir bitte sagen, wie das Wetter in der nächsten Woche wird?": "de",
    "¿Cuándo llegará mi pedido a la tienda?": "es",
    "Je voudrais réserver une table pour ce soir.": "fr",
    "Scrivi una lettera al direttore della banca": "it",
    "Como posso mudar a minha senha no aplicativo?": "pt",
    "Kunt u mij vertellen waar mijn bestelling is?": "nl",
    "Proszę napisać krótki list do sąsiada.": "pl",
    "Напиши короткое письмо моему соседу.": "ru",
    "请给我的邻居写一封短信。": "zh",
}
CODE = [
    "def total(nums):\n    # ask Bob Miller\n    return sum(nums) / len(nums)\n",
    "```python\nemma = Olga(nums)\n```",
    "`ls -la`",
    "ls -la /home/miriam/Documents",
    "git commit -m 'Ask Miriam'",
    "sudo apt-get install nora",
    "const olga = require('miriam');\nolga.start(port, () => {\n  console.log(olga);\n});",
    "SELECT name FROM customers WHERE city = 'Paris';",
    "#include <stdio.h>\nint main(void) {\n  return olga(3);\n}",
    "$x^2 + \\alpha = \\frac{1}{2}$",
    "/home/miriam/Olga/report.txt",
    "https://example.com/miriam/olga",
]


def languages(*texts):
    return [[one.language for one in of_text] for of_text in passages(texts)]


@pytest.mark.parametrize("text", ENGLISH)
def test_english_is_one_passage(text):
    assert languages(text) == [["en"]]


@pytest.mark.parametrize("text", OTHER)
def test_a_short_text_in_another_language_is_not_english(text):
    (found,) = languages(text)
    assert set(found) <= {OTHER[text], UNKNOWN}
    assert not Detector(PrivacyConfig()).find(text)


@pytest.mark.parametrize("code", CODE)
def test_code_is_code_alone_and_below_a_request(code):
    assert languages(code) == [[CODE_ONLY]]
    request = f"Please explain what this does:\n{code}"
    (found,) = passages([request])
    assert [one.language for one in found] == ["en", CODE_ONLY]
    assert found[1].start == len(request) - len(code)


@pytest.mark.parametrize(
    "piece", ["len(nums)", "user_name", "--output", "{{olga}}", "myClass", "report.pdf", "%(nora)s"]
)
def test_code_within_a_sentence_is_left_out(piece):
    text = f"What does {piece} do, and why did my colleague Susan Miller write it?"
    assert [text[start:end] for start, end in code_spans(text)] == [piece]
    assert mask(text, Detector(PrivacyConfig()).find(text)).endswith("colleague <PERSON> write it?")


@pytest.mark.parametrize(
    "prose",
    [
        "She paid $5 to Ann and $10 to Bob Miller.",
        "* Ann Miller\n* Bob Smith",
        "Dear Ann,\nplease come to the meeting and/or call Bob Miller.",
        "return the book to Susan Miller",
        "let me know (Susan has the number)",
        "> Susan wrote that she will come",
        "for the customer Ann Miller: what can we do?",
        '-- \nBob Miller, "the boss"',
    ],
)
def test_prose_with_signs_is_no_code(prose):
    assert code_spans(prose) == []


def test_a_request_and_its_german_text_are_two_passages():
    request = "Please translate the following text into English:\n"
    german = "Mein Kunde hat die Rechnung nicht bezahlt, und der Betrag ist fällig."
    (found,) = passages([request + german])
    assert [(one.language, one.end) for one in found] == [
        ("en", len(request)),
        ("de", len(request + german)),
    ]


def test_a_turn_that_says_little_has_the_language_of_its_conversation():
    said_alone = "Nora Berg"
    assert languages(said_alone) == [[UNKNOWN]]
    assert languages("What is your name, please?", said_alone) == [["en"], ["en"]]
    assert "en" not in languages("Wie ist bitte Ihr Name?", said_alone)[1]


def test_json_is_searched_in_its_values():
    text = 'Summarize this record: {"name": "Susan Miller", "note": "she called about the bill"}'
    assert "<PERSON>" in mask(text, Detector(PrivacyConfig(policy="mask")).find(text))


@given(
    st.lists(st.text(st.sampled_from("aB1 .,:;\n`$\\({[<>=-/_\"'éя你"), max_size=60), max_size=3)
)
def test_passages_cover_a_text_in_order(texts):
    for text, found in zip(texts, passages(texts), strict=True):
        assert "".join(text[one.start : one.end] for one in found) == text
        assert all(one.start < one.end for one in found)
        assert all(one.language != after.language for one, after in itertools.pairwise(found))


def test_a_hostile_text_takes_time_that_grows_with_its_length_only():
    """Each sign that begins a pattern, 20,000 times: squares of that would not end."""
    for sign in ("a.", "(", "\\(", "{{", "$a", "f(=", "= ", "/a", "A_", "<a", "x[", "1+", "a -b "):
        assert passages([sign * 20_000])


def test_words_are_in_one_list():
    english, other, shared = _words()
    assert not english & other
    assert not other & shared
    assert json.dumps(sorted(english | other | shared)).isascii(), "folded"
