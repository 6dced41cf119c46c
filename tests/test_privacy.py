"""The table of types, the search of a text, the key, and what the policy makes of a row."""

import dataclasses
import gzip
import itertools
import json
import logging
import os
import pickle
import re
import stat
import subprocess
import sys
import time
from multiprocessing import get_context

import phonenumbers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import privacy as benchmark
from eyas.data.filters import PersonalData, find_all_types
from eyas.data.ledger import Drop, SourceRow
from eyas.data.recall import measured
from eyas.data.sources import SourceConfig
from eyas.errors import ConfigError
from eyas.privacy import entities, patterns
from eyas.privacy.detector import (
    LIBRARIES,
    MARGIN,
    WINDOW,
    Detector,
    in_windows,
    recogniser_versions,
    versions,
)
from eyas.privacy.findings import Finding, join_overlaps, mask, replace
from eyas.privacy.key import key_id, key_path, keyed, privacy_key
from eyas.privacy.patterns import cards, phones
from eyas.privacy.pii import (
    EVERY_TYPE,
    NAME_TYPES,
    PII_TYPES,
    RANK,
    TYPES,
    PrivacyConfig,
    canonical,
    value_hash,
)
from eyas.privacy.spelling import plain
from tests.marks import KEY, NO_NAMES, PATTERNS, marked, unmarked
from tests.source_rows import real_rows

# The table


@pytest.mark.parametrize("kind", PII_TYPES, ids=lambda one: one.name)
def test_every_type_finds_its_example(kind):
    found, types = marked(unmarked(kind.example), Detector(EVERY_TYPE).find)
    assert found == kind.example
    assert types == {kind.name}


def test_a_type_is_either_searched_for_and_invented_or_a_name():
    assert len(set(TYPES)) == len(PII_TYPES)
    assert {one.name for one in PII_TYPES if one.surrogate is None} == {"PERSON"}
    assert set(NAME_TYPES) == {"PERSON", "STREET_ADDRESS", "LOCATION"}
    said = PrivacyConfig.model_fields["actions"].description
    assert all(one.name.lower() in said for one in PII_TYPES), "the help text names each"


def test_actions():
    config = PrivacyConfig(
        policy="mask", actions={"phone_number": "drop", "CREDIT_CARD": "surrogate"}
    )
    wanted = {"PHONE_NUMBER": "drop", "CREDIT_CARD": "surrogate", "EMAIL_ADDRESS": "mask"}
    wanted |= {"US_SSN": "drop", "URL": "keep"}
    assert {type: config.action(type) for type in wanted} == wanted
    assert "URL" not in config.types
    values = [(type, "", 0, 0) for type in ("PHONE_NUMBER", "EMAIL_ADDRESS", "API_KEY")]
    assert config.first_that_drops(values) == "API_KEY"
    assert config.first_that_drops(values[1:2]) is None
    assert PrivacyConfig(policy="drop").action("LOCATION") == "keep", "a place alone drops no row"
    assert pickle.loads(pickle.dumps(config)) == config
    assert PrivacyConfig.model_validate(config.model_dump(mode="json")) == config


def test_types_that_are_kept_are_not_found():
    text = "ana@example.com, 93.184.215.14 and https://www.python.org"
    for actions, found in (
        ({}, ["EMAIL_ADDRESS", "IP_ADDRESS"]),
        ({"email_address": "keep", "url": "mask"}, ["IP_ADDRESS", "URL"]),
    ):
        detector = Detector(PrivacyConfig(actions={**NO_NAMES, **actions}))
        assert [one.type for one in detector.find(text)] == found
    first, later = find_all_types([f"My name is Ida Brandvold. {text}", "sign it as brandvold"])
    assert {one.type for one in first} >= {"EMAIL_ADDRESS", "IP_ADDRESS", "URL"}
    assert [(one.start, one.end) for one in later] == [(11, 20)]


# Findings

SPANS = st.tuples(st.sampled_from(TYPES), st.integers(0, 30), st.integers(1, 9)).map(
    lambda one: Finding(one[0], one[1], one[1] + one[2])
)


@given(st.lists(SPANS), st.text(max_size=40))
def test_joined_findings_cover_the_same_places_without_overlap(findings, text):
    joined = join_overlaps(findings)
    assert all(first.end <= second.start for first, second in itertools.pairwise(joined))
    before, after = (
        {place for one in some for place in range(one.start, one.end)}
        for some in (findings, joined)
    )
    assert before == after
    for one in joined:
        within = (two for two in findings if one.start <= two.start and two.end <= one.end)
        inside = [two.type for two in within]
        assert one.type == min(inside, key=RANK.__getitem__)
    inside = [one for one in joined if one.end <= len(text)]
    assert replace(text, inside, [text[one.start : one.end] for one in inside]) == text


