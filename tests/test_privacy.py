"""Personal data by patterns and checks: what is found and what is not, what masking leaves, that
nothing is fetched or logged.
"""

import gzip
import itertools
import json
import logging
import os
import stat
import subprocess
import sys
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import ConfigError
from eyas.privacy.detector import LIBRARIES, OVERLAP, WINDOW, Detector, versions
from eyas.privacy.findings import Finding, join_overlaps, mask, replace
from eyas.privacy.identifiers import IDENTIFIERS, is_national_id, national_ids
from eyas.privacy.key import canonical, key_id, key_path, keyed, privacy_key, value_hash
from eyas.privacy.patterns import is_base58check, is_bech32, luhn
from eyas.privacy.pii import EVERY_TYPE, RANK, TYPES, PrivacyConfig

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
KEY = b"k" * 32
PATTERNED = set(TYPES) - {"PERSON", "STREET_ADDRESS", "LOCATION"}
NO_NAMES = {"person": "keep", "street_address": "keep", "location": "keep"}
PATTERNS = Detector(PrivacyConfig(policy="mask", actions={**NO_NAMES, "url": "mask"}), KEY)

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
    "Social Security number: 219459876": "Social Security number: <US_SSN>",
    "from 8.8.8.8 and 2a00:1450:4001:81b::200e": "from <IP_ADDRESS> and <IP_ADDRESS>",
    "see https://www.python.org/downloads/, or www.gnu.org.": "see <URL>, or <URL>.",
    "(http://a.org/x?y=1#z)": "(<URL>)",
    "psql postgres://bob:hunter22@db.internal:5432/shop now": "psql <URL_CREDENTIALS> now",
    "https://api.acme.io/v1?access_token=a1b2c3d4e5f6&x=1": "<URL_CREDENTIALS>",
    "send it to 1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa": "send it to <CRYPTO>",
    "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4,": "<CRYPTO>,",
    "bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vqzk5jj0": "<CRYPTO>",
    "BC1QW508D6QEJXTDG4Y5R3ZARVARY0C5XW7KV8F3T4": "<CRYPTO>",
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed!": "<CRYPTO>!",
    "0x5AAeb6053F3E94C9b9A09f33669435E7Ef1BeAed too": "<CRYPTO> too",
}
# One of each kind, from its country's own documentation or python-stdnum's.
NATIONAL = {
    "US ITIN": "912-90-3456",
    "UK NINO": "NI number AB 12 34 56 C",
    "UK NHS": "NHS number 943 476 5919",
    "IE PPS": "6433435F",
    "ES DNI": "DNI 54362315K",
    "ES NIE": "X-2482300W",
    "IT codice fiscale": "RCCMNL83S18D969H",
    "FR NIR": "2 95 10 99 126 111 93",
    "DE Steuer-ID": "Steuer-ID 36 574 261 809",
    "CH AHV": "756.9217.0769.85",
    "NL BSN": "BSN: 111222333",
    "BE rijksregister": "85.07.30-033.28",
    "PT NIF": "NIF 501 964 843",
    "PL PESEL": "PESEL 44051401359",
    "CZ, SK rodné číslo": "710319/2745",
    "SE personnummer": "880320-0016",
    "FI henkilötunnus": "131052-308T",
    "DK CPR": "CPR 211062-5629",
    "NO fødselsnummer": "151086 95088",
    "RO CNP": "CNP 1630615123457",
    "BG EGN": "EGN 7523169263",
    "HR OIB": "OIB 33392005961",
    "GR AMKA": "AMKA 01013099997",
    "TR kimlik": "TC Kimlik No 17291716060",
    "IL teudat zehut": "teudat zehut 039337423",
    "ZA ID": "ID number 7503305044089",
    "BR CPF": "390.533.447-05",
    "BR CPF, bare": "cpf 39053344705",
    "CL RUT": "12.531.909-2",
    "AR CUIT": "20-05536168-2",
    "MX CURP": "BOXW310820HNERXN09",
    "CA SIN": "SIN 123-456-782",
    "AU TFN": "tax file number 123 456 782",
    "IN PAN": "ACUPA7085R",
    "IN Aadhaar": "Aadhaar 2341 2341 2346",
    "SG NRIC": "S1234567D",
    "TH PIN": "1-2345-45678-78-1",
    "KR RRN": "971013-9019902",
    "JP My Number": "My Number 6214 9832 0257",
    "CN resident ID": "360426199101010071",
    "document": "passport number C01X00T47",
}
UNCHECKED = ("US ITIN", "UK NINO", "DK CPR", "IN PAN", "document")  # form and ranges alone
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
    "000-12-3456, 666-12-3456 and 900-12-3456 are never assigned",
    "36 574 261 809 and 130692544 without a word beside them",
    "your passport was renewed in 2019",
    "git commit 5aaeb6053f3e94c9b9a09f33669435e7ef1beaed",
    "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNb has a wrong check",
    "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t5 and bc1Qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4",
]


