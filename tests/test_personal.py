"""Personal data: what is found and what is not, what masking leaves, and that nothing is fetched for it."""

import gzip
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.personal import EXCERPT, OVERLAP, TYPES, WINDOW, PersonalData, PersonalPolicy, excerpt, find, luhn, mask, merged
from eyas.data.rows import Drop, Finding, Row

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

FOUND = {
    "write to Ana.Lee+x@mail.example.co.uk.": "write to <EMAIL_ADDRESS>.",
    "ANA@EXAMPLE.COM,bob@example.org": "<EMAIL_ADDRESS>,<EMAIL_ADDRESS>",
    "Phone:212-555-0134": "Phone:<PHONE_NUMBER>",
    "(415) 555-0134 ext. 12": "<PHONE_NUMBER>",
    "415.555.0134!": "<PHONE_NUMBER>!",
    "my 4155550134": "my <PHONE_NUMBER>",
    "1-800-555-0199": "<PHONE_NUMBER>",
    "my number is 5550134": "my number is <PHONE_NUMBER>",
    "+44 (0)20 7946 0958?": "<PHONE_NUMBER>?",
    "07700 900123": "<PHONE_NUMBER>",
    "020 7946 0958": "<PHONE_NUMBER>",
    "03.93.92.16.85": "<PHONE_NUMBER>",
    "(415) 555-0134 (415) 555-0199 07700 900123": "<PHONE_NUMBER> <PHONE_NUMBER> <PHONE_NUMBER>",
    "2 (415) 555-0134 2": "2 <PHONE_NUMBER> 2",
    "call 78 651 450 now": "call <PHONE_NUMBER> now",
    "4111 1111 1111 1111 12/27 123": "<CREDIT_CARD> 12/27 123",
    "4111-1111-1111-1111-123": "<CREDIT_CARD>-123",
    "Visa 4222222222222.": "Visa <CREDIT_CARD>.",
    "3782 822463 10005": "<CREDIT_CARD>",
    "IBAN DE89 3704 0044 0532 0130 00, please": "IBAN <IBAN_CODE>, please",
    "gb29nwbk60161331926819": "<IBAN_CODE>",
    "my ssn is 219-45-9876": "my ssn is <US_SSN>",
    "from 8.8.8.8 and 2a00:1450:4001:81b::200e": "from <IP_ADDRESS> and <IP_ADDRESS>",
}
NOT_FOUND = [
    "lodash@4.17.21",
    "@pytest.fixture",
    "a @ b.com",
    "on 2023-11-05 10:30 or 05.11.2023",
    "the 2015-2016 season, call it 1997 2017",
    "ISBN 978-3-16-148410-0",
    "pages 100-200 300",
    "numbers 10 20 30 40 50 60",
    "pi is 3.1415926535",
    "$1,234,567,890 and 1 234 567 890",
    "1600000000000",
    "order 4111 1111 1111 1112",
    "DE12 3456 7890 1234 5678 90",
    "at 192.168.0.1, 127.0.0.1 and 2001:db8::1",
    "std::vector<bad::cafe>",
    "999999999",
    "8 * 7 = 56, 12-15-2024, room 1204",
]


@pytest.mark.parametrize("text", FOUND)
def test_found(text):
    findings = find(text)
    assert mask(text, findings) == FOUND[text]
    assert {finding.type for finding in findings} <= set(TYPES)


@pytest.mark.parametrize("text", NOT_FOUND)
def test_not_found(text):
    assert find(text) == []