VALUES = ["ana.lee@example.com", "(415) 555-0134", "4242 4242 4242 4242", "GB29NWBK60161331926819"]
VALUES += ["219-45-9876", "93.184.215.14"]
WORDS = ["please", "the card.", "Thanks!", "at 7:30", "é", "🙂", "—", "(or)", "a@b", "1,000"]
TEXTS = st.lists(st.sampled_from([*VALUES, *WORDS, "for 2 people", "\n"]), max_size=12)


@settings(deadline=None, max_examples=40)
@given(TEXTS.map(" ".join))
def test_masking_leaves_no_value(text):
    masked = mask(text, PATTERNS.find(text))
    assert not [value for value in VALUES if value in masked]
    assert PATTERNS.find(masked) == []


# Long texts

PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\n"
    + "MIIEpAIBAAKCAQEA7bq3\n" * 150
    + "-----END RSA PRIVATE KEY-----"
)


@settings(deadline=None, max_examples=40)
@given(st.integers(WINDOW - MARGIN, WINDOW + 2 * MARGIN), st.sampled_from([*VALUES, PEM]))
def test_a_long_text_is_searched_as_a_whole(before, value):
    """Wherever the pieces meet, and for a value that is longer than a piece."""
    text = "word " * (before // 5) + "x" * (before % 5) + f", {value} " + "word " * 900
    assert mask(text, PATTERNS.find(text)).count("<") == 1
    assert value not in mask(text, PATTERNS.find(text))


@settings(deadline=None, max_examples=80)
@given(
    st.integers(-MARGIN, 2 * MARGIN),
    st.sampled_from(
        ["9" * 200 + "4242424242424242", "4242424242424242" + "9" * 200, "7" * 90 + "-4155550134"]
    ),
)
def test_a_piece_begins_and_ends_inside_no_number(offset, number):
    text = "x" * (WINDOW + offset) + f" {number} " + "y " * WINDOW
    for find in (cards, phones):
        assert list(in_windows(find, text)) == list(find(text)) == []


HARD = {
    "digits": "1 " * 3_000,  # a run of digits has many beginnings and ends
    "letters": "a" * 40_000,
    "at": "@" * 40_000,
    "local parts": "a@" * 20_000,
    "dots": "a." * 20_000,
    "signs": "=" * 40_000,
    "hosts": "a@" + "a." * 20_000,
    "schemes": "://a:" * 8_000,
    "tokens": "eyJ" * 13_000,
    "passwords": "password is " * 3_000,
    "headings": "-----BEGIN PRIVATE KEY-----" * 1_500,
    "prefixes": "sk-" * 13_000,
    "names of keys": "api_key=" * 5_000,
    "hexadecimal": "0x" * 20_000,
    "quads": "1.1." * 10_000,
    "colons": "::" * 20_000,
}


@pytest.mark.parametrize("name", HARD)
def test_a_hard_text_is_searched_to_its_end(name):
    assert PATTERNS.find(f"{HARD[name]} ana@example.com")[-1].type == "EMAIL_ADDRESS"


def test_a_table_of_single_signs_takes_linear_time():
    """They are like the letters of an address that stand apart: 64,000 took half a minute."""
    before = time.process_time()
    spelt = plain("0 1 " * 16_000 + "look at a n n a @ w e b . d e")
    assert spelt.text.endswith("look at anna@web.de")
    assert time.process_time() - before < 8


def test_a_page_of_small_numbers_takes_few_looks(monkeypatch):
    """At what stands beside them: 15,000 characters took 100,000 looks."""
    looks, says = [], patterns.says
    monkeypatch.setattr(patterns, "says", lambda *args, **more: looks.append(1) or says(*args))
    page = " ".join(str(17 * number % 90 + 10) for number in range(5000))
    between = "so it goes. " * 9
    text = f"{page}\n{between}my phone is 45 12 88 61. {between}{page}"
    assert [text[start:end] for start, end in phones(text)] == ["45 12 88 61"]
    assert len(looks) < 5000


def test_a_page_of_numbers_that_begin_with_0_asks_for_few_countries(monkeypatch):
    """Of each run all countries were asked, 40,000 times: 7 s."""
    asked, parse = [], phonenumbers.parse
    monkeypatch.setattr(phonenumbers, "parse", lambda *args: asked.append(args) or parse(*args))
    page = " ".join(f"0{17 * number % 900}" for number in range(3500))
    lines = "\n".join(
        " ".join(f"0{13 * number % 90:03d}" for number in range(7)) for _ in range(300)
    )
    assert not list(phones(page))
    assert len(asked) < 10
    list(phones(lines))
    assert len(asked) < 5000
    two = "Anna, 06 12 34 56 78 06 98 76 54 32"
    assert "".join(two[start:end] for start, end in phones(two)) == "06 12 34 56 7806 98 76 54 32"


# Nothing leaves


def test_nothing_is_fetched_and_no_model_is_loaded(tmp_path):
    """In a new process with the network cut; the language is told too."""
    script = (
        "import socket, sys\n"
        "def cut(*args, **kwargs): raise SystemExit('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = cut\n"
        "import eyas.chat, eyas.records, eyas.train\n"
        "assert 'eyas.privacy' not in sys.modules\n"
        "before = set(sys.modules)\n"
        "from eyas.privacy.detector import Detector\n"
        "from eyas.privacy.pii import PrivacyConfig\n"
        "text = 'Please write to me today: ana@example.com, AKIAIOSFODNN7EXAMPLE'\n"
        "found = Detector(PrivacyConfig()).find(text)\n"
        "assert [one.type for one in found] == ['EMAIL_ADDRESS', 'API_KEY'], found\n"
        "extra = {'google.cloud', 'torch'}\n"
        "assert not extra & set(sys.modules) - before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_value_reaches_a_log(caplog):
    examples = [unmarked(one.example) for one in PII_TYPES]
    for text in (*examples, "IBAN ÄB29NWBK60161331926819", "ssn 219-45-9876 " * 200):
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            findings = PATTERNS.find(text)
        values = [text[one.start : one.end] for one in findings]
        logged = [record.getMessage() for record in caplog.records]
        assert not [value for value in values for line in logged if value in line]
        assert not [value for value in values if value in repr(findings)]


def test_versions_name_every_library_that_decides():
    assert set(versions()) == {"phonenumbers", "patterns", "tagger", *LIBRARIES}
    assert all(versions().values())


def test_what_the_tagger_takes_for_a_name_is_in_its_version(monkeypatch):
    before = recogniser_versions(PrivacyConfig())
    assert before == {"eyas": versions()["tagger"]}
    for name, value in {"THRESHOLDS": {}, "GROWS": 0.5, "PIECE": 9, "BOTH": 8}.items():
        monkeypatch.setattr(entities, name, value)
        assert recogniser_versions(PrivacyConfig()) != before
        before = recogniser_versions(PrivacyConfig())


# The key


def test_a_hash_tells_equal_values_and_nothing_else():
    text = "4242 4242 4242 4242, 4242-4242-4242-4242 and 5555 5555 5555 4444"
    one, two, three = PATTERNS.find(text)
    assert one.hash == two.hash != three.hash
    assert len(one.hash) == 16
    other = Detector(PrivacyConfig(), b"other").find("4242 4242 4242 4242")[0]
    assert other.hash != one.hash
    assert Detector(PrivacyConfig()).find("4242 4242 4242 4242")[0].hash == ""
    person = value_hash(KEY, "PERSON", "Ada  Berg")
    assert person == value_hash(KEY, "PERSON", "ADA BERG") != value_hash(KEY, "URL", "ada berg")
    assert canonical("PHONE_NUMBER", "(415) 555-0134") == "4155550134"
    assert canonical("HANDLE", "@Ana_Lee") == "ana_lee"


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_no_two_lists_of_parts_have_one_hash(first, second):
    assert (keyed(KEY, *first) == keyed(KEY, *second)) == (first == second)


@pytest.fixture
def key_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("EYAS_PRIVACY_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "eyas"


def test_the_key_is_made_once_for_this_user_alone(key_folder):
    with get_context("fork").Pool(8) as pool:
        (key,) = set(pool.starmap(privacy_key, [()] * 8))
    assert len(key) == 32
    assert privacy_key() == key
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert os.listdir(key_folder) == ["privacy.key"]
    assert key.hex() not in key_id(key)


def _readable(folder, monkeypatch):
    privacy_key()
    key_path().chmod(0o644)


def _damaged(folder, monkeypatch):
    privacy_key()
    key_path().write_bytes(b"short")


def _file_for_a_folder(folder, monkeypatch):
    folder.write_text("a file where the folder should be")


def _guessed(folder, monkeypatch):
    monkeypatch.setenv("EYAS_PRIVACY_KEY", "guessed")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_readable, "others can read"),
        (_damaged, "damaged"),
        (_file_for_a_folder, "EYAS_PRIVACY_KEY"),
        (_guessed, "shorter than 16"),
        (lambda *_: PrivacyConfig(actions={"shoe_size": "drop"}), "SHOE_SIZE"),
    ],
)
def test_refusals(edit, says, key_folder, monkeypatch):
    with pytest.raises(ConfigError, match=says) as caught:  # noqa: PT012 - some edits refuse
        edit(key_folder, monkeypatch)
        privacy_key()
    assert "guessed" not in str(caught.value)