def test_found_and_not_found():
    assert {text: mask(text, PATTERNS.find(text)) for text in FOUND} == FOUND
    assert {text: found for text in NOT_FOUND if (found := PATTERNS.find(text))} == {}


def test_national_numbers_are_found():
    assert list(NATIONAL) == [kind.name for kind in IDENTIFIERS]
    for kind, value in NATIONAL.items():
        text = f"Hello, {value}."
        found = [text[one.start : one.end] for one in national_ids(text)]
        assert found, kind
        assert all(text.endswith(f"{one}.") for one in found), kind
        assert "<NATIONAL_ID>." in mask(text, PATTERNS.find(text)), kind


def test_a_wrong_check_is_no_national_number():
    """Of the ten last digits or twenty-six last letters, few are right."""
    for kind, value in NATIONAL.items():
        if kind not in UNCHECKED:
            last = "0123456789" if value[-1].isdigit() else "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
            changed = [value[:-1] + one for one in last]
            assert 1 <= sum(bool(list(national_ids(one))) for one in changed) <= 3, kind


@pytest.mark.parametrize(
    ("valid", "address"),
    [
        (is_base58check, "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa"),
        (is_base58check, "LM2WMpR1Rp6j3Sa59cMXMs1SPzj9eXpGc1"),
        (is_bech32, "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4"),
        (is_bech32, "bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vqzk5jj0"),
    ],
)
def test_one_changed_letter_fails_a_wallets_check(valid, address):
    """Addresses of the Bitcoin and Litecoin documentation, of BIP 173 and BIP 350."""
    assert valid(address)
    changed = [
        address[:at] + ("2" if address[at] != "2" else "3") + address[at + 1 :]
        for at in range(4, len(address))
    ]
    assert not any(map(valid, changed))


def test_nothing_is_fetched_and_nothing_is_cached(tmp_path):
    """In a new process, where the first use of the suffix list and of Presidio happens, with the
    network cut. Presidio is loaded by the detector alone.
    """
    script = (
        "import socket, sys\n"
        "def cut(*args, **kwargs): raise SystemExit('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = cut\n"
        "import eyas.chat, eyas.records, eyas.train\n"
        "assert 'eyas.privacy' not in sys.modules\n"
        "before = set(sys.modules)\n"
        "import eyas.privacy.cloud, eyas.privacy.entities, eyas.privacy.secrets\n"
        "import eyas.privacy.surrogates\n"
        "from eyas.privacy.pii import PrivacyConfig\n"
        "assert not {'presidio_analyzer', 'spacy', 'torch'} & set(sys.modules) - {*before}\n"
        "from eyas.privacy.detector import Detector\n"
        "found = Detector(PrivacyConfig()).find('ana@example.com, AKIAIOSFODNN7EXAMPLE')\n"
        "assert [one.type for one in found] == ['EMAIL_ADDRESS', 'API_KEY'], found\n"
    )
    places = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "TLDEXTRACT_CACHE": str(tmp_path / "tld"),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=places, capture_output=True, text=True, check=False
    )
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
    joined = join_overlaps(findings)
    assert all(first.end <= second.start for first, second in itertools.pairwise(joined))
    places = [
        {place for one in some for place in range(one.start, one.end)}
        for some in (findings, joined)
    ]
    assert places[0] == places[1]
    for one in joined:
        inside = [
            finding.type
            for finding in findings
            if one.start <= finding.start and finding.end <= one.end
        ]
        assert one.type == min(inside, key=RANK.__getitem__)


@given(st.lists(SPANS), st.text(max_size=40))
def test_putting_values_back_gives_the_text(findings, text):
    inside = [one for one in join_overlaps(findings) if one.end <= len(text)]
    assert replace(text, inside, [text[one.start : one.end] for one in inside]) == text


