"""Where names are searched for: in prose, and never in code, whatever stands around it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.code import code_spans
from eyas.language import CODE_ONLY, UNKNOWN
from eyas.privacy.detector import Detector
from eyas.privacy.findings import mask
from eyas.privacy.passages import passages
from eyas.privacy.pii import PrivacyConfig

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


@pytest.mark.parametrize("code", CODE)
def test_code_is_code_alone_and_below_a_request(code):
    assert languages(code) == [[CODE_ONLY]]
    request = f"Please explain what this does:\n{code}"
    (found,) = passages([request])
    assert [one.is_code for one in found] == [False, True]
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


def test_prose_has_the_language_of_its_conversation():
    assert languages("Wie ist bitte Ihr Name? Ich brauche ihn.", "Nora Berg") == [["de"], ["de"]]
    assert languages("Nora Berg") == [[UNKNOWN]]


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
    """Squares of 20,000 would not end."""
    for sign in ("a.", "(", "\\(", "{{", "$a", "f(=", "= ", "/a", "A_", "<a", "x[", "1+", "a -b "):
        assert passages([sign * 20_000])