# Rows


def row(*turns, system=None):
    return SourceRow(
        source="set", licence="MIT", where="set.jsonl:1", id=None, turns=turns, system=system
    )


def filter_of(policy="mask", **actions):
    return PersonalData(PrivacyConfig(policy=policy, actions={**NO_NAMES, **actions}), KEY)


MAILS = row("Hi", "I am ana@python.org", system="Ask bob@python.org.")


def test_a_row_is_masked_wherever_something_is_found():
    cleaned = filter_of()(MAILS)
    assert cleaned.turns == ("Hi", "I am <EMAIL_ADDRESS>")
    assert cleaned.system == "Ask <EMAIL_ADDRESS>."
    bob, ana = (value_hash(KEY, "EMAIL_ADDRESS", f"{one}@python.org") for one in ("bob", "ana"))
    assert cleaned.masked == (
        Finding("EMAIL_ADDRESS", 4, 18, turn=None, hash=bob),
        Finding("EMAIL_ADDRESS", 5, 19, turn=1, hash=ana),
    )
    assert filter_of()(cleaned).turns == cleaned.turns, "nothing is left to find"
    assert filter_of(email_address="keep")(MAILS).turns == MAILS.turns
    clean = row("Hi", system="")
    assert dataclasses.replace(filter_of()(clean), names=()) == clean