VALUES = [
    "ana.lee@example.com",
    "(415) 555-0134",
    "4242 4242 4242 4242",
    "GB29NWBK60161331926819",
    "219-45-9876",
    "8.8.8.8",
]
WORDS = [
    "please",
    "call",
    "the",
    "card.",
    "Thanks!",
    "for 2 people",
    "at 7:30",
    "\n",
    "é",
    "🙂",
    "—",
    "(or)",
    "a@b",
    "1,000",
]
TEXTS = st.lists(st.sampled_from(VALUES + WORDS), max_size=12).map(" ".join)


@settings(deadline=None, max_examples=40)
@given(TEXTS)
def test_masking_leaves_no_value(text):
    masked = mask(text, PATTERNS.find(text))
    assert not [value for value in VALUES if value in masked]
    assert PATTERNS.find(masked) == []


PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\n"
    + "MIIEpAIBAAKCAQEA7bq3\n" * 150
    + "-----END RSA PRIVATE KEY-----"
)


@settings(deadline=None, max_examples=40)
@given(st.integers(WINDOW - 40, WINDOW + OVERLAP + 10), st.sampled_from([*VALUES, PEM]))
def test_a_long_text_is_searched_as_a_whole(before, value):
    """Wherever the pieces meet, in the value or beside it, and for a value that is longer than a
    piece.
    """
    text = "word " * (before // 5) + "x" * (before % 5) + f" {value} " + "word " * 900
    assert mask(text, PATTERNS.find(text)).count("<") == 1
    assert value not in mask(text, PATTERNS.find(text))


HARD = {
    "digits": "1 " * 3_000,  # a run of digits has many beginnings and ends
    "letters": "a" * 40_000,
    "at": "@" * 40_000,
    "local parts": "a@" * 20_000,
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


def test_a_hard_text_is_searched_to_its_end(caplog):
    """Presidio gives a pattern up after a minute with no more than a line in the log."""
    for name, text in HARD.items():
        assert PATTERNS.find(f"{text} ana@example.com")[-1].type == "EMAIL_ADDRESS", name
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_hash_tells_equal_values_and_nothing_else():
    one, two, three = PATTERNS.find(
        "4242 4242 4242 4242, 4242-4242-4242-4242 and 5555 5555 5555 4444"
    )
    assert one.hash == two.hash != three.hash
    assert len(one.hash) == 16
    other = Detector(PrivacyConfig(), b"other").find("4242 4242 4242 4242")[0]
    assert other.hash != one.hash
    assert Detector(PrivacyConfig()).find("4242 4242 4242 4242")[0].hash == ""
    assert (
        value_hash(KEY, "PERSON", "Ada  Berg")
        == value_hash(KEY, "PERSON", "ADA BERG")
        != value_hash(KEY, "URL", "ada berg")
    )
    assert canonical("PHONE_NUMBER", "(415) 555-0134") == "4155550134"


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_no_two_lists_of_parts_have_one_hash(first, second):
    assert (keyed(KEY, *first) == keyed(KEY, *second)) == (first == second)


def test_the_key_is_made_once_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("EYAS_PRIVACY_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    key = privacy_key()
    assert len(key) == 32
    assert privacy_key() == key
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert os.listdir(key_path().parent) == ["privacy.key"]
    assert key.hex() not in key_id(key)
    key_path().chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        privacy_key()
    key_path().chmod(0o600)
    key_path().write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        privacy_key()
    monkeypatch.setenv("EYAS_PRIVACY_KEY", "a key that nobody can guess")
    assert len(privacy_key()) == 32 != key
    monkeypatch.setenv("EYAS_PRIVACY_KEY", "guessed")
    with pytest.raises(ConfigError, match="shorter than 16") as caught:
        privacy_key()
    assert "guessed" not in str(caught.value)


def test_processes_that_come_at_once_get_one_key(tmp_path, monkeypatch):
    monkeypatch.delenv("EYAS_PRIVACY_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with get_context("fork").Pool(8) as pool:
        keys = pool.starmap(privacy_key, [()] * 8)
    assert len(set(keys)) == 1


def test_a_key_file_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    monkeypatch.delenv("EYAS_PRIVACY_KEY", raising=False)
    (tmp_path / "eyas").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="EYAS_PRIVACY_KEY"):
        privacy_key()


def test_actions():
    config = PrivacyConfig(
        policy="mask", actions={"phone_number": "drop", "CREDIT_CARD": "surrogate"}
    )
    wanted = {
        "PHONE_NUMBER": "drop",
        "CREDIT_CARD": "surrogate",
        "EMAIL_ADDRESS": "mask",
        "US_SSN": "drop",
        "URL": "keep",
    }
    assert {type: config.action(type) for type in wanted} == wanted
    assert "URL" not in config.types
    assert config.first_that_drops(["PHONE_NUMBER", "EMAIL_ADDRESS", "API_KEY"]) == "API_KEY"
    assert config.first_that_drops(["EMAIL_ADDRESS"]) is None
    assert PrivacyConfig(policy="drop").action("LOCATION") == "keep", "a place alone drops no row"
    with pytest.raises(ConfigError, match="SHOE_SIZE"):
        PrivacyConfig(actions={"shoe_size": "drop"})


def test_types_that_are_kept_are_not_found():
    text = "ana@example.com, 8.8.8.8 and https://www.python.org"
    every = Detector(PrivacyConfig(actions=NO_NAMES))
    assert [one.type for one in every.find(text)] == ["EMAIL_ADDRESS", "IP_ADDRESS"]
    some = Detector(PrivacyConfig(actions={**NO_NAMES, "email_address": "keep", "url": "mask"}))
    assert [one.type for one in some.find(text)] == ["IP_ADDRESS", "URL"]
    assert {"EMAIL_ADDRESS", "IP_ADDRESS", "URL"} <= {
        one.type for one in Detector(EVERY_TYPE).find(text)
    }


def test_no_value_reaches_a_log(caplog):
    for text in (*FOUND, "IBAN ÄB29NWBK60161331926819", "ssn 219-45-9876 " * 200):
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            findings = PATTERNS.find(text)
        values = [text[one.start : one.end] for one in findings]
        logged = [record.getMessage() for record in caplog.records]
        assert not [value for value in values for line in logged if value in line]
        assert not [value for value in values if value in repr(findings)]


def test_versions_name_every_library_that_decides():
    assert set(versions()) == set(LIBRARIES)
    assert all(versions().values())


def test_recall_and_precision_on_labelled_texts():
    path = SHARED / "pii" / "presidio_synth_v2.json.gz"
    if not path.exists():
        pytest.skip("the labelled texts are not beside this checkout")
    ours = {"DOMAIN_NAME": "URL", "US_DRIVER_LICENSE": "NATIONAL_ID"}
    labelled, whole, found, wrong = Counter(), Counter(), Counter(), Counter()
    for text in json.loads(gzip.decompress(path.read_bytes())):
        findings = PATTERNS.find(text["full_text"])
        # a birth date is one of the set's dates, of which most are not
        dates = [
            (span["entity_type"], span["start_position"], span["end_position"])
            for span in text["spans"]
            if span["entity_type"] == "DATE_TIME"
        ]
        spans = [
            (ours.get(span["entity_type"], span["entity_type"]), span) for span in text["spans"]
        ]
        spans = [
            (type, span["start_position"], span["end_position"])
            for type, span in spans
            if type in PATTERNED
        ]
        for type, start, end in spans:
            labelled[type] += 1
            whole[type] += any(one.start <= start and one.end >= end for one in findings)
        for one in findings:
            found[one.type] += 1
            wrong[one.type] += not any(
                start < one.end and end > one.start for _, start, end in (*spans, *dates)
            )
    assert whole.total() >= 0.97 * labelled.total()
    assert {
        type: whole[type] / labelled[type] for type in labelled if type != "PHONE_NUMBER"
    } == dict.fromkeys(labelled.keys() - {"PHONE_NUMBER"}, 1.0)
    assert whole["PHONE_NUMBER"] / labelled["PHONE_NUMBER"] >= 0.95
    assert wrong.total() <= 0.02 * found.total()


@pytest.mark.parametrize("name", ["gsm8k_train", "tldr", "sgd_dev", "taskmaster4"])
def test_ordinary_prompts_are_left_alone(name):
    """By patterns, links not counted."""
    path = SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("the conversations are not beside this checkout")
    detector = Detector(PrivacyConfig(actions=NO_NAMES))
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line)["messages"] for line, _ in zip(lines, range(600), strict=False)]
    users = [
        [message["content"] for message in messages if message["role"] == "user"]
        for messages in rows
    ]
    assert sum(any(map(detector.find, texts)) for texts in users) <= 0.01 * len(rows)


def test_alone_most_national_numbers_need_a_word_beside_them():
    assert is_national_id("54362315K")
    assert not is_national_id("54362315A")
    assert is_national_id("44051401359"), "the check alone does not ask for the word"
    assert PATTERNS.find("44051401359") == []