def test_nothing_is_fetched_and_nothing_is_cached(tmp_path):
    """In a new process, where the first use of the suffix list and of the analyser happens, with the network cut."""
    script = (
        "import socket, sys\n"
        "def cut(*args, **kwargs): raise SystemExit('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = cut\n"
        "from eyas.data.personal import find\n"
        "assert [one.type for one in find('ana@example.com')] == ['EMAIL_ADDRESS']\n"
    )
    places = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TLDEXTRACT_CACHE": str(tmp_path / "tld")}
    done = subprocess.run([sys.executable, "-c", script], env=places, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*suffix*")) == []


@given(st.text(alphabet="0123456789", min_size=11, max_size=18))
def test_one_check_digit_of_ten_is_right(digits):
    assert sum(luhn(digits + last) for last in "0123456789") == 1


SPANS = st.tuples(st.sampled_from(TYPES), st.integers(0, 30), st.integers(1, 9)).map(
    lambda one: Finding(one[0], one[1], one[1] + one[2])
)


@given(st.lists(SPANS))
def test_joined_findings_cover_the_same_places_without_overlap(findings):
    joined = merged(findings)
    assert all(first.end <= second.start for first, second in itertools.pairwise(joined))
    places = [{place for one in some for place in range(one.start, one.end)} for some in (findings, joined)]
    assert places[0] == places[1]
    assert {one.type for one in joined} <= {one.type for one in findings}


VALUES = ["ana.lee@example.com", "(415) 555-0134", "4242 4242 4242 4242", "GB29NWBK60161331926819", "219-45-9876", "8.8.8.8"]
WORDS = ["please", "call", "the", "card.", "Thanks!", "for 2 people", "at 7:30", "\n", "é", "🙂", "—", "(or)", "a@b", "1,000"]
TEXTS = st.lists(st.sampled_from(VALUES + WORDS), max_size=12).map(" ".join)


@settings(deadline=None, max_examples=40)
@given(TEXTS)
def test_masking_leaves_no_value(text):
    masked = mask(text, find(text))
    assert not [value for value in VALUES if value in masked]
    assert find(masked) == []


@settings(deadline=None, max_examples=40)
@given(st.integers(WINDOW - 40, WINDOW + OVERLAP + 10), st.sampled_from(VALUES))
def test_a_long_text_is_searched_as_a_whole(before, value):
    """Wherever the pieces meet, in the value or beside it."""
    text = "word " * (before // 5) + "x" * (before % 5) + f" {value} " + "word " * 900
    assert mask(text, find(text)).count("<") == 1
    assert value not in mask(text, find(text))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 60), st.sampled_from(VALUES), TEXTS)
def test_an_excerpt_cuts_no_value_in_two(before, value, after):
    """Values at the cut are masked whole, so that no half of one is kept."""
    shown = excerpt("x" * (EXCERPT - before) + f" {value} {after}")
    assert value[:5] not in shown.replace("8.8.8", "8.8.8" * (value == "8.8.8.8"))
    assert len(shown) < 2 * EXCERPT


def row(*turns, system=None):
    return Row(source="set", licence="MIT", where="set.jsonl:1", id=None, turns=turns, system=system)


def test_policy():
    mails = row("Hi", "I am ana@example.com", system="Ask bob@example.com.")
    cleaned = PersonalData(PersonalPolicy())(mails)
    assert cleaned.turns == ("Hi", "I am <EMAIL_ADDRESS>")
    assert cleaned.system == "Ask <EMAIL_ADDRESS>."
    assert cleaned.masked == (Finding("EMAIL_ADDRESS", 4, 19, turn=None), Finding("EMAIL_ADDRESS", 5, 20, turn=1))
    assert PersonalData(PersonalPolicy(email_address="keep"))(mails) == mails
    dropped = PersonalData(PersonalPolicy(email_address="drop"))(mails)
    assert isinstance(dropped, Drop)
    assert dropped.found == cleaned.masked
    card = PersonalData(PersonalPolicy())(row("ana@example.com pays with 4242424242424242"))
    assert (card.reason, [one.type for one in card.found]) == ("personal_data", ["EMAIL_ADDRESS", "CREDIT_CARD"])
    clean = row("Hi")
    assert PersonalData(PersonalPolicy())(clean) is clean


def test_recall_and_precision_on_labelled_texts():
    path = SHARED / "pii" / "presidio_synth_v2.json.gz"
    if not path.exists():
        pytest.skip("the labelled texts are not beside this checkout")
    labelled, whole, found, wrong = Counter(), Counter(), Counter(), Counter()
    for text in json.loads(gzip.decompress(path.read_bytes())):
        findings = find(text["full_text"])
        spans = [span for span in text["spans"] if span["entity_type"] in TYPES]
        for span in spans:
            start, end = span["start_position"], span["end_position"]
            labelled[span["entity_type"]] += 1
            whole[span["entity_type"]] += any(one.start <= start and one.end >= end for one in findings)
        for one in findings:
            found[one.type] += 1
            wrong[one.type] += not any(span["start_position"] < one.end and span["end_position"] > one.start for span in spans)
    assert set(labelled) == set(TYPES)
    assert {type: whole[type] / labelled[type] for type in TYPES if type != "PHONE_NUMBER"} == dict.fromkeys(TYPES[:-1], 1.0)
    assert whole["PHONE_NUMBER"] / labelled["PHONE_NUMBER"] >= 0.95
    assert wrong.total() <= 0.02 * found.total()


@pytest.mark.parametrize("name", ["gsm8k_train", "tldr", "sgd_dev", "taskmaster4"])
def test_ordinary_prompts_are_left_alone(name):
    path = SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("the conversations are not beside this checkout")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line)["messages"] for line, _ in zip(lines, range(600), strict=False)]
    flagged = sum(any(find(message["content"]) for message in messages if message["role"] == "user") for messages in rows)
    assert flagged <= 0.01 * len(rows)