def test_a_type_that_drops_takes_the_row_and_names_the_gravest():
    dropped = filter_of(email_address="drop")(MAILS)
    assert isinstance(dropped, Drop)
    assert dropped.reason == "pii.email_address"
    assert [(one.start, one.end, one.turn) for one in dropped.found] == [(4, 18, None), (5, 19, 1)]
    card = filter_of("drop")(row("ana@python.org pays with 4242424242424242"))
    assert card.reason == "pii.credit_card"
    assert [one.type for one in card.found] == ["EMAIL_ADDRESS", "CREDIT_CARD"]
    assert "4242" not in repr(card)
    assert "ana@" not in repr(card)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("call me at +1 (212) 736-5000", "2127365000 it is"),
        ("call 212-736-5000", "it is 12127365000"),
        ("ring 020 7946 0958", "from abroad +44 20 7946 0958"),
        ("ring +44 20 7946 0958", "here 02079460958"),
        ("my number is 212 736 5000", "in words two one two, seven three six, five zero zero zero"),
        ("card 4242 4242 4242 4242", "4242-4242-42424242 once more"),
    ],
)
def test_a_number_in_two_spellings_goes_from_both(first, second):
    made = filter_of("surrogate", credit_card="surrogate")(row(first, second))
    left, right = (re.sub(r"\D", "", turn) for turn in made.turns)
    assert not any(one in left + right for one in ("7365000", "79460958", "42424242424242"))
    assert left[-7:] == right[-7:], "and one number takes the place of both"


def test_a_number_without_a_word_for_it_is_replaced_and_drops_no_row():
    for cued, bare in (
        ("my card 4242 4242 4242 4242", "for 4242 4242 4242 4242 of them"),
        ("SSN 219-45-9876", "between 219-45-9876 and it"),
        ("CPF 390.533.447-05", "about 390.533.447-05 then"),
    ):
        assert isinstance(filter_of()(row(cued)), Drop)
        kept = filter_of()(row(bare))
        assert kept.turns != (bare,)
        assert isinstance(filter_of("drop")(row(bare)), Drop)


def test_a_value_has_one_surrogate_in_a_conversation():
    turns = ("I am ana@python.org", "ANA@python.org, not bob@python.org")
    made = filter_of("surrogate")(row(*turns, system="To ana@python.org"))
    ana = made.turns[0].removeprefix("I am ")
    assert ana.partition("@")[2] in ("example.com", "example.org", "example.net")
    assert made.system == f"To {ana}"
    assert made.turns[1].startswith(f"{ana}, not ")
    assert not made.turns[1].endswith(ana)
    assert len(made.masked) == 4
    assert "python.org" not in repr(made)


def test_names_are_replaced_by_default():
    made = PersonalData(PrivacyConfig(), KEY)(
        row("My name is Susan Miller.", "Tell me, is Susan a common name?")
    )
    given = made.turns[0].removeprefix("My name is ").split()[0]
    assert made.turns[1] == f"Tell me, is {given} a common name?"
    assert "Susan" not in repr(made)


def test_rows_that_differ_in_their_values_alone_become_the_same():
    texts = [
        "Write to ana@python.org or call (415) 555-0134.",
        "Write to bob@gnu.org or call (617) 555-0199.",
    ]
    for policy in ("surrogate", "mask"):
        first, second = (filter_of(policy)(row(text)).turns for text in texts)
        assert first == second
    other = filter_of("surrogate")(row(f"Please w{texts[0][1:]}"))
    same = filter_of("surrogate")(row(texts[0]))
    assert other.turns[0] != f"Please w{same.turns[0][1:]}", "another conversation"


def test_the_key_decides_the_surrogates_and_nothing_else_does():
    config = PrivacyConfig(actions=NO_NAMES)
    first, again, other = (PersonalData(config, key)(MAILS) for key in (KEY, KEY, b"another"))
    assert first == again
    assert first.turns != other.turns
    assert [one.hash for one in first.masked] != [one.hash for one in other.masked]
    rows = [MAILS, row("Hi"), row("4242424242424242"), row("I am carl@python.org", system="Hi.")]
    keep = filter_of("surrogate")
    assert keep.many(rows) == [keep(one) for one in rows]
    assert keep.many([]) == []


def test_a_row_says_where_names_were_searched_for():
    spoken = row("My name is Susan Miller.", "Please read this:\n```\nlen(nums)\n```")
    found = PersonalData(PrivacyConfig(), KEY)(spoken).names
    assert {(one.by, one.reason) for one in found} == {("eyas", ""), ("", "code")}
    assert sum(one.characters for one in found) == spoken.characters
    for reason, config in {
        "policy": PrivacyConfig(actions=NO_NAMES),
        "fictional": PrivacyConfig(fictional=True),
    }.items():
        (names,) = {(one.by, one.reason) for one in PersonalData(config, KEY)(spoken).names}
        assert names == ("", reason)


def test_a_source_has_a_policy_of_its_own():
    of_run, own = PrivacyConfig(policy="drop"), PrivacyConfig(actions={"person": "mask"})
    assert SourceConfig(path="x").privacy(of_run) == of_run
    assert SourceConfig(path="x", personal=own).privacy(of_run) == own
    invented = SourceConfig(path="x", fictional=True).privacy(of_run)
    assert {type for type in TYPES if invented.action(type) == "keep"} == {*NAME_TYPES, "URL"}
    masked = invented.model_copy(update={"policy": "mask"})
    assert PersonalData(masked, KEY)(row("Susan has 3 apples. Mail ana@python.org.")).turns == (
        "Susan has 3 apples. Mail <EMAIL_ADDRESS>.",
    )


# Texts of others


def test_recall_and_precision_on_labelled_texts():
    """Recall to the digit as the data card states it; none of the sentences was trained on."""
    if not benchmark.LABELLED.exists():
        pytest.skip("the labelled texts are not beside this checkout")
    texts = json.loads(gzip.decompress(benchmark.LABELLED.read_bytes()))
    assert benchmark.recall_by_type(texts) == measured()["types"]
    judged = benchmark.judge(texts, benchmark.search(texts, EVERY_TYPE))
    assert judged["recall"]["by patterns"]["share"] >= 0.99
    precision = {type: one["share"] for type, one in judged["precision"].items()}
    assert min(precision.pop(type) for type in ("PERSON", "LOCATION")) >= 0.77
    assert precision.pop("STREET_ADDRESS") >= 0.9
    assert min(precision.values()) >= 0.96


@pytest.mark.parametrize("name", ["gsm8k_train", "tldr", "sgd_dev", "taskmaster4"])
def test_ordinary_prompts_are_left_alone(name):
    rows = real_rows(name, 600)
    assert sum(any(map(PATTERNS.find, one.turns)) for one in rows) <= 0.01 * len(rows)
